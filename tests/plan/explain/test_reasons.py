"""Strategies and steps in words."""

from __future__ import annotations

import pytest

from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, SCHEDULES, SHARD_OVERLAPS, StrategyTable
from plait.plan.explain import reasons

SYNC, NONE = OVERLAPS.index("sync"), SHARD_OVERLAPS.index("none")
FULL = {"recompute": RECOMPUTES.index("full")}
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


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ({"dp": 4, "micro": 2}, {"dp": 2, "tp": 2, "micro": 2},
         "dp 2 (not 4), tp 2 (not 1), sequence parallel no, tp overlap domino"),
        ({"dp": 2, "tp": 2}, {"dp": 4}, "dp 4 (not 2), tp 1 (not 2)"),
        ({"tp": 2, "sequence_parallel": 1}, {"tp": 2, "p1": 2}, "slices batch 2, sequence parallel no (not yes)"),
        (FULL | {"recompute_layers": 3}, FULL, "recompute full (not full 3 layers)"),
        ({"cp": 2, "ring": 2}, {"cp": 4, "ring": 2}, "cp 4 (not 2), cp type Ulysses 2, ring 2 (not ring 2)"),
        ({"tp": 2, "p2": 4}, {"tp": 2}, "no slices"),
        ({"ep": 2}, {"ep": 4}, "ep 4 (not 2)"),
        ({"dp": 4}, {"dp": 4}, "the same settings, otherwise timed"),
    ],
)  # fmt: skip
def test_changes_are_in_the_words_of_the_table(first: dict[str, int], second: dict[str, int], told: str) -> None:
    assert reasons.changed_settings(*(reasons.settings(point(**one)) for one in (first, second))) == told


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ((1, 1, 1, 0), "DDP"), ((1, 1, 8, 0), "ZeRO-1"), ((1, 8, 8, 0), "ZeRO-2"), ((8, 8, 8, 0), "ZeRO-3/FSDP"),
        ((4, 4, 4, 0), "HSDP 4"), ((1, 2, 8, 0), "grads 2, optim 8"), ((1, 1, 4, 0), "optim 4"),
        ((2, 4, 8, 0), "params 2, grads 4, optim 8"), ((8, 8, 8, 4), "ZeRO-3/FSDP, hpZ 4"),
    ],
)  # fmt: skip
def test_sharding_has_a_common_name_or_the_ranks_of_each_kind(sizes: tuple[int, ...], told: str) -> None:
    factors = dict(zip(("params", "grads", "optim", "secondary"), sizes, strict=True))
    for degrees in ({"dp": 8}, {"dp": 4, "cp": 2}):
        assert reasons.settings(point(**degrees, **factors))["sharding"] == told


def test_settings_without_effect_are_dashes() -> None:
    assert {key for key, told in reasons.settings(point()).items() if told == "-"} == {
        "ep", "schedule", "sharding", "cp type", "slices", "sequence parallel", "tp overlap", "dp overlap",
    }  # fmt: skip
    piped = {"pp": 2, "schedule": SCHEDULES.index("interleaved"), "virtual": 4}
    assert reasons.settings(point(**piped))["schedule"] == "interleaved x4"
    assert reasons.settings(point(pp=2), "mine.txt")["schedule"] == "mine.txt"


def test_only_words_that_occur_are_explained() -> None:
    assert reasons.legend(["ZeRO-1", "1f1b", "-"]) == []
    (one,) = reasons.legend(["ZeRO-1", "grads 2, optim 8"])
    assert one.startswith("Sharding in numbers: ")
    assert [line.split()[0] for line in reasons.legend(["optim 4, hpZ 2", "interleaved x4", "eager-1f1b"])] == [
        "Sharding", "hpZ", "interleaved", "eager-1f1b:"
    ]  # fmt: skip


def test_what_most_of_a_step_is_comes_first_and_little_of_it_not_at_all() -> None:
    parts = {"tp": 1.5, "compute": 6.0, "idle": 0.05, "pp": 0.051, "dp": 2.0, "optimizer": 0.449}
    assert reasons.describe_parts(parts, 10.0, 1) == (
        "A step is 60% computation, 20% exposed data-parallel communication, 15% exposed tensor-parallel "
        "communication, 4% the optimizer, 1% other."
    )
    assert reasons.describe_parts({"compute": 9.9, "idle": 0.05}, 10.0, 2) == "A step is 99% computation, 1% other."
    for pp, waits in ((1, "1% waiting for the slowest rank"), (2, "1% waiting for other ranks")):
        assert waits in reasons.describe_parts({"compute": 9.95, "idle": 0.051}, 10.0, pp)


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
    wanted = {f"{axis}-parallel": one | changed for axis, changed in off.items()}
    assert reasons.without_overlaps(one) == wanted
