"""Experts: the mixture-of-experts sublayers of a model (Shazeer 2017, arXiv 1701.06538), as shapes.

A router sends every token to ``per_token`` of ``count`` MLPs; ``shared`` ones see every token besides
(DeepSeekMoE, arXiv 2401.06066). What Plait can say of such a model is what the planner needs; no rank trains
one yet (``refuse_experts``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from plait.core.base.codec.data import Count, Natural, NotNegative, check_limits
from plait.core.base.errors import JobError
from plait.core.base.numbers import divisors

if TYPE_CHECKING:
    from plait.core.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Raises JobError naming the key, ``model.experts.*``, of what cannot be."""

    count: Count
    """Routed experts of a layer."""
    per_token: Count
    """Of these, how many every token goes to (top-k)."""
    ffn_hidden: Natural = 0
    """Width of a routed expert. 0: the model's."""
    shared: Natural = 0
    """Experts that every token goes to."""
    shared_ffn_hidden: Natural = 0
    """Width of a shared expert. 0: a routed one's."""
    capacity: NotNegative = 0.0
    """Tokens that an expert takes at most, to those that it would have if all had as many (GShard, arXiv
    2006.16668): others are dropped. 0: none is (dropless)."""
    first_dense: Natural = 0
    """So many first layers have an ordinary MLP."""
    every: Count = 1
    """Of the others, those whose number is a multiple of it have experts."""

    def __post_init__(self) -> None:
        check_limits(self, "model.experts")
        if self.per_token > self.count:
            problem = f"{self.per_token} experts a token are more than the {self.count} there are"
            raise JobError(problem, key="model.experts.per_token",
                           changes=[{"model.experts.per_token": self.count}])  # fmt: skip
        if self.shared_ffn_hidden and not self.shared:
            problem = f"{self.shared_ffn_hidden} is the width of no shared expert"
            raise JobError(problem, key="model.experts.shared_ffn_hidden",
                           changes=[{"model.experts.shared": 1}, {"model.experts.shared_ffn_hidden": 0}])  # fmt: skip

    def filled(self, ffn_hidden: int) -> Experts:
        """With widths that were left out. ffn_hidden: the model's."""
        own = self.ffn_hidden or ffn_hidden
        return replace(self, ffn_hidden=own, shared_ffn_hidden=(self.shared_ffn_hidden or own) if self.shared else 0)

    def at(self, layer: int) -> bool:
        """Whether a layer has experts.

        >>> [Experts(count=4, per_token=1, first_dense=1, every=2).at(layer) for layer in range(5)]
        [False, False, True, False, True]
        """
        return layer >= self.first_dense and layer % self.every == 0

    @property
    def shared_width(self) -> int:
        """Of all shared experts together."""
        return self.shared * self.shared_ffn_hidden

    @property
    def active_width(self) -> int:
        """Of all experts that a token goes to."""
        return self.per_token * self.ffn_hidden + self.shared_width

    @property
    def load(self) -> float:
        """Rows that the experts compute, to the tokens: ``per_token``, or less where some are dropped."""
        return self.per_token * (min(1.0, self.capacity) if self.capacity else 1.0)


def check_expert_parallel(model: ModelSpec, ep: int, replicas: int | None) -> None:
    """Raise JobError where ``ep`` ranks of the ``replicas`` (dp x cp) that hold the same attention cannot
    share out the experts of every layer. replicas: None where the planner is to choose them."""
    if ep == 1:
        return
    if model.experts is None:
        raise JobError(f"{ep} ranks would share experts, and the model has none", key="strategy.ep",
                       changes=[{"strategy.ep": None}])  # fmt: skip
    count = model.experts.count
    sizes = (count, count if replicas is None else replicas)
    for whole, what in zip(sizes, ("experts", "ranks of dp x cp"), strict=True):
        if whole % ep:
            raise JobError(f"{ep} does not divide the {whole} {what}", key="strategy.ep",
                           changes=[{"strategy.ep": one} for one in divisors(math.gcd(*sizes), ep)])  # fmt: skip


def refuse_experts(model: ModelSpec, doing: str = "trained") -> None:
    """Raise JobError for a model with experts, which cannot be trained yet, or what ``doing`` says."""
    if model.experts is not None:
        raise JobError(
            f"a model with {model.experts.count} experts a layer can be planned for, and not be {doing} yet",
            key="model.experts",
            fix="Use plait plan alone, or a model without experts",
        )
