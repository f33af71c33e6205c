"""Segments of attention, of an MLP, or of both in parallel: a column-parallel weight, a core, a
row-parallel weight."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from plait.core.step.segments import Kind
from plait.train.engine.attention import SharedCore, SublayerCore
from plait.train.engine.segment import Buffers, NormSegment, ResidualSegment, RunParts, Runs, SendParts, Sends, shard_of
from plait.train.model import sublayers
from plait.train.model.kernels import Summands
from plait.train.model.sublayers import ParallelBlock


@dataclass(kw_only=True, eq=False, repr=False)
class SublayerSegment(NormSegment, ResidualSegment):
    """The segment of an attention sublayer, an MLP or a parallel block; ``module`` holds the
    weights."""

    module: sublayers.Sublayer | ParallelBlock
    cores: list[SublayerCore] = field(init=False)  # one; a parallel block: attention, MLP
    operands: dict[int, tuple[Tensor, Tensor]] = field(init=False)  # by part: operands of W's product
    g_h: Tensor = field(init=False)  # gradient of the outgoing residual stream

    def _make_core(self, branch: sublayers.Sublayer, *, repeats: bool) -> SublayerCore:
        if isinstance(branch, sublayers.Attention) and self.shared.graph.attention:
            return SharedCore(branch, repeats, self.context, self.shared.graph.backward)
        return SublayerCore(branch, repeats)

    @property
    def _shared_core(self) -> SharedCore:
        """The attention core; only where other ranks share its sequence."""
        core = self.cores[0]
        assert isinstance(core, SharedCore)
        return core

    def column_forward(self) -> None:
        """Run op F: the first weights and the cores."""
        graph = self.shared.graph
        again, full = Kind.COLUMN_RECOMPUTE in self.recomputed_kinds, graph.recompute != "selective"
        self.cores = [
            self._make_core(branch, repeats=again and (branch.cheap or full)) for branch in self.module.branches
        ]
        for core in self.cores:
            core.project(self.full)
        for core in self.cores:
            core.activate(self.context, train=graph.backward and not core.repeats)
            if not graph.backward or (core.repeats and full):
                core.forget_first()
        if not graph.backward or Kind.NORM_RECOMPUTE in self.recomputed_kinds:
            del self.n, self.full, self.statistics

    def row_forward(self, part: int) -> None:
        """Run one column part of op R: the second weights of all paths. After the last part, free
        the core outputs that will be computed again."""
        self._multiply(part)
        if part == self.shared.graph.p2 - 1:
            for core in self.cores:
                if core.repeats or not self.shared.graph.backward:
                    del core.o

    def row_recompute(self, part: int) -> None:
        """Run one column part of op Y: as ``row_forward``, but keep the core outputs, which D
        reads."""
        self._multiply(part)

    def _multiply(self, part: int) -> None:
        parts, weights = self.shared.graph.p2, [core.module.row.weight for core in self.cores]  # of [H, K]
        width = weights[0].shape[0] // parts
        if part == 0:
            self.y_partial = weights[0].new_empty((parts, *self.shape, width))
            self.y = self.y_partial
            for core in self.cores:
                core.unpack_output()
        out = self.y_partial[part].view(-1, width)
        for number, (core, weight) in enumerate(zip(self.cores, weights, strict=True)):
            columns = weight[part * width : (part + 1) * width].t()
            out.addmm_(core.o, columns) if number else torch.mm(core.o, columns, out=out)

    def row_forward_buffers(self, part: int) -> Buffers:
        """Return (result, source) of the reduction of the second weight's output, after op R or
        Y."""
        if self.shared.graph.sequence_parallel and self.y is self.y_partial:
            self.y = shard_of(self.y_partial, self.shared.wire, dim=1)
        return self.y[part], self.y_partial[part]

    def stream(self) -> Tensor:
        """Return the residual stream including this sublayer's output."""
        return self.shared.kernels.join(self.summands())

    def summands(self) -> Summands:
        """Return the residual stream and this sublayer's output, and free the tensors they were
        made of."""
        found = self.module.summands(self.h, self.y, self.context)
        del self.y, self.y_partial
        if not self.shared.graph.backward or self.rejoins:
            del self.h
        return found

    def column_recompute(self) -> None:
        """Run op A: the first weights (unless recomputation is selective) and the cores again."""
        for core in self.cores if self.shared.graph.recompute != "selective" else []:
            core.project(self.full)
        for core in self.cores:
            if core.repeats:
                core.activate(self.context, train=True)

    def row_dgrad(self) -> None:
        """Run op D: the backward pass through second weights and cores."""
        gradient, inputs = self._output_gradient(), self.full.flatten(0, 1)
        self.operands = {}
        for number, core in enumerate(self.cores):
            self.operands[2 * number] = gradient, core.backward(gradient)
            if not isinstance(core, SharedCore):
                self._add_inner(core)
                self.operands[2 * number + 1] = core.g_z, inputs
        if not isinstance(self.cores[0], SharedCore):
            del self.full

    def _add_inner(self, core: SublayerCore) -> None:
        """Add the gradients of the core's own parameters (the norms of queries and keys)."""
        for parameter, found in zip(core.module.inner, core.g_inner, strict=True):
            self.shared.gradients.add(parameter, found)
        del core.g_inner

    def column_dgrad(self, part: int) -> None:
        """Run one part of op C: the backward pass through the first weights."""
        if self._input_gradient(part, [(core.g_z, core.module.column.weight) for core in self.cores]):
            del self.cores

    def wgrad(self, part: int) -> None:
        """Run one part of op W: the gradient of one weight."""
        gradients, branch = self.shared.gradients, self.module.branches[part // 2]
        weight = branch.column if part % 2 else branch.row
        gradient, inputs = self.operands.pop(part)
        gradients.add_product(weight.weight, gradient, inputs)
        if part % 2 and weight.bias is not None:  # ``join_gradient`` returns that of the second bias
            gradients.add(weight.bias, gradient.sum(0))

    def norm_backward(self) -> None:
        """Run op J: the backward pass of the norm; hand the gradient to the previous segment."""
        self.previous.accept_gradient(self._back_through_norm(self.g_h))
        self._forget()
        del self.g_h

    def accept_gradient(self, gradient: Tensor) -> None:
        """Accept the gradient of the outgoing residual stream: it goes around the sublayer and into
        its output."""
        self._take_gradient(self.module.join_gradient(gradient, self.context))
        self.g_h = gradient

    # ---- attention over a shared sequence: ops are the core's methods ----

    def core_recompute(self) -> None:
        """Run op X: the attention core again."""
        self._shared_core.core_recompute()

    def ring_send(self, part: int) -> None:
        """Run one part of op T: send the newest block of keys and values to the ring's next
        rank."""
        self._shared_core.ring_send(part)

    def attention_core(self, part: int) -> None:
        """Run one part of op K: attention to one block of keys and values."""
        self._shared_core.attention_core(part)

    def ring_send_backward(self, part: int) -> None:
        """Run one part of op S: as ``ring_send``, for the backward pass."""
        self._shared_core.ring_send_backward(part)

    def core_backward(self, part: int) -> None:
        """Run one part of op G: the backward pass of attention to one block."""
        self._shared_core.core_backward(part)

    def ring_send_grad(self, part: int) -> None:
        """Run one part of op H: send a block's gradient to the ring's next rank."""
        self._shared_core.ring_send_grad(part)

    def heads_exchange_grad(self) -> None:
        """Run op E: pack the gradients of queries, keys and values for the all-to-all."""
        self._shared_core.heads_exchange_grad()

    def column_output_grad(self) -> None:
        """Run op Z: the gradient of the first weight's output."""
        core = self._shared_core
        core.column_output_grad()
        self._add_inner(core)
        self.operands[1] = core.g_z, self.full.flatten(0, 1)
        del self.full

    def heads_exchange_buffers(self, _part: int = 0) -> Buffers:
        """Return (result, source) of the all-to-all of heads after op F, A, K, X, D, G or E
        (``core.step.ops.Kind`` names them)."""
        return self._shared_core.heads_exchange_buffers()

    def ring_send_buffers(self, part: int) -> Buffers:
        """Return (result, source) of the transfer to the ring's next rank, after op T or S."""
        return self._shared_core.ring_send_buffers(part)

    def ring_send_grad_buffers(self, _part: int) -> Buffers:
        """Return (result, source) of the ring step that sends gradients of keys and values on,
        after op H."""
        return self._shared_core.ring_send_grad_buffers()

    runs: ClassVar[Runs] = {
        Kind.NORM: NormSegment.norm,
        Kind.COLUMN_FORWARD: column_forward,
        Kind.NORM_RECOMPUTE: NormSegment.norm_recompute,
        Kind.COLUMN_RECOMPUTE: column_recompute,
        Kind.CORE_RECOMPUTE: core_recompute,
        Kind.ROW_DGRAD: row_dgrad,
        Kind.HEADS_EXCHANGE_GRAD: heads_exchange_grad,
        Kind.COLUMN_OUTPUT_GRAD: column_output_grad,
        Kind.NORM_BACKWARD: norm_backward,
    }
    run_parts: ClassVar[RunParts] = {
        Kind.RING_SEND: ring_send, Kind.ATTENTION_CORE: attention_core, Kind.ROW_FORWARD: row_forward,
        Kind.ROW_RECOMPUTE: row_recompute,
        Kind.RING_SEND_BACKWARD: ring_send_backward, Kind.CORE_BACKWARD: core_backward,
        Kind.RING_SEND_GRAD: ring_send_grad,
        Kind.COLUMN_DGRAD: column_dgrad, Kind.WGRAD: wgrad,
    }  # fmt: skip
    sends: ClassVar[Sends] = {
        Kind.NORM: NormSegment.norm_buffers, Kind.NORM_RECOMPUTE: NormSegment.norm_buffers,
        Kind.NORM_BACKWARD: ResidualSegment.norm_backward_buffers,
        Kind.COLUMN_FORWARD: heads_exchange_buffers, Kind.COLUMN_RECOMPUTE: heads_exchange_buffers,
        Kind.CORE_RECOMPUTE: heads_exchange_buffers, Kind.ROW_DGRAD: heads_exchange_buffers,
        Kind.HEADS_EXCHANGE_GRAD: heads_exchange_buffers,
    }  # fmt: skip
    send_parts: ClassVar[SendParts] = {
        Kind.ROW_FORWARD: row_forward_buffers, Kind.ROW_RECOMPUTE: row_forward_buffers,
        Kind.COLUMN_DGRAD: NormSegment.column_dgrad_buffers,
        Kind.ATTENTION_CORE: heads_exchange_buffers, Kind.CORE_BACKWARD: heads_exchange_buffers,
        Kind.RING_SEND: ring_send_buffers, Kind.RING_SEND_BACKWARD: ring_send_buffers,
        Kind.RING_SEND_GRAD: ring_send_grad_buffers,
    }  # fmt: skip
