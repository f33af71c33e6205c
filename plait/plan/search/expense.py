"""Cost of training: days, GPU hours, energy and money for a number of tokens, or for one day.

Steps count as running without pauses: restarts, evaluation and checkpoints are not included. Energy
is that of devices at full power (``device.power``, the manufacturer's TDP) all the time. Hosts,
network and cooling are not included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plait.core.cluster.hardware import Cluster
from plait.core.job.texts import in_tokens, tokens_of
from plait.plan.search.candidate import Candidate

DAY = 86_400.0
"""Seconds of a day."""
UNITS = (("days", 1.0), ("hours", 24.0), ("minutes", 1440.0), ("seconds", DAY))
"""Units of time, with their number per day."""


@dataclass(frozen=True, kw_only=True)
class Expense:
    """Cost of training on ``tokens`` tokens (0: as many as one day gives) at ``tokens_per_day``.
    spread: p10 and p90 of a step over its median. watts: power of a device; None if unknown. price:
    of one hour of one rank, 0 if unknown. hours: the name of the unit of rank hours."""

    ranks: int
    tokens_per_day: float
    spread: tuple[float, float]
    tokens: int = 0
    watts: float | None = None
    price: float = 0.0
    hours: str = "GPU hours"

    @staticmethod
    def of(candidate: Candidate, cluster: Cluster) -> Expense:
        """Return the cost of a candidate's job."""
        device, asked = cluster.device, candidate.job.plan
        return Expense(
            ranks=candidate.job.world_size,
            tokens_per_day=candidate.tokens_per_second * DAY,
            spread=(candidate.low / candidate.seconds, candidate.high / candidate.seconds),
            tokens=tokens_of(asked.tokens),
            watts=device.power.value if device.power else None,
            price=asked.gpu_hour_price,
            hours="GPU hours" if device.kind == "cuda" else "rank hours",
        )

    @property
    def days(self) -> float:
        """Days until the number of tokens is reached; 1 if the job file gives none."""
        return self.tokens / self.tokens_per_day if self.tokens else 1.0

    @property
    def gpu_hours(self) -> float:
        """Hours of all ranks together, for the tokens or for one day."""
        return self.days * 24 * self.ranks

    @property
    def energy(self) -> float | None:
        """Energy of the devices in kWh; None if their power is unknown."""
        return self.gpu_hours * self.watts / 1e3 if self.watts else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON. Unknown values are null."""
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
    def description(self) -> str:
        """Description in one to three sentences."""
        day, per_hour = in_tokens(self.tokens_per_day), f"{self.price:g} per {self.hours.removesuffix('s')}"
        spent = f", for {_figure(24 * self.ranks * self.price)} ({per_hour})" if self.price else ""
        if not self.tokens:
            return f"It trains on {day} tokens per day{spent}."
        unit, each = next((one for one in UNITS if self.days * one[1] >= 1), UNITS[-1])
        taken, low, high = (_figure(self.days * each * one) for one in (1.0, *self.spread))
        cost = f" for {_figure(self.gpu_hours * self.price)} ({per_hour})" if self.price else ""
        power = "Its energy is unknown, since the cluster has no device.power."
        if self.energy is not None:
            what = f"at a constant {self.watts:g} W per device, its TDP, without hosts, network and cooling"
            power = f"The devices take {_energy(self.energy)} ({what})."
        return (
            f"It trains on {day} tokens per day. {in_tokens(self.tokens)} tokens take {taken} {unit} "
            f"(p10-p90: {low}-{high}; without pauses), {_figure(self.gpu_hours)} {self.hours}{cost}. {power}"
        )


def _figure(number: float) -> str:
    """Return the number with three significant digits, or with all digits before the decimal point.

    >>> _figure(0.01234), _figure(12.345), _figure(123456.7)
    ('0.0123', '12.3', '123,457')
    """
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _energy(hours: float) -> str:
    """Return an energy in kWh, MWh or GWh as text. hours: kilowatt hours.

    >>> _energy(12.3), _energy(41_234.0), _energy(12_300_000)
    ('12.3 kWh', '41.2 MWh', '12.3 GWh')
    """
    for size, unit in ((1e6, "GWh"), (1e3, "MWh")):
        if hours >= size:
            return f"{_figure(hours / size)} {unit}"
    return f"{_figure(hours)} kWh"
