"""Runs segment lists: the only place where the model's mathematics meets the wire.

What an op does is a method of its segment (``segment``, ``sublayers``, ``vocabulary``, ``ends``), found once
when a list becomes a programme. Segments are detached from each other: autograd sees only what lies inside
one (``join`` and ``norm``; ``core``), the linears are called by name, so that the list alone decides when an
input gradient, a weight gradient or a collective happens. Equal to unsharded training by test, for any legal
list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from plait.core.parallel.strategy import Strategy
from plait.core.record.ring import RecordKind
from plait.core.step.orders.overlap import Load, SegmentLists, segment_lists
from plait.core.step.orders.segment_lists import check
from plait.core.step.schedule import PHASES
from plait.core.step.segments import Action, Collective, Kind, Phase, SegmentOp
from plait.core.step.units import UnitAction, UnitOp, with_units
from plait.train.comm.flight import LoggedWire
from plait.train.comm.wire import Handle, NullWire, Wire
from plait.train.engine.chain import KINDS, begin, pack
from plait.train.engine.compute_streams import ComputeStreams
from plait.train.engine.gradients import Gradients
from plait.train.engine.inflight import InFlight, Key, MicroBatch
from plait.train.engine.segment import Buffers, Segment, StageContext
from plait.train.engine.shards import Shards
from plait.train.engine.vocabulary import Head
from plait.train.machine.device import RankDevice
from plait.train.model.dropout import DropoutKey
from plait.train.model.kernels import EAGER, Kernels
from plait.train.model.sublayers import Attention
from plait.train.model.transformer import Transformer
from plait.train.record.recorder import Recorder

Found = TypeVar("Found")


def nothing() -> None:
    """What runs next reads nothing that could be gathered by now."""


@dataclass(frozen=True)
class RunningPhase:
    """One phase of one micro-batch, while it runs.

    last: whether it is the step's last of its stage, so that gradients reduced in it are complete. then:
    starts to gather what runs next. handles: collectives under way.
    """

    segments: Mapping[Key, Segment]
    last: bool = False
    then: Callable[[], object] = nothing
    handles: dict[SegmentOp, Handle] = field(default_factory=dict)


@dataclass(frozen=True)
class CollectiveStart:
    """Starts an op's collective. buffers: finds, or makes, what it works on."""

    op: SegmentOp
    buffers: Callable[[RunningPhase], Buffers]
    collective: Collective
    wire: Wire

    def __call__(self, turn: RunningPhase) -> None:
        """In this phase."""
        self.send(turn, *self.buffers(turn))

    def send(self, turn: RunningPhase, result: Tensor, source: Tensor) -> None:
        """The same, on these."""
        turn.handles[self.op] = self.wire.start(self.collective, result, source)


Programme = list[tuple[Action | UnitAction, Callable[[RunningPhase], object]]]
"""What is done in which order, and how."""
Acts = tuple[tuple[Callable[[RunningPhase], object], int, int], ...]
"""The same, with kind and name of the record of each; 0 and 0 for none."""


@dataclass(frozen=True)
class RankContext:
    """What everything on a rank works with. recorder: None if nothing is recorded. seed: of dropout."""

    device: RankDevice
    recorder: Recorder | None = None
    seed: int = 0


class SegmentExecutor:
    """Executes a stage's lists on one rank: phase ``step`` for a whole model, or the phases that a pipeline's
    schedule names.

    Any number of micro-batches may be in flight between phases; one phase of one micro-batch runs at a time.
    """

    def __init__(
        self,
        model: Transformer,
        lists: SegmentLists,
        wire: Wire,
        strategy: Strategy,
        here: RankContext,
        *,
        gradients: Gradients | None,
        shards: Shards | None = None,
    ) -> None:
        self.model, self.graph, self.wire, self.strategy = model, lists.graph, wire, strategy
        self.gradients, self.shards = gradients, shards
        self.device, self.recorder, self.seed = here.device, here.recorder, here.seed
        self._shared = StageContext(model, self.graph, wire, gradients, kernels_of(strategy))
        self.programmes: dict[Phase, Programme] = {}
        self._acts: dict[Phase, Acts] = {}
        graph = self.graph
        for phase, actions in lists.phases.items():
            check(replace(graph, phase=phase), actions)
            listed = with_units(graph, actions, model.units, strategy) if shards else actions
            follows = [*listed[1:], None]
            self.programmes[phase] = [
                (action, self._step(action, then)) for action, then in zip(listed, follows, strict=True)
            ]
            self._acts[phase] = tuple((step, *self._entry(action)) for action, step in self.programmes[phase])
            if strategy.streams > 1:
                pool = ComputeStreams(self.device, strategy.streams)
                self._acts[phase] = tuple(pool.spread(replace(graph, phase=phase), listed, self._acts[phase]))

    # ---- micro-batches ----

    def run(self, batch: MicroBatch) -> Tensor:
        """One micro-batch, whole; adds into the gradients, returns the scaled loss of its tokens (0-d, equal
        on all ranks)."""
        state = self.begin(batch)
        self.phase("step", state)
        loss = self.loss(state)
        self.step_ended()
        return loss

    @torch.no_grad()
    def begin(self, batch: MicroBatch, entering: Mapping[str, Tensor] | None = None) -> InFlight:
        """Take a micro-batch in. entering: what other stages sent."""
        there = self.device.upload(pack(self._shared, batch))
        return begin(self._shared, batch, there, self._dropout(batch), entering or {}, batch.scale)

    def _dropout(self, batch: MicroBatch) -> DropoutKey | None:
        spec, training = self.model.spec, self.model.training and self.gradients is not None
        dropping = training and (spec.dropout or spec.attention_dropout)
        return DropoutKey(self.seed, batch.step) if dropping else None

    def ahead(self, phase: Phase) -> None:
        """Start to gather what a phase reads first, where that overlaps computation."""
        if self.shards is None or not self.strategy.hides_shards(forward=PHASES[phase].forward):
            return
        for action, _ in self.programmes[phase]:
            if not isinstance(action, UnitAction) or action.op.verb != "gather":
                break
            self.shards.gather(action.op)

    @torch.no_grad()
    def phase(self, phase: Phase, state: InFlight, *, last: bool = False, then: Callable[[], object] = nothing) -> None:
        """Run one phase of a micro-batch.

        last: whether it is the step's last of this stage, so that its gradients are complete. then: starts to
        gather what runs next; called as soon as there is room.
        """
        turn = RunningPhase(state.segments, last, then)
        self._do(self._acts[phase], turn)
        assert not turn.handles, f"collectives never awaited: {list(turn.handles)}"

    def step_ended(self) -> None:
        """Called after a step, when none of its micro-batches is in flight and everything is sent."""

    def _do(self, acts: Acts, turn: RunningPhase) -> None:
        if self.recorder is None:
            for act, _, _ in acts:
                act(turn)
        else:
            self.recorder.run(acts, turn)

    def _entry(self, action: Action | UnitAction) -> tuple[int, int]:
        """What the recorder is told of an action: kind and name."""
        if self.recorder is None or isinstance(action, UnitAction) or action.verb == "start":
            return 0, 0  # these are recorded where they happen
        return int(RecordKind.WAIT if action.verb == "wait" else RecordKind.COMPUTE), self.recorder.name_of(action.op)

    def loss(self, state: InFlight) -> Tensor:
        """The scaled loss of a micro-batch's tokens, after its forward; 0-d, on the stage that has the
        head."""
        return torch.stack([one.total for one in state.segments.values() if isinstance(one, Head)]).sum()

    def token_losses(self, state: InFlight) -> Tensor:
        """The loss of each token of a micro-batch, after the forward of an evaluation: [B, S], on the stage
        that has the head."""
        return torch.cat([one.losses.t() for one in state.segments.values() if isinstance(one, Head)])

    # ---- from actions to steps ----

    def _step(self, action: Action | UnitAction, then: Action | UnitAction | None) -> Callable[[RunningPhase], object]:
        """then: what follows."""
        if isinstance(action, UnitAction):
            return self._unit(action.op)
        op = action.op
        if action.verb == "wait":
            return lambda turn: turn.handles.pop(op).wait()
        if action.verb == "start":
            return self._start(op, awaited=then == Action("wait", op))
        kind = KINDS[op.site]
        return _bound(op, kind.runs, kind.run_parts)

    def _start(self, op: SegmentOp, *, awaited: bool) -> CollectiveStart:
        """Start an op's collective. awaited: at once."""
        collective = self.graph.collective(op)
        assert collective is not None, f"{op} has no collective"
        wire = self._wire(op, collective)
        if isinstance(wire, LoggedWire):
            wire = wire.named(op, watched=not awaited)
        owner = op
        if op.kind == Kind.NORM_GRAD:  # it has given the segment before a gradient
            site, layer = self.graph.before(op)
            owner = op._replace(site=site, layer=layer)
        kind = KINDS[owner.site]
        return CollectiveStart(op, _bound(owner, kind.sends, kind.send_parts), collective, wire)

    def _wire(self, op: SegmentOp, collective: Collective) -> Wire:
        """Over which an op's collective goes: of those who share a sequence, or of tensor parallelism."""
        if collective not in ("all_to_all", "rotate"):
            return self.wire
        attention = self.model.sublayers[op.site, op.layer].branches[0]
        assert isinstance(attention, Attention)
        wire = attention.sequence.ulysses if collective == "all_to_all" else attention.sequence.ring
        return NullWire(wire.size, wire.rank) if self.strategy.overlap == "no-communication" else wire

    def _unit(self, op: UnitOp) -> Callable[[RunningPhase], object]:
        shards = self.shards
        assert shards is not None
        if op.verb == "next":
            return lambda turn: turn.then()
        if op.verb == "close":
            return lambda turn: shards.close(op, last=turn.last)
        act = shards.acts[op.verb]
        return lambda _: act(op)


def make_executor(
    model: Transformer,
    strategy: Strategy,
    wire: Wire,
    load: Load,
    here: RankContext,
    *,
    gradients: Gradients | None,
    phases: Sequence[Phase] = ("step",),
    shards: Shards | None = None,
) -> SegmentExecutor:
    """An executor of the strategy's lists for the phases given; without ``gradients`` it only evaluates."""
    lists = segment_lists(model.spec, strategy, model.stage, load, phases, backward=gradients is not None)
    used = NullWire(strategy.tp, model.tp_rank) if strategy.overlap == "no-communication" else wire
    kind = SegmentExecutor
    mixed = {"B", "I"} <= set(phases)  # what of a slot's backward would have to be captured is not known in time
    if strategy.cuda_graphs and here.device.captures and gradients is not None and not mixed:
        from plait.train.engine.graphs import GraphedExecutor

        kind = GraphedExecutor
    return kind(model, lists, used, strategy, here, gradients=gradients, shards=shards)


def kernels_of(strategy: Strategy) -> Kernels:
    """What lies between matrix products: compiled, or op by op."""
    if not strategy.compile:
        return EAGER
    from plait.train.model.compiled import compiled  # the compiler takes seconds to import

    return compiled()


def _bound(
    op: SegmentOp,
    whole: Mapping[Kind, Callable[[Segment], Found]],
    parts: Mapping[Kind, Callable[[Segment, int], Found]],
) -> Callable[[RunningPhase], Found]:
    """The function that a kind of segment has for an op, of the segment and part that it is about."""
    key: Key = (op.site, op.layer, op.slice)
    part = op.part
    if op.kind in parts:
        in_part = parts[op.kind]
        return lambda turn: in_part(turn.segments[key], part)
    function = whole[op.kind]
    return lambda turn: function(turn.segments[key])
