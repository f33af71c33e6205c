"""What lives while a micro-batch is on its way through a stage."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from plait.train.model.loss import VocabularyLoss
from plait.train.model.transformer import RowExchange, SliceContext


@dataclass(frozen=True)
class MicroBatch:
    """tokens, targets: [B, S] int64, in host memory; target -100 is ignored. samples: [B] global sample
    numbers, the dropout keys.

    scale: what each token's loss is multiplied by, 1 / (targets of the whole step). step: for the dropout
    keys. positions: [S] of the tokens in their sequences, in host memory, if they are not all of them.
    """

    tokens: Tensor
    targets: Tensor
    samples: Tensor
    scale: float
    step: int
    positions: Tensor | None = None


@dataclass
class Branch:
    """Between a first and a second weight: what one core reads and makes, [S, b, ...]; gradients and o are [S
    * b, ...]."""

    z: Tensor | None = None
    o: Tensor | None = None
    o_graph: Tensor | None = None  # o with what autograd knows of it
    g_z: Tensor | None = None
    kept: list[Tensor] | None = None  # where the core will run again: what it keeps of what it needed other ranks for


@dataclass
class Slot:
    """What lives between the ops of one segment of one slice; fields are dropped as soon as nobody needs
    them."""

    context: SliceContext
    samples: slice  # which sequences of the micro-batch
    sequence: int  # S where this segment works
    tokens: Tensor  # [S, b]
    targets: Tensor  # [S, b]
    rows: RowExchange | None = None  # embed only
    h: Tensor | None = None  # residual stream leaving join, or down, or up
    leaf: Tensor | None = None  # residual stream entering down or up
    skip: Tensor | None = None  # what enters a down, and is added in the up of its level
    skip_in: Tensor | None = None  # the same as the up reads it
    n: Tensor | None = None  # normalised input, this rank's shard; recomputed segments keep h alone
    full: Tensor | None = None  # n over the whole sequence, [S, b, H]
    y: Tensor | None = None  # [parts, S_local, b, H / parts] once reduced
    y_partial: Tensor | None = None
    g_h: Tensor | None = None  # gradient of h
    g_skip: Tensor | None = None
    g_y: Tensor | None = None  # gradient of y, this rank's shard
    g_y_full: Tensor | None = None
    g_full: Tensor | None = None  # partial, then reduced, gradient of full
    g_n: Tensor | None = None  # gradient of n, this rank's shard
    operands: list[tuple[Tensor, Tensor] | None] = field(
        default_factory=list
    )  # (output gradient, input) of the weight gradients
    loss: VocabularyLoss | None = None
    n_graph: Tensor | None = None  # n, or what a down or up made of h, with what autograd knows of it
    branches: list[Branch] = field(default_factory=list)  # one; a parallel block: attention, MLP


@dataclass
class InFlight:
    """A micro-batch between its forward and the end of its backward, and what crosses the ends of the stage,
    each [S_local, B, H].

    entering: from other stages, by name: ``h`` the residual stream, ``skip0`` the skip connection of level 0;
    leaving: for other stages; returning: the gradients of ``leaving``; gradient: of ``entering``.
    """

    size: int  # sequences
    scale: float
    slots: dict[tuple[str, int, int], Slot] = field(default_factory=dict)
    entering: dict[str, Tensor] = field(default_factory=dict)
    leaving: dict[str, Tensor] = field(default_factory=dict)
    returning: dict[str, Tensor] = field(default_factory=dict)
    gradient: dict[str, Tensor] = field(default_factory=dict)
