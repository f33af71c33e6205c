"""Planning, placing, training and diagnosing together, as plain functions of values. ``plait`` gives the
same names.

>>> import plait
>>> plait.place_of("lab:2x1@1gbit").world
2
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from plait.core.base.errors import naming_extras

if TYPE_CHECKING:
    from plait.api.diagnosing import diagnose_run, explain_hang
    from plait.api.loops import Engine
    from plait.api.places import place_of
    from plait.api.placing import Placing, place_job
    from plait.api.planning import plan_job
    from plait.api.timelines import read_run_timeline
    from plait.api.trained import export_run, sampler
    from plait.api.training import dry_run, prepare, start_run

__all__ = [
    "Engine", "Placing", "diagnose_run", "dry_run", "explain_hang", "export_run", "place_job", "place_of", "plan_job",
    "prepare", "read_run_timeline", "sampler", "start_run",
]  # fmt: skip

_HOMES = {
    "diagnosing": ("diagnose_run", "explain_hang"), "loops": ("Engine",), "places": ("place_of",),
    "placing": ("Placing", "place_job"), "planning": ("plan_job",),
    "timelines": ("read_run_timeline",), "trained": ("export_run", "sampler"),
    "training": ("dry_run", "prepare", "start_run"),
}  # fmt: skip
"""Modules of the names: they are imported when a name is first asked for, since some load for a second."""


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            with naming_extras(f"plait.{name}"):
                return getattr(import_module(f"plait.api.{home}"), name)
    raise AttributeError(f"module 'plait.api' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
