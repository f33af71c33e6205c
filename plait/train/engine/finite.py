"""What to do about numbers that are not finite: who had the first, and what is never saved.

In the good case this costs nothing: every rank knows the step's loss and gradient norm anyway. Only when one
of them is not finite do the ranks look for its origin. They compute the step a second time, and each looks at
its own gradients before sums over ranks spread a NaN to everybody.
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
from plait.train.engine.optimizer import SAID, Optimizer
from plait.train.engine.shards import Shards
from plait.train.model.pieces import pieces
from plait.train.model.units import ShardBox, UnitStore

FINE = 0  # the place of a tensor that is not finite counts from 1
ADVICE = "Lower train.learning_rate or set train.clip_grad"
SKIP = 'train.on_nan = "skip" leaves such updates out'


def check_state(optimizer: Optimizer, groups: Groups, step: int) -> None:
    """Raise NotFinite, on every rank, if the weights or the optimizer's averages after ``step`` steps are not
    finite: before they are saved over good ones."""
    search = _FiniteSearch(optimizer)
    kinds: dict[str, Mapping[Unit, Tensor]] = {"weight": optimizer.masters}
    kinds |= {SAID[kind]: tensors for kind, tensors in optimizer.states.items()}
    for kind, found in zip(kinds, search.agree(groups, [search.first(each) for each in kinds.values()]), strict=True):
        if found:
            raise NotFinite(
                f"step {step}: the {kind} {found} is not finite after this step, of which nothing is saved. {ADVICE}."
            )


class StepNumbers(NamedTuple):
    """A step, counted from 1, its loss and the norm of its gradients."""

    step: int
    loss: float
    norm: float


def explain(
    run: Callable[[], Tensor], optimizer: Optimizer, groups: Groups, shards: Shards | None, numbers: StepNumbers
) -> NotFinite:
    """Why a step's loss or gradient norm is not finite: the first tensor, and the rank it comes from. Called
    by all ranks at the same point, with the step's gradients; ``run`` computes them again."""
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
    """Looks among what this rank holds for the first tensor, in the order of the model's, that is not
    finite."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.units, self.gradients = optimizer.model.units, optimizer.gradients
        names = [piece.name for piece in pieces(optimizer.model.spec, Strategy(), 0)]
        self.names = list(dict.fromkeys(names))
        self._place = {name: place for place, name in enumerate(self.names, FINE + 1)}

    def first(self, tensors: Mapping[Unit, Tensor]) -> int:
        """The place of the first among tensors of this rank's optimizer."""
        bad = {unit: tensor for unit, tensor in tensors.items() if not _is_finite(tensor)}
        return self._first((held, tensor) for unit, tensor in bad.items() for held in self.units[unit].held("optim"))

    def own(self, run: Callable[[], Tensor], shards: Shards | None) -> int:
        """The place of the first among this rank's own gradients, of a step that is computed again."""
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
        return min((place for place in found if place != FINE), default=FINE)

    def agree(self, groups: Groups, places: Sequence[int]) -> list[str]:
        """For every place that the ranks looked for: the first tensor of all ranks and the first rank that
        has it, or nothing."""
        rows = torch.zeros((groups.world.size, len(places)), dtype=torch.float64, device=self.gradients.flat.device)
        rows[groups.world.rank] = rows.new_tensor(places)
        found: list[str] = []
        for kind in sum_over(groups.world, rows).long().T.tolist():
            place, rank = min(((place, rank) for rank, place in enumerate(kind) if place != FINE), default=(FINE, 0))
            found.append(f"{self.names[place - 1]} on rank {rank}" if place != FINE else "")
        return found

    def _first(self, found: Iterable[tuple[ShardBox, Tensor]]) -> int:
        return min((self._place[held.piece.name] for held, tensor in found if not _is_finite(held.of(tensor))),
                   default=FINE)  # fmt: skip


def _is_finite(tensor: Tensor) -> bool:
    """A sum is one fast pass; where it is not finite the numbers may still be, too large to add up."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
