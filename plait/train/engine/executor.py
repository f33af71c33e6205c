"""Execute instruction lists on one rank: the only module in which the model's mathematics meets
collectives.

An op is a method of its segment's class (``segment``, ``sublayers``, ``vocabulary``), looked up
once when a list is compiled to a programme. Segments are detached from each other. Autograd sees
only the inside of a segment (``join``, ``norm``, ``core``); matrix products are called by name. So
the list alone decides when an input gradient, a weight gradient or a collective runs. Tests hold
that every legal list gives the results of unsharded training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

import torch
from torch import Tensor

from plait.core.parallel.strategy import Strategy
from plait.core.record.ring import RecordKind
from plait.core.step.orders.overlap import Load, SegmentLists, check, segment_lists
from plait.core.step.schedule import PHASES
from plait.core.step.segments import Action, Collective, Kind, Phase, SegmentOp
from plait.core.step.traffic import UnitAction, UnitOp, with_units
from plait.train.comm.flight import LoggedWire
from plait.train.comm.wire import Exchanger, Handle, NullWire, Splits, Wire, started
from plait.train.engine.chain import SEGMENT_CLASSES, begin, pack
from plait.train.engine.compute_streams import ComputeStreams
from plait.train.engine.gradients import Gradients
from plait.train.engine.inflight import InFlight, Key, MicroBatch
from plait.train.engine.segment import Buffers, Segment, StageContext
from plait.train.engine.shards import Shards
from plait.train.engine.vocabulary import Head
from plait.train.machine.device import RankDevice
from plait.train.model.dropout import DropoutKey
from plait.train.model.expert_layer import ExpertLayer
from plait.train.model.kernels import EAGER, Kernels
from plait.train.model.sublayers import Attention
from plait.train.model.transformer import Transformer
from plait.train.record.recorder import Recorder

Result = TypeVar("Result")


def nothing() -> None:
    """Do nothing: the default for ``then`` of a phase, for callers that gather no sharded unit
    ahead."""


@dataclass(frozen=True)
class RunningPhase:
    """One phase of one micro-batch, while it runs.

    last: True if this is the step's last such phase of the stage, so that gradients reduced in it
    are complete. then: starts to gather the units that the next phase reads. handles: collectives
    in flight.
    """

    segments: Mapping[Key, Segment]
    last: bool = False
    then: Callable[[], object] = nothing
    handles: dict[SegmentOp, Handle] = field(default_factory=dict)


@dataclass(frozen=True)
class CollectiveStart:
    """Callable that starts an op's collective. buffers: returns the collective's buffers,
    allocating them if needed. splits: returns the sizes of an exchange of unequal parts."""

    op: SegmentOp
    buffers: Callable[[RunningPhase], Buffers]
    collective: Collective
    wire: Exchanger
    splits: Callable[[RunningPhase], Splits] | None = None

    def __call__(self, turn: RunningPhase) -> None:
        """Start the collective in the phase ``turn``."""
        self.send(turn, *self.buffers(turn))

    def send(self, turn: RunningPhase, result: Tensor, source: Tensor) -> None:
        """Start the collective on the given buffers."""
        kind = self.splits(turn) if self.splits else self.collective
        turn.handles[self.op] = started(self.wire, kind, result, source)


Programme = list[tuple[Action | UnitAction, Callable[[RunningPhase], object]]]
"""An instruction list, each action with the function that executes it."""
Acts = tuple[tuple[Callable[[RunningPhase], object], int, int], ...]
"""A programme's functions, each with the kind and name of its record; 0 and 0 if nothing is
recorded."""


@dataclass(frozen=True)
class RankContext:
    """The rank-wide objects of an executor. recorder: None if nothing is recorded. seed: of
    dropout."""

    device: RankDevice
    recorder: Recorder | None = None
    seed: int = 0


class SegmentExecutor:
    """Executes a stage's instruction lists on one rank: phase ``step`` for a whole model, or the
    phases that a pipeline schedule names.

    Any number of micro-batches may be in flight between phases; one phase of one micro-batch runs
    at a time.
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
        """Run one whole micro-batch, add to the gradients, and return the scaled loss of its tokens
        (0-d, equal on all ranks)."""
        state = self.begin(batch)
        self.phase("step", state)
        loss = self.loss(state)
        self.step_ended()
        return loss

    @torch.no_grad()
    def begin(self, batch: MicroBatch, entering: Mapping[str, Tensor] | None = None) -> InFlight:
        """Upload a micro-batch and return its in-flight state. entering: tensors received from
        other stages."""
        there = self.device.upload(pack(self._shared, batch))
        return begin(self._shared, batch, there, self._dropout(batch), entering or {}, batch.scale)

    def _dropout(self, batch: MicroBatch) -> DropoutKey | None:
        spec, training = self.model.spec, self.model.training and self.gradients is not None
        dropping = training and (spec.dropout or spec.attention_dropout)
        return DropoutKey(self.seed, batch.step) if dropping else None

    def prefetch(self, phase: Phase) -> None:
        """Start to gather the units that a phase reads first, if gathers overlap computation."""
        if self.shards is None or not self.strategy.hides_shards(forward=PHASES[phase].forward):
            return
        for action, _ in self.programmes[phase]:
            if not isinstance(action, UnitAction) or action.op.verb != "gather":
                break
            self.shards.gather(action.op)

    @torch.no_grad()
    def phase(self, phase: Phase, state: InFlight, *, last: bool = False, then: Callable[[], object] = nothing) -> None:
        """Run one phase of a micro-batch.

        last: True if this is the step's last such phase of the stage, after which its gradients are
        complete. then: starts to gather the units that run next; called as soon as a buffer is
        free.
        """
        turn = RunningPhase(state.segments, last, then)
        self._do(self._acts[phase], turn)
        assert not turn.handles, f"collectives never awaited: {list(turn.handles)}"

    def step_ended(self) -> None:
        """Called after a step, when no micro-batch is in flight and all transfers are complete."""

    def _do(self, acts: Acts, turn: RunningPhase) -> None:
        if self.recorder is None:
            for act, _, _ in acts:
                act(turn)
        else:
            self.recorder.run(acts, turn)

    def _entry(self, action: Action | UnitAction) -> tuple[int, int]:
        """Return kind and name of an action's record; (0, 0) if the action records itself or there
        is no recorder."""
        if self.recorder is None or isinstance(action, UnitAction) or action.verb == "start":
            return 0, 0  # unit actions and collectives record themselves
        return int(RecordKind.WAIT if action.verb == "wait" else RecordKind.COMPUTE), self.recorder.name_of(action.op)

    def loss(self, state: InFlight) -> Tensor:
        """Return the scaled loss of a micro-batch's tokens after its forward pass; 0-d, on the
        stage with the head."""
        return torch.stack([one.total for one in state.segments.values() if isinstance(one, Head)]).sum()

    def token_losses(self, state: InFlight) -> Tensor:
        """Return the loss of each token of a micro-batch after an evaluation's forward pass: [B,
        S], on the stage with the head."""
        return torch.cat([one.losses.t() for one in state.segments.values() if isinstance(one, Head)])

    # ---- from actions to steps ----

    def _step(self, action: Action | UnitAction, then: Action | UnitAction | None) -> Callable[[RunningPhase], object]:
        """Return the function that executes an action. then: the action that follows in the
        list."""
        if isinstance(action, UnitAction):
            return self._unit(action.op)
        op = action.op
        if action.verb == "wait":
            return lambda turn: turn.handles.pop(op).wait()
        if action.verb == "start":
            return self._start(op, awaited=then == Action("wait", op))
        kind = SEGMENT_CLASSES[op.site]
        return _bound(op, kind.runs, kind.run_parts)

    def _start(self, op: SegmentOp, *, awaited: bool) -> CollectiveStart:
        """Return the function that starts an op's collective. awaited: True if the list's next
        action waits for that collective."""
        collective = self.graph.collective(op)
        assert collective is not None, f"{op} has no collective"
        wire = self._wire(op, collective)
        if isinstance(wire, LoggedWire):
            wire = wire.named(op, watched=not awaited)
        owner = op
        if op.kind == Kind.NORM_BACKWARD:  # the buffers are those of the previous segment, which received the gradient
            site, layer = self.graph.before(op)
            owner = op._replace(site=site, layer=layer)
        kind = SEGMENT_CLASSES[owner.site]
        splits = _bound(op, kind.splits, {}) if op.kind in kind.splits and owner is op else None
        buffers = _bound(owner, kind.sends, kind.send_parts)
        return CollectiveStart(op, buffers, collective, cast("Exchanger", wire), splits)

    def _wire(self, op: SegmentOp, collective: Collective) -> Wire:
        """Return the process group of an op's collective: ranks that share a sequence, or the
        tensor-parallel group."""
        if op.site == "moe" and self.graph.experts and self.graph.experts.collective(op.kind):
            layer = self.model.sublayers[op.site, op.layer]
            assert isinstance(layer, ExpertLayer)
            group = layer.group
            wires = {Kind.ROUTER: group.sequence, Kind.ROUTE_COUNTS: group.counted}
            wire = wires.get(op.kind, group.ep)
            return NullWire(wire.size, wire.rank) if self.strategy.overlap == "no-communication" else wire
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
    """Return an executor of the strategy's instruction lists for ``phases``; without ``gradients``
    it only evaluates."""
    lists = segment_lists(model.spec, strategy, model.stage, load, phases, backward=gradients is not None)
    used = NullWire(strategy.tp, model.tp_rank) if strategy.overlap == "no-communication" else wire
    kind = SegmentExecutor
    mixed = {"B", "I"} <= set(phases)  # which backward phases of a slot to capture is not known in time
    if strategy.cuda_graphs and here.device.captures and gradients is not None and not mixed:
        from plait.train.engine.graphs import GraphedExecutor

        kind = GraphedExecutor
    return kind(model, lists, used, strategy, here, gradients=gradients, shards=shards)


def kernels_of(strategy: Strategy) -> Kernels:
    """Return the kernels between matrix products: compiled, or op by op."""
    if not strategy.compile:
        return EAGER
    from plait.train.model.compiled import compiled  # the compiler takes seconds to import

    return compiled()


def _bound(
    op: SegmentOp,
    whole: Mapping[Kind, Callable[[Segment], Result]],
    parts: Mapping[Kind, Callable[[Segment, int], Result]],
) -> Callable[[RunningPhase], Result]:
    """Return a function that runs an op's method on the op's segment (and part) of the running
    phase."""
    key: Key = (op.site, op.layer, op.slice)
    part = op.part
    if op.kind in parts:
        in_part = parts[op.kind]
        return lambda turn: in_part(turn.segments[key], part)
    function = whole[op.kind]
    return lambda turn: function(turn.segments[key])
