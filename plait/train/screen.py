"""What is written line by line while something goes on: lines that stay, and one below that is drawn
again."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from plait.core.base.env import dumb_terminal, terminal_width
from plait.core.base.text import WIDTH, duration, printable, progress_line


class LineFile:
    """A file that lines are added to, for who was not at the terminal. None is missed that cannot be
    written."""

    def __init__(self, path: Path) -> None:
        self._file: int | None = None
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            # Without waiting: a named pipe that nobody reads would never let us begin.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
            self._file = os.open(path, flags, 0o666)

    def add(self, text: str) -> None:
        """A line, or several."""
        if self._file is not None:
            with suppress(OSError):
                os.write(self._file, f"{printable(text)}\n".encode(errors="backslashreplace"))

    def close(self) -> None:
        """Add no more."""
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
        self._file = None


class Screen:
    """Lines on ``out`` and, on a terminal, a live line below them. Output that goes nowhere ends no run.
    copy: takes the lines that stay, too.

    The live line is drawn over with spaces, not with escape sequences, so that it needs no colours.
    """

    def __init__(self, out: TextIO, copy: LineFile | None = None) -> None:
        self.out, self.copy = out, copy
        self.redraws = out.isatty() and not dumb_terminal()
        self._live = ""

    @property
    def width(self) -> int | None:
        """Columns of the terminal; None for a file or a pipe."""
        return terminal_width(self.out)

    def line(self, text: str) -> None:
        """A line that stays, above the live one."""
        if self.copy:
            self.copy.add(text)
        below, self._live = self._live, ""
        over = "\r" + " " * len(below) + "\r" if below else ""
        self._write(f"{over}{printable(text)}\n")
        self.live(below)

    def live(self, text: str) -> None:
        """Replace the live line; with nothing, remove it."""
        if self.redraws and (text or self._live):
            self._write(f"\r{text.ljust(len(self._live))}" + ("" if text else "\r"))
            self._live = text

    def _write(self, text: str) -> None:
        encoding = self.out.encoding or "utf-8"
        with suppress(OSError, ValueError):  # a full disk, a reader that has gone, a stream that was closed
            self.out.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self.out.flush()


class ByteProgress:
    """How far work on bytes has come: a bar, the rate and the time that is left. Where nothing is redrawn, a
    line every ``EVERY`` seconds."""

    EVERY = 30.0

    def __init__(self, screen: Screen, what: str) -> None:
        self.screen, self.what = screen, what
        self._begun = self._said = time.monotonic()
        self._first: int | None = None

    def __call__(self, done: int, total: int) -> None:
        """So many bytes are done, of so many."""
        now = time.monotonic()
        if self._first is None:  # what an earlier start has done took no time of this one
            self._first, self._begun = done, now
        rate = (done - self._first) / max(now - self._begun, 1e-9)
        left = (total - done) / rate if rate > 0 else None
        if done >= total:
            self.screen.live("")
        elif self.screen.redraws:
            told = [f"{rate / 1e6:.1f} MB/s", self.what]
            line = progress_line(done >> 20, total >> 20, "MiB", left, told, self.screen.width or WIDTH)
            self.screen.live(line.removeprefix("step "))
        elif now - self._said >= self.EVERY:
            self._said = now
            told = duration(left) if left is not None else "?"
            self.screen.line(f"{self.what}: {done / total:.0%}, {rate / 1e6:.1f} MB/s, {told} left")
