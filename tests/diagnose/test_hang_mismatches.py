"""Ranks that began different calls where one was due: who is named, what differs, and what breaks a
tie."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.core.record.ring import RingGroup
from plait.core.runs.evidence import Verdict
from tests.support.recordings.evidence import DP, at, seen, verdict_on
from tests.support.recordings.standstill import SECOND


def odd(**more: object) -> Verdict:
    """Rank 2 of four does another thing."""
    calls = {rank: at(DP, 5) for rank in range(4)}
    calls[2] = replace(at(DP, 5, size=int(more.get("bytes", 4))), **more)  # type: ignore[arg-type, call-overload]
    return verdict_on(*(seen(rank, call) for rank, call in calls.items()))


@pytest.mark.parametrize(
    ("more", "differs", "what"),
    [
        ({"verb": "broadcast"}, "op", "a broadcast of float32 4 bytes"),
        ({"dtype": "float64"}, "dtype", "an all-reduce of float64 4 bytes"),
        ({"bytes": 0, "dtype": ""}, "dtype", "an all-reduce"),
        ({"bytes": 8, "name": "mlp0"}, "size", "an all-reduce of float32 8 bytes (mlp0)"),
    ],
)  # fmt: skip
def test_what_differs_in_words(more: dict[str, object], differs: str, what: str) -> None:
    verdict = odd(**more)
    assert (verdict.cause, verdict.ranks, verdict.differs, verdict.hosts) == ("mismatch", (2,), differs, ("host 0",))
    assert verdict.why == (
        f"Rank 2 (host 0) began {what} as call 5 of dp group 0-3, where ranks 0, 1 and 3 began an all-reduce of "
        f"float32 4 bytes: the {differs} must be the same on all."
    )
    [link] = verdict.chain
    assert (link.ranks, link.on) == ((0, 1, 3), (2,))


@pytest.mark.parametrize("shift", [-1, 1])
def test_who_began_what_the_others_begin_next_or_began_before_took_another_order(shift: int) -> None:
    calls = [[at(DP, 5, verb="all_reduce"), at(DP, 5 + shift, verb="broadcast")] for _ in range(4)]
    calls[2] = [at(DP, 5, verb="broadcast")]
    verdict = verdict_on(*(seen(rank, *own) for rank, own in enumerate(calls)))
    assert (verdict.ranks, verdict.differs) == ((2,), "order")
    assert verdict.why.endswith(": it has left out a call, or begun calls in another order.")


def test_who_begins_next_what_the_others_began_took_another_order() -> None:
    calls = [[at(DP, 5)] for _ in range(4)]
    calls[2] = [at(DP, 5, verb="broadcast"), at(DP, 6)]
    verdict = verdict_on(*(seen(rank, *own) for rank, own in enumerate(calls)))
    assert (verdict.ranks, verdict.differs) == ((2,), "order")


def test_a_tie_is_told_as_one_and_other_replicas_break_it() -> None:
    pairs = [RingGroup(ranks, 0, "tp") for ranks in ((0, 1), (2, 3), (4, 5))]
    calls = {rank: at(pairs[rank // 2], 5) for rank in range(6)} | {1: at(pairs[0], 5, size=8)}
    alone = verdict_on(*(seen(rank, calls[rank]) for rank in range(2)))
    assert (alone.cause, alone.differs, alone.ranks) == ("mismatch", "size", (0, 1))
    assert "no majority" in alone.why
    verdict = verdict_on(*(seen(rank, calls[rank]) for rank in range(6)))
    assert (verdict.cause, verdict.differs, verdict.ranks) == ("mismatch", "size", (1,))


def test_a_tie_in_words() -> None:
    pair = RingGroup((0, 1), 0, "tp")
    verdict = verdict_on(seen(0, at(pair, 5)), seen(1, at(pair, 5, verb="all_gather")))
    assert (verdict.ranks, verdict.differs) == ((0, 1), "op")
    assert verdict.why == (
        "Mismatch of op in call 5 of tp group 0, 1: rank 0 began an all-reduce of float32 4 bytes and rank 1 began an "
        "all-gather of float32 4 bytes. There is no majority: it may be either."
    )
    assert verdict.chain == ()


@pytest.mark.parametrize(
    ("label", "ordinal", "size", "sequence", "broken"),
    [("tp", 0, 2, 5, True), ("dp", 0, 2, 5, False), ("tp", 1, 2, 5, False), ("tp", 0, 3, 5, False),
     ("tp", 0, 2, 6, False), ("", 0, 2, 5, False)],
)  # fmt: skip
def test_only_groups_of_the_same_kind_break_a_tie(
    label: str, ordinal: int, size: int, sequence: int, broken: bool
) -> None:
    pair = RingGroup((0, 1), 0, "tp" if label else "")
    other = RingGroup(tuple(range(2, 2 + size)), ordinal, label)
    evidence = [seen(0, at(pair, 5)), seen(1, at(pair, 5, size=8))]
    evidence += [seen(rank, at(other, sequence)) for rank in other.ranks]
    assert verdict_on(*evidence, world=5).ranks == ((1,) if broken else (0, 1))


def test_only_the_first_of_several_mismatches_counts() -> None:
    calls = [[at(DP, s, since=50 - s, size=4 + (rank == s == 3)) for s in range(3, 6)] for rank in range(4)]
    calls[2][1] = replace(calls[2][1], verb="broadcast")
    verdict = verdict_on(*(seen(rank, *calls[rank]) for rank in range(4)))
    assert verdict.ranks == (3,)


def test_of_two_mismatches_the_one_that_ranks_came_to_first() -> None:
    """Whatever the numbers of their groups and calls are."""
    tp, dp = RingGroup((0, 1, 2), 0, "tp"), RingGroup((0, 1, 2), 1, "dp")
    late = [at(tp, 1, since=20, size=8 if rank == 1 else 4) for rank in range(3)]
    early = [at(dp, 9, since=40, size=8 if rank == 2 else 4) for rank in range(3)]
    verdict = verdict_on(*(seen(rank, late[rank], early[rank]) for rank in range(3)))
    assert verdict.ranks == (2,) and "call 9 of dp group" in verdict.why
    late = [replace(one, enqueued=early[0].enqueued - SECOND) for one in late]
    verdict = verdict_on(*(seen(rank, late[rank], early[rank]) for rank in range(3)))
    assert verdict.ranks == (1,) and "call 1 of tp group" in verdict.why
