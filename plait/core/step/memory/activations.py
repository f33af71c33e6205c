"""Activation memory of one micro-batch on one stage of a rank.

A trace runs the executor's own instruction list of segment ops, with the tensors that ops make and
read according to ``plait.core.step.tensors``. So slices, recomputation, sequence parallelism and
the phases of a pipeline need no formulas of their own. Every tensor counts from its allocation to
its release, together with the working memory of the running op. Sizes are numbers, or arrays of
many strategies. For the micro-batches of a pipeline see ``plait.core.step.memory.pipeline_memory``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, TypeAlias

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.memory.sizes import RankLoad, Sizes, larger
from plait.core.step.ops import AGAIN_KINDS, FORWARD_KINDS, Kind, Number, Path, paths_of
from plait.core.step.orders.overlap import known_order
from plait.core.step.orders.segment_costs import segment_costs
from plait.core.step.segments import LAYERS, Action, Phase, SegmentGraph, SegmentOp, Site
from plait.core.step.stages import Stage
from plait.core.step.tensors import BRANCH_OWN, BranchStep, tensor_steps


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one stage; numbers or arrays.

    kept: between its forward and its backward. forward_peak, backward_peak: the peaks of both.
    held: with a split backward, between its two parts; weight_peak: the peak of the second part.
    staging: kept by gloo's reduce-scatters from step to step, in none of the other fields.
    """

    kept: Number
    forward_peak: Number
    backward_peak: Number
    held: Number = 0
    weight_peak: Number = 0
    staging: Number = 0

    @staticmethod
    def of(phases: Sequence[tuple[Number, Number]], staging: int = 0) -> Activations:
        """Return the activations from the result of ``MemoryTrace.phases``; 0 for phases that did
        not run."""
        (kept, forward), (held, backward), (_, weight) = (*phases, (0, 0), (0, 0))[:3]
        return Activations(kept, forward, backward, held, weight, staging)

    def peak(self, alive: int = 1) -> int:
        """Return the peak bytes of a stage while ``alive`` micro-batches are alive at once."""
        return (alive - 1) * self.kept + max(self.forward_peak, self.backward_peak, self.weight_peak)


@dataclass(frozen=True, kw_only=True)
class TracedBatch:
    """A micro-batch on a rank of a stage, whose memory is traced. batch: sequences. sequence:
    tokens of each. itemsize: bytes of a number. phases: ``step``, ``F B``, or ``F I W``. gpu: True
    if each rank has a GPU, whose kernels keep and use other memory."""

    batch: int
    sequence: int
    itemsize: int
    phases: tuple[Phase, ...] = ("F", "B")
    gpu: bool = False


def activations(spec: ModelSpec, strategy: Strategy, stage: Stage, micro: TracedBatch) -> Activations:
    """Return the activations of a micro-batch on one rank of a stage."""
    batch, sequence = micro.batch, micro.sequence
    costs = segment_costs(spec, strategy, batch=batch, sequence=sequence)
    graph = SegmentGraph.of(spec, strategy, stage)
    sizes = Sizes(spec, RankLoad.of(strategy, batch=batch, sequence=sequence), micro.itemsize, gpu=micro.gpu)
    orders = [known_order(replace(graph, phase=phase), strategy.overlap, costs, batch) for phase in micro.phases]
    return Activations.of(MemoryTrace(sizes, graph).phases(orders), _staging(sizes, graph, orders))


def _staging(sizes: Sizes, graph: SegmentGraph, orders: Iterable[Sequence[Action]]) -> int:
    """Return the bytes of staging buffers: one for each reduce-scatter in flight, as many of one
    size as are in flight at once."""
    if not graph.sequence_parallel:
        return 0
    flying, spare = Counter[int](), Counter[int]()
    for verb, op in (action for order in orders for action in order):
        if verb == "run" or graph.collective(op) != "reduce_scatter":
            continue
        size = sizes.of("", op.site, graph.level(sizes.spec, op.site, op.layer), op.slice).full
        size //= graph.p2 if op.kind == Kind.ROW_FORWARD and op.site in LAYERS else 1
        flying[size] += 1 if verb == "start" else -1
        spare[size] = max(spare[size], flying[size])
    return sum(size * count for size, count in spare.items())


Held = tuple[int, int, str]
"""A live tensor: (index of its segment, slice, name)."""


class MemoryTrace:
    """Memory trace: runs instruction lists on sizes instead of tensors. now: live bytes; peak: the
    largest ``now`` of a phase. live: for every live tensor, (its bytes, steps that have yet to read
    it)."""

    def __init__(self, sizes: Sizes, graph: SegmentGraph) -> None:
        self.sizes, self.graph = sizes, graph
        tensors = StageTensors(graph, dropped=bool(sizes.spec.dropout), within=bool(sizes.spec.letters.qk_norm))
        self._programs = {
            segment: (index, tensors.program(index), graph.level(sizes.spec, *segment))
            for segment, index in graph.segment_index.items()
        }
        self.live: dict[Held, tuple[Number, int]] = {}
        self._crossing: list[Held] = []
        self._rises = False
        # Integers of 8 bytes: token ids, targets; which rows are sent, and where they arrive.
        self.now: Number = sizes.rank.tokens * sum(sizes.rank.shares) * (32 if graph.embeds else 16)
        self.peak = self.now

    def phases(self, orders: Iterable[Sequence[Action]]) -> list[tuple[Number, Number]]:
        """Return (live bytes after the phase, peak within the phase) for each phase."""
        found = list[tuple[Number, Number]]()
        for order in orders:
            peak = self.run(order)
            for held in self._crossing:  # the pipeline counts these from now on
                self._read(held)
            self._crossing.clear()
            found.append((self.now, peak))
        return found

    def run(self, actions: Sequence[Action]) -> Number:
        """Run one phase and return its peak."""
        self.peak, self._rises = self.now, False
        for verb, op in actions:
            if verb == "wait":
                continue
            index, program, level = self._programs[op.site, op.layer]
            for step in program.get((op.kind, op.part, verb == "start"), ()):
                down = self.graph.segment_index.get(("down", op.layer), -1 - op.layer) if op.site == "up" else 0
                self._run(step, level, op.site, op.slice, (index, index - 1, down))
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
            self.now = self.now + made  # not in place: sizes may be arrays
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
        """Record the live bytes as a possible peak if they have grown, before they shrink."""
        if self._rises:
            self.peak = larger(self.peak, self.now)
            self._rises = False


Owner: TypeAlias = int
"""Segment that owns a tensor: ``OWN``, the op's own; ``BEFORE``, the previous one; ``DOWN``, the
down that belongs to an up."""
OWN, BEFORE, DOWN = range(3)
Name: TypeAlias = tuple[Owner, str]
Event: TypeAlias = tuple[Kind, int, bool]
"""(kind of an op, part, True for the start of its collective)."""
OTHER_END: Mapping[Site, Site] = {"down": "up", "up": "down"}
"""Other end of a skip connection."""


_JOINS, _BACK = frozenset((Kind.NORM,)), frozenset((Kind.NORM_RECOMPUTE, Kind.NORM_BACKWARD))
_REST = frozenset(Kind) - FORWARD_KINDS - AGAIN_KINDS


class Made(NamedTuple):
    """A tensor that a step makes. size: the name of its size. crosses: it also stays alive until
    the phase ends. readers: number of steps that read it."""

    name: Name
    size: str
    crosses: bool
    readers: int = 0


class TensorUse(NamedTuple):
    """One row of the tensor table, for one op: its working memory, then the tensors it makes, then
    those it reads or drops."""

    event: Event
    branch: Path
    work: str
    makes: tuple[Made, ...]
    reads: tuple[Name, ...]
    drops: tuple[Name, ...]


class _Readers(NamedTuple):
    """Tensors of a segment. names: all names. of: the number of steps that read a tensor, by
    (segment of the step that makes it, number of that step, name)."""

    names: Set[str]
    of: Mapping[tuple[Owner, int, str], int]


Program: TypeAlias = Mapping[Event, tuple[TensorUse, ...]]


@cache
def _known() -> dict[object, Program]:
    return {}


class StageTensors:
    """Tensors of all segments of a stage. dropped: the model has dropout. within: it has norms
    inside attention."""

    def __init__(self, graph: SegmentGraph, *, dropped: bool, within: bool) -> None:
        self.graph, self.dropped, self.within = replace(graph, phase="step"), dropped, within
        self._rows: dict[int, list[TensorUse]] = {}

    def program(self, index: int) -> Program:
        """Return the steps of every op of a segment. Segments with equal neighbours share one
        result."""
        graph, known = self.graph, _known()
        around = graph.segments[max(0, index - 1) : index + 2]
        alike = [(site, graph.recomputed_kinds(site, layer), self._apart(site, layer)) for site, layer in around]
        facts = graph.p2, graph.sequence_parallel, graph.communicates, graph.attention, graph.experts, graph.recompute
        key = index == 0, tuple(alike), facts, self.dropped, self.within
        if key not in known:
            known[key] = self._program(index)
        return known[key]

    def _program(self, index: int) -> Program:
        owners = self._readers(index), self._readers(index - 1) if index else _Readers(set(), {})
        found = dict[Event, tuple[TensorUse, ...]]()
        for number, step in enumerate(self._steps(index)):
            # If a skip crosses stages, no step of this stage reads it; else the norm of the down does.
            counted = (
                made._replace(readers=not made.crosses if owner == DOWN else owners[owner].of[owner, number, name])
                for made in step.makes
                for owner, name in [made.name]
            )
            makes = tuple(made for made in counted if made.readers or made.crosses)
            reads = tuple((owner, name) for owner, told in step.reads for name in _first(told, owners[owner].names))
            found[step.event] = (*found.get(step.event, ()), step._replace(makes=makes, reads=reads))
        return found

    def _readers(self, index: int) -> _Readers:
        """Count the readers of a segment's tensors, as if one slice alone ran.

        The order is the segment's forward, the next segment's norm, the segment's recomputation,
        the next segment's recomputed norm and its gradient, the segment's backward.
        """
        site, layer = self.graph.segments[index]
        own = [(OWN, number, step) for number, step in enumerate(self._steps(index))]
        after = [(BEFORE, number, step) for number, step in enumerate(self._steps(index + 1))]
        line = [one for part, kinds in ((own, FORWARD_KINDS), (after, _JOINS), (own, AGAIN_KINDS), (after, _BACK),
                (own, _REST)) for one in part if one[2].event[0] in kinds]  # fmt: skip
        names = {name for owner, _, step in line for (of, name), *_ in step.makes if of == owner}
        if site == "down" and not self._apart(site, layer):
            names.add("g_skip")  # made by the up
        count, last = dict[tuple[Owner, int, str], int](), dict[str, tuple[Owner, int, str]]()
        for owner, number, step in line:
            read = [name for of, told in (*step.reads, *step.drops) if of == owner for name in _first(told, names)]
            for name in read:
                if name in last:
                    count[last[name]] += 1
            for name in (name for (of, name), *_ in step.makes if of == owner):
                last[name] = owner, number, name
                count[last[name]] = 0
        return _Readers(names, count)

    # ---- rows ----

    def _steps(self, index: int) -> list[TensorUse]:
        """Return the steps of all ops of a segment, in the order in which one slice alone would run
        them. Readers are not yet counted, and reads of ``a|b`` are not yet resolved."""
        if index not in self._rows:
            self._rows[index] = list(self._tensor_uses(index)) if index < len(self.graph.segments) else []
        return self._rows[index]

    def _tensor_uses(self, index: int) -> Iterator[TensorUse]:
        (site, layer), graph = self.graph.segments[index], self.graph
        chain = [(kind, part) for kind in graph.kinds(site, layer) for part in range(graph.parts(site, kind))]
        if shared := graph.shared(site):
            chain = shared.sorted(chain)
        of_segment, dense = self._about_segment(index), site != "moe" or bool(graph.experts and graph.experts.shared)
        of_branch = {branch: of_segment | self._about_branch(site, branch) for branch in ("", *paths_of(site))}
        for kind, part in chain:
            of_part = _about_part(part, graph.parts(site, kind))
            sends = graph.collective(SegmentOp(site, layer, kind, 0, part)) is not None
            for sent in (False, True)[: 1 + sends]:
                for one in tensor_steps(site, kind, sent=sent, selective=graph.recompute == "selective"):
                    if (kind == Kind.WGRAD and one.number != part // 2) or (one.branch == "mlp" and not dense):
                        continue
                    about = of_branch[one.branch]
                    if all((word in about or word in of_part) == holds for word, holds in one.when):
                        yield self._step((kind, part, sent), one)

    def _step(self, event: Event, branch_step: BranchStep) -> TensorUse:
        ring, (_, part, _) = self.graph.attention.ring if self.graph.attention else 1, event
        numbers = {"part": part, "before": part - 1, "next": part + 1, "end": ring - 1, "near": ring - 2}

        def named(word: str) -> Name:
            owner = BEFORE if word[0] == "<" else DOWN if word.startswith("down.") else OWN
            name = word.removeprefix("<").removeprefix("down.").format_map(numbers)
            return owner, f"{name}{branch_step.number}" if name in BRANCH_OWN else name

        def made(word: str) -> Made:
            told, _, size = word.partition("=")
            name = told.removesuffix("!")
            return Made(named(name), size or name, crosses=name != told)

        row = branch_step.row
        return TensorUse(
            event, branch_step.branch, row.work, tuple(map(made, row.makes.split())),
            tuple(map(named, row.reads.split())),
            tuple(map(named, row.drops.split())),
        )  # fmt: skip

    # ---- flags of ``tensors.Word`` that are true ----

    def _about_segment(self, index: int) -> set[str]:
        graph, (site, layer) = self.graph, self.graph.segments[index]
        before, level = graph.segments[index - 1] if index else ("", 0)
        return _true(
            normed=site in (*LAYERS, "head"), joins=before in (*LAYERS, "embed"), looked_up=before == "embed",
            embeds=site == "embed", dropped=self.dropped, leaves=site == "leave",
            ends=site == "leave" or before == "enter", apart=self._apart(site, layer),
            scattered=graph.sequence_parallel, again=Kind.CORE_RECOMPUTE in graph.recomputed_kinds(site, layer),
            within=self.within,
            twice=Kind.ROW_RECOMPUTE in graph.recomputed_kinds(site, layer), rejoins=graph.readds_stream(site, layer),
            anew=before in ("mlp", "moe") and graph.readds_stream(before, level),
        )  # fmt: skip

    def _about_branch(self, site: Site, branch: Path) -> set[str]:
        shared = self.graph.shared(site) if branch == "attn" else None
        if branch == "experts" and self.graph.experts:
            return _true(exchanged=self.graph.experts.ep > 1)
        if shared is None:
            return {"alone"}
        return _true(shared=True, exchanged=shared.ulysses > 1, ring=shared.ring > 1)

    def _apart(self, site: Site, layer: int) -> bool:
        return site in OTHER_END and (OTHER_END[site], layer) not in self.graph.segment_index


@cache
def _about_part(part: int, parts: int) -> set[str]:
    return _true(
        of_second=part % 2 == 0, of_first=part % 2 == 1, first=part == 0, last=part == parts - 1,
        middle=0 < part < parts - 1, later=part > 1, next_to_last=part == parts - 2,
    )  # fmt: skip


def _true(**words: bool) -> set[str]:
    return {word for word, holds in words.items() if holds}


def _first(alternatives: str, names: Set[str]) -> list[str]:
    """Return the first name of ``a|b`` that exists, as a list of at most one."""
    return [name for name in alternatives.split("|") if name in names][:1]
