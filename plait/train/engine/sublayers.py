"""Attention, MLP, or both side by side: a column-parallel weight, a core, a row-parallel weight."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from plait.core.step.segments import Kind
from plait.train.engine.attention import SharedCore
from plait.train.engine.cores import SublayerCore
from plait.train.engine.segment import Adding, Buffers, Normed, RunParts, Runs, SendParts, Sends, shard_of
from plait.train.model import sublayers
from plait.train.model.kernels import Summands
from plait.train.model.sublayers import ParallelBlock


@dataclass(kw_only=True, eq=False, repr=False)
class SublayerSegment(Normed, Adding):
    """One of them; ``module`` has the weights."""

    module: sublayers.Sublayer | ParallelBlock
    cores: list[SublayerCore] = field(init=False)  # one; a parallel block: attention, MLP
    operands: dict[int, tuple[Tensor, Tensor]] = field(init=False)  # by part: what W multiplies
    g_h: Tensor = field(init=False)  # gradient of the residual stream that leaves

    def _core(self, branch: sublayers.Sublayer, *, repeats: bool) -> SublayerCore:
        if isinstance(branch, sublayers.Attention) and self.shared.graph.attention:
            return SharedCore(branch, repeats, self.context, self.shared.graph.backward)
        return SublayerCore(branch, repeats)

    @property
    def _shared_core(self) -> SharedCore:
        """Attention's, where other ranks have a part in it."""
        core = self.cores[0]
        assert isinstance(core, SharedCore)
        return core

    def forward(self) -> None:
        """F: first weight and core."""
        graph = self.shared.graph
        again, full = Kind.FIRST_AGAIN in self.again, graph.recompute != "selective"
        self.cores = [self._core(branch, repeats=again and (branch.cheap or full)) for branch in self.module.branches]
        for core in self.cores:
            core.project(self.full)
        for core in self.cores:
            core.activate(self.context, train=graph.backward and not core.repeats)
            if not graph.backward or (core.repeats and full):
                core.forget_first()
        if not graph.backward or Kind.NORM_AGAIN in self.again:
            del self.n, self.full, self.statistics

    def row(self, part: int) -> None:
        """R: second weights of all branches, one column part; what will be computed again is dropped after
        the last."""
        self._multiply(part)
        if part == self.shared.graph.p2 - 1:
            for core in self.cores:
                if core.repeats or not self.shared.graph.backward:
                    del core.o

    def row_again(self, part: int) -> None:
        """Y: the same; D reads what it read."""
        self._multiply(part)

    def _multiply(self, part: int) -> None:
        parts, weights = self.shared.graph.p2, [core.module.row.weight for core in self.cores]  # of [H, K]
        width = weights[0].shape[0] // parts
        if part == 0:
            self.y_partial = weights[0].new_empty((parts, *self.shape, width))
            self.y = self.y_partial
            for core in self.cores:
                core.arrive()
        out = self.y_partial[part].view(-1, width)
        for number, (core, weight) in enumerate(zip(self.cores, weights, strict=True)):
            columns = weight[part * width : (part + 1) * width].t()
            out.addmm_(core.o, columns) if number else torch.mm(core.o, columns, out=out)

    def reduce_row(self, part: int) -> Buffers:
        """After R and Y."""
        if self.shared.graph.sequence_parallel and self.y is self.y_partial:
            self.y = shard_of(self.y_partial, self.shared.wire, dim=1)
        return self.y[part], self.y_partial[part]

    def stream(self) -> Tensor:
        """The residual stream, with what this sublayer adds to it."""
        return self.shared.kernels.join(self.summands())

    def summands(self) -> Summands:
        """The two; what they were made of is forgotten."""
        found = self.module.summands(self.h, self.y, self.context)
        del self.y, self.y_partial
        if not self.shared.graph.backward or self.rejoins:
            del self.h
        return found

    def core_again(self) -> None:
        """A."""
        for core in self.cores if self.shared.graph.recompute != "selective" else []:
            core.project(self.full)
        for core in self.cores:
            if core.repeats:
                core.activate(self.context, train=True)

    def core_gradient(self) -> None:
        """D: back through second weights and cores."""
        gradient, inputs = self._output_gradient(), self.full.flatten(0, 1)
        self.operands = {}
        for number, core in enumerate(self.cores):
            self.operands[2 * number] = gradient, core.back(gradient)
            if not isinstance(core, SharedCore):
                self._add_inner(core)
                self.operands[2 * number + 1] = core.g_z, inputs
        if not isinstance(self.cores[0], SharedCore):
            del self.full

    def _add_inner(self, core: SublayerCore) -> None:
        """The gradients of the core's own parameters."""
        for parameter, found in zip(core.module.inner, core.g_inner, strict=True):
            self.shared.gradients.add(parameter, found)
        del core.g_inner

    def input_gradient(self, part: int) -> None:
        """C: back through first weights."""
        if self._input_gradient(part, [(core.g_z, core.module.column.weight) for core in self.cores]):
            del self.cores

    def weight_gradient(self, part: int) -> None:
        """W: the product of one weight's operands."""
        gradients, branch = self.shared.gradients, self.module.branches[part // 2]
        weight = branch.column if part % 2 else branch.row
        gradient, inputs = self.operands.pop(part)
        gradients.add_product(weight.weight, gradient, inputs)
        if part % 2 and weight.bias is not None:  # the second weight's bias belongs to join
            gradients.add(weight.bias, gradient.sum(0))

    def leave_gradient(self) -> None:
        """J."""
        self.before.back(self._back_through_norm(self.g_h))
        self._forget()
        del self.g_h

    def back(self, gradient: Tensor) -> None:
        """The gradient of the stream that leaves: past the sublayer, and of what it adds."""
        self._take_gradient(self.module.join_gradient(gradient, self.context))
        self.g_h = gradient

    # ---- attention that is shared: its ops are the core's ----

    def core_once_more(self) -> None:
        """X."""
        self._shared_core.again()

    def turn(self, part: int) -> None:
        """T."""
        self._shared_core.turn(part)

    def attend(self, part: int) -> None:
        """K."""
        self._shared_core.attend(part)

    def turn_back(self, part: int) -> None:
        """S."""
        self._shared_core.turn_back(part)

    def block_gradient(self, part: int) -> None:
        """G."""
        self._shared_core.block_gradient(part)

    def hand_on(self, part: int) -> None:
        """H."""
        self._shared_core.hand_on(part)

    def send_gradients(self) -> None:
        """E."""
        self._shared_core.send_gradients()

    def first_gradient(self) -> None:
        """Z."""
        core = self._shared_core
        core.finish()
        self._add_inner(core)
        self.operands[1] = core.g_z, self.full.flatten(0, 1)
        del self.full

    def exchange(self, _part: int = 0) -> Buffers:
        """After F, A, K, X, D, G and E."""
        return self._shared_core.exchange()

    def rotate_block(self, part: int) -> Buffers:
        """After T and S."""
        return self._shared_core.rotate_block(part)

    def rotate_gradient(self, _part: int) -> Buffers:
        """After H."""
        return self._shared_core.rotate_gradient()

    runs: ClassVar[Runs] = {
        Kind.NORM: Normed.take_in,
        Kind.FIRST: forward,
        Kind.NORM_AGAIN: Normed.normalise_again,
        Kind.FIRST_AGAIN: core_again,
        Kind.CORE_AGAIN: core_once_more,
        Kind.SECOND_GRAD: core_gradient,
        Kind.HEADS_GRAD: send_gradients,
        Kind.PROJECTED_GRAD: first_gradient,
        Kind.NORM_GRAD: leave_gradient,
    }
    run_parts: ClassVar[RunParts] = {
        Kind.ROTATE: turn, Kind.CORE: attend, Kind.SECOND: row, Kind.SECOND_AGAIN: row_again,
        Kind.ROTATE_AGAIN: turn_back, Kind.CORE_GRAD: block_gradient, Kind.ROTATE_GRAD: hand_on,
        Kind.FIRST_GRAD: input_gradient, Kind.WEIGHT_GRAD: weight_gradient,
    }  # fmt: skip
    sends: ClassVar[Sends] = {
        Kind.NORM: Normed.gather_norm, Kind.NORM_AGAIN: Normed.gather_norm, Kind.NORM_GRAD: Adding.gather_gradient,
        **dict.fromkeys((Kind.FIRST, Kind.FIRST_AGAIN, Kind.CORE_AGAIN, Kind.SECOND_GRAD, Kind.HEADS_GRAD), exchange),
    }  # fmt: skip
    send_parts: ClassVar[SendParts] = {
        Kind.SECOND: reduce_row, Kind.SECOND_AGAIN: reduce_row, Kind.FIRST_GRAD: Normed.reduce_input_gradient,
        **dict.fromkeys((Kind.CORE, Kind.CORE_GRAD), exchange),
        Kind.ROTATE: rotate_block, Kind.ROTATE_AGAIN: rotate_block, Kind.ROTATE_GRAD: rotate_gradient,
    }  # fmt: skip
