"""A strategy that is evaluated on its own is told which of the job's constraints it meets."""

from __future__ import annotations

from typing import Any

import pytest

from plait.core.base.text import in_bytes
from plait.core.cluster.hardware import Cluster
from plait.core.job.constraint import COUNTS, SIZES, WORDS
from plait.core.job.spec import Job
from plait.plan.answer import Planner
from plait.plan.search.candidate import Answer
from plait.plan.search.space import enumerate_space

A100 = Cluster.preset("a100-80")
MODEL = {"family": "gpt", "num_layers": 4, "hidden": 64, "num_heads": 4, "max_sequence": 64, "vocab": 256}


def job(constraints: list[str], **strategy: Any) -> Job:
    return Job.from_dict({
        "model": MODEL, "data": {"sequence_length": 64}, "train": {"global_batch_size": 4, "micro_batch_size": 2},
        "cluster": {"preset": "a100-80"}, "strategy": strategy, "plan": {"constraints": constraints},
    })  # fmt: skip


def evaluated(constraints: list[str], **strategy: Any) -> Answer:
    return Planner(job(constraints, **strategy), A100, 256).evaluate()


def test_what_is_met_and_what_is_not_is_told_with_its_value() -> None:
    asked = ["tp <= 1", "schedule in gpipe, 1f1b", "memory <= 70 GiB", "memory >= 70 GiB", "sequence_parallel = true"]
    found = evaluated(asked, pp=2, tp=2)
    assert [(one.text, one.met) for one in found.constraints] == [
        ("tp <= 1", False), ("schedule in gpipe, 1f1b", False), ("memory <= 70 GiB", True),
        ("memory >= 70 GiB", False), ("sequence_parallel = true", False),
    ]  # fmt: skip
    size = in_bytes(found.best.most_memory)
    assert found.why[0] == (
        f"plan.constraints: 'tp <= 1' is not met (2); 'schedule in gpipe, 1f1b' is not met (eager-1f1b); "
        f"'memory >= 70 GiB' is not met ({size}); 'sequence_parallel = true' is not met (false); "
        f"'memory <= 70 GiB' is met ({size})."
    )
    assert found.to_dict()["constraints"][0] == {"text": "tp <= 1", "met": False, "found": ("2",)}


def test_nothing_is_said_where_nothing_is_asked() -> None:
    found = evaluated([], tp=2)
    assert not found.constraints and "constraints" not in found.to_dict()
    assert not any("plan.constraints" in line for line in found.why)


@pytest.mark.parametrize("quantity", [*WORDS, *COUNTS, *SIZES])
def test_every_quantity_that_a_constraint_may_name_has_a_value(quantity: str) -> None:
    value = WORDS[quantity][0] if quantity in WORDS else "1 GiB" if quantity in SIZES else "1"
    either = evaluated([f"{quantity} = {value}", f"{quantity} != {value}"], pp=2, dp=2, tp=2).constraints
    assert sorted(one.met for one in either) == [False, True]
    assert either[0].found == either[1].found and len(either[0].found) == 1


def test_all_places_of_a_pipeline_have_to_meet_a_constraint() -> None:
    asked = ["tp <= 1", "dp >= 1", "micro_batch_size = 2", "ulysses = 1"]
    found = evaluated(asked, pp=2, dp=[2, 1], tp=[1, 2], schedule="1f1b").constraints
    assert [(one.met, one.found) for one in found] == [
        (False, ("1", "2")), (True, ("2", "1")), (False, ("2", "4")), (True, ("1",))
    ]  # fmt: skip


def test_an_evaluation_says_what_a_search_leaves_out() -> None:
    """Over constraints on columns: the strategy is a point of the space if and only if it meets
    them all."""
    for text in ("tp <= 1", "tp >= 2", "num_micro_batches = 1", "num_micro_batches = 2", "shard.optim = 2",
                 "recompute != full", "overlap = domino"):  # fmt: skip
        one = Planner(job([text], tp=2, dp=2, schedule="1f1b", slices={"batch": 1, "columns": 1}), A100, 256)
        assert all(each.met for each in one.evaluate().constraints) == (len(enumerate_space(one.request)) > 0), text
