"""Experts: shapes of a model's mixture-of-experts sublayers (Shazeer 2017, arXiv 1701.06538).

A router sends every token to ``per_token`` of ``count`` MLPs; ``shared`` experts see every token in
addition (DeepSeekMoE, arXiv 2401.06066). ``plait.core.step.expert_ops`` lists the ops of such a
layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from plait.core.base.codec.data import Count, Natural, NotNegative, Positive, check_limits
from plait.core.base.errors import JobError
from plait.core.base.numbers import divisors

if TYPE_CHECKING:
    from plait.core.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Experts of a model's layers. Raises JobError, naming the key ``model.experts.*``, for
    impossible values."""

    count: Count
    """Routed experts of a layer."""
    per_token: Count
    """Routed experts that every token goes to (top-k)."""
    ffn_hidden: Natural = 0
    """Width of a routed expert. 0: the model's MLP width."""
    shared: Natural = 0
    """Shared experts, which every token goes to."""
    shared_ffn_hidden: Natural = 0
    """Width of a shared expert. 0: the width of a routed expert."""
    shared_gate: bool = False
    """Multiply the output of the shared experts by the sigmoid of one more logit of the token
    (Qwen1.5-MoE)."""
    capacity: NotNegative = 0.0
    """Capacity factor: most tokens of an expert, relative to equal numbers for all experts (GShard,
    arXiv
    2006.16668). Further tokens are dropped. 0: no token is dropped (dropless)."""
    first_dense: Natural = 0
    """Number of first layers that have an ordinary MLP."""
    every: Count = 1
    """Interval of layers with experts, after the first ``first_dense``: layers whose number is a
    multiple of it."""

    score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Function of the router's logits whose values are scores."""
    norm_topk_prob: bool = True
    """Divide the scores of a token's experts by their sum."""
    scaling_factor: Positive = 1.0
    """Factor of the scores of a token's experts, after that division."""
    groups: Count = 1
    """Groups of experts, of which a token's experts come from ``groups_per_token`` (DeepSeek-V3,
    arXiv 2412.19437)."""
    groups_per_token: Natural = 0
    """Groups that the experts of a token come from. 0: all."""
    balance: Literal["sequence", "micro-batch", "dp"] = "sequence"
    """Tokens over which the balancing loss takes an expert's share: those of a sequence, of a
    replica's micro-batch, or of all replicas' micro-batches."""
    balance_loss: NotNegative = 0.0
    """Coefficient of the balancing loss of a layer (Switch, arXiv 2101.03961). 0: none."""
    z_loss: NotNegative = 0.0
    """Coefficient of the squared log-sum of the router's exponentials (ST-MoE, arXiv
    2202.08906)."""

    def __post_init__(self) -> None:
        check_limits(self, "model.experts")
        if self.count % self.groups or self.groups_per_token > self.groups:
            problem = f"{self.groups} groups of {self.count} experts, {self.groups_per_token} a token"
            raise JobError(problem, key="model.experts.groups", changes=[{"model.experts.groups": None}])
        if self.per_token > self.count:
            problem = f"{self.per_token} experts a token are more than the {self.count} there are"
            raise JobError(problem, key="model.experts.per_token",
                           changes=[{"model.experts.per_token": self.count}])  # fmt: skip
        if self.shared_gate and not self.shared:
            raise JobError("there is no shared expert", key="model.experts.shared_gate",
                           changes=[{"model.experts.shared": 1}, {"model.experts.shared_gate": False}])  # fmt: skip
        if self.shared_ffn_hidden and not self.shared:
            problem = f"{self.shared_ffn_hidden} is the width of no shared expert"
            raise JobError(problem, key="model.experts.shared_ffn_hidden",
                           changes=[{"model.experts.shared": 1}, {"model.experts.shared_ffn_hidden": 0}])  # fmt: skip

    def filled(self, ffn_hidden: int) -> Experts:
        """Return the experts with default widths filled in. ffn_hidden: the model's MLP width."""
        own = self.ffn_hidden or ffn_hidden
        return replace(self, ffn_hidden=own, shared_ffn_hidden=(self.shared_ffn_hidden or own) if self.shared else 0)

    def at(self, layer: int) -> bool:
        """Return True if a layer has experts.

        >>> [Experts(count=4, per_token=1, first_dense=1, every=2).at(layer) for layer in range(5)]
        [False, False, True, False, True]
        """
        return layer >= self.first_dense and layer % self.every == 0

    @property
    def shared_width(self) -> int:
        """Width of all shared experts together."""
        return self.shared * self.shared_ffn_hidden

    @property
    def active_width(self) -> int:
        """Width of all experts of a token together."""
        return self.per_token * self.ffn_hidden + self.shared_width

    @property
    def load(self) -> float:
        """Rows that experts compute for each token: ``per_token``, or fewer if tokens are
        dropped."""
        return self.per_token * (min(1.0, self.capacity) if self.capacity else 1.0)


def check_expert_parallel(model: ModelSpec, ep: int, replicas: int | None) -> None:
    """Raise JobError if ``ep`` ranks of the ``replicas`` (dp x cp) that hold the same attention
    weights cannot share out the experts of every layer. replicas: None if the planner chooses
    them."""
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
    """Raise JobError for a model with experts that cannot be trained (or ``doing``) yet."""
    if model.experts is not None and (doing != "trained" or model.has_bias or model.parallel_block):
        raise JobError(
            f"a model with {model.experts.count} experts a layer can be planned for, and not be {doing} yet",
            key="model.experts",
            fix="Use plait plan alone, or a model without experts",
        )
