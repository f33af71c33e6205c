"""Traces of PyTorch's profiler as profiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.core.base.ignored_input import IgnoredInput
from plait.core.cluster.profile import Profile
from plait.formats.kineto.profile import kineto_profile

BF16 = "c10::BFloat16"
CAUSAL = [*[""] * 8, "True", "False"]


class Trace:
    """Events, one after the other, times in microseconds."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.at = 0.0

    def operator(self, name: str, dims: Any, took: float, *, kind: str = BF16, concrete: Any = CAUSAL) -> None:
        number = len(self.events) + 1
        args = {
            "External id": number,
            "Input Dims": dims,
            "Input type": [kind] * len(dims),
            "Concrete Inputs": concrete,
        }
        self.events.append({"ph": "X", "cat": "cpu_op", "name": name, "ts": self.at, "dur": 3, "args": args})
        self.kernel(took, {"External id": number})

    def kernel(self, took: float, args: Any, name: str = "sm90_gemm") -> None:
        self.events.append({"ph": "X", "cat": "kernel", "name": name, "ts": self.at, "dur": took, "args": args})
        self.at += took + 1

    def collective(self, took: float, **changed: Any) -> None:
        args = {
            "Collective name": "_allgather_base", "In msg nelems": 1 << 20, "Out msg nelems": 1 << 24,
            "dtype": "BFloat16", "Group size": 16, "Process Group Ranks": str(list(range(16))),
        }  # fmt: skip
        self.kernel(took, args | changed, "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)")

    def read(self, folder: Path, over: IgnoredInput | None = None) -> Profile:
        header = {"deviceProperties": [{"name": "NVIDIA H100"}], "distributedInfo": {"rank": 0, "world_size": 32}}
        (folder / "trace.json").write_text(json.dumps(header | {"traceEvents": self.events}))
        return kineto_profile(folder / "trace.json", 8, IgnoredInput() if over is None else over)


def test_products_are_medians_by_shape(tmp_path: Path) -> None:
    trace, over = Trace(), IgnoredInput()
    for took in (100.0, 110.0, 500.0):
        trace.operator("aten::mm", [[1024, 4096], [4096, 512]], took)
    trace.operator("aten::addmm", [[512], [1024, 4096], [4096, 512]], 120.0)
    trace.operator("aten::mm", [[8, 8], [8, 8]], 7.0, kind="float")
    trace.operator("aten::mm", [[8, 8], [8, 8]], 7.0, kind="double")
    trace.operator("aten::mm", [[8, 8], [9, 8]], 7.0)
    trace.operator("aten::mm", [[], [8, 8]], 7.0)
    trace.operator("aten::relu", [[8, 8]], 7.0)
    found = trace.read(tmp_path, over)
    assert [(one.m, one.k, one.n, one.precision, one.seconds) for one in found.products] == [
        (1024, 4096, 512, "bf16-mixed", pytest.approx(115e-6)), (8, 8, 8, "fp32", pytest.approx(7e-6)),
    ]  # fmt: skip
    assert found.products[0].spread > 0.1
    assert found.machine.device == "NVIDIA H100"
    assert over.counts == {"product(s) and attention of a shape, type or mask that no plan uses": 3}


def test_kernels_of_one_operator_count_together_and_not_beside_a_collective(tmp_path: Path) -> None:
    trace, over = Trace(), IgnoredInput()
    trace.operator("aten::mm", [[64, 64], [64, 64]], 10.0)
    trace.kernel(5.0, {"External id": 1}, "splitKreduce")
    beside = trace.at
    trace.operator("aten::mm", [[64, 64], [64, 64]], 40.0)
    trace.at = beside + 20
    trace.collective(30.0)
    found = trace.read(tmp_path, over)
    assert [one.seconds for one in found.products] == [pytest.approx(15e-6)]
    assert over.counts["product(s) and attention beside a collective"] == 1


def test_attention_is_read_where_it_is_causal(tmp_path: Path) -> None:
    trace, over = Trace(), IgnoredInput()
    query, key = [2, 512, 16, 64], [2, 1024, 4, 64]
    trace.operator("aten::_flash_attention_forward", [query, key, key], 50.0)
    trace.operator("aten::_flash_attention_backward", [query, query, key, key], 90.0, concrete=[*[""] * 11, "True"])
    trace.operator("aten::_flash_attention_forward", [query, key, key], 50.0, concrete=[*[""] * 8, "False"])
    heads_first = [[2, 16, 512, 64], [2, 4, 1024, 64]]
    trace.operator("aten::_scaled_dot_product_cudnn_attention", heads_first, 20.0, concrete=[*[""] * 6, "True"])
    trace.operator("aten::_efficient_attention_forward", [query, key], 70.0, concrete=[*[""] * 9, "0"])
    found = trace.read(tmp_path, over)
    assert [(one.batch, one.heads, one.queries, one.keys, one.head_size, one.backward) for one in found.attention] == [
        (2, 16, 512, 1024, 64, False), (2, 16, 512, 1024, 64, True),
    ]  # fmt: skip
    assert found.attention[0].seconds == pytest.approx(35e-6), "of both kernels of that shape"
    assert over.counts == {"product(s) and attention of a shape, type or mask that no plan uses": 2}


def test_the_shortest_collective_waited_least(tmp_path: Path) -> None:
    trace, over = Trace(), IgnoredInput()
    for took in (300.0, 900.0, 350.0):
        trace.collective(took)
        trace.collective(took, **{"Collective name": "allreduce", "Process Group Ranks": "[0, 8]"})
        trace.collective(took, **{"Process Group Ranks": "[0, 1, 2, ...]"})
        trace.collective(took, **{"Collective name": "send"})
    trace.collective(100.0, **{"Out msg nelems": 4096})
    found = {str(one.kind): one for one in trace.read(tmp_path, over).collectives}
    gathered, reduced = found["all_gather"], found["all_reduce"]
    assert [(one.bytes, one.seconds) for one in gathered.points] == [(1 << 25, pytest.approx(300e-6))]
    assert (gathered.group.ranks, gathered.group.nodes, gathered.group.at_once) == (16, 2, 2)
    assert (reduced.points[0].bytes, reduced.group.stride, reduced.group.nodes) == (1 << 21, 8, 2)
    assert over.counts == {
        "collective(s) of no kind, size, type or group that a plan uses": 6,
        "collective(s) that ran fewer than 3 times": 1,
    }


@pytest.mark.parametrize(
    "event",
    [
        7, None, {"ph": "X"}, {"ph": "X", "cat": "kernel", "name": 3, "ts": "now", "dur": 1},
        {"ph": "X", "cat": "kernel", "ts": 1, "dur": -1}, {"ph": "X", "cat": "kernel", "ts": 1e300, "dur": 1},
        {"ph": "X", "cat": "kernel", "ts": 1e6, "dur": 1, "args": {"Collective name": ["x"], "dtype": {}}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "args": {"External id": 1, "Input Dims": 7}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "args": {"External id": [1], "Input Dims": []}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm",
         "args": {"External id": 1, "Input Dims": [[-1, 2], [2, 3]], "Input type": [BF16, BF16]}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm",
         "args": {"External id": 1, "Input Dims": [[1e9, 2], [2, 3]], "Input type": [{}, BF16]}},
    ],
)  # fmt: skip
def test_events_that_cannot_be_are_passed_over(tmp_path: Path, event: Any) -> None:
    trace = Trace()
    trace.operator("aten::mm", [[64, 64], [64, 64]], 10.0)
    trace.events.append(event)
    assert [one.seconds for one in trace.read(tmp_path).products] == [pytest.approx(10e-6)]
    trace.events = [event]
    with pytest.raises(JobError, match="has no product, attention or collective of use"):
        trace.read(tmp_path)


def test_a_torn_trace_is_refused(tmp_path: Path) -> None:
    trace = Trace()
    trace.operator("aten::mm", [[64, 64], [64, 64]], 10.0)
    trace.read(tmp_path)
    text = (tmp_path / "trace.json").read_text()
    (tmp_path / "trace.json").write_text(text[: len(text) // 2])
    with pytest.raises(JobError, match=r"trace\.json: cannot be read"):
        kineto_profile(tmp_path / "trace.json", 8, IgnoredInput())
