"""Flight recorder dumps of jobs that hang, and of healthy ones: who is named, and what for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.core.base.passed_over import PassedOver
from plait.core.runs.evidence import Verdict, read_hang
from plait.diagnose import flight_recorder
from plait.diagnose.flight_recorder import Dump, DumpEntry, dump_spans, is_dump
from plait.diagnose.importing import Imported, import_traces
from plait.diagnose.reading import read_run
from tests.support.recordings.theirs import dump, entry, waiting, written

SECOND = 10**9


def verdict(folder: Path, *dumps: dict[str, Any]) -> Verdict:
    found = import_traces(written(folder, *dumps), folder / "run")
    assert found.verdict is not None
    assert read_hang(folder / "run" / "hang.json")[0] == found.verdict
    return found.verdict


def looked_at(folder: Path, *dumps: dict[str, Any]) -> Imported:
    return import_traces(written(folder, *dumps), folder / "run")


def message(kind: str, seq: int, at: int, *, ended: bool, **more: Any) -> dict[str, Any]:
    """``send 0->1`` or ``recv 1<-0``, ranks of the group."""
    done = {"time_discovered_completed_ns": at + 50} if ended else {}
    made = entry if ended else waiting
    args = (seq, at, at + 50) if ended else (seq, at)
    return made(*args, profiling_name=f"nccl:{kind}", is_p2p=True, p2p_seq_id=seq, collective_seq_id=0, **done, **more)


def test_a_healthy_job(tmp_path: Path) -> None:
    found = verdict(tmp_path, dump(0), dump(1))
    assert (found.cause, found.ranks) == ("none", ())
    assert found.why == "Nothing is wrong in the dumps: all of their 10 operations have ended."


@pytest.mark.parametrize("protocol", [2, 4])
def test_pickles_of_dumps_say_what_their_json_says(tmp_path: Path, protocol: int) -> None:
    frames = [{"name": "step", "filename": "train.py", "line": 7}] * 40
    odd: dict[str, Any] = {"process_group": ("0", "default_pg"), "frames": frames, "duration_ms": 1.25}
    dumps = [dump(rank, *([waiting(5, 9000, **odd)] if rank != 2 else []), world=4) for rank in range(4)]
    found: list[Imported] = []
    for name, form in (("json", 0), ("pickles", protocol)):
        (tmp_path / name).mkdir()
        files = written(tmp_path / name, *dumps, named="nccl_trace_rank_{}", protocol=form)
        found.append(import_traces(files, tmp_path / name / "run"))
    assert found[0] == found[1]
    assert found[0].verdict is not None
    assert found[0].verdict.ranks == (2,)
    first, second = (read_run(tmp_path / name / "run").recording.spans for name in ("json", "pickles"))
    assert first.equals(second)


@pytest.mark.parametrize("at", [1795671044864785515, 1795671044864785921, 2**53 + 1])
def test_a_dump_of_operations_of_which_nobody_knows_the_end_is_read(tmp_path: Path, at: int) -> None:
    """Gloo's: they have ended and tell one time, a number of more digits than a float has."""
    ended = [waiting(0, at + 10, retired=True)]
    dumps = [dump(rank, *ended, ended=0) for rank in range(2)]
    found = looked_at(tmp_path, *dumps)
    assert (found.ranks, found.spans) == (2, 0)
    assert found.verdict is not None
    assert found.verdict.cause == "none"


def test_a_rank_that_did_not_come_is_named_with_what_it_did_last(tmp_path: Path) -> None:
    others = [dump(rank, waiting(5, 9000), world=4) for rank in (0, 1, 3)]
    found = verdict(tmp_path, *others, dump(2, world=4))
    assert (found.cause, found.ranks) == ("missing", (2,))
    assert found.why.startswith(
        "Rank 2 has not begun all-reduce 5 of default_pg group 0-3, where ranks 0, 1 and 3 wait."
    )
    assert "all-reduce 4" in found.why, "its last"
    assert [link.on for link in found.chain] == [(2,)]


def test_a_rank_without_a_dump_is_named(tmp_path: Path) -> None:
    found = verdict(tmp_path, *(dump(rank, waiting(5, 9000), world=4) for rank in (0, 1, 2)))
    assert (found.cause, found.ranks) == ("missing", (3,))
    assert "Rank 3 left no dump" in found.why
    assert "all-reduce 5" in found.why


def test_a_rank_without_a_dump_is_named_beside_another_fault_and_none(tmp_path: Path) -> None:
    wrong = waiting(5, 9000, input_sizes=[[5]])
    found = verdict(
        tmp_path, dump(0, waiting(5, 9000), world=4), dump(1, wrong, world=4), dump(2, waiting(5, 9000), world=4)
    )
    assert (found.cause, found.ranks) == ("mismatch", (1,))
    assert [one.ranks for one in found.also] == [(3,)]
    (tmp_path / "healthy").mkdir()
    healthy = verdict(tmp_path / "healthy", dump(0, world=4), dump(1, world=4), dump(2, world=4))
    assert healthy.cause == "none"
    assert "Rank 3 left no dump" in healthy.why


@pytest.mark.parametrize(
    ("odd", "differs", "words"),
    [
        ({"input_sizes": [[5]]}, "size", "Float 20 bytes"),
        ({"input_dtypes": ["Half"]}, "dtype", "Half"),
        ({"profiling_name": "nccl:broadcast"}, "op", "a broadcast"),
    ],
)
@pytest.mark.parametrize("state", ["scheduled", "started"])
def test_who_began_something_else_is_named(
    tmp_path: Path, odd: dict[str, Any], differs: str, words: str, state: str
) -> None:
    dumps = [dump(rank, waiting(5, 9000, **(odd if rank == 2 else {}), state=state), world=4) for rank in range(4)]
    found = verdict(tmp_path, *dumps)
    assert (found.cause, found.ranks, found.differs) == ("mismatch", (2,), differs)
    assert words in found.why


def test_several_that_began_different_things_are_told_apart(tmp_path: Path) -> None:
    odd: dict[int, dict[str, Any]] = {
        2: {"input_sizes": [[1025]]},
        3: {"profiling_name": "nccl:broadcast", "input_sizes": [[262144]]},
        4: {"input_dtypes": ["Half"]},
    }
    found = verdict(tmp_path, *(dump(rank, waiting(5, 9000, **odd.get(rank, {})), world=8) for rank in range(8)))
    assert (found.cause, found.ranks, found.differs) == ("mismatch", (2, 3, 4), "size and op and dtype")
    assert found.why == (
        "Rank 2 began an all-reduce of Float 4100 bytes, rank 3 began a broadcast of Float 1048576 bytes and rank 4 "
        "began an all-reduce of Half 64 bytes as call 5 of default_pg group 0-7, where ranks 0, 1 and 5-7 began an "
        "all-reduce of Float 128 bytes: the size, op and dtype must be the same on all."
    )


def test_without_a_majority_all_that_differs_is_told(tmp_path: Path) -> None:
    odd: list[dict[str, Any]] = [{}, {"input_sizes": [[1025]]}, {"input_dtypes": ["Half"]}]
    found = verdict(tmp_path, *(dump(rank, waiting(5, 9000, **odd[rank]), world=3) for rank in range(3)))
    assert found.differs == "size and dtype"
    assert "Mismatch of size and dtype in call 5" in found.why


def test_another_order_is_told_as_one(tmp_path: Path) -> None:
    right = [waiting(5, 9000), waiting(6, 9100, profiling_name="nccl:broadcast")]
    turned = [waiting(5, 9000, profiling_name="nccl:broadcast"), waiting(6, 9100)]
    found = verdict(tmp_path, *(dump(rank, *(turned if rank == 1 else right), world=4) for rank in range(4)))
    assert (found.cause, found.ranks, found.differs) == ("mismatch", (1,), "order")


def test_a_call_that_all_began_and_nobody_ended(tmp_path: Path) -> None:
    found = verdict(tmp_path, *(dump(rank, waiting(5, 9000, state="started"), world=4) for rank in range(4)))
    assert (found.cause, found.ranks) == ("unknown", ())
    assert "All of ranks 0-3 have begun all-reduce 5 of default_pg group 0-3" in found.why


def test_who_alone_has_not_ended_is_named(tmp_path: Path) -> None:
    dumps = [dump(rank, waiting(5, 9000) if rank == 3 else entry(5, 9000, 9500), world=4) for rank in range(4)]
    found = verdict(tmp_path, *dumps)
    assert (found.cause, found.ranks) == ("missing", (3,))
    assert "has not ended all-reduce 5" in found.why


def test_sizes_that_need_not_be_equal_are_no_fault(tmp_path: Path) -> None:
    """Of all-to-all while it is under way; of others once all have ended them."""
    uneven = [entry(5, 9000, 9500, profiling_name="nccl:all_gather", input_sizes=[[rank + 1]]) for rank in range(2)]
    assert verdict(tmp_path, *(dump(rank, uneven[rank]) for rank in range(2))).cause == "none"
    (tmp_path / "under_way").mkdir()
    exchange = [waiting(5, 9000, profiling_name="nccl:all_to_all", input_sizes=[[rank + 1]]) for rank in range(2)]
    assert verdict(tmp_path / "under_way", *(dump(rank, exchange[rank]) for rank in range(2))).cause == "unknown"


def test_groups_are_told_apart(tmp_path: Path) -> None:
    """Two of the same members; and one in which a rank waits while the other waits for a third in another."""
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
    found = verdict(tmp_path, *(one | {"pg_config": config} for one in dumps))
    assert (found.cause, found.ranks) == ("missing", (2,)), "rank 1 has not come to tp 1, but it waits itself"
    assert "of dp group 1, 2" in found.why


def test_a_circle_of_groups_is_a_deadlock(tmp_path: Path) -> None:
    config = {name: {"name": name, "desc": name, "ranks": "[0, 1]"} for name in ("a", "b")}
    one, two = (dump(n, waiting(1, 9000, process_group=[name, name])) for n, name in enumerate("ab"))
    found = verdict(tmp_path, one | {"pg_config": config}, two | {"pg_config": config})
    assert (found.cause, found.ranks) == ("deadlock", (0, 1))


def test_messages(tmp_path: Path) -> None:
    """A receiver waits for a rank that waits for nobody; those that came are no fault."""
    ends = [message("send 0->1", 1, 9000, ended=True)], [message("recv 1<-0", 1, 9000, ended=True)]
    found = verdict(tmp_path, dump(0, *ends[0]), dump(1, *ends[1], message("recv 1<-0", 2, 9500, ended=False)))
    assert (found.cause, found.ranks) == ("missing", (0,))
    assert "message 1 from rank 0 to rank 1" in found.why
    (tmp_path / "came").mkdir()
    assert verdict(tmp_path / "came", dump(0, *ends[0]), dump(1, *ends[1])).cause == "none"


def test_messages_whose_sizes_differ(tmp_path: Path) -> None:
    sent = message("send 0->1", 1, 9000, ended=False, input_sizes=[[7]])
    got = message("recv 1<-0", 1, 9000, ended=False, output_sizes=[[8]], output_dtypes=["Float"])
    assert verdict(tmp_path, dump(0, sent), dump(1, got)).cause == "mismatch"


def test_parts_of_a_batch_have_its_state(tmp_path: Path) -> None:
    """Messages that were begun together are entries that stay scheduled; the batch's own entry has ended."""

    def batch(kind: str, ended: bool) -> list[dict[str, Any]]:
        none = {"input_sizes": [], "output_sizes": [], "profiling_name": "nccl:coalesced"}
        whole = message("send 0->1", 3, 9100, ended=ended) | none
        return [message(kind, 3, 9000, ended=False), whole]

    both = "send 0->1", "recv 1<-0"
    assert verdict(tmp_path, *(dump(rank, *batch(kind, ended=True)) for rank, kind in enumerate(both))).cause == "none"
    (tmp_path / "open").mkdir()
    found = verdict(tmp_path / "open", dump(0), dump(1, *batch("recv 1<-0", ended=False)))
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
    found = looked_at(tmp_path, *(dump(rank, last, world=4) for rank in range(4)))
    assert found.verdict is not None
    assert (found.verdict.cause, found.verdict.ranks) == ("unknown", ())
    assert found.verdict.why == (
        "4 operations of ranks 0-3 had not ended, but their ends are not told: a hang cannot be excluded."
    )
    assert any("4 operations of ranks 0-3 had not ended" in note for note in found.notes)
    (tmp_path / "one").mkdir()
    alone = verdict(tmp_path / "one", *(dump(n, *([last] if n == 2 else []), world=4) for n in range(3)))
    assert alone.why.startswith("1 operation of rank 2 had not ended")
    assert [one.ranks for one in alone.also] == [(3,)]


def test_a_dump_that_cannot_be_read_is_not_one_that_is_missing(tmp_path: Path) -> None:
    def told(folder: str, last: dict[str, Any] | None, world: int = 4) -> Imported:
        (tmp_path / folder).mkdir()
        files = written(
            tmp_path / folder,
            *(dump(rank, *([last] if last and rank != 1 else []), world=world) for rank in range(4)),
            named="dump_rank_{}.json",
        )
        files[1].write_text(files[1].read_text()[:-40])
        return import_traces(files, tmp_path / folder / "run")

    waits = told("waits", waiting(5, 9000))
    assert waits.verdict is not None
    assert (waits.verdict.cause, waits.verdict.ranks) == ("unknown", ())
    assert waits.verdict.why.startswith(
        "Rank 1's dump cannot be read: what it did is not known. Ranks 0 and 2, 3 wait for it in all-reduce 5"
    )
    assert "rank 1's file cannot be read: what it did is not known" in waits.notes
    assert not any("left no" in note for note in waits.notes)
    healthy = told("healthy", None)
    assert healthy.verdict is not None
    assert healthy.verdict.why.endswith("Rank 1's dump cannot be read: what it did is not known.")
    both = told("both", waiting(5, 9000), world=5).verdict
    assert both is not None
    assert (both.cause, both.ranks) == ("missing", (4,)), "whoever left no dump is the likelier cause"
    assert "the job has 5 ranks, and rank 4 left no file" in told("more", waiting(5, 9000), world=5).notes


def test_a_dump_without_an_operation_is_said(tmp_path: Path) -> None:
    found = looked_at(tmp_path, dump(0), dump(1, ended=0))
    assert "the dump of rank 1 holds no operation: none was begun, or none was recorded" in found.notes
    (tmp_path / "waits").mkdir()
    hung = verdict(tmp_path / "waits", dump(0, waiting(5, 9000)), dump(1, ended=0))
    assert (hung.cause, hung.ranks) == ("missing", (1,))
    assert hung.why.endswith("Rank 1 recorded no operation: none was begun, or none was recorded.")


def test_a_version_that_is_not_known_is_remarked_on(tmp_path: Path) -> None:
    notes = looked_at(tmp_path, dump(0) | {"version": "99.0"}, dump(1) | {"version": "1.5"}).notes
    assert [note for note in notes if "version" in note] == [
        "trace0.json is of version 99.0, which is not known: it is read as version 2"
    ]


@pytest.mark.parametrize("verb", ["broadcast", "reduce"])
def test_operations_out_of_place_have_their_plain_names(tmp_path: Path, verb: str) -> None:
    odd = waiting(5, 9000, profiling_name=f"nccl:_{verb}_oop")
    found = verdict(tmp_path, *(dump(n, odd if n == 2 else waiting(5, 9000), world=4) for n in range(4)))
    assert f"Rank 2 began a {verb} of Float" in found.why


def test_what_gloo_writes(tmp_path: Path) -> None:
    """No state but scheduled, times of creation alone, a group without a name: what was retired has ended."""

    def gloo(rank: int, *more: dict[str, Any]) -> dict[str, Any]:
        entries = [
            waiting(n, SECOND * n, profiling_name="gloo:all_reduce", retired=True, record_id=n - 1) for n in (1, 2)
        ]
        return dump(rank, ended=0) | {
            "pg_config": {"": {"name": "", "desc": "", "ranks": "[0, 1]"}},
            "entries": [*entries, *more],
        }

    found = looked_at(tmp_path, gloo(0), gloo(1))
    assert found.verdict is not None
    assert (found.verdict.cause, found.spans) == ("none", 0)
    assert any("4 operations that ended, nobody knows when" in line for line in found.over.lines())
    (tmp_path / "open").mkdir()
    hung = verdict(tmp_path / "open", gloo(0, waiting(3, 3 * SECOND)), gloo(1))
    assert (hung.cause, hung.ranks) == ("missing", (1,))


def test_a_rank_that_has_done_nothing_has_no_entries(tmp_path: Path) -> None:
    empty = {key: value for key, value in dump(1).items() if key != "entries"}
    found = verdict(tmp_path, dump(0, waiting(5, 9000)), empty)
    assert (found.cause, found.ranks) == ("missing", (1,))


def test_times_of_zero_are_unknown_and_no_span_is_longer_than_the_job(tmp_path: Path) -> None:
    now = 1_718_000_000 * SECOND
    zero = [entry(n, now + n * SECOND, now + n * SECOND + 10**7, time_discovered_started_ns=0) for n in range(4)]
    unknown = entry(4, now, 0, time_created_ns=0, time_discovered_started_ns=0)
    from plait.diagnose.reading import read_run

    found = looked_at(tmp_path, dump(0, *zero, unknown, ended=0), dump(1, *zero, ended=0))
    spans = read_run(tmp_path / "run").recording.spans
    assert found.spans == spans.height == 8
    lengths = (spans["end"] - spans["start"]).to_list()
    assert lengths == pytest.approx([0.01] * 8, abs=1e-6)
    assert any("1 operations that ended, nobody knows when" in line for line in found.over.lines())


def test_entries_that_were_overwritten_are_counted(tmp_path: Path) -> None:
    """By the numbers of records; messages that are left still find their ends."""
    sent = [message("send 0->1", n, 9000 + n, ended=True, record_id=40 + n) for n in range(3)]
    got = [message("recv 1<-0", n, 9000 + n, ended=n < 2, record_id=90 + n) for n in range(1, 3)]
    found = looked_at(tmp_path, dump(0, *sent, ended=0), dump(1, *got, ended=0))
    lines = found.over.lines()
    assert any(line.startswith("passed over 131 entries that the recorder had overwritten") for line in lines), lines
    assert found.verdict is not None
    assert (found.verdict.cause, found.verdict.ranks) == ("missing", (0,)), "what 0 sent last is what 1 had last"


def test_version_one_counts_all_operations_together(tmp_path: Path) -> None:
    def old(rank: int, *, ended: bool) -> dict[str, Any]:
        last = entry(5, 9000, 9500) if ended else waiting(5, 9000)
        entries = [{k: v for k, v in one.items() if k != "collective_seq_id"} | {"seq_id": n, "pg_id": 0}
                   for n, one in enumerate([*dump(rank)["entries"], last])]  # fmt: skip
        return dump(rank) | {"version": "1.5", "entries": entries}

    assert verdict(tmp_path, old(0, ended=True), old(1, ended=True)).cause == "none"
    (tmp_path / "open").mkdir()
    assert verdict(tmp_path / "open", old(0, ended=False), dump(1) | {"version": "1.5"}).ranks == (1,)


def test_where_a_rank_waits_is_its_innermost_frames(tmp_path: Path) -> None:
    frames = [
        {"name": "all_reduce", "filename": "c10d.py", "line": 9},
        {"name": "step", "filename": "train.py", "line": 7},
    ]
    import_traces(written(tmp_path, dump(0, waiting(5, 9000, frames=frames)), dump(1)), tmp_path / "run")
    evidence = read_hang(tmp_path / "run" / "hang.json")[1]
    assert evidence[0].stack == ("train.py:7 step", "c10d.py:9 all_reduce")


# ---- entries ----


def read_entry(**more: Any) -> DumpEntry:
    """One entry alone, of rank 0."""
    one = Dump(PassedOver())
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
    one = Dump(PassedOver())
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
        ([[2] * 53], ["Byte"], 2**53), ([[2] * 53, [1]], ["Byte", "Byte"], None), ([[1] * 64], ["Byte"], 1),
        ([[1] * 65], ["Byte"], None), ([[-1]], ["Byte"], None), ([7], ["Byte"], None), ([[4]], None, None),
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
    one = Dump(PassedOver())
    config = {
        "0": {"name": "a", "desc": "dp", "ranks": "[3, 1]"}, "1": {"ranks": []}, "2": {"name": "c", "ranks": None},
        "3": {"ranks": "[0, x]"}, "4": 7, "5": {},
    }  # fmt: skip
    one.finish({"pg_config": config, "rank": 3, "version": 2.9})
    assert {name: (group.label, group.ranks) for name, group in one.groups.items()} == {
        "a": ("dp", (3, 1)), "1": ("1", ()), "c": ("c", ()), "5": ("5", ()),
    }  # fmt: skip
    assert (one.mentioned, one.told, one.version) == ({1, 3}, 3, "2.9")
    assert one.over.counts == {"groups whose members cannot be": 2}
    one.finish({"pg_config": [1]})
    assert one.groups == {}


def test_a_dump_is_read_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "MOST_SIZES", 5)
    few = Dump(PassedOver())
    few.add(entry(0, 100, 200, input_sizes=[[1]] * 3, output_sizes=[[1]] * 2))
    with pytest.raises(ValueError, match="sizes of more than 5 tensors, the most that are read"):
        few.add(entry(1, 100, 200, input_sizes=[[1]]))
    monkeypatch.setattr(flight_recorder, "MOST_ENTRIES", 2)
    one = Dump(PassedOver())
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
    one = Dump(PassedOver())
    for each in entries:
        one.add(each)
    one.finish({"pg_config": config or {"0": {"name": "0", "desc": "default_pg", "ranks": "[1, 5, 3]"}}})
    return dump_spans(one, rank).spans.rows(named=True)


def test_when_an_entry_was_under_way() -> None:
    """From when it was seen to begin, else enqueued, until it was seen to end, else as long as it took."""
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


def test_frames_of_a_stack() -> None:
    frames = [{"filename": f"{n}.py", "line": n, "name": "f"} for n in range(5)]
    assert read_entry(frames=frames).stack == ("2.py:2 f", "1.py:1 f", "0.py:0 f"), "the innermost, last"
    assert read_entry(frames=[7, *frames]).stack == ("1.py:1 f", "0.py:0 f")
    assert read_entry(frames="x").stack == ()


# ---- what must be equal ----


@pytest.mark.parametrize(
    ("name", "odd", "cause"),
    [
        ("scatter", {"input_sizes": [[99]]}, "unknown"),
        ("scatter", {"output_sizes": [[99]]}, "mismatch"),
        ("scatter", {"output_dtypes": ["Int"]}, "mismatch"),
        ("reduce_scatter", {"input_sizes": [[99]]}, "mismatch"),
        ("reduce_scatter", {"output_sizes": [[99]]}, "unknown"),
        ("all_reduce", {"input_sizes": [], "output_sizes": [[8]]}, "unknown"),
        ("all_reduce", {"input_sizes": [], "output_sizes": [[99]]}, "mismatch"),
        ("alltoall_base", {"input_sizes": [[99]]}, "unknown"), ("all_to_all", {"input_dtypes": ["Int"]}, "mismatch"),
    ],
)  # fmt: skip
def test_what_must_be_equal_on_all_members(tmp_path: Path, name: str, odd: dict[str, Any], cause: str) -> None:
    usual: dict[str, Any] = {
        "profiling_name": f"nccl:{name}", "input_sizes": [[8]], "output_sizes": [[8]],
        "input_dtypes": ["Float"], "output_dtypes": ["Float"],
    }  # fmt: skip
    dumps = [dump(rank, waiting(5, 9000, **(usual | (odd if rank == 1 else {}))), world=3) for rank in range(3)]
    assert verdict(tmp_path, *dumps).cause == cause


def test_of_a_batch_the_parts_count_together(tmp_path: Path) -> None:
    """Different operations that were begun as one are "coalesced", with the bytes of all."""
    whole = {"profiling_name": "nccl:coalesced", "input_sizes": [], "output_sizes": []}

    def batch(size: int, world: int = 3) -> list[dict[str, Any]]:
        return [
            waiting(5, 9000),
            waiting(5, 9001, profiling_name="nccl:broadcast", input_sizes=[[size]]),
            waiting(5, 9002, **whole),
        ]

    found = verdict(tmp_path, *(dump(rank, *batch(9 if rank == 2 else 8), world=3) for rank in range(3)))
    assert (found.cause, found.ranks, found.differs) == ("mismatch", (2,), "size")
    assert "a coalesced of Float 164 bytes" in found.why and "160 bytes" in found.why


def test_messages_and_operations_of_which_the_dump_tells_too_little_are_counted(tmp_path: Path) -> None:
    odd = entry(7, 9000, 9500, profiling_name="nccl:send", is_p2p=True)
    found = looked_at(tmp_path, dump(0, odd, entry(9, 9000, 9500, collective_seq_id=None)), dump(1))
    assert found.over.counts == {"messages whose ends are not told": 1, "operations without a number": 1} | {
        "entries that the recorder had overwritten": 3
    }


def test_of_a_group_that_nobody_tells_those_that_used_it_are_members(tmp_path: Path) -> None:
    """Its members are told as none: a third rank has no part in it."""
    config = {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"},
        "9": {"name": "9", "desc": "odd", "ranks": "[]"},
    }
    used = {"process_group": ["9", "odd"]}
    dumps = [dump(0, waiting(5, 9000, **used)), dump(1, entry(4, 8000, 8500, **used)), dump(2)]
    found = looked_at(tmp_path, *(one | {"pg_config": config} for one in dumps))
    assert found.verdict is not None
    assert (found.verdict.cause, found.verdict.ranks) == ("missing", (1,))
    assert "all-reduce 5 of odd group 0, 1" in found.verdict.why
    assert found.over.counts["groups whose members are not told: taken are those that used them"] == 2


def test_several_that_did_not_come_and_several_calls(tmp_path: Path) -> None:
    """Told is the call in which most wait."""
    config = {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3, 4, 5]"},
        "8": {"name": "8", "desc": "tp", "ranks": "[0, 1]"},
        "9": {"name": "9", "desc": "dp", "ranks": "[2, 3, 4, 5]"},
    }  # fmt: skip
    tp, dp = {"process_group": ["8", "tp"]}, {"process_group": ["9", "dp"]}
    dumps = [
        dump(0, waiting(0, 9000, **tp), ended=0), dump(1, ended=2), dump(2, waiting(0, 9000, **dp), ended=0),
        dump(3, waiting(0, 9100, **dp), ended=0), dump(4, ended=0), dump(5, ended=1),
    ]  # fmt: skip
    found = verdict(tmp_path, *(one | {"pg_config": config} for one in dumps))
    assert (found.cause, found.ranks) == ("missing", (1, 4, 5))
    assert found.why.startswith("Ranks 4, 5 have not begun all-reduce 0 of dp group 2-5, where ranks 2, 3 wait."), (
        found.why
    )
    assert "The last of rank 5 is all-reduce 0" in found.why and "The last of rank 4" not in found.why
    assert found.why.endswith("Rank 1, too, did not come to a call that others wait in.")
    assert [(link.ranks, link.on) for link in found.chain] == [((2, 3), (4, 5))]


def test_the_group_of_all_ranks_is_one_whatever_it_is_called(tmp_path: Path) -> None:
    """gloo has no name for it, NCCL calls it 0."""
    nameless = dump(0, waiting(5, 9000, process_group=["", ""]), ended=0)
    nameless["pg_config"] = {"": {"name": "", "desc": "", "ranks": "[0, 1]"}}
    found = verdict(tmp_path, nameless, dump(1, waiting(5, 9000), ended=0))
    assert (found.cause, found.ranks) == ("unknown", ()), "both have begun the same call"


# ---- who is told of several ----


def grouped(content: dict[str, Any], **groups: list[int]) -> dict[str, Any]:
    config = {name: {"name": name, "desc": name, "ranks": str(ranks)} for name, ranks in groups.items()}
    return content | {"pg_config": content["pg_config"] | config}


def test_of_calls_that_nobody_ends_the_one_that_was_begun_first(tmp_path: Path) -> None:
    """By the first of its ranks, whatever the others did."""
    tp = {"process_group": ["tp", "tp"]}
    first = [waiting(5, 9000), waiting(1, 8000, **tp)]
    second = [waiting(5, 9100), waiting(1, 9900, **tp)]
    dumps = [dump(0, *first), dump(1, *second)]
    found = verdict(tmp_path, *(grouped(one, tp=[0, 1]) for one in dumps))
    assert found.why.startswith("All of ranks 0, 1 have begun all-reduce 1 of tp group 0, 1")


def test_the_call_in_which_most_wait_is_told(tmp_path: Path) -> None:
    """Rank 3 did not come to either; of others that did not come it is said, too."""
    pair = {"process_group": ["pair", "pair"]}
    some = [dump(0, waiting(1, 8000, **pair), world=6), *(dump(rank, waiting(5, 9000), world=6) for rank in (1, 2))]
    idle = [dump(rank, world=6) for rank in (3, 4, 5)]
    config = {"pair": [0, 5], "0": [1, 2, 3]}
    found = verdict(tmp_path, *(grouped(one, **config) for one in (*some, *idle)))
    assert (found.cause, found.ranks) == ("missing", (3, 5))
    assert found.why.startswith("Rank 3 has not begun all-reduce 5")
    assert "where ranks 1, 2 wait" in found.why
    assert found.why.endswith(" Rank 5, too, did not come to a call that others wait in.")
    assert [(link.ranks, link.on) for link in found.chain] == [((1, 2), (3,))]


def test_evidence_of_a_dump(tmp_path: Path) -> None:
    """When the last was known, what was last, and when a batch was begun: with its first part."""
    parts = [waiting(5, 9000), waiting(5, 8990, profiling_name="nccl:broadcast"),
             waiting(5, 9010, profiling_name="nccl:coalesced", input_sizes=[], output_sizes=[])]  # fmt: skip
    import_traces(written(tmp_path, dump(0, *parts), dump(1)), tmp_path / "run")
    first, second = read_hang(tmp_path / "run" / "hang.json")[1]
    assert (first.at, second.at) == (9000, 5900), "what was created at 9000 and 10 ns before"
    assert first.doing == "coalesced 5 of default_pg group 0, 1, which has not ended"
    assert second.doing == "all-reduce 4 of default_pg group 0, 1, which ended"
    assert [(call.sequence, call.enqueued, call.over) for call in first.calls] == [(5, 8980, False)]
    assert [(call.sequence, call.enqueued, call.over) for call in second.calls] == [(4, 5090, True)]
    assert (first.thread, second.thread) == ("waits", "unknown")


def test_a_batch_ends_with_the_last_of_its_parts(tmp_path: Path) -> None:
    parts = [entry(5, 9000, 9900), entry(5, 9001, 9500, profiling_name="nccl:broadcast")]
    import_traces(written(tmp_path, dump(0, *parts), dump(1)), tmp_path / "run")
    evidence = read_hang(tmp_path / "run" / "hang.json")[1]
    assert [(call.sequence, call.ended) for call in evidence[0].calls] == [(5, 9900)]


@pytest.mark.parametrize(
    ("more", "cause"),
    [
        ({"output_dtypes": ["Half"]}, "mismatch"), ({"output_dtypes": ["Float"]}, "unknown"),
        ({"output_dtypes": [], "output_sizes": [], "input_dtypes": ["Float"]}, "unknown"),
        ({"output_dtypes": [], "output_sizes": [], "input_dtypes": ["Half"]}, "mismatch"),
    ],
)  # fmt: skip
def test_what_is_received_is_what_comes_out(tmp_path: Path, more: dict[str, Any], cause: str) -> None:
    """And what is sent is what goes in."""
    sent = message("send 0->1", 1, 9000, ended=False, input_sizes=[[8]], input_dtypes=["Float"],
                   output_sizes=[[99]], output_dtypes=["Int"])  # fmt: skip
    usual = {"input_sizes": [[8]], "input_dtypes": ["Float"], "output_sizes": [[8]]}
    if "output_sizes" not in more and more["output_dtypes"] == ["Half"]:
        usual["output_sizes"] = [[16]]  # as many bytes
    got = message("recv 1<-0", 1, 9000, ended=False, **(usual | more))
    assert verdict(tmp_path, dump(0, sent), dump(1, got)).cause == cause


def test_members_that_another_dump_tells(tmp_path: Path) -> None:
    """Of a group that a rank's own dump does not list; and of the whole, for which gloo has no name."""
    tp = {"process_group": ["tp", "tp"]}
    dumps = [dump(0, waiting(1, 9000, **tp), world=3), dump(1, waiting(1, 9000, **tp), world=3), dump(2, world=3)]
    found = looked_at(tmp_path, grouped(dumps[0], tp=[0, 1, 2]), *dumps[1:])
    assert found.verdict is not None
    assert (found.verdict.cause, found.verdict.ranks) == ("missing", (2,))
    assert "groups whose members are not told: taken are those that used them" not in found.over.counts
    (tmp_path / "gloo").mkdir()
    nameless = {"": {"name": "", "desc": "", "ranks": "[0, 1, 2, 3]"}}
    hung = verdict(tmp_path / "gloo", *(one | {"pg_config": nameless} for one in (
        dump(0, waiting(5, 9000)), dump(1, waiting(5, 9000)), dump(2, waiting(5, 9000)),
    )))  # fmt: skip
    assert (hung.cause, hung.ranks) == ("missing", (3,))
    (tmp_path / "untold").mkdir()
    bare = [dump(rank, waiting(5, 9000)) | {"pg_config": {}} for rank in range(2)]
    alone = verdict(tmp_path / "untold", *bare)
    assert (alone.cause, alone.ranks) == ("unknown", ()), "all whose dumps there are"


@pytest.mark.parametrize("third", [False, True])
def test_messages_of_whole_dumps_are_counted_from_their_first(tmp_path: Path, third: bool) -> None:
    """Two were sent; the receiver is still at the first. What another dump lost tells nothing."""
    sent = [message("send 0->1", n, 9000 + n, ended=True) for n in range(2)]
    got = [message("recv 1<-0", 0, 9100, ended=False)]
    other = entry(5, 9000, 9100, record_id=40, process_group=["3", "alone"])
    others = [grouped(dump(2, other, ended=0), **{"3": [2]})] if third else []
    found = verdict(tmp_path, dump(0, *sent), dump(1, *got), *others)
    assert (found.cause, found.ranks) == ("missing", (1,))
    assert "message 0 from rank 0 to rank 1" in found.why


def test_of_healthy_dumps_nothing_is_passed_over(tmp_path: Path) -> None:
    assert looked_at(tmp_path, dump(0), dump(1)).over.counts == {}


def test_what_is_open_does_not_hide_what_ended_after_it() -> None:
    now = 10**12
    whole = waiting(4, now, profiling_name="nccl:coalesced", input_sizes=[], output_sizes=[])
    for first in (waiting(3, now), whole):
        assert [one["seq"] for one in spans(first, entry(5, now, now + 9), entry(6, now + 20, now + 29))] == [5, 6]
    odd = entry(4, now, now - 9)
    assert [one["seq"] for one in spans(odd, entry(5, now, now + 9))] == [5]
