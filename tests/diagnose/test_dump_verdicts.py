"""Who is named by flight recorder dumps of a job that hangs: ranks that did not come, or do not
end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.recordings.theirs import (
    all_waiting,
    dump,
    dumps_imported,
    entry,
    grouped,
    message,
    verdict_of,
    waiting,
)


def test_a_rank_that_did_not_come_is_named_with_what_it_did_last(tmp_path: Path) -> None:
    dumps = all_waiting(4)
    dumps[2] = dump(2, world=4)
    found = verdict_of(tmp_path, *dumps)
    assert (found.cause, found.ranks) == ("missing", (2,))
    assert found.why.startswith(
        "Rank 2 has not begun all-reduce 5 of default_pg group 0-3, where ranks 0, 1 and 3 wait."
    )
    assert "all-reduce 4" in found.why, "its last"
    assert [link.on for link in found.chain] == [(2,)]


def test_a_rank_without_a_dump_is_named_beside_another_fault_and_none(tmp_path: Path) -> None:
    found = verdict_of(tmp_path, *all_waiting(4, {1: {"input_sizes": [[5]]}})[:3])
    assert (found.cause, found.ranks) == ("mismatch", (1,))
    assert [one.ranks for one in found.also] == [(3,)]
    healthy = verdict_of(tmp_path / "healthy", *(dump(rank, world=4) for rank in range(3)))
    assert healthy.cause == "none"
    assert "Rank 3 left no dump" in healthy.why


def test_several_that_did_not_come_and_several_calls(tmp_path: Path) -> None:
    """Told is the call in which most wait."""
    tp, dp = ({"process_group": [name, name]} for name in ("tp", "dp"))
    dumps = [
        dump(0, waiting(0, 9000, **tp), ended=0), dump(1, ended=2), dump(2, waiting(0, 9000, **dp), ended=0),
        dump(3, waiting(0, 9100, **dp), ended=0), dump(4, ended=0), dump(5, ended=1),
    ]  # fmt: skip
    members = {"0": list(range(6)), "tp": [0, 1], "dp": [2, 3, 4, 5]}
    found = verdict_of(tmp_path, *(grouped(one, **members) for one in dumps))
    assert (found.cause, found.ranks) == ("missing", (1, 4, 5))
    assert found.why.startswith("Ranks 4, 5 have not begun all-reduce 0 of dp group 2-5, where ranks 2, 3 wait."), (
        found.why
    )
    assert "The last of rank 5 is all-reduce 0" in found.why and "The last of rank 4" not in found.why
    assert found.why.endswith("Rank 1, too, did not come to a call that others wait in.")
    assert [(link.ranks, link.on) for link in found.chain] == [((2, 3), (4, 5))]


def test_the_call_in_which_most_wait_is_told(tmp_path: Path) -> None:
    """Rank 3 did not come to either; of others that did not come it is said, too."""
    pair = {"process_group": ["pair", "pair"]}
    some = [dump(0, waiting(1, 8000, **pair), world=6), *(dump(rank, waiting(5, 9000), world=6) for rank in (1, 2))]
    idle = [dump(rank, world=6) for rank in (3, 4, 5)]
    config = {"pair": [0, 5], "0": [1, 2, 3]}
    found = verdict_of(tmp_path, *(grouped(one, **config) for one in (*some, *idle)))
    assert (found.cause, found.ranks) == ("missing", (3, 5))
    assert found.why.startswith("Rank 3 has not begun all-reduce 5")
    assert "where ranks 1, 2 wait" in found.why
    assert found.why.endswith(" Rank 5, too, did not come to a call that others wait in.")
    assert [(link.ranks, link.on) for link in found.chain] == [((1, 2), (3,))]


def test_of_calls_that_nobody_ends_the_one_that_was_begun_first(tmp_path: Path) -> None:
    """By the first of its ranks, whatever the others did."""
    tp = {"process_group": ["tp", "tp"]}
    first = [waiting(5, 9000), waiting(1, 8000, **tp)]
    second = [waiting(5, 9100), waiting(1, 9900, **tp)]
    dumps = [dump(0, *first), dump(1, *second)]
    found = verdict_of(tmp_path, *(grouped(one, tp=[0, 1]) for one in dumps))
    assert found.why.startswith("All of ranks 0, 1 have begun all-reduce 1 of tp group 0, 1")


def test_who_alone_has_not_ended_is_named(tmp_path: Path) -> None:
    dumps = [dump(rank, waiting(5, 9000) if rank == 3 else entry(5, 9000, 9500), world=4) for rank in range(4)]
    found = verdict_of(tmp_path, *dumps)
    assert (found.cause, found.ranks) == ("missing", (3,))
    assert "has not ended all-reduce 5" in found.why


def test_groups_are_told_apart(tmp_path: Path) -> None:
    """Two of the same members; and one in which a rank waits while the other waits for a third in
    another."""
    groups = {
        "0": ("default_pg", [0, 1, 2]),
        "3": ("mesh_tp", [0, 1]),
        "4": ("mesh_tp_async", [0, 1]),
        "5": ("dp", [1, 2]),
    }
    config = {name: {"name": name, "desc": desc, "ranks": str(ranks)} for name, (desc, ranks) in groups.items()}
    tp, twin, dp = ({"process_group": [name, groups[name][0]]} for name in ("3", "4", "5"))
    dumps = [
        dump(0, waiting(1, 9000, **tp), entry(1, 8000, 8500, **twin)),
        dump(1, waiting(2, 9100, **dp), entry(1, 8000, 8500, **twin)),
        dump(2, entry(1, 8000, 8200, **dp)),
    ]
    found = verdict_of(tmp_path, *(one | {"pg_config": config} for one in dumps))
    assert (found.cause, found.ranks) == ("missing", (2,)), "rank 1 has not come to tp 1, but it waits itself"
    assert "of dp group 1, 2" in found.why


def test_a_circle_of_groups_is_a_deadlock(tmp_path: Path) -> None:
    dumps = [dump(rank, waiting(1, 9000, process_group=[name, name])) for rank, name in enumerate("ab")]
    found = verdict_of(tmp_path, *(grouped(one, a=[0, 1], b=[0, 1]) for one in dumps))
    assert (found.cause, found.ranks) == ("deadlock", (0, 1))


def test_messages(tmp_path: Path) -> None:
    """A receiver waits for a rank that waits for nobody; those that came are no fault."""
    ends = [message("send 0->1", 1, 9000, ended=True)], [message("recv 1<-0", 1, 9000, ended=True)]
    found = verdict_of(tmp_path, dump(0, *ends[0]), dump(1, *ends[1], message("recv 1<-0", 2, 9500, ended=False)))
    assert (found.cause, found.ranks) == ("missing", (0,))
    assert "message 1 from rank 0 to rank 1" in found.why
    assert verdict_of(tmp_path / "came", dump(0, *ends[0]), dump(1, *ends[1])).cause == "none"


@pytest.mark.parametrize("third", [False, True])
def test_messages_of_whole_dumps_are_counted_from_their_first(tmp_path: Path, third: bool) -> None:
    """Two were sent; the receiver is still at the first. What another dump lost tells nothing."""
    sent = [message("send 0->1", n, 9000 + n, ended=True) for n in range(2)]
    got = [message("recv 1<-0", 0, 9100, ended=False)]
    other = entry(5, 9000, 9100, record_id=40, process_group=["3", "alone"])
    others = [grouped(dump(2, other, ended=0), **{"3": [2]})] if third else []
    found = verdict_of(tmp_path, dump(0, *sent), dump(1, *got), *others)
    assert (found.cause, found.ranks) == ("missing", (1,))
    assert "message 0 from rank 0 to rank 1" in found.why


def test_parts_of_a_batch_have_its_state(tmp_path: Path) -> None:
    """Messages that were begun together are entries that stay scheduled; the batch's own entry has
    ended."""

    def batch(kind: str, ended: bool) -> list[dict[str, Any]]:
        none = {"input_sizes": [], "output_sizes": [], "profiling_name": "nccl:coalesced"}
        whole = message("send 0->1", 3, 9100, ended=ended) | none
        return [message(kind, 3, 9000, ended=False), whole]

    both = "send 0->1", "recv 1<-0"
    assert (
        verdict_of(tmp_path, *(dump(rank, *batch(kind, ended=True)) for rank, kind in enumerate(both))).cause == "none"
    )
    found = verdict_of(tmp_path / "open", dump(0), dump(1, *batch("recv 1<-0", ended=False)))
    assert (found.cause, found.ranks) == ("missing", (0,))


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({}, {"is_p2p": True, "p2p_seq_id": 5}),  # as batch_isend_irecv writes it: nobody knows between whom
        ({"input_sizes": [], "output_sizes": []}, {"is_p2p": True, "p2p_seq_id": 5}),
        ({"profiling_name": "nccl:all_reduce"}, {"collective_seq_id": None}),
    ],
)
def test_what_is_open_between_nobody_knows_whom_may_be_a_hang(
    tmp_path: Path, more: dict[str, Any], kind: dict[str, Any]
) -> None:
    last = waiting(5, 9000, state="started", **({"profiling_name": "nccl:coalesced"} | more | kind))
    found = dumps_imported(tmp_path, *(dump(rank, last, world=4) for rank in range(4)))
    assert found.verdict is not None
    assert (found.verdict.cause, found.verdict.ranks) == ("unknown", ())
    assert found.verdict.why == (
        "4 operations of ranks 0-3 had not ended, but their participants are unknown: a hang cannot be excluded."
    )
    assert any("4 operations of ranks 0-3 had not ended" in note for note in found.notes)
    alone = verdict_of(tmp_path / "one", *(dump(n, *([last] if n == 2 else []), world=4) for n in range(3)))
    assert alone.why.startswith("1 operation of rank 2 had not ended")
    assert [one.ranks for one in alone.also] == [(3,)]
