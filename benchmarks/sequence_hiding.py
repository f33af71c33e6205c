"""One rank of ``sequence.py``'s case ``hidden``: times forward and backward of every variant, in turn."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from slowest import timed_together
from typical import typical_costs

from plait.core.base.env import RankEnv
from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import SequenceCut
from plait.core.parallel.strategy import Strategy
from plait.core.step.orders.overlap import Load
from plait.core.step.seconds.segment_costs import SegmentCosts
from plait.train.comm.wire import NullWire, Wire, open_wire
from plait.train.engine.executor import RankContext, SegmentExecutor, make_executor
from plait.train.engine.gradients import Gradients
from plait.train.engine.inflight import MicroBatch
from plait.train.machine.device import RankDevice
from plait.train.machine.gpu import device_of
from plait.train.machine.rank_process import run_and_end
from plait.train.machine.threads import take_cores
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


def main() -> None:
    """Rank 0 writes what it measured to the file named first."""
    out, text = sys.argv[1:]
    setup: dict[str, Any] = json.loads(text)
    torch.set_num_threads(1)
    rank = RankEnv.read()
    take_cores(*rank.place_among_cores, threads=1)
    dist.init_process_group("gloo")
    bench = _build(setup, rank.rank)
    plain = bench.step("recorded", Strategy(**setup["base"], overlap="sync"))
    costs = typical_costs(plain, bench.recorder)
    runs = {
        name: bench.step("none" if name == "none" else "bare", Strategy(**setup["base"], **what), costs)
        for name, what in setup["variants"].items()
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(setup["rounds"] + 1):
        turned = number % len(names)
        for name in names[turned:] + names[:turned]:  # nobody always comes after the same one
            taken = timed_together(runs[name])
            if number:
                times[name].append(taken)
    if rank.rank == 0:
        Path(out).write_text(json.dumps({"seconds": times}))
    dist.barrier()
    dist.destroy_process_group()


def _build(setup: dict[str, Any], rank: int) -> Bench:
    spec, base = ModelSpec.from_dict(setup["model"]), Strategy(**setup["base"])
    device, cut, size = device_of(None), SequenceCut(cp=base.cp, ring=base.ring), setup["batch"]
    tokens = torch.randint(0, spec.vocab, (size, spec.max_sequence), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(run.start, run.stop) for run in cut.tokens(spec.max_sequence, rank)])
    own = tokens[:, positions]
    batch = MicroBatch(own, tokens.roll(-1, 1)[:, positions], torch.arange(size), 1.0 / tokens.numel(), 0, positions)
    ulysses, ring = _wire(cut.ulysses_group(rank)), _wire(cut.ring_group(rank))
    return Bench(spec, base, batch, SequenceGroup(ulysses, ring), Recorder(device), device)


def _wire(ranks: tuple[int, ...]) -> Wire:
    return open_wire("gloo", ranks)


if __name__ == "__main__":
    run_and_end(main)
