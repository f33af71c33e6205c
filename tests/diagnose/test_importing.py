"""Recordings of other tools: PyTorch profiler traces, flight recorder dumps; whatever else is refused."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from plait.core.base.errors import DataError, JobError
from plait.core.record.timeline import Timeline
from plait.diagnose.explain import explain
from plait.diagnose.imported import imported_notes
from plait.diagnose.importing import import_traces, recordings_in
from plait.diagnose.reading import read_run
from plait.diagnose.tables import MOST_RANKS
from tests.support.recordings.theirs import dump, entry, host, imported, kineto, waiting, written


@pytest.mark.parametrize("name", ["ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", "ncclKernel_ReduceScatter(x)"])
def test_a_profilers_traces(tmp_path: Path, name: str) -> None:
    found, _, said = imported(tmp_path, *(kineto(rank, slow=1.3 if rank == 2 else 1.0, name=name) for rank in range(4)))
    assert said == []
    assert (found.ranks, found.steps) == (4, list(range(10)))
    comm = found.spans.filter(pl.col("kind") == "comm")
    assert set(comm["axis"]) == {"dp"}
    assert set(comm["group"]) == {"0,1,2,3"}
    assert set(comm["bytes"]) == {2048}
    assert set(comm["direction"]) == {"backward"}
    assert set(found.meetings.group_by("meeting").len()["len"]) == {4}
    waits = found.spans.filter(pl.col("kind") == "wait", pl.col("rank") == 0)
    exposed = (waits["end"] - waits["start"]).to_list()
    assert exposed == pytest.approx([300e-6] * 10, abs=2e-6), "50 us of 350 are hidden"
    report = explain(found, "run")
    assert [(one.what, one.ranks) for one in report.stragglers] == [("slow processor", (2,))]
    assert report.stragglers[0].seconds == pytest.approx(90e-6, abs=5e-6)


def test_a_timeline_of_another_tool_is_a_timeline(tmp_path: Path) -> None:
    imported(tmp_path, kineto(0), kineto(1))
    part = next((tmp_path / "run" / "timeline").glob("rank-00001-*"))
    spans = Timeline.read_parquet(part).spans
    assert {span.rank for span in spans} == {1}
    assert min(span.start for span in spans) == pytest.approx(0.0, abs=1e-3)


def test_without_kernels_a_profilers_operators(tmp_path: Path) -> None:
    """As on a CPU with gloo: outermost operators, and ranges of collectives."""
    found, _, _ = imported(tmp_path, host(0), host(1))
    computes = found.spans.filter(pl.col("kind") == "compute")
    assert set(computes["name"]) == {"aten::linear"}
    assert found.steps == [3, 4, 5, 6, 7, 8]
    assert found.spans.filter(pl.col("kind") == "comm").height == 12


def test_flight_recorder_dumps(tmp_path: Path) -> None:
    open_ = entry(5, 6000, None, state="started", time_discovered_completed_ns=None)
    found, what, said = imported(tmp_path, dump(0, open_), dump(1, open_))
    assert said == []
    assert any("2 operations of ranks 0, 1 had not ended" in note for note in what.notes)
    assert found.spans.height == 10
    assert set(found.spans["group"]) == {"0,1"}
    assert set(found.spans["bytes"]) == {128}
    report = explain(found, "run")
    arrival = report.verdicts.arrivals[0]
    assert (arrival.axis, arrival.rank, arrival.lateness) == ("dp", 1, pytest.approx(100e-9, abs=1e-9))


def test_the_rank_may_stand_in_the_files_name(tmp_path: Path) -> None:
    content = kineto(0)
    del content["distributedInfo"]
    packed = tmp_path / "trace_rank_5.json.gz"
    packed.write_bytes(gzip.compress(json.dumps(content).encode()))
    import_traces([packed], tmp_path / "run")
    assert read_run(tmp_path / "run").recording.spans["rank"].unique().to_list() == [5]


def test_whatever_else_is_told_and_skipped_and_never_unpickled(tmp_path: Path) -> None:
    good = tmp_path / "good.json"
    good.write_text(json.dumps(kineto(0)))
    bad = {
        "pickled_rank_3": pickle.dumps({"entries": [Path()], "version": "2.9"}),
        "cut.json": json.dumps(kineto(1)).encode()[:-9],
        "list.json": b"[1]", "other.json": b'{"a": 1}', "norank.json": json.dumps({"traceEvents": []}).encode(),
        "empty_rank_1.json": json.dumps({"traceEvents": []}).encode(), "cut.json.gz": gzip.compress(b"{}" * 99)[:20],
        "strange_rank_2.json": json.dumps({"version": "2.9", "rank": 2, "entries": [1, {"process_group": 3}]}).encode(),
    }  # fmt: skip
    for name, data in bad.items():
        (tmp_path / name).write_bytes(data)
    said: list[str] = []
    files = [good, *(tmp_path / name for name in bad), tmp_path / "missing.json"]
    assert import_traces(files, tmp_path / "run", said.append).ranks == 1
    assert len(said) == len(bad) + 1
    assert any("pickled_rank_3 was skipped: it holds a class, function or call" in line for line in said)
    with pytest.raises(DataError, match="none of 1 files could be used"):
        import_traces([tmp_path / "list.json"], tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(JobError, match="is not empty"):
        import_traces([good], tmp_path / "run")


def odd(content: dict[str, Any], at: int, **values: Any) -> dict[str, Any]:
    """With other values in one event or entry, those of an event's ``args`` among them."""
    one = content["traceEvents" if "traceEvents" in content else "entries"][at]
    for key, value in values.items():
        (one["args"] if key in one.get("args", {}) else one)[key] = value
    return content


HUGE = 10**400
RANKS = (MOST_RANKS, 10**12, 2**40, 2**31 - 1, -1, True, 1.5, "1")
FILES = {
    "all of them late": kineto(1) | {"baseTimeNanoseconds": 4 * 10**18},
    "base": kineto(1) | {"baseTimeNanoseconds": HUGE},
    "half a character": odd(kineto(1), 3, name="gemm \ud800"),
    "half of a label": odd(kineto(1), 5, **{"Process Group Ranks": None, "Process Group Description": "\udfff"}),
    **{f"rank {n}": kineto(1) | {"distributedInfo": {"rank": rank}} for n, rank in enumerate(RANKS)},
    "dump's rank": dump(1) | {"rank": 10**20}, "dump's rank -1": dump(1) | {"rank": -1},
    "dump's rank is true": dump(1) | {"rank": True},
    "no events": kineto(1) | {"traceEvents": []},
}  # fmt: skip
EVENTS = {
    "ts 1e30": (odd(kineto(1), 3, ts=1e30), "kernels of which name, time or length cannot be"),
    "ts huge": (odd(kineto(1), 3, ts=HUGE), "kernels of which"),
    "ts -1e30": (odd(kineto(1), 3, ts=-1e30), "kernels of"),
    "ts is true": (odd(kineto(1), 3, ts=True), "kernels of which"),
    "dur 1e25": (odd(kineto(1), 3, dur=1e25), "kernels of which"),
    "dur -1": (odd(kineto(1), 3, dur=-1), "kernels of which"),
    "dur nan": (odd(kineto(1), 3, dur=float("nan")), "numbers that JSON does not have"),
    "ts inf": (odd(kineto(1), 3, ts=float("inf")), "numbers that JSON does not have"),
    "no name": (odd(kineto(1), 3, name=7), "kernels of which name"),
    "ts of a step": (odd(kineto(1), 2, ts=HUGE), "device ranges of which"),
    "elements": (odd(kineto(1), 5, **{"In msg nelems": 10**30}), "sizes that cannot be"),
    "seq": (odd(kineto(1), 5, Seq=10**30), "sequence numbers that cannot be"),
    "step": (odd(kineto(1), 2, name="ProfilerStep#" + "9" * 30), "steps whose number cannot be"),
    "long step": (odd(kineto(1), 2, name="ProfilerStep#" + "9" * 5000), "steps whose number"),
    "members": (odd(kineto(1), 5, **{"Process Group Ranks": f"[{'9' * 5000}]"}), "groups whose members cannot be"),
    "no object": (kineto(1) | {"traceEvents": [*kineto(1)["traceEvents"], 7, [8], None]}, "3 events that are no"),
    "dump's name": (odd(dump(1), 0, profiling_name="\ud800"), "entries that are no objects or name no operation"),
    "sequence": (odd(dump(1), 0, collective_seq_id=10**30), "operations without a number"),
    "endless sequence": (odd(dump(1), 0, collective_seq_id=float("inf")), "operations without a number"),
    "end": (odd(dump(1), 0, time_discovered_completed_ns=HUGE), "times that cannot be"),
    "late end": (odd(dump(1), 0, time_discovered_completed_ns=10**30), "times that cannot be"),
    "length": (odd(dump(1), 0, time_discovered_completed_ns=None, duration_ms=HUGE), "times that cannot be"),
    "length nan": (odd(dump(1), 0, time_discovered_completed_ns=None, duration_ms=float("nan")), "numbers that JSON"),
    "sizes": (odd(dump(1), 0, input_sizes=[[10**10] * 3]), "sizes that cannot be"),
    "many sizes": (odd(dump(1), 0, input_sizes=[[2] * 100_000]), "sizes that cannot be"),
    "state": (odd(dump(1), 0, state="melted"), "states of operations that are not known"),
}  # fmt: skip


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_what_cannot_be_of_a_whole_file_costs_it_and_no_other(tmp_path: Path, content: dict[str, Any]) -> None:
    found, _, said = imported(tmp_path, kineto(0), content, kineto(3))
    assert set(found.spans["rank"]) == {0, 3}
    assert len(said) == 1
    assert said[0].startswith(f"{tmp_path / 'trace1.json'} was skipped: ")
    assert len(said[0]) < 400
    said[0].encode()
    with pytest.raises(DataError, match="none of 1 files could be used"):
        import_traces([tmp_path / "trace1.json"], tmp_path / "none")


@pytest.mark.parametrize(("content", "counted"), EVENTS.values(), ids=EVENTS)
def test_what_cannot_be_of_an_event_is_counted_and_costs_no_more(
    tmp_path: Path, content: dict[str, Any], counted: str
) -> None:
    like = kineto if "traceEvents" in content else dump
    found, what, said = imported(tmp_path, like(0), content, like(3))
    assert said == []
    assert set(found.spans["rank"]) == {0, 1, 3}
    lines = what.over.lines()
    assert any(counted in line and "trace1.json" in line for line in lines), lines
    assert found.spans.filter(pl.col("end") >= 10).is_empty()
    kept = read_run(tmp_path / "run").notes
    assert set(lines) <= set(kept), "whoever reads the folder later is told, too"


def test_a_damaged_archive_costs_no_other_file(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json.gz"
    good.write_text(json.dumps(kineto(0)))
    data = bytearray(gzip.compress(json.dumps(kineto(1)).encode()))
    data[20:40] = b"\xff" * 20
    bad.write_bytes(bytes(data))
    said: list[str] = []
    assert import_traces([bad, good], tmp_path / "run", said.append).ranks == 1
    assert [str(bad) in line for line in said] == [True]


def test_of_two_files_of_a_rank_the_first_counts(tmp_path: Path) -> None:
    found, _, said = imported(tmp_path, kineto(0), kineto(1), dump(0))
    first, again = tmp_path / "trace0.json", tmp_path / "trace2.json"
    assert said == [f"{again} was skipped: it is of rank 0, as is {first}"]
    assert found.ranks == 2
    assert "nccl:all_reduce" not in set(found.spans["name"])


def test_the_last_that_a_timeline_holds(tmp_path: Path) -> None:
    content = odd(kineto(1), 2, name=f"ProfilerStep#{2**31 - 1}")
    content["distributedInfo"]["rank"] = MOST_RANKS - 1
    found, _, said = imported(tmp_path, kineto(0), odd(content, 5, **{"In msg nelems": 2**53}))
    assert said == []
    assert set(found.spans["rank"]) == {0, MOST_RANKS - 1}
    assert 2**31 - 1 in found.steps
    explain(found, "run")


# ---- of the whole ----


def test_which_files_of_a_folder_may_be_recordings(tmp_path: Path) -> None:
    contents = {
        "a.json": b' \n{"x": 1}', "b.txt": b"\xef\xbb\xbf{", "c.gz": gzip.compress(b"\t{"), "d": b"\x80\x02x",
        "e": b"\x80\x05x",
        "f.json": b"[1]", "g": b"", "h": b"\x80\x01x", "i": b"\x80\x06x", "j": b"text {",
    }  # fmt: skip
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    found = recordings_in([folder, folder / "j", tmp_path / "missing"])
    assert [path.name for path in found] == ["a.json", "b.txt", "c.gz", "d", "e", "f.json", "j", "missing"]


def remarks(folder: Path, *contents: dict[str, Any], named: str = "trace{}.json") -> list[str]:
    return imported(folder, *contents, named=named)[1].notes


def test_ranks_without_a_file_are_said(tmp_path: Path) -> None:
    traces = [kineto(rank) for rank in range(4)]
    for number, (some, note) in enumerate((
        (traces, []), (traces[:3], ["the job has 4 ranks, and rank 3 left no file"]),
        (traces[1:2], ["the job has 4 ranks, and ranks 0 and 2, 3 left no file"]),
    )):  # fmt: skip
        (tmp_path / str(number)).mkdir()
        assert remarks(tmp_path / str(number), *some) == note
    (tmp_path / "more").mkdir()
    beyond = [kineto(0), kineto(9)]
    assert remarks(tmp_path / "more", *beyond) == [
        "the job has 4 ranks, and ranks 1-3 left no file",
        "trace1.json says that it is of rank 9, of a job of 4 ranks",
    ]


def test_operations_that_had_not_ended_are_said(tmp_path: Path) -> None:
    batch = waiting(5, 9100, profiling_name="nccl:coalesced", input_sizes=[], output_sizes=[])
    open_ = [waiting(5, 9000), waiting(5, 9050), batch]
    notes = remarks(tmp_path, dump(0, *open_, world=3), dump(1, world=3), dump(2, waiting(5, 9000), world=3))
    assert notes == [
        "3 operations of ranks 0 and 2 had not ended: plait diagnose --hang says what is known of them"
    ]  # fmt: skip


def test_healthy_dumps_say_so_beside_their_spans(tmp_path: Path) -> None:
    assert remarks(tmp_path, dump(0), dump(1)) == [
        "Nothing is wrong in the dumps: all of their 10 operations have ended."
    ]


def test_a_trace_of_several_groups_that_tells_none_is_remarked_on(tmp_path: Path) -> None:
    content = kineto(0, name="ncclDevKernel_Generic(x)")
    for event in content["traceEvents"]:
        if "Seq" in event.get("args", {}):
            event["args"] = {}
    content["distributedInfo"] |= {"world_size": 1}
    for number, (groups, said) in enumerate(((1, False), (2, True))):
        (tmp_path / str(number)).mkdir()
        content["distributedInfo"]["pg_config"] = [{"pg_name": str(n)} for n in range(groups)]
        notes = remarks(tmp_path / str(number), content)
        assert notes == (
            ["of 10 collectives no group is told, and the job has several: they count as one group's"] if said else []
        )


def test_times_no_clock_has_cost_a_file(tmp_path: Path) -> None:
    base = 1_700_000_000_000_000_000
    early = kineto(1) | {"baseTimeNanoseconds": -4 * 10**18 - 10**9}
    recording, _, said = imported(tmp_path, kineto(0) | {"baseTimeNanoseconds": base}, early)
    assert set(recording.spans["rank"]) == {0} and len(said) == 1


def test_of_many_files_whose_ranks_are_not_known_eight_are_listed(tmp_path: Path) -> None:
    content = kineto(0)
    del content["distributedInfo"]
    for count, listed in ((8, "7: x7.json)"), (9, "7: x7.json, and 1 more)")):
        folder = tmp_path / str(count)
        folder.mkdir()
        [note, *_] = remarks(folder, *[content] * count, named="x{}.json")
        assert note.startswith(f"the ranks of {count} files are not known") and note.endswith(listed)


def test_a_folder_that_is_a_file_or_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(json.dumps(kineto(0)))
    (tmp_path / "empty").mkdir()
    assert import_traces([tmp_path / "trace.json"], tmp_path / "empty").ranks == 1
    for taken in (tmp_path / "trace.json", tmp_path / "empty"):
        with pytest.raises(JobError, match=r"exists and is not empty. Name a new folder"):
            import_traces([tmp_path / "trace.json"], taken)


def test_a_rank_beyond_its_job_is_said_from_the_first_on(tmp_path: Path) -> None:
    for rank, said in ((3, False), (4, True)):
        (tmp_path / str(rank)).mkdir()
        notes = remarks(tmp_path / str(rank), kineto(rank))
        assert any("says that it is of rank" in note for note in notes) == said


def test_whose_files_cannot_be_read_is_asked_of_the_largest_job_that_is_told(tmp_path: Path) -> None:
    small = kineto(1)
    small["distributedInfo"]["world_size"] = 2
    files = written(tmp_path, kineto(0), small, kineto(2), kineto(3), named="trace_rank_{}.json")
    for broken in files[2:]:
        broken.write_text("{")
    beyond = tmp_path / "trace_rank_4.json"
    beyond.write_text("{")
    notes = import_traces([*files, beyond], tmp_path / "run").notes
    assert "the files of ranks 2, 3 cannot be read: what they did is not known" in notes
    assert "the files are of jobs of different sizes: 2, 4 ranks" in notes
    assert not any("left no file" in note for note in notes)


def test_sizes_of_jobs_that_dumps_tell_are_not_compared(tmp_path: Path) -> None:
    """A dump tells only of the ranks that it mentions."""
    traces = [kineto(0), dump(1, world=8)]
    assert not any("different sizes" in note for note in remarks(tmp_path, *traces))


def test_a_dump_that_does_not_say_whose_it_is(tmp_path: Path) -> None:
    content = dump(0)
    del content["rank"]
    said: list[str] = []
    files = written(tmp_path, dump(1), content)
    assert import_traces(files, tmp_path / "run", said.append).ranks == 1
    assert said == [f"{files[1]} was skipped: it does not say whose it is: name the file rank-N... or ..._rank_N..."]
    named = written(tmp_path, content, named="dump_rank_{}.json")
    assert import_traces([files[0], *named], tmp_path / "again").ranks == 2


def test_of_many_files_larger_numbers_are_ranks(tmp_path: Path) -> None:
    """Eight times as many as there are files, and 1,024 at least."""
    content = kineto(0)
    del content["distributedInfo"]
    text = json.dumps({"traceEvents": content["traceEvents"][:4]})

    def ranks(count: int, number: int) -> set[int]:
        folder = tmp_path / str(count)
        folder.mkdir()
        files = [folder / f"trace_{number + place}.json" for place in range(count)]
        for file in files:
            file.write_text(text)
        import_traces(files, folder / "run")
        return set(read_run(folder / "run").recording.spans["rank"])

    assert ranks(2, 1022) == {1022, 1023} and ranks(1, 1024) == {0}
    assert ranks(130, 1030) == {*range(1030, 1040), *range(120)}


def test_events_that_stand_twice_are_no_spans_twice(tmp_path: Path) -> None:
    content = kineto(0)
    content["traceEvents"] += [content["traceEvents"][5]] * 2
    found, what, _ = imported(tmp_path, content)
    assert what.spans == found.spans.height
    assert {row["what"]: row["count"] for row in what.over.rows()}["events that stand in a file twice"] == 2


@pytest.mark.parametrize(("damaged", "unknown"), [(5, False), (6, True)])
def test_so_many_kernels_that_cannot_be_read_leave_work_unknown(tmp_path: Path, damaged: int, unknown: bool) -> None:
    """Two of a hundred: of 300 with the damaged ones."""
    kernels = [{"ph": "X", "cat": "kernel", "name": "gemm", "ts": 10 * at, "dur": 5, "tid": 7} for at in range(300)]
    for one in kernels[:damaged]:
        one["dur"] = -1
    info = {"rank": 0, "world_size": 1}
    notes = remarks(tmp_path, {"baseTimeNanoseconds": 1, "distributedInfo": info, "traceEvents": kernels})
    assert any("cannot be read, so what it computes is not known" in note for note in notes) == unknown


def test_a_file_without_a_rank_and_one_without_spans_do_not_hide_those_after_them(tmp_path: Path) -> None:
    nameless = kineto(0)
    del nameless["distributedInfo"]
    found, _, _ = imported(tmp_path, nameless, kineto(0), kineto(2))
    assert set(found.spans["rank"]) == {0, 1, 2}
    (tmp_path / "dumps").mkdir()
    found, _, _ = imported(tmp_path / "dumps", dump(0, ended=0), dump(1))
    assert set(found.spans["rank"]) == {1}


def test_times_of_all_traces_are_counted_from_the_first_of_them(tmp_path: Path) -> None:
    """Rank 1's begin a second later; nothing begins at 0, which would say that it is not known."""
    later = kineto(1) | {"baseTimeNanoseconds": kineto(1)["baseTimeNanoseconds"] + 10**9}
    found, _, _ = imported(tmp_path, later, kineto(0))
    first = dict(found.spans.group_by("rank").agg(pl.col("start").min()).iter_rows())
    assert first == {0: pytest.approx(1e-6), 1: pytest.approx(1 + 1e-6)}


def test_of_jobs_of_different_sizes_the_largest_is_asked_for_its_ranks(tmp_path: Path) -> None:
    small = kineto(1)
    small["distributedInfo"]["world_size"] = 2
    notes = remarks(tmp_path, small, kineto(0), kineto(2))
    assert notes == [
        "the files are of jobs of different sizes: 2, 4 ranks", "the job has 4 ranks, and rank 3 left no file",
    ]  # fmt: skip


@pytest.mark.parametrize("base", ["x", 1.5, True, 4_300_000_000 * 10**9, -(2**62)])
def test_a_base_time_that_cannot_be_is_named(tmp_path: Path, base: Any) -> None:
    _, _, said = imported(tmp_path, kineto(0), kineto(1) | {"baseTimeNanoseconds": base})
    (line,) = said
    assert line.endswith(": baseTimeNanoseconds is out of range")


def test_where_one_is_a_trace_there_are_steps(tmp_path: Path) -> None:
    for number, (contents, steps) in enumerate((((kineto(0), dump(1)), True), ((dump(0), dump(1)), False))):
        (tmp_path / str(number)).mkdir()
        imported(tmp_path / str(number), *contents)
        kept = imported_notes(tmp_path / str(number) / "run")
        assert kept is not None and kept.steps == steps
