"""The ends of a stage where the residual stream comes from another one or goes to one, and what changes its
length in between."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from plait.core.step.segments import Kind
from plait.train.engine.inflight import BoundaryTensors
from plait.train.engine.segment import Before, Runs, Segment
from plait.train.model.resampling import Down as DownModule
from plait.train.model.resampling import Up as UpModule


@dataclass(kw_only=True, eq=False, repr=False)
class End(Segment):
    """crossing: what comes and goes. samples: which sequences of it are this slice's."""

    crossing: BoundaryTensors
    samples: slice


class Enter(End, Before):
    """Has no ops; what came is there."""

    def stream(self) -> Tensor:
        """As it came."""
        return self.crossing.entering["h"][:, self.samples]

    def back(self, gradient: Tensor) -> None:
        """To where it came from."""
        self.crossing.return_gradient("h", self.samples, gradient)


@dataclass(kw_only=True, eq=False, repr=False)
class Leave(End):
    """Hands the residual stream over."""

    before: Before

    def hand_over(self) -> None:
        """N."""
        self.crossing.leave("h", self.samples, self.before.stream())

    def leave_gradient(self) -> None:
        """J."""
        self.before.back(self.crossing.returning["h"][:, self.samples])

    runs: ClassVar[Runs] = {Kind.NORM: hand_over, Kind.NORM_GRAD: leave_gradient}


@dataclass(kw_only=True, eq=False, repr=False)
class Resampled(End, Before):
    """A down or an up. skip: its name where the skip connection crosses stages."""

    before: Before
    skip: str
    h: Tensor = field(init=False)  # the residual stream that comes in, a leaf of autograd's
    out: Tensor = field(init=False)  # what leaves, with what autograd knows of it
    g_out: Tensor = field(init=False)

    def stream(self) -> Tensor:
        """What leaves."""
        out = self.out.detach()
        if not self.shared.graph.backward:
            del self.out
        return out

    def back(self, gradient: Tensor) -> None:
        """The gradient of that."""
        self.g_out = gradient

    def _take_in(self) -> None:
        self.h = self.before.stream().detach().requires_grad_(self.shared.graph.backward)


@dataclass(kw_only=True, eq=False, repr=False)
class DownSegment(Resampled):
    """Halves the sequence. What comes in is kept for the up of its level; ``crosses`` says that this is
    elsewhere."""

    module: DownModule
    crosses: bool
    g_skip: Tensor = field(init=False)

    def halve(self) -> None:
        """N."""
        self._take_in()
        with torch.set_grad_enabled(self.shared.graph.backward):
            self.out = self.module(self.h)
        if self.crosses:
            self.crossing.leave(self.skip, self.samples, self.h)

    def leave_gradient(self) -> None:
        """J."""
        (gradient,) = self._back_through(self.module, self.out, [self.h], self.g_out)
        gradient += self.crossing.returning[self.skip][:, self.samples] if self.crosses else self.g_skip
        self.before.back(gradient)
        del self.h, self.out, self.g_out
        if not self.crosses:
            del self.g_skip

    runs: ClassVar[Runs] = {Kind.NORM: halve, Kind.NORM_GRAD: leave_gradient}


@dataclass(kw_only=True, eq=False, repr=False)
class UpSegment(Resampled):
    """Doubles the sequence and adds what came into ``down``, that of its level; None if this is on another
    stage."""

    module: UpModule
    down: DownSegment | None
    skipped: Tensor = field(init=False)  # what came into the down, a leaf of autograd's

    def double(self) -> None:
        """N."""
        self._take_in()
        came = self.crossing.entering[self.skip][:, self.samples] if self.down is None else self.down.h
        self.skipped = came.detach().requires_grad_(self.shared.graph.backward)
        with torch.set_grad_enabled(self.shared.graph.backward):
            self.out = self.module(self.h, self.skipped)

    def leave_gradient(self) -> None:
        """J."""
        gradient, skipped = self._back_through(self.module, self.out, [self.h, self.skipped], self.g_out)
        if self.down is None:
            self.crossing.return_gradient(self.skip, self.samples, skipped)
        else:
            self.down.g_skip = skipped
        self.before.back(gradient)
        del self.h, self.out, self.g_out, self.skipped

    runs: ClassVar[Runs] = {Kind.NORM: double, Kind.NORM_GRAD: leave_gradient}
