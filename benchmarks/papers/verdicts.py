"""The 24 claims of the five papers, each with a verdict by a rule that stands in the paper's file:

    gain    every value over 1 lies between half of the lowest and twice of the highest published gain
    least   every value is at least ``low``
    within  every value lies from ``low`` to ``high``
    holds   everything that the claim says holds

``each`` of a claim has what is published for single values, by name, in place of ``low`` and ``high``. What
has to hold stands in ``asks``. A claim of which one value fails is not reproduced. Then ``why`` says why,
with figures of the JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

RULES: dict[str, Callable[[float, float, float], bool]] = {
    "gain": lambda value, low, high: 1 + (low - 1) / 2 <= value <= 1 + 2 * (high - 1),
    "least": lambda value, low, high: value >= low,
    "within": lambda value, low, high: low <= value <= high,
    "holds": lambda value, low, high: bool(value),
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """values: that the claim is judged by. failed: those outside; None: nothing was computed."""

    values: Mapping[str, float | bool]
    failed: Mapping[str, float | bool] | None

    @property
    def reproduced(self) -> bool:
        """Whether every value is as published."""
        return self.failed is not None and not self.failed

    @property
    def word(self) -> str:
        """For a table."""
        if self.failed is None:
            return "not computed"
        return "reproduced" if self.reproduced else "**not reproduced**"


def asked(claim: Mapping[str, Any]) -> str:
    """What a claim's values have to be.

    >>> asked({"rule": "gain", "low": 1.02, "high": 1.05})
    '1.01 to 1.1'
    >>> asked({"rule": "gain", "each": {"small": 1.1}}), asked({"rule": "least", "low": 0.9})
    ('1.05 to 1.2 (small)', '0.9 or more')
    """
    if claim["rule"] == "holds":
        return claim["asks"]
    if claim["rule"] == "least":
        return f"{claim['low']:g} or more"
    if claim.get("each"):
        return ", ".join(f"{asked({**claim, 'low': one, 'high': one, 'each': {}})} ({name})"
                         for name, one in claim["each"].items())  # fmt: skip
    low, high = claim["low"], claim["high"]
    if claim["rule"] == "gain":
        low, high = 1 + (low - 1) / 2, 1 + 2 * (high - 1)
    return f"{low:.4g} to {high:.4g}"


def judge(claim: Mapping[str, Any], kept: Mapping[str, Any] | None) -> Verdict:
    """A claim by what was kept of its figure.

    >>> claim = {"number": 5, "rule": "gain", "low": 1.02, "high": 1.05}
    >>> judge(claim, {"claims": {"5": {"a": 1.1, "b": 1.2}}}).failed
    {'b': 1.2}
    """
    values = (kept or {}).get("claims", {}).get(str(claim["number"]))
    if not values:
        return Verdict(values={}, failed=None)
    rule, both, each = RULES[claim["rule"]], (claim.get("low", 0.0), claim.get("high", 0.0)), claim.get("each", {})
    ends = {name: (each[name], each[name]) if name in each else both for name in values}
    return Verdict(values=values, failed={name: one for name, one in values.items() if not rule(one, *ends[name])})
