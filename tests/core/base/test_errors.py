from __future__ import annotations

import pytest

from plait.core.base import errors
from plait.core.base.errors import LONGEST_KEY, JobError, NotFinite, PlaitError, RankFailure, RunLost, nearest


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (JobError("is missing"), "is missing."),
        (JobError("3 is odd", key="train.steps"), "train.steps: 3 is odd."),
        (
            JobError("3 is odd.", file="a.toml", key="train.steps", fix="Use 4."),
            "a.toml: train.steps: 3 is odd. Use 4.",
        ),
        (
            JobError("3 is odd", key="train.steps", fix="Use 4").in_file("a.toml"),
            "a.toml: train.steps: 3 is odd. Use 4.",
        ),
    ],
)
def test_a_job_error_reads_as_sentences(error: JobError, text: str) -> None:
    assert str(error) == text


def test_the_users_mistakes_exit_with_2_and_what_befalls_a_run_with_1() -> None:
    deliberate = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, PlaitError)]
    assert {e.exit_status for e in deliberate if e not in (RankFailure, NotFinite, RunLost)} == {2}
    assert RankFailure.exit_status == NotFinite.exit_status == RunLost.exit_status == 1


def test_nearest_suggests_only_what_is_near() -> None:
    assert nearest("stepz", ["steps", "batch"]) == " (did you mean 'steps'?)"
    assert nearest("colour", ["steps", "batch"]) == ""


@pytest.mark.parametrize("kind", [PlaitError, JobError, RankFailure, NotFinite, RunLost])
def test_no_name_in_an_error_breaks_its_paragraph(kind: type[PlaitError]) -> None:
    """Nor steers a terminal."""
    assert str(kind("'a\n\n\x1b[31m' is missing")).startswith(r"'a\n\n\x1b[31m' is missing")


def test_a_long_key_of_a_file_is_cut() -> None:
    whole, longer = "k" * LONGEST_KEY, "k" * (LONGEST_KEY + 1)
    assert str(JobError("is unknown", key=whole)) == f"{whole}: is unknown."
    error = JobError("is unknown", file="a.json", key=longer)
    assert str(error) == f"a.json: {'k' * (LONGEST_KEY - 3)}...: is unknown."
    assert error.key == longer
