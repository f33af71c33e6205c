"""What follows from the settings of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.core.base.errors import JobError
from plait.core.job.cluster_settings import SlurmSection
from plait.core.job.settings import RunSection


@pytest.mark.parametrize(
    ("timeout", "deadline", "call", "first"),
    [
        (100.0, 0.0, 50.0, 90.0),  # four times as long, and not until the others give up
        (100.0, 10.0, 10.0, 40.0),
        (100.0, 95.0, 95.0, 95.0),
        (1000.0, 225.0, 225.0, 900.0),
    ],
)
def test_deadlines(timeout: float, deadline: float, call: float, first: float) -> None:
    run = RunSection(timeout=timeout, hang_deadline=deadline)
    assert (run.call_deadline, run.first_deadline) == (call, first)


def test_a_run_has_a_folder_of_its_own() -> None:
    assert RunSection(folder="runs", name="one").path == Path("runs/one")
    assert RunSection(folder="runs", name="one").named("two").name == "one"
    assert RunSection(folder="runs").named("two").path == Path("runs/two")


@pytest.mark.parametrize("name", [".", "..", "a/b", "/", " ", "\t"])
def test_a_runs_name_is_one_folders(name: str) -> None:
    with pytest.raises((JobError, ValueError)):
        RunSection(name=name)
    assert RunSection(name="...").name == "..."


@pytest.mark.parametrize("key", ["partition", "time", "account", "reservation", "options", "setup"])
def test_what_slurm_is_told_has_no_line_breaks(key: str) -> None:
    values = (lambda text: [text]) if key in ("options", "setup") else (lambda text: text)
    with pytest.raises(JobError, match=f"slurm.{key}"):
        SlurmSection.model_validate({key: values("a\nb")})
    assert SlurmSection.model_validate({key: values("a\tb")})
