"""Recordings of other tools: PyTorch profiler traces, flight recorder dumps; whatever else is
refused."""

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
from plait.diagnose.measured.importing import import_traces, recordings_in
from plait.diagnose.measured.reading import read_run
from plait.diagnose.measured.run_files import imported_notes
from plait.diagnose.report import explain
from tests.support.recordings.theirs import dump, entry, host, imported, kineto, waiting, written


@pytest.mark.parametrize("name", ["ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", "ncclKernel_ReduceScatter(x)"])
def test_a_profilers_traces(tmp_path: Path, name: str) -> None:
    found, _, said = imported(tmp_path, *(kineto(rank, slow=1.3 if rank == 2 else 1.0, name=name) for rank in range(4)))
    assert said == []
    assert (found.ranks, found.steps) == (4, list(range(10)))
    comm = found.spans.filter(kind="comm")
    assert set(comm["axis"]) == {"dp"}
    assert set(comm["group"]) == {"0,1,2,3"}
    assert set(comm["bytes"]) == {2048}
    assert set(comm["direction"]) == {"backward"}
    assert set(found.meetings.group_by("meeting").len()["len"]) == {4}
    waits = found.spans.filter(kind="wait", rank=0)
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
    computes = found.spans.filter(kind="compute")
    assert set(computes["name"]) == {"aten::linear"}
    assert found.steps == [3, 4, 5, 6, 7, 8]
    assert found.spans.filter(kind="comm").height == 12


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
        "bad.json.gz": gzip.compress(json.dumps(kineto(1)).encode()).replace(b"a", b"b"),
        "strange_rank_2.json": json.dumps({"version": "2.9", "rank": 2, "entries": [1, {"process_group": 3}]}).encode(),
    }  # fmt: skip
    for name, data in bad.items():
        (tmp_path / name).write_bytes(data)
    said: list[str] = []
    files = [good, *(tmp_path / name for name in bad), tmp_path / "missing.json"]
    assert import_traces(files, tmp_path / "run", said.append).ranks == 1
    assert len(said) == len(bad) + 1
    assert any("pickled_rank_3 was skipped: it holds a class, function or call" in line for line in said)
    with pytest.raises(DataError, match="of 1 file, none could be used"):
        import_traces([tmp_path / "list.json"], tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_of_two_files_of_a_rank_the_first_counts(tmp_path: Path) -> None:
    found, _, said = imported(tmp_path, kineto(0), kineto(1), dump(0))
    first, again = tmp_path / "trace0.json", tmp_path / "trace2.json"
    assert said == [f"{again} was skipped: it is of rank 0, as is {first}"]
    assert found.ranks == 2
    assert "nccl:all_reduce" not in set(found.spans["name"])


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
            ["10 collectives have no known process group, and the job has several: they count as one group's"]
            if said
            else []
        )


def test_of_many_files_whose_ranks_are_not_known_eight_are_listed(tmp_path: Path) -> None:
    content = kineto(0)
    del content["distributedInfo"]
    for count, listed in ((8, "7: x7.json)"), (9, "7: x7.json, and 1 more)")):
        folder = tmp_path / str(count)
        folder.mkdir()
        [note, *_] = remarks(folder, *[content] * count, named="x{}.json")
        assert note.startswith(f"the ranks of {count} files are unknown") and note.endswith(listed)


def test_a_folder_that_is_a_file_or_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(json.dumps(kineto(0)))
    (tmp_path / "empty").mkdir()
    assert import_traces([tmp_path / "trace.json"], tmp_path / "empty").ranks == 1
    for taken in (tmp_path / "trace.json", tmp_path / "empty"):
        with pytest.raises(JobError, match=r"exists and is not empty. Name a new folder"):
            import_traces([tmp_path / "trace.json"], taken)


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
    assert any("cannot be read, so what it computes is unknown" in note for note in notes) == unknown


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
    first = dict(found.spans.group_by("rank").agg(pl.min("start")).iter_rows())
    assert first == {0: pytest.approx(1e-6), 1: pytest.approx(1 + 1e-6)}


def test_where_one_is_a_trace_there_are_steps(tmp_path: Path) -> None:
    for number, (contents, steps) in enumerate((((kineto(0), dump(1)), True), ((dump(0), dump(1)), False))):
        (tmp_path / str(number)).mkdir()
        imported(tmp_path / str(number), *contents)
        kept = imported_notes(tmp_path / str(number) / "run")
        assert kept is not None and kept.steps == steps


def test_windows_of_one_process_are_no_further_ranks(tmp_path: Path) -> None:
    """As the profiler's schedule writes them with TensorBoard's handler, ranks untold."""
    steps = [host(0, steps=3), host(0, steps=3), host(0, steps=3), host(0, steps=3)]
    for late in (steps[1], steps[3]):
        for event in late["traceEvents"]:
            if event["name"].startswith("ProfilerStep#"):
                event["name"] = f"ProfilerStep#{int(event['name'][13:]) + 50}"
    for one in steps:
        del one["distributedInfo"]
    names = [f"h_{process}.17180000000{time}.pt.trace.json" for process in (7, 8) for time in (1, 2)]
    files = written(tmp_path, *steps)
    files = [file.rename(tmp_path / name) for file, name in zip(files, names, strict=True)]
    said: list[str] = []
    assert import_traces(files, tmp_path / "run", said.append).ranks == 2
    assert [names.index(Path(one.split(" was skipped")[0]).name) for one in said] == [1, 3]
    assert all("that of the same process as" in one for one in said)
