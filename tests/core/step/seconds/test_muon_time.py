"""What orthogonalising takes: products of rounds as they are run, and the bytes that the runtime
sends."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from plait.core.cluster.hardware import Cluster
from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import Layout
from plait.core.parallel.sharding import Sharding, flops, rounds
from plait.core.parallel.strategy import Strategy
from plait.core.step.memory.estimate import PipelineRankMemory
from plait.core.step.schedules import Shape, generate
from plait.core.step.seconds import rates
from plait.core.step.seconds.sharding_costs import (
    MatrixKind,
    MuonPrices,
    cluster_prices,
    group_of,
    kinds_of,
    muon_bytes,
    muon_seconds,
)
from plait.core.step.step import PipelineRank, Step, Workload
from plait.train.engine.muon import Member, matrices_of, rounds_of
from plait.train.model.transformer import Transformer

H100 = Cluster.preset("h100")
SMALL = ModelSpec(family="llama", num_layers=3, hidden=32, num_heads=8, ffn_hidden=48, vocab=64, max_sequence=16)


def free(*_: Any) -> float:
    return 0.0


def multiply_adds(m: float, k: float, n: float) -> float:
    return 2.0 * m * k * n


@pytest.mark.parametrize("number", range(40))
def test_products_are_those_of_each_rounds_most_costly_matrix(number: int) -> None:
    draw = random.Random(number)
    kinds = [
        MatrixKind(draw.randint(2, 40), draw.randint(2, 40), draw.randint(1, 9)) for _ in range(draw.randint(1, 6))
    ]
    ranks, steps = draw.randint(1, 12), draw.randint(1, 6)
    shapes = {f"{at}.{one}": kind[:2] for at, kind in enumerate(kinds) for one in range(kind.count)}
    told = sum(max(flops(shapes[name], steps) for name in owned.values()) for owned in rounds(shapes, ranks))
    assert muon_seconds(kinds, ranks, ranks, MuonPrices(steps, 2, multiply_adds, free)) == pytest.approx(told)


@pytest.mark.parametrize(
    ("tp", "optim", "replicas"), [(1, 1, 1), (2, 1, 1), (1, 4, 4), (2, 2, 2), (2, 1, 3), (1, 2, 8)]
)
def test_what_travels_is_what_the_runtime_sends(tp: int, optim: int, replicas: int) -> None:
    """Of all ranks together. Shards cut units, not matrices, so that an owner's own part may be
    larger."""
    model = Transformer(SMALL, Strategy(tp=tp))
    members = [Member(rank, replica) for replica in range(replicas) for rank in range(tp)]
    ranks, parts = group_of(tp, replicas, optim)
    assert ranks == len(members)
    found = matrices_of(model, members, Sharding(optim=optim))
    kinds = kinds_of({"attn": SMALL.num_layers, "mlp": SMALL.num_layers}, SMALL.letters)
    assert Counter(one.shape for one in found.values()) == _shapes(kinds)
    sent = 0
    for rank in range(ranks):
        for one in rounds_of(found, rank, ranks):
            sent += sum(sum(way.splits.out) - way.splits.out[rank] for way in (one.to_owner, one.from_owner))

    sharding = Sharding(optim=optim)
    layout = Layout.of(dp=replicas, tp=tp)
    work = Workload(micro_batch=replicas, num_micro_batches=1, sequence=16, optimizer="muon", matrix_itemsize=1)
    step = Step.of(
        SMALL, work, Strategy(tp=tp), layout, generate("1f1b", Shape(ranks=1, micro_batches=1)), shardings=[sharding]
    )
    told = PipelineRankMemory(step, 0).sent().get("matrices", 0)
    assert told * ranks == pytest.approx(sent, rel=0.05 if optim > 1 else 1e-9)
    assert told == muon_bytes(PipelineRank(step, 0)) and (told > 0) == (ranks > 1)

    def travelled(nbytes: float, n: int) -> float:
        return nbytes * (n - 1) / n  # of one rank

    each = [
        muon_seconds([kind._replace(count=1)], ranks, parts, MuonPrices(1, 1, free, travelled)) * kind.count
        for kind in kinds
    ]
    assert sum(each) == pytest.approx(sent, rel=0.05 if optim > 1 else 1e-9)


def _shapes(kinds: list[MatrixKind]) -> Counter[tuple[int, int]]:
    found = Counter[tuple[int, int]]()
    for rows, columns, count in kinds:
        found[rows, columns] += count
    return found


def test_a_device_without_a_peak_for_the_precision_takes_the_models() -> None:
    own = H100.device.model_copy(update={"peak": {"fp32": H100.device.peak["fp32"]}})
    prices = cluster_prices(H100.model_copy(update={"device": own}), "fp32", 5, 2)
    assert float(prices.product(64, 64, 64)) == float(rates.matmul(H100, "fp32", 64, 64, 64))
