"""Plans and placements of runs that have lost hosts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from plait.api.places.lab import largest_connected, plan_for_fewer, repair_table
from plait.core.base.lab_hosts import name
from plait.core.job.plan import Plan
from plait.core.job.spec import Job
from plait.core.topology.rank_table import RankTable
from plait.lab import LabSpec
from plait.plan.make import make_plan

TIER = "unit"


def plan(lab: LabSpec, *settings: str) -> Plan:
    values = {"model": {"family": "gpt", "num_layers": 4, "hidden": 32, "num_heads": 4}}
    more = [
        "train.global_batch_size=12",
        "train.micro_batch_size=1",
        "strategy.slices.batch=1",
        "strategy.slices.columns=1",
    ]
    return make_plan(Job.from_dict(values).changed([*more, *settings]), lab.as_hosts, vocab=300)


def table(hosts: Sequence[int], each: int = 1) -> RankTable:
    return RankTable(tuple(map(name, hosts)), each)


def names(*hosts: int) -> list[str]:
    return [name(host) for host in hosts]


def test_only_hosts_that_are_down_are_replaced() -> None:
    lab = LabSpec.parse("6x1@1gbit")
    found = repair_table(plan(lab, "strategy.dp=2", "strategy.pp=2"), lab, table([0, 1, 2, 3]), names(2), names(4, 5))
    assert found.hosts[:2] + found.hosts[3:] == ("host0", "host1", "host3")
    assert found.hosts[2] in names(4, 5)


def test_a_spare_of_the_same_minipod_comes_first() -> None:
    """Minipods: hosts 0 to 3 and 4 to 7, two stages, each in one of them."""
    lab = LabSpec.parse("8x1@1gbit,2pods@100mbit")
    before = table([0, 1, 2, 4, 5, 6])
    two = plan(lab, "strategy.dp=3", "strategy.pp=2")
    assert repair_table(two, lab, before, names(5), names(3, 7)).hosts == tuple(names(0, 1, 2, 4, 7, 6))
    assert repair_table(two, lab, before, names(1), names(3, 7)).hosts == tuple(names(0, 3, 2, 4, 5, 6))


def test_where_placing_finds_no_room_spares_are_taken_in_order() -> None:
    """A tensor-parallel group of two hosts stays in a minipod, and no minipod has two spares."""
    lab = LabSpec.parse("6x1@1gbit,3pods@100mbit")
    found = repair_table(plan(lab, "strategy.tp=4"), lab, table([0, 1, 2, 3]), names(1, 2), names(4, 5))
    assert found.hosts == tuple(names(0, 4, 5, 3))


@pytest.mark.parametrize(
    ("settings", "hosts", "degrees"),
    [
        (("strategy.dp=4",), 3, ((3, 1),)),
        (("strategy.dp=4", "strategy.tp=2"), 3, ((3, 2),)),
        (("strategy.dp=3", "strategy.pp=2"), 5, ((2, 1), (2, 1))),
        (("strategy.dp=[2, 2]", "strategy.pp=2"), 3, ((1, 1), (1, 1))),
        (("strategy.dp=6",), 5, ((4, 1),)),  # five replicas do not share twelve sequences evenly
    ],
)
def test_fewer_replicas_with_the_same_batches(
    settings: Sequence[str], hosts: int, degrees: tuple[tuple[int, int], ...]
) -> None:
    each = 2 if "strategy.tp=2" in settings else 1
    lab = LabSpec.parse(f"6x{each}@1gbit")
    before = plan(lab, *settings)
    found = plan_for_fewer(before, None, lab, hosts)
    assert found is not None
    assert found.job is not None
    assert before.job is not None
    assert found.layout.degrees == degrees
    assert found.job.train == before.job.train
    assert found.job.fingerprint == before.job.fingerprint


def test_what_has_no_replica_to_spare_cannot_shrink() -> None:
    lab = LabSpec.parse("4x1@1gbit")
    assert plan_for_fewer(plan(lab, "strategy.tp=4"), None, lab, 3) is None
    assert plan_for_fewer(plan(lab, "strategy.pp=4"), None, lab, 3) is None


def test_what_the_job_leaves_open_is_planned_anew() -> None:
    lab = LabSpec.parse("4x1@1gbit")
    closed = plan(lab, "strategy.dp=4")
    assert closed.job is not None
    asked = closed.job.changed([f"strategy.{key}=auto" for key in ("tp", "dp", "pp")])
    found = plan_for_fewer(closed, asked, lab, 2)
    assert found is not None
    assert found.layout.world_size == 2


@pytest.mark.parametrize(
    ("reached", "own", "expected"),
    [
        ([{0, 1, 2}] * 3, [0, 1], {0, 1, 2}),
        ([{0, 2}, {1}, {0, 2}], [0, 1], {0, 2}),
        ([{0}, {1, 2}, {1, 2}], [0, 1], {1, 2}),
        ([{0, 1}, {0, 1, 2}, {1, 2}], [0, 1], {0, 1}),  # 0 and 2 do not reach each other
        ([{0, 1, 2}, {1}, {0, 2}], [0, 1], {0, 2}),  # one way only
        ([set(), set()], [0, 1], set()),
    ],
)
def test_hosts_that_all_reach_each_other(reached: list[set[int]], own: list[int], expected: set[int]) -> None:
    assert largest_connected(reached, own) == expected
