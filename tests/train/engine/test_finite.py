"""A NaN is found by every rank before it is applied or saved; ranks as threads. More in ``tests/dist``."""

from __future__ import annotations

import pytest

from plait.train.engine.steps import MAX_SKIPPED
from tests.dist import finite
from tests.dist.finite import Strategy
from tests.dist.test_finite import ALWAYS, DP, FSDP, PLANTED, TP
from tests.support.threads import threads


@PLANTED
def test_a_nan_is_traced_to_its_rank_and_tensor(strategy: Strategy, culprit: int, tensor: str) -> None:
    for said, same in threads(2).run(finite.stopped, strategy, culprit, tensor, ALWAYS):
        assert said.startswith("step 2: the loss is ")
        assert f"is the gradient of {tensor} on rank {culprit}. The update was not made." in said
        assert same, "weights, averages and counts of updates are those before"


@pytest.mark.parametrize("strategy", [TP, FSDP], ids=["tp", "fsdp"])
def test_of_several_tensors_the_models_first_is_named(strategy: Strategy) -> None:
    planted = {
        0: ["layers.1.attn.q.weight"],
        1: ["layers.1.mlp.down.weight", "layers.0.mlp.down.weight", "layers.0.mlp.up.weight"],
    }
    for said, same in threads(2).run(finite.stopped_by_several, strategy, planted, ALWAYS):
        assert "is the gradient of layers.0.mlp.up.weight on rank 1. The update was not made." in said and same


def test_a_nan_that_does_not_come_again_points_to_the_machine() -> None:
    for said, same in threads(2).run(finite.stopped, DP, 1, "layers.0.mlp.up.weight", 1):
        assert "a machine computes wrongly" in said and same


@pytest.mark.parametrize("strategy", [TP, FSDP], ids=["tp", "fsdp"])
def test_an_update_left_out_is_as_if_its_step_had_never_been(strategy: Strategy) -> None:
    for counts, same in threads(2).run(finite.skipped, strategy, 1, "layers.1.mlp.up.bias"):
        assert (counts, same) == ([0, 1, 1], True)


def test_too_many_left_out_in_a_row_end_the_run() -> None:
    for count, said in threads(1).run(finite.for_ever, Strategy()):
        assert count == MAX_SKIPPED and said.startswith(f"step {MAX_SKIPPED}: ")


@pytest.mark.parametrize(
    ("kind", "name"), [("master", "weight"), ("exp_avg", "first moment of"), ("exp_avg_sq", "second moment of")]
)
@pytest.mark.parametrize("strategy", [TP, FSDP], ids=["tp", "fsdp"])
def test_a_state_that_is_not_finite_is_found_before_it_is_saved(strategy: Strategy, kind: str, name: str) -> None:
    said = threads(2).run(finite.bad_state, strategy, 1, kind)
    assert said[0] == said[1] and said[0].startswith(f"step 1: the {name} ")
    assert "on rank 1 is not finite after this step, of which nothing is saved" in said[0]
