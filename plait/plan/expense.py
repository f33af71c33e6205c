"""What training takes in all: days, GPU hours, energy and money to a number of tokens, or in a day.

Steps follow each other without a pause: restarts, evaluation and saving are not counted. Energy is that of
devices that draw their full power (``device.power``, the maker's TDP) all the time. Hosts, network and
cooling come on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plait.core.base.text import counted
from plait.core.cluster.hardware import Cluster
from plait.core.job.amounts import in_tokens, tokens_of
from plait.plan.candidate import Candidate

DAY = 86_400.0
"""Seconds."""
UNITS = (("days", 1.0), ("hours", 24.0), ("minutes", 1440.0), ("seconds", DAY))
"""Units of time, and how many a day has."""


@dataclass(frozen=True, kw_only=True)
class Expense:
    """Of training on ``tokens`` (0: what a day gives) at tokens_per_day. spread: p10 and p90 of a step over
    its median. watts: of a device; None where nothing says. price: of an hour of a rank, 0 if not known.
    hours: what an hour of a rank is called."""

    ranks: int
    tokens_per_day: float
    spread: tuple[float, float]
    tokens: int = 0
    watts: float | None = None
    price: float = 0.0
    hours: str = "GPU hours"

    @staticmethod
    def of(one: Candidate, cluster: Cluster) -> Expense:
        """Of a strategy's job."""
        device, asked = cluster.device, one.job.plan
        return Expense(
            ranks=one.job.world_size,
            tokens_per_day=one.tokens_per_second * DAY,
            spread=(one.low / one.seconds, one.high / one.seconds),
            tokens=tokens_of(asked.tokens),
            watts=device.power.value if device.power else None,
            price=asked.gpu_hour_price,
            hours="GPU hours" if device.kind == "cuda" else "rank hours",
        )

    @property
    def days(self) -> float:
        """To the tokens; 1 where none are asked about."""
        return self.tokens / self.tokens_per_day if self.tokens else 1.0

    @property
    def gpu_hours(self) -> float:
        """Of all ranks, to the tokens or in a day."""
        return self.days * 24 * self.ranks

    @property
    def energy(self) -> float | None:
        """Kilowatt hours of the devices; None where nothing says what they draw."""
        return self.gpu_hours * self.watts / 1e3 if self.watts else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON. What is not known is null."""
        return {
            "tokens_per_day": self.tokens_per_day,
            "tokens": self.tokens or self.tokens_per_day,
            "days": self.days,
            "days_p10": self.days * self.spread[0] if self.tokens else None,
            "days_p90": self.days * self.spread[1] if self.tokens else None,
            "gpu_hours": self.gpu_hours,
            "energy_kwh": self.energy,
            "device_watts": self.watts,
            "cost": self.gpu_hours * self.price if self.price else None,
        }

    @property
    def told(self) -> str:
        """In a sentence or two."""
        day = in_tokens(self.tokens_per_day)
        spent = f", for {_figure(24 * self.ranks * self.price)} ({_of(self.price)})" if self.price else ""
        if not self.tokens:
            return f"It trains on {day} tokens a day{spent}."
        unit, each = next((one for one in UNITS if self.days * one[1] >= 1), UNITS[-1])
        taken, low, high = (_figure(self.days * each * one) for one in (1.0, *self.spread))
        cost = f", {_figure(self.gpu_hours * self.price)} at {_of(self.price)}" if self.price else ""
        power = "its energy is not known, since the cluster says no device.power"
        if self.energy is not None:
            what = f"{self.watts:g} W a device all the time, their TDP; hosts, network and cooling come on top"
            power = f"{_energy(self.energy)} ({what})"
        return (
            f"It trains on {day} tokens a day: {in_tokens(self.tokens)} take {taken} {unit} "
            f"(p10-p90: {low}-{high}; no pauses counted), {_figure(self.gpu_hours)} {self.hours} on "
            f"{counted(self.ranks, 'rank')}{cost}; {power}."
        )


def _of(price: float) -> str:
    return f"{price:g} an hour of a rank"


def _figure(number: float) -> str:
    """Three figures that count, or all before the point.

    >>> _figure(0.01234), _figure(12.345), _figure(123456.7)
    ('0.0123', '12.3', '123,457')
    """
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _energy(hours: float) -> str:
    """Kilowatt hours as people read them.

    >>> _energy(12.3), _energy(41_234.0), _energy(12_300_000)
    ('12.3 kWh', '41.2 MWh', '12.3 GWh')
    """
    for size, unit in ((1e6, "GWh"), (1e3, "MWh")):
        if hours >= size:
            return f"{_figure(hours / size)} {unit}"
    return f"{_figure(hours)} kWh"
