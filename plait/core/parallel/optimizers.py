"""Optimizers as data: which updates which units, and what each keeps of a number beside its weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from plait.core.parallel.sharding import Unit

OptimizerName = Literal["adamw", "muon", "sgd"]
Rule = OptimizerName
"""What updates a number; ``muon`` alone updates no more than the matrices of layers."""
STATES: Mapping[Rule, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum",), "sgd": ("momentum",),
}  # fmt: skip
"""What each keeps of a number, beside its master."""
HIDDEN = ("attn", "mlp", "down", "up")
"""Kinds of units whose matrices Muon orthogonalises; embedding, positions and head are AdamW's (Jordan 2024,
https://kellerjordan.github.io/posts/muon/)."""


def rules_of(optimizer: OptimizerName) -> tuple[Rule, ...]:
    """All that update some number."""
    return ("adamw", "muon") if optimizer == "muon" else (optimizer,)


def rule_of(optimizer: OptimizerName, unit: Unit) -> Rule:
    """What updates a unit.

    >>> rule_of("muon", ("attn", 3)), rule_of("muon", ("head", 0))
    ('muon', 'adamw')
    """
    return "adamw" if optimizer == "muon" and unit[0] not in HIDDEN else optimizer


def states_of(optimizer: OptimizerName, unit: Unit) -> int:
    """How many numbers beside its master a number of a unit has."""
    return len(STATES[rule_of(optimizer, unit)])
