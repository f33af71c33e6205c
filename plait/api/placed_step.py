"""Steps as they are predicted where their ranks are placed: planning and placing joined.

A strategy is placed on a topology (or lies where a rank table says), and its step is simulated once with
all of its groups inside minipods and once with those across that cross: the difference is what the
placement costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from plait.api.placing import Placing
from plait.api.plan_answer import PlanAnswer
from plait.api.planning import Planning
from plait.core.base.errors import JobError, PlacementError
from plait.core.base.text import Column, Part, Shown, Table, in_seconds
from plait.core.cluster.hardware import Cluster
from plait.core.cluster.network import Network
from plait.core.job.plan import Plan
from plait.core.topology.rank_table import RankTable
from plait.plan.candidate import Candidate
from plait.plan.simulate import PlacedOn, simulate_plan


@dataclass(frozen=True, kw_only=True)
class PlacedStep:
    """A step of one strategy. seconds: as placed; inside: if no group left its minipod. dp_spread, pp_spread:
    minipods of the most spread DP group and PP group. hosts: by node rank."""

    strategy: str
    seconds: float
    inside: float
    dp_spread: int
    pp_spread: int
    hosts: tuple[str, ...]

    @property
    def more(self) -> float:
        """What the placement costs, as a share of the step."""
        return self.seconds / self.inside - 1


@dataclass(frozen=True)
class PlacedSteps(Shown):
    """Strategies where they are placed, the fastest first. network: the file that says what crossing costs;
    empty for what is published."""

    steps: Sequence[PlacedStep]
    network: str = ""

    def to_dict(self) -> dict[str, Any]:
        """A row for each strategy."""
        rows = [asdict(one) | {"more": one.more} for one in self.steps]
        return {"placed": rows, "network": self.network}

    def parts(self) -> Iterator[Part]:
        """A table, and the first in a sentence."""
        header = ("placed, as above", Column("step", in_seconds), Column("uncrossed", in_seconds),
                  Column("by placement", "+.1%"), "DP in", "PP in")  # fmt: skip
        rows = [
            (str(at), one.seconds, one.inside, one.more, one.dp_spread, one.pp_spread)
            for at, one in enumerate(self.steps, 1)
        ]
        yield Table("", header, rows)
        rests = f"as {self.network} says" if self.network else "by published figures (place.network names others)"
        yield f"What crosses minipods costs {self.steps[0].more:+.1%}, {rests}. DP in, PP in: minipods of a group."


def place_steps(asked: Planning, found: PlanAnswer, overrides: Sequence[str]) -> tuple[PlanAnswer, PlacedSteps]:
    """The strategies of an answer as they are predicted where they are placed (``place.topology``, or where
    ``place.rank_table`` says), the fastest first; and the answer in this order. Raises JobError,
    PlacementError."""
    planner = asked.planner
    planner.refuse_framework("placed")
    settings = planner.job.place.changed(overrides)
    if not settings.topology:
        raise JobError("needs to know where its hosts are", key="place.rank_table", fix="Give place.topology, too")
    known = RankTable.read(Path(settings.rank_table)) if settings.rank_table else None
    steps = [_placed(asked, one, overrides, settings.topology, known) for one in found.answer.candidates]
    order = sorted(range(len(steps)), key=lambda at: steps[at].seconds)
    told = PlacedSteps([steps[at] for at in order], settings.network)
    if order == sorted(order):
        return found, told
    answer = planner.told([found.answer.candidates[at] for at in order], searched=found.answer.searched)
    return replace(found, answer=answer), told


def _placed(
    asked: Planning, one: Candidate, overrides: Sequence[str], topology: str, table: RankTable | None
) -> PlacedStep:
    planner, cluster = asked.planner, asked.planner.cluster
    plan = asked.written or planner.draft(one.job)
    own = [word for word in overrides if word.startswith("place.")]
    placing = Placing(
        job=Path(one.job.run.name or "job"), topology=topology, overrides=own,
        planned=(plan, cluster.tiers[-1].rate.value, cluster.device.name, cluster.ranks_per_node),
    )  # fmt: skip
    placing.read()
    if placing.each != cluster.ranks_per_node:
        problem = f"nodes of {placing.each} ranks, and the cluster's have {cluster.ranks_per_node}"
        raise JobError(problem, key="place.gpus_per_node", fix="Give the cluster's, or another topology")
    if table:
        hosts = _checked(table, plan, placing)
        pods = tuple(placing.spots[host].minipod for host in hosts)
    else:
        placement = placing.placed()
        hosts, pods = placement.hosts, placement.minipods
    number = {pod: at for at, pod in enumerate(dict.fromkeys(pods))}
    network = placing.problem.network or Network.read()
    there = PlacedOn(pods=tuple(number[pod] for pod in pods), network=network)
    dp, pp = there.prices(plan, cluster).spreads()
    strategy = " ".join(f"{key}={value}" for key, value in one.readable.items())
    told = {"strategy": strategy, "dp_spread": dp, "pp_spread": pp, "hosts": tuple(hosts)}
    if planner.closed:
        return PlacedStep(seconds=one.seconds + _crossing(one, network, dp, pp), inside=one.seconds, **told)
    measured = _as_measured(cluster, network)
    placed = simulate_plan(plan, measured, placed=there).seconds
    return PlacedStep(seconds=placed, inside=simulate_plan(plan, measured).seconds, **told)


def _crossing(one: Candidate, network: Network, dp: int, pp: int) -> float:
    """Seconds that spreading adds to what the closed form has exposed: it knows no groups, only axes.
    Experts' tokens count as their DP groups' do."""
    down = sum(one.parts.get(axis, 0.0) for axis in ("dp", "ep"))
    along = one.parts.get("pp", 0.0) if pp > 1 else 0.0
    return down * (network.collective_factor(dp) - 1) + along * (network.pair_factor - 1)


def _as_measured(cluster: Cluster, network: Network) -> Cluster:
    """The cluster with the rate of collectives inside a minipod that was measured beside that of its link; as
    it is where that was not measured."""
    if network.core is None:
        return cluster
    *inner, outer = cluster.tiers
    rate = outer.rate.model_copy(update={"value": network.rate, "source": "place.network"})
    across, reached = cluster.efficiency.across, cluster.efficiency
    whole = across.model_copy(update={"share": across.share.model_copy(update={"value": 1.0})})
    return cluster.model_copy(update={
        "tiers": (*inner, outer.model_copy(update={"rate": rate})),
        "efficiency": reached.model_copy(update={"across": whole}),
    })  # fmt: skip


def _checked(table: RankTable, plan: Plan, placing: Placing) -> tuple[str, ...]:
    """Its hosts, which the topology must know, as many as the plan has nodes."""
    nodes = -(-plan.layout.world_size // placing.each)
    if len(table.hosts) != nodes:
        raise PlacementError(
            f"The rank table has {len(table.hosts)} hosts; the strategy has {plan.layout.world_size} ranks, {nodes} "
            f"nodes of {placing.each}. Give its own table, or none: then it is placed."
        )
    if unknown := [host for host in table.hosts if host not in placing.spots]:
        raise PlacementError(f"The topology has no node '{unknown[0]}' of the rank table. Give the one it is for.")
    return table.hosts
