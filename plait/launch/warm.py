"""Ranks of this machine that are copies of one process, in which what they need is imported already.

Importing torch and the runtime takes a rank two seconds of a processor. Where a machine has a core for every
rank they import side by side, and nothing is gained; where it has fewer, imports stand in line, and a process
that imports once and is forked starts all of them in the time of one (docs/adr/0039-warm-ranks.md).

A rank is forked twice, so that it becomes a child of the launcher, its "subreaper" meanwhile, which waits for
it and signals it like any other. It has a session of its own, and the variables and descriptors it was given;
what ``/proc`` shows as its environment and command is the first process's.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

from plait.core.base import programs
from plait.core.base.env import rank_base
from plait.core.base.process import adopting, command_of, end_all, usable_cores
from plait.core.runs.channel import LONGEST
from plait.launch.local import Child, RankStarter, local_start, local_variables

PATIENCE = 120.0
"""Seconds for its imports, on a slow disk; after that ranks are started without it."""
FORKING = 10.0
"""Seconds for a rank."""


class Forked:
    """A rank, a child of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """``returncode``, looked up anew."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Warm:
    """The process. module, arguments: what ranks run."""

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
        """A rank. files: its standard output, its errors, its line to the launcher. None where the process
        has ended, or cannot, or a signal comes while it imports: then whoever starts ranks has other things
        to do than wait."""
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
                answer = self._line.recv(64) if _any_of([self._line], FORKING) else b""
        except OSError:
            return None
        return Forked(int(answer)) if answer else None

    def close(self) -> None:
        """End it, whatever it does; ranks go on."""
        self._line.close()
        end_all([self._process])


@contextmanager
def warm_starts(module: str, arguments: Sequence[str], world: int, port: int) -> Iterator[Callable[[], RankStarter]]:
    """Makes what ``local_start`` makes of the module's command and a port, once for each attempt. Where
    forking pays, ranks of all attempts are forked from a process that lives as long as the block."""
    argv = command_of(module, *arguments)
    if sys.platform != "linux" or world <= usable_cores():
        yield lambda: local_start(argv, world, port)
        return
    warm: list[Warm] = []

    def attempt() -> RankStarter:
        plain, alone = local_start(argv, world, port), False

        def start(rank: int, *, env: Mapping[str, str], pass_fds: Sequence[int], stdout: IO[bytes] | None,
                  stderr: IO[bytes], **more: Any) -> Child:  # fmt: skip
            nonlocal alone
            if not warm and not alone:
                warm.append(Warm(module, arguments))
            files = [stdout.fileno() if stdout else 1, stderr.fileno(), *pass_fds]
            if warm and (forked := warm[0].fork({**env, **local_variables(rank, world, port)}, files)):
                return forked
            if warm:  # the next attempt has another
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
    """Whether something comes within this time and before a signal that this process handles."""
    woken, wakes = socket.socketpair()
    with woken, wakes:
        woken.setblocking(False)
        wakes.setblocking(False)
        try:
            before = signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        except ValueError:  # not the main thread, which takes the signals
            return bool(_any_of([line], seconds))
        try:
            ready = _any_of([line, woken], seconds)
        finally:
            signal.set_wakeup_fd(before)
    return line.fileno() in ready


def _any_of(lines: Sequence[socket.socket], seconds: float) -> set[int]:
    """The descriptors of those of which something can be read within this time. Descriptors may be above
    1024, which ``select.select`` cannot take."""
    poll = select.poll()
    for line in lines:
        poll.register(line, select.POLLIN)
    return {file for file, _ in poll.poll(1000 * seconds)}
