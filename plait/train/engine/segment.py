"""What the kinds of segments have in common.

One object is one segment of one slice of a micro-batch: its fields are what lives between its ops, its
methods are the ops (``core.step.segments`` lists the letters) and what their collectives work on. Fields
without a value at first are set by an op and deleted by the last op that reads them, so that no tensor lives
longer than it must; that they are there when an op reads them is what ``check`` has made sure of for the
list.

``runs`` and ``sends`` are the tables of a kind of segment: what an op does, and which (result, source) the
collective of its result works on. Where an op comes in parts, ``run_parts`` and ``send_parts`` have it, and
take the part's number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from plait.core.parallel.strategy import slice_sizes
from plait.core.step.segments import Kind, SegmentGraph
from plait.train.comm.wire import Wire, empty_like_gathered
from plait.train.engine.gradients import Gradients
from plait.train.model.basics import JoinGradient, Norm, SliceContext
from plait.train.model.kernels import Kernels, Statistics, Summands, gradients_of
from plait.train.model.transformer import Transformer

Buffers = tuple[Tensor, Tensor]
"""(result, source) of a collective."""
# The first argument is the segment, of the class that has the table.
Runs = Mapping[Kind, Callable[[Any], None]]
RunParts = Mapping[Kind, Callable[[Any, int], None]]
Sends = Mapping[Kind, Callable[[Any], Buffers]]
SendParts = Mapping[Kind, Callable[[Any, int], Buffers]]


class DifferentiatedModule(Protocol):
    """A module that autograd differentiates: a norm, a down or an up."""

    weight: nn.Parameter
    bias: nn.Parameter | None


@dataclass(frozen=True)
class StageContext:
    """What all segments of a stage work with."""

    model: Transformer
    graph: SegmentGraph
    wire: Wire
    accumulators: Gradients | None
    kernels: Kernels

    @property
    def gradients(self) -> Gradients:
        """Where a backward op adds."""
        assert self.accumulators is not None, "an executor without gradients only evaluates"
        return self.accumulators

    @property
    def parts(self) -> int:
        """How many C comes in."""
        return self.graph.parts("head", Kind.FIRST_GRAD)

    def add(self, found: Sequence[tuple[nn.Parameter, Tensor, Tensor | None]]) -> None:
        """Add gradients of parameters, or of some rows of them."""
        for parameter, gradient, rows in found:
            if rows is None:
                self.gradients.add(parameter, gradient)
            else:
                self.gradients.add_rows(parameter, rows, gradient)


@dataclass(kw_only=True, eq=False, repr=False)
class Segment:
    """Any of them."""

    runs: ClassVar[Runs] = {}
    run_parts: ClassVar[RunParts] = {}
    sends: ClassVar[Sends] = {}
    send_parts: ClassVar[SendParts] = {}

    shared: StageContext

    def _back_through(
        self, change: DifferentiatedModule, result: Tensor, inputs: Sequence[Tensor], gradient: Tensor
    ) -> list[Tensor]:
        """The gradients of a module's inputs from that of its result; those of its parameters are added."""
        parameters = [parameter for parameter in (change.weight, change.bias) if parameter is not None]
        found = gradients_of(result, [*inputs, *parameters], gradient)
        for parameter, its in zip(parameters, found[len(inputs) :], strict=True):
            self.shared.gradients.add(parameter, its)
        return list(found[: len(inputs)])


class Before(Segment):
    """Has a segment behind it: all but head and leave."""

    def stream(self) -> Tensor:
        """The residual stream that leaves it; what this was made of is forgotten."""
        raise NotImplementedError

    def summands(self) -> Summands | None:
        """The same before it is added up; None where it is no sum any more."""
        return None

    def back(self, gradient: Tensor) -> None:
        """Take the gradient of that."""
        raise NotImplementedError


@dataclass(kw_only=True, eq=False, repr=False)
class Adding(Before):
    """Has an output that is reduced or gathered, and joins the residual stream: embed, attention, MLP,
    block."""

    context: SliceContext
    y_partial: Tensor = field(init=False)
    y: Tensor = field(init=False)  # [parts, S_local, b, H / parts] once reduced
    g_y: Tensor = field(init=False)  # gradient of y, this rank's shard
    g_y_full: Tensor = field(init=False)  # over the whole sequence: a gather, if there is one, replaces g_y

    def _take_gradient(self, found: JoinGradient) -> None:
        """Of ``y``, and of the parameters that join has."""
        gradient, parameters = found
        self.g_y = self.g_y_full = gradient
        self.shared.add(parameters)

    def gather_gradient(self) -> Buffers:
        """After J of the segment behind: the gradient of the output over the whole sequence."""
        self.g_y = self.g_y.contiguous()  # a slice of what came from another stage is not
        self.g_y_full = empty_like_gathered(self.g_y, self.shared.wire.size)
        return self.g_y_full, self.g_y

    def _output_gradient(self) -> Tensor:
        """Over the whole sequence, [S * b, H]; it is forgotten here."""
        gradient = self.g_y_full.flatten(0, 1)
        del self.g_y, self.g_y_full
        return gradient


@dataclass(kw_only=True, eq=False, repr=False)
class Normed(Segment):
    """Normalises the residual stream and multiplies it with a column-parallel weight: attention, MLP, block,
    head.

    shape: S and b of what that weight sees. again: the kinds of op that run again before the backward.
    rejoins: M adds up the stream that comes in, which is not kept.
    """

    before: Before
    norm: Norm
    shape: tuple[int, int]
    again: tuple[Kind, ...] = ()
    rejoins: bool = False
    h: Tensor = field(init=False)  # the residual stream that comes in, a leaf of autograd's
    n: Tensor = field(init=False)  # h normalised, with what autograd knows of it; this rank's shard
    statistics: Statistics = field(init=False)
    full: Tensor = field(init=False)  # n over the whole sequence, [S, b, H]: a gather, if there is one, replaces n
    g_full: Tensor = field(init=False)  # gradient of full: partial, then reduced
    g_n: Tensor = field(init=False)  # gradient of n, this rank's shard

    def take_in(self) -> None:
        """N."""
        kernels = self.shared.kernels
        if kernels.fuses and (sum_ := self.before.summands()):
            self.h, self.n, self.statistics = kernels.join_norm(sum_, self.norm.scale)
            self.full = self.n
            return
        self._join()
        self._normalise(keep=Kind.NORM_AGAIN not in self.again)

    def _join(self) -> None:
        self.h = self.before.stream().detach().requires_grad_(self.shared.graph.backward)

    def normalise_again(self) -> None:
        """M."""
        if self.rejoins:
            self._join()
        self._normalise(keep=True)

    def _normalise(self, *, keep: bool) -> None:
        with torch.set_grad_enabled(keep and self.shared.graph.backward):
            self.n, self.statistics = self.shared.kernels.norm(self.h, self.norm.scale)
        self.full = self.n.detach()

    def gather_norm(self) -> Buffers:
        """After N or M."""
        shard = self.n.detach()
        self.full = empty_like_gathered(shard, self.shared.wire.size)
        return self.full, shard

    def _input_gradient(self, part: int, products: Sequence[tuple[Tensor, Tensor]]) -> bool:
        """One part of C: products of gradients [S * b, out] and weights [out, H], added up; whether it is the
        last."""
        parts = self.shared.parts
        if part == 0:
            self.g_full = products[0][1].new_empty((*self.shape, products[0][1].shape[1]))
            self.g_n = self.g_full
        out = _part(self.g_full.flatten(0, 1), part, parts)
        for number, (gradient, weight) in enumerate(products):
            rows = _part(gradient, part, parts)
            out.addmm_(rows, weight) if number else torch.mm(rows, weight, out=out)
        return part == parts - 1

    def reduce_input_gradient(self, part: int) -> Buffers:
        """After C."""
        if self.shared.graph.sequence_parallel:
            self.g_n = shard_of(self.g_full, self.shared.wire, dim=0)
            return self.g_n, self.g_full
        rows = _part(self.g_full.flatten(0, 1), part, self.shared.parts)
        return rows, rows

    def _back_through_norm(self, past: Tensor | None = None) -> Tensor:
        """The gradient of h. past: of what goes past the norm."""
        norm, scale = self.norm, self.norm.scale
        gradient, *found = self.shared.kernels.norm_gradient(self.n, self.h, scale, self.statistics, self.g_n, past)
        for parameter, its in zip((norm.weight, norm.bias), found, strict=False):
            assert parameter is not None
            self.shared.gradients.add(parameter, its)
        return gradient

    def _forget(self) -> None:
        """After J."""
        del self.h, self.n, self.statistics, self.g_full, self.g_n


def shard_of(whole: Tensor, wire: Wire, dim: int) -> Tensor:
    """A buffer for a rank's part along ``dim``."""
    shape = list(whole.shape)
    shape[dim] //= wire.size
    return whole.new_empty(shape)


def _part(rows: Tensor, part: int, parts: int) -> Tensor:
    """One of ``parts`` of the rows of [M, ...]."""
    return rows.split(slice_sizes(rows.shape[0], parts))[part] if parts > 1 else rows
