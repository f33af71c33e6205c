"""What tests of jobs share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

MODEL = '[model]\npreset = "gpt3-125m"\n'
"""The least that a job says."""


@pytest.fixture
def job_file(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a text as a job's file, and says where that is."""

    def write(text: str) -> Path:
        file = tmp_path / "job.toml"
        file.write_text(text)
        return file

    return write
