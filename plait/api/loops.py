"""A training loop of one's own: ``plait.Engine``."""

from __future__ import annotations

from plait.train.own_loop import Engine

__all__ = ["Engine"]
