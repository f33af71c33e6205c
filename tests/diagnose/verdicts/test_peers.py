"""Whoever should be equal is compared, in numbers: ranks of a stage, and groups between as many
hosts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from plait.core.parallel.layout import Layout
from plait.core.record.rollup import PROCESSOR
from plait.diagnose.measured.recording import Recording, grid_of
from plait.diagnose.verdicts.peers import (
    Lateness,
    crowded,
    hosts_known,
    lateness,
    leave_one_out_median,
    members_of,
    own_work,
    peer_median,
    processor_work,
    transfers,
    typical_work,
)
from tests.support.recordings.made import recording_of, spans_of


@pytest.mark.parametrize(
    ("values", "median", "others"),
    [
        ([3.0], [None], [None]), ([1.0, 3.0], [3.0, 1.0], [3.0, 1.0]), ([1.0, 2.0, 9.0], [2.0] * 3, [2.0] * 3),
        ([1.0, 2.0, 4.0, 9.0], [3.0] * 4, [4.0, 4.0, 2.0, 2.0]),
        ([9.0, 1.0, 4.0, 2.0, 7.0], [4.0] * 5, [3.0, 5.5, 4.5, 5.5, 3.0]),
    ],
)  # fmt: skip
def test_what_equals_usually_take(values: list[float], median: list[float], others: list[float]) -> None:
    table = pl.DataFrame({"cell": [0] * len(values) + [1], "value": [*values, 77.0]})
    found = table.select(
        all=peer_median(pl.col("value"), ["cell"]), others=leave_one_out_median(pl.col("value"), ["cell"])
    )
    assert found["all"].to_list()[:-1] == median and found["others"].to_list()[:-1] == others
    assert found["all"][-1] is None and found["others"][-1] is None


def works(seconds: dict[tuple[int, int], float], *, pp: int = 1, dp: int = 1, **more: object) -> Recording:
    """Computation of ranks in steps, and 50 s of waiting."""
    rows = [{"rank": rank, "step": step, "end": one, **more} for (rank, step), one in seconds.items()]
    rows += [{"rank": rank, "step": step, "kind": "wait", "end": 50.0} for rank, step in seconds]
    return recording_of(spans_of(*rows), Layout.of(pp=pp, dp=dp))


def test_own_work_against_the_ranks_of_a_stage() -> None:
    """The last stage takes twice as long; rank 1 of the first a half longer."""
    seconds = {
        (rank, step): (2.0 if rank > 2 else 1.5 if rank == 1 else 1.0) for rank in range(6) for step in range(12)
    }
    found = own_work(works(seconds, pp=2, dp=3))
    assert (found.peers, found.steps) == (list(range(6)), list(range(12)))
    assert found.deviation[:, 11].tolist() == [0.0, 0.5, 0.0, 0.0, 0.0, 0.0]
    assert found.excess[:, 0].tolist() == found.computing[:, 0].tolist() == [0.0, 0.5, 0.0, 0.0, 0.0, 0.0]


def test_what_a_host_does_between_ops_is_own_work_where_all_waiting_is_known() -> None:
    rows = [{"rank": rank, "kind": kind, "site": kind, "end": 1.0 + rank * (kind == "host")}
            for rank in range(3) for kind in ("compute", "host")]  # fmt: skip
    seen = recording_of(spans_of(*rows), Layout.of(dp=3))
    found = own_work(seen)
    assert found.excess[:, 0].tolist() == [-1.0, 0.0, 1.0] and found.computing[:, 0].tolist() == [0.0, 0.0, 0.0]
    assert found.deviation[2, 0] == pytest.approx(1 / 3)
    partial = recording_of(spans_of(*rows), Layout.of(dp=3), complete=False)
    assert own_work(partial).excess[:, 0].tolist() == [0.0, 0.0, 0.0]


def test_where_sequences_are_shared_attention_is_no_own_work() -> None:
    rows = [
        {"rank": rank, "site": site, "end": 1.0 + rank * (site != "mlp")}
        for rank in range(3)
        for site in ("mlp", "attn", "block")
    ]
    assert own_work(recording_of(spans_of(*rows), Layout.of(dp=3))).excess[2, 0] == 2.0
    three = recording_of(spans_of(*rows, *({"rank": n, "site": "mlp"} for n in range(3, 6))), Layout.of(cp=2, dp=3))
    assert float(np.nanmax(own_work(three).excess)) == 0.0


def test_nobody_beside_is_not_known() -> None:
    found = own_work(works({(0, 0): 1.0, (1, 0): 2.0}, pp=2))
    assert (found.peers, found.deviation.size) == ([], 0)
    some = own_work(works({(0, 0): 1.0, (1, 0): 2.0, (0, 1): 1.0}, dp=2))
    assert np.isnan(some.deviation[:, 1]).all() and some.deviation[:, 0].tolist() == [-0.5, 1.0]


def test_how_much_of_a_processor_steps_need() -> None:
    seen = recording_of(
        spans_of(*({"rank": r, "kind": PROCESSOR, "end": 1.0 + r / 2} for r in range(3))), Layout.of(dp=3)
    )
    found = processor_work(seen)
    assert found.deviation[:, 0] == pytest.approx([-1 / 3, 0.0, 1 / 3])
    assert found.computing[2, 0] == 0.5


@pytest.mark.parametrize(("had", "is_crowded"), [(0.69, True), (0.71, False)])
def test_whether_ranks_share_processors(had: float, is_crowded: bool) -> None:
    """The median rank has one for 0.7 of its own work; those of which nothing is known do not
    count."""
    rows = [{"rank": r, "kind": kind, "end": one} for r, share in ((0, 0.1), (1, had), (2, 2.0))
            for kind, one in ((PROCESSOR, 4.0 * share), ("compute", 3.0), ("host", 1.0), ("wait", 90.0))]  # fmt: skip
    rows += [{"rank": 3, "kind": PROCESSOR, "end": 0.1}, {"rank": 4, "end": 5.0}]
    assert crowded(recording_of(spans_of(*rows), Layout.of(dp=5))) == is_crowded
    assert not crowded(recording_of(spans_of({"rank": 0}), Layout.of(dp=1)))


def test_the_tenth_of_ops_that_was_disturbed_least() -> None:
    """Ten ops of 1 s; rank 1 takes twice as long for all, and rank 2 a hundred times for nine of
    them."""

    def takes(rank: int, op: int) -> float:
        return 2.0 if rank == 1 else 100.0 if rank == 2 and op else 1.0

    rows = [{"rank": rank, "name": f"op{op}", "end": takes(rank, op)} for rank in (0, 1, 2, 3, 4) for op in range(10)]
    found = typical_work(recording_of(spans_of(*rows), Layout.of(dp=5)))
    assert found.deviation[:, 0].tolist() == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert found.excess[1, 0] == 10.0


def reductions(seconds: list[float], hosts: list[str | None], step: int = 1) -> Recording:
    """Pairs of ranks, each of which reduces for so long; ranks are on hosts."""
    rows = [
        {"step": step, "kind": "comm", "name": "reduce mlp0", "axis": "dp", "lane": "dp", "rank": 2 * group + at,
         "group": str(group), "meeting": group, "start": 0.5 * at, "end": 0.5 + one}
        for group, one in enumerate(seconds) for at in range(2)
    ]  # fmt: skip
    seen = recording_of(spans_of(*rows), Layout.of(dp=2 * len(seconds)))
    return Recording(
        grid=grid_of(Layout.of(dp=2 * len(seconds)), hosts),
        rollup=seen.rollup,
        meetings=seen.meetings,
        spans=seen.spans,
    )


def test_transfers_against_those_of_groups_that_move_as_much() -> None:
    found = transfers(reductions([1.0, 1.0, 3.0], [None] * 6))
    assert found.peers == ["dp 0", "dp 1", "dp 2"]
    assert found.deviation[:, 0].tolist() == [0.0, 0.0, 2.0] and found.excess[:, 0].tolist() == [0.0, 0.0, 2.0]
    assert found.computing[:, 0].tolist() == [0.0, 0.0, 0.0]
    two = transfers(reductions([1.0, 3.0], [None] * 4))
    assert two.deviation[:, 0].tolist() == [pytest.approx(-2 / 3), 2.0]


def test_groups_between_hosts_are_compared_with_those_between_as_many() -> None:
    """Within a host 1 s; between a and b 8 s, and between a and c 16 s."""
    hosts: list[str | None] = ["a", "a", "b", "b", "a", "b", "a", "c"]
    found = transfers(reductions([1.0, 1.0, 8.0, 16.0], hosts))
    assert found.deviation[:, 0].tolist() == [0.0, 0.0, 0.0, 1.0], "the faster of equals is what is usual"
    path = transfers(reductions([1.0, 1.0, 8.0, 16.0], [*hosts[:7], "b"]))
    assert path.deviation[:, 0].tolist() == [0.0] * 4, "between the same hosts the fastest counts"


def test_members_of_groups_and_of_messages_that_one_side_recorded() -> None:
    sends = {"kind": "transfer", "axis": "pp", "group": "0>3", "lane": "pp", "meeting": 9}
    comm = {"kind": "comm", "axis": "dp", "group": "0", "lane": "dp", "meeting": 1}
    seen = recording_of(spans_of(sends, comm, comm | {"rank": 1}), Layout.of(dp=4))
    found = {peer: sorted(ranks) for peer, ranks in members_of(seen).group_by("peer").agg("rank").iter_rows()}
    assert found == {"pp 0>3": [0, 3], "dp 0": [0, 1]}


def test_two_that_are_alone_in_their_stage_are_twins() -> None:
    seconds = {(rank, 0): 1.0 for rank in range(4)}
    pairs = own_work(works(seconds, pp=2, dp=2)).pair_ids(grid_of(Layout.of(pp=2, dp=2))).tolist()
    assert pairs[0] == pairs[1] != pairs[2] == pairs[3] and min(pairs) < 0
    all_four = own_work(works(seconds, dp=4)).pair_ids(grid_of(Layout.of(dp=4))).tolist()
    assert all_four == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("hosts", "known"),
    [(["a", "a", "b", "b"], True), (["a", "a", "a", "a"], False), (["a", "a", "b", None], False), ([], False)],
)
def test_hosts_are_known_where_every_ranks_is_and_there_are_several(hosts: list[str | None], known: bool) -> None:
    grid = grid_of(Layout.of(dp=4), hosts)
    assert hosts_known(replace(recording_of(spans_of({}), Layout.of(dp=4)), grid=grid)) == known


@pytest.mark.parametrize(("ranks", "share"), [(16, 16 / 8 - 1), (17, 17 / 9 - 1)])
def test_of_few_a_rank_is_compared_with_the_others_alone(ranks: int, share: float) -> None:
    """Rank n takes n + 1 seconds."""
    seen = recording_of(spans_of(*({"rank": rank, "end": 1.0 + rank} for rank in range(ranks))), Layout.of(dp=ranks))
    assert own_work(seen).deviation[-1, 0] == pytest.approx(share)


def test_lateness_is_own_work_beyond_its_equals_in_the_median_step() -> None:
    """Rank 2 takes a quarter longer, but in one step; rank 1 is alone in its stage; a first step is
    none."""
    rows = [
        {"step": step, "rank": rank, "end": 9.0 if step == 0 and rank == 0 else 5.0 if (rank, step) == (2, 3) else own}
        for step in range(6)
        for rank, own in ((0, 4.0), (2, 5.0), (3, 4.0), (1, 7.0))
    ]
    grid = pl.DataFrame({"rank": [0, 1, 2, 3], "pp": [0, 1, 0, 0], "dp": [0, 0, 1, 2], "cp": [0] * 4, "tp": [0] * 4,
                         "host": [None] * 4}, schema=grid_of(Layout.of(dp=1)).schema)  # fmt: skip
    seen = replace(recording_of(spans_of(*rows), Layout.of(dp=4)), grid=grid)
    found = lateness(own_work(seen))
    assert found == [Lateness(2, 0.25, 1.0), Lateness(0, 0.0, 0.0), Lateness(3, 0.0, 0.0)]
    assert lateness(own_work(recording_of(spans_of({"rank": 0}), Layout.of(dp=1)))) == []
