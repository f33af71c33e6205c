"""The process behind an emulated Slurm: it starts the daemons, and all of them end with it.

    python -m tests.support.slurm.keeper FOLDER

Every node has a process, mount and host-name namespace of its own: inside, the node has its own
name and ``/etc/hosts``, and process number 1 is its own. A node is switched off by killing its
first process: the kernel then ends everything that ran there, also what has left its group and
session. That process dies with the keeper, so nothing outlives it however it ends. SIGTERM:
everything ends. SIGHUP: nodes that are off are switched on. A controller that dies is started
again, as a machine's own service manager would.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from plait.core.base.process import die_with_parent, path_of

PACKAGES = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sinfo": "slurm-client",
    "unshare": "util-linux",
}

# Process 1 of a node: while it lives the node is on. bash collects orphans, which dash would not.
NODE = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && "$@" & wait'
SHORTEST = 3.0
"""Seconds that a controller lives that can live."""
NAMESPACES = ("--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def program(name: str) -> str:
    """The full path of a program. Raises LookupError naming the package it comes in."""
    if (path := path_of(name)) is None:
        raise LookupError(f"an emulated Slurm needs the program {name!r}, of the package {PACKAGES[name]}.")
    return path


class Keeper:
    """Everything that was started, by name."""

    def __init__(self, folder: Path, nodes: Sequence[str]) -> None:
        self.folder, self.nodes = folder, nodes
        self.processes: dict[str, subprocess.Popen[Any]] = {}
        self.controlled = -SHORTEST

    def start(self) -> None:
        """munged, the controller, the nodes."""
        munge = [f"--{key}={self.folder / file}" for key, file in
                 {"key-file": "munge.key", "socket": "munge", "pid-file": "munged.pid",
                  "log-file": "munged.log", "seed-file": "munged.seed"}.items()]  # fmt: skip
        # --force: the folder is ours alone, which munged minds, since elsewhere it serves many users.
        self._start("munged", [program("munged"), "--foreground", "--force", "--num-threads=2", *munge])
        deadline = time.monotonic() + 5
        while not (self.folder / "munge").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        self.control()
        self.switch_on()

    def control(self) -> bool:
        """Start the controller; False if it was started moments ago, and so does not live."""
        if (now := time.monotonic()) - self.controlled < SHORTEST:
            return False
        self.controlled = now
        self._start("slurmctld", [program("slurmctld"), "-D", "-f", str(self.folder / "slurm.conf")])
        return True

    def switch_on(self) -> None:
        """Start every node that is off."""
        for node in self.nodes:
            if node in self.processes and self.processes[node].poll() is None:
                continue
            slurmd = [program("slurmd"), "-D", "-N", node, "-f", str(self.folder / "slurm.conf")]
            hosts = str(self.folder / "hosts")
            self._start(node, [program("unshare"), *NAMESPACES, "bash", "-c", NODE, node, hosts, *slurmd])
        self.note()

    def note(self) -> None:
        """Write down which process is which, for others."""
        pids = {name: process.pid for name, process in self.processes.items()}
        draft = self.folder / "pids.draft"
        draft.write_text(json.dumps(pids))
        draft.rename(self.folder / "pids.json")

    def end(self) -> None:
        """Kill everything; what runs on a node dies with its first process."""
        for process in self.processes.values():
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()

    def _start(self, name: str, argv: Sequence[str]) -> None:
        with open(self.folder / f"{name}.out", "ab") as log:
            self.processes[name] = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", env=_environment(),
                start_new_session=True,
                preexec_fn=_as_a_service,  # noqa: PLW1509  (there are no threads)
            )  # fmt: skip


def _as_a_service() -> None:
    """End with the keeper, and hear all signals: newer daemons hand what is blocked on to the
    jobs."""
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _environment() -> dict[str, str]:
    """What daemons, and jobs that ask for no more, find: nothing of ours."""
    return {"PATH": os.defpath + ":/usr/sbin:/sbin", "LC_ALL": "C.UTF-8", "HOME": "/"}


def main() -> int:
    """Go on in the background, and print its process number; start, serve signals until SIGTERM,
    end."""
    folder = Path(sys.argv[1])
    if child := os.fork():
        print(child)
        return 0
    os.setsid()
    with open(folder / "keeper.out", "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    return serve(folder)


def serve(folder: Path) -> int:
    """Until SIGTERM, the end of munged, or a slurmctld that does not live."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGCHLD])
    keeper = Keeper(folder, json.loads((folder / "nodes.json").read_text()))
    try:
        keeper.start()
        while True:
            match signal.sigwait([signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD]):
                case signal.SIGTERM:
                    return 0
                case signal.SIGHUP:
                    keeper.switch_on()
                case _:
                    off = {name for name, process in keeper.processes.items() if process.poll() is not None}
                    if "munged" in off or ("slurmctld" in off and not keeper.control()):
                        return 1
                    keeper.note()
    finally:
        keeper.end()


if __name__ == "__main__":
    sys.exit(main())
