"""How the process of a rank begins and ends."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

from plait.core.base.process import open_standard_streams


def run_and_end(main: Callable[[], int | None]) -> NoReturn:
    """Run ``main`` and end the process with the status it returns (None: 0; if it raises, 1 and a traceback;
    SystemExit, its own), what was printed written out.

    Not by the interpreter's own way out. While that goes on, a thread of gloo, or one that waits in it, may
    still want the interpreter's lock (to let a tensor go); CPython then ends the thread in the midst of C++,
    which takes the process down by SIGABRT, and a rank that ended well, or with a clear message, looks
    killed.
    """
    try:
        status = main() or 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except Exception:  # noqa: BLE001  (as the interpreter would)
        traceback.print_exc()
        status = 1
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


class _Output(io.FileIO):
    """A file that takes what it cannot write as written."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def print_to_nobody() -> None:
    """Let what this process prints be lost where nobody can read it (a terminal that was closed, a pipe whose
    reader has ended, a full disk), instead of ending training or hiding why it ends."""
    open_standard_streams()
    sys.stdout, sys.stderr = _lossy(sys.stdout), _lossy(sys.stderr)


def _lossy(stream: TextIO) -> TextIO:
    stream.flush()
    buffer = io.BufferedWriter(_Output(stream.fileno(), "wb", closefd=False))
    return io.TextIOWrapper(buffer, stream.encoding, "replace", line_buffering=True)
