"""The profiler's traces: what is work, and for how long a rank waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from plait.diagnose.measured.reading import read_run
from plait.diagnose.report import explain
from tests.support.recordings.theirs import annotation, imported, kernel, operator, spans_of, trace


def test_kernels_at_once_are_computing_once(tmp_path: Path) -> None:
    streams = [
        kernel("a", 0, 100),
        kernel("b", 50, 100) | {"tid": 8},
        kernel("c", 60, 20) | {"tid": 9},
        kernel("d", 200, 10),
    ]
    work = spans_of(tmp_path, *streams).filter(kind="compute")
    assert (work["end"] - work["start"]).sum() == pytest.approx(160e-6)
    mean = explain(read_run(tmp_path / "run").recording, "run").mean
    assert mean is not None and mean.parts[0].seconds == pytest.approx(160e-6)


def test_a_kernel_of_no_length_computes_nothing(tmp_path: Path) -> None:
    spans = spans_of(tmp_path, kernel("a", 0, 10), kernel("none", 5, 0), kernel("late none", 20, 0))
    assert spans["name"].to_list() == ["a"]


def test_operators_within_an_asynchronous_range_are_work(tmp_path: Path) -> None:
    """As gloo writes it on the thread that trains: the range lasts while operators run."""
    events = [annotation("gloo:all_reduce", 0, 500), operator("aten::mm", 100, 200), operator("aten::add", 350, 100)]
    recording, _, _ = imported(tmp_path, trace(events, 0, 2))
    work = recording.spans.filter(kind="compute")
    assert sorted(work["name"]) == ["aten::add", "aten::mm"]
    wait = recording.spans.filter(kind="wait")
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
    work = recording.spans.filter(kind="compute")
    assert sorted(work["name"]) == ["aten::_foreach_add_", "fsdp::chunk_cat"]
    comm = recording.spans.filter(kind="comm").row(0, named=True)
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
    waits = recording.spans.filter(kind="wait")
    numbers = {rank: own["seq"].to_list() for (rank,), own in waits.group_by("rank")}
    assert numbers == {0: [0, 1, 2], 1: [1, 2]}


def test_calls_within_calls_are_one(tmp_path: Path) -> None:
    """Of each thread; what begins as another ends is not within it."""
    events = [
        operator("_c10d_functional::all_reduce", 0, 50), operator("c10d::allreduce_", 10, 20),
        operator("c10d::allreduce_", 50, 20), operator("c10d::allreduce_", 20, 10, tid=2),
        operator("aten::mm", 300, 10), operator("aten::add", 310, 10), operator("aten::inner", 302, 4),
    ]  # fmt: skip
    recording, _, _ = imported(tmp_path, trace(events, 0, 2))
    spans = recording.spans.sort("start")
    assert spans.filter(kind="comm").height == 3
    assert spans.filter(kind="compute")["name"].to_list() == ["aten::mm", "aten::add"]
    ranges = [annotation("gloo:all_reduce", at, 5, tid=3) for at in (40, 80)]
    recording, _, _ = imported(tmp_path / "ranges", trace([*events[:2], *ranges, events[4]], 0, 2))
    seen = recording.spans.filter(kind="comm").sort("start")
    lengths = ((seen["end"] - seen["start"]) * 1e6).round().to_list()
    assert lengths == [45, 5], "the second range was begun by nobody: the inner call is the outer's"


def test_ranges_of_one_kind_go_to_the_calls_in_their_order(tmp_path: Path) -> None:
    events = [
        operator("c10d::allreduce_", 0, 5), operator("c10d::allreduce_", 100, 5), operator("aten::mm", 300, 10),
        annotation("gloo:all_reduce", 20, 30, tid=2), annotation("gloo:all_reduce", 110, 50, tid=2),
        annotation("gloo:all_reduce", 200, 50, tid=2),
    ]  # fmt: skip
    recording, _, _ = imported(tmp_path, trace(events, 0, 2))
    spans = recording.spans.filter(kind="comm").sort("start")
    micros = [round((at - spans["start"][0]) * 1e6) for at in (*spans["start"], *spans["end"])]
    assert micros == [0, 100, 200, 50, 160, 250], "the third was begun by nobody"
