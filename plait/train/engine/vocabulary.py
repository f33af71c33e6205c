"""The model's two ends: word embeddings, and the head with its loss. Both are cut over the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from plait.core.step.segments import Kind
from plait.train.comm.wire import empty_like_gathered
from plait.train.engine.segment import Adding, Buffers, Normed, RunParts, Runs, SendParts, Sends
from plait.train.model.embedding import RowExchange
from plait.train.model.loss import VocabularyLoss


@dataclass(kw_only=True, eq=False, repr=False)
class Embed(Adding):
    """tokens: [S, b]. exchange: which rows of the embedding travel. placed: every row at its token's place,
    if what reads it there was captured (``plait.train.engine.graphs``)."""

    tokens: Tensor
    exchange: RowExchange
    placed: Tensor | None = None

    def look_up(self) -> None:
        """R: this rank's rows of those that the tokens name."""
        self.y_partial = self.shared.model.embedding.words.weight[self.exchange.send]
        self.y = self.y_partial

    def gather_rows(self) -> Buffers:
        """After R."""
        self.y = empty_like_gathered(self.y_partial, self.shared.wire.size)
        return self.y, self.y_partial

    def place(self) -> Tensor:
        """Every row at its token's place; how many rows there are differs from batch to batch."""
        words = self.y[self.exchange.arrival]
        del self.y, self.y_partial
        return words

    def stream(self) -> Tensor:
        """The residual stream's beginning."""
        words = self.place() if self.placed is None else self.placed
        return self.shared.model.embedding.join(words, self.context)

    def back(self, gradient: Tensor) -> None:
        """The gradient of that."""
        self._take_gradient(self.shared.model.embedding.join_gradient(gradient, self.context))

    def weight_gradient(self) -> None:
        """W: into the rows that are here."""
        embedding = self.shared.model.embedding
        rows, here = embedding.local(self.tokens)
        found = self._output_gradient() * here.flatten()[:, None]
        self.shared.gradients.add_rows(embedding.words.weight, rows.flatten(), found)

    runs: ClassVar[Runs] = {Kind.SECOND: look_up, Kind.WEIGHT_GRAD: weight_gradient}
    sends: ClassVar[Sends] = {Kind.SECOND: gather_rows, Kind.NORM_GRAD: Adding.gather_gradient}


@dataclass(kw_only=True, eq=False, repr=False)
class Head(Normed):
    """targets: [S, b]. scale: of the loss. weights: of the targets, [S, b]; None: all 1. ``total``, after L:
    the scaled loss of the slice, 0-d; ``losses``, where nothing goes back: each token's own, [S, b]."""

    targets: Tensor
    scale: float | Tensor
    weights: Tensor | None = None
    loss: VocabularyLoss = field(init=False)
    total: Tensor = field(init=False)
    losses: Tensor = field(init=False)
    g_z: Tensor = field(init=False)  # gradient of the logits
    operands: tuple[Tensor, Tensor] = field(init=False)  # what W multiplies

    def forward(self) -> None:
        """F: this rank's logits, and what other ranks need of their softmax."""
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

    def gather_statistics(self) -> Buffers:
        """After F."""
        return self.loss.gathered, self.loss.statistics

    def finish_loss(self) -> None:
        """L."""
        weights = None if self.weights is None else self.weights.flatten()
        self.total, gradient = self.loss.finish(self.scale, weights, gradient=self.shared.graph.backward)
        if gradient is not None:
            self.g_z, self.operands = gradient, (gradient, self.full.flatten(0, 1))
        else:
            self.losses = self.loss.losses.view(self.targets.shape)
        del self.loss, self.full

    def input_gradient(self, part: int) -> None:
        """C."""
        if self._input_gradient(part, [(self.g_z, self.shared.model.head.weight)]):
            del self.g_z

    def weight_gradient(self) -> None:
        """W."""
        self.shared.gradients.add_product(self.shared.model.head.weight, *self.operands)
        del self.operands

    def leave_gradient(self) -> None:
        """J; nobody reads the residual stream past the last norm."""
        self.before.back(self._back_through_norm())
        self._forget()

    runs: ClassVar[Runs] = {
        Kind.NORM: Normed.take_in,
        Kind.FIRST: forward,
        Kind.LOSS: finish_loss,
        Kind.WEIGHT_GRAD: weight_gradient,
        Kind.NORM_GRAD: leave_gradient,
    }
    run_parts: ClassVar[RunParts] = {Kind.FIRST_GRAD: input_gradient}
    sends: ClassVar[Sends] = {Kind.NORM: Normed.gather_norm, Kind.FIRST: gather_statistics}
    send_parts: ClassVar[SendParts] = {Kind.FIRST_GRAD: Normed.reduce_input_gradient}
