"""Entries of a flight recorder dump: states, names, numbers, bytes, groups, and the spans they
become."""

from __future__ import annotations

from typing import Any

import pytest

from plait.core.base.ignored_input import IgnoredInput
from plait.formats import flight_recorder as flight_recorder
from plait.formats.flight_recorder import Dump, DumpEntry, dump_spans, is_dump
from tests.support.recordings.theirs import entry, waiting


def read_entry(**more: Any) -> DumpEntry:
    """One entry alone, of rank 0."""
    one = Dump(IgnoredInput())
    one.add(entry(3, 1000, 2000, **more))
    [found] = one.entries
    return found


@pytest.mark.parametrize(
    ("more", "state"),
    [
        ({}, "completed"), ({"state": "started"}, "completed"),
        ({"state": "started", "time_discovered_completed_ns": 0}, "started"),
        ({"state": "scheduled", "time_discovered_completed_ns": 0}, "started"),
        ({"state": "scheduled", "time_discovered_completed_ns": 0, "time_discovered_started_ns": 0}, "scheduled"),
        ({"state": None, "time_discovered_completed_ns": None, "retired": True}, "completed"),
        ({"state": None, "time_discovered_completed_ns": None, "retired": 1}, "started"),
        ({"state": "completed", "time_discovered_completed_ns": None}, "completed"),
    ],
)  # fmt: skip
def test_states_of_entries(more: dict[str, Any], state: str) -> None:
    assert read_entry(**more).state == state
    assert read_entry(**more).open == (state != "completed")


@pytest.mark.parametrize(
    ("name", "more", "told"),
    [
        ("nccl:all_reduce", {}, ("all_reduce", False, None, False)),
        ("all_reduce", {}, ("all_reduce", False, None, False)),
        ("nccl:send 0->12", {}, ("send", True, 12, True)), ("nccl:recv 0<-12", {}, ("recv", True, 12, False)),
        ("nccl:send", {"is_p2p": True}, ("send", True, None, False)),
        ("nccl:x", {"is_p2p": 1}, ("x", False, None, False)),
    ],
)  # fmt: skip
def test_names_tell_messages_and_their_other_ends(name: str, more: dict[str, Any], told: tuple[Any, ...]) -> None:
    one = read_entry(profiling_name=name, **more)
    assert (one.verb, one.message, one.peer, one.sends) == told


@pytest.mark.parametrize("name", ["", None, "nccl:all reduce", "->", 7.5])
def test_entries_that_name_nothing_are_counted(name: Any) -> None:
    one = Dump(IgnoredInput())
    one.add(entry(3, 1000, 2000, profiling_name=name))
    one.add(7)
    one.finish({})
    assert (one.entries, one.over.counts) == ([], {"entries that are no objects or name no operation": 2})


@pytest.mark.parametrize(
    ("more", "sequence"),
    [
        ({"p2p_seq_id": 9, "seq_id": 8}, 3), ({"collective_seq_id": None, "seq_id": 8}, 8),
        ({"collective_seq_id": True}, None), ({"collective_seq_id": -1}, None), ({"collective_seq_id": 0}, 0),
        ({"collective_seq_id": 2**53}, 2**53), ({"collective_seq_id": 2**53 + 1, "seq_id": 0}, 0),
        ({"is_p2p": True, "p2p_seq_id": 9}, 9), ({"is_p2p": True, "seq_id": 8}, 8), ({"is_p2p": True}, None),
    ],
)  # fmt: skip
def test_numbers_of_entries(more: dict[str, Any], sequence: int | None) -> None:
    assert read_entry(**more).sequence == sequence


@pytest.mark.parametrize(
    ("sizes", "types", "size"),
    [
        ([[4, 8]], ["Float"], 128), ([[4], [2]], ["Float", "Half"], 20), ([[]], ["Long"], 8), ([[0]], ["Long"], 0),
        ([], [], None), (None, ["Float"], None), ([[4], [2]], ["Float"], None), ([[4]], ["Quantum"], None),
        ([[2] * 53, [1]], ["Byte", "Byte"], None), ([[1] * 65], ["Byte"], None), ([[-1]], ["Byte"], None),
        ([[4]], None, None),
    ],
)  # fmt: skip
def test_bytes_of_entries(sizes: Any, types: Any, size: int | None) -> None:
    one = read_entry(input_sizes=sizes, input_dtypes=types, output_sizes=sizes, output_dtypes=types)
    assert (one.bytes_in, one.bytes_out) == (size, size)
    assert one.dtype_in == ("+".join(dict.fromkeys(types)) if types else "")


def test_a_batch_names_no_sizes() -> None:
    none = {"input_sizes": [], "output_sizes": []}
    assert read_entry(profiling_name="nccl:Coalesced", **none).batch
    assert not read_entry(profiling_name="nccl:coalesced").batch
    assert not read_entry(
        profiling_name="nccl:coalesced", **(none | {"output_sizes": [[1]], "output_dtypes": ["Int"]})
    ).batch
    assert not read_entry(**none).batch


@pytest.mark.parametrize(
    ("more", "group"),
    [
        ({}, ("0", "default_pg")), ({"process_group": ["7"]}, ("7", "7")), ({"process_group": []}, ("[]", "[]")),
        ({"process_group": None}, ("0", "0")), ({"process_group": None, "pg_id": 5}, ("5", "5")),
        ({"process_group": "x"}, ("x", "x")),
    ],
)  # fmt: skip
def test_groups_of_entries(more: dict[str, Any], group: tuple[str, str]) -> None:
    one = read_entry(**more)
    assert (one.group, one.label) == group


def test_groups_whose_members_cannot_be_are_counted() -> None:
    one = Dump(IgnoredInput())
    config = {
        "0": {"name": "a", "desc": "dp", "ranks": "[3, 1]"}, "1": {"ranks": []}, "2": {"name": "c", "ranks": None},
        "3": {"ranks": "[0, x]"}, "4": 7, "5": {},
    }  # fmt: skip
    one.finish({"pg_config": config, "rank": 3, "version": 2.9})
    assert {name: (group.label, group.ranks) for name, group in one.groups.items()} == {
        "a": ("dp", (3, 1)), "1": ("1", ()), "c": ("c", ()), "5": ("5", ()),
    }  # fmt: skip
    assert (one.group_ranks, one.recorded_rank, one.version) == ({1, 3}, 3, "2.9")
    assert one.over.counts == {"groups with impossible members": 2}
    one.finish({"pg_config": [1]})
    assert one.groups == {}


def test_frames_of_a_stack() -> None:
    frames = [{"filename": f"{n}.py", "line": n, "name": "f"} for n in range(5)]
    assert read_entry(frames=frames).stack == ("2.py:2 f", "1.py:1 f", "0.py:0 f"), "the innermost, last"
    assert read_entry(frames=[7, *frames]).stack == ("1.py:1 f", "0.py:0 f")
    assert read_entry(frames="x").stack == ()


def test_a_dump_is_read_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "MOST_SIZES", 5)
    few = Dump(IgnoredInput())
    few.add(entry(0, 100, 200, input_sizes=[[1]] * 3, output_sizes=[[1]] * 2))
    with pytest.raises(ValueError, match="sizes of more than 5 tensors, the most that are read"):
        few.add(entry(1, 100, 200, input_sizes=[[1]]))
    monkeypatch.setattr(flight_recorder, "MOST_ENTRIES", 2)
    one = Dump(IgnoredInput())
    one.add(entry(0, 1000, 2000))
    one.add(entry(1, 1000, 2000))
    with pytest.raises(ValueError, match="more than 2 entries"):
        one.add(entry(2, 1000, 2000))


@pytest.mark.parametrize(
    ("header", "is_one"),
    [({"version": "2", "entries": 3}, True), ({"version": "2", "pg_config": {}}, True),
     ({"version": "2", "pg_status": {}}, True),
     ({"version": "2"}, False), ({"entries": 3}, False)],
)  # fmt: skip
def test_what_a_dump_is(header: dict[str, Any], is_one: bool) -> None:
    assert is_dump(header) == is_one


def spans(*entries: dict[str, Any], rank: int = 1, config: Any = None) -> list[dict[str, Any]]:
    one = Dump(IgnoredInput())
    for each in entries:
        one.add(each)
    one.finish({"pg_config": config or {"0": {"name": "0", "desc": "default_pg", "ranks": "[1, 5, 3]"}}})
    return dump_spans(one, rank).spans.rows(named=True)


def test_when_an_entry_was_under_way() -> None:
    """From when it was seen to begin, else enqueued, until it was seen to end, else as long as it
    took."""
    now = 10**12
    [seen] = spans(entry(3, now, now + 700, time_created_ns=now - 100))
    assert (seen["start"], seen["end"]) == pytest.approx((100e-9, 800e-9))
    [enqueued] = spans(entry(3, now, now + 700, time_created_ns=now - 100, time_discovered_started_ns=0))
    assert (enqueued["start"], enqueued["end"]) == pytest.approx((0, 800e-9))
    [took] = spans(entry(3, now, 0, time_created_ns=now - 100, duration_ms=0.002))
    assert (took["start"], took["end"]) == pytest.approx((100e-9, 2100e-9))
    [none] = spans(entry(3, now, 0, time_created_ns=now - 100, duration_ms=0))
    assert none["start"] == none["end"]
    assert spans(entry(3, now, now - 1)) == [], "it ends before it begins"
    assert spans(entry(3, now, 0, duration_ms=-1)) == []
    assert spans(entry(3, now, 0, duration_ms=4.1e12)) == []
    [long] = spans(entry(3, now, 0, duration_ms=1e5))
    assert long["end"] - long["start"] == pytest.approx(100)
    assert spans(waiting(3, now)) == []


def test_what_an_entry_is_a_span_of() -> None:
    now = 10**12
    [one] = spans(entry(3, now, now + 9))
    assert [one[key] for key in ("step", "rank", "kind", "name", "seq", "site", "bytes", "axis", "group")] == [
        0, 1, "comm", "all_reduce", 3, "all_reduce", 128, "dp", "1,3,5",
    ]  # fmt: skip
    [bare] = spans(entry(3, now, now + 9, input_sizes=[]))
    assert bare["bytes"] == 0
    ends = {"output_sizes": [[99]], "output_dtypes": ["Float"]}
    [sent] = spans(
        entry(3, now, now + 9, profiling_name="nccl:send 0->2", is_p2p=True, p2p_seq_id=None, seq_id=None, **ends)
    )
    assert [sent[key] for key in ("kind", "seq", "bytes", "axis", "group")] == ["transfer", -1, 396, "pp", "1>3"]
    [got] = spans(entry(3, now, now + 9, profiling_name="nccl:recv 0<-1"))
    assert got["group"] == "5>1"
    [lost] = spans(entry(3, now, now + 9, profiling_name="nccl:recv 0<-3"))
    assert lost["group"] == "1,3,5", "there is no fourth member"
    [alone] = spans(entry(3, now, now + 9, profiling_name="nccl:send 1->0"), config={"9": {"ranks": "[0]"}})
    assert alone["group"] == "1>0", "numbers of a group that is not told are ranks"
    [other] = spans(entry(3, now, now + 9, process_group=["4", ""], output_sizes=[[999]], output_dtypes=["Int"]))
    assert (other["group"], other["bytes"]) == ("4", 128)
    [odd] = spans(entry(3, now, now + 9, process_group=["", ""]), config={"9": {"ranks": "[0]"}})
    assert odd["group"] == "all"


def test_what_is_open_does_not_hide_what_ended_after_it() -> None:
    now = 10**12
    whole = waiting(4, now, profiling_name="nccl:coalesced", input_sizes=[], output_sizes=[])
    for first in (waiting(3, now), whole):
        assert [one["seq"] for one in spans(first, entry(5, now, now + 9), entry(6, now + 20, now + 29))] == [5, 6]
    odd = entry(4, now, now - 9)
    assert [one["seq"] for one in spans(odd, entry(5, now, now + 9))] == [5]
