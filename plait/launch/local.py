"""Ranks as processes of this machine: how they are started, and what they share.

Rank 0 shares the terminal; what the others print, and everybody's errors, go to ``logs/rank-N.log``. Every
rank has a line to the launcher (``core.runs.channel``).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, Protocol

from plait.core.base.env import RankEnv, launcher_variable, rank_base, rank_variables
from plait.core.base.process import end_all, process_state
from plait.core.runs.channel import Channel
from plait.launch.gather import kernel_says
from plait.launch.open_files import make_room
from plait.launch.watch import ALONE, RankProcess, RunGuard, Watch, catching_signals, say


class Child(Protocol):
    """A child of this process, as ``subprocess.Popen``."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """``returncode``, looked up anew."""
        ...


class RankStarter(Protocol):
    """Starts rank N: in a session of its own, with the environment given and who it is."""

    def __call__(
        self,
        rank: int,
        *,
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        stdout: IO[bytes] | None,
        stderr: IO[bytes],
        stdin: int,
    ) -> Child: ...


class LocalProcess:
    """A rank's process on this machine; its log is open as the file ``log``."""

    def __init__(self, process: Child, log: IO[bytes]) -> None:
        self._process, self._log = process, log
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.returncode

    def poll(self) -> int | None:
        """``returncode``, looked up anew."""
        return self._process.poll()

    def kill(self) -> None:
        """End its process group for certain."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):  # ended in between
                os.killpg(self.pid, signal.SIGKILL)

    @property
    def stopped(self) -> bool:
        """Whether it is stopped."""
        state = process_state(self.pid)
        return state is not None and state.stopped

    def said(self) -> str:
        """What it has written to its log."""
        # From the file that is open, which can be read when its folder was removed; the rank writes where its
        # own place in it is, so that place must not move.
        log = self._log.fileno()
        return os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace")


def local_start(argv: Sequence[str], world: int, port: int) -> RankStarter:
    """How to start rank N of ``world`` on this machine, with torchrun's variables. port: where they meet."""

    def start(rank: int, *, env: Mapping[str, str], **options: Any) -> subprocess.Popen[Any]:
        who = local_variables(rank, world, port)
        return subprocess.Popen(list(argv), env={**env, **who}, start_new_session=True, **options)

    return start


def local_variables(rank: int, world: int, port: int) -> dict[str, str]:
    """The environment of rank N of ``world``, all of them on this machine."""
    return rank_variables(
        RankEnv(
            rank=rank, world_size=world, local_rank=rank, local_world_size=world, node_rank=0,
            master_addr="127.0.0.1", master_port=port,
        )
    )  # fmt: skip


def run_ranks(
    start: RankStarter,
    world: int,
    logs: Path,
    *,
    timeout: float,
    guard: RunGuard = ALONE,
    signals: deque[int] | None = None,
) -> int:
    """Run all ranks to their end. Returns 0, or 128 + signal if they were asked to stop and have saved.

    signals: those that the caller catches.

    Raises the error of the first rank that failed, RankFailure for one that is silent for ``timeout`` seconds
    or that the others wait for, RunLost when the run's lock is lost, LaunchError for more ranks than this
    process can have files open for.
    """
    make_room(2 * world, f"{world} ranks")
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        caught = held.enter_context(catching_signals()) if signals is None else signals
        ranks: list[RankProcess] = []
        held.callback(_end, ranks)
        for number in range(world):
            log = held.enter_context(open(logs / f"rank-{number}.log", "w+b"))
            ranks.append(_start(start, number, log))
        return Watch(ranks, logs, caught, timeout=timeout, guard=guard).until_ended()


def _start(start: RankStarter, number: int, log: IO[bytes]) -> RankProcess:
    ours, theirs = Channel.pair()
    with theirs:
        process = start_process(start, number, log, theirs)
    return RankProcess(number, process, ours, heard=time.monotonic())


def start_process(start: RankStarter, number: int, log: IO[bytes], line: socket.socket) -> LocalProcess:
    """Start a rank that inherits ``line``, its line to the launcher, and writes to ``log``."""
    process = start(
        number,
        env=rank_base() | launcher_variable(line.fileno()),
        pass_fds=(line.fileno(),),
        stdout=None if number == 0 else log,
        stderr=log,
        stdin=subprocess.DEVNULL,
    )
    return LocalProcess(process, log)


def _end(ranks: list[RankProcess]) -> None:
    """End every rank for certain; name those that the kernel does not let go."""
    left = end_all([rank.process for rank in ranks])
    for rank in ranks:
        rank.channel.close()
        if rank.process in left:
            say(unkillable(rank.name, rank.process.pid or 0))


def unkillable(name: str, pid: int) -> str:
    """The sentence on a rank that SIGKILL does not end."""
    return f"{name} (process {pid}) does not end though it was killed: {kernel_says(pid)}. It keeps its memory until " \
           "the kernel lets it go"  # fmt: skip
