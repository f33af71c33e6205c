"""What one rank's memory holds, in closed form: the counterpart of what the runtime allocates.

Two kinds. What lasts from the first step to the last (parameters, gradients, optimizer states, the buffers of
sharded data parallelism) is a sum over units. What lives within a step is found by walking the very list of
segment ops that the executor runs, with the tensors that each op makes, keeps and lets go of; so slices,
recomputation, sequence parallelism and the phases of a pipeline need no formulas of their own.

Activation counts follow Korthikanti 2022 (arXiv 2205.05198) with fused attention kernels; unlike there, every
tensor is counted at the moment at which it exists, and the working set of the op that is running with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from plait.core.model import ModelSpec
from plait.core.overlap import segment_order
from plait.core.segment_costs import segment_costs
from plait.core.segments import LAYERS, Action, Phase, SegmentGraph, SegmentOp
from plait.core.sharding import WHOLE, Sharding, Unit
from plait.core.stages import Stage
from plait.core.strategy import Strategy, slice_sizes

MASTER = 4
"""Bytes of a gradient, a master weight or a moment, unless the model itself computes in more."""


@dataclass(frozen=True)
class States:
    """Bytes that last from step to step. buffers: of gathered parameters and open gradients."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch: kept between its forward and its backward, and the most at any moment of
    either."""

    kept: int
    forward_peak: int
    backward_peak: int

    def peak(self, alive: int = 1) -> int:
        """The most at any moment with so many micro-batches alive at once."""
        return (alive - 1) * self.kept + max(self.forward_peak, self.backward_peak)


def states(units: Mapping[Unit, int], sharding: Sharding, *, itemsize: int) -> States:
    """Of one rank's share of the model. units: numbers in each, padding included. itemsize: bytes of a number
    of the model's."""
    master = max(MASTER, itemsize)
    parameters = gradients = optimizer = 0
    gathered, opened = Counter[int](), Counter[int]()
    for unit, numel in units.items():
        whole = unit[0] in WHOLE
        params, grads = (1, 1) if whole else (sharding.params, sharding.grads)
        parameters += numel // params * itemsize + (
            numel // sharding.secondary * itemsize if sharding.secondary and not whole else 0
        )
        gradients += numel // grads * master
        moments = 2 + (master != itemsize)  # and masters, where the model's own numbers are smaller
        optimizer += moments * (numel // sharding.optim) * master
        if params > 1:
            gathered[numel * itemsize] += 1
        if grads > 1:
            opened[numel * master] += 1
    buffers = sum(
        size * min(2, count) for sizes in (gathered, opened) for size, count in sizes.items()
    )  # two of a size
    return States(parameters, gradients, optimizer, buffers)


def position_tables(spec: ModelSpec, strategy: Strategy, *, sequence: int, itemsize: int) -> int:
    """Cosines and sines of rotary positions, which all layers share: of every position where a rank's are
    scattered."""
    positions = spec.max_sequence if strategy.cp > 1 else sequence
    return 0 if spec.learned_positions else 2 * positions * spec.head_size * itemsize


def activations(
    spec: ModelSpec,
    strategy: Strategy,
    stage: Stage,
    *,
    batch: int,
    sequence: int,
    itemsize: int,
    zero_bubble: bool = False,
    fused_norm: bool = False,
) -> Activations:
    """Of a micro-batch of ``batch`` x ``sequence`` on one rank of a stage.

    zero_bubble: whether weight gradients are a phase of their own, here as if it came at once.
    fused_norm: whether RMSNorm keeps its input only (GPU kernels do; on a CPU torch also keeps the normalised
    numbers).
    """
    costs = segment_costs(spec, strategy, batch=batch, sequence=sequence)
    graph = SegmentGraph.of(spec, strategy, stage)
    walk = _Walk(_Sizes(spec, strategy, graph, batch, sequence, itemsize, fused_norm))

    def order(phase: Phase) -> list[Action]:
        return segment_order(replace(graph, phase=phase), strategy.overlap, costs, batch)

    walk.run(order("F"))
    kept, forward, walk.peak = walk.now, walk.peak, 0
    backward: tuple[Phase, ...] = ("I", "W") if zero_bubble else ("B",)
    for phase in backward:
        walk.run(order(phase))
    return Activations(kept, forward, walk.peak)


class _Sizes:
    """Bytes of the tensors of one slice. Rows: tokens of this rank; streams are sharded where tensor
    parallelism shards the sequence."""

    def __init__(
        self,
        spec: ModelSpec,
        strategy: Strategy,
        graph: SegmentGraph,
        batch: int,
        sequence: int,
        itemsize: int,
        fused: bool,
    ) -> None:
        self.spec, self.strategy, self.graph, self.itemsize, self.fused = spec, strategy, graph, itemsize, fused
        self.shares = slice_sizes(batch, strategy.p1)
        self.tokens = sequence // strategy.cp
        self.sharded = strategy.tp if graph.sequence_parallel else 1

    def rows(self, op: SegmentOp) -> int:
        """Tokens of a slice where the segment works."""
        return self.shares[op.slice] * (self.tokens >> self.graph.level(self.spec, op.site, op.layer))

    def full(self, op: SegmentOp) -> int:
        """[S, b, H]."""
        return self.rows(op) * self.spec.hidden * self.itemsize

    def stream(self, op: SegmentOp) -> int:
        """[S_local, b, H]."""
        return self.full(op) // self.sharded

    def head(self, op: SegmentOp) -> int:
        """[S, b, V / tp], in fp32 at least."""
        return self.rows(op) * self.strategy.padded_vocab(self.spec) // self.strategy.tp * max(MASTER, self.itemsize)

    def branches(self, op: SegmentOp) -> list[_Core]:
        """What stands between a first and a second weight."""
        row = self.rows(op) * self.itemsize
        return [core(self, row, op) for core in {"attn": [_attention], "mlp": [_mlp]}.get(op.site, [_attention, _mlp])]


@dataclass(frozen=True)
class _Core:
    """Bytes. z: of the first weight's output; o: of the second's input; saved: kept by autograd besides;
    forward, backward: working sets beyond all these and the gradients of z and o. memo: kept although the
    core runs again. cheap: whether selective recomputation runs it again."""

    z: int
    o: int
    saved: int
    forward: int
    backward: int
    memo: int
    cheap: bool


def _mlp(sizes: _Sizes, row: int, _op: SegmentOp) -> _Core:
    inner = row * sizes.spec.ffn_hidden // sizes.strategy.tp
    if sizes.spec.gated:  # keeps the gate's activation
        return _Core(2 * inner, inner, inner, 0, inner, 0, True)
    return _Core(inner, inner, 0, 0, 0, 0, True)


def _attention(sizes: _Sizes, row: int, op: SegmentOp) -> _Core:
    spec, strategy = sizes.spec, sizes.strategy
    heads, kv_heads = spec.num_heads // strategy.tp, max(1, spec.num_kv_heads // strategy.tp)
    q, kv = row * heads * spec.head_size, row * kv_heads * spec.head_size
    lse = sizes.rows(op) * heads * max(MASTER, sizes.itemsize)
    ulysses = strategy.cp // strategy.ring
    grouped = heads != kv_heads
    saved, forward, backward, memo = lse, 0, q + 2 * kv, 0
    if spec.family == "llama":  # rotated queries and keys
        forward, backward = 2 * q, backward + 2 * q
        saved += q + (0 if grouped and strategy.ring == 1 else kv) if ulysses == 1 else 0
        saved += (
            2 * sizes.tokens * spec.head_size * sizes.itemsize if strategy.cp > 1 else 0
        )  # the tables of scattered positions
    if ulysses > 1:  # what came from the others, and attention's output before it went back
        together = q + 2 * max(kv, q * ulysses // heads if kv_heads < ulysses else 0)
        saved, forward = saved + together + q, forward + together
    if strategy.ring > 1:
        memo, forward = q + lse, forward + 2 * q + 4 * kv
        # Gradient of the queries; the block here, the one that comes, and the gradients of both; what one
        # block gives. Where query heads share keys and values, these and their gradients for every query
        # head.
        backward += q + (6 if strategy.ring == 2 else 8) * kv - 2 * kv + 4 * q * grouped
    elif grouped:
        saved, backward = saved + 2 * q, backward + 2 * q
    return _Core(q + 2 * kv, q, saved, forward, backward, memo, False)


class _Walk:
    """Runs a list of actions on sizes instead of tensors; a tensor is there as long as anybody holds it."""

    def __init__(self, sizes: _Sizes) -> None:
        self.sizes, self.graph = sizes, sizes.graph
        self.full_again = self.graph.recompute == "full"
        self._live: dict[tuple[str, int, int, str], tuple[int, set[str]]] = {}
        self.now = self.peak = 0
        tokens = sizes.tokens * sum(sizes.shares)
        self._hold(
            SegmentOp("embed", 0, "R", 0), "tokens", 32 * tokens
        )  # numbers, targets, where their rows arrive: four of 8 bytes

    def run(self, actions: Sequence[Action]) -> None:
        """One phase."""
        for verb, op in actions:
            if verb == "run":
                getattr(self, f"_{op.kind}")(op)
            elif verb == "start":
                self._start(op)

    # ---- bookkeeping ----

    def _hold(self, op: SegmentOp, name: str, size: int, *holders: str) -> None:
        self._live[op.site, op.layer, op.slice, name] = size, set(holders or ("",))
        self.now += size
        self.peak = max(self.peak, self.now)

    def _free(self, op: SegmentOp, *names: str, holder: str = "") -> None:
        for name in names:
            key = op.site, op.layer, op.slice, name
            size, holders = self._live.get(key, (0, set[str]()))
            holders.discard(holder)
            if not holders:
                self._live.pop(key, None)
                self.now -= size

    def _spike(self, size: int) -> None:
        self.peak = max(self.peak, self.now + size)

    def _before(self, op: SegmentOp) -> SegmentOp:
        site, layer = self.graph.before(op)
        return op._replace(site=site, layer=layer)

    def _start(self, op: SegmentOp) -> None:
        """A collective makes its result, unless it works in place."""
        match self.graph.collective(op), op.kind:
            case "all_gather", "N" | "M":
                self._hold(op, "full", self.sizes.full(op), "input")
            case "all_gather", "J":
                self._hold(self._before(op), "g_full", self.sizes.full(op), "operand")
            case "all_gather", "R":
                self._hold(op, "y", self.sizes.full(op))
            case "reduce_scatter", "R":
                self._hold(op, "y", self.sizes.stream(op))
            case "reduce_scatter", _:
                self._hold(op, "g_shard", self.sizes.stream(op))
            case _:
                pass

    def _cores(self, op: SegmentOp, *, again: bool) -> list[tuple[int, _Core]]:
        """(number, core) of the branches that A runs again, or of the others."""
        repeats = "A" in self.graph.again(op.site, op.layer)
        cores = enumerate(self.sizes.branches(op))
        return [(number, core) for number, core in cores if (repeats and (core.cheap or self.full_again)) == again]

    # ---- forward ----

    def _N(self, op: SegmentOp) -> None:  # noqa: N802
        stream, before = self.sizes.stream(op), self._before(op)
        biased = self.sizes.spec.has_bias or bool(self.sizes.spec.dropout) or before.site == "embed"
        self._spike(stream * (1 + biased))
        self._hold(op, "h", stream)
        self._free(before, "y", "y_partial")
        if op.site not in ("leave", "down", "up"):
            self._normalise(op)

    def _normalise(self, op: SegmentOp) -> None:
        stream, sharded = self.sizes.stream(op), self.sizes.sharded > 1
        extra = stream if self.sizes.spec.family == "llama" and not self.sizes.fused else 0
        self._hold(op, "n_saved", extra)
        self._hold(op, "n", stream, *(("norm",) if sharded else ("norm", "input")))

    def _F(self, op: SegmentOp) -> None:  # noqa: N802
        if op.site == "head":
            self._hold(op, "logits", self.sizes.head(op), "loss", "operand")
            return
        self._project(op)
        for number, core in self._cores(op, again=False):
            self._activate(op, number, core)
            self._hold(op, f"saved{number}", core.saved)
        for number, core in self._cores(op, again=True):
            self._activate(op, number, core)
            self._hold(op, f"memo{number}", core.memo)
            self._free(op, *([f"z{number}"] if self.full_again else []))
        if "M" in self.graph.again(op.site, op.layer):
            self._free(op, "n_saved")
            self._free(op, "n", holder="norm")
            self._free(op, "n", "full", holder="input")

    def _project(self, op: SegmentOp) -> None:
        for number, core in enumerate(self.sizes.branches(op)):
            self._hold(op, f"z{number}", core.z)

    def _activate(self, op: SegmentOp, number: int, core: _Core) -> None:
        self._spike(core.o + core.saved + core.forward)
        self._hold(op, f"o{number}", core.o)

    def _R(self, op: SegmentOp) -> None:  # noqa: N802
        if op.site == "embed":
            self._hold(op, "y_partial", self.sizes.full(op) // self.sizes.strategy.tp)
        elif op.part == 0:
            self._hold(op, "y_partial", self.sizes.full(op))
        if op.site != "embed" and op.part == self.graph.p2 - 1:
            self._free(op, *(f"o{number}" for number, _ in self._cores(op, again=True)))

    def _L(self, op: SegmentOp) -> None:  # noqa: N802
        """The gradient takes the logits' place."""

    # ---- backward ----

    def _M(self, op: SegmentOp) -> None:  # noqa: N802
        self._normalise(op)

    def _A(self, op: SegmentOp) -> None:  # noqa: N802
        if self.full_again:
            self._project(op)
        for number, core in self._cores(op, again=True):
            self._activate(op, number, core)
            self._hold(op, f"saved{number}", core.saved)
            self._free(op, f"memo{number}")

    def _D(self, op: SegmentOp) -> None:  # noqa: N802
        for number, core in enumerate(self.sizes.branches(op)):
            self._spike(core.o + core.z + core.backward)  # gradients of o and z
            self._hold(op, f"g_z{number}", core.z, "C", "operand")
            self._free(op, f"saved{number}", f"z{number}")

    def _C(self, op: SegmentOp) -> None:  # noqa: N802
        if op.part == 0:
            self._hold(op, "g_n", self.sizes.full(op))
        if op.part == self.graph.parts(op.site, "C") - 1:
            self._free(op, "g_z0", "g_z1", holder="C")
            self._free(op, "logits", holder="loss")

    def _W(self, op: SegmentOp) -> None:  # noqa: N802
        if op.site == "embed":
            self._spike(2 * self.sizes.full(op))
        last = op.part == self.graph.parts(op.site, "W") - 1
        if op.site in LAYERS and op.part % 2 == 0:
            self._free(op, f"o{op.part // 2}")
        if op.site in LAYERS and op.part % 2:
            self._free(op, f"g_z{op.part // 2}", holder="operand")
        if last:
            self._free(op, "logits", "g", "g_full", holder="operand")
            self._free(op, "n", "full", holder="input")

    def _J(self, op: SegmentOp) -> None:  # noqa: N802
        stream, before = self.sizes.stream(op), self._before(op)
        normed = op.site not in ("down", "up", "leave")
        self._spike(stream * (4 if self.sizes.spec.family == "llama" and not self.sizes.fused and normed else 1))
        self._hold(before, "g", stream, "h", *(() if self.sizes.sharded > 1 else ("operand",)))
        self._free(op, "h", "n_saved", "g_n", "g_shard")
        self._free(op, "n", holder="norm")
        self._free(op, "g", holder="h")
