"""What a launcher of many ranks costs: memory, open files, seconds until all are heard, processor at rest.

    python -m benchmarks.launcher --ranks 1024 --seconds 20

Ranks are stand-ins: forked processes that say once a second that they are at a step, as ranks do, and end
when they are asked to. A real rank has 146 MB of libraries, so that one machine does not hold a thousand. All
else is the launcher's own: lines, logs, limits, the watch, the stop.
"""

from __future__ import annotations

import argparse
import os
import resource
import select
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.keeping import keep_as
from plait.core.runs.channel import Beat, Channel, Stop
from plait.core.runs.progress import Progress
from plait.launch.local.local import Forked, run_ranks
from plait.launch.watch import RunGuard

BEAT = 1.0
"""Seconds between two words of a rank."""


def forked(rank: int, *, env: Mapping[str, str], pass_fds: Sequence[int], **_: Any) -> Forked:
    """A rank that says that it is there until it is asked to end."""
    if pid := os.fork():
        return Forked(pid)
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os._exit(_stand_in(int(env["PLAIT_LAUNCHER"]), pass_fds))
    finally:
        os._exit(1)


def _stand_in(line: int, kept: Sequence[int]) -> int:
    import socket

    channel, step = Channel(socket.socket(fileno=line)), 0
    os.closerange(3, min(kept))
    os.closerange(max(kept) + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    ready = select.poll()  # select() knows descriptors below 1,024 alone
    ready.register(channel, select.POLLIN)
    while True:
        channel.send(Beat("training", step))
        step += 1
        until = time.monotonic() + BEAT
        while (left := until - time.monotonic()) > 0:
            if ready.poll(1000 * left) and isinstance(said := channel.receive(), Stop):
                return said.status


class Heard(Progress):
    """Notes when every rank has spoken."""

    def __init__(self, ranks: int, then: Callable[[], None]) -> None:
        super().__init__(ranks)
        self._left, self._then = set(range(ranks)), then

    def heard(self, rank: int, step: int, now: float, writing: int = 0) -> None:
        """A word of a rank."""
        super().heard(rank, step, now, writing)
        if self._left:
            self._left.discard(rank)
            if not self._left:
                self._then()


def measured(ranks: int, seconds: float, folder: Path) -> dict[str, float]:
    """Run them, look for so many seconds once all are there, and stop them."""
    soft = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1024)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    found, signals, began, before = dict[str, float](), deque[int](), time.monotonic(), memory()

    def all_there() -> None:
        found["seconds until all were heard"] = time.monotonic() - began
        threading.Thread(target=rests, daemon=True).start()

    def rests() -> None:
        time.sleep(1.0)
        spent, at = time.process_time(), time.monotonic()
        time.sleep(seconds)
        found["processor at rest, percent"] = 100 * (time.process_time() - spent) / (time.monotonic() - at)
        found["memory of the launcher, MiB"] = memory()
        found["of it for ranks, MiB"] = memory() - before
        found["open files"] = len(os.listdir("/proc/self/fd"))
        found["stopping at"] = time.monotonic()
        signals.append(signal.SIGTERM)

    guard = RunGuard(progress=Heard(ranks, all_there))
    status = run_ranks(forked, ranks, folder / "logs", timeout=600.0, guard=guard, signals=signals)
    found["seconds until all had ended"] = time.monotonic() - found.pop("stopping at")
    found["limit of open files"] = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert status == 128 + signal.SIGTERM
    return {name: round(value, 2) for name, value in found.items()} | {"soft limit before": soft}


def memory() -> float:
    """MiB that this process alone has."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines[1:]}
    return (sizes["Private_Dirty"] + sizes["Private_Clean"] + sizes["Shared_Dirty"]) / 1024


def main() -> int:
    """Print what was measured, and keep it."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--ranks", type=int, default=1024)
    asked.add_argument("--seconds", type=float, default=20.0)
    given = asked.parse_args()
    with tempfile.TemporaryDirectory(prefix="launcher-") as place:
        told = {"ranks": given.ranks, **measured(given.ranks, given.seconds, Path(place))}
    keep_as("launcher", told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
