"""What tests of jobs share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.core.job.spec import Job

MODEL = '[model]\npreset = "gpt3-125m"\n'
"""The least that a job says."""


def made(**tables: Any) -> Job:
    """Of such a model, with tables beside it."""
    return Job.from_dict({"model": {"preset": "gpt3-125m"}, **tables})


@pytest.fixture
def job_file(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a text as a job's file, and says where that is."""

    def write(text: str) -> Path:
        file = tmp_path / "job.toml"
        file.write_text(text)
        return file

    return write
