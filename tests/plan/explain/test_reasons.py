"""Strategies and steps in words."""

from __future__ import annotations

import pytest

from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, SCHEDULES, SHARD_OVERLAPS, StrategyTable
from plait.plan.explain import reasons

SYNC, NONE = OVERLAPS.index("sync"), SHARD_OVERLAPS.index("none")
ALONE = {"pp": "1", "dp": "1", "cp": "1", "tp": "1", "micro_batch_size": "1", "recompute": "none"}


def point(**values: int) -> dict[str, int]:
    return StrategyTable.of([values]).row(0)


@pytest.mark.parametrize(
    ("values", "more"),
    [
        ({}, {}),
        ({"pp": 2}, {"pp": "2", "schedule": "1f1b"}),
        ({"pp": 2, "schedule": SCHEDULES.index("zb-v"), "virtual": 2}, {"pp": "2", "schedule": "zb-v"}),
        ({"pp": 2, "schedule": SCHEDULES.index("interleaved"), "virtual": 4},
         {"pp": "2", "schedule": "interleaved", "virtual_stages": "4"}),
        ({"virtual": 4, "schedule": SCHEDULES.index("interleaved")}, {}),
        ({"tp": 2}, {"tp": "2", "overlap.tp": "domino", "slices": "1x1", "sequence_parallel": "false"}),
        ({"tp": 2, "sequence_parallel": 1, "p2": 2},
         {"tp": "2", "overlap.tp": "domino", "slices": "1x2", "sequence_parallel": "true"}),
        ({"dp": 2, "optim": 2}, {"dp": "2", "shard.params": "1", "shard.grads": "1", "shard.optim": "2",
                                 "overlap.shard": "both"}),
        ({"cp": 2, "secondary": 2}, {"cp": "2", "heads x ring": "2x1", "shard.params": "1", "shard.grads": "1",
                                     "shard.optim": "1", "shard.secondary": "2", "overlap.shard": "both",
                                     "overlap.tp": "domino", "slices": "1x1"}),
        ({"graphs": 1}, {"cuda_graphs": "true"}),
        ({"ep": 2}, {"ep": "2"}),
        ({"recompute": RECOMPUTES.index("full")}, {"recompute": "full"}),
        ({"recompute": RECOMPUTES.index("full"), "recompute_layers": 0},
         {"recompute": "full 0 layers"}),
    ],
)  # fmt: skip
def test_what_is_chosen_is_said_without_what_has_no_meaning(values: dict[str, int], more: dict[str, str]) -> None:
    assert reasons.readable(point(**values)) == ALONE | more


def test_differences_have_both_values() -> None:
    one, other = point(dp=4, micro=2), point(dp=2, tp=2, micro=2)
    assert reasons.differences(reasons.readable(one), reasons.readable(other)) == {
        "dp": ("4", "2"), "tp": ("1", "2"), "overlap.tp": ("-", "domino"), "slices": ("-", "1x1"),
        "sequence_parallel": ("-", "false"),
    }  # fmt: skip
    assert reasons.changed_settings(one, other) == "dp=2 tp=2 overlap.tp=domino slices=1x1 sequence_parallel=false"
    assert reasons.changed_settings(other, one) == "dp=4 tp=1"
    flat, full = point(tp=2, sequence_parallel=1), {"recompute": RECOMPUTES.index("full")}
    assert reasons.changed_settings(flat, point(tp=2)) == "sequence_parallel=false"
    assert reasons.changed_settings(point(**full, recompute_layers=3), point(**full)) == "recompute=full"
    assert reasons.changed_settings(point(cp=2, secondary=2), point(cp=2)) == "no shard.secondary"
    assert reasons.changed_settings(one, dict(one)) == "the same strategy otherwise timed"


def test_what_most_of_a_step_is_comes_first_and_little_of_it_not_at_all() -> None:
    parts = {"tp": 1.5, "compute": 6.0, "idle": 0.05, "pp": 0.051, "dp": 2.0, "optimizer": 0.449}
    assert reasons.describe_parts(parts, 10.0) == (
        "A step is computation for 60%, exposed data-parallel communication for 20%, exposed tensor-parallel "
        "communication for 15%, the optimizer for 4% of its time."
    )
    assert reasons.describe_parts({"compute": 9.9, "idle": 0.05}, 10.0) == "A step is computation for 99% of its time."
    assert "waiting for other ranks for 1%" in reasons.describe_parts({"compute": 9.95, "idle": 0.051}, 10.0)


def test_what_another_loses_is_the_part_that_grows_most() -> None:
    assert reasons.largest_loss({"compute": 1.0, "tp": 2.0}, {"compute": 2.5, "tp": 3.0}) == ("computation", 1.5)
    assert reasons.largest_loss({"compute": 1.0}, {"compute": 1.0, "pp": 0.5}) == (
        "exposed transfers between stages",
        0.5,
    )
    assert reasons.largest_loss({"compute": 1.0, "pp": 9.0}, {"compute": 0.5}) == ("computation", 0.0)


@pytest.mark.parametrize(
    ("values", "off"),
    [
        ({}, {}),
        ({"tp": 2, "p1": 4, "p2": 2}, {"tensor": {"overlap": SYNC, "p1": 1, "p2": 1}}),
        ({"tp": 2, "overlap": SYNC}, {}),
        ({"dp": 2}, {"data": {"shard_overlap": NONE}}),
        ({"cp": 2}, {"data": {"shard_overlap": NONE}}),
        ({"dp": 2, "shard_overlap": NONE}, {}),
        ({"dp": 2, "tp": 2}, {"tensor": {"overlap": SYNC}, "data": {"shard_overlap": NONE}}),
    ],
)
def test_every_overlap_is_tried_off(values: dict[str, int], off: dict[str, dict[str, int]]) -> None:
    one = point(**values)
    wanted = {f"Hiding {axis} parallelism's communication": one | changed for axis, changed in off.items()}
    assert reasons.without_overlaps(one) == wanted
