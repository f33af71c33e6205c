"""The table of tensors against the runtime: after every op, what a segment's fields hold is what
the table says is there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.core.model.experts import Experts
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Overlap, Strategy
from plait.core.step import tensors
from plait.core.step.memory import activations
from plait.core.step.memory.activations import MemoryTrace
from plait.core.step.memory.sizes import RankLoad, Sizes
from plait.core.step.orders.overlap import Load
from plait.core.step.segments import Phase
from plait.train.engine.attention import SublayerCore
from plait.train.engine.executor import RunningPhase, SegmentExecutor
from plait.train.engine.experts import Exchange
from plait.train.engine.inflight import InFlight, MicroBatch
from plait.train.engine.segment import Segment
from plait.train.machine.device import RankDevice
from plait.train.model.embedding import VocabularyLoss
from tests.support.lone import lone_executor

SHAPES: dict[str, Any] = {"num_layers": 3, "hidden": 48, "num_heads": 4, "vocab": 62, "max_sequence": 64}
GPT = ModelSpec(family="gpt", **SHAPES)
LLAMA = ModelSpec(family="llama", num_kv_heads=2, ffn_hidden=80, **SHAPES)
DROPS = {"dropout": 0.1, "attention_dropout": 0.1}
MODELS = {
    "gpt": GPT, "llama": LLAMA, "block": replace(GPT, parallel_block=True), "normed": replace(LLAMA, qk_norm=True),
    "u": replace(GPT, family="utransformer", levels=1), "dropped gpt": replace(GPT, **DROPS),
    "dropped llama": replace(LLAMA, **DROPS),
    "routed": replace(LLAMA, experts=Experts(count=8, per_token=2, ffn_hidden=40)),
    "gated experts": replace(
        LLAMA, experts=Experts(count=4, per_token=2, ffn_hidden=40, shared=1, shared_gate=True, balance="micro-batch")
    ),
    "shared experts": replace(LLAMA, experts=Experts(count=4, per_token=1, shared=1, first_dense=1, balance_loss=0.1)),
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "plain": {}, "selective": {"recompute": "selective"}, "full": {"recompute": "full"},
    "layer": {"recompute": "layer"},
    "first layer": {"tp": 2, "p1": 2, "p2": 2, "recompute": "layer", "recompute_layers": 1},
    "slices": {"tp": 2, "p1": 2, "p2": 2}, "one layer": {"tp": 2, "p1": 2, "recompute": "full", "recompute_layers": 1},
}  # fmt: skip
SHARED: dict[str, dict[str, Any]] = {
    "ulysses": {"cp": 2}, "ring": {"cp": 4, "ring": 4}, "both": {"cp": 4, "ring": 2}, "two": {"cp": 2, "ring": 2},
    "ulysses again": {"cp": 2, "recompute": "full"}, "ring again": {"cp": 2, "ring": 2, "recompute": "full"},
    "ulysses, one stream": {"cp": 2, "recompute": "layer"},
    "ring, one stream": {"cp": 2, "ring": 2, "recompute": "layer"},
    "both, one stream": {"cp": 8, "ring": 4, "recompute": "layer", "p1": 2},
    "both again": {"cp": 8, "ring": 4, "recompute": "full", "p1": 2},
}  # fmt: skip
OF_AUTOGRAD = ("saved", "n_saved", "kernel", "pairs")
"""What no field of a segment holds."""
ELSEWHERE = {"statistics", "out", "skipped"}
"""Fields that hold what is n_saved, the next segment's h, and the down's."""
SEQUENCE, CPU = 32, RankDevice(torch.device("cpu"))


def reachable(value: object) -> Iterator[Tensor]:
    """Tensors of fields, those of cores and losses among them. A loss gathers three numbers of a
    token and rank, which nobody counts."""
    if isinstance(value, Tensor):
        yield from [value] * (value.dim() > 0)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from reachable(one)
    elif isinstance(value, dict):
        yield from reachable(list(value.values()))
    elif isinstance(value, Exchange):
        yield value.order
    elif isinstance(value, (SublayerCore, VocabularyLoss)):
        yield from reachable({name: one for name, one in vars(value).items() if name != "gathered"})


def held(segment: Segment) -> int:
    """Bytes of all that its ops have made."""
    given = {field.name for field in fields(segment) if field.init} | ELSEWHERE
    found = reachable({name: value for name, value in vars(segment).items() if name not in given})
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in found}.values())


def begun(model: ModelSpec, strategy: Strategy, batch: int, *, trains: bool = True) -> tuple[SegmentExecutor, InFlight]:
    """A micro-batch of a rank, which trains or evaluates, before its forward."""
    phases: tuple[Phase, ...] = ("F", "B") if trains else ("F",)
    executor = lone_executor(model, strategy, Load(batch, SEQUENCE), CPU, phases=phases, trains=trains)
    own = SEQUENCE // strategy.cp
    tokens = torch.arange(batch * own).view(batch, own) % model.vocab
    positions = torch.arange(own) if strategy.cp > 1 else None
    return executor, executor.begin(MicroBatch(tokens, tokens, torch.arange(batch), 1.0, 0, positions))


def differences(model: ModelSpec, overlap: Overlap = "sync", **asked: Any) -> list[str]:
    """Ops after which a segment between the ends of a stage holds something else than the table
    says."""
    strategy, batch = Strategy(overlap=overlap, **asked), asked.get("p1", 1)
    executor, state = begun(model, strategy, batch)
    walk = MemoryTrace(
        Sizes(model, RankLoad.of(strategy, batch=batch, sequence=SEQUENCE), 4, gpu=False), executor.graph
    )
    found = list[str]()
    for phase in ("F", "B"):
        turn = RunningPhase(state.segments)
        for action, act in executor.programmes[phase]:
            with torch.no_grad():
                act(turn)
            walk.run([action])  # type: ignore[list-item]
            for (site, layer, at), segment in state.segments.items():
                index = executor.graph.segment_index[site, layer]
                told = {
                    name: size for (of, slice_, name), (size, _) in walk.live.items() if (of, slice_) == (index, at)
                }
                want = sum(size for name, size in told.items() if not name.startswith(OF_AUTOGRAD))
                if site != "embed" and held(segment) != want:  # which rows of an embedding travel depends on tokens
                    found.append(f"{action}: {site}{layer} of slice {at} holds {held(segment)}, not {told}")
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("overlap", ["sync", "domino"])
def test_segments_hold_the_tensors_of_the_table(name: str, way: str, overlap: Overlap) -> None:
    assert differences(MODELS[name], overlap, **WAYS[way])[:3] == []


@pytest.mark.parametrize("name", ["gpt", "llama", "block", "dropped gpt", "dropped llama"])
def test_segments_with_a_part_of_a_sequence_hold_the_tensors_of_the_table(name: str) -> None:
    for asked in ({}, {"p1": 2, "p2": 2}, {"recompute": "full"}, {"recompute": "selective", "p1": 2},
                  {"recompute": "layer", "p1": 2}):  # fmt: skip
        assert differences(MODELS[name], "domino", tp=2, sequence_parallel=True, **asked)[:3] == []


@pytest.mark.parametrize("name", ["gpt", "llama", "block", "normed"])
@pytest.mark.parametrize("way", SHARED)
@pytest.mark.parametrize("overlap", ["sync", "domino"])
def test_segments_with_shared_attention_hold_the_tensors_of_the_table(name: str, way: str, overlap: Overlap) -> None:
    assert differences(MODELS[name], overlap, **SHARED[way])[:3] == []


@pytest.mark.parametrize(
    ("name", "way"), [*product(MODELS, WAYS), *product(("gpt", "llama", "block", "normed"), SHARED)]
)
def test_an_evaluation_keeps_nothing_of_a_sublayer(name: str, way: str) -> None:
    """What comes after it has read all that it made."""
    asked = (WAYS | SHARED)[way]
    executor, state = begun(MODELS[name], Strategy(**asked), asked.get("p1", 1), trains=False)
    executor.phase("F", state)
    left = {key: held(segment) for key, segment in state.segments.items() if key[0] in ("attn", "mlp", "moe", "block")}
    assert left == dict.fromkeys(left, 0) and left


SAME = {"z", "g_z", "g_logits", "skip"}
"""What an op of the table lets go of before it ends, or weight gradients after it, or another
stage."""
READS = [
    number for number, row in enumerate(tensors.TENSORS)
    if row.branch != "embed" and row.when != "leaves" and set(row.reads.split()) - {*OF_AUTOGRAD, *SAME}
    and row.work != "second"  # the same op has made what it reads
]  # fmt: skip


@pytest.mark.parametrize("number", READS)
def test_a_row_that_reads_less_than_the_runtime_is_found(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a tensor dies early, late or never."""
    rows = list(tensors.TENSORS)
    rows[number] = rows[number]._replace(reads="")
    monkeypatch.setattr(tensors, "TENSORS", tuple(rows))
    tensors.tensor_steps.cache_clear()
    monkeypatch.setattr(activations, "_known", dict[object, Any]().copy)
    try:
        ways: list[tuple[str, dict[str, Any]]] = [
            ("block", {"recompute": "full"}),
            ("gpt", {"recompute": "layer"}),
            *(("normed", way) for way in SHARED.values()),
            ("shared experts", {"recompute": "full"}),
            ("shared experts", {"tp": 2, "sequence_parallel": True}),
        ]
        ways += [("u", {}), ("dropped gpt", {"tp": 2, "sequence_parallel": True})]
        assert any(found(MODELS[name], **way) for name, way in ways)
    finally:
        tensors.tensor_steps.cache_clear()


def found(model: ModelSpec, **asked: Any) -> bool:
    """Whether the runtime differs, or reads what the table has let go of."""
    try:
        return bool(differences(model, **asked))
    except KeyError:
        return True
