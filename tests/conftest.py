"""What all tests share: tiers, one Hypothesis profile, and no torch threads to fight over the
cores."""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from plait.plan.search import search as forked
from tests.support.durations import Durations

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

UNIT = 300
"""Seconds of a unit test: it waits for something that does not come."""
TIERS = {
    "unit": "no process is started, which is enforced",
    "ranks": "gloo ranks of a pool that is started once",
    "system": "commands, launchers, labs, Slurm, Kubernetes, faults, a browser",
}
OF_FOLDER = {"dist": "ranks", "streams": "ranks"} | dict.fromkeys(
    ("cli", "faults", "gpu", "kubernetes", "lab", "launch", "slurm", "view"), "system"
)
"""Tiers of folders; of all others ``unit``. A module's ``TIER`` says otherwise, a test's own mark
first."""
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system")
"""Events of the interpreter that start a process."""


class Guard:
    """Whether a unit test runs now, which starts no process."""

    on = False


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where durations are kept."""
    parser.addoption("--durations-json", type=Path, metavar="FILE", help="seconds of every test, the longest first")


def pytest_configure(config: pytest.Config) -> None:
    """In the process that hears of all tests."""
    file = config.getoption("--durations-json")
    if file and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(file))


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name bytes by argument and number: gzip holds the time of writing, and workers must agree on
    names."""
    return argname if isinstance(val, bytes) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test its tier.

    What depends on the machine's other work may be tried once more. It is then named as RERUN in
    the summary, and is to be mended. All others, and so all that numbers depend on, have one try.
    """
    here = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(here).parts[0] if item.path.is_relative_to(here) else ""
        marked = next((mark.name for mark in item.iter_markers() if mark.name in TIERS), None)
        module = item.getparent(pytest.Module)
        tier = marked or getattr(module and module.obj, "TIER", OF_FOLDER.get(folder, "unit"))
        if marked is None:
            item.add_marker(tier)
        if tier == "unit" and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(UNIT))
        if tier == "system":
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Hold a unit test to its tier."""
    if item.get_closest_marker("unit") is None:
        return (yield)
    Guard.on = True
    try:
        with mock.patch.object(forked, "can_fork", return_value=False):  # the planner does its work in one process
            return (yield)
    finally:
        Guard.on = False


def _refuse_to_start(event: str, details: tuple[object, ...]) -> None:
    parser = details and str(details[0]).endswith("/shfmt")  # reads a text and writes its tree, in milliseconds
    if Guard.on and event in STARTS and not parser:
        raise RuntimeError(f"a unit test starts a process ({event}): mark it pytest.mark.system")


sys.addaudithook(_refuse_to_start)
_spawn = multiprocessing.util.spawnv_passfds


def _spawn_unless_guarded(*args: object) -> int:
    _refuse_to_start("os.spawn", ())
    return _spawn(*args)  # type: ignore[arg-type]


multiprocessing.util.spawnv_passfds = _spawn_unless_guarded  # which tells no event
