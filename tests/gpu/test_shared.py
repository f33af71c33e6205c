"""Ranks that share one GPU: lanes, courier, shards and streams for real, against the unsharded reference.
Skips where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from plait.core.parallel.layout import SequenceCut
from plait.core.parallel.strategy import Strategy
from plait.train.comm.wire import NullWire, open_wire
from plait.train.comm.world import backends_for
from plait.train.machine.gpu import device_of, own_gpu
from tests.dist import equality, optimizing, pipelining
from tests.dist.test_equality import MODELS
from tests.dist.test_optimizers import small
from tests.dist.test_pipeline import GPT, LLAMA, TOLERANCE
from tests.dist.test_sharding import FULL, HALF
from tests.support.ranks import Ranks, worlds

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
WHOLE = SequenceCut()
FLAT = replace(LLAMA, num_layers=2, attention_dropout=0.0)
CASES: dict[str, tuple[int, Callable[..., Any], tuple[Any, ...]]] = {
    "tensor parallel": (2, equality.worst_error, (GPT, Strategy(tp=2, p1=2))),
    "sequence parallel": (
        2,
        equality.worst_error,
        (MODELS["llama_block"], Strategy(tp=2, p1=2, p2=2, sequence_parallel=True)),
    ),
    "recomputed": (2, equality.worst_error, (GPT, Strategy(tp=2, p1=2, recompute="full"))),
    "compiled": (2, equality.worst_error, (GPT, Strategy(tp=2, p1=2, compile=True))),
    "layer recomputed": (2, equality.worst_error, (MODELS["llama_block"], Strategy(tp=2, p1=2, recompute="layer"))),
    "streams": (2, equality.worst_error, (MODELS["llama_block"], Strategy(tp=2, p1=4, p2=2, streams=3))),
    "captured": (2, equality.worst_error, (GPT, Strategy(tp=2, p1=2, cuda_graphs=True))),
    "sharded": (2, pipelining.worst_error, (replace(GPT, num_layers=2), [(2, 1)], "1f1b", 1, False, None, (), [FULL])),
    "pipeline": (2, pipelining.worst_error, (LLAMA, [(1, 1)] * 2, "zb-v", 2)),
    "captured pipeline": (
        2,
        pipelining.worst_error,
        (LLAMA, [(1, 1)] * 2, "1f1b", 2, False, None, (), (), WHOLE, {"cuda_graphs": True}),
    ),
    "unequal meshes": (4, pipelining.worst_error, (LLAMA, [(2, 1), (1, 2)], "interleaved")),
    "both": (
        4,
        pipelining.worst_error,
        (replace(GPT, num_layers=2), [(2, 1), (2, 1)], "zb-h1", 2, False, None, (), [FULL, HALF]),
    ),
    "ulysses": (2, pipelining.worst_error, (FLAT, [(1, 1)], "1f1b", 2, False, None, (), (), SequenceCut(cp=2))),
    "ring": (2, pipelining.worst_error, (FLAT, [(1, 1)], "1f1b", 2, False, None, (), (), SequenceCut(cp=2, ring=2))),
    "documents": (2, pipelining.worst_error, (FLAT, [(1, 2)], "1f1b", 2, True, None, (), (), WHOLE, {}, True)),
    "documents on streams": (
        4,
        pipelining.worst_error,
        (FLAT, [(1, 2)], "1f1b", 2, False, None, (), (), SequenceCut(cp=2, ring=2), {"streams": 2}, True),
    ),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[Callable[[int], Ranks]]:
    """``pool(n)`` is a world of n ranks."""
    with worlds() as of:
        yield of


def sharing(rank: int, kind: str, function: Callable[..., Any], *args: Any) -> Any:
    """``function(rank, *args)`` on a device of this kind, as ``run.device``, with every tensor of its model
    there."""
    device = device_of(own_gpu(kind, rank), shared=kind == "shared")
    backends_for(device)
    over = open_wire(device.backend) if dist.get_world_size() > 1 else NullWire()
    with ExitStack() as stack:
        for module in (equality, pipelining, optimizing):
            stack.enter_context(mock.patch.object(module, "DEVICE", device))
        stack.enter_context(mock.patch.object(equality, "wire", return_value=over))
        return function(rank, *args)


@pytest.mark.parametrize("case", list(CASES))
def test_ranks_that_share_it_equal_the_reference(pool: Callable[[int], Ranks], case: str) -> None:
    size, function, args = CASES[case]
    for error, what in pool(size).run(sharing, "shared", function, *args):
        assert error < TOLERANCE, f"{what} is off by {error:.1e}"


@pytest.mark.parametrize("shard", ["ddp", "zero3"])
def test_muon_of_ranks_that_share_it_equals_the_reference(pool: Callable[[int], Ranks], shard: str) -> None:
    plan = small({"dp": 2, "shard": shard}, optimizer="muon", muon={"precision": "master"})
    for error, what, _ in pool(2).run(sharing, "shared", optimizing.trained, plan, (0, 4)):
        assert error < TOLERANCE, f"{what} is off by {error:.1e}"
