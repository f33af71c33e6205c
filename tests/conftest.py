"""What all tests share: one Hypothesis profile, and no torch threads to fight over the cores."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

# Deadlines measure the machine's other work. The suite draws the same examples each time, so that a change is
# judged by what it changed; `--hypothesis-profile=drawn` looks for new ones, and keeps what it finds.
settings.register_profile(
    "drawn", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.register_profile("plait", settings.get_profile("drawn"), derandomize=True)
settings.load_profile("plait")

# Hypothesis also draws constants that it finds in local modules, of those that a process has imported so far:
# the same test would draw other examples when a worker took other files before it. No setting prevents it.
_constants_of_modules = providers._get_local_constants
providers._get_local_constants = lambda: Constants() if settings().derandomize else _constants_of_modules()

# What somebody has measured on this machine is no part of what is tested.
os.environ["XDG_DATA_HOME"] = os.path.join(tempfile.gettempdir(), "plait-tests-no-data")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported by any test; ranks started by tests inherit it

# A suite that was started in the background, or by nohup, inherits ignored signals and would pass them on to
# what it tests.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

TIMED = ("cli", "faults", "kubernetes", "lab", "launch", "slurm", "view")
"""Folders whose tests start processes, services or a browser: time is dealt out by the machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What depends on the machine's other work may be tried once more. It is then named as RERUN in the
    summary, and is to be mended. All others, and so all that numbers depend on, have one try.
    """
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and item.path.relative_to(here).parts[0] in TIMED:
            item.add_marker(pytest.mark.flaky(reruns=1))
