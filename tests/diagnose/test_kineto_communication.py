"""The profiler's traces: what is communication, between whom, and what launched it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from plait.diagnose.measured.reading import read_run
from plait.diagnose.report import explain
from tests.support.recordings.theirs import (
    REDUCE_SCATTER,
    RUNTIME,
    SEND_RECEIVE,
    Event,
    annotation,
    imported,
    kernel,
    kinds,
    launched,
    operator,
    spans_of,
    told,
    trace,
)

EXTERNAL: dict[str, Any] = {"External id": 9}


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
        assert set(kinds(spans_of(folder, *launched(by, "copy_kernel", **args))).values()) == {"compute"}


def test_what_launched_the_first_kernels_is_found_among_many_operators(tmp_path: Path) -> None:
    by = [operator("record_param_comms", 100, 20, **told(0, "allreduce")), RUNTIME | {"args": {"correlation": 7}}]
    later = [operator("aten::mm", 300 + 10 * at, 5) for at in range(20)]
    assert kinds(spans_of(tmp_path, *launched([*by, *later], correlation=7))) == {
        "gemm": "compute", "allreduce": "comm",
    }  # fmt: skip


def test_what_the_first_event_of_a_file_says_is_heard(tmp_path: Path) -> None:
    """Also a range's, and an operator's that called it."""
    gemm = kernel("gemm", 0, 10)
    seen = spans_of(tmp_path, kernel("x", 20, 10, **told(7)), gemm).filter(kind="comm")
    assert (seen["seq"].to_list(), seen["bytes"].to_list()) == ([7], [2048])
    call = operator("c10d::allreduce_", 0, 5, **told(7, "allreduce"))
    recording, _, _ = imported(tmp_path / "host", trace([call, annotation("gloo:all_reduce", 2, 30, tid=2)], 0, 2))
    seen = recording.spans.filter(kind="comm").row(0, named=True)
    assert (seen["name"], seen["seq"], seen["bytes"]) == ("allreduce", 7, 2048)
    assert seen["end"] - seen["start"] == pytest.approx(32e-6)
    alone = annotation("gloo:all_reduce", 0, 30, tid=2) | {"args": told(7, "allreduce")}
    recording, _, _ = imported(tmp_path / "range", trace([alone, operator("aten::mm", 40, 5)], 0, 2))
    assert recording.spans.filter(kind="comm")["seq"].to_list() == [7]


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
        info: dict[str, Any] = {"distributedInfo": {"rank": 0, "world_size": 2, "pg_config": config}}
        comm = spans_of(tmp_path / str(number), *events, **info).filter(kind="comm").row(0, named=True)
        assert (comm["axis"], comm["group"]) == wanted, number


def test_collectives_keep_the_numbers_that_the_trace_gives_them(tmp_path: Path) -> None:
    """Not in the order of their starts, and the first is 0; without a number for each they are
    counted."""
    events = [kernel(REDUCE_SCATTER, at, 10, **told(seq)) for at, seq in ((100, 1), (200, 0), (300, 2))]
    seen = spans_of(tmp_path, kernel("gemm", 0, 10), *events).filter(kind="comm").sort("start")
    assert seen["seq"].to_list() == [1, 0, 2]
    del events[2]["args"]["Seq"]
    seen = spans_of(tmp_path / "some", kernel("gemm", 0, 10), *events).filter(kind="comm").sort("start")
    assert seen["seq"].to_list() == [0, 1, 2]


def test_of_what_is_not_told_no_bytes_are_made_up(tmp_path: Path) -> None:
    for number, name in enumerate(("ncclKernel_AllReduce", "c10d::send")):
        by = [operator(name, 100, 20, **EXTERNAL)] if number else []
        spans = spans_of(tmp_path / str(number), *launched(by, name if not number else SEND_RECEIVE, **EXTERNAL))
        assert set(spans["bytes"]) == {0}
        assert ("transfer" if number else "comm") in set(spans["kind"])


def test_all_to_all_is_no_transfer_although_its_kernels_send_and_receive(tmp_path: Path) -> None:
    ways = {
        "args": launched([], SEND_RECEIVE, **told(0, "all_to_allv")),
        "operator": launched(
            [operator("c10d::alltoall_base_", 90, 60), operator("record_param_comms", 100, 20, **{"External id": 9})],
            SEND_RECEIVE, **{"External id": 9},
        ),
    }  # fmt: skip
    for way, events in ways.items():
        spans = spans_of(tmp_path / way, *events).filter(pl.col("kind") != "compute")
        assert set(spans["kind"]) == {"comm", "wait"}
        assert "pp" not in set(spans["axis"])


def test_send_and_receive_kernels_of_which_nothing_tells_are_counted(tmp_path: Path) -> None:
    recording, found, _ = imported(tmp_path, trace(launched([], SEND_RECEIVE), 0, 2))
    assert "transfer" not in set(recording.spans["kind"])
    assert any("1 kernels of send and receive of an unknown operation" in line for line in found.over.lines())


def test_a_message_launched_at_the_end_of_its_batch_is_told_by_the_one_before(tmp_path: Path) -> None:
    """Its kernel is launched after the message's operator has ended. A collective's operator is not
    meant."""
    for number, (name, kind) in enumerate((("c10d::send", "transfer"), ("c10d::allreduce_", "comm"))):
        by = [
            operator(name, 90, 5, **told(0, "send", **{"Process Group Ranks": "[0, 1]"})),
            RUNTIME | {"args": {"correlation": 7}},
        ]
        events = launched(by, SEND_RECEIVE, correlation=7)
        spans = spans_of(tmp_path / str(number), *events).filter(~pl.col("kind").is_in(["compute", "wait"]))
        assert spans["kind"].to_list() == [kind]
        assert spans["group"].to_list() == ["0>1" if number == 0 else "all"]


def test_of_a_group_of_two_the_other_end_is_known(tmp_path: Path) -> None:
    pair = {"Process Group Ranks": "[2, 5]"}
    spans = spans_of(tmp_path, *launched([], SEND_RECEIVE, **told(0, "send") | pair), rank=5)
    assert set(spans.filter(kind="transfer")["group"]) == {"5>2"}


def test_the_ends_of_a_message_that_is_received(tmp_path: Path) -> None:
    pair = {"Process Group Ranks": "[2, 5]"}
    spans = spans_of(tmp_path, *launched([], SEND_RECEIVE, **told(0, "recv") | pair), rank=5)
    assert set(spans.filter(kind="transfer")["group"]) == {"2>5"}
    ends = {"Src Rank": 1, "Dst Rank": 3, "Process Group Ranks": "[1, 2, 3]"}
    for name, group in (("send", "2>3"), ("recv", "1>2")):
        spans = spans_of(tmp_path / name, *launched([], SEND_RECEIVE, **told(0, name) | ends), rank=2)
        assert set(spans.filter(kind="transfer")["group"]) == {group}
    args = told(0, "send") | {"Process Group Ranks": "[1, 2]"}
    spans = spans_of(tmp_path / "alone", *launched([], SEND_RECEIVE, **args), rank=7)
    assert set(spans.filter(kind="transfer")["group"]) == {None}, "rank 7 is none of the two"


def pipeline(rank: int, *, slow: float = 1.0, peers: bool = True) -> dict[str, Any]:
    """A stage of four, 8 steps of 4 micro-batches one after the other: receive, compute, send.
    Stage n begins a micro-batch when the one before has sent it."""
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
                        events.append(kernel(SEND_RECEIVE, come, start - come + 5, **(told(0, "recv") | ends)))
                    events.append(kernel("gemm", start + 5, work))
                    if stage < 3:
                        events.append(kernel(SEND_RECEIVE, start + work + 5, 5, **(told(0, "send") | ends)))
                done[batch] = ready[stage] = start + work + 10
        events.append(annotation(f"ProfilerStep#{step}", begin, 3900, cat="gpu_user_annotation"))
    return trace(events, rank, 4)


def test_a_slow_rank_of_a_pipeline_has_a_cost(tmp_path: Path) -> None:
    recording, _, _ = imported(tmp_path, *(pipeline(rank, slow=2.0) for rank in range(4)))
    assert set(recording.spans.filter(kind="transfer")["group"]) == {"0>1", "1>2", "2>3"}
    assert set(recording.meetings.filter(axis="pp").group_by("meeting").len()["len"]) == {2}
    report = explain(recording, "run", run=read_run(tmp_path / "run"))
    assert [(one.what, one.ranks) for one in report.stragglers] == [("slow processor", (1,))]
    assert report.costs[0] == pytest.approx(400e-6, rel=0.1), "four micro-batches, 100 us each"


def test_where_messages_do_not_tell_their_ends_the_cost_is_not_known(tmp_path: Path) -> None:
    recording, _, _ = imported(tmp_path, *(pipeline(rank, slow=2.0, peers=False) for rank in range(4)))
    report = explain(recording, "run", run=read_run(tmp_path / "run"))
    assert [one.ranks for one in report.stragglers] == [(1,)]
    assert report.costs == (None,)
