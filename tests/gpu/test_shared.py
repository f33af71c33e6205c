"""Ranks that share one GPU: lanes, courier, shards and streams for real, against the unsharded
reference. Skips where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from plait.core.parallel.strategy import Strategy
from plait.train.comm.wire import NullWire, open_wire
from plait.train.comm.world import backends_for
from plait.train.machine.gpu import device_of, own_gpu
from tests.dist import equality, pipelining, test_optimizers
from tests.dist.equality import TOLERANCE, Answer, Case, Pool, TensorParallel, run
from tests.dist.pipelining import Pipeline
from tests.dist.test_equality import MODELS
from tests.dist.test_optimizers import small
from tests.dist.test_pipeline import LLAMA, P2
from tests.dist.test_sharding import FULL, HALF, SMALL
from tests.support.ranks import worlds

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
GPT, BLOCK, FEW = MODELS["gpt"], MODELS["llama_block"], SMALL["gpt"]
FLAT = replace(SMALL["llama"], attention_dropout=0.0)
CASES: dict[str, Case] = {
    "tensor parallel": TensorParallel(GPT, Strategy(tp=2, p1=2)),
    "sequence parallel": TensorParallel(BLOCK, Strategy(tp=2, p1=2, p2=2, sequence_parallel=True)),
    "recomputed": TensorParallel(GPT, Strategy(tp=2, p1=2, recompute="full")),
    "compiled": TensorParallel(GPT, Strategy(tp=2, p1=2, compile=True)),
    "layer recomputed": TensorParallel(BLOCK, Strategy(tp=2, p1=2, recompute="layer")),
    "streams": TensorParallel(BLOCK, Strategy(tp=2, p1=4, p2=2, streams=3)),
    "captured": TensorParallel(GPT, Strategy(tp=2, p1=2, cuda_graphs=True)),
    "sharded": Pipeline(FEW, [(2, 1)], shardings=[FULL]),
    "pipeline": Pipeline(LLAMA, [(1, 1)] * 2, "zb-v", P2),
    "captured pipeline": Pipeline(LLAMA, [(1, 1)] * 2, "1f1b", Strategy(p1=2, cuda_graphs=True)),
    "unequal meshes": Pipeline(LLAMA, [(2, 1), (1, 2)], "interleaved"),
    "both": Pipeline(FEW, [(2, 1), (2, 1)], "zb-h1", P2, [FULL, HALF]),
    "ulysses": Pipeline(FLAT, strategy=Strategy(p1=2, cp=2)),
    "ring": Pipeline(FLAT, strategy=Strategy(p1=2, cp=2, ring=2)),
    "documents": Pipeline(FLAT, [(1, 2)], strategy=Strategy(p1=2, sequence_parallel=True), detailed=True),
    "documents on streams": Pipeline(
        FLAT, [(1, 2)], strategy=Strategy(p1=2, cp=2, ring=2, streams=2), detailed=True
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """``pool(n)`` is a world of n ranks."""
    with worlds() as of:
        yield of


def sharing(rank: int, kind: str, function: Callable[..., Any], *args: Any) -> Any:
    """``function(rank, *args)`` on a device of this kind, as ``run.device``, with every tensor of
    its model there."""
    device = device_of(own_gpu(kind, rank), shared=kind == "shared")
    backends_for(device)
    over = open_wire(device.backend) if dist.get_world_size() > 1 else NullWire()
    with ExitStack() as stack:
        for module in (equality, pipelining):
            stack.enter_context(mock.patch.object(module, "DEVICE", device))
        stack.enter_context(mock.patch.object(equality, "wire", return_value=over))
        return function(rank, *args)


def really(rank: int, case: Case, want: Answer) -> tuple[float, str]:
    """A case's error, its formulas compiled."""
    return case.error(rank, want)


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_share_it_equal_the_reference(pool: Pool, name: str) -> None:
    for error, what in run(pool, CASES[name], sharing, "shared", really):
        assert error < TOLERANCE, f"{what} is off by {error:.1e}"


@pytest.mark.parametrize("shard", ["ddp", "zero3"])
def test_muon_of_ranks_that_share_it_equals_the_reference(pool: Pool, shard: str) -> None:
    plan = small({"dp": 2, "shard": shard}, optimizer="muon", muon={"precision": "master"})
    want = test_optimizers.expected(plan)
    for error, what, _ in pool(2).run(sharing, "shared", test_optimizers.trained, plan, want):
        assert error < TOLERANCE, f"{what} is off by {error:.1e}"
