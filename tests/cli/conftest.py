"""A run that several modules look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import trained


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job of a run that was never disturbed; its folder also serves as the corpus of others."""
    return trained(tmp_path_factory.mktemp("finished"))
