"""What activations take of a rank's memory, of one micro-batch on one stage: the very list of segment ops
that the executor runs, walked with the tensors that each op makes, keeps and lets go of. So slices,
recomputation, sequence parallelism and the phases of a pipeline need no formulas of their own.

Counts follow Korthikanti 2022 (arXiv 2205.05198) with fused attention kernels; unlike there, every tensor is
counted at the moment at which it exists, and the working set of the op that is running with it. Over the
micro-batches of a pipeline: ``plait.core.step.memory.pipeline_memory``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from plait.core.model.precision import MASTER
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.memory.segment_sizes import Core, Sizes
from plait.core.step.memory.shared_walk import NOTHING, SharedWalk
from plait.core.step.orders.known import known_order
from plait.core.step.seconds.segment_costs import segment_costs
from plait.core.step.segments import LAYERS, Action, Kind, Phase, SegmentGraph, SegmentOp
from plait.core.step.stages import Stage


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one stage: kept between its forward and its backward, and the most at any
    moment of either. Where the backward is split, also kept between its two parts (``held``), and the most in
    the second. staging: what gloo's reduce-scatters keep from step to step, none of the others."""

    kept: int
    forward_peak: int
    backward_peak: int
    held: int = 0
    weight_peak: int = 0
    staging: int = 0

    def peak(self, alive: int = 1) -> int:
        """The most at any moment with so many micro-batches alive at once."""
        return (alive - 1) * self.kept + max(self.forward_peak, self.backward_peak, self.weight_peak)


def activations(
    spec: ModelSpec,
    strategy: Strategy,
    stage: Stage,
    *,
    batch: int,
    sequence: int,
    itemsize: int,
    phases: Sequence[Phase] = ("F", "B"),
    gpu: bool = False,
) -> Activations:
    """Of a micro-batch of ``batch`` x ``sequence`` on one rank of a stage.

    phases: in which a micro-batch runs: ``step``, ``F B``, or ``F I W``.
    gpu: whether ranks have one each: what a kernel keeps and works with differs.
    """
    costs = segment_costs(spec, strategy, batch=batch, sequence=sequence)
    graph = SegmentGraph.of(spec, strategy, stage)
    walk = Walk(Sizes(spec, strategy, graph, batch, sequence, itemsize, gpu))

    def order(phase: Phase) -> Sequence[Action]:
        return known_order(replace(graph, phase=phase), strategy.overlap, costs, batch)

    moments = list[tuple[int, int]]()
    for phase in phases:
        peak = walk.run(order(phase))
        walk.hand_over()
        moments.append((walk.now, peak))
    (kept, forward), (held, backward), (_, weights) = (*moments, (0, 0), (0, 0))[:3]
    return Activations(kept, forward, backward, held, weights, walk.staging)


class Walk(SharedWalk):
    """Runs a list of actions on sizes instead of tensors."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.full_again = self.graph.recompute == "full"
        self._flying, self._spare = Counter[int](), Counter[int]()
        self._crossing: list[tuple[SegmentOp, str]] = []
        # Of 8 bytes each: numbers, targets; which rows are sent, and where they arrive.
        tokens = sizes.tokens * sum(sizes.shares) * (32 if self.graph.embeds else 16)
        self._hold(SegmentOp("embed", 0, Kind.SECOND, 0), "tokens", tokens)

    def run(self, actions: Sequence[Action]) -> int:
        """One phase. Returns the most at any moment of it."""
        self.peak, self._rises = self.now, False
        for verb, op in actions:
            if verb == "run":
                getattr(self, f"_{op.kind}")(op)
            elif verb == "start":
                self._start(op)
                self._fly(op, 1)
            else:
                self._fly(op, -1)
        self._top()
        return self.peak

    def hand_over(self) -> None:
        """After a phase: what crosses the ends of the stage is the pipeline's from now on."""
        for op, name in self._crossing:
            self._free(op, name, holder="stage")
            if op.site == "enter":
                self._free(op, "g", holder="h")
        self._crossing.clear()

    def _hold_crossing(self, op: SegmentOp, name: str, size: int, *holders: str) -> None:
        """Until the end of the phase at least."""
        self._hold(op, name, size, *holders, "stage")
        self._crossing.append((op, name))

    @property
    def staging(self) -> int:
        """A buffer for every reduce-scatter that was under way beside others of its size."""
        return sum(size * count for size, count in self._spare.items())

    def _fly(self, op: SegmentOp, change: int) -> None:
        if self.graph.collective(op) == "reduce_scatter":
            size = self.sizes.full(op) // (self.graph.p2 if op.kind == Kind.SECOND and op.site in LAYERS else 1)
            self._flying[size] += change
            self._spare[size] = max(self._spare[size], self._flying[size])

    # ---- bookkeeping ----

    def _before(self, op: SegmentOp) -> SegmentOp:
        site, layer = self.graph.before(op)
        return op._replace(site=site, layer=layer)

    def _start(self, op: SegmentOp) -> None:
        """A collective makes its result, unless it works in place."""
        match self.graph.collective(op), op.kind:
            case "all_to_all" | "rotate", _:
                self._sent(op)
            case "all_gather", Kind.NORM | Kind.NORM_AGAIN:
                self._hold(op, "full", self.sizes.full(op), *self._reads(op, "input"))
            case "all_gather", Kind.NORM_GRAD:
                before = self._before(op)
                self._hold(before, "g_full", self.sizes.full(op), *self._reads(before, "gradient"))
            case "all_gather", Kind.SECOND:
                self._hold(op, "y", self.sizes.full(op))
            case "reduce_scatter", Kind.SECOND:
                if op.part == 0:  # all parts go into one buffer
                    self._hold(op, "y", self.sizes.stream(op))
            case "reduce_scatter", _:
                self._hold(op, "g_shard", self.sizes.stream(op))
            case _:
                pass

    def _cores(self, op: SegmentOp, *, again: bool) -> list[tuple[int, Core]]:
        """(number, core) of the branches that run again, or of the others."""
        repeats = Kind.FIRST_AGAIN in self.graph.again(op.site, op.layer)
        return [
            (number, core) for number, core in self._own(op) if (repeats and (core.cheap or self.full_again)) == again
        ]

    # ---- forward ----

    def _N(self, op: SegmentOp) -> None:  # noqa: N802
        stream, before = self.sizes.stream(op), self._before(op)
        spec, embeds = self.sizes.spec, before.site == "embed"
        # What is added to it, or comes out of a table, is there beside it.
        biased = 1 + spec.learned_positions if embeds else int(spec.has_bias)
        stream = stream // (2 if op.site == "up" else 1)  # as it comes in
        if before.site not in ("enter", "down", "up"):
            # What leaves is copied. With dropout: what is added, dropped and not, beside the mask.
            beside = max(biased, bool(spec.dropout), op.site == "leave")
            self._spike(stream * (1 + beside))
            self._spike(stream * biased + self._hashed(op))
        if op.site == "leave":
            self._hold_crossing(op, "h", stream)
        else:
            self._hold(op, "h", stream)
        self._free(before, "y", "y_partial")
        if op.site in ("down", "up"):
            self._resample(op)
        elif op.site != "leave":
            self._normalise(op, keep=Kind.NORM_AGAIN not in self.graph.again(op.site, op.layer))

    def _hashed(self, op: SegmentOp) -> int:
        """What the mask of the stream that comes into a segment takes while it is drawn; nothing where
        nothing was added to it."""
        if self._before(op).site in ("enter", "down", "up"):
            return NOTHING
        return self.sizes.hashed(op) // (2 if op.site == "up" else 1)

    def _resample(self, op: SegmentOp) -> None:
        """What a down or an up makes is the next segment's stream."""
        stream = self.sizes.stream(op)
        if op.site == "down":
            self._hold(op, "pairs", stream)
            self._spike(stream)
            if ("up", op.layer) not in self.graph.places:
                self._hold_crossing(op, "skip", stream)
        else:
            if ("down", op.layer) not in self.graph.places:
                self._hold(op, "skip", stream)
            self._spike(stream * 5 // 2)

    def _normalise(self, op: SegmentOp, *, keep: bool) -> None:
        """keep: for a gradient."""
        stream, sharded, extra = self.sizes.stream(op), self.sizes.sharded > 1, self.sizes.normed(op)
        unfused = self.sizes.spec.family == "llama" and not self.sizes.gpu
        narrow = self.sizes.itemsize < self.sizes.master
        self._spike(stream + extra + (self.sizes.widened(op) if unfused and narrow else 0))
        self._hold(op, "n_saved", extra if keep else NOTHING)
        self._hold(op, "n", stream, *(("norm",) if sharded else ("norm", *self._reads(op, "input"))))

    def _reads(self, op: SegmentOp, what: Literal["input", "gradient"]) -> list[str]:
        """Who reads a sublayer's input, or the gradient of its output, last: the weight gradients of its
        first weights, or of its second."""
        parts = self.graph.parts(op.site, Kind.WEIGHT_GRAD)
        return [f"W{part}" for part in range(parts) if parts == 1 or part % 2 == (what == "input")]

    def _F(self, op: SegmentOp) -> None:  # noqa: N802
        if op.site == "head":
            narrow, wide = (self.sizes.head(op, size) for size in (self.sizes.itemsize, self.sizes.master))
            self._hold(op, "loss", self.sizes.loss(op))
            self._spike(wide + (narrow if self.sizes.itemsize < self.sizes.master else 0))
            self._hold(op, "logits", wide)
            return
        self._project(op)
        if self.graph.shared(op.site):
            self._leave(op)
        for number, core in self._cores(op, again=False):
            self._activate(op, number, core)
            self._hold(op, f"saved{number}", core.saved)
        for number, core in self._cores(op, again=True):
            self._activate(op, number, core)
            self._free(op, *([f"z{number}"] if self.full_again else []))
        if Kind.NORM_AGAIN in self.graph.again(op.site, op.layer):
            self._free(op, "n_saved")
            for holder in ("norm", *self._reads(op, "input")):
                self._free(op, "n", "full", holder=holder)

    def _own(self, op: SegmentOp) -> list[tuple[int, Core]]:
        """(number, core) of the branches that no other rank has a part in: attention's is the first."""
        return list(enumerate(self.sizes.branches(op)))[1 if self.graph.shared(op.site) else 0 :]

    def _project(self, op: SegmentOp) -> None:
        for number, core in enumerate(self.sizes.branches(op)):
            self._hold(op, f"z{number}", core.z)

    def _activate(self, op: SegmentOp, number: int, core: Core) -> None:
        self._spike(core.forward)
        self._hold(op, f"o{number}", core.o)

    def _R(self, op: SegmentOp) -> None:  # noqa: N802
        if op.site == "embed":
            self._hold(op, "y_partial", self.sizes.looked_up(op))
        elif op.part == 0:
            self._hold(op, "y_partial", self.sizes.full(op))
        if op.part == 0 and self.graph.shared(op.site):
            self._arrive(op)
        if op.site != "embed" and op.part == self.graph.p2 - 1:
            self._free(op, *(f"o{number}" for number, _ in self._cores(op, again=True)))
            self._free(op, *(["o0"] if Kind.CORE_AGAIN in self.graph.again(op.site, op.layer) else []))

    def _L(self, op: SegmentOp) -> None:  # noqa: N802
        """The gradient takes the logits' place, unless it is narrower."""
        narrow = self.sizes.head(op, self.sizes.itemsize)
        if self.sizes.itemsize < self.sizes.master:
            self._spike(narrow)
        self._free(op, "logits", "loss")
        self._hold(op, "g_logits", narrow, "C", "W0")

    # ---- backward ----

    def _M(self, op: SegmentOp) -> None:  # noqa: N802
        self._normalise(op, keep=True)

    def _A(self, op: SegmentOp) -> None:  # noqa: N802
        if self.full_again:
            self._project(op)
            if self.graph.shared(op.site):
                self._leave(op)
        for number, core in self._cores(op, again=True):
            self._activate(op, number, core)
            self._hold(op, f"saved{number}", core.saved)

    def _D(self, op: SegmentOp) -> None:  # noqa: N802
        self._free(op, "g_y", holder="D")
        if self.graph.shared(op.site):
            self._back(op)
        for number, core in self._own(op):
            self._spike(core.backward)
            self._hold(op, f"g_z{number}", core.z, "C", "operand")
            self._free(op, f"saved{number}", f"z{number}")

    def _C(self, op: SegmentOp) -> None:  # noqa: N802
        if op.part == 0:
            self._hold(op, "g_n", self.sizes.full(op))
        if op.part == self.graph.parts(op.site, Kind.FIRST_GRAD) - 1:
            self._free(op, "g_z0", "g_z1", holder="C")
            self._free(op, "g_logits", holder="C")

    def _W(self, op: SegmentOp) -> None:  # noqa: N802
        number, first = divmod(op.part, 2)
        if op.site == "embed":
            self._spike(self.sizes.full(op) + (self.sizes.widened(op) if self.sizes.itemsize < MASTER else 0))
        else:
            self._spike(self.sizes.product(op))
        if op.site in LAYERS:
            self._free(op, *([] if first else [f"o{number}"]))
            self._free(op, *([f"g_z{number}"] if first else []), holder="operand")
        self._free(op, "g_logits", "g", "g_y", "g_full", "n", "full", holder=f"W{op.part}")

    def _J(self, op: SegmentOp) -> None:  # noqa: N802
        stream, before = self.sizes.stream(op), self._before(op)
        normed = op.site not in ("down", "up", "leave")
        unfused = self.sizes.spec.family == "llama" and not self.sizes.gpu and normed
        self._spike(self.sizes.widened(op) * 4 if unfused else stream * (3 if op.site == "down" else 1))
        self._free(op, "n_saved")
        if op.site == "up":
            down, elsewhere = op._replace(site="down"), ("down", op.layer) not in self.graph.places
            (self._hold_crossing if elsewhere else self._hold)(down, "g_skip", stream)
            stream = stream // 2
        ends = op.site == "leave" or before[0] == "enter"
        self._give(op, before, stream, ends=ends)
        self._free(op, "h", "g_n", "g_shard", "pairs", "skip", "g_skip")
        self._free(op, "n", holder="norm")
        self._free(op, "g", holder="h")

    def _give(self, op: SegmentOp, before: SegmentOp, stream: int, *, ends: bool) -> None:
        """The gradient of the stream that leaves ``before``. ends: it comes from another stage, or goes
        there, so it lives as long as the phase."""
        hold, dropped = self._hold_crossing if ends else self._hold, bool(self.sizes.spec.dropout)
        embeds = before.site == "embed"
        if before.site not in (*LAYERS, "embed"):
            hold(before, "g", stream, "h")
            return
        # Where a sequence is sharded, the gradient is gathered to be read.
        reads = self._reads(before, "gradient") if self.sizes.sharded == 1 else ["W0" if embeds else "D"]
        if not dropped:
            hold(before, "g", stream, *(reads if embeds else ["h", *reads]))
            return
        self._spike(stream + self._hashed(op))
        self._spike(3 * stream)
        if not embeds:
            hold(before, "g", stream, "h")
        self._hold(before, "g_y", stream, *reads)
