"""Attention, MLP, or both side by side: a column-parallel weight, a core, a row-parallel weight."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import linear

from plait.train.engine.segment import (
    Adding,
    Buffers,
    Normed,
    RunParts,
    Runs,
    SendParts,
    Sends,
    shard_of,
)
from plait.train.model import sublayers
from plait.train.model.basics import SliceContext
from plait.train.model.kernels import Summands, gradients_of
from plait.train.model.sublayers import ParallelBlock


@dataclass(eq=False, repr=False)
class Core:
    """Between a first and a second weight: what one core reads and makes, [S, b, ...]; o and gradients are [S
    * b, ...].

    repeats: whether op A runs it again.
    """

    module: sublayers.Sublayer
    repeats: bool
    z: Tensor = field(init=False)
    o: Tensor = field(init=False)
    o_graph: Tensor = field(init=False)  # o with what autograd knows of it, where it will be asked
    g_z: Tensor = field(init=False)
    kept: list[Tensor] | None = None  # what a core that runs again keeps of what it needed other ranks for

    def project(self, full: Tensor) -> None:
        """The first weight."""
        self.z = linear(full, self.module.column.weight, self.module.column.bias)

    def activate(self, context: SliceContext, *, train: bool) -> None:
        """The core itself."""
        with torch.set_grad_enabled(train):
            o = self.module.core(self.z.requires_grad_(train), context, self.kept)
        if train:
            self.o_graph = o
        self.o = o.detach().flatten(0, 1)

    def back(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of z from that of the output; gives it and o, and forgets what it needed."""
        g_o = (gradient @ self.module.row.weight).view(self.o_graph.shape)
        (g_z,) = gradients_of(self.o_graph, [self.z], g_o)
        self.g_z, o = g_z.flatten(0, 1), self.o
        del self.z, self.o, self.o_graph
        return self.g_z, o


@dataclass(kw_only=True, eq=False, repr=False)
class Sublayer(Normed, Adding):
    """One of them; ``module`` has the weights."""

    module: sublayers.Sublayer | ParallelBlock
    cores: list[Core] = field(init=False)  # one; a parallel block: attention, MLP
    operands: dict[int, tuple[Tensor, Tensor]] = field(init=False)  # by part: what W multiplies
    g_h: Tensor = field(init=False)  # gradient of the residual stream that leaves

    def forward(self) -> None:
        """F: first weight and core."""
        graph = self.shared.graph
        again, full = "A" in self.again, graph.recompute == "full"
        self.cores = [Core(branch, again and (branch.cheap or full)) for branch in self.module.branches]
        for core in self.cores:
            core.project(self.full)
        for core in self.cores:
            core.kept = [] if core.repeats else None
            core.activate(self.context, train=graph.backward and not core.repeats)
            if not graph.backward or (core.repeats and full):
                del core.z
        if not graph.backward or "M" in self.again:
            del self.n, self.full, self.statistics

    def row(self, part: int) -> None:
        """R: second weights of all branches, one column part; what will be computed again is dropped after
        the last."""
        parts, weights = self.shared.graph.p2, [core.module.row.weight for core in self.cores]  # of [H, K]
        width = weights[0].shape[0] // parts
        if part == 0:
            self.y_partial = weights[0].new_empty((parts, *self.shape, width))
            self.y = self.y_partial
        out = self.y_partial[part].view(-1, width)
        for number, (core, weight) in enumerate(zip(self.cores, weights, strict=True)):
            columns = weight[part * width : (part + 1) * width].t()
            out.addmm_(core.o, columns) if number else torch.mm(core.o, columns, out=out)
            if part == parts - 1 and (core.repeats or not self.shared.graph.backward):
                del core.o

    def reduce_row(self, part: int) -> Buffers:
        """After R."""
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
        if not self.shared.graph.backward:
            del self.h
        return found

    def core_again(self) -> None:
        """A."""
        for core in self.cores if self.shared.graph.recompute == "full" else []:
            core.project(self.full)
        for core in self.cores:
            if core.repeats:
                core.activate(self.context, train=True)
                core.kept = None

    def core_gradient(self) -> None:
        """D: back through second weights and cores."""
        gradient, inputs = self._output_gradient(), self.full.flatten(0, 1)
        self.operands = {}
        for number, core in enumerate(self.cores):
            g_z, o = core.back(gradient)
            self.operands |= {2 * number: (gradient, o), 2 * number + 1: (g_z, inputs)}
        del self.full

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

    runs: ClassVar[Runs] = {
        "N": Normed.take_in,
        "F": forward,
        "M": Normed.normalise_again,
        "A": core_again,
        "D": core_gradient,
        "J": leave_gradient,
    }
    run_parts: ClassVar[RunParts] = {"R": row, "C": input_gradient, "W": weight_gradient}
    sends: ClassVar[Sends] = {"N": Normed.gather_norm, "M": Normed.gather_norm, "J": Adding.gather_gradient}
    send_parts: ClassVar[SendParts] = {"R": reduce_row, "C": Normed.reduce_input_gradient}
