"""PlacementProfile: what it costs to spread groups of ranks over minipods, as measured: collectives by size
and spread, what two groups lose that share the core, steps of a job by placement (Arnold, arXiv 2509.15940,
sections 3 and 4).

``plait measure placement`` measures it; rows of ``specs/placement/affinity.toml`` and files like
``specs/placement/network.toml`` follow from it. Versioned JSON with a hash over its content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from statistics import median
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from plait.core.base.codec.data import Count, NotNegative, Positive, Section
from plait.core.base.codec.stamped import Stamp, StampedSection
from plait.core.base.errors import JobError
from plait.core.cluster.profile import MOST_VALUES, CollectiveKind, Curve, Group, Machine

AGAIN = "Measure again with plait measure placement"
Order = Literal["dp", "pp", "random"]


class Interference(Section):
    """Half of the groups of a layout communicate, then all of them at once: two jobs side by side."""

    kind: CollectiveKind
    group: Group
    bytes: Annotated[int, Field(ge=1, le=1 << 60)]
    """Of a collective, as a point of a curve has them."""
    alone: Positive
    """Seconds with the other half idle; the slowest rank's."""
    together: Positive
    """Seconds while it does the same."""

    @property
    def slowdown(self) -> float:
        """How many times as long it takes."""
        return self.together / self.alone


class Steps(Section):
    """Steps of a job in one order of its hosts."""

    order: Order
    """Whose groups are kept in minipods: DP, PP, or nobody's, as drawn."""
    hosts: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    """By node rank."""
    dp_spread: Count
    """Minipods of the most spread DP group."""
    pp_spread: Count
    """Of the most spread PP group."""
    seconds: Annotated[tuple[Positive, ...], Field(strict=False, min_length=1)]
    """Of a step, the median of each round."""


class PlacedJob(Section):
    """What was trained in several orders. weights, dp, pp: bytes of the mean GPU, the latter two sent in a
    step."""

    name: str
    micro_batch: Count
    weights: NotNegative
    dp: NotNegative
    pp: NotNegative
    steps: Annotated[tuple[Steps, ...], Field(strict=False, min_length=1)]

    def gain(self, order: Order) -> float | None:
        """Throughput in an order over that in a random one, less 1: the median over rounds. None where one of
        them was not measured."""
        by = {one.order: one for one in self.steps}
        if order not in by or "random" not in by:
            return None
        pairs = zip(by["random"].seconds, by[order].seconds, strict=True)
        return median(other / own for other, own in pairs) - 1


class PlacementProfile(StampedSection):
    """A whole file."""

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
        """How many times as long a further byte takes in groups that spread as far as was measured as in
        those of one minipod; the mean over sizes of groups. None without both."""
        ratios: list[float] = []
        curves = [one for one in self.collectives if one.kind == kind]
        for ranks in {one.group.ranks for one in curves}:
            spreads = {one.group.minipods: one for one in curves if one.group.ranks == ranks}
            if 1 in spreads and len(spreads) > 1:
                inside, across = (_per_byte(spreads[at]) for at in (1, max(spreads)))
                ratios += [across / inside] if inside > 0 and across > 0 else []
        return sum(ratios) / len(ratios) if ratios else None

    def core(self) -> float | None:
        """Bytes per second, each way, of a minipod's link to the others: what all pairs have together
        that were measured across, one for each of a minipod's ranks. None without such pairs."""
        pairs = [one for one in self.collectives if one.kind == "all_reduce" and one.group.ranks == 2]
        across = [one for one in pairs if one.group.minipods == 2 and _per_byte(one) > 0]
        ranks = self.nodes_per_minipod * self.machine.ranks_per_node
        return ranks / _per_byte(across[0]) if across else None


def _per_byte(curve: Curve) -> float:
    """Seconds of a further byte: latency cancels out."""
    first, last = curve.points[0], curve.points[-1]
    return (last.seconds - first.seconds) / (last.bytes - first.bytes) if last.bytes > first.bytes else 0.0


def affinity_row(profile: PlacementProfile) -> str:
    """The job's ``[[jobs]]`` of an affinity file. Raises JobError where the job was not timed in all orders,
    or sends nothing along one axis."""
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
    """What ``place.network`` names: the rate inside a minipod, how much longer what crosses takes, and what a
    minipod's link to the others carries. Raises JobError where no group was measured both ways."""
    crossing = profile.crossing("all_reduce")
    inside = [c for c in profile.collectives if c.group.minipods == 1 and c.kind == "all_reduce"]
    if crossing is None or not inside:
        raise JobError("measured no group both inside a minipod and across", key="--network")
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
