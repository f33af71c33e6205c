"""Work that is shared with a copy of this process, where there is a processor for it.

The copy is forked. So it begins with all that is known here, where a new process would import for most of a
second before it knew as much; and it hands back what it finds through a pipe, as JSON. A fork copies no
other thread, and what such a thread has locked stays locked: a process that runs any shares nothing.

Nothing depends on the copy. What it did not hand back, because it was killed or because the work raised
something, is done here. Ctrl-C ends both; a copy whose process has gone ends when it has something to say.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NoReturn, Self, TypeVar

T = TypeVar("T")
R = TypeVar("R")

TICKET = struct.Struct("<H")
"""A piece's number, as a pipe has it."""
ONCE = 1 << 11
"""Pieces at once: their numbers fill a page, which any pipe takes before somebody reads."""
_copies = list[int]()
"""The copy's own number, in a copy."""


def in_two(work: Callable[[T], R], pieces: Sequence[T], *, least: int = 2) -> list[R]:
    """``work`` of every piece: plain values, as JSON has them. Both processes take the next piece when they
    are done with one, so the longest should come first. least: pieces that are worth a copy."""
    if len(pieces) < least or not possible():
        return [work(piece) for piece in pieces]
    if len(pieces) > ONCE:
        return [one for at in range(0, len(pieces), ONCE) for one in in_two(work, pieces[at : at + ONCE], least=least)]
    tickets, counter = os.pipe()
    os.write(counter, b"".join(map(TICKET.pack, range(len(pieces)))))
    os.close(counter)
    found = dict[int, R]()
    try:
        with _Copy(lambda: _take(work, pieces, tickets)) as copy:
            for at, one in _take(work, pieces, tickets):
                found[at] = one
            found |= copy.found()
    finally:
        os.close(tickets)
    return [found[at] if at in found else work(piece) for at, piece in enumerate(pieces)]


def possible() -> bool:
    """Whether a copy can be made that has a processor of its own. A copy makes none."""
    alone = threading.active_count() == 1 and threading.current_thread() is threading.main_thread()
    return sys.platform == "linux" and alone and not _copies and len(os.sched_getaffinity(0)) > 1


def _take(work: Callable[[T], R], pieces: Sequence[T], tickets: int) -> Iterator[tuple[int, R]]:
    """Of the pieces that the other process does not take, by number."""
    while ticket := os.read(tickets, TICKET.size):
        (at,) = TICKET.unpack(ticket)
        yield at, work(pieces[at])


class _Copy:
    """A copy of this process, which goes through what ``take`` makes and hands it back. Killed, if it is not
    done, when the ``with`` ends."""

    def __init__(self, take: Callable[[], Iterator[tuple[int, Any]]]) -> None:
        self._pipe, answer = os.pipe()
        self._process = _forked()
        if self._process == 0:
            _live(take, answer)
        os.close(answer)

    def found(self) -> dict[int, Any]:
        """What it handed back; waits for it."""
        if self._process is None:
            return {}
        with os.fdopen(self._pipe, closefd=False) as file:
            told = file.read()
        return dict(json.loads(told)) if self._end() == 0 else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            os.kill(self._process, signal.SIGKILL)
            self._end()
        os.close(self._pipe)

    def _end(self) -> int:
        """Wait for its end: the status of that, 0 if all is well."""
        process, self._process = self._process, None
        assert process
        return os.waitpid(process, 0)[1]


def _forked() -> int | None:
    """The copy's number, 0 in the copy; None where the system has no room for one."""
    try:
        return os.fork()
    except OSError:
        return None


def _live(take: Callable[[], Iterator[tuple[int, Any]]], answer: int) -> NoReturn:
    """The life of a copy. It leaves nothing behind: no buffer is flushed, nothing is cleaned up twice."""
    try:
        _copies.append(os.getpid())
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        found = list[tuple[int, Any]]()
        with suppress(Exception):  # it is raised again where the work is done again
            for each in take():
                found.append(each)
        with os.fdopen(answer, "w") as file:
            json.dump(found, file)
        os._exit(0)
    finally:
        os._exit(1)
