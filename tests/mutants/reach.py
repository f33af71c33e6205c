"""Which tests execute which lines of some files: a plugin of pytest around coverage.py's contexts.

``-p tests.mutants.reach`` with the variable PLAIT_REACH: a JSON file with ``files`` (paths) and
``out`` (where every worker writes a file of its own).
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import coverage
import pytest

VARIABLE = "PLAIT_REACH"


@dataclass
class Reach:
    """seconds: of each test that passed; tests: which tests execute a line, by file and line."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])
    tests: dict[str, dict[int, set[str]]] = field(default_factory=dict[str, dict[int, set[str]]])

    @staticmethod
    def read(folder: Path) -> Reach:
        """What all workers have written."""
        whole = Reach()
        for path in sorted(folder.glob("reach-*.json")):
            part = json.loads(path.read_text())
            whole.seconds |= part["seconds"]
            for file, lines in part["lines"].items():
                for line, tests in lines.items():
                    whole.tests.setdefault(file, {}).setdefault(int(line), set()).update(tests)
        return whole

    def of(self, file: Path, wanted: range | None) -> list[str]:
        """Tests that execute any of some lines, or of all lines of a file; the quickest first."""
        lines = self.tests.get(str(file), {})
        found = set[str]().union(*(tests for line, tests in lines.items() if wanted is None or line in wanted))
        return sorted((test for test in found if test in self.seconds), key=lambda test: self.seconds[test])


class _Recorder:
    def __init__(self, files: list[str], out: Path, worker: str) -> None:
        self.out = out / f"reach-{worker}.json"
        self.seconds = dict[str, float]()
        self.coverage = coverage.Coverage(data_file=None, include=files, config_file=False)
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        _forget_what_is_cached()
        self.coverage.switch_context(item.nodeid)
        self.began = time.monotonic()
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.seconds[report.nodeid] = time.monotonic() - self.began

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        data = self.coverage.get_data()
        lines = {
            file: {line: [test for test in tests if test] for line, tests in data.contexts_by_lineno(file).items()}
            for file in data.measured_files()
        }
        self.out.write_text(json.dumps({"seconds": self.seconds, "lines": lines}))


def _forget_what_is_cached() -> None:
    """Else a function that keeps its results is reached by the first test alone that asks for
    them."""
    kept = type(functools.cache(int))
    for name in [name for name in sys.modules if name.startswith("plait.")]:
        for value in vars(sys.modules[name]).values():
            if isinstance(value, kept):
                value.cache_clear()


def pytest_configure(config: pytest.Config) -> None:
    """Record in every process that runs tests: the workers, or the only one."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None and getattr(config.option, "numprocesses", None):
        return
    asked = json.loads(Path(os.environ[VARIABLE]).read_text())
    config.pluginmanager.register(_Recorder(asked["files"], Path(asked["out"]), worker or "main"))
