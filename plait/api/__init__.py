"""The Python interface for notebooks and programs: planning, placing, training and diagnosing as
functions. ``plait`` exports the same names.

>>> import plait
>>> plait.place_of("lab:2x1@1gbit").world_size
2
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from plait.core.base.errors import naming_extras

if TYPE_CHECKING:
    from plait.api.diagnosing import diagnose_run, explain_hang
    from plait.api.places import place_of
    from plait.api.placing import PlacementRequest, place_job
    from plait.api.planning import plan_job
    from plait.api.timelines import read_run_timeline
    from plait.api.training import dry_run, export_run, prepare, sampler, start_run
    from plait.train.own_loop import Engine

__all__ = [
    "Engine", "PlacementRequest", "diagnose_run", "dry_run", "explain_hang", "export_run", "place_job", "place_of",
    "plan_job", "prepare", "read_run_timeline", "sampler", "start_run",
]  # fmt: skip

_HOMES = {
    "plait.train.own_loop": ("Engine",), "plait.api.diagnosing": ("diagnose_run", "explain_hang"),
    "plait.api.places": ("place_of",), "plait.api.placing": ("PlacementRequest", "place_job"),
    "plait.api.planning": ("plan_job",), "plait.api.timelines": ("read_run_timeline",),
    "plait.api.training": ("dry_run", "export_run", "prepare", "sampler", "start_run"),
}  # fmt: skip
"""The modules that define the public names. A module is imported at the first access to one of its
names, since some modules take a second to load."""


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            with naming_extras(f"plait.{name}"):
                return getattr(import_module(home), name)
    raise AttributeError(f"module 'plait.api' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
