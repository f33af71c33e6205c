"""Faults are planted on labs; where none can run, nothing is tested, and why is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.lab import why_no_lab


@pytest.fixture(scope="session")
def needs_lab() -> None:
    """Skip where no lab can run, and say why."""
    if reason := why_no_lab():
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def own_list(needs_lab: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of running labs that no user's lab is in."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
