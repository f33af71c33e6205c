"""Counts of tokens, as people write and read them."""

from __future__ import annotations

import pytest

from plait.core.base.errors import JobError
from plait.core.job.spec import Job
from plait.core.job.texts import in_tokens, tokens_of

SMALL = {"model": {"preset": "gpt3-125m"}}


@pytest.mark.parametrize("said", ["T", "1Q", "-3", "1.5", "1e19", "1 T T", "nan", "", -1, 0.5, float("inf")])
def test_what_is_no_count_is_refused(said: float | str) -> None:
    with pytest.raises(JobError, match=r"no count of tokens\. Write a whole number") as caught:
        tokens_of(said)
    assert caught.value.key == "plan.tokens"


@pytest.mark.parametrize(
    ("said", "tokens"), [("15T", 15 * 10**12), ("1.5e3 K", 1_500_000), ("0", 0), (7, 7), (1e12, 10**12)]
)
def test_a_count_is_read(said: float | str, tokens: int) -> None:
    assert tokens_of(said) == tokens


def test_a_job_is_checked() -> None:
    assert Job.from_dict(SMALL).changed(["plan.tokens=300B"]).plan.tokens == "300B"
    with pytest.raises(JobError, match="no count of tokens"):
        Job.from_dict(SMALL | {"plan": {"tokens": "many"}})


@pytest.mark.parametrize(
    ("count", "told"),
    [(0, "0"), (999, "999"), (1_000, "1K"), (999_499, "999K"), (2e15, "2,000T"), (12_340_000, "12.3M")],
)
def test_a_count_is_told(count: float, told: str) -> None:
    assert in_tokens(count) == told
