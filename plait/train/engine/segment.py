"""Base classes of segments: what every kind of segment shares.

One object is one segment of one slice of a micro-batch. Its fields are the tensors that live
between its ops. Its methods are the ops (``core.step.segments`` lists their letters) and the
buffers of the ops' collectives. A field without an initial value is set by one op and deleted by
the last op that reads it. ``check`` (``core.step.orders.overlap``) has verified for the instruction
list that a field is set when an op reads it.

Tables of each class: ``runs`` maps ops to functions, ``sends`` maps ops to functions that return
(result, source) of the op's collective. For ops in parts, ``run_parts`` and ``send_parts`` do the
same with functions that take the part's number. ``splits`` maps ops whose collective exchanges unequal
parts to functions that return their sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from plait.core.parallel.strategy import slice_sizes
from plait.core.step.segments import Kind, SegmentGraph
from plait.train.comm.wire import Splits, Wire, empty_like_gathered
from plait.train.engine.gradients import Gradients
from plait.train.model.basics import JoinGradient, Norm, SliceContext
from plait.train.model.kernels import Kernels, Statistics, Summands, gradients_of
from plait.train.model.transformer import Transformer

Buffers = tuple[Tensor, Tensor]
"""Buffers of a collective: (result, source)."""
# The first argument is a segment of the class that owns the table.
Runs = Mapping[Kind, Callable[[Any], None]]
RunParts = Mapping[Kind, Callable[[Any, int], None]]
Sends = Mapping[Kind, Callable[[Any], Buffers]]
SendParts = Mapping[Kind, Callable[[Any, int], Buffers]]


class DifferentiatedModule(Protocol):
    """A module that autograd differentiates: a norm, or a down or up layer."""

    weight: nn.Parameter
    bias: nn.Parameter | None


@dataclass(frozen=True)
class StageContext:
    """Objects that all segments of a stage share."""

    model: Transformer
    graph: SegmentGraph
    wire: Wire
    accumulators: Gradients | None
    kernels: Kernels

    @property
    def gradients(self) -> Gradients:
        """The gradient accumulators to which backward ops add."""
        assert self.accumulators is not None, "this executor has no gradients and can only evaluate"
        return self.accumulators

    @property
    def parts(self) -> int:
        """Number of parts of the input gradient of a first weight (op C)."""
        return self.graph.parts("head", Kind.COLUMN_DGRAD)

    def add(self, entries: Sequence[tuple[nn.Parameter, Tensor, Tensor | None]]) -> None:
        """Add gradients of parameters, or of some rows of parameters."""
        for parameter, gradient, rows in entries:
            if rows is None:
                self.gradients.add(parameter, gradient)
            else:
                self.gradients.add_rows(parameter, rows, gradient)


@dataclass(kw_only=True, eq=False, repr=False)
class Segment:
    """Base class of every segment."""

    runs: ClassVar[Runs] = {}
    run_parts: ClassVar[RunParts] = {}
    sends: ClassVar[Sends] = {}
    send_parts: ClassVar[SendParts] = {}
    splits: ClassVar[Mapping[Kind, Callable[[Any], Splits]]] = {}

    shared: StageContext

    def _back_through(
        self, change: DifferentiatedModule, result: Tensor, inputs: Sequence[Tensor], gradient: Tensor
    ) -> list[Tensor]:
        """Return the gradients of a module's inputs from the gradient of its result; add its
        parameters' gradients."""
        parameters = [parameter for parameter in (change.weight, change.bias) if parameter is not None]
        found = gradients_of(result, [*inputs, *parameters], gradient)
        for parameter, its in zip(parameters, found[len(inputs) :], strict=True):
            self.shared.gradients.add(parameter, its)
        return list(found[: len(inputs)])


class StreamSegment(Segment):
    """A segment with a successor: all but head and leave."""

    def stream(self) -> Tensor:
        """Return the residual stream that leaves the segment, and free the tensors it was made
        of."""
        raise NotImplementedError

    def summands(self) -> Summands | None:
        """Return the terms whose sum is ``stream()``; None if they are no longer separate."""
        return None

    def accept_gradient(self, gradient: Tensor) -> None:
        """Accept the gradient of the residual stream that leaves the segment."""
        raise NotImplementedError


@dataclass(kw_only=True, eq=False, repr=False)
class ResidualSegment(StreamSegment):
    """A segment whose reduced or gathered output is added to the residual stream: embed, attention,
    MLP, block."""

    context: SliceContext
    y_partial: Tensor = field(init=False)
    y: Tensor = field(init=False)  # [parts, S_local, b, H / parts] once reduced
    g_y: Tensor = field(init=False)  # gradient of y, this rank's shard
    g_y_full: Tensor = field(init=False)  # over the whole sequence: g_y, or the result of its all-gather

    def _take_gradient(self, join_gradient: JoinGradient) -> None:
        """Set the gradient of ``y`` and add the gradients of the join's parameters."""
        gradient, parameters = join_gradient
        self.g_y = self.g_y_full = gradient
        self.shared.add(parameters)

    def norm_backward_buffers(self) -> Buffers:
        """Return (result, source) of the all-gather after the next segment's norm backward (op J):
        the output's gradient over the whole sequence."""
        self.g_y = self.g_y.contiguous()  # a slice of a tensor received from another stage is not contiguous
        self.g_y_full = empty_like_gathered(self.g_y, self.shared.wire.size)
        return self.g_y_full, self.g_y

    def _output_gradient(self) -> Tensor:
        """Return the output's gradient over the whole sequence, [S * b, H], and free its field."""
        gradient = self.g_y_full.flatten(0, 1)
        del self.g_y, self.g_y_full
        return gradient


@dataclass(kw_only=True, eq=False, repr=False)
class NormSegment(Segment):
    """A segment that normalises the residual stream and multiplies it with a column-parallel
    weight: attention, MLP, block, head.

    shape: S and b of the weight's input. recomputed_kinds: the kinds of op that run again before
    the backward pass. rejoins: op M also recomputes the incoming residual stream, which is not
    kept.
    """

    previous: StreamSegment
    norm_module: Norm
    shape: tuple[int, int]
    recomputed_kinds: tuple[Kind, ...] = ()
    rejoins: bool = False
    h: Tensor = field(init=False)  # the incoming residual stream, an autograd leaf
    n: Tensor = field(init=False)  # h normalised, with its autograd graph; this rank's shard
    statistics: Statistics = field(init=False)
    full: Tensor = field(init=False)  # n over the whole sequence, [S, b, H]: n, or the result of its all-gather
    g_full: Tensor = field(init=False)  # gradient of full: partial, then reduced
    g_n: Tensor = field(init=False)  # gradient of n, this rank's shard

    def norm(self) -> None:
        """Run op N: add up the residual stream and normalise it."""
        kernels = self.shared.kernels
        if kernels.fuses and (sum_ := self.previous.summands()):
            self.h, self.n, self.statistics = kernels.join_norm(sum_, self.norm_module.scale)
            self.full = self.n
            return
        self._join()
        self._normalise(keep=Kind.NORM_RECOMPUTE not in self.recomputed_kinds)

    def _join(self) -> None:
        self.h = self.previous.stream().detach().requires_grad_(self.shared.graph.backward)

    def norm_recompute(self) -> None:
        """Run op M: normalise again, for the backward pass."""
        if self.rejoins:
            self._join()
        self._normalise(keep=True)

    def _normalise(self, *, keep: bool) -> None:
        with torch.set_grad_enabled(keep and self.shared.graph.backward):
            self.n, self.statistics = self.shared.kernels.norm(self.h, self.norm_module.scale)
        self.full = self.n.detach()

    def norm_buffers(self) -> Buffers:
        """Return (result, source) of the all-gather of the normalised stream, after op N or M."""
        shard = self.n.detach()
        self.full = empty_like_gathered(shard, self.shared.wire.size)
        return self.full, shard

    def _input_gradient(self, part: int, products: Sequence[tuple[Tensor, Tensor]]) -> bool:
        """Run one part of op C: the sum of products of gradients [S * b, out] and weights [out, H].
        Return True if it is the last part."""
        parts = self.shared.parts
        if part == 0:
            self.g_full = products[0][1].new_empty((*self.shape, products[0][1].shape[1]))
            self.g_n = self.g_full
        out = row_block(self.g_full.flatten(0, 1), part, parts)
        for number, (gradient, weight) in enumerate(products):
            rows = row_block(gradient, part, parts)
            out.addmm_(rows, weight) if number else torch.mm(rows, weight, out=out)
        return part == parts - 1

    def column_dgrad_buffers(self, part: int) -> Buffers:
        """Return (result, source) of the reduction of the input gradient, after op C."""
        if self.shared.graph.sequence_parallel:
            self.g_n = shard_of(self.g_full, self.shared.wire, dim=0)
            return self.g_n, self.g_full
        rows = row_block(self.g_full.flatten(0, 1), part, self.shared.parts)
        return rows, rows

    def _back_through_norm(self, past: Tensor | None = None) -> Tensor:
        """Return the gradient of h; add the gradients of the norm's parameters. past: gradient of
        the residual path around the norm."""
        norm, scale = self.norm_module, self.norm_module.scale
        gradient, *found = self.shared.kernels.norm_gradient(self.n, self.h, scale, self.statistics, self.g_n, past)
        for parameter, its in zip((norm.weight, norm.bias), found, strict=False):
            assert parameter is not None
            self.shared.gradients.add(parameter, its)
        return gradient

    def _forget(self) -> None:
        """Free the fields that nothing reads after the norm's backward (op J)."""
        del self.h, self.n, self.statistics, self.g_full, self.g_n


def shard_of(whole: Tensor, wire: Wire, dim: int) -> Tensor:
    """Return an empty buffer for a rank's shard of ``whole`` along ``dim``."""
    shape = list(whole.shape)
    shape[dim] //= wire.size
    return whole.new_empty(shape)


def row_block(rows: Tensor, part: int, parts: int) -> Tensor:
    """Return the rows of part ``part`` of ``parts`` equal parts of [M, ...]."""
    return rows.split(slice_sizes(rows.shape[0], parts))[part] if parts > 1 else rows
