"""Ports for what tests start: rank 0 under torchrun, a metrics page, a launcher in a pod."""

from __future__ import annotations

import atexit
from contextlib import ExitStack

from plait.core.base.process import reserved_port

_held = ExitStack()
atexit.register(_held.close)


def own_port() -> int:
    """A port that is nobody else's until this process ends."""
    return _held.enter_context(reserved_port())
