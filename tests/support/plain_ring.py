"""The writer of rings as it is where no compiler has built ``_ring``."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from unittest import mock

from plait.core import record
from plait.core.record import ring_writer

NAME = "plait.core.record._ring"


def plain_writer() -> ModuleType:
    """Another ``ring_writer``, whose records are written in Python."""
    spec = importlib.util.spec_from_file_location("plain_ring_writer", ring_writer.__file__)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    names: dict[str, object] = record.__dict__  # type: ignore[assignment]: a module's names may be changed
    with mock.patch.dict(sys.modules, {NAME: None}), mock.patch.dict(names):
        names.pop("_ring", None)
        spec.loader.exec_module(module)
    return module
