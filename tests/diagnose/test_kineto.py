"""The profiler's traces: what is communication, what is work, and what is said of the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from plait.core.base.errors import DataError
from plait.core.base.passed_over import PassedOver
from plait.diagnose import kineto as kineto_reader
from plait.diagnose.explain import explain
from plait.diagnose.importing import import_traces, recordings_in
from plait.diagnose.kineto import TraceEvents, TraceFacts
from plait.diagnose.reading import read_run
from plait.diagnose.trace_columns import LATEST
from tests.support.recordings.theirs import (
    REDUCE_SCATTER,
    Event,
    annotation,
    host,
    imported,
    kernel,
    kineto,
    operator,
    told,
    trace,
    written,
)

NCCL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def spans_of(folder: Path, *events: Event, rank: int = 0, **more: Any) -> pl.DataFrame:
    """Of a trace of one rank, with a kernel that computes."""
    gemm = [] if any(one["cat"] == "kernel" for one in events) else [kernel("gemm", 0, 10)]
    recording, _, said = imported(folder, trace([*gemm, *events], rank, 2, **more))
    assert said == []
    return recording.spans


def kinds(spans: pl.DataFrame) -> dict[str, str]:
    return dict(spans.filter(pl.col("kind") != "wait").select("name", "kind").iter_rows())


# ---- what is communication ----


def launched(by: list[Event], /, name: str = "some_kernel", **args: Any) -> list[Event]:
    return [kernel("gemm", 0, 10), *by, kernel(name, 200, 50, **args)]


EXTERNAL: dict[str, Any] = {"External id": 9}


RUNTIME = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 105, "dur": 2}
WAYS = {
    "its own args": launched([], **told(0, "allreduce")),
    "the operator that launched it": launched(
        [operator("record_param_comms", 100, 20, **told(0, "allreduce"), **EXTERNAL)], **EXTERNAL
    ),
    "the operator around that one": launched(
        [operator("c10d::allreduce_", 99, 30), operator("record_param_comms", 100, 20, **EXTERNAL)],
        **EXTERNAL,
    ),
    "when it was launched": launched(
        [operator("record_param_comms", 100, 20, **told(0, "allreduce")), RUNTIME | {"args": {"correlation": 7}}],
        correlation=7,
    ),
    "when it was launched, at the very end": launched(
        [operator("record_param_comms", 85, 20, **told(0, "allreduce")), RUNTIME | {"args": {"correlation": 7}}],
        correlation=7,
    ),
    "the device's range": launched(
        [annotation("nccl:allreduce", 190, 100, tid=7, cat="gpu_user_annotation") | {"pid": 0}]
    ),
}


@pytest.mark.parametrize("events", WAYS.values(), ids=WAYS)
def test_communication_is_known_by_what_the_trace_says(tmp_path: Path, events: list[Event]) -> None:
    assert kinds(spans_of(tmp_path, *events)) == {"gemm": "compute", "allreduce": "comm"}


@pytest.mark.parametrize(
    "name",
    [
        "ncclKernel_AllReduce_RING_LL_Sum_half(ncclWorkElem)", "ncclDevKernel_Generic(x)", "rccl_main_kernel(x)",
        "mscclKernel_Sum_half_Simple_false(ncclDevComm*, mscclAlgo*)", "void mscclpp::allreduce<half>(x)",
        "oneccl_kernel_1", "void vllm::cross_device_reduce_1stage<half, 2>(x)", "two_shot_all_reduce_kernel",
        "nvshmemi_transfer_rma", "ncclSymkDevKernel_AllGather_LL", "multimem_one_shot_allreduce",
    ],
)  # fmt: skip
def test_communication_of_known_libraries_is_known_by_its_name(tmp_path: Path, name: str) -> None:
    assert set(kinds(spans_of(tmp_path, *launched([], name))).values()) == {"compute", "comm"}


@pytest.mark.parametrize(
    "name",
    [
        "triton_poi_fused_all_gather_into_tensor_wait_tensor_3", "void at::native::reduce_kernel<512, 1>(x)",
        "void at::native::small_reduce(x)", "nccltest_gemm", "sm90_xmma_gemm_bf16", "Cijk_Ailk_Bljk_BBS", "volcclay",
    ],
)  # fmt: skip
def test_computation_with_such_words_in_its_name(tmp_path: Path, name: str) -> None:
    assert set(kinds(spans_of(tmp_path, *launched([], name))).values()) == {"compute"}


def test_copies_within_a_collective_are_no_collectives(tmp_path: Path) -> None:
    by = [
        operator("record_param_comms", 100, 50, **told(0, "allgather"), **{"External id": 8}),
        operator("aten::copy_", 110, 20, **{"External id": 9}), RUNTIME | {"ts": 115, "args": {"correlation": 7}},
    ]  # fmt: skip
    for number, args in enumerate(({"External id": 9}, {"correlation": 7})):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert set(kinds(spans_of(folder, *launched(by, "copy_kernel", **args))).values()) == {"compute"}


def test_a_trace_of_several_ranks_without_communication_is_remarked_on(tmp_path: Path) -> None:
    alone = [trace([kernel("gemm", 0, 10), kernel("odd_library", 10, 90)], rank, 4) for rank in range(4)]
    _, found, _ = imported(tmp_path, *alone)
    assert any("nothing in the trace of any rank is known as communication" in note for note in found.notes)
    (tmp_path / "one").mkdir()
    _, found, _ = imported(tmp_path / "one", trace([kernel("gemm", 0, 10)], 0, 1))
    assert found.notes == []


# ---- transfers ----


def test_all_to_all_is_no_transfer_although_its_kernels_send_and_receive(tmp_path: Path) -> None:
    ways = {
        "args": launched([], NCCL, **told(0, "all_to_allv")),
        "operator": launched(
            [operator("c10d::alltoall_base_", 90, 60), operator("record_param_comms", 100, 20, **{"External id": 9})],
            NCCL, **{"External id": 9},
        ),
    }  # fmt: skip
    for way, events in ways.items():
        (tmp_path / way).mkdir()
        spans = spans_of(tmp_path / way, *events).filter(pl.col("kind") != "compute")
        assert set(spans["kind"]) == {"comm", "wait"}
        assert "pp" not in set(spans["axis"])


def test_send_and_receive_kernels_of_which_nothing_tells_are_counted(tmp_path: Path) -> None:
    recording, found, _ = imported(tmp_path, trace(launched([], NCCL), 0, 2))
    assert "transfer" not in set(recording.spans["kind"])
    assert any("1 kernels of send and receive of which nothing tells what for" in line for line in found.over.lines())


def pipeline(rank: int, *, slow: float = 1.0, peers: bool = True) -> dict[str, Any]:
    """A stage of four, 8 steps of 4 micro-batches one after the other: receive, compute, send. Stage n
    begins a micro-batch when the one before has sent it."""
    ends = {"Src Rank": rank - 1, "Dst Rank": rank + 1} if peers else {}
    events, ready = [], [0.0] * 4
    for step in range(8):
        begin, done = step * 4000.0, [step * 4000.0 + 10] * 4
        for stage in range(4):
            work = 100.0 * (slow if stage == 1 else 1.0)
            for batch in range(4):
                start = max(done[batch], ready[stage] if batch else begin)
                if stage == rank:
                    come = ready[stage] if batch else begin
                    if stage:
                        events.append(kernel(NCCL, come, start - come + 5, **(told(0, "recv") | ends)))
                    events.append(kernel("gemm", start + 5, work))
                    if stage < 3:
                        events.append(kernel(NCCL, start + work + 5, 5, **(told(0, "send") | ends)))
                done[batch] = ready[stage] = start + work + 10
        events.append(annotation(f"ProfilerStep#{step}", begin, 3900, cat="gpu_user_annotation"))
    return trace(events, rank, 4)


def test_a_slow_rank_of_a_pipeline_has_a_cost(tmp_path: Path) -> None:
    recording, _, _ = imported(tmp_path, *(pipeline(rank, slow=2.0) for rank in range(4)))
    assert set(recording.spans.filter(pl.col("kind") == "transfer")["group"]) == {"0>1", "1>2", "2>3"}
    assert set(recording.meetings.filter(pl.col("axis") == "pp").group_by("meeting").len()["len"]) == {2}
    report = explain(recording, "run", run=read_run(tmp_path / "run"))
    assert [(one.what, one.ranks) for one in report.stragglers] == [("slow processor", (1,))]
    assert report.costs[0] == pytest.approx(400e-6, rel=0.1), "four micro-batches, 100 us each"


def test_where_messages_do_not_tell_their_ends_the_cost_is_not_known(tmp_path: Path) -> None:
    recording, _, _ = imported(tmp_path, *(pipeline(rank, slow=2.0, peers=False) for rank in range(4)))
    report = explain(recording, "run", run=read_run(tmp_path / "run"))
    assert [one.ranks for one in report.stragglers] == [(1,)]
    assert report.costs == (None,)


def test_of_a_group_of_two_the_other_end_is_known(tmp_path: Path) -> None:
    pair = {"Process Group Ranks": "[2, 5]"}
    spans = spans_of(tmp_path, *launched([], NCCL, **told(0, "send") | pair), rank=5)
    assert set(spans.filter(pl.col("kind") == "transfer")["group"]) == {"5>2"}


# ---- work ----


def test_kernels_at_once_are_computing_once(tmp_path: Path) -> None:
    streams = [
        kernel("a", 0, 100),
        kernel("b", 50, 100) | {"tid": 8},
        kernel("c", 60, 20) | {"tid": 9},
        kernel("d", 200, 10),
    ]
    work = spans_of(tmp_path, *streams).filter(pl.col("kind") == "compute")
    assert (work["end"] - work["start"]).sum() == pytest.approx(160e-6)
    assert explain(read_run(tmp_path / "run").recording, "run").shares[0].seconds == pytest.approx(160e-6)


def test_operators_within_an_asynchronous_range_are_work(tmp_path: Path) -> None:
    """As gloo writes it on the thread that trains: the range lasts while operators run."""
    events = [annotation("gloo:all_reduce", 0, 500), operator("aten::mm", 100, 200), operator("aten::add", 350, 100)]
    recording, _, _ = imported(tmp_path, trace(events, 0, 2))
    work = recording.spans.filter(pl.col("kind") == "compute")
    assert sorted(work["name"]) == ["aten::add", "aten::mm"]
    wait = recording.spans.filter(pl.col("kind") == "wait")
    assert (wait["end"] - wait["start"]).sum() == pytest.approx(200e-6), "what no operator hides"


def test_waits_within_the_backward_pass_are_no_work(tmp_path: Path) -> None:
    """FSDP2 waits for its reduce-scatter in hooks of autograd's nodes."""
    node = "autograd::engine::evaluate_function: RegisterPostBackwardFunctionBackward"
    events = [
        operator(node, 0, 1000), operator("RegisterPostBackwardFunctionBackward", 1, 990),
        operator("fsdp::chunk_cat", 10, 40), operator("c10d::_reduce_scatter_base_", 60, 700),
        annotation("gloo:all_reduce", 70, 900, tid=2), operator("Optimizer.step#SGD.step", 1000, 100),
        operator("aten::_foreach_add_", 1010, 50),
    ]  # fmt: skip
    recording, _, _ = imported(tmp_path, trace(events, 0, 2))
    work = recording.spans.filter(pl.col("kind") == "compute")
    assert sorted(work["name"]) == ["aten::_foreach_add_", "fsdp::chunk_cat"]
    comm = recording.spans.filter(pl.col("kind") == "comm").row(0, named=True)
    assert (comm["name"], comm["direction"]) == ("_reduce_scatter_base", "backward"), "gloo has none of its own"
    assert comm["end"] - comm["start"] == pytest.approx(910e-6), "from the call on"


def test_a_receiver_waits_in_its_operator(tmp_path: Path) -> None:
    events = [operator("c10d::recv_", 0, 900), annotation("gloo:recv", 890, 40), operator("aten::mm", 940, 100)]
    recording, _, _ = imported(tmp_path, trace(events, 0, 2))
    seconds = dict(recording.spans.select("kind", pl.col("end") - pl.col("start")).iter_rows())
    assert seconds == pytest.approx({"transfer": 930e-6, "wait": 930e-6, "compute": 100e-6})


def test_a_wait_of_no_length_does_not_shift_the_others(tmp_path: Path) -> None:
    """Of three collectives a step the first is hidden on one rank and not on the other."""

    def one(rank: int) -> dict[str, Any]:
        events = [kernel("gemm", 0, 100 if rank else 10)]
        events += [kernel("ncclDevKernel_AllReduce", at, 50) | {"tid": 8} for at in (20, 200, 300)]
        return trace(events, rank, 2)

    recording, _, _ = imported(tmp_path, one(0), one(1))
    waits = recording.spans.filter(pl.col("kind") == "wait")
    numbers = {rank: own["seq"].to_list() for (rank,), own in waits.group_by("rank")}
    assert numbers == {0: [0, 1, 2], 1: [1, 2]}


def test_numbers_that_json_has_not_are_unknown_and_counted(tmp_path: Path) -> None:
    import json

    text = json.dumps(kineto(0)).replace('"cat": "kernel"', '"cat": "kernel", "x": inf, "y": -nan, "path": "C:\\temp"')
    (tmp_path / "trace.json").write_bytes(text.encode().replace(b"gemm2", b"gem\xffm"))
    found = import_traces([tmp_path / "trace.json"], tmp_path / "run")
    spans = read_run(tmp_path / "run").recording.spans
    assert spans.filter(pl.col("kind") == "compute").height == 30
    lines = found.over.lines()
    assert any("60 numbers that JSON does not have, taken as unknown" in line for line in lines), lines
    assert any("strings with a backslash or bytes that JSON does not have" in line for line in lines), lines


# ---- whose it is ----


def nameless(rank: int, **place: Any) -> dict[str, Any]:
    """A trace without ``distributedInfo``."""
    content = kineto(rank)
    del content["distributedInfo"]
    for event in content["traceEvents"]:
        if "Seq" in event.get("args", {}):
            event["args"] |= place
    return content


def test_the_place_in_its_groups_tells_the_rank(tmp_path: Path) -> None:
    traces = [nameless(rank, Rank=rank) for rank in (3, 0, 2)]
    found, what, _ = imported(tmp_path, *traces, named="node_2348{}.1718000000123456709.pt.trace.json")
    assert set(found.spans["rank"]) == {0, 2, 3}
    assert what.notes == ["the job has 4 ranks, and rank 1 left no file"]


def test_numbers_in_a_name_that_are_no_ranks_are_not_taken(tmp_path: Path) -> None:
    found, what, _ = imported(
        tmp_path, nameless(0), nameless(1), nameless(2), named="gpu_2348{}.1718000000123456709.pt.trace.json"
    )
    assert set(found.spans["rank"]) == {0, 1, 2}
    assert any("the ranks of 3 files are not known" in note and "0: gpu_23480." in note for note in what.notes)


def test_a_rank_without_a_file_is_said(tmp_path: Path) -> None:
    _, what, _ = imported(tmp_path, kineto(0), kineto(1), kineto(3))
    assert what.notes == ["the job has 4 ranks, and rank 2 left no file"]
    assert what.notes[0] in read_run(tmp_path / "run").notes


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
    with pytest.raises(DataError, match=f"none of 1 files could be used .*{why}"):
        import_traces(files, tmp_path / "run")


def test_traces_of_different_jobs_are_said(tmp_path: Path) -> None:
    other = kineto(1)
    other["distributedInfo"]["world_size"] = 8
    _, what, _ = imported(tmp_path, kineto(0), other)
    assert any("jobs of different sizes: 4, 8 ranks" in note for note in what.notes)


def test_events_that_stand_twice_are_counted(tmp_path: Path) -> None:
    content = kineto(0)
    content["traceEvents"].append(content["traceEvents"][5])
    _, what, _ = imported(tmp_path, content)
    assert any("events that stand in a file twice" in line for line in what.over.lines())


def test_traces_of_a_host_are_complete(tmp_path: Path) -> None:
    found, what, _ = imported(tmp_path, host(0), host(1))
    assert (found.ranks, what.notes) == (2, [])


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


def test_a_folder_may_tell_the_rank_and_a_process_number_does_not(tmp_path: Path) -> None:
    files = []
    for rank in (0, 1):
        (tmp_path / f"rank{rank}").mkdir()
        files += written(tmp_path / f"rank{rank}", nameless(rank), named="trace.json")
    assert import_traces(files, tmp_path / "run").notes == ["the job has 4 ranks, and ranks 2, 3 left no file"]
    pids = written(tmp_path, nameless(0), nameless(1), named="libkineto_activities_4{}.json")
    assert "ranks of 2 files are not known" in import_traces(pids, tmp_path / "again").notes[0]


# ---- limits ----


def reading(monkeypatch: pytest.MonkeyPatch, **limits: int) -> TraceEvents:
    for name, limit in limits.items():
        monkeypatch.setattr(kineto_reader, name, limit)
    return TraceEvents(PassedOver())


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
    one = reading(monkeypatch, OTHERS=4, OTHERS_FOR_EACH=2)
    one.add(kernel("a", 0, 1))
    one.add(kernel("a", 1, 1))
    for _ in range(4):
        one.add({"ph": "M"})
    with pytest.raises(ValueError, match="of its first 7 events 2 are of use"):
        one.add({"ph": "M"})
    none = reading(monkeypatch, OTHERS=4)
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


def test_begin_and_end_events_are_counted() -> None:
    one = TraceEvents(PassedOver())
    for phase in "BEMB":
        one.add({"ph": phase, "name": "x"})
    assert one.over.counts == {"begin and end events, which are not read": 3}


@pytest.mark.parametrize(
    ("event", "taken"),
    [
        ({"ts": LATEST * 1e6}, True), ({"ts": -LATEST * 1e6}, True), ({"ts": LATEST * 1e6 * 1.01}, False),
        ({"dur": 0}, True), ({"dur": -0.1}, False), ({"dur": LATEST * 1e6}, True), ({"dur": LATEST * 2e6}, False),
        ({"dur": True}, False), ({"ts": "0"}, False), ({"name": None}, False), ({"cat": "python_function"}, False),
        ({"cat": 7}, False), ({"cat": "user_annotation"}, False), ({"cat": "user_annotation", "name": "nccl:x"}, True),
        ({"cat": "odd", "name": "ProfilerStep#3"}, True), ({"args": [7]}, True), ({"args": None}, True),
    ],
)  # fmt: skip
def test_which_events_are_taken(event: dict[str, Any], taken: bool) -> None:
    one = TraceEvents(PassedOver())
    one.add(kernel("gemm", 0, 1) | event)
    assert len(one.start) == taken


@pytest.mark.parametrize(
    ("info", "args", "said"),
    [
        ({"rank": 3, "world_size": 8}, {}, TraceFacts(3, 8, 0)), ({}, {}, TraceFacts(None, 4, 0)),
        ({"world_size": 0}, {}, TraceFacts(None, 4, 0)), ({"world_size": "8"}, {}, TraceFacts(None, 4, 0)),
        ({"world_size": 2**40}, {}, TraceFacts(None, 4, 0)), ({"rank": 0}, {"Rank": 2}, TraceFacts(0, 4, 0)),
        ({}, {"Rank": 2}, TraceFacts(2, 4, 0)), ({}, {"Rank": "2"}, TraceFacts(2, 4, 0)),
        ({}, {"Rank": 4}, TraceFacts(None, 4, 0)),
        ({}, {"Process Group Ranks": None}, TraceFacts(None, None, 0)),
        ({"pg_config": [1, 2]}, {}, TraceFacts(None, 4, 2)),
        ({"pg_config": {}}, {}, TraceFacts(None, 4, 0)), (7, {}, TraceFacts(None, 4, 0)),
        ({}, {"Process Group Ranks": "[8, 2]", "Rank": 0}, TraceFacts(8, 9, 0)),
        ({}, {"Rank": 1, "Collective name": "send"}, TraceFacts(None, 4, 0)),
    ],
)  # fmt: skip
def test_whose_a_trace_is(info: Any, args: dict[str, Any], said: TraceFacts) -> None:
    one = TraceEvents(PassedOver())
    one.add(kernel("a", 0, 1, **(told(0) | args)))
    assert one.told({"distributedInfo": info}) == said


def test_places_that_differ_tell_no_rank() -> None:
    one = TraceEvents(PassedOver())
    for place in (0, 1):
        one.add(kernel("a", 0, 1, **told(0, Rank=place)))
    assert one.told({}).rank is None


def test_groups_of_the_header_tell_members_and_labels(tmp_path: Path) -> None:
    """Where the collective itself does not; of several without a name nothing is told."""
    bare = {key: value for key, value in told(0).items() if not key.startswith("Process Group")}
    listed = [{"pg_name": "1", "pg_desc": "mesh_tp", "ranks": [1, 0]}, {"pg_name": "2", "ranks": "x"}, 7]
    args = bare | {"Process Group Name": "1"}
    for number, (events, config, wanted) in enumerate((
        (launched([], **args), listed, ("tp", "0,1")), (launched([], **bare), listed, ("tp", "0,1")),
        (launched([], **bare), [*listed, {"pg_name": "3", "ranks": [0]}], ("other", "all")),
        (launched([], **(args | {"Process Group Name": "9"})), listed, ("other", "9")),
        (launched([], **bare), None, ("other", "all")),
    )):  # fmt: skip
        (tmp_path / str(number)).mkdir()
        info: dict[str, Any] = {"distributedInfo": {"rank": 0, "world_size": 2, "pg_config": config}}
        comm = spans_of(tmp_path / str(number), *events, **info).filter(pl.col("kind") == "comm").row(0, named=True)
        assert (comm["axis"], comm["group"]) == wanted, number


def test_a_message_launched_at_the_end_of_its_batch_is_told_by_the_one_before(tmp_path: Path) -> None:
    """Its kernel is launched after the message's operator has ended. A collective's operator is not meant."""
    for number, (name, kind) in enumerate((("c10d::send", "transfer"), ("c10d::allreduce_", "comm"))):
        (tmp_path / str(number)).mkdir()
        by = [
            operator(name, 90, 5, **told(0, "send", **{"Process Group Ranks": "[0, 1]"})),
            RUNTIME | {"args": {"correlation": 7}},
        ]
        events = launched(by, NCCL, correlation=7)
        spans = spans_of(tmp_path / str(number), *events).filter(~pl.col("kind").is_in(["compute", "wait"]))
        assert spans["kind"].to_list() == [kind]
        assert spans["group"].to_list() == ["0>1" if number == 0 else "all"]


def test_ranges_of_one_kind_go_to_the_calls_in_their_order(tmp_path: Path) -> None:
    events = [
        operator("c10d::allreduce_", 0, 5), operator("c10d::allreduce_", 100, 5), operator("aten::mm", 300, 10),
        annotation("gloo:all_reduce", 20, 30, tid=2), annotation("gloo:all_reduce", 110, 50, tid=2),
        annotation("gloo:all_reduce", 200, 50, tid=2),
    ]  # fmt: skip
    recording, _, _ = imported(tmp_path, trace(events, 0, 2))
    spans = recording.spans.filter(pl.col("kind") == "comm").sort("start")
    micros = [round((at - spans["start"][0]) * 1e6) for at in (*spans["start"], *spans["end"])]
    assert micros == [0, 100, 200, 50, 160, 250], "the third was begun by nobody"


# ---- the first event of a file, numbers, lengths ----


def test_what_the_first_event_of_a_file_says_is_heard(tmp_path: Path) -> None:
    """Also a range's, and an operator's that called it."""
    gemm = kernel("gemm", 0, 10)
    seen = spans_of(tmp_path, kernel("x", 20, 10, **told(7)), gemm).filter(pl.col("kind") == "comm")
    assert (seen["seq"].to_list(), seen["bytes"].to_list()) == ([7], [2048])
    (tmp_path / "host").mkdir()
    call = operator("c10d::allreduce_", 0, 5, **told(7, "allreduce"))
    recording, _, _ = imported(tmp_path / "host", trace([call, annotation("gloo:all_reduce", 2, 30, tid=2)], 0, 2))
    seen = recording.spans.filter(pl.col("kind") == "comm").row(0, named=True)
    assert (seen["name"], seen["seq"], seen["bytes"]) == ("allreduce", 7, 2048)
    assert seen["end"] - seen["start"] == pytest.approx(32e-6)
    (tmp_path / "range").mkdir()
    alone = annotation("gloo:all_reduce", 0, 30, tid=2) | {"args": told(7, "allreduce")}
    recording, _, _ = imported(tmp_path / "range", trace([alone, operator("aten::mm", 40, 5)], 0, 2))
    assert recording.spans.filter(pl.col("kind") == "comm")["seq"].to_list() == [7]


def test_of_what_is_not_told_no_bytes_are_made_up(tmp_path: Path) -> None:
    for number, name in enumerate(("ncclKernel_AllReduce", "c10d::send")):
        (tmp_path / str(number)).mkdir()
        by = [operator(name, 100, 20, **EXTERNAL)] if number else []
        spans = spans_of(tmp_path / str(number), *launched(by, name if not number else NCCL, **EXTERNAL))
        assert set(spans["bytes"]) == {0}
        assert ("transfer" if number else "comm") in set(spans["kind"])


def test_the_ends_of_a_message_that_is_received(tmp_path: Path) -> None:
    pair = {"Process Group Ranks": "[2, 5]"}
    spans = spans_of(tmp_path, *launched([], NCCL, **told(0, "recv") | pair), rank=5)
    assert set(spans.filter(pl.col("kind") == "transfer")["group"]) == {"2>5"}
    ends = {"Src Rank": 1, "Dst Rank": 3, "Process Group Ranks": "[1, 2, 3]"}
    for name, group in (("send", "2>3"), ("recv", "1>2")):
        (tmp_path / name).mkdir()
        spans = spans_of(tmp_path / name, *launched([], NCCL, **told(0, name) | ends), rank=2)
        assert set(spans.filter(pl.col("kind") == "transfer")["group"]) == {group}
    (tmp_path / "alone").mkdir()
    args = told(0, "send") | {"Process Group Ranks": "[1, 2]"}
    spans = spans_of(tmp_path / "alone", *launched([], NCCL, **args), rank=7)
    assert set(spans.filter(pl.col("kind") == "transfer")["group"]) == {None}, "rank 7 is none of the two"


def test_collectives_keep_the_numbers_that_the_trace_gives_them(tmp_path: Path) -> None:
    """Not in the order of their starts, and the first is 0; without a number for each they are counted."""
    events = [kernel(REDUCE_SCATTER, at, 10, **told(seq)) for at, seq in ((100, 1), (200, 0), (300, 2))]
    seen = spans_of(tmp_path, kernel("gemm", 0, 10), *events).filter(pl.col("kind") == "comm").sort("start")
    assert seen["seq"].to_list() == [1, 0, 2]
    (tmp_path / "some").mkdir()
    del events[2]["args"]["Seq"]
    seen = spans_of(tmp_path / "some", kernel("gemm", 0, 10), *events).filter(pl.col("kind") == "comm").sort("start")
    assert seen["seq"].to_list() == [0, 1, 2]


def test_a_kernel_of_no_length_computes_nothing(tmp_path: Path) -> None:
    spans = spans_of(tmp_path, kernel("a", 0, 10), kernel("none", 5, 0), kernel("late none", 20, 0))
    assert spans["name"].to_list() == ["a"]


def test_the_world_is_that_of_the_largest_group() -> None:
    one = TraceEvents(PassedOver())
    one.add(kernel("a", 0, 1, **told(0)))
    one.add(kernel("a", 1, 1, **told(1, **{"Process Group Ranks": "[6, 7]"})))
    one.add(kernel("a", 2, 1, **told(2, **{"Process Group Ranks": "[0, 1]"})))
    assert one.told({}).world == 8


def test_what_launched_the_first_kernels_is_found_among_many_operators(tmp_path: Path) -> None:
    by = [operator("record_param_comms", 100, 20, **told(0, "allreduce")), RUNTIME | {"args": {"correlation": 7}}]
    later = [operator("aten::mm", 300 + 10 * at, 5) for at in range(20)]
    assert kinds(spans_of(tmp_path, *launched([*by, *later], correlation=7))) == {
        "gemm": "compute", "allreduce": "comm",
    }  # fmt: skip


def test_what_launched_a_kernel_may_be_the_first_event_of_the_trace(tmp_path: Path) -> None:
    by = operator("record_param_comms", 100, 20, **told(0, "allreduce"))
    events = [RUNTIME | {"args": {"correlation": 7}}, by, *launched([], correlation=7)]
    assert kinds(spans_of(tmp_path, *events)) == {"gemm": "compute", "allreduce": "comm"}


def test_calls_within_calls_are_one(tmp_path: Path) -> None:
    """Of each thread; what begins as another ends is not within it."""
    events = [
        operator("_c10d_functional::all_reduce", 0, 50), operator("c10d::allreduce_", 10, 20),
        operator("c10d::allreduce_", 50, 20), operator("c10d::allreduce_", 20, 10, tid=2),
        operator("aten::mm", 300, 10), operator("aten::add", 310, 10), operator("aten::inner", 302, 4),
    ]  # fmt: skip
    recording, _, _ = imported(tmp_path, trace(events, 0, 2))
    spans = recording.spans.sort("start")
    assert spans.filter(pl.col("kind") == "comm").height == 3
    assert spans.filter(pl.col("kind") == "compute")["name"].to_list() == ["aten::mm", "aten::add"]
    (tmp_path / "ranges").mkdir()
    ranges = [annotation("gloo:all_reduce", at, 5, tid=3) for at in (40, 80)]
    recording, _, _ = imported(tmp_path / "ranges", trace([*events[:2], *ranges, events[4]], 0, 2))
    seen = recording.spans.filter(pl.col("kind") == "comm").sort("start")
    lengths = ((seen["end"] - seen["start"]) * 1e6).round().to_list()
    assert lengths == [45, 5], "the second range was begun by nobody: the inner call is the outer's"
