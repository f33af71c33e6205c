"""Print progress: lines that stay and, on a terminal, a live line below them that is redrawn."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from plait.core.base.env import dumb_terminal, terminal_width
from plait.core.base.text import WIDTH, duration, printable, progress_line


class LineFile:
    """A log file that lines are appended to, so that the output can be read later. Write errors are
    ignored, also when opening the file."""

    def __init__(self, path: Path) -> None:
        self._file: int | None = None
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            # O_NONBLOCK: opening a named pipe without a reader would block forever.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
            self._file = os.open(path, flags, 0o666)

    def add(self, text: str) -> None:
        """Append one line or several."""
        if self._file is not None:
            with suppress(OSError):
                os.write(self._file, f"{printable(text)}\n".encode(errors="backslashreplace"))

    def close(self) -> None:
        """Close the file; later lines are dropped."""
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
        self._file = None


class Screen:
    """Output of lines to ``out`` and, on a terminal, of a live line below them. Write errors are
    ignored: they must not end a run. copy: a file that gets the permanent lines, too.

    The live line is overwritten with spaces, not with escape sequences, so that it needs no
    terminal with colours.
    """

    def __init__(self, out: TextIO, copy: LineFile | None = None) -> None:
        self.out, self.copy = out, copy
        self.redraws = out.isatty() and not dumb_terminal()
        self._live = ""

    @property
    def width(self) -> int | None:
        """The terminal's width in columns; None for a file or a pipe."""
        return terminal_width(self.out)

    def line(self, text: str) -> None:
        """Print a permanent line, above the live line."""
        if self.copy:
            self.copy.add(text)
        below, self._live = self._live, ""
        over = "\r" + " " * len(below) + "\r" if below else ""
        self._write(f"{over}{printable(text)}\n")
        self.live(below)

    def live(self, text: str) -> None:
        """Replace the live line; an empty ``text`` removes it."""
        if self.redraws and (text or self._live):
            self._write(f"\r{text.ljust(len(self._live))}" + ("" if text else "\r"))
            self._live = text

    def _write(self, text: str) -> None:
        encoding = self.out.encoding or "utf-8"
        with suppress(OSError, ValueError):  # a full disk, a reader that has gone, a stream that was closed
            self.out.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self.out.flush()


class ByteProgress:
    """A progress display for work counted in bytes: a bar, the rate and the remaining time. If the
    output is no terminal, it is a line every ``EVERY`` seconds."""

    EVERY = 10.0

    def __init__(self, screen: Screen, what: str) -> None:
        self.screen, self.what = screen, what
        self._begun = self._printed_at = time.monotonic()
        self._first: int | None = None

    def __call__(self, done: int, total: int, tokens: int = 0) -> None:
        """Show that ``done`` of ``total`` bytes are done, and the tokens so far."""
        now, what = time.monotonic(), self.what
        what += f", {tokens:,} tokens so far" if tokens else ""
        if self._first is None:  # the bytes of an earlier start must not count in this start's rate
            self._first, self._begun = done, now
        rate = (done - self._first) / max(now - self._begun, 1e-9)
        left = (total - done) / rate if rate > 0 else None
        if done >= total:
            self.screen.live("")
        elif self.screen.redraws:
            told = [f"{rate / 1e6:.1f} MB/s", what]
            line = progress_line(done >> 20, total >> 20, "MiB", left, told, self.screen.width or WIDTH)
            self.screen.live(line.removeprefix("step "))
        elif now - self._printed_at >= self.EVERY:
            self._printed_at = now
            told = duration(left) if left is not None else "?"
            self.screen.line(f"{what}: {done / total:.0%}, {rate / 1e6:.1f} MB/s, {told} left")
