"""Predicted seconds of a placement: bytes that groups send, over the rate that the network leaves
them when they are spread.

In a group spread evenly over s minipods, 1 - 1/s of all pairs lie in different minipods: this share
of the largest loss (``specs/placement/network.toml``) is lost. Published figures have the largest
loss only, so the values in between are this assumption. By the same assumption two neighbours in
different minipods lose all of it (``pair_factor``). The slowest group counts, and no communication
is assumed to be hidden: these seconds compare placements, and are not seconds of a step. ``core``
adds the rate that all flows from a minipod to others share (``plait.core.step.clock.prices``).

``PlacementProfile`` is the measured cost of spreading groups of ranks over minipods, from ``plait
measure placement``: collectives by size and spread, the loss of two groups that share the core,
steps of a job by placement (Arnold, arXiv 2509.15940, sections 3 and 4). Rows of
``specs/placement/affinity.toml`` and files like ``specs/placement/network.toml`` follow from it.
Versioned JSON with a hash over its content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from plait.core.base.codec.data import Count, NotNegative, Positive, Section
from plait.core.base.codec.stamped import Stamp, StampedSection
from plait.core.base.codec.toml_text import read_toml
from plait.core.base.env import specs_folder
from plait.core.base.errors import JobError
from plait.core.base.numbers import shown
from plait.core.cluster.profile import MOST_VALUES, CollectiveKind, Curve, Group, Machine

KEYS = (
    ("rate", "rate", 1.0, 1e15), ("collective_loss", "collective_loss", 0.0, 0.99), ("p2p_loss", "p2p_loss", 0.0, 0.99),
    ("crossing", "conflicts", 1.0, 1e6), ("core", "core", 1.0, 1e18),
)  # fmt: skip
"""Keys of a network file: (table, field, least value, largest value)."""
OPTIONAL_FIELDS = ("conflicts", "core")
"""Fields that a file may leave out."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """Rates of a network, for groups that are spread over minipods. rate: bytes per second of one
    GPU inside a minipod, in each direction. collective_loss, p2p_loss: largest shares of the rate
    that widely spread groups lose. conflicts: slowdown factor of traffic between minipods because
    flows meet on a link: [crossing] of the file, where the core was measured to be slower, times
    the cost of equal-cost multi-path hashing; 1 is no slowdown. core: bytes per second of a
    minipod's link to the others, in each direction; None if it was not measured."""

    rate: float
    collective_loss: float
    p2p_loss: float
    conflicts: float = 1.0
    core: float | None = None

    @staticmethod
    def read(path: Path | None = None, *, rate: float | None = None) -> Network:
        """Return the network in a file, by default the shipped one. rate: replaces the file's rate.
        Raises JobError for a value that is missing or out of range."""
        path = path or specs_folder() / "placement" / "network.toml"
        values, found = read_toml(path), dict[str, float]()
        for key, name, least, most in KEYS:
            if key not in values and name in OPTIONAL_FIELDS:
                continue
            told: Any = values[key].get("value") if isinstance(values.get(key), dict) else None
            if not isinstance(told, (int, float)) or not least <= told <= most:
                fix = f"Write [{key}] with value, a number from {least:g} to {most:g}, source and date"
                fix += "; or leave it out" if name in OPTIONAL_FIELDS else ""
                raise JobError(f"{shown(told)} is no {key}", file=str(path), key=key, fix=fix)
            found[name] = float(told)
        return Network(**(found | ({"rate": rate} if rate else {})))

    def collective(self, sent: float, spread: int) -> float:
        """Return the seconds in which a group over ``spread`` minipods sends ``sent`` bytes a GPU
        in collectives."""
        return self._seconds(sent, spread, self.collective_loss)

    def p2p(self, sent: float, spread: int) -> float:
        """Return the seconds in which a group over ``spread`` minipods sends ``sent`` bytes a GPU
        from neighbour to neighbour."""
        return self._seconds(sent, spread, self.p2p_loss)

    def collective_factor(self, spread: int) -> float:
        """Return how many times as long a collective takes as inside one minipod."""
        return self._seconds(self.rate, spread, self.collective_loss)

    @property
    def pair_factor(self) -> float:
        """Factor by which a send between two neighbours takes if they are in different minipods:
        all bytes cross."""
        return self.conflicts / (1 - self.p2p_loss)

    def _seconds(self, sent: float, spread: int, most: float) -> float:
        crossing = self.conflicts if spread > 1 else 1.0
        return sent / (self.rate * (1 - most * (1 - 1 / spread))) * crossing


# ---- measurements of placements ----


AGAIN = "Measure again with plait measure placement"
Order = Literal["dp", "pp", "random"]


class Interference(Section):
    """Measurement of two jobs side by side: half of the groups of a layout communicate, then all of
    them at once."""

    kind: CollectiveKind
    group: Group
    bytes: Annotated[int, Field(ge=1, le=1 << 60)]
    """Bytes of the collective, as in ``Point``."""
    alone: Positive
    """Seconds of the slowest rank while the other half is idle."""
    together: Positive
    """Seconds of the slowest rank while the other half does the same."""

    @property
    def slowdown(self) -> float:
        """Seconds with both halves active, as a multiple of the seconds with one."""
        return self.together / self.alone


class Steps(Section):
    """Steps of a job in one order of its hosts."""

    order: Order
    """Groups that are kept inside minipods: DP groups, PP groups, or none (a random order)."""
    hosts: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    """Hosts, by node rank."""
    dp_spread: Count
    """Minipods of the most spread DP group."""
    pp_spread: Count
    """Minipods of the most spread PP group."""
    seconds: Annotated[tuple[Positive, ...], Field(strict=False, min_length=1)]
    """Median seconds of a step, for each round."""


class PlacedJob(Section):
    """A job that was trained in several orders of hosts. weights, dp, pp: bytes of the mean GPU; dp
    and pp are sent in a step."""

    name: str
    micro_batch: Count
    weights: NotNegative
    dp: NotNegative
    pp: NotNegative
    steps: Annotated[tuple[Steps, ...], Field(strict=False, min_length=1)]

    def gain(self, order: Order) -> float | None:
        """Return the throughput in an order over the throughput in the random order, less 1: the
        median over rounds. None if one of the two was not measured."""
        by = {one.order: one for one in self.steps}
        if order not in by or "random" not in by:
            return None
        pairs = zip(by["random"].seconds, by[order].seconds, strict=True)
        return median(other / own for other, own in pairs) - 1


class PlacementProfile(StampedSection):
    """A whole placement profile."""

    STAMP: ClassVar[Stamp] = Stamp(
        noun="placement profile", version=1, broken="is no placement profile, or only a part of one", fix=AGAIN,
        edited=AGAIN, most=MOST_VALUES,
    )  # fmt: skip

    machine: Machine
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    versions: Mapping[str, str] = {}
    nodes_per_minipod: Count
    collectives: Annotated[tuple[Curve, ...], Field(strict=False)] = ()
    interference: Annotated[tuple[Interference, ...], Field(strict=False)] = ()
    job: PlacedJob | None = None

    def crossing(self, kind: CollectiveKind) -> float | None:
        """Return how many times as long a further byte takes in the most spread groups as in groups
        inside one minipod; the mean over sizes of groups. None unless both were measured."""
        ratios: list[float] = []
        curves = [one for one in self.collectives if one.kind == kind]
        for ranks in {one.group.ranks for one in curves}:
            spreads = {one.group.minipods: one for one in curves if one.group.ranks == ranks}
            if 1 in spreads and len(spreads) > 1:
                inside, across = (_per_byte(spreads[at]) for at in (1, max(spreads)))
                ratios += [across / inside] if inside > 0 and across > 0 else []
        return sum(ratios) / len(ratios) if ratios else None

    def core(self) -> float | None:
        """Return the bytes per second, in each direction, of a minipod's link to the others: the
        sum over the measured pairs across, one pair for each rank of a minipod. None without such
        pairs."""
        pairs = [one for one in self.collectives if one.kind == "all_reduce" and one.group.ranks == 2]
        across = [one for one in pairs if one.group.minipods == 2 and _per_byte(one) > 0]
        ranks = self.nodes_per_minipod * self.machine.ranks_per_node
        return ranks / _per_byte(across[0]) if across else None


def _per_byte(curve: Curve) -> float:
    """Return the seconds that each further byte of a collective takes, from its smallest and its
    largest message, so that latency cancels out."""
    first, last = curve.points[0], curve.points[-1]
    return (last.seconds - first.seconds) / (last.bytes - first.bytes) if last.bytes > first.bytes else 0.0


def affinity_row(profile: PlacementProfile) -> str:
    """Return the job's ``[[jobs]]`` of an affinity file. Raises JobError if the job was not timed
    in all orders, or sends nothing along one axis."""
    job = profile.job
    gains = [job.gain("dp"), job.gain("pp")] if job else []
    if job is None or None in gains or not job.dp or not job.pp:
        raise JobError(
            "no affinity follows from it: a job with dp and pp has to be timed in all orders", key="--affinity",
            fix="Name a job whose groups can be kept in minipods, and lie in several",
        )  # fmt: skip
    values: dict[str, str | float] = {
        "name": job.name, "gpu": profile.machine.device or profile.machine.kind, "micro_batch": job.micro_batch,
        "weights": job.weights, "dp": job.dp, "pp": job.pp,
        "gain_dp": round(gains[0] or 0.0, 4), "gain_pp": round(gains[1] or 0.0, 4),
        "source": f"plait measure placement on {profile.machine.name}, hash {profile.hash[:12]}",
        "date": profile.date,
    }  # fmt: skip
    return "\n[[jobs]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


def network_file(profile: PlacementProfile) -> str:
    """Return the text of a file for ``place.network``: the rate inside a minipod, the slowdown of
    traffic between minipods, and the rate of a minipod's link to the others. Raises JobError if no
    group was measured both ways."""
    crossing = profile.crossing("all_reduce")
    inside = [c for c in profile.collectives if c.group.minipods == 1 and c.kind == "all_reduce"]
    if crossing is None or not inside:
        raise JobError("the profile has no all-reduce both inside a minipod and across", key="--network")
    source = json.dumps(f"plait measure placement on {profile.machine.name}, hash {profile.hash[:12]}")
    rates: dict[str, float] = {
        "rate": max(curve.bandwidth for curve in inside), "collective_loss": 0.0, "p2p_loss": 0.0,
        "crossing": max(1.0, crossing),
    }  # fmt: skip
    if core := profile.core():
        rates["core"] = core
    told = (
        f'[{key}]\nvalue = {value:.6g}\nsource = {source}\ndate = "{profile.date}"\n' for key, value in rates.items()
    )
    return "\n".join(told)
