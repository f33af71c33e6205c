"""Handle numbers that are not finite: find the tensor and rank where they began, and never save
them.

The good case costs nothing: every rank knows the step's loss and gradient norm anyway. Only if one
of them is not finite do the ranks search for its origin. They compute the step a second time, and
each checks its own gradients before sums over ranks spread a NaN to all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from plait.core.base.errors import NotFinite
from plait.core.parallel.sharding import Unit
from plait.core.parallel.strategy import Strategy
from plait.train.comm.wire import sum_over
from plait.train.engine.groups import Groups
from plait.train.engine.optimizer import STATE_NAMES, Optimizer
from plait.train.engine.shards import Shards
from plait.train.model.pieces import pieces
from plait.train.model.units import ShardBox, UnitStore

FINE = 0  # all tensors are finite; the indices of tensors that are not count from 1
ADVICE = "Lower train.learning_rate or set train.clip_grad"
SKIP = 'train.on_nan = "skip" skips such updates'


def check_state(optimizer: Optimizer, groups: Groups, step: int) -> None:
    """Raise NotFinite on every rank if weights or optimizer states after ``step`` steps are not
    finite. Call it before a checkpoint overwrites a good one."""
    search = _FiniteSearch(optimizer)
    kinds: dict[str, Mapping[Unit, Tensor]] = {"weight": optimizer.masters}
    kinds |= {STATE_NAMES[kind]: tensors for kind, tensors in optimizer.states.items()}
    for kind, found in zip(kinds, search.agree(groups, [search.first(each) for each in kinds.values()]), strict=True):
        if found:
            raise NotFinite(
                f"step {step}: the {kind} {found} is not finite after this step, so no checkpoint of it is saved. "
                f"{ADVICE}."
            )


class StepNumbers(NamedTuple):
    """A step (counted from 1), its loss and the norm of its gradients."""

    step: int
    loss: float
    norm: float


def explain(
    run: Callable[[], Tensor], optimizer: Optimizer, groups: Groups, shards: Shards | None, numbers: StepNumbers
) -> NotFinite:
    """Return the error for a step whose loss or gradient norm is not finite; it names the first
    such tensor and its rank. Called by all ranks at the same point, with the step's gradients;
    ``run`` computes them again."""
    step, loss, norm = numbers
    search = _FiniteSearch(optimizer)
    weight, spread = search.first(optimizer.masters), search.first(optimizer.gradients.final)
    own = FINE if weight else search.own(run, shards)
    weights, origins, sums = search.agree(groups, (weight, own, spread))
    what = f"step {step}: the loss is {loss:g} and the norm of the gradients {norm:g}"
    if weights:
        cause = f"the first tensor that is not finite is the weight {weights}"
    elif origins:
        cause = f"the first tensor that is not finite is the gradient of {origins}"
    elif sums:
        cause = (
            f"the first tensor that is not finite is the gradient of {sums}. When the step was computed again every "
            "rank's own gradients were finite: a sum over ranks overflows, or a machine computes wrongly"
        )
    else:
        cause = "every gradient is finite" + (", but they are too large for their norm" if loss == loss else "")
    return NotFinite(f"{what}; {cause}. The update was not made. {ADVICE}{'' if weights else f'; {SKIP}'}.")


class _FiniteSearch:
    """Search in this rank's shards for the first tensor, in the model's order, that is not
    finite."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.units, self.gradients = optimizer.model.units, optimizer.gradients
        names = [piece.name for piece in pieces(optimizer.model.spec, Strategy(), 0)]
        self.names = list(dict.fromkeys(names))
        self._index = {name: index for index, name in enumerate(self.names, FINE + 1)}

    def first(self, tensors: Mapping[Unit, Tensor]) -> int:
        """Return the index of the first such tensor among tensors of this rank's optimizer."""
        bad = {unit: tensor for unit, tensor in tensors.items() if not _is_finite(tensor)}
        return self._first((held, tensor) for unit, tensor in bad.items() for held in self.units[unit].held("optim"))

    def own(self, run: Callable[[], Tensor], shards: Shards | None) -> int:
        """Compute the step again and return the index of the first such tensor among this rank's
        own gradients."""
        found: list[int] = []

        def look(store: UnitStore, whole: Tensor) -> None:
            if not _is_finite(whole):
                found.append(self._first((held, whole) for held in store.everything))

        self.gradients.zero()
        if shards:
            shards.watch = look
        try:
            run()
            if shards:
                shards.complete()
        finally:
            if shards:
                shards.watch = None
        if not shards:
            for unit, store in self.units.items():
                look(store, self.gradients.shards[unit])
        return min((index for index in found if index != FINE), default=FINE)

    def agree(self, groups: Groups, indices: Sequence[int]) -> list[str]:
        """Return a text for each of ``indices``: the first such tensor of all ranks and the first
        rank that has it; empty if there is none."""
        rows = torch.zeros((groups.world.size, len(indices)), dtype=torch.float64, device=self.gradients.flat.device)
        rows[groups.world.rank] = rows.new_tensor(indices)
        found: list[str] = []
        for kind in sum_over(groups.world, rows).long().T.tolist():
            index, rank = min(((index, rank) for rank, index in enumerate(kind) if index != FINE), default=(FINE, 0))
            found.append(f"{self.names[index - 1]} on rank {rank}" if index != FINE else "")
        return found

    def _first(self, boxes: Iterable[tuple[ShardBox, Tensor]]) -> int:
        return min((self._index[held.piece.name] for held, tensor in boxes if not _is_finite(held.of(tensor))),
                   default=FINE)  # fmt: skip


def _is_finite(tensor: Tensor) -> bool:
    """Return True if all numbers are finite. The sum is one fast pass; it may overflow although the
    numbers are finite, so they are checked then."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
