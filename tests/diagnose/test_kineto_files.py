"""The profiler's traces as files: whose they are, what is said of them, what is passed over or
refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import DataError
from plait.core.base.ignored_input import IgnoredInput
from plait.diagnose.measured.importing import import_traces, recordings_in
from plait.diagnose.measured.reading import read_run
from plait.formats.base.recordings import LATEST
from plait.formats.kineto import events as kineto_reader
from plait.formats.kineto.events import TraceEvents, TraceFacts
from tests.support.recordings.theirs import imported, kernel, kinds, kineto, told, trace, written


def nameless(rank: int, **place: Any) -> dict[str, Any]:
    """A trace without ``distributedInfo``."""
    content = kineto(rank)
    del content["distributedInfo"]
    for event in content["traceEvents"]:
        if "Seq" in event.get("args", {}):
            event["args"] |= place
    return content


def test_a_folder_may_tell_the_rank_and_a_process_number_does_not(tmp_path: Path) -> None:
    files = []
    for rank in (0, 1):
        files += written(tmp_path / f"rank{rank}", nameless(rank), named="trace.json")
    assert import_traces(files, tmp_path / "run").notes == ["the job has 4 ranks, and ranks 2, 3 left no file"]
    pids = written(tmp_path, nameless(0), nameless(1), named="libkineto_activities_4{}.json")
    assert "ranks of 2 files are unknown" in import_traces(pids, tmp_path / "again").notes[0]


def test_a_trace_that_cannot_be_read_and_a_rank_that_cannot_be_are_said(tmp_path: Path) -> None:
    files = written(tmp_path, *(kineto(rank) for rank in (0, 1, 17)), named="trace_rank_{}.json")
    files[1].write_text(files[1].read_text()[:-40])
    notes = import_traces(files, tmp_path / "run").notes
    assert "rank 1's file cannot be read: what it did is not known" in notes
    assert "the job has 4 ranks, and ranks 2, 3 left no file" in notes
    assert "trace_rank_2.json says that it is of rank 17, of a job of 4 ranks" in notes
    nobodys = files[1].rename(tmp_path / "damaged.json")
    notes = import_traces([files[0], nobodys], tmp_path / "again").notes
    assert "the job has 4 ranks, and ranks 1-3 left no file, unless theirs is among the 1 that cannot be read" in notes


def test_a_trace_of_several_ranks_without_communication_is_remarked_on(tmp_path: Path) -> None:
    alone = [trace([kernel("gemm", 0, 10), kernel("odd_library", 10, 90)], rank, 4) for rank in range(4)]
    _, found, _ = imported(tmp_path, *alone)
    assert any("nothing in the trace of any rank is known as communication" in note for note in found.notes)
    _, found, _ = imported(tmp_path / "one", trace([kernel("gemm", 0, 10)], 0, 1))
    assert found.notes == []


def test_a_list_of_events_is_a_trace(tmp_path: Path) -> None:
    """As the format of Chrome's traces allows."""
    file = tmp_path / "trace_rank_0.json"
    file.write_text(json.dumps(kineto(0)["traceEvents"]))
    assert recordings_in([tmp_path]) == [file]
    assert import_traces([file], tmp_path / "run").spans > 20


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[" * 200_000, "trace.json: "),
        (json.dumps([{"ph": "BE"[n % 2], "name": "gemm", "ts": n} for n in range(40)]),
         "it has neither kernels nor operators that are whole: 40 begin and end events, which are not read"),
    ],
)  # fmt: skip
def test_why_nothing_could_be_used_is_said(tmp_path: Path, content: str, why: str) -> None:
    (tmp_path / "trace.json").write_text(content)
    files = recordings_in([tmp_path])
    assert len(files) == 1
    with pytest.raises(DataError, match=f"of 1 file, none could be used .*{why}"):
        import_traces(files, tmp_path / "run")


def test_categories_of_old_versions_and_unknown_ones(tmp_path: Path) -> None:
    old = {"cat": "Kernel"}
    events = [
        kernel("gemm", 0, 10) | old,
        kernel("ncclKernel_AllReduce", 10, 10) | old,
        kernel("x", 0, 5) | {"cat": "odd"},
    ]
    recording, found, _ = imported(tmp_path, trace(events, 0, 2))
    assert kinds(recording.spans) == {"gemm": "compute", "ncclKernel_AllReduce": "comm"}
    assert found.over.rows() == [{"what": "events of other categories", "count": 1, "first": "trace0.json: odd"}]


def test_numbers_that_json_has_not_are_unknown_and_counted(tmp_path: Path) -> None:
    text = json.dumps(kineto(0)).replace('"cat": "kernel"', '"cat": "kernel", "x": inf, "y": -nan, "path": "C:\\temp"')
    (tmp_path / "trace.json").write_bytes(text.encode().replace(b"gemm2", b"gem\xffm"))
    found = import_traces([tmp_path / "trace.json"], tmp_path / "run")
    spans = read_run(tmp_path / "run").recording.spans
    assert spans.filter(kind="compute").height == 30
    lines = found.over.lines()
    assert any("60 numbers that JSON does not have, taken as unknown" in line for line in lines), lines
    assert any("strings with a backslash or bytes that JSON does not have" in line for line in lines), lines


def reading(monkeypatch: pytest.MonkeyPatch, **limits: int) -> TraceEvents:
    for name, limit in limits.items():
        monkeypatch.setattr(kineto_reader, name, limit)
    return TraceEvents(IgnoredInput())


def test_a_trace_is_read_to_a_limit_of_events_and_of_names(monkeypatch: pytest.MonkeyPatch) -> None:
    few = reading(monkeypatch, MOST_EVENTS=3, MOST_NAMES=2)
    for event in (kernel("a", 0, 1), kernel("b", 1, 1), kernel("a", 2, 1)):
        few.add(event)
    with pytest.raises(ValueError, match="more than 3 kernels and operators, or 2 names"):
        few.add(kernel("a", 3, 1))
    few = reading(monkeypatch, MOST_COLLECTIVES=2)
    for seq in range(2):
        few.add(kernel("a", seq, 1, **told(seq)))
    with pytest.raises(ValueError, match="more than 2 collectives, the most that are read: profile fewer steps"):
        few.add(kernel("a", 2, 1, **told(2)))
    few = reading(monkeypatch, MOST_EVENTS=9)
    few.add(kernel("a", 0, 1))
    few.add(kernel("b", 0, 1))
    with pytest.raises(ValueError, match="or 2 names"):
        few.add(kernel("c", 3, 1))


def test_a_trace_of_which_next_to_nothing_is_of_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four and more others, with one of use to each two of them."""
    one = reading(monkeypatch, MOST_NON_SPANS=4, NON_SPANS_PER_SPAN=2)
    one.add(kernel("a", 0, 1))
    one.add(kernel("a", 1, 1))
    for _ in range(4):
        one.add({"ph": "M"})
    with pytest.raises(ValueError, match="of its first 7 events 2 are of use"):
        one.add({"ph": "M"})
    none = reading(monkeypatch, MOST_NON_SPANS=4)
    for _ in range(3):
        none.add({"ph": "i"})
    with pytest.raises(ValueError, match="of its first 4 events 0 are of use"):
        none.add({"ph": "i"})


def test_a_damaged_trace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one = reading(monkeypatch, DAMAGED=2)
    one.add(kernel("a", 0, 1))
    one.add(kernel("a", 1, 1))
    one.add(7)
    one.add({"ph": 7})
    with pytest.raises(ValueError, match="of its first 5 events 3 cannot be used"):
        one.add({"name": "no phase"})
    assert one.over.counts == {"events that are no objects": 1, "events without a phase": 2}
    quick = reading(monkeypatch, DAMAGED=2)
    quick.add(7)
    with pytest.raises(ValueError, match="of its first 2 events 2"):
        quick.add(7)


@pytest.mark.parametrize(
    ("event", "taken"),
    [
        ({"ts": LATEST * 1e6}, True), ({"ts": -LATEST * 1e6}, True), ({"ts": LATEST * 1e6 * 1.01}, False),
        ({"dur": 0}, True), ({"dur": -0.1}, False), ({"dur": LATEST * 2e6}, False),
        ({"dur": True}, False), ({"ts": "0x7"}, False), ({"dur": "1.5e1"}, True),
        ({"name": None}, False), ({"cat": "python_function"}, False),
        ({"cat": 7}, False), ({"cat": "user_annotation"}, False), ({"cat": "user_annotation", "name": "nccl:x"}, True),
        ({"cat": "odd", "name": "ProfilerStep#3"}, True), ({"args": [7]}, True), ({"args": None}, True),
    ],
)  # fmt: skip
def test_which_events_are_taken(event: dict[str, Any], taken: bool) -> None:
    one = TraceEvents(IgnoredInput())
    one.add(kernel("gemm", 0, 1) | event)
    assert one.count == taken


@pytest.mark.parametrize(
    ("info", "args", "said"),
    [
        ({"rank": 3, "world_size": 8}, {}, TraceFacts(3, 8, 0)), ({}, {}, TraceFacts(None, 4, 0)),
        ({"world_size": 0}, {}, TraceFacts(None, 4, 0)), ({"rank": 0}, {"Rank": 2}, TraceFacts(0, 4, 0)),
        ({}, {"Rank": "2"}, TraceFacts(2, 4, 0)),
        ({}, {"Rank": 4}, TraceFacts(None, 4, 0)),
        ({}, {"Process Group Ranks": None}, TraceFacts(None, None, 0)),
        ({"pg_config": [1, 2]}, {}, TraceFacts(None, 4, 2)),
        (7, {}, TraceFacts(None, 4, 0)),
        ({}, {"Process Group Ranks": "[8, 2]", "Rank": 0}, TraceFacts(8, 9, 0)),
        ({}, {"Rank": 1, "Collective name": "send"}, TraceFacts(None, 4, 0)),
    ],
)  # fmt: skip
def test_whose_a_trace_is(info: Any, args: dict[str, Any], said: TraceFacts) -> None:
    one = TraceEvents(IgnoredInput())
    one.add(kernel("a", 0, 1, **(told(0) | args)))
    assert one.facts({"distributedInfo": info}) == said


def test_places_that_differ_tell_no_rank() -> None:
    one = TraceEvents(IgnoredInput())
    for place in (0, 1):
        one.add(kernel("a", 0, 1, **told(0, Rank=place)))
    assert one.facts({}).rank is None


def test_the_world_is_that_of_the_largest_group() -> None:
    one = TraceEvents(IgnoredInput())
    one.add(kernel("a", 0, 1, **told(0)))
    one.add(kernel("a", 1, 1, **told(1, **{"Process Group Ranks": "[6, 7]"})))
    one.add(kernel("a", 2, 1, **told(2, **{"Process Group Ranks": "[0, 1]"})))
    assert one.facts({}).world == 8
