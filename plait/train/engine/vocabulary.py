"""Segments at the ends: word embeddings and the head with its loss, both split over the vocabulary;
and the stage boundaries where the residual stream is received, sent, or changes its length."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from plait.core.step.segments import Kind
from plait.train.comm.wire import empty_like_gathered
from plait.train.engine.inflight import BoundaryTensors
from plait.train.engine.segment import (
    Buffers,
    NormSegment,
    ResidualSegment,
    RunParts,
    Runs,
    Segment,
    SendParts,
    Sends,
    StreamSegment,
)
from plait.train.model.basics import Down as DownModule
from plait.train.model.basics import Up as UpModule
from plait.train.model.embedding import RowExchange, VocabularyLoss


@dataclass(kw_only=True, eq=False, repr=False)
class Embed(ResidualSegment):
    """The embedding segment. tokens: [S, b]. exchange: which rows of the embedding are sent.
    placed: all rows in token order, if the segment that reads them was captured
    (``plait.train.engine.graphs``)."""

    tokens: Tensor
    exchange: RowExchange
    placed: Tensor | None = None

    def look_up(self) -> None:
        """Run op R: look up the rows that the tokens name and this rank holds."""
        self.y_partial = self.shared.model.embedding.words.weight[self.exchange.send]
        self.y = self.y_partial

    def rows_buffers(self) -> Buffers:
        """Return (result, source) of the all-gather of embedding rows, after the look-up (op R)."""
        self.y = empty_like_gathered(self.y_partial, self.shared.wire.size)
        return self.y, self.y_partial

    def place(self) -> Tensor:
        """Return the gathered embedding rows in token order, [S, b, H]. Their number differs from
        batch to batch."""
        words = self.y[self.exchange.arrival]
        del self.y, self.y_partial
        return words

    def stream(self) -> Tensor:
        """Return the first residual stream of the model."""
        words = self.place() if self.placed is None else self.placed
        return self.shared.model.embedding.join(words, self.context)

    def accept_gradient(self, gradient: Tensor) -> None:
        """Accept the gradient of the model's first residual stream, [S, b, H]."""
        self._take_gradient(self.shared.model.embedding.join_gradient(gradient, self.context))

    def wgrad(self) -> None:
        """Run op W: add the gradient to the embedding rows that this rank holds."""
        embedding = self.shared.model.embedding
        rows, here = embedding.local(self.tokens)
        found = self._output_gradient() * here.flatten()[:, None]
        self.shared.gradients.add_rows(embedding.words.weight, rows.flatten(), found)

    runs: ClassVar[Runs] = {Kind.ROW_FORWARD: look_up, Kind.WGRAD: wgrad}
    sends: ClassVar[Sends] = {Kind.ROW_FORWARD: rows_buffers, Kind.NORM_BACKWARD: ResidualSegment.norm_backward_buffers}


@dataclass(kw_only=True, eq=False, repr=False)
class Head(NormSegment):
    """The head segment. targets: [S, b]. scale: of the loss. weights: of the targets, [S, b]; None:
    all 1. ``total``, after L: the scaled loss of the slice, 0-d. ``losses``, without a backward
    pass: each token's loss, [S, b]."""

    targets: Tensor
    scale: float | Tensor
    weights: Tensor | None = None
    loss: VocabularyLoss = field(init=False)
    total: Tensor = field(init=False)
    losses: Tensor = field(init=False)
    g_z: Tensor = field(init=False)  # gradient of the logits
    operands: tuple[Tensor, Tensor] = field(init=False)  # operands of W's product

    def column_forward(self) -> None:
        """Run op F: this rank's logits and the softmax statistics that other ranks need."""
        model = self.shared.model
        logits = self.full.flatten(0, 1) @ model.head.weight.t()
        self.loss = VocabularyLoss(
            logits,
            self.targets.flatten(),
            model.embedding,
            model.spec.vocab,
            self.shared.wire.size,
            self.shared.kernels,
        )

    def statistics_buffers(self) -> Buffers:
        """Return (result, source) of the all-gather of the loss's softmax statistics, after op
        F."""
        return self.loss.gathered, self.loss.statistics

    def finish_loss(self) -> None:
        """Run op L: the loss from the gathered statistics, and the gradient of the logits."""
        weights = None if self.weights is None else self.weights.flatten()
        self.total, gradient = self.loss.finish(self.scale, weights, gradient=self.shared.graph.backward)
        if gradient is not None:
            self.g_z, self.operands = gradient, (gradient, self.full.flatten(0, 1))
        else:
            self.losses = self.loss.losses.view(self.targets.shape)
        del self.loss, self.full

    def column_dgrad(self, part: int) -> None:
        """Run one part of op C: the gradient of the head's input."""
        if self._input_gradient(part, [(self.g_z, self.shared.model.head.weight)]):
            del self.g_z

    def wgrad(self) -> None:
        """Run op W: add the gradient of the head's weight."""
        self.shared.gradients.add_product(self.shared.model.head.weight, *self.operands)
        del self.operands

    def norm_backward(self) -> None:
        """Run op J: the backward pass of the last norm, around which no residual path goes."""
        self.previous.accept_gradient(self._back_through_norm())
        self._forget()

    runs: ClassVar[Runs] = {
        Kind.NORM: NormSegment.norm,
        Kind.COLUMN_FORWARD: column_forward,
        Kind.LOSS: finish_loss,
        Kind.WGRAD: wgrad,
        Kind.NORM_BACKWARD: norm_backward,
    }
    run_parts: ClassVar[RunParts] = {Kind.COLUMN_DGRAD: column_dgrad}
    sends: ClassVar[Sends] = {Kind.NORM: NormSegment.norm_buffers, Kind.COLUMN_FORWARD: statistics_buffers}
    send_parts: ClassVar[SendParts] = {Kind.COLUMN_DGRAD: NormSegment.column_dgrad_buffers}


@dataclass(kw_only=True, eq=False, repr=False)
class End(Segment):
    """A segment at a stage boundary. crossing: tensors exchanged with other stages. samples: this
    slice's sequences in them."""

    crossing: BoundaryTensors
    samples: slice


class Enter(End, StreamSegment):
    """The start of a stage that receives the residual stream. It has no ops."""

    def stream(self) -> Tensor:
        """Return the received residual stream."""
        return self.crossing.entering["h"][:, self.samples]

    def accept_gradient(self, gradient: Tensor) -> None:
        """Store the gradient to be sent to the stage that sent the residual stream."""
        self.crossing.return_gradient("h", self.samples, gradient)


@dataclass(kw_only=True, eq=False, repr=False)
class Leave(End):
    """The end of a stage that sends the residual stream."""

    previous: StreamSegment

    def send_stream(self) -> None:
        """Run op N: store the residual stream to be sent."""
        self.crossing.leave("h", self.samples, self.previous.stream())

    def receive_grad(self) -> None:
        """Hand the gradient that another stage sent to the previous segment (op J)."""
        self.previous.accept_gradient(self.crossing.returning["h"][:, self.samples])

    runs: ClassVar[Runs] = {Kind.NORM: send_stream, Kind.NORM_BACKWARD: receive_grad}


@dataclass(kw_only=True, eq=False, repr=False)
class Resampled(End, StreamSegment):
    """A down or an up layer. skip: the skip connection's name if it crosses stages."""

    previous: StreamSegment
    skip: str
    h: Tensor = field(init=False)  # the incoming residual stream, an autograd leaf
    out: Tensor = field(init=False)  # the outgoing residual stream with its autograd graph
    g_out: Tensor = field(init=False)

    def stream(self) -> Tensor:
        """Return the outgoing residual stream."""
        out = self.out.detach()
        if not self.shared.graph.backward:
            del self.out
        return out

    def accept_gradient(self, gradient: Tensor) -> None:
        """Accept the gradient of the outgoing residual stream."""
        self.g_out = gradient

    def _take_in(self) -> None:
        self.h = self.previous.stream().detach().requires_grad_(self.shared.graph.backward)


@dataclass(kw_only=True, eq=False, repr=False)
class DownSegment(Resampled):
    """A segment that halves the sequence. Its input is kept for the up layer of its level;
    ``crosses`` is True if that is on another stage."""

    module: DownModule
    crosses: bool
    g_skip: Tensor = field(init=False)

    def downsample(self) -> None:
        """Run op N: halve the sequence; send the input to the stage of the up layer if that is
        elsewhere."""
        self._take_in()
        with torch.set_grad_enabled(self.shared.graph.backward):
            self.out = self.module(self.h)
        if self.crosses:
            self.crossing.leave(self.skip, self.samples, self.h)

    def downsample_grad(self) -> None:
        """Run op J: the backward pass of the down layer, plus the skip connection's gradient."""
        (gradient,) = self._back_through(self.module, self.out, [self.h], self.g_out)
        gradient += self.crossing.returning[self.skip][:, self.samples] if self.crosses else self.g_skip
        self.previous.accept_gradient(gradient)
        del self.h, self.out, self.g_out
        if not self.crosses:
            del self.g_skip

    runs: ClassVar[Runs] = {Kind.NORM: downsample, Kind.NORM_BACKWARD: downsample_grad}


@dataclass(kw_only=True, eq=False, repr=False)
class UpSegment(Resampled):
    """A segment that doubles the sequence and adds the input of ``down``, the down layer of its
    level; None if that is on another stage."""

    module: UpModule
    down: DownSegment | None
    skipped: Tensor = field(init=False)  # the down layer's input, an autograd leaf

    def upsample(self) -> None:
        """Run op N: double the sequence and add the skip connection."""
        self._take_in()
        came = self.crossing.entering[self.skip][:, self.samples] if self.down is None else self.down.h
        self.skipped = came.detach().requires_grad_(self.shared.graph.backward)
        with torch.set_grad_enabled(self.shared.graph.backward):
            self.out = self.module(self.h, self.skipped)

    def upsample_grad(self) -> None:
        """Run op J: the backward pass of the up layer; hand the skip connection's gradient to the
        down layer or its stage."""
        gradient, skipped = self._back_through(self.module, self.out, [self.h, self.skipped], self.g_out)
        if self.down is None:
            self.crossing.return_gradient(self.skip, self.samples, skipped)
        else:
            self.down.g_skip = skipped
        self.previous.accept_gradient(gradient)
        del self.h, self.out, self.g_out, self.skipped

    runs: ClassVar[Runs] = {Kind.NORM: upsample, Kind.NORM_BACKWARD: upsample_grad}
