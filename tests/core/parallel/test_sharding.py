"""Who holds what of a unit, level by level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import JobError
from plait.core.parallel.sharding import LEVELS, Level, Sharding, Unit, unit_of
from plait.core.parallel.strategy import ShardOverlap, Strategy
from plait.core.step.orders.overlap import sync_order
from plait.core.step.segments import Action, Phase, SegmentGraph
from plait.core.step.traffic import UnitAction, with_units

factors = st.sampled_from([(1, 1, 1), (1, 1, 4), (1, 2, 4), (2, 2, 4), (2, 4, 8), (4, 4, 4), (1, 4, 4), (1, 1, 2)])


@given(factors, st.sampled_from([1, 2]))
def test_shards_of_a_level_make_the_whole_and_lie_within_those_before(sizes: tuple[int, int, int], times: int) -> None:
    params, grads, optim = sizes
    sharding, numel = Sharding(params=params, grads=grads, optim=optim), 16
    for rank in range(8 * times):
        low, high = 0, numel
        for level, factor in zip(LEVELS, sizes, strict=False):
            start, stop = sharding.shard(rank, level, numel)
            assert low <= start < stop <= high
            assert stop - start == numel // factor
            low, high = start, stop
    for level, factor in zip(LEVELS, sizes, strict=False):
        found = sorted({sharding.shard(rank, level, numel) for rank in range(8)})
        assert [start for start, _ in found] == [at * numel // factor for at in range(factor)]


@pytest.mark.parametrize(("level", "shard"), [("params", (40, 80)), ("grads", (40, 60)), ("optim", (50, 60))])
def test_a_rank_of_eight(level: str, shard: tuple[int, int]) -> None:
    assert Sharding(params=2, grads=4, optim=8).shard(5, level, 80) == shard  # type: ignore[arg-type]


@pytest.mark.parametrize(("secondary", "numel", "padded"), [(0, 8, 8), (0, 9, 12), (0, 1, 4), (2, 8, 8), (2, 9, 16)])
def test_a_unit_is_padded_so_that_every_factor_divides_it(secondary: int, numel: int, padded: int) -> None:
    assert Sharding(params=4, grads=4, optim=4, secondary=secondary).padded(numel) == padded


def test_neighbours_keep_the_other_parts_of_a_second_copy() -> None:
    assert Sharding(params=4, grads=4, optim=4, secondary=2).neighbours(5) == (4, 5)
    assert Sharding().neighbours(5) == (5,)


def told(schedule: list[Action | UnitAction]) -> str:
    """What runs, and what is done to units, in words."""
    return " ".join(
        f"{action.op.verb}-{action.op.unit[0]}{action.op.unit[1]}" if isinstance(action, UnitAction) else str(action.op)
        for action in schedule
        if action.verb in ("run", "unit")
    )


UNITS: list[Unit] = [("embedding", 0), ("positions", 0), ("attn", 0), ("mlp", 0)]


def lists(phase: Phase, overlap: ShardOverlap, units: Sequence[Unit] = UNITS, **more: Any) -> str:
    graph = SegmentGraph(num_layers=1, phase=phase, communicates=False, **more)
    return told(with_units(graph, sync_order(graph), units, Strategy(shard_overlap=overlap)))


def test_a_forward_gathers_a_layer_at_a_time() -> None:
    assert lists("F", "none") == (
        "gather-embedding0 need-embedding0 embed.R0 drop-embedding0 "
        "gather-positions0 need-positions0 attn0.N0 drop-positions0 "
        "gather-attn0 gather-mlp0 need-attn0 attn0.F0 attn0.R0 drop-attn0 mlp0.N0 need-mlp0 mlp0.F0 mlp0.R0 drop-mlp0 "
        "head.N0 gather-embedding0 need-embedding0 next-vectors0 head.F0 drop-embedding0 head.L0"
    )
    assert lists("F", "backward") == lists("F", "none")


@pytest.mark.parametrize("overlap", ["forward", "both"])
def test_where_a_forward_overlaps_the_next_layer_is_gathered_beside_it(overlap: ShardOverlap) -> None:
    assert lists("F", overlap, heads=False) == (
        "gather-embedding0 need-embedding0 gather-positions0 embed.R0 drop-embedding0 "
        "gather-positions0 need-positions0 gather-attn0 gather-mlp0 attn0.N0 drop-positions0 "
        "gather-attn0 gather-mlp0 need-attn0 next-vectors0 attn0.F0 attn0.R0 drop-attn0 "
        "mlp0.N0 need-mlp0 mlp0.F0 mlp0.R0 drop-mlp0 leave.N0"
    )


def test_a_backward_gathers_a_module_at_a_time_and_reduces_what_is_whole() -> None:
    assert lists("B", "forward") == (
        "gather-embedding0 need-embedding0 head.C0 drop-embedding0 open-embedding0 head.W0 head.J0 "
        "gather-mlp0 need-mlp0 mlp0.D0 mlp0.C0 drop-mlp0 "
        "open-mlp0 mlp0.W0 mlp0.W0.1 close-mlp0 settle-mlp0 mlp0.J0 "
        "gather-attn0 need-attn0 next-vectors0 attn0.D0 attn0.C0 drop-attn0 "
        "open-attn0 attn0.W0 attn0.W0.1 close-attn0 settle-attn0 "
        "open-positions0 attn0.J0 close-positions0 settle-positions0 embed.W0 close-embedding0 settle-embedding0"
    )


@pytest.mark.parametrize("overlap", ["backward", "both"])
def test_where_a_backward_overlaps_reductions_are_settled_later(overlap: ShardOverlap) -> None:
    assert lists("B", overlap) == (
        "gather-embedding0 need-embedding0 gather-mlp0 head.C0 drop-embedding0 open-embedding0 head.W0 head.J0 "
        "gather-mlp0 need-mlp0 gather-attn0 mlp0.D0 mlp0.C0 drop-mlp0 open-mlp0 mlp0.W0 mlp0.W0.1 close-mlp0 mlp0.J0 "
        "gather-attn0 need-attn0 next-vectors0 attn0.D0 attn0.C0 drop-attn0 open-attn0 attn0.W0 attn0.W0.1 close-attn0 "
        "open-positions0 attn0.J0 close-positions0 embed.W0 close-embedding0"
    )


def test_a_head_of_its_own_is_read_in_place_of_the_embedding() -> None:
    units: list[Unit] = [*UNITS, ("head", 0)]
    assert lists("F", "none", units).endswith(
        "head.N0 gather-head0 need-head0 next-vectors0 head.F0 drop-head0 head.L0"
    )
    whole = lists("step", "none", units)
    assert "head.F0 head.L0 head.C0 drop-head0 open-head0 head.W0 close-head0 settle-head0" in whole
    assert whole.endswith("open-embedding0 embed.W0 close-embedding0 settle-embedding0")


def test_a_parallel_block_is_gathered_as_one_and_its_gradients_apart() -> None:
    assert lists("B", "none", UNITS[2:], parallel_block=True, heads=False, embeds=False) == (
        "leave.J0 gather-attn0 gather-mlp0 need-attn0 need-mlp0 next-vectors0 block0.D0 block0.C0 drop-attn0 drop-mlp0 "
        "open-attn0 block0.W0 block0.W0.1 close-attn0 settle-attn0 "
        "open-mlp0 block0.W0.2 block0.W0.3 close-mlp0 settle-mlp0 block0.J0"
    )


def test_a_list_that_reads_no_unit_gathers_for_the_one_after_it() -> None:
    assert lists("W", "both", []).startswith("next-vectors0 ")
    assert lists("F", "both", []).count("next") == 1


@pytest.mark.parametrize(
    ("name", "ndim", "unit"),
    [
        ("layers.3.attn.column.weight", 2, ("attn", 3)), ("layers.12.mlp.row.weight", 2, ("mlp", 12)),
        ("layers.3.attn.norm.weight", 1, ("vectors", 0)), ("embedding.weight", 2, ("embedding", 0)),
        ("head.weight", 2, ("head", 0)), ("down.1.weight", 2, ("down", 1)), ("up.2.weight", 3, ("up", 2)),
        ("positions.weight", 2, ("positions", 0)), ("head.bias", 1, ("vectors", 0)),
    ],
)  # fmt: skip
def test_the_unit_of_a_parameter(name: str, ndim: int, unit: Unit) -> None:
    assert unit_of(name, ndim) == unit


@pytest.mark.parametrize(
    ("name", "factors"),
    [("ddp", (1, 1, 1)), ("zero1", (1, 1, 8)), ("zero2", (1, 8, 8)), ("zero3", (8, 8, 8)), ("fsdp", (8, 8, 8))],
)
def test_named_points(name: str, factors: tuple[int, int, int]) -> None:
    sharding = Sharding.named(name, 8)
    assert sharding.factors(8) == (*factors, 8)
    assert sharding.keeps_buffers == (factors[:2] == (1, 1))
    sharding.check(8)


def test_an_unknown_point_is_named_with_those_that_are_known() -> None:
    with pytest.raises(JobError, match=r"'zero4' is no named sharding\. Use \"ddp\", .* or \"fsdp\""):
        Sharding.named("zero4", 8)


@pytest.mark.parametrize(
    ("factors", "key"),
    [
        ({"params": 2, "grads": 3, "optim": 6}, "params"), ({"params": 0}, "params"), ({"grads": -1}, "grads"),
        ({"params": 1, "grads": 2, "optim": 5}, "grads"), ({"optim": 5}, "optim"), ({"optim": 16}, "optim"),
        ({"params": 8, "grads": 8, "optim": 8, "secondary": 8}, "secondary"),
        ({"params": 8, "grads": 8, "optim": 8, "secondary": 1}, "secondary"),
        ({"params": 8, "grads": 8, "optim": 8, "secondary": 3}, "secondary"),
        ({"params": 8, "grads": 8, "optim": 8, "secondary": -2}, "secondary"),
        ({"secondary": 2}, "secondary"),
    ],
)  # fmt: skip
def test_factors_that_eight_ranks_cannot_have(factors: dict[str, int], key: str) -> None:
    with pytest.raises(JobError) as caught:
        Sharding(**factors).check(8)
    assert caught.value.key == f"strategy.shard.{key}"


def test_a_second_copys_ranks_that_are_advised_divide_the_first() -> None:
    with pytest.raises(JobError) as caught:
        Sharding(params=12, grads=12, optim=12, secondary=5).check(12)
    assert [one["strategy.shard.secondary"] for one in caught.value.changes] == [2, 3, 4, 6, 0]


@pytest.mark.parametrize(
    ("level", "group"), [("params", (4, 5)), ("grads", (5, 7)), ("optim", (5,)), ("replicas", (1, 5))]
)
def test_groups_of_a_rank(level: Level, group: tuple[int, ...]) -> None:
    assert Sharding(params=2, grads=4, optim=4).group(5, level, 8) == group
