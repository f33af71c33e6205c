"""Circles of ranks that wait for each other: how they are told, and who took another order than the
rest."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from plait.core.record.ring import RingGroup
from plait.core.runs.evidence import Call, Evidence, Verdict
from plait.diagnose.verdicts.hang import localise
from tests.support.recordings.evidence import at, seen

UNKNOWN = "Nothing tells which of them is wrong."


def verdict(*evidence: Evidence) -> Verdict:
    found = localise(evidence, world=len(evidence), deadline=10)
    assert found.cause == "deadlock"
    return found


def circle(size: int) -> Verdict:
    """Each waits for the next one in a group of the two."""
    pairs = [RingGroup(tuple(sorted((rank, (rank + 1) % size))), rank, f"pair {rank}") for rank in range(size)]
    return verdict(*(seen(rank, at(pairs[rank], 3)) for rank in range(size)))


def test_four_links_of_a_circle_are_told_in_words_and_of_more_their_number() -> None:
    four, five = circle(4), circle(5)
    links = (
        "rank 0 waits for rank 1 in all-reduce 3 of pair 0 group 0, 1; rank 1 waits for rank 2 in all-reduce 3 of "
        "pair 1 group 1, 2#1; rank 2 waits for rank 3 in all-reduce 3 of pair 2 group 2, 3#2; "
    )
    order = "They began calls of different groups in different orders. " + UNKNOWN
    assert four.why == (
        f"Ranks 0-3 (host 0) are in a deadlock: {links}rank 3 waits for rank 0 in all-reduce 3 of pair 3 group 0,3#3. "
        f"{order}"
    )
    assert five.why == (
        f"Ranks 0-4 (host 0) are in a deadlock: {links}rank 3 waits for rank 4 in all-reduce 3 of pair 3 group 3, 4#3; "
        f"and so on, 5 ranks in all. {order}"
    )
    assert [(link.ranks, link.on) for link in five.chain] == [((rank,), ((rank + 1) % 5,)) for rank in range(5)]


@pytest.mark.parametrize(
    ("first", "ranks"), [(3, (3, 4)), (2, (0, 1)), (4, (4,)), (1, (0,))], ids=["3 of 5", "2 of 5", "4 of 5", "1 of 5"]
)
def test_of_two_calls_those_are_named_who_are_at_the_one_of_the_fewer(first: int, ranks: tuple[int, ...]) -> None:
    tp, dp = RingGroup((0, 1, 2, 3, 4), 0, "tp"), RingGroup((0, 1, 2, 3, 4), 1, "dp")
    found = verdict(*(seen(rank, at(tp, 1) if rank < first else at(dp, 4), host=rank) for rank in range(5)))
    assert (found.ranks, found.hosts) == (ranks, tuple(f"host {rank}" for rank in ranks))
    if len(ranks) == 1:
        assert found.why.startswith(f"Rank {ranks[0]} (host {ranks[0]}) is in a deadlock: ")
        took = f"Rank {ranks[0]} took an order of its own: the other ranks began these calls in the other order."
    else:
        who = f"Ranks {ranks[0]}, {ranks[1]}"
        assert found.why.startswith(f"{who} (host {ranks[0]} and host {ranks[1]}) are in a deadlock: ")
        took = f"{who} took an order of their own: the other ranks began these calls in another order."
    assert found.why.endswith("They began calls of different groups in different orders. " + took)


def test_only_ranks_of_both_groups_are_counted() -> None:
    """Rank 2 waits in the one group and is none of the other."""
    tp, dp = RingGroup((0, 1, 2), 0, "tp"), RingGroup((0, 1), 1, "dp")
    found = verdict(seen(0, at(tp, 1)), seen(1, at(dp, 4)), seen(2, at(tp, 1)))
    assert found.ranks == (0, 1) and found.why.endswith(UNKNOWN)


def replicas(*others: Iterable[tuple[str, int, float]], label: str = "tp", more: str = "") -> Verdict:
    """Rank 0 waits in sum 1 of its tp group, rank 1 in sum 4 of its dp group, both of the two;
    calls of further ranks, which are in such groups in pairs, by group, number, and seconds
    since."""

    def calls(rank: int) -> dict[str, RingGroup]:
        pair = (rank // 2 * 2, rank // 2 * 2 + 1)
        return {"tp": RingGroup(pair, 0, label), "dp": RingGroup(pair, 1, "dp"), "ep": RingGroup(pair, 2, "ep")}

    def before(rank: int) -> list[Call]:
        """What makes equal who has to do with the same groups."""
        extra = [at(calls(rank)["ep"], 0, since=99, over=True)] if more and str(rank) in more else []
        return [*extra, *(at(calls(rank)[name], 0, since=99, over=True) for name in ("tp", "dp"))]

    evidence = [seen(0, *before(0), at(calls(0)["tp"], 1)), seen(1, *before(1), at(calls(1)["dp"], 4))]
    for rank, own in enumerate(others, 2):
        done = [at(calls(rank)[name], number, since=since, over=True) for name, number, since in own]
        evidence.append(seen(rank, *before(rank), *done, thread="works"))
    return verdict(*evidence)


TP_FIRST = (("tp", 1, 60.0), ("dp", 4, 50.0))
DP_FIRST = (("dp", 4, 60.0), ("tp", 1, 50.0))


@pytest.mark.parametrize(
    ("others", "ranks"),
    [
        ([TP_FIRST], (1,)), ([DP_FIRST], (0,)), ([[("tp", 1, 60.0)]], (1,)), ([[("dp", 4, 60.0)]], (0,)),
        ([[("tp", 2, 60.0)]], (1,)), ([[("dp", 5, 60.0)]], (0,)),  # so what was before is over long ago
        ([[("tp", 2, 60.0), ("dp", 4, 50.0)]], (0, 1)), ([[]], (0, 1)), ([TP_FIRST, DP_FIRST], (0, 1)),
        ([TP_FIRST, TP_FIRST, DP_FIRST], (1,)),
    ],
)  # fmt: skip
def test_ranks_of_the_same_kind_outside_of_a_circle_tell_its_order(others: list, ranks: tuple[int, ...]) -> None:
    found = replicas(*others)
    assert found.ranks == ranks
    assert found.why.endswith(UNKNOWN) == (len(ranks) == 2)


def test_groups_without_a_label_and_ranks_of_another_kind_tell_nothing() -> None:
    assert replicas(TP_FIRST, label="").ranks == replicas(DP_FIRST, label="").ranks == (0, 1)
    assert replicas(TP_FIRST, more="01").ranks == replicas(TP_FIRST, more="2").ranks == (0, 1)
    assert replicas(TP_FIRST, more="12").ranks == (1,)
    assert replicas(TP_FIRST, more="02").ranks == (0, 1), "of the kind of rank 1 there is nobody"


def test_where_others_contradict_all_of_a_circle_nothing_is_known() -> None:
    assert replicas(DP_FIRST, TP_FIRST, more="02").ranks == (0, 1)
    assert replicas(DP_FIRST, more="02").ranks == (0,)


@pytest.mark.parametrize("late", [0, 1])
def test_of_messages_those_of_other_stages_tell_who_sends_first(late: int) -> None:
    """Both ranks of the first pair receive first; in the other pair one sends first, the other
    answers."""
    pairs = [RingGroup((0, 1), 0, "pp"), RingGroup((2, 3), 0, "pp")]

    def message(pair: int, way: tuple[int, int], number: int, since: float, over: bool = True) -> Call:
        ends = (2 * pair + way[0], 2 * pair + way[1])
        return at(pairs[pair], number, since=since, verb="message", ends=ends, over=over)

    up, down = (0, 1), (1, 0)
    before = [[message(pair, way, 0, 99) for way in (up, down)] for pair in range(2)]
    first, second = (up, down) if late == 0 else (down, up)
    after = [message(1, first, 1, 60), message(1, second, 1, 50)]
    found = verdict(
        seen(0, *before[0], message(0, down, 1, 20, over=False)),
        seen(1, *before[0], message(0, up, 1, 20, over=False)),
        seen(2, *before[1], *after, thread="works"), seen(3, *before[1], *after, thread="works"),
    )  # fmt: skip
    assert found.ranks == (late,)
