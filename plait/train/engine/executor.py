"""Runs segment lists: the only place where the model's mathematics meets the wire.

Every op of a list is one method (``_F``, ``_R``, ...). Segments are detached from each other: autograd sees
only
what lies inside one (``join`` and ``norm``; ``core``), the linears are called here, so that the list alone
decides
when an input gradient, a weight gradient or a collective happens. Equal to unsharded training by test, for
any
legal list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from plait.core.segments import Action, Phase, SegmentGraph, SegmentOp, check
from plait.core.sharding import UnitAction, with_units
from plait.core.strategy import Strategy, slice_sizes
from plait.train.comm.wire import NullWire, Wire, empty_like_gathered
from plait.train.engine.gradients import Gradients
from plait.train.engine.inflight import Branch, InFlight, MicroBatch, Slot
from plait.train.engine.shards import Shards
from plait.train.machine.device import Device
from plait.train.model.dropout import DropoutKey
from plait.train.model.loss import VocabularyLoss
from plait.train.model.transformer import RowExchange, SliceContext, Sublayer, Transformer
from plait.train.record.recorder import Recorder


class SegmentExecutor:
    """Executes a stage's lists on one rank: phase ``step`` for a whole model, or the phases that a pipeline's
    schedule names.

    Any number of micro-batches may be in flight between phases; one phase of one micro-batch runs at a time.
    programmes: by phase, what is done in which order, and the method that does it.
    """

    def __init__(
        self,
        model: Transformer,
        graph: SegmentGraph,
        programmes: Mapping[Phase, Sequence[Action]],
        wire: Wire,
        strategy: Strategy,
        *,
        gradients: Gradients | None,
        device: Device,
        recorder: Recorder | None = None,
        seed: int = 0,
        shards: Shards | None = None,
    ) -> None:
        self.model, self.graph, self.wire = model, graph, wire
        self.gradients, self.device, self.recorder, self.seed = gradients, device, recorder, seed
        self.sharded = graph.sequence_parallel
        self._flights: dict[SegmentOp, Any] = {}
        self.shards, self.strategy = shards, strategy
        self.programmes: dict[Phase, list[tuple[Action | UnitAction, Any]]] = {}
        for phase, actions in programmes.items():
            check(replace(graph, phase=phase), actions)
            listed = with_units(graph, actions, model.units, strategy) if shards else actions
            self.programmes[phase] = [(action, self._method(action)) for action in listed]

    def _method(self, action: Action | UnitAction) -> Any:
        if isinstance(action, UnitAction):
            assert self.shards is not None
            return self.shards.act[action.op.verb]
        return getattr(self, f"_{action.op.kind}" if action.verb == "run" else f"_{action.verb}")

    def ahead(self, phase: Phase) -> None:
        """Start to gather what a phase reads first, where the strategy hides that."""
        if not self.strategy.hides_shards(forward=phase in ("F", "step")):
            return
        for action, method in self.programmes[phase]:
            if not isinstance(action, UnitAction) or action.op.verb != "gather":
                break
            method(action.op)

    def run(self, batch: MicroBatch) -> Tensor:
        """One micro-batch, whole; adds into the gradients, returns the scaled loss of its tokens (0-d, equal
        on all ranks)."""
        state = self.begin(batch)
        self.phase("step", state)
        return self.loss(state)

    @torch.no_grad()
    def phase(self, phase: Phase, state: InFlight) -> None:
        """Run one phase of a micro-batch."""
        self._state = state
        try:
            if self.recorder is None:
                for action, method in self.programmes[phase]:
                    method(action.op)
            else:
                self._run_recorded(self.programmes[phase], self.recorder)
            assert not self._flights, f"collectives never awaited: {list(self._flights)}"
        finally:
            self._flights.clear()
            del self._state  # whoever holds the micro-batch decides how long its activations live

    def loss(self, state: InFlight) -> Tensor:
        """The scaled loss of a micro-batch's tokens, after its forward; 0-d, on the stage that has the
        head."""
        losses = [state.slots["head", 0, at].loss for at in range(self.graph.p1)]
        return torch.stack([loss.total for loss in losses if loss is not None]).sum()

    def _run_recorded(self, programme: Sequence[tuple[Action | UnitAction, Any]], recorder: Recorder) -> None:
        for action, method in programme:
            if (
                not isinstance(action, Action) or action.verb == "start"
            ):  # what happens to units is recorded where it happens
                method(action.op)
            else:
                start = self.device.mark()
                method(action.op)
                recorder.add(action, start, self.device.mark())

    @torch.no_grad()
    def begin(self, batch: MicroBatch, entering: Mapping[str, Tensor] | None = None) -> InFlight:
        """Take a micro-batch in. entering: what other stages sent."""
        sequence, to = batch.tokens.shape[1], self.device.torch_device
        local = sequence // self.wire.size if self.sharded else sequence
        first = self.wire.rank * local if self.sharded else 0
        spread = None if batch.positions is None else batch.positions.to(to)
        positions = torch.arange(first, first + local, device=to) if spread is None else spread[first : first + local]
        dropping = self.model.training and (self.model.spec.dropout or self.model.spec.attention_dropout)
        dropout = DropoutKey(self.seed, batch.step) if dropping and self.gradients is not None else None
        sizes = slice_sizes(batch.tokens.shape[0], self.graph.p1)
        assert min(sizes) > 0, f"p1 = {self.graph.p1} slices of a micro-batch of {batch.tokens.shape[0]}"
        state = InFlight(batch.tokens.shape[0], batch.scale, entering=dict(entering or {}))
        ends = list(accumulate(sizes, initial=0))
        for at, (tokens, targets, samples) in enumerate(
            zip(*(t.split(sizes) for t in (batch.tokens, batch.targets, batch.samples)), strict=True)
        ):
            rows = None
            if self.graph.embeds:
                rows = self.model.embedding.exchange(tokens.t().contiguous())
                rows = RowExchange(rows.send.to(to), rows.arrival[first : first + local].to(to))
            contexts = [
                SliceContext(samples.to(to), positions[: local >> level], dropout, spread)
                for level in range(self.model.spec.levels + 1)
            ]
            tokens, targets = tokens.t().contiguous().to(to), targets.t().contiguous().to(to)
            for site, layer in self.graph.segments:
                here = slice(*ends[at : at + 2])
                level = self.graph.level(self.model.spec, site, layer) + (site == "up")  # of what comes in
                own = rows if site == "embed" else None
                slot = state.slots[site, layer, at] = Slot(
                    contexts[level], here, sequence >> level, tokens, targets, own
                )
                slot.h = state.entering["h"][:, here] if site == "enter" else None
        return state

    def _at(self, op: SegmentOp) -> Slot:
        return self._state.slots[op.site, op.layer, op.slice]

    def _segment(self, op: SegmentOp) -> Any:
        return self.model if op.site in ("embed", "head") else self.model.sublayer(op.site, op.layer)

    def _producer(self, op: SegmentOp) -> tuple[Any, Slot]:
        """The module and slot of the segment before ``op``'s."""
        site, layer = self.graph.before(op)
        ends = {
            "embed": self.model.embedding,
            "enter": self.model.entrance,
            "down": self.model.entrance,
            "up": self.model.entrance,
        }
        return (ends.get(site) or self.model.sublayer(site, layer)), self._state.slots[site, layer, op.slice]

    # ---- collectives ----

    def _start(self, op: SegmentOp) -> None:
        kind = self.graph.collective(op)
        assert kind is not None
        result, source = self._buffers(op)
        started = self.device.mark() if self.recorder else None
        work = self._flights[op] = self.wire.start(kind, result, source)
        if self.recorder and not isinstance(self.wire, NullWire):
            self.recorder.watch(op, kind, result, source, self.wire.size, started, work)

    def _wait(self, op: SegmentOp) -> None:
        self._flights.pop(op).wait()

    def _buffers(self, op: SegmentOp) -> tuple[Tensor, Tensor]:
        """(result, source) of an op's collective; the result buffer of a gather or scatter is made here."""
        slot = self._at(op)
        if op.kind == "R" and op.site == "embed":
            assert slot.y_partial is not None
            slot.y = empty_like_gathered(slot.y_partial, self.wire.size)
            return slot.y, slot.y_partial
        if op.kind == "R":
            assert slot.y_partial is not None
            source = slot.y_partial[op.part]
            if slot.y is None:
                slot.y = self._shard_of(slot.y_partial, dim=1) if self.sharded else slot.y_partial
            return slot.y[op.part], source
        if op.kind == "C":
            assert slot.g_full is not None
            if self.sharded:
                slot.g_n = self._shard_of(slot.g_full, dim=0)
                return slot.g_n, slot.g_full
            slot.g_n = slot.g_full
            part = self._row_part(op, slot.g_full.flatten(0, 1))
            return part, part
        if op.kind == "F":
            assert slot.loss is not None
            return slot.loss.gathered, slot.loss.statistics
        if op.kind in ("N", "M"):
            assert slot.n is not None
            slot.full = empty_like_gathered(slot.n, self.wire.size)
            return slot.full, slot.n
        _, producer = self._producer(op)
        assert op.kind == "J" and producer.g_y is not None
        producer.g_y_full = empty_like_gathered(producer.g_y, self.wire.size)
        return producer.g_y_full, producer.g_y

    def _shard_of(self, whole: Tensor, dim: int) -> Tensor:
        shape = list(whole.shape)
        shape[dim] //= self.wire.size
        return whole.new_empty(shape)

    def _row_part(self, op: SegmentOp, rows: Tensor) -> Tensor:
        """The part of [M, ...] that part ``op.part`` of an input gradient covers."""
        return rows.split(slice_sizes(rows.shape[0], self.graph.parts(op.site, op.kind)))[op.part]

    # ---- forward ----

    def _N(self, op: SegmentOp) -> None:  # noqa: N802
        slot, (producer, before) = self._at(op), self._producer(op)
        y = before.y
        if y is not None:
            y = y if before.rows is None else y[before.rows.arrival][None]  # an embedding's rows, put in place
        h = producer.join(before.h, y, slot.context)
        before.y = before.y_partial = None
        if not self.graph.backward:
            before.h = None
        if op.site == "leave":
            self._leave("h", slot, h)
        elif op.site in ("down", "up"):
            self._resample(op, slot, h)
        else:
            slot.h = h.detach().requires_grad_(self.graph.backward)
            self._normalise(op, slot, keep="M" not in self.graph.again(op.site, op.layer))

    def _normalise(self, op: SegmentOp, slot: Slot, *, keep: bool) -> None:
        norm = self.model.norm if op.site == "head" else self._segment(op).norm
        with torch.set_grad_enabled(keep and self.graph.backward):
            n = norm(slot.h)
        slot.n_graph = n
        slot.full = slot.n = n.detach()  # a gather, if there is one, replaces it

    def _F(self, op: SegmentOp) -> None:  # noqa: N802
        slot = self._at(op)
        assert slot.full is not None
        if op.site == "head":
            weight = self.model.head.weight
            slot.loss = VocabularyLoss(
                slot.full.flatten(0, 1) @ weight.t(),
                slot.targets.flatten(),
                self.model.embedding,
                self.model.spec.vocab,
                self.wire.size,
            )
            return
        segment, train = self._segment(op), self.graph.backward
        slot.branches = [Branch() for _ in segment.branches]
        self._project(op, slot)
        for branch, at in zip(segment.branches, slot.branches, strict=True):
            repeats = self._repeats(op, branch)
            at.kept = [] if repeats else None
            self._activate(slot, branch, at, keep=not repeats)
            if not train or (repeats and self.graph.recompute == "full"):
                at.z = None
        if not train or "M" in self.graph.again(op.site, op.layer):
            slot.n_graph = slot.n = slot.full = None

    def _repeats(self, op: SegmentOp, branch: Sublayer) -> bool:
        """Whether op A runs a branch's core again."""
        return "A" in self.graph.again(op.site, op.layer) and (branch.cheap or self.graph.recompute == "full")

    def _project(self, op: SegmentOp, slot: Slot) -> None:
        assert slot.full is not None
        for branch, at in zip(self._segment(op).branches, slot.branches, strict=True):
            at.z = torch.nn.functional.linear(slot.full, branch.column.weight, branch.column.bias)

    def _activate(self, slot: Slot, branch: Sublayer, at: Branch, *, keep: bool) -> None:
        assert at.z is not None
        train = keep and self.graph.backward
        with torch.set_grad_enabled(train):
            o = branch.core(at.z.requires_grad_(train), slot.context, at.kept)
        at.o_graph = o if train else None
        at.o = o.detach().flatten(0, 1)

    def _R(self, op: SegmentOp) -> None:  # noqa: N802
        slot = self._at(op)
        s, b = slot.sequence, slot.tokens.shape[1]
        if op.site == "embed":
            assert slot.rows is not None
            slot.y_partial = self.model.embedding.words.weight[slot.rows.send]
        else:
            self._multiply_rows(op, slot, (s, b))
        if self.graph.collective(op) is None:
            slot.y = slot.y_partial

    def _multiply_rows(self, op: SegmentOp, slot: Slot, tokens: tuple[int, int]) -> None:
        """Second weights of all branches, one column part; what will be computed again is dropped after the
        last."""
        branches, parts = self._segment(op).branches, self.graph.p2
        width = branches[0].row.weight.shape[0] // parts
        if slot.y_partial is None:
            slot.y_partial = branches[0].row.weight.new_empty((parts, *tokens, width))
        assert slot.y_partial is not None
        out = slot.y_partial[op.part].view(-1, width)
        for number, (branch, at) in enumerate(zip(branches, slot.branches, strict=True)):
            assert at.o is not None
            rows = branch.row.weight[op.part * width : (op.part + 1) * width].t()  # of [H, K]
            out.addmm_(at.o, rows) if number else torch.mm(at.o, rows, out=out)
            if op.part == parts - 1 and (self._repeats(op, branch) or not self.graph.backward):
                at.o = None

    def _L(self, op: SegmentOp) -> None:  # noqa: N802
        slot = self._at(op)
        assert slot.loss is not None and slot.full is not None
        gradient = slot.loss.finish(self._state.scale, gradient=self.graph.backward)
        slot.branches = [Branch(g_z=gradient)]
        slot.operands = [(gradient, slot.full.flatten(0, 1))] if gradient is not None else []
        slot.full = None

    # ---- backward ----

    def _M(self, op: SegmentOp) -> None:  # noqa: N802
        self._normalise(op, self._at(op), keep=True)

    def _A(self, op: SegmentOp) -> None:  # noqa: N802
        slot = self._at(op)
        if self.graph.recompute == "full":
            self._project(op, slot)
        for branch, at in zip(self._segment(op).branches, slot.branches, strict=True):
            if self._repeats(op, branch):
                self._activate(slot, branch, at, keep=True)
                at.kept = None

    def _D(self, op: SegmentOp) -> None:  # noqa: N802
        slot = self._at(op)
        assert slot.full is not None
        gradient, inputs = self._output_gradient(slot), slot.full.flatten(0, 1)
        for branch, at in zip(self._segment(op).branches, slot.branches, strict=True):
            assert at.o is not None and at.z is not None and at.o_graph is not None
            (g_z,) = torch.autograd.grad(at.o_graph, [at.z], (gradient @ branch.row.weight).view(at.o_graph.shape))
            at.g_z = g_z.flatten(0, 1)
            slot.operands += [(gradient, at.o), (at.g_z, inputs)]
            at.z = at.o = at.o_graph = None
        slot.full = slot.g_y = slot.g_y_full = None

    def _C(self, op: SegmentOp) -> None:  # noqa: N802
        slot = self._at(op)
        s, b = slot.sequence, slot.tokens.shape[1]
        columns = [self.model.head] if op.site == "head" else [branch.column for branch in self._segment(op).branches]
        if slot.g_full is None:
            slot.g_full = columns[0].weight.new_empty((s, b, self.model.spec.hidden))
        assert slot.g_full is not None
        out = self._row_part(op, slot.g_full.flatten(0, 1))
        for number, (column, at) in enumerate(zip(columns, slot.branches, strict=True)):
            assert at.g_z is not None
            rows = self._row_part(op, at.g_z)
            out.addmm_(rows, column.weight) if number else torch.mm(rows, column.weight, out=out)
        if op.part == self.graph.parts(op.site, "C") - 1:
            slot.branches = []
        if self.graph.collective(op) is None:
            slot.g_n = slot.g_full

    def _W(self, op: SegmentOp) -> None:  # noqa: N802
        slot, gradients = self._at(op), self.gradients
        assert gradients is not None
        if op.site == "embed":
            rows, here = self.model.embedding.local(slot.tokens)
            gradients.add_rows(
                self.model.embedding.words.weight, rows.flatten(), self._output_gradient(slot) * here.flatten()[:, None]
            )
            return
        operands, slot.operands[op.part] = slot.operands[op.part], None
        assert operands is not None
        branch = None if op.site == "head" else self._segment(op).branches[op.part // 2]
        linear = self.model.head if branch is None else branch.column if op.part % 2 else branch.row
        gradients.add_product(linear.weight, *operands)
        if op.part % 2 and linear.bias is not None:  # the second weight's bias belongs to join
            gradients.add(linear.bias, operands[0].sum(0))

    def _J(self, op: SegmentOp) -> None:  # noqa: N802
        slot, (producer, before) = self._at(op), self._producer(op)
        gradient = (
            self._state.returning["h"][:, slot.samples] if op.site == "leave" else self._stream_gradient(op, slot)
        )
        before.g_y, found = producer.join_gradient(gradient, slot.context)
        assert self.gradients is not None
        for parameter, its, rows in found:
            self.gradients.add(parameter, its) if rows is None else self.gradients.add_rows(parameter, rows, its)
        before.g_h = gradient
        if self.graph.before(op)[0] == "enter":
            self._enter_gradient("h", slot, gradient)
        slot.skip = slot.skip_in = slot.g_skip = None
        slot.leaf = slot.h = slot.n = slot.n_graph = slot.g_n = slot.g_h = slot.g_full = None

    def _stream_gradient(self, op: SegmentOp, slot: Slot) -> Tensor:
        """Gradient of the residual stream that a segment's norm, down or up reads: through it, and past
        it."""
        change = (
            self.model.norm
            if op.site == "head"
            else self._segment(op)
            if op.site in ("down", "up")
            else self._segment(op).norm
        )
        parameters = [p for p in (change.weight, change.bias) if p is not None]
        skips = [slot.skip_in] if op.site == "up" else []
        incoming = slot.g_h if op.site in ("down", "up") else slot.g_n
        stream = slot.h if slot.leaf is None else slot.leaf
        gradient, *others = torch.autograd.grad([slot.n_graph], [stream, *parameters, *skips], [incoming])  # type: ignore[list-item]
        for parameter, found in zip(parameters, others, strict=False):
            assert self.gradients is not None
            self.gradients.add(parameter, found)
        if op.site == "up":
            self._skip_gradient(op, slot, others[-1])
        elif op.site == "down":
            elsewhere = self._state.returning.get(f"skip{op.layer}")
            gradient += slot.g_skip if elsewhere is None else elsewhere[:, slot.samples]
        elif op.site != "head":  # nobody reads the residual stream after the last norm
            gradient += slot.g_h
        return gradient

    def _skip_gradient(self, op: SegmentOp, slot: Slot, gradient: Tensor) -> None:
        """Give the down of an up's level, here or on another stage, the gradient of what it kept."""
        down = self._state.slots.get(("down", op.layer, op.slice))
        if down is None:
            self._enter_gradient(f"skip{op.layer}", slot, gradient)
        else:
            down.g_skip = gradient

    # ---- the ends of a stage ----

    def _leave(self, name: str, slot: Slot, h: Tensor) -> None:
        """Put a slice's tensor into what another stage gets."""
        state = self._state
        if name not in state.leaving:
            state.leaving[name] = h.new_empty((h.shape[0], state.size, h.shape[2]))
        state.leaving[name][:, slot.samples] = h.detach()

    def _enter_gradient(self, name: str, slot: Slot, gradient: Tensor) -> None:
        """Put a slice's gradient into what the stage that it came from gets."""
        state = self._state
        if name not in state.gradient:
            state.gradient[name] = torch.empty_like(state.entering[name])
        state.gradient[name][:, slot.samples] = gradient

    def _resample(self, op: SegmentOp, slot: Slot, h: Tensor) -> None:
        """The N of a down or an up: another length; a down keeps what came, for the up of its level, here or
        on another stage."""
        skip = None
        if op.site == "up":
            down = self._state.slots.get(("down", op.layer, op.slice))
            came = self._state.entering[f"skip{op.layer}"][:, slot.samples] if down is None else down.skip
            assert came is not None
            skip = slot.skip_in = came.detach().requires_grad_(self.graph.backward)
        slot.leaf = h.detach().requires_grad_(self.graph.backward)
        with torch.set_grad_enabled(self.graph.backward):
            out = self._segment(op)(slot.leaf, skip)
        slot.n_graph, slot.h = out, out.detach()
        if op.site == "down":
            slot.skip = h.detach()
            if ("up", op.layer) not in self.graph.places:
                self._leave(f"skip{op.layer}", slot, h)

    def _output_gradient(self, slot: Slot) -> Tensor:
        """Gradient of a segment's output over the whole sequence, [S * b, H]."""
        gradient = slot.g_y if slot.g_y_full is None else slot.g_y_full
        assert gradient is not None
        return gradient.flatten(0, 1)
