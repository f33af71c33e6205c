"""What is known of ranks of a run that hangs: in words, and in the file that keeps it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import DataError
from plait.core.record.ring import Name, Record, RecordKind, RingGroup
from plait.core.runs.evidence import (
    FILE,
    Call,
    CallSequence,
    Evidence,
    Verdict,
    WaitLink,
    listed,
    read_hang,
    spoken_group,
    spoken_ranks,
    write_hang,
)

GROUP = RingGroup((0, 1, 2, 3), 0, "dp")
CALL = Call(channel=CallSequence(GROUP), sequence=7, verb="all_reduce", dtype="float32", bytes=64, enqueued=10)


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ([3], "rank 3"),
        ([3, 3], "rank 3"),
        ([0, 1], "ranks 0, 1"),
        ([1, 0, 2], "ranks 0-2"),
        ([0, 2], "ranks 0 and 2"),
        ([0, 2, 4], "ranks 0, 2 and 4"),
        ([0, 2, 4, 6], "ranks 0-6 by 2"),
        ([0, 1, 2, 3], "ranks 0-3"),
        ([0, 1, 2, 4], "ranks 0-2 and 4"),
        ([0, 1, 3, 5, 6], "ranks 0, 1, 3 and 5, 6"),
        ([n * n for n in range(1, 9)], "ranks 1, 4, 9, 16, 25, 36, 49 and 64"),
        ([n * n for n in range(1, 10)], "ranks 1, 4, 9, 16, 25, 36, 49 and 2 more"),
    ],
)
def test_ranks_in_words(ranks: list[int], told: str) -> None:
    assert spoken_ranks(ranks) == told


@pytest.mark.parametrize(
    ("group", "told"),
    [
        (RingGroup((0,), 0, ""), "group 0"),
        (RingGroup((3, 1, 2), 0, "tp"), "tp group 1-3"),
        (RingGroup((0, 2), 1, "tp"), "tp group 0,2#1"),
        (RingGroup(tuple(n * n for n in range(1, 9)), 0, ""), "group 1,4,9,16,25,36,49,64"),
        (RingGroup(tuple(n * n for n in range(1, 10)), 0, ""), "group 1,4,9,16,25,36,49,..."),
    ],
)
def test_a_group_in_words(group: RingGroup, told: str) -> None:
    assert spoken_group(group) == told


def test_parts_of_a_list_that_are_empty_leave_no_word() -> None:
    assert [listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])] == ["a", "a and b", "a, b and c"]


def test_a_call_in_words() -> None:
    assert str(CALL) == "all-reduce 7 of dp group 0-3"
    assert str(replace(CALL, name="mlp2.F0")) == "all-reduce 7 of dp group 0-3 (mlp2.F0)"
    message = replace(CALL, channel=CallSequence(GROUP, 0, 3), verb="send")
    assert str(message) == "message 7 from rank 0 to rank 3 of dp group 0-3"


def test_a_call_is_over_when_it_has_ended_well() -> None:
    ended = replace(CALL, ended=20)
    assert [CALL.over, ended.over, replace(ended, failed=True).over] == [False, True, False]


def test_members_must_agree_on_the_signature_or_else_on_the_size() -> None:
    assert CALL.signs == ("all_reduce", "float32", 64)
    assert replace(CALL, signature=5).signs == ("all_reduce", "float32", 5)


def record(kind: RecordKind, **values: Any) -> Record:
    told = {"number": 1, "name": Name("mlp2.F0"), "step": 3, "sequence": 7, "enqueued": 10, "started": 11, "ended": 12,
            "bytes": 64, "group": GROUP, "verb": "all_reduce", "dtype": "float32", "peer": -1}  # fmt: skip
    return Record(**{"kind": kind, **told, **values})


@pytest.mark.parametrize(
    ("kind", "peer", "ends"),
    [(RecordKind.COLLECTIVE, -1, (-1, -1)), (RecordKind.SEND, 3, (2, 3)), (RecordKind.RECEIVE, 3, (3, 2))],
)
def test_a_record_of_a_call(kind: RecordKind, peer: int, ends: tuple[int, int]) -> None:
    call = Call.of(record(kind, peer=peer), 2)
    assert call is not None
    assert (call.channel, call.sequence, call.name, call.step) == (CallSequence(GROUP, *ends), 7, "mlp2.F0", 3)
    assert (call.enqueued, call.ended, call.bytes, call.failed) == (10, 12, 64, False)


def test_a_record_of_something_else() -> None:
    assert Call.of(record(RecordKind.COLLECTIVE, group=None), 0) is None
    assert Call.of(record(RecordKind.COMPUTE), 0) is None


def test_since_when_a_rank_does_nothing_is_unknown_if_it_never_moved() -> None:
    assert Evidence(rank=0, at=5_000_000_000).still is None
    assert Evidence(rank=0, at=5_000_000_000, moved=2_000_000_000).still == 3.0


@pytest.mark.parametrize(
    ("cause", "certain", "heading"),
    [("none", False, "No hang"), ("unknown", False, "A hang; its cause is not known"),
     ("stopped", True, "A hang: stopped")],
)  # fmt: skip
def test_what_a_verdict_is_called(cause: Any, certain: bool, heading: str) -> None:
    verdict = Verdict(cause=cause, why="")
    assert (verdict.certain, verdict.heading) == (certain, heading)


VERDICT = Verdict(
    cause="stopped", why="Rank 1 is stopped.", ranks=(1,), hosts=("n1",), differs="",
    chain=(WaitLink(ranks=(0,), call=str(CALL), on=(1,)),), also=(Verdict(cause="crashed", why="Rank 3 ended."),),
)  # fmt: skip
EVIDENCE = Evidence(
    rank=1, host="n1", state="stopped", status=-9, ended_at=2.5, thread="waits", doing="mlp2.F0", step=3, at=99,
    calls=(CALL, replace(CALL, channel=CallSequence(GROUP, 0, 3), ended=20, failed=True)), stack=("train.py:3",),
    error="x", reached=(0,), missed=(2,), first=True, moved=5, longest=1.5, computes=True,
)  # fmt: skip


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    write_hang(tmp_path, VERDICT, [EVIDENCE, Evidence(rank=2, recorded=False, patient=True)])
    assert read_hang(tmp_path / FILE) == (VERDICT, [EVIDENCE, Evidence(rank=2, recorded=False, patient=True)])
    with pytest.raises(OSError):
        write_hang(tmp_path / "gone", VERDICT, [])
    assert not (tmp_path / "gone").exists()


WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "version": (lambda v: v.update(version=2), "is of version 2; this Plait reads version 1"),
    "no version": (lambda v: v.pop("version"), "is of version None"),
    "no verdict": (lambda v: v.pop("verdict"), "is damaged"),
    "a cause": (lambda v: v["verdict"].update(cause="gloom"), "is damaged"),
    "a wait": (lambda v: v["verdict"]["chain"][0].update(on=["a"]), "is damaged"),
    "a state": (lambda v: v["evidence"][0].update(state="glad"), "is damaged"),
    "an unknown key": (lambda v: v["evidence"][0].update(mood="glad"), "is damaged"),
    "a channel": (lambda v: v["evidence"][0]["calls"][0].update(channel=[1, 2]), "is damaged"),
    "a group": (lambda v: v["evidence"][0]["calls"][0].update(channel=[["a"], 0, "dp", -1, -1]), "is damaged"),
}


@pytest.mark.parametrize(("change", "why"), WRONG.values(), ids=WRONG)
def test_a_file_that_is_something_else_is_one_error(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], why: str
) -> None:
    write_hang(tmp_path, VERDICT, [EVIDENCE])
    values = json.loads((tmp_path / FILE).read_text())
    change(values)
    (tmp_path / FILE).write_text(json.dumps(values))
    with pytest.raises(DataError, match=why) as caught:
        read_hang(tmp_path / FILE)
    assert str(tmp_path / FILE) in str(caught.value)


def test_a_file_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"hang\.json cannot be read: No such file"):
        read_hang(tmp_path / FILE)
