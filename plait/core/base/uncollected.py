"""Work that makes millions of objects and no circles of them: what a file holds, and plans.

Python's collector goes through new objects again and again to find circles: it takes a third of planning, and
up to four fifths of reading.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

MANY = 100_000
"""Objects: going through no more takes a few milliseconds."""


@contextmanager
def uncollected() -> Generator[None]:
    """A block, or a function that it decorates, without the collector, which runs afterwards as before.

    Where much was made meanwhile it counts as old then, or the collector would go through all of it at once.

    >>> with uncollected():
    ...     gc.isenabled()
    False
    """
    ran = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if ran:
            if gc.get_count()[0] > MANY and not gc.get_freeze_count():  # what somebody has frozen stays so
                gc.freeze()
                gc.unfreeze()
            gc.enable()
