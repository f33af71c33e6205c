"""What a rank's threads are at: Python stacks, asked by a thread of its own or, where Python does not run,
by a signal."""

from __future__ import annotations

import faulthandler
import linecache
import re
import sys
import threading
from pathlib import Path
from types import FrameType

from plait.core.runs.evidence import STACKS, Thread

PACKAGE = str(Path(__file__).parents[2])
_WAITS = re.compile(r"\.(wait|settle|synchronize|barrier|broadcast|all_gather\w*|all_reduce)\(")
"""How Plait's own lines look in which a thread waits for other ranks."""
_WAITS_IN_C = re.compile(r"\.wait\(")
"""How anybody's line looks in which it waits with nothing of Python under it: for torch's work, or for a
collective that Plait records."""
DEEPEST = 40


def stacks_on_signal() -> None:
    """Print all stacks to the rank's log on a signal. The handler is C: it runs while the interpreter's lock
    is held elsewhere, too."""
    if STACKS is not None:
        faulthandler.register(STACKS, file=sys.stderr, all_threads=True)


def main_stack() -> tuple[Thread, tuple[str, ...]]:
    """Whether the main thread waits for other ranks, and where it is, innermost last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames: list[FrameType] = []
    while frame is not None and len(frames) < DEEPEST:
        frames.append(frame)
        frame = frame.f_back
    return ("waits" if _waits(frames) else "works"), tuple(_spoken(one) for one in reversed(frames))


def importing(stack: tuple[str, ...]) -> bool:
    """Whether a thread is importing a module, which takes as long as the disk does: libraries import at their
    first use, in the midst of the first step."""
    return any("importlib._bootstrap" in frame for frame in stack)


def _waits(frames: list[FrameType]) -> bool:
    """By the innermost line, or the innermost that is Plait's; between it and the thread's end nothing but
    torch's communication and Python's own waiting."""
    if frames and _WAITS_IN_C.search(_line(frames[0])):
        return True
    for frame in frames:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE):
            return bool(_WAITS.search(_line(frame)))
        if "torch/distributed" not in name and not name.endswith(("threading.py", "c10d_logger.py")):
            return False
    return False


def _line(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno)


def _spoken(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
