"""Run one command as every rank of a lab, forward the ranks' output, and end all ranks together."""

from __future__ import annotations

import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, BinaryIO

from plait.core.base.errors import JobError, LaunchError
from plait.core.base.process import how_it_ended
from plait.lab.lab import Lab
from plait.lab.spec import LabSpec

_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)")  # a progress bar ends its lines with \r
_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 20  # bytes; a longer line is forwarded in pieces


class RankOutput:
    """An output stream of a rank, read from a pipe without blocking and written line by line to
    ``sink``; None: the last lines are kept."""

    def __init__(self, source: BinaryIO, sink: BinaryIO | None, prefix: str) -> None:
        os.set_blocking(source.fileno(), False)
        self.source, self.sink, self.prefix = source, sink, prefix.encode()
        self.tail: deque[bytes] = deque(maxlen=20)
        self._rest = b""  # the beginning of an unfinished line
        self._after_return = False  # the last line ended with \r: a \n right after it belongs to it

    def fileno(self) -> int:
        """Return the file descriptor to poll."""
        return self.source.fileno()

    def pump(self) -> bool:
        """Forward the output available now; return False at end of file."""
        try:
            chunk = os.read(self.fileno(), _CHUNK)
        except BlockingIOError:
            return True
        if not chunk:
            return False
        self._take(chunk)
        return True

    def drain(self) -> None:
        """Forward all output available now, including an unfinished line."""
        try:
            while chunk := os.read(self.fileno(), _CHUNK):
                self._take(chunk)
        except BlockingIOError:  # another process still holds the pipe open
            pass
        if self._rest:
            self._write([self.prefix + self._rest + b"\n"])
            self._rest = b""

    def finish(self) -> None:
        """Forward all remaining output, and close the pipe."""
        self.drain()
        self.source.close()

    def _take(self, chunk: bytes) -> None:
        pieces: list[bytes] = []
        if self._after_return and chunk.startswith(b"\n"):
            pieces.append(b"\n")
            chunk = chunk[1:]
        text, end = self._rest + chunk, 0
        for line in _LINE.finditer(text):
            pieces.append(self.prefix + line[0])
            end = line.end()
        self._rest = text[end:]
        if len(self._rest) > _LONGEST_LINE:
            pieces.append(self.prefix + self._rest + b"\n")
            self._rest = b""
        self._after_return = not self._rest and text.endswith(b"\r")
        self._write(pieces)

    def _write(self, pieces: list[bytes]) -> None:
        if self.sink is None:
            self.tail.extend(pieces)
        elif pieces:
            self.sink.write(b"".join(pieces))
            self.sink.flush()


GRACE = 5.0  # seconds between SIGTERM and SIGKILL
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(
    spec: LabSpec,
    argv: Sequence[str],
    *,
    name: str | None = None,
    only_rank: int | None = None,
    raw: bool = False,
    grace: float = GRACE,
) -> int:
    """Run ``argv`` as every rank of a new lab; return 0 if all ranks return 0, else the status of
    the first failed rank.

    When a rank fails, the other ranks get SIGTERM, and SIGKILL after ``grace`` seconds; SIGINT or
    SIGTERM to this process does the same, and a second signal kills at once. Each output line is
    prefixed with ``[rank] ``. ``only_rank`` shows one rank's output; ``raw`` gives the ranks this
    process's own stdout and stderr. Raises JobError if ``argv`` cannot be run.
    """
    if not argv:
        raise JobError(
            "there is nothing to run",
            fix="Give the command of a rank after --, such as: plait lab run 2x1@1gbit -- python train.py",
        )
    if shutil.which(argv[0]) is None:
        raise JobError(f"the command {argv[0]!r} is not an executable file", fix="Check its name, or give its path")
    if only_rank is not None:
        spec.host_of(only_rank)
    with Lab(spec, name=name, command=argv) as lab:
        return LabSupervisor(lab, grace).run(argv, only_rank, raw)


def say(message: str) -> None:
    """Print a line from the lab itself on stderr, apart from the ranks' output."""
    print(f"plait lab: {message}", file=sys.stderr, flush=True)


class LabSupervisor:
    """Supervisor of a lab's ranks, their output and the user's signals, in one thread that sleeps
    until an event."""

    def __init__(self, lab: Lab, grace: float) -> None:
        self.lab, self.grace = lab, grace
        self.selector = selectors.DefaultSelector()
        self.alive: dict[int, subprocess.Popen[Any]] = {}
        self.errors: dict[int, RankOutput] = {}
        self.streams: list[RankOutput] = []
        self.status = 0
        self.stopping = False
        self.kill_at: float | None = None

    def run(self, argv: Sequence[str], only_rank: int | None, raw: bool) -> int:
        """Start every rank, wait for all of them, and return the lab's exit status."""
        with self.selector, self._signals():
            self._watch(os.pidfd_open(self.lab.network.keeper), self._keeper_ended)
            for rank in range(self.lab.spec.world_size):
                self._start(rank, argv, only_rank, raw)
            while self.alive:
                timeout = None if self.kill_at is None else max(0.0, self.kill_at - time.monotonic())
                for key, _ in self.selector.select(timeout):
                    key.data()
                if self.kill_at is not None and time.monotonic() >= self.kill_at:
                    break  # ranks that still run are killed with the lab
            self.lab.close()  # ends processes that ranks left behind, so that the pipes below reach their end
            for rank, process in self.alive.items():
                if process.poll() is None:
                    say(f"rank {rank} (process {process.pid}) was killed and does not end: the kernel has frozen it")
            for stream in self.streams:
                stream.finish()
        return self.status

    def _start(self, rank: int, argv: Sequence[str], only_rank: int | None, raw: bool) -> None:
        shown = only_rank in (None, rank)
        plain = raw or self.lab.spec.world_size == 1
        out = None if shown and plain else subprocess.PIPE if shown else subprocess.DEVNULL
        err = None if shown and plain else subprocess.PIPE
        process = self.lab.popen(rank, argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        self.alive[rank] = process
        prefix = "" if only_rank is not None else f"[{rank}] "
        if process.stdout is not None:
            self._stream(process.stdout, sys.stdout.buffer, prefix)
        if process.stderr is not None:
            self.errors[rank] = self._stream(process.stderr, sys.stderr.buffer if shown else None, prefix)
        self._watch(os.pidfd_open(process.pid), lambda: self._rank_ended(rank))

    def _watch(self, pidfd: int, ended: Callable[[], None]) -> None:
        """Call ``ended`` once, when the process of ``pidfd`` ends."""

        def once() -> None:
            self.selector.unregister(pidfd)
            os.close(pidfd)
            ended()

        self.selector.register(pidfd, selectors.EVENT_READ, once)

    def _stream(self, source: Any, sink: BinaryIO | None, prefix: str) -> RankOutput:
        stream = RankOutput(source, sink, prefix)

        def pump() -> None:
            if not stream.pump():
                self.selector.unregister(stream)

        self.selector.register(stream, selectors.EVENT_READ, pump)
        self.streams.append(stream)
        return stream

    def _rank_ended(self, rank: int) -> None:
        returncode = self.alive.pop(rank).wait()
        if returncode == 0 or self.stopping:
            return
        self.status = returncode if returncode > 0 else 128 - returncode
        if rank in self.errors and self.errors[rank].sink is None:
            self._show_hidden_errors(rank)
        others = "; ending the other ranks" if self.alive else ""
        say(f"rank {rank} on host {self.lab.spec.host_of(rank)} {how_it_ended(returncode)}{others}")
        self._stop()

    def _show_hidden_errors(self, rank: int) -> None:
        """Print the last lines of stderr of a failed rank whose output is not shown."""
        stream = self.errors[rank]
        stream.drain()
        sys.stderr.buffer.writelines(f"[{rank}] ".encode() + line for line in stream.tail)
        sys.stderr.buffer.flush()

    def _keeper_ended(self) -> None:
        raise LaunchError("the process that holds the lab's network ended, and the lab with it. Start it anew.")

    def _stop(self) -> None:
        self.stopping = True
        self.kill_at = time.monotonic() + self.grace
        for process in self.alive.values():
            with suppress(ProcessLookupError):  # the rank has ended but was not reaped yet
                os.killpg(process.pid, signal.SIGTERM)

    def _signalled(self, number: int) -> None:
        if self.stopping:
            self.kill_at = 0.0
            return
        say(f"{signal.Signals(number).name} received; ending the ranks (once more to kill them)")
        self.status = 128 + number
        self._stop()

    @contextmanager
    def _signals(self) -> Generator[None]:
        """Turn the user's signals into events of the selector loop. Outside the main thread, the
        caller must handle signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        read_end, write_end = os.pipe()

        def handle(number: int, frame: FrameType | None) -> None:
            os.write(write_end, bytes([number]))

        self.selector.register(read_end, selectors.EVENT_READ, lambda: self._signalled(os.read(read_end, 1)[0]))
        # A signal that is already ignored stays ignored: nohup relies on that.
        before = {
            number: signal.signal(number, handle) for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(read_end)
            os.close(write_end)
