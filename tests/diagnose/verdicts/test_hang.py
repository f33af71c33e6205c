"""Who is named when a run hangs: planted faults of every kind, also where evidence is missing;
nobody where nothing hangs; who waits for whom, and for how long."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from plait.core.base.errors import DataError
from plait.core.record.ring import RingGroup
from plait.core.runs.evidence import FILE, Call, Evidence, Verdict, read_hang, write_hang
from plait.diagnose.verdicts.hang import localise
from tests.support.recordings.evidence import DP, at, seen, verdict_on
from tests.support.recordings.planted import HEALTHY, PLANTERS, Case, draw_case
from tests.support.recordings.standstill import DEADLINE

TIES = ("There is no majority", "Nothing tells which")
"""How a verdict says that it is one of those it names."""


def judged(case: Case) -> str:
    """``exact``, a ``tie`` that holds the culprit and says that it is one, or ``wrong``."""
    verdict = localise(case.evidence, world=case.world, deadline=DEADLINE)
    assert verdict.why.endswith(".")
    if verdict.cause not in case.causes:
        return "wrong"
    if verdict.cause == "none" or set(verdict.ranks) == case.ranks:
        return "exact" if case.hosts <= set(verdict.hosts) else "wrong"
    tie = any(said in verdict.why for said in TIES)
    return "tie" if case.ranks <= set(verdict.ranks) and tie else "wrong"


@pytest.mark.parametrize("kind", PLANTERS)
def test_a_planted_fault_is_found(kind: str) -> None:
    found = [judged(draw_case(kind, seed)) for seed in range(8)]
    assert "wrong" not in found


@pytest.mark.contract
def test_of_two_thousand_faults_98_in_100_are_found() -> None:
    found: Counter[tuple[str, str]] = Counter()
    kinds = [kind for kind in PLANTERS if kind not in HEALTHY]
    for seed in range(2000 // len(kinds)):
        found.update((kind, judged(draw_case(kind, 1000 + seed))) for kind in kinds)
    right = sum(number for (_, how), number in found.items() if how != "wrong")
    assert right >= 0.98 * found.total(), found


@pytest.mark.contract
def test_no_verdict_on_a_thousand_runs_that_are_well_or_slow() -> None:
    assert {judged(draw_case(kind, 1000 + seed)) for kind in HEALTHY for seed in range(500)} == {"exact"}


def test_a_wait_of_the_deadline_is_no_longer_than_it() -> None:
    evidence = [seen(rank, at(DP, 3, since=10)) for rank in range(3)] + [seen(3, thread="works")]
    assert verdict_on(*evidence).cause == "none"
    assert localise(evidence, world=4, deadline=9.99).cause == "host code"


def test_a_queue_that_moves_is_no_hang() -> None:
    """Calls that have waited for long behind others, of which one has just been over."""
    calls = [at(DP, 1, since=0.5, over=True), *(at(DP, s, since=60) for s in range(2, 9))]
    assert verdict_on(*(seen(rank, *calls) for rank in range(4))).cause == "none"


def test_the_call_that_somebody_has_waited_in_the_longest_is_told() -> None:
    one, two = RingGroup((0, 1, 4), 0, "tp"), RingGroup((2, 3, 4), 0, "dp")
    evidence = [
        seen(0, at(one, 3, since=90)), seen(1, at(one, 3, since=20)), seen(2, at(two, 3, since=50)),
        seen(3, at(two, 3, since=50)), seen(4, thread="works"),
    ]  # fmt: skip
    verdict = verdict_on(*evidence)
    assert "; ranks 0, 1 wait for it in all-reduce 3 of tp group" in verdict.why
    assert verdict.why.endswith(", and 2 more for it or for those.")


def test_a_rank_is_waited_for_as_long_as_the_first_waits() -> None:
    """For rank 2 one has waited for 100 s and another for 20, for rank 4 one for 49: less than
    half."""
    one, two = RingGroup((0, 1, 2), 0, "tp"), RingGroup((3, 4), 0, "dp")
    evidence = [
        seen(0, at(one, 3, since=100)), seen(1, at(one, 3, since=20)), seen(2, thread="works"),
        seen(3, at(two, 3, since=49)), seen(4, thread="works"),
    ]  # fmt: skip
    assert verdict_on(*evidence).ranks == (2,)


@pytest.mark.parametrize(("since", "cause"), [(5.0, "unknown"), (4.9, "none")])
def test_a_call_that_all_have_begun_is_stuck_after_half_of_the_deadline(since: float, cause: str) -> None:
    """Another call of theirs has lasted for long, of which one end has moved since."""
    other = RingGroup((0, 1, 2, 3), 1, "tp")
    ranks = [seen(rank, at(DP, 3, since=20 if rank else since)) for rank in range(4)]
    verdict = verdict_on(*ranks)
    assert other.ranks == DP.ranks and verdict.cause == "unknown"
    assert ("nobody ends it" in verdict.why) == (cause == "unknown")
    assert cause == "unknown" or verdict.why == "A rank has waited for 20 s, and the awaited rank is unknown."


def test_a_network_that_nobody_can_place_names_nobody() -> None:
    verdict = verdict_on(*(seen(rank, at(DP, 3), host=rank) for rank in range(4)))
    assert (verdict.cause, verdict.ranks) == ("unknown", ())
    assert "nobody ends it" in verdict.why


@pytest.mark.parametrize(
    ("broken", "hosts"),
    [
        ({(0, 2), (1, 2), (2, 3)}, ("host 2",)),
        ({(0, 2)}, ("host 0", "host 2")),  # at which end of a path it is broken cannot be told
        ({(1, 2), (0, 2)}, ("host 2",)),
    ],
)
def test_a_cut_is_placed_by_who_reaches_whom(broken: set[tuple[int, int]], hosts: tuple[str, ...]) -> None:
    def missed(rank: int) -> tuple[int, ...]:
        return tuple(sorted({a + b - rank for a, b in broken if rank in (a, b)}))

    evidence = [
        seen(rank, at(DP, 3), host=rank, missed=missed(rank), reached=tuple(set(range(4)) - {rank, *missed(rank)}))
        for rank in range(4)
    ]
    verdict = verdict_on(*evidence)
    assert (verdict.cause, verdict.hosts) == ("cut off", hosts)


def test_a_cut_in_words() -> None:
    reach = {0: (1,), 1: (0,), 2: (), 3: ()}
    evidence = [
        seen(rank, at(DP, 3), host=rank, reached=reach[rank], missed=tuple(set(range(4)) - {rank, *reach[rank]}))
        for rank in range(4)
    ]
    verdict = verdict_on(*evidence)
    assert (verdict.cause, verdict.ranks, verdict.hosts) == ("cut off", (2, 3), ("host 2", "host 3"))
    assert verdict.why == (
        "Host 2 and host 3 are cut off: all of ranks 0-3 have begun all-reduce 3 of dp group 0-3, nobody ends it, and "
        "ranks there and elsewhere do not reach each other. 4 ranks wait."
    )
    [link] = verdict.chain
    assert (link.ranks, link.on) == ((0, 1, 2, 3), ())


def test_a_message_whose_sender_has_just_begun_it_is_no_cut() -> None:
    lane = RingGroup((0, 1), 0, "lane 0-1")
    receives = seen(1, at(lane, 0, since=50, verb="message", ends=(0, 1)), host=1)
    sends = seen(0, at(lane, 0, since=1, verb="message", ends=(0, 1)), thread="works")
    assert verdict_on(sends, receives).cause == "unknown"
    old = replace(sends, calls=(at(lane, 0, since=50, verb="message", ends=(0, 1)),), thread="waits")
    assert verdict_on(old, receives).hosts == ("host 0", "host 1")
    reach = replace(old, reached=(1,))
    assert verdict_on(reach, receives).cause == "unknown"


def test_a_message_between_hosts_of_which_nobody_is_reached() -> None:
    lane = RingGroup((0, 1), 0, "lane")
    ends = [seen(rank, at(lane, 0, verb="message", ends=(0, 1)), host=rank) for rank in range(2)]
    verdict = verdict_on(*ends)
    assert (verdict.cause, verdict.ranks) == ("cut off", (0, 1))
    assert verdict.why == (
        "Both ends of message 0 from rank 0 to rank 1 of lane group 0, 1 have begun it and it does not end: the path "
        "between host 0 and host 1 is suspected."
    )
    together = [replace(one, host="host 0") for one in ends]
    assert verdict_on(*together).cause == "unknown", "within a host there is no path"


def large(tp: int, dp: int, pp: int) -> list[Evidence]:
    """A job whose rank 77 is stopped before its 40th tensor-parallel sum of a step."""
    world, calls = tp * dp * pp, dict[int, tuple[Call, ...]]()
    everybody = RingGroup(tuple(range(world)), 0, "world")
    tps = [RingGroup(tuple(range(first, first + tp)), 0, "tp") for first in range(0, world, tp)]
    dps = {(stage, place): RingGroup(tuple(stage * dp * tp + r * tp + place for r in range(dp)), 0, "dp")
           for stage in range(pp) for place in range(tp)}  # fmt: skip
    for rank in range(world):
        mine = tps[rank // tp]
        behind = rank == 77
        recent = [at(mine, s, since=60 - s / 10, over=True) for s in range(36, 40)]
        group = dps[rank // (dp * tp), rank % tp]
        old = [at(everybody, s, since=90, over=True) for s in range(3)] + [
            at(group, s, since=80, over=True) for s in range(4)
        ]
        waits = () if behind else (at(mine, 40, since=50),) if 77 in mine.ranks else (at(group, 4, since=45),)
        calls[rank] = (*old, *recent, *waits)
    return [
        seen(rank, *calls[rank], host=rank // 8, state="stopped" if rank == 77 else "runs") for rank in range(world)
    ]  # fmt: skip


def test_one_of_3072_ranks_is_found_in_seconds() -> None:
    evidence = large(8, 48, 8)
    start = time.process_time()
    verdict = localise(evidence, world=len(evidence), deadline=10)
    assert time.process_time() - start < 3
    assert (verdict.cause, verdict.ranks) == ("stopped", (77,))
    assert len(verdict.why) < 400


@pytest.mark.parametrize("kind", ["stopped", "cut", "two groups", "op"])
def test_verdict_and_evidence_are_read_as_they_were_written(tmp_path: Path, kind: str) -> None:
    case = draw_case(kind, 3)
    verdict = localise(case.evidence, world=case.world, deadline=DEADLINE)
    write_hang(tmp_path, verdict, case.evidence)
    assert read_hang(tmp_path / FILE) == (verdict, case.evidence)
    assert localise(read_hang(tmp_path / FILE)[1], world=case.world, deadline=DEADLINE) == verdict


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"version": 1}', '{"version": 7}', '{"version": 1, "verdict": 3}']
)
def test_a_damaged_file_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    with pytest.raises(DataError, match=r"hang\.json"):
        read_hang(tmp_path / FILE)
    assert Verdict(cause="none", why="").certain is False
