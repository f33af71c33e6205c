"""Work that is shared with a forked copy of this process, where there is a processor for it.

The copy begins with all that is known here: a new process would import for most of a second, about as long as
its half takes. No answer depends on it: what it did not hand back, as it was killed or raised, is done here.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


def possible() -> bool:
    """Whether a copy may be made: it has a processor of its own, and no thread has locked what it needs."""
    alone = threading.active_count() == 1 and multiprocessing.parent_process() is None
    return sys.platform == "linux" and alone and len(os.sched_getaffinity(0)) > 1


def shared(work: Callable[[T], R], pieces: Sequence[T]) -> list[R]:
    """``work`` of every piece. Both processes take the next piece when they are done with one, so the longest
    should come first."""
    if len(pieces) < 2 or not possible():
        return [work(piece) for piece in pieces]
    try:
        context = multiprocessing.get_context("fork")
        taken, (ours, theirs) = context.Value("q", 0), context.Pipe(duplex=False)
        copy = context.Process(target=_hand_back, args=(work, pieces, taken, theirs), daemon=True)
        copy.start()
    except OSError:  # no room for another process
        return [work(piece) for piece in pieces]
    theirs.close()
    try:
        found = _take(work, pieces, taken)
        with suppress(EOFError):
            found |= ours.recv()
    finally:
        copy.kill()
        copy.join()
    return [found[at] if at in found else work(piece) for at, piece in enumerate(pieces)]


def _take(work: Callable[[T], R], pieces: Sequence[T], taken: Any) -> dict[int, R]:
    """Results of the pieces that the other process does not take, by number."""
    found = dict[int, R]()
    while True:
        with taken:
            at, taken.value = taken.value, taken.value + 1
        if at >= len(pieces):
            return found
        found[at] = work(pieces[at])


def _hand_back(work: Callable[[T], R], pieces: Sequence[T], taken: Any, answer: Any) -> None:
    """The life of a copy. What is raised in it is raised again where the work is done again."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    with suppress(Exception):
        answer.send(_take(work, pieces, taken))
