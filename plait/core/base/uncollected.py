"""Work that makes millions of objects and no circles of them.

Python's collector goes through new objects again and again to find circles, which takes a third of planning.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Generator[None]:
    """Without the collector, which runs afterwards as before."""
    ran = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if ran:
            gc.enable()
