"""What ranks print, passed on line by line with the rank in front."""

from __future__ import annotations

import os
import re
from collections import deque
from typing import BinaryIO

_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)")  # a progress bar ends its lines with \r
_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 20  # a line longer than this is passed on in pieces


class RankOutput:
    """One output of one rank, read from a pipe without blocking and written to ``sink``; without a sink, its
    end is remembered."""

    def __init__(self, source: BinaryIO, sink: BinaryIO | None, prefix: str) -> None:
        os.set_blocking(source.fileno(), False)
        self.source, self.sink, self.prefix = source, sink, prefix.encode()
        self.tail: deque[bytes] = deque(maxlen=20)
        self._rest = b""  # the beginning of a line whose end has not come
        self._after_return = False  # the last line ended with \r: a \n right after it belongs to it

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self.source.fileno()

    def pump(self) -> bool:
        """Pass on what there is now; False once there will be no more."""
        try:
            chunk = os.read(self.fileno(), _CHUNK)
        except BlockingIOError:
            return True
        if not chunk:
            return False
        self._take(chunk)
        return True

    def drain(self) -> None:
        """Pass on everything there is now, an unfinished line too."""
        try:
            while chunk := os.read(self.fileno(), _CHUNK):
                self._take(chunk)
        except BlockingIOError:  # somebody else still holds the pipe
            pass
        if self._rest:
            self._write([self.prefix + self._rest + b"\n"])
            self._rest = b""

    def finish(self) -> None:
        """Pass on everything left, and close."""
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
