"""How long each test took, with its fixtures, as JSON: a plugin of pytest."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest


class Durations:
    """Seconds by test, written when all have run. A test that was tried twice counts both."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.seconds = defaultdict[str, float](float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        longest = sorted(self.seconds.items(), key=lambda entry: -entry[1])
        rows = {name: round(seconds, 2) for name, seconds in longest}
        self.file.write_text(json.dumps(rows, indent=0) + "\n")
