"""Runs one strategy on this process's rank and compares everything with the unsharded reference."""

from __future__ import annotations

import torch

from plait.core.model import ModelSpec
from plait.core.overlap import segment_costs, segment_order
from plait.core.segments import SegmentGraph
from plait.core.strategy import Strategy
from plait.train.device import Device
from plait.train.executor import MicroBatch, SegmentExecutor
from plait.train.gradients import Gradients
from plait.train.model import Transformer
from plait.train.wire import GroupWire, NullWire, Wire, open_group
from tests.reference import Reference

_wire: list[Wire] = []


def shared_wire() -> Wire:
    """One group for the whole session, as a run would have."""
    if not _wire:
        _wire.append(GroupWire(open_group("gloo")))
    return _wire[0]


def build(rank: int, spec: ModelSpec, strategy: Strategy, batch: int, sequence: int, reference: Reference | None, wire: Wire | None = None,
          dtype: torch.dtype = torch.float64) -> tuple[Transformer, Gradients, SegmentExecutor, Wire]:
    wire = wire or (shared_wire() if strategy.tp > 1 else NullWire())
    model = Transformer(spec, strategy, tp_rank=rank, dtype=dtype)
    if reference is not None:
        with torch.no_grad():
            for piece in model.pieces:
                piece.view(model.named[piece.parameter]).copy_(piece.cut(reference.weights[piece.name]))
    gradients = Gradients(model)
    graph = SegmentGraph(num_layers=spec.num_layers, p1=strategy.p1, p2=strategy.p2, sequence_parallel=strategy.sequence_parallel, communicates=strategy.tp > 1)
    costs = segment_costs(spec, strategy, batch=batch, sequence=sequence, flops=5e10, bandwidth=125e6)
    actions = segment_order(graph, strategy.overlap, costs, batch)
    return model, gradients, SegmentExecutor(model, graph, actions, wire, gradients=gradients, device=Device(torch.device("cpu")), seed=7), wire


def data(spec: ModelSpec, batch: int, sequence: int, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, spec.vocab, (batch, sequence), generator=generator)
    targets = torch.randint(0, spec.vocab, (batch, sequence), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.15] = -100
    return tokens, targets


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    scale = theirs.abs().max().item()
    return (ours - theirs).abs().max().item() / scale if scale else ours.abs().max().item()
