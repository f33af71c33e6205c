"""Ranks as processes of this machine: how they are started, and what they share.

Rank 0 shares the terminal; the other ranks' output, and every rank's stderr, go to
``logs/rank-N.log``. Every rank has a connection to the launcher (``core.runs.channel``). On a
machine with fewer cores than ranks, ranks are forked from one process with its imports done:
importing torch and the runtime takes two CPU seconds per rank (docs/adr/0039-warm-ranks.md). A rank
is forked twice, so that it becomes a child of the launcher (temporarily its "subreaper"), which
waits for it and signals it like any other child. A rank has its own session, variables and
descriptors, but ``/proc`` shows the first process's environment and command.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol

from plait.core.base import programs
from plait.core.base.env import RankEnv, launcher_variable, rank_base, rank_variables
from plait.core.base.process import adopting, command_of, end_all, process_state, usable_cores
from plait.core.runs.channel import LONGEST, Channel
from plait.launch.hang import kernel_state
from plait.launch.health.nodes import make_room
from plait.launch.watch import NO_CHECKS, RankProcess, RunGuard, Watch, catching_signals, say


class Child(Protocol):
    """A child process, with the attributes of ``subprocess.Popen`` that launchers use. returncode:
    None while it runs."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """Update and return ``returncode``."""
        ...


class RankStarter(Protocol):
    """A function that starts the rank of a number in a session of its own, with ``env`` added to
    its environment, and returns the process."""

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
    """A rank's process on this machine; its log is the open file ``log``."""

    def __init__(self, process: Child, log: IO[bytes]) -> None:
        self._process, self._log = process, log
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        """The process's exit status; None while it runs."""
        return self._process.returncode

    def poll(self) -> int | None:
        """Update and return ``returncode``."""
        return self._process.poll()

    def kill(self) -> None:
        """Kill the process's group."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):  # it has ended in between
                os.killpg(self.pid, signal.SIGKILL)

    @property
    def stopped(self) -> bool:
        """True if the process is stopped, by a signal or a debugger."""
        state = process_state(self.pid)
        return state is not None and state.stopped

    def log_tail(self) -> str:
        """Return the contents of the process's log, for messages."""
        # Read from the open file, which works even if its folder was removed. The rank shares the offset,
        # which pread does not move.
        log = self._log.fileno()
        return os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace")


def local_start(argv: Sequence[str], world: int, port: int) -> RankStarter:
    """Return a function that starts rank N of ``world`` on this machine, with torchrun's variables.
    port: of the ranks' rendezvous."""

    def start(rank: int, *, env: Mapping[str, str], **options: Any) -> subprocess.Popen[Any]:
        who = local_variables(rank, world, port)
        return subprocess.Popen(list(argv), env={**env, **who}, start_new_session=True, **options)

    return start


def local_variables(rank: int, world: int, port: int) -> dict[str, str]:
    """Return the environment variables of rank N of ``world``, all on this machine."""
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
    guard: RunGuard = NO_CHECKS,
    signals: deque[int] | None = None,
) -> int:
    """Run all ranks until they end. Returns 0, or 128 + signal if they were asked to stop and have
    saved.

    signals: the queue of signals that the caller catches.

    Raises the error of the first failed rank; RankFailure for a rank that is silent for ``timeout``
    seconds or that its peers wait for; RunLost when the run's lock is lost; LaunchError if this
    process cannot open enough files for its ranks.
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
    """Start a rank that inherits ``line``, its connection to the launcher, and writes to
    ``log``."""
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
    """Kill every rank; report the ones that survive SIGKILL."""
    left = end_all([rank.process for rank in ranks])
    for rank in ranks:
        rank.channel.close()
        if rank.process in left:
            say(unkillable(rank.name, rank.process.pid or 0))


def unkillable(name: str, pid: int) -> str:
    """Return the message about a rank that SIGKILL has not ended. name: the rank's name in
    messages."""
    return f"{name} (process {pid}) does not end though it was killed: {kernel_state(pid)}. It keeps its " \
        f"memory until " \
           "the kernel lets it go"  # fmt: skip


PATIENCE = 120.0
"""Seconds to wait for the warm process's imports, on a slow disk; after that, ranks are started
without it."""
FORK_TIMEOUT = 10.0
"""Seconds to wait for the fork of a rank."""


class Forked:
    """A rank that the warm process has forked; it is a child of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Update and return ``returncode``."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class ForkServer:
    """The warm process, which has imported what ranks need and forks them. module, arguments: the
    ranks' command (``python -m module arguments``)."""

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._base, self._ready = rank_base(), False
        with theirs:
            argv = command_of(programs.WARM, str(theirs.fileno()), module, *arguments)
            self._process = subprocess.Popen(
                argv, env=self._base, pass_fds=(theirs.fileno(),), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip

    def fork(self, env: Mapping[str, str], files: Sequence[int]) -> Forked | None:
        """Fork a rank; return its process. files: descriptors of its stdout, stderr and connection
        to the launcher. None if the warm process has ended or cannot fork, or if a signal comes
        during its imports, which the caller must handle first."""
        own = {name: value for name, value in env.items() if self._base.get(name) != value}
        said = json.dumps(own).encode()
        if len(said) > LONGEST:
            return None
        try:
            self._ready = self._ready or (_readable(self._line, PATIENCE) and bool(self._line.recv(64)))
            if not self._ready:
                return None
            with adopting():
                socket.send_fds(self._line, [said], files)
                answer = self._line.recv(64) if _any_of([self._line], FORK_TIMEOUT) else b""
        except OSError:
            return None
        return Forked(int(answer)) if answer else None

    def close(self) -> None:
        """Kill the warm process; its ranks continue."""
        self._line.close()
        end_all([self._process])


@contextmanager
def warm_starts(module: str, arguments: Sequence[str], world: int, port: int) -> Generator[Callable[[], RankStarter]]:
    """Yield a function that returns a fresh rank starter for each attempt, as ``local_start`` does
    for the module's command and a port. If there are more ranks than cores, ranks of all attempts
    are forked from one warm process, which lives as long as the block."""
    argv = command_of(module, *arguments)
    if sys.platform != "linux" or world <= usable_cores():
        yield lambda: local_start(argv, world, port)
        return
    warm: list[ForkServer] = []

    def attempt() -> RankStarter:
        plain, alone = local_start(argv, world, port), False

        def start(rank: int, *, env: Mapping[str, str], pass_fds: Sequence[int], stdout: IO[bytes] | None,
                  stderr: IO[bytes], **more: Any) -> Child:  # fmt: skip
            nonlocal alone
            if not warm and not alone:
                warm.append(ForkServer(module, arguments))
            files = [stdout.fileno() if stdout else 1, stderr.fileno(), *pass_fds]
            if warm and (forked := warm[0].fork({**env, **local_variables(rank, world, port)}, files)):
                return forked
            if warm:  # the next attempt starts a new warm process
                warm.pop().close()
            alone = True
            return plain(rank, env=env, pass_fds=pass_fds, stdout=stdout, stderr=stderr, **more)

        return start

    try:
        yield attempt
    finally:
        for one in warm:
            one.close()


def _readable(line: socket.socket, seconds: float) -> bool:
    """Return True if data arrive on a socket within ``seconds``, and before a signal that this
    process handles."""
    woken, wakes = socket.socketpair()
    with woken, wakes:
        woken.setblocking(False)
        wakes.setblocking(False)
        try:
            before = signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        except ValueError:  # not the main thread, which receives the signals
            return bool(_any_of([line], seconds))
        try:
            ready = _any_of([line, woken], seconds)
        finally:
            signal.set_wakeup_fd(before)
    return line.fileno() in ready


def _any_of(lines: Sequence[socket.socket], seconds: float) -> set[int]:
    """Return the descriptors of the sockets that become readable within ``seconds``. Descriptors
    may exceed 1024, the limit of ``select.select``."""
    poll = select.poll()
    for line in lines:
        poll.register(line, select.POLLIN)
    return {file for file, _ in poll.poll(1000 * seconds)}
