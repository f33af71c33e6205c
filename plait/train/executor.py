"""Runs segment lists: the only place where the model's mathematics meets the wire.

Every op of a list is one method (``_F``, ``_R``, ...). Segments are detached from each other: autograd sees only
what lies inside one (``join`` and ``norm``; ``core``), the linears are called here, so that the list alone decides
when an input gradient, a weight gradient or a collective happens. Equal to unsharded training by test, for any
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
from plait.core.strategy import slice_sizes
from plait.train.device import Device
from plait.train.dropout import DropoutKey
from plait.train.gradients import Gradients
from plait.train.inflight import InFlight, MicroBatch, Slot
from plait.train.loss import VocabularyLoss
from plait.train.model import RowExchange, SliceContext, Transformer
from plait.train.recorder import Recorder
from plait.train.shards import Shards
from plait.train.wire import NullWire, Wire, empty_like_gathered


class SegmentExecutor:
    """Executes a stage's lists on one rank: phase ``step`` for a whole model, or the phases that a pipeline's schedule names.

    Any number of micro-batches may be in flight between phases; one phase of one micro-batch runs at a time. programmes: by phase,
    what is done in which order, and the method that does it.
    """

    def __init__(
        self,
        model: Transformer,
        graph: SegmentGraph,
        programmes: Mapping[Phase, Sequence[Action]],
        wire: Wire,
        *,
        gradients: Gradients | None,
        device: Device,
        recorder: Recorder | None = None,
        seed: int = 0,
        shards: Shards | None = None,
    ) -> None:
        self.model, self.graph, self.wire = model, graph, wire
        self.gradients, self.device, self.recorder, self.seed = gradients, device, recorder, seed
        self.sp = graph.sequence_parallel
        self._flights: dict[SegmentOp, Any] = {}
        self.shards = shards
        self.programmes: dict[Phase, list[tuple[Action | UnitAction, Any]]] = {}
        for phase, actions in programmes.items():
            check(replace(graph, phase=phase), actions)
            listed = with_units(graph, actions, model.units, prefetch=shards.overlap) if shards else actions
            self.programmes[phase] = [(action, self._method(action)) for action in listed]

    def _method(self, action: Action | UnitAction) -> Any:
        if isinstance(action, UnitAction):
            assert self.shards is not None
            return self.shards.act[action.op.verb]
        return getattr(self, f"_{action.op.kind}" if action.verb == "run" else f"_{action.verb}")

    def ahead(self, phase: Phase) -> None:
        """Start to gather what a phase reads first."""
        for action, method in self.programmes[phase]:
            if not isinstance(action, UnitAction) or action.op.verb != "gather":
                break
            method(action.op)

    def run(self, batch: MicroBatch) -> Tensor:
        """One micro-batch, whole; adds into the gradients, returns the scaled loss of its tokens (0-d, equal on all ranks)."""
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
        """The scaled loss of a micro-batch's tokens, after its forward; 0-d, on the stage that has the head."""
        losses = [state.slots["head", 0, at].loss for at in range(self.graph.p1)]
        return torch.stack([loss.total for loss in losses if loss is not None]).sum()

    def _run_recorded(self, programme: Sequence[tuple[Action | UnitAction, Any]], recorder: Recorder) -> None:
        for action, method in programme:
            if not isinstance(action, Action) or action.verb == "start":  # what happens to units is recorded where it happens
                method(action.op)
            else:
                start = self.device.mark()
                method(action.op)
                recorder.add(action, start, self.device.mark())

    @torch.no_grad()
    def begin(self, batch: MicroBatch, entering: Mapping[str, Tensor] | None = None) -> InFlight:
        """Take a micro-batch in. entering: what other stages sent."""
        sequence, to = batch.tokens.shape[1], self.device.torch_device
        local = sequence // self.wire.size if self.sp else sequence
        first = self.wire.rank * local if self.sp else 0
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
                SliceContext(samples.to(to), positions[: local >> level], dropout, spread) for level in range(self.model.spec.levels + 1)
            ]
            tokens, targets = tokens.t().contiguous().to(to), targets.t().contiguous().to(to)
            for site, layer in self.graph.segments:
                here = slice(*ends[at : at + 2])
                level = self._level(site, layer)
                own = rows if site == "embed" else None
                slot = state.slots[site, layer, at] = Slot(contexts[level], here, sequence >> level, tokens, targets, own)
                slot.h = state.entering["h"][:, here] if site == "enter" else None
        return state

    def _level(self, site: str, layer: int) -> int:
        """How often the sequence has been halved for what a segment's first op does: it completes the segment before."""
        spec = self.model.spec
        if site in ("attn", "mlp"):
            return spec.level(layer)
        if site in ("down", "up"):
            return layer + (site == "up")
        return 0 if site in ("embed", "head") else spec.level(self.graph.first_layer - 1 if site == "enter" else self.graph.last_layer)

    def _at(self, op: SegmentOp) -> Slot:
        return self._state.slots[op.site, op.layer, op.slice]

    def _segment(self, op: SegmentOp) -> Any:
        return self.model if op.site in ("embed", "head") else self.model.sublayer(op.site, op.layer)

    def _producer(self, op: SegmentOp) -> tuple[Any, Slot]:
        """The module and slot of the segment before ``op``'s."""
        site, layer = self.graph.before(op)
        ends = {"embed": self.model.embedding, "enter": self.model.entrance, "down": self.model.entrance, "up": self.model.entrance}
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
                slot.y = self._shard_of(slot.y_partial, dim=1) if self.sp else slot.y_partial
            return slot.y[op.part], source
        if op.kind == "C":
            assert slot.g_full is not None
            if self.sp:
                slot.g_n = self._shard_of(slot.g_full, dim=0)
                return slot.g_n, slot.g_full
            slot.g_n = slot.g_full
            part = self._row_part(op, slot.g_full.flatten(0, 1))
            return part, part
        if op.kind == "F":
            assert slot.loss is not None
            return slot.loss.gathered, slot.loss.statistics
        if op.kind == "N":
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
        train = self.graph.backward
        y = before.y
        if y is not None:
            y = y if before.rows is None else y[before.rows.arrival][None]  # an embedding's rows, put in place
            slot.y_in = y.detach().requires_grad_(train)
        slot.h_in = None if before.h is None else before.h.detach().requires_grad_(train)
        before.y = before.y_partial = None
        with torch.set_grad_enabled(train):
            h = producer.join(slot.h_in, slot.y_in, slot.context)
            if op.site == "leave":
                slot.graph = [h]
                self._leave("h", slot, h)
                return
            if op.site in ("down", "up"):
                self._resample(op, slot, h)
                return
            norm = self.model.norm if op.site == "head" else self._segment(op).norm
            n = norm(h)
        slot.graph = [n, h]
        slot.h, slot.n = h.detach(), n.detach()
        slot.full = slot.n  # a gather, if there is one, replaces it

    def _F(self, op: SegmentOp) -> None:  # noqa: N802
        slot = self._at(op)
        assert slot.full is not None
        if op.site == "head":
            weight = self.model.head.weight
            slot.loss = VocabularyLoss(
                slot.full.flatten(0, 1) @ weight.t(), slot.targets.flatten(), self.model.embedding, self.model.spec.vocab, self.wire.size
            )
            return
        segment = self._segment(op)
        z = _linear(slot.full, segment.column.weight, segment.column.bias).requires_grad_(self.graph.backward)
        with torch.set_grad_enabled(self.graph.backward):
            o = segment.core(z, slot.context)
        slot.z, slot.graph = z, [*slot.graph, o]
        slot.o = o.detach().flatten(0, 1)

    def _R(self, op: SegmentOp) -> None:  # noqa: N802
        slot = self._at(op)
        s, b = slot.sequence, slot.tokens.shape[1]
        if op.site == "embed":
            assert slot.rows is not None
            slot.y_partial = self.model.embedding.words.weight[slot.rows.send]
        else:
            assert slot.o is not None
            row = self._segment(op).row.weight  # [H, K]
            width = row.shape[0] // self.graph.p2
            if slot.y_partial is None:
                slot.y_partial = slot.o.new_empty((self.graph.p2, s, b, width))
            torch.mm(slot.o, row[op.part * width : (op.part + 1) * width].t(), out=slot.y_partial[op.part].view(s * b, width))
        if self.graph.collective(op) is None:
            slot.y = slot.y_partial

    def _L(self, op: SegmentOp) -> None:  # noqa: N802
        slot = self._at(op)
        assert slot.loss is not None and slot.full is not None
        slot.g_z = slot.loss.finish(self._state.scale, gradient=self.graph.backward)
        slot.operands = [(slot.g_z, slot.full.flatten(0, 1))] if slot.g_z is not None else []
        slot.full = None

    # ---- backward ----

    def _D(self, op: SegmentOp) -> None:  # noqa: N802
        slot, segment = self._at(op), self._segment(op)
        assert slot.o is not None and slot.z is not None and slot.full is not None
        gradient, o = self._output_gradient(slot), slot.graph.pop()
        (g_z,) = torch.autograd.grad(o, [slot.z], (gradient @ segment.row.weight).view(o.shape))
        slot.g_z = g_z.flatten(0, 1)
        slot.operands = [(gradient, slot.o), (slot.g_z, slot.full.flatten(0, 1))]
        slot.z = slot.o = slot.full = slot.g_y = slot.g_y_full = None

    def _C(self, op: SegmentOp) -> None:  # noqa: N802
        slot = self._at(op)
        s, b = slot.sequence, slot.tokens.shape[1]
        g_z, weight = slot.g_z, (self.model.head if op.site == "head" else self._segment(op).column).weight
        assert g_z is not None
        if slot.g_full is None:
            slot.g_full = g_z.new_empty((s, b, self.model.spec.hidden))
        torch.mm(self._row_part(op, g_z), weight, out=self._row_part(op, slot.g_full.flatten(0, 1)))
        if op.part == self.graph.parts(op.site, "C") - 1:
            slot.g_z = None
        if self.graph.collective(op) is None:
            slot.g_n = slot.g_full

    def _W(self, op: SegmentOp) -> None:  # noqa: N802
        slot, gradients = self._at(op), self.gradients
        assert gradients is not None
        if op.site == "embed":
            rows, here = self.model.embedding.local(slot.tokens)
            gradients.add_rows(self.model.embedding.words.weight, rows.flatten(), self._output_gradient(slot) * here.flatten()[:, None])
            return
        operands, slot.operands[op.part] = slot.operands[op.part], None
        assert operands is not None
        linear = self.model.head if op.site == "head" else self._segment(op).row if op.part == 0 else self._segment(op).column
        gradients.add_product(linear.weight, *operands)
        if op.part == 1 and linear.bias is not None:  # the second weight's bias belongs to join
            gradients.add(linear.bias, operands[0].sum(0))

    def _J(self, op: SegmentOp) -> None:  # noqa: N802
        slot, (producer, before) = self._at(op), self._producer(op)
        parameters = [p for p in (*self._norm_parameters(op), *producer.join_parameters()) if p is not None]
        inputs = {"y": slot.y_in, "h": slot.h_in, "skip": slot.skip_in} | dict(enumerate(parameters))
        inputs = {key: value for key, value in inputs.items() if value is not None}
        if op.site == "leave":
            outputs, incoming = slot.graph, [self._state.returning["h"][:, slot.samples]]
        elif op.site == "up":
            outputs, incoming = slot.graph, [slot.g_h]
        elif op.site == "down":
            elsewhere = self._state.returning.get(f"skip{op.layer}")
            outputs, incoming = slot.graph, [slot.g_h, slot.g_skip if elsewhere is None else elsewhere[:, slot.samples]]
        elif op.site == "head":  # nobody reads the residual stream after the last norm
            outputs, incoming = slot.graph[:1], [slot.g_n]
        else:
            outputs, incoming = slot.graph, [slot.g_n, slot.g_h]
        found = dict(zip(inputs, torch.autograd.grad(outputs, list(inputs.values()), incoming), strict=True))  # type: ignore[arg-type]
        for i, parameter in enumerate(parameters):
            assert self.gradients is not None
            self.gradients.add(parameter, found[i])
        before.g_y = found["y"].permute(1, 2, 0, 3).flatten(2) if "y" in found else None  # parts side by side again, [S, b, H]
        before.g_h = found.get("h")
        if self.graph.before(op)[0] == "enter":
            self._enter_gradient("h", slot, found["h"])
        if op.site == "up":
            down = self._state.slots.get(("down", op.layer, op.slice))
            if down is None:
                self._enter_gradient(f"skip{op.layer}", slot, found["skip"])
            else:
                down.g_skip = found["skip"]
        slot.skip = slot.skip_in = slot.g_skip = None
        slot.graph, slot.h_in, slot.y_in, slot.h, slot.n, slot.g_n, slot.g_h, slot.g_full = [], None, None, None, None, None, None, None

    def _norm_parameters(self, op: SegmentOp) -> tuple[Any, ...]:
        if op.site == "leave":
            return ()
        if op.site in ("down", "up"):
            change = self._segment(op)
            return change.weight, change.bias
        norm = self.model.norm if op.site == "head" else self._segment(op).norm
        return norm.weight, norm.bias

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
        """The N of a down or an up: another length; a down keeps what came, for the up of its level, here or on another stage."""
        skip = None
        if op.site == "up":
            down = self._state.slots.get(("down", op.layer, op.slice))
            came = self._state.entering[f"skip{op.layer}"][:, slot.samples] if down is None else down.skip
            assert came is not None
            skip = slot.skip_in = came.detach().requires_grad_(self.graph.backward)
        out = self._segment(op)(h, skip)
        slot.graph = [out, h] if op.site == "down" else [out]
        slot.h = out.detach()
        if op.site == "down":
            slot.skip = h.detach()
            if ("up", op.layer) not in self.graph.places:
                self._leave(f"skip{op.layer}", slot, h)

    def _output_gradient(self, slot: Slot) -> Tensor:
        """Gradient of a segment's output over the whole sequence, [S * b, H]."""
        gradient = slot.g_y if slot.g_y_full is None else slot.g_y_full
        assert gradient is not None
        return gradient.flatten(0, 1)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[S, B, in] -> [S, B, out]."""
    return torch.nn.functional.linear(x, weight, bias)
