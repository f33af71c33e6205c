"""What activations take of a rank's memory, of one micro-batch on one stage: the very list of segment ops
that the executor runs, walked with the tensors that ops make and read by ``plait.core.step.tensors``. So
slices, recomputation, sequence parallelism and the phases of a pipeline need no formulas of their own.

Every tensor is counted at the moment at which it exists, and the working set of the op that is running with
it. Sizes are numbers, or columns of many strategies. Over the micro-batches of a pipeline:
``plait.core.step.memory.pipeline_memory``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.memory.lifetimes import StageTensors, TensorUse
from plait.core.step.memory.sizes import RankLoad, Sizes, larger
from plait.core.step.ops import Number
from plait.core.step.orders.known import known_order
from plait.core.step.seconds.segment_costs import segment_costs
from plait.core.step.segments import LAYERS, Action, Kind, Phase, SegmentGraph
from plait.core.step.stages import Stage


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one stage: kept between its forward and its backward, and the most at any
    moment of either. Where the backward is split, also kept between its two parts (``held``), and the most in
    the second. staging: what gloo's reduce-scatters keep from step to step, none of the others. All may be
    columns."""

    kept: Number
    forward_peak: Number
    backward_peak: Number
    held: Number = 0
    weight_peak: Number = 0
    staging: Number = 0

    @staticmethod
    def of(phases: Sequence[tuple[Number, Number]], staging: int = 0) -> Activations:
        """What ``Walk.phases`` found; 0 of phases that did not run."""
        (kept, forward), (held, backward), (_, weight) = (*phases, (0, 0), (0, 0))[:3]
        return Activations(kept, forward, backward, held, weight, staging)

    def peak(self, alive: int = 1) -> int:
        """The most at any moment with so many micro-batches alive at once."""
        return (alive - 1) * self.kept + max(self.forward_peak, self.backward_peak, self.weight_peak)


@dataclass(frozen=True, kw_only=True)
class WalkedBatch:
    """A micro-batch of ``batch`` x ``sequence``, as a rank of a stage computes it. itemsize: bytes of a
    number. phases: ``step``, ``F B``, or ``F I W``. gpu: whether ranks have one each: what a kernel keeps and
    works with differs."""

    batch: int
    sequence: int
    itemsize: int
    phases: tuple[Phase, ...] = ("F", "B")
    gpu: bool = False


def activations(spec: ModelSpec, strategy: Strategy, stage: Stage, micro: WalkedBatch) -> Activations:
    """Of a micro-batch on one rank of a stage."""
    batch, sequence = micro.batch, micro.sequence
    costs = segment_costs(spec, strategy, batch=batch, sequence=sequence)
    graph = SegmentGraph.of(spec, strategy, stage)
    sizes = Sizes(spec, RankLoad.of(strategy, batch=batch, sequence=sequence), micro.itemsize, gpu=micro.gpu)
    orders = [known_order(replace(graph, phase=phase), strategy.overlap, costs, batch) for phase in micro.phases]
    return Activations.of(Walk(sizes, graph).phases(orders), _staging(sizes, graph, orders))


def _staging(sizes: Sizes, graph: SegmentGraph, orders: Iterable[Sequence[Action]]) -> int:
    """A buffer for every reduce-scatter that is under way beside others of its size."""
    if not graph.sequence_parallel:
        return 0
    flying, spare = Counter[int](), Counter[int]()
    for verb, op in (action for order in orders for action in order):
        if verb == "run" or graph.collective(op) != "reduce_scatter":
            continue
        size = sizes.of("", op.site, graph.level(sizes.spec, op.site, op.layer), op.slice).full
        size //= graph.p2 if op.kind == Kind.SECOND and op.site in LAYERS else 1
        flying[size] += 1 if verb == "start" else -1
        spare[size] = max(spare[size], flying[size])
    return sum(size * count for size, count in spare.items())


Held = tuple[int, int, str]
"""A tensor: the place of its segment, the slice, its name."""


class Walk:
    """Runs lists of actions on sizes instead of tensors. now: bytes that are there; peak: the most at any
    moment of a phase. live: of every tensor that is there, its bytes and how many steps will read it."""

    def __init__(self, sizes: Sizes, graph: SegmentGraph) -> None:
        self.sizes, self.graph = sizes, graph
        tensors = StageTensors(graph, dropped=bool(sizes.spec.dropout), within=bool(sizes.spec.letters.qk_norm))
        self._places = {
            segment: (place, tensors.program(place), graph.level(sizes.spec, *segment))
            for segment, place in graph.places.items()
        }
        self.live: dict[Held, tuple[Number, int]] = {}
        self._crossing: list[Held] = []
        self._rises = False
        # Of 8 bytes each: numbers, targets; which rows are sent, and where they arrive.
        self.now: Number = sizes.rank.tokens * sum(sizes.rank.shares) * (32 if graph.embeds else 16)
        self.peak = self.now

    def phases(self, orders: Iterable[Sequence[Action]]) -> list[tuple[Number, Number]]:
        """Of each phase, what is there after it, and the most at any moment of it."""
        found = list[tuple[Number, Number]]()
        for order in orders:
            peak = self.run(order)
            for held in self._crossing:  # is the pipeline's from now on
                self._read(held)
            self._crossing.clear()
            found.append((self.now, peak))
        return found

    def run(self, actions: Sequence[Action]) -> Number:
        """One phase. Returns the most at any moment of it."""
        self.peak, self._rises = self.now, False
        for verb, op in actions:
            if verb == "wait":
                continue
            place, program, level = self._places[op.site, op.layer]
            for step in program.get((op.kind, op.part, verb == "start"), ()):
                down = self.graph.places.get(("down", op.layer), -1 - op.layer) if op.site == "up" else 0
                self._run(step, level, op.site, op.slice, (place, place - 1, down))
        self._top()
        return self.peak

    def _run(self, step: TensorUse, level: int, site: str, at: int, owners: tuple[int, int, int]) -> None:
        sizes = self.sizes.of(step.branch, site, level, at)
        if step.work:
            self.peak = larger(self.peak, self.now + getattr(sizes, step.work))
            self._rises = False
        for (owner, name), size, crosses, readers in step.makes:
            held, made = (owners[owner], at, name), getattr(sizes, size)
            self.live[held] = made, readers + crosses
            self.now = self.now + made  # not in place: sizes may be columns
            self._rises = True
            if crosses:
                self._crossing.append(held)
        for owner, name in step.reads:
            self._read((owners[owner], at, name))
        for owner, name in step.drops:
            if (held := (owners[owner], at, name)) in self.live:
                self._free(held)

    def _read(self, held: Held) -> None:
        size, readers = self.live[held]
        if readers > 1:
            self.live[held] = size, readers - 1
        else:
            self._free(held)

    def _free(self, held: Held) -> None:
        self._top()
        self.now = self.now - self.live.pop(held)[0]

    def _top(self) -> None:
        """Remember what there is, if it has grown since: it is about to be less."""
        if self._rises:
            self.peak = larger(self.peak, self.now)
            self._rises = False
