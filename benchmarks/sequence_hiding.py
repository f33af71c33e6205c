"""One rank of ``sequence.py``'s case ``hidden``: times forward and backward of every variant, in turn."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from ranks import as_rank, interleaved, timed_together
from typical import typical_costs

from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import ContextSplit
from plait.core.parallel.strategy import Strategy
from plait.core.step.orders.overlap import Load
from plait.core.step.orders.segment_costs import SegmentCosts
from plait.train.comm.wire import NullWire, Wire, open_wire
from plait.train.engine.executor import RankContext, SegmentExecutor, make_executor
from plait.train.engine.gradients import Gradients
from plait.train.engine.inflight import MicroBatch
from plait.train.machine.device import RankDevice
from plait.train.machine.gpu import device_of
from plait.train.model.sequence import SequenceGroup
from plait.train.model.transformer import ModelCut, Transformer
from plait.train.record.recorder import Recorder


@dataclass
class Bench:
    """Shapes, weights and wires that all variants share. base: of the strategy. sequence: of whole sequences,
    of which ``batch`` has this rank's tokens."""

    spec: ModelSpec
    base: Strategy
    batch: MicroBatch
    group: SequenceGroup
    recorder: Recorder
    device: RankDevice

    def __post_init__(self) -> None:
        wires = (self.recorder.over(wire, range(wire.size), "cp") for wire in (self.group.ulysses, self.group.ring))
        recorded, bare = SequenceGroup(*wires), self.group
        nothing = SequenceGroup(*(NullWire(wire.size, wire.rank) for wire in (bare.ulysses, bare.ring)))
        self.models = {
            name: Transformer(self.spec, self.base, ModelCut(sequence=group))
            for name, group in (("recorded", recorded), ("bare", bare), ("none", nothing))
        }
        self.gradients = {name: Gradients(model) for name, model in self.models.items()}

    def executor(self, name: str, strategy: Strategy, costs: SegmentCosts | None = None) -> SegmentExecutor:
        load = Load(self.batch.tokens.shape[0], self.spec.max_sequence, costs)
        here = RankContext(self.device, self.recorder if name == "recorded" else None)
        return make_executor(self.models[name], strategy, NullWire(), load, here, gradients=self.gradients[name])

    def step(self, name: str, strategy: Strategy, costs: SegmentCosts | None = None) -> Callable[[], object]:
        executor, gradients = self.executor(name, strategy, costs), self.gradients[name]

        def run() -> None:
            gradients.zero()
            executor.run(self.batch)

        return run


def measured(rank: int, text: str) -> dict[str, Any]:
    """Seconds of every way to hide what is exchanged."""
    setup: dict[str, Any] = json.loads(text)
    bench = _build(setup, rank)
    plain = bench.step("recorded", Strategy(**setup["base"], overlap="sync"))
    costs = typical_costs(plain, bench.recorder)

    def timed(name: str) -> Callable[[int], float]:
        strategy = Strategy(**setup["base"], **setup["variants"][name])
        run = bench.step("none" if name == "none" else "bare", strategy, costs)
        return lambda _: timed_together(run)

    return {"seconds": interleaved({name: timed(name) for name in setup["variants"]}, setup["rounds"], turned=True)}


def _build(setup: dict[str, Any], rank: int) -> Bench:
    spec, base = ModelSpec.from_dict(setup["model"]), Strategy(**setup["base"])
    device, cut, size = device_of(None), ContextSplit(cp=base.cp, ring=base.ring), setup["batch"]
    tokens = torch.randint(0, spec.vocab, (size, spec.max_sequence), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(run.start, run.stop) for run in cut.tokens(spec.max_sequence, rank)])
    own = tokens[:, positions]
    batch = MicroBatch(own, tokens.roll(-1, 1)[:, positions], torch.arange(size), 1.0 / tokens.numel(), 0, positions)
    ulysses, ring = _wire(cut.ulysses_group(rank)), _wire(cut.ring_group(rank))
    return Bench(spec, base, batch, SequenceGroup(ulysses, ring), Recorder(device), device)


def _wire(ranks: tuple[int, ...]) -> Wire:
    return open_wire("gloo", ranks)


if __name__ == "__main__":
    as_rank(measured, lambda _: True)
