"""CUDA graphs: an executor whose computation is captured once and replayed, so that the host
submits many kernels with one call.

A phase's instruction list is split into stretches of computation between starts and waits of
collectives. Those remain calls of the host: any process group and any recorder works, and no
communicator is captured. ``GraphedExecutor`` describes memory and the order of capture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from plait.core.step.schedule import PHASES
from plait.core.step.segments import Kind, Phase, SegmentOp
from plait.core.step.traffic import UnitAction
from plait.train.engine.chain import begin, exchanges, pack
from plait.train.engine.executor import Acts, CollectiveStart, RunningPhase, SegmentExecutor, nothing
from plait.train.engine.inflight import InFlight, MicroBatch
from plait.train.engine.segment import Buffers
from plait.train.engine.vocabulary import Embed
from plait.train.model.dropout import DropoutKey

Step = Callable[[Any], object]
"""One step of a phase, called with the running phase."""


@dataclass(frozen=True)
class _CapturedPhase(RunningPhase):
    """A phase whose ops may be captured. bound: the buffers of the slot's collectives, because a
    replayed op does not return them."""

    bound: dict[SegmentOp, Buffers] = field(default_factory=dict[SegmentOp, Buffers])


@dataclass(frozen=True)
class _Piece:
    """A part of a phase's list: computation to be captured as one CUDA graph, or one call of the
    host. kind, name: of its record."""

    steps: list[Step]
    captured: bool
    kind: int
    name: int


@dataclass
class GraphSlot(InFlight):
    """Memory for one micro-batch in flight, and the functions that work on it, by phase. inputs:
    tensors overwritten when a micro-batch begins. entered, returned: tensors received from other
    stages. left: by phase, tensors to be sent to other stages."""

    inputs: list[Tensor] = field(default_factory=list[Tensor])
    pool: object = None
    acts: dict[Phase, Acts] = field(default_factory=dict[Phase, Acts])
    bound: dict[SegmentOp, Buffers] = field(default_factory=dict[SegmentOp, Buffers])
    entered: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    returned: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    left: dict[Phase, tuple[Mapping[str, Tensor], Mapping[str, Tensor]]] = field(
        default_factory=dict[Phase, tuple[Mapping[str, Tensor], Mapping[str, Tensor]]]
    )

    def arrive(self) -> None:
        """Copy tensors received from other stages into the memory that the graphs read."""
        crossing = self.crossing
        crossing.entering = _copied(crossing.entering, self.entered)
        crossing.returning = _copied(crossing.returning, self.returned)

    def leave(self, phase: Phase) -> None:
        """Copy tensors to be sent to other stages: the slot's next micro-batch may begin before
        they are sent."""
        crossing = self.crossing
        leaving, gradient = self.left.setdefault(phase, (dict(crossing.leaving), dict(crossing.gradient)))
        crossing.leaving = {name: tensor.clone() for name, tensor in leaving.items()}
        crossing.gradient = {name: tensor.clone() for name, tensor in gradient.items()}


class GraphedExecutor(SegmentExecutor):
    """An executor with CUDA graphs, with the same numbers as ``SegmentExecutor``.

    A stretch reads and writes the same memory whenever it is replayed. Micro-batches therefore take
    *slots*: memory for one micro-batch in flight, from its first phase to its last. Inputs that
    differ from micro-batch to micro-batch are copied into the slot: tokens, tensors from other
    stages, the loss's scale, and the keys of dropout's masks. So masks are those of the current
    step, not of the captured one. The number of gathered embedding rows changes shapes, so the host
    looks up, exchanges and places these rows for the first norm.

    The first step runs op by op, while kernels are chosen and tables are made. After it nothing is
    in flight: autograd, which remembers streams, has released the parameters, and no message is
    awaited. The device then frees the memory cached by its allocator, which graphs could not use.
    Later micro-batches are captured as they run, stretch by stretch.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._pieces = {phase: self._cut(phase) for phase in self.programmes}
        self._free: list[GraphSlot] = []
        self._warm = False

    @torch.no_grad()
    def begin(self, batch: MicroBatch, entering: Mapping[str, Tensor] | None = None) -> InFlight:
        """Copy a micro-batch into a free slot, and return the slot."""
        assert batch.starts is None, "CUDA graphs do not support documents, which differ from batch to batch"
        if not self._warm:
            return super().begin(batch, entering)
        fresh = self.device.upload([*self._numbers(batch), *pack(self._shared, batch)])
        slot = self._free.pop() if self._free else self._open(batch, fresh)
        travel = exchanges(self._shared, fresh[2:])
        for static, new in zip(slot.inputs, fresh, strict=True):
            if all(new is not exchange.send for exchange in travel):
                assert static.shape == new.shape, "all micro-batches of a plan must have equal shapes"
                static.copy_(new)
        for number, exchange in enumerate(travel):
            embed = slot.segments["embed", self.graph.segments[0][1], number]
            assert isinstance(embed, Embed)
            embed.exchange = exchange
        slot.crossing.entering = dict(entering or {})
        return slot

    def _open(self, batch: MicroBatch, fresh: Sequence[Tensor]) -> GraphSlot:
        """Return a new slot: memory for one micro-batch in flight, filled with ``batch``. fresh:
        its uploaded tensors."""
        inputs = [tensor.clone() for tensor in fresh]
        scale, table = inputs[:2]
        dropout = DropoutKey(self.seed, batch.step, table) if self._dropout(batch) else None
        state = begin(self._shared, batch, inputs[2:], dropout, {}, scale)
        return GraphSlot(state.crossing, state.segments, inputs, self.device.pool())

    def _numbers(self, batch: MicroBatch) -> list[Tensor]:
        """Return numbers that are constants in uncaptured code: the loss's scale and the keys of
        dropout masks."""
        dropout = self._dropout(batch)
        keys = dropout.sites(self.model.spec.num_layers) if dropout else torch.zeros(0, dtype=torch.int64)
        return [torch.tensor(batch.scale, dtype=torch.float64), keys]

    @torch.no_grad()
    def phase(self, phase: Phase, state: InFlight, *, last: bool = False, then: Callable[[], object] = nothing) -> None:
        """Run one phase of a micro-batch, as ``SegmentExecutor`` does."""
        if not isinstance(state, GraphSlot):
            super().phase(phase, state, last=last, then=then)
            return
        state.arrive()
        turn = _CapturedPhase(state.segments, last, then, bound=state.bound)
        if phase in state.acts:
            self._do(state.acts[phase], turn)
        else:
            state.acts[phase] = self._capture(phase, state, turn)
        assert not turn.handles, f"collectives never awaited: {list(turn.handles)}"
        state.leave(phase)
        if PHASES[phase].weight_gradient:  # the micro-batch's last phase
            self._free.append(state)

    def step_ended(self) -> None:
        """Enable capture after the first step."""
        if not self._warm:
            self.device.release_cached()
            self._warm = True

    def _capture(self, phase: Phase, slot: GraphSlot, turn: _CapturedPhase) -> Acts:
        """Run a phase for the first time in a slot, and return the functions that replay it."""
        acts: Acts = ()
        for piece in self._pieces[phase]:
            act = self._captured(piece, slot, turn) if piece.captured else piece.steps[0]
            acts = (*acts, (act, piece.kind, piece.name))
            self._do(acts[-1:], turn)
        return acts

    def _captured(self, piece: _Piece, slot: GraphSlot, turn: _CapturedPhase) -> Step:
        def work() -> None:
            for step in piece.steps:
                step(turn)

        graph = self.device.capture(work, slot.pool)
        return lambda _: graph.replay()

    # ---- pieces ----

    def _cut(self, phase: Phase) -> list[_Piece]:
        """Split a phase's list into stretches and the host's calls between them."""
        pieces: list[_Piece] = []
        for (action, step), (_, kind, name) in zip(self.programmes[phase], self._acts[phase], strict=True):
            if isinstance(action, UnitAction) or action.verb == "wait" or self._moves(action.op):
                pieces.append(_Piece([step], captured=False, kind=kind, name=name))
            elif isinstance(step, CollectiveStart):
                self._stretch(pieces, partial(_bind, step), 0, 0)
                pieces.append(_Piece([partial(_send, step)], captured=False, kind=0, name=0))
            else:
                if self._follows_embed(action.op):
                    key = "embed", self.graph.before(action.op)[1], action.op.slice
                    pieces.append(_Piece([partial(_place, key)], captured=False, kind=0, name=0))
                self._stretch(pieces, step, kind, name)
        return pieces

    @staticmethod
    def _stretch(pieces: list[_Piece], step: Step, kind: int, name: int) -> None:
        """Add to the last stretch, or begin a new one, whose record has the name of its first
        op."""
        if pieces and pieces[-1].captured:
            pieces[-1].steps.append(step)
        else:
            pieces.append(_Piece([step], captured=True, kind=kind, name=name))

    def _moves(self, op: SegmentOp) -> bool:
        """Return True if the shapes of the op's tensors differ from batch to batch: the gathered
        embedding rows."""
        return op.site == "embed" and op.kind == Kind.ROW_FORWARD

    def _follows_embed(self, op: SegmentOp) -> bool:
        """Return True if the op is the first to read the residual stream."""
        return op.kind == Kind.NORM and op.site != "embed" and self.graph.before(op)[0] == "embed"


def _bind(start: CollectiveStart, turn: _CapturedPhase) -> None:
    """Set a collective's buffers; their computation and allocation are captured."""
    turn.bound[start.op] = start.buffers(turn)


def _send(start: CollectiveStart, turn: _CapturedPhase) -> None:
    start.send(turn, *turn.bound[start.op])


def _place(key: Any, turn: _CapturedPhase) -> None:
    """Copy the embedding's gathered rows to the memory that the captured first norm reads."""
    embed = turn.segments[key]
    assert isinstance(embed, Embed)
    words = embed.place()
    if embed.placed is None:
        embed.placed = words
    else:
        embed.placed.copy_(words)


def _copied(came: Mapping[str, Tensor], static: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy received tensors into memory that stays, and return that memory by name."""
    for name, tensor in came.items():
        if name not in static:
            static[name] = tensor.clone()
        elif static[name] is not tensor:
            static[name].copy_(tensor)
    return {name: static[name] for name in came}
