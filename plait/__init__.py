"""Plait: plan, place, train and diagnose large-language-model training when the network is what you
wait for.

The public names of ``plait.api`` are available here, too: ``plait.plan_job("job.toml")``.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        api = import_module("plait.api")
        if name in api.__all__:
            return getattr(api, name)
    raise AttributeError(f"module 'plait' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(["__version__", *import_module("plait.api").__all__])
