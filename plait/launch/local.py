"""Ranks as processes of this machine, watched until the last has ended.

Rank 0 shares the terminal; what the others print, and everybody's errors, go to ``logs/rank-N.log``. The
first rank that fails ends the rest and is named. Ctrl-C is passed on once, so that ranks can save; a second
one kills.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from plait.core.env import rank_variables
from plait.core.errors import ERROR_MARK, PlaitError, RankFailure

Start = Callable[[int, "IO[bytes] | None", "IO[bytes]"], "subprocess.Popen[Any]"]


def free_port() -> int:
    """A TCP port of the loopback interface that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def local_start(argv: Sequence[str], world: int, *, port: int | None = None) -> Start:
    """How to start rank N of ``world`` on this machine: torchrun's variables, a session of its own."""
    chosen = port or free_port()

    def start(rank: int, out: IO[bytes] | None, err: IO[bytes]) -> subprocess.Popen[Any]:
        variables = rank_variables(
            rank=rank,
            world_size=world,
            local_rank=rank,
            local_world_size=world,
            master_addr="127.0.0.1",
            master_port=chosen,
        )
        return subprocess.Popen(
            list(argv), env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )

    return start


def run_ranks(start: Start, world: int, logs: Path) -> int:
    """Run all ranks to their end. Returns 0, or 128 + signal after Ctrl-C; raises the error of the first rank
    that failed."""
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as files:
        log = [files.enter_context(open(logs / f"rank-{rank}.log", "w+b")) for rank in range(world)]
        ranks = [start(rank, None if rank == 0 else log[rank], log[rank]) for rank in range(world)]
        try:
            return _Watch(ranks, log, logs).until_ended()
        finally:
            _kill(ranks)


class _Watch:
    def __init__(self, ranks: list[subprocess.Popen[Any]], files: Sequence[IO[bytes]], logs: Path) -> None:
        self.ranks, self.files, self.logs = ranks, files, logs
        self.signals = 0
        self.number = 0

    def until_ended(self) -> int:
        with self._forwarding():
            while None in (codes := [rank.poll() for rank in self.ranks]):
                if any(codes) and not self.signals:
                    return self._failed()
                time.sleep(0.05)
        if self.signals:
            bad = [rank for rank in self.ranks if rank.returncode not in (0, 130)]
            return 130 if not bad else 128 + self.number
        return self._failed() if any(rank.returncode for rank in self.ranks) else 0

    def _failed(self) -> int:
        """Name the rank that began it: one killed from outside, else one with a message for the user; of
        several, the first seen."""
        seen = [rank.poll() is not None for rank in self.ranks]
        time.sleep(0.5)  # the others fail moments later, of its absence; give the true cause time to be written
        ended = sorted(
            ((number, rank.poll()) for number, rank in enumerate(self.ranks)), key=lambda each: not seen[each[0]]
        )
        _kill(self.ranks)  # at once: checkpoints are atomic, and ranks that wait for a dead one cannot end in order
        killed = [(n, code) for n, code in ended if code is not None and code < 0]
        spoke = [(n, code) for n, code in ended if code and code > 0 and self._message(n)]
        failed = [(n, code) for n, code in ended if code]
        number, code = (killed or spoke or failed)[0]
        assert code is not None
        message = self._message(number)
        if code > 0 and message:
            error = PlaitError(message)
            error.exit_status = code
            raise error
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        raise RankFailure(
            f"rank {number} {how}; the other ranks were ended. Its log: {self.logs / f'rank-{number}.log'}"
        )

    def _message(self, rank: int) -> str:
        # From the file that is open, which can be read when its folder was removed; the rank writes where its
        # own place in it is, so that place must not move.
        log = self.files[rank].fileno()
        text = os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace")
        _, mark, message = text.rpartition(ERROR_MARK)
        return message.strip() if mark else ""

    @contextmanager
    def _forwarding(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, _frame: object) -> None:
            self.signals += 1
            self.number = number
            for rank in self.ranks:
                if rank.poll() is None:
                    os.killpg(rank.pid, signal.SIGINT if self.signals == 1 else signal.SIGKILL)
            if self.signals == 1:
                print(
                    "\nplait: stopping after this step; the run is saved first (Ctrl-C again to end it at once)",
                    file=sys.stderr,
                    flush=True,
                )

        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _kill(ranks: list[subprocess.Popen[Any]]) -> None:
    """End every rank's process group for certain."""
    for rank in ranks:
        if rank.poll() is None:
            with suppress(ProcessLookupError):  # ended in between
                os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()
