"""What stands between a first and a second weight: an activation, or attention on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import linear

from plait.train.model import sublayers
from plait.train.model.basics import SliceContext
from plait.train.model.kernels import gradients_of


@dataclass(eq=False, repr=False)
class SublayerCore:
    """What one core reads and makes, [S, b, ...]; o and gradients are [S * b, ...].

    repeats: whether op A runs it again.
    """

    module: sublayers.Sublayer
    repeats: bool
    z: Tensor = field(init=False)
    o: Tensor = field(init=False)
    o_graph: Tensor = field(init=False)  # o with what autograd knows of it, where it will be asked
    g_z: Tensor = field(init=False)
    g_inner: Sequence[Tensor] = field(init=False)  # gradients of the core's own parameters

    def project(self, full: Tensor) -> None:
        """The first weight."""
        self.z = linear(full, self.module.column.weight, self.module.column.bias)

    def activate(self, context: SliceContext, *, train: bool) -> None:
        """The core itself. train: a gradient will be asked of this very run."""
        with torch.set_grad_enabled(train):
            o = self.module.core(self.z.requires_grad_(train), context)
        if train:
            self.o_graph = o
        self.o = o.detach().flatten(0, 1)

    def forget_first(self) -> None:
        """What the first weight gave is computed again, or never asked for."""
        del self.z

    def arrive(self) -> None:
        """``o`` is read from now on."""

    def back(self, gradient: Tensor) -> Tensor:
        """From the gradient of what the second weight gives; returns o, and forgets what it needed."""
        g_o = (gradient @ self.module.row.weight).view(self.o_graph.shape)
        g_z, *self.g_inner = gradients_of(self.o_graph, [self.z, *self.module.inner], g_o)
        self.g_z, o = g_z.flatten(0, 1), self.o
        del self.z, self.o, self.o_graph
        return o
