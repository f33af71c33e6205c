"""Batch ramp-up: the arithmetic of steps, the budget in tokens, what is refused by name."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import JobError
from plait.core.job.advice import changed
from plait.core.job.rampup import BatchSizes, RampupSection
from plait.core.job.spec import Job

VALUES: dict[str, Any] = {
    "model": {"family": "gpt", "hidden": 8, "num_heads": 1, "num_layers": 2, "vocab": 257},
    "data": {"sequence_length": 16},
    "train": {"global_batch_size": 8},
    "strategy": {"dp": 1},
}
RAMP = {"start": 2, "increment": 2, "samples": 20}


def megatron(rampup: RampupSection, batch: int, consumed: int) -> int:
    """The batch after so many sequences, as Megatron-LM has it (num_microbatches_calculator), in
    whole numbers."""
    count = (batch - rampup.start) // rampup.increment
    if consumed > rampup.samples or count == 0:
        return batch
    return min(batch, rampup.start + consumed * count // rampup.samples * rampup.increment)


@given(st.integers(1, 40), st.integers(1, 20), st.integers(0, 12), st.integers(1, 900), st.integers(0, 3000))
def test_every_step_is_megatrons(start: int, increment: int, rises: int, samples: int, some: int) -> None:
    rampup, batch = RampupSection(start=start, increment=increment, samples=samples), start + increment * rises
    sizes, consumed, found = BatchSizes.of(batch, rampup), 0, list[int]()
    while consumed <= samples + 2 * batch:
        found.append(megatron(rampup, batch, consumed))
        consumed += found[-1]
    assert [sizes.at(step) for step in range(len(found))] == found
    before = [0, *accumulate(found)]
    assert [sizes.before(step) for step in range(len(before))] == before
    assert sizes.at(sizes.ramped) == batch and (not sizes.ramped or sizes.at(sizes.ramped - 1) < batch)
    assert sizes.before(sizes.within(some)) <= some < sizes.before(sizes.within(some) + 1)
    steps = sizes.steps_for(some)
    assert sizes.before(steps) >= some and (steps == 0 or sizes.before(steps - 1) < some)


def test_a_budget_in_tokens_is_so_many_steps_of_the_ramp() -> None:
    """2 2 2 2 4 4 6, then 8: 22 sequences before the whole batch."""
    for sequences, steps in ((1, 1), (8, 4), (9, 5), (22, 7), (23, 8), (31, 9)):
        job = Job.from_dict(changed(VALUES, {"train.rampup_batch_size": RAMP, "train.tokens": 16 * sequences}))
        assert job.train.steps == steps
        assert Job.from_dict(job.to_dict()) == job


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"strategy.dp": 4}, "rampup_batch_size.start", "2 sequences are not a multiple of micro_batch_size x dp = 1 x 4"),
    ({"train.rampup_batch_size.increment": 3, "strategy.dp": 2}, "rampup_batch_size.increment", "3 sequences are not"),
    ({"train.rampup_batch_size.increment": 4}, "rampup_batch_size.increment", "from 2 in steps of 4"),
    ({"train.rampup_batch_size.start": 10}, "rampup_batch_size.start", "10 is more than global_batch_size = 8"),
    ({"train.micro_batch_size": 0}, "micro_batch_size", "the whole batch at once"),
    ({"train.global_batch_size": 4002, "train.rampup_batch_size.start": 2}, "rampup_batch_size.increment", "2,000"),
]


@pytest.mark.parametrize(("change", "key", "said"), REFUSED)
def test_what_does_not_divide_is_refused_by_name(change: dict[str, Any], key: str, said: str) -> None:
    values = changed(VALUES, {"train.rampup_batch_size": RAMP})
    with pytest.raises(JobError, match=said) as caught:
        Job.from_dict(changed(values, change))
    assert caught.value.key == f"train.{key}"


def test_advice_for_a_ramp_works() -> None:
    values = changed(VALUES, {"train.rampup_batch_size": RAMP, "train.micro_batch_size": 0, "strategy.dp": 2})
    with pytest.raises(JobError) as caught:
        Job.from_dict(values)
    for change in caught.value.changes:
        Job.from_dict(changed(values, change))
