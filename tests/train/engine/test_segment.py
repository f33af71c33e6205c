"""What segments hold: a field is gone as soon as nobody needs it, and nothing outlives its
micro-batch."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.orders.overlap import Load
from plait.core.step.segments import Phase
from plait.train.engine.executor import SegmentExecutor
from plait.train.engine.inflight import MicroBatch
from plait.train.engine.segment import Segment
from plait.train.machine.device import RankDevice
from tests.support.lone import lone_executor
from tests.support.models import gpt, utransformer

GPT = gpt()
U = utransformer()
CASES: dict[str, tuple[ModelSpec, dict[str, Any]]] = {
    "plain": (GPT, {}),
    "slices": (GPT, {"tp": 2, "p1": 2, "p2": 2}),
    "sequence parallel": (GPT, {"tp": 2, "sequence_parallel": True}),
    "selective": (GPT, {"recompute": "selective"}),
    "full": (GPT, {"tp": 2, "recompute": "full", "sequence_parallel": True}),
    "block": (replace(GPT, parallel_block=True), {}),
    "u": (U, {"p1": 2}),
    "heads": (GPT, {"cp": 2}),
    "ring": (GPT, {"cp": 2, "ring": 2}),
    "both": (GPT, {"cp": 4, "ring": 2, "p1": 2}),
    "both again": (GPT, {"cp": 4, "ring": 2, "recompute": "full"}),
}
LENGTH, CPU = 8, RankDevice(torch.device("cpu"))
GIVEN = {"tokens", "targets", "total"}
"""What a micro-batch came with, and its loss."""


def made(spec: ModelSpec, strategy: Strategy, *, train: bool) -> tuple[SegmentExecutor, MicroBatch]:
    phases: tuple[Phase, ...] = ("F", "I", "W") if train else ("F",)
    executor = lone_executor(spec, strategy, Load(4, LENGTH), CPU, phases=phases, trains=train)
    own = LENGTH // strategy.cp
    tokens, positions = torch.randint(0, spec.vocab, (4, own)), torch.arange(own) if strategy.cp > 1 else None
    return executor, MicroBatch(tokens, tokens, torch.arange(4), 1.0, 0, positions)


def held(segment: Segment) -> set[str]:
    """The fields in which a segment has tensors, modules and constants aside."""
    found = {name for name, value in vars(segment).items() if isinstance(value, Tensor)}
    return (found | {name for name in ("operands", "cores", "loss") if getattr(segment, name, None)}) - GIVEN


@pytest.mark.parametrize("name", CASES)
def test_fields_are_gone_when_nobody_needs_them(name: str) -> None:
    spec, strategy = CASES[name][0], Strategy(**CASES[name][1])
    executor, batch = made(spec, strategy, train=True)
    state = executor.begin(batch)
    executor.phase("F", state)
    executor.phase("I", state)
    for (site, layer, at), segment in state.segments.items():  # only what weight gradients read
        wanted = {"operands"} if site in ("attn", "mlp", "block", "head") else set()
        wanted |= {"g_y", "g_y_full"} if site == "embed" else set()
        assert held(segment) == wanted, f"{site}{layer} of slice {at}"
    executor.phase("W", state)
    for (site, layer, at), segment in state.segments.items():
        assert held(segment) == set(), f"{site}{layer} of slice {at}"


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_micro_batch_is_freed_without_the_garbage_collector(name: str, train: bool) -> None:
    """It must not wait for it: activations are most of a rank's memory."""
    executor, batch = made(CASES[name][0], Strategy(**CASES[name][1]), train=train)
    gc.collect()
    gc.disable()
    try:
        state = executor.begin(batch)
        executor.phase("F", state)
        segments = [weakref.ref(segment) for segment in state.segments.values()]
        del state
        assert all(segment() is None for segment in segments)
    finally:
        gc.enable()
