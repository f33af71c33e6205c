"""Predicted steps of strategies whose ranks are placed: planning and placing combined.

A strategy is placed on a topology, or by a rank table. Its step is simulated twice: with all groups
inside minipods, and with the groups that cross minipods. The difference is the cost of the
placement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from plait.api.placing import PlacementRequest
from plait.api.plan_answer import PlanAnswer
from plait.api.planning import Planning
from plait.core.base.errors import JobError, PlacementError
from plait.core.base.text import Column, Part, Shown, Table, in_seconds
from plait.core.cluster.hardware import Cluster
from plait.core.cluster.network import Network
from plait.core.job.plan import Plan
from plait.core.topology.rank_table import RankTable
from plait.plan.search.candidate import Candidate
from plait.plan.search.simulate import PlacedOn, simulate_plan


@dataclass(frozen=True, kw_only=True)
class PlacedStep:
    """The predicted step of one placed strategy. seconds: as placed; inside: if no group crossed
    minipods. dp_spread, pp_spread: minipods of the most spread DP group and PP group. hosts: by
    node rank."""

    strategy: str
    seconds: float
    inside: float
    dp_spread: int
    pp_spread: int
    hosts: tuple[str, ...]

    @property
    def slowdown(self) -> float:
        """The relative increase of the step by the placement: its seconds over those inside
        minipods, minus 1."""
        return self.seconds / self.inside - 1


@dataclass(frozen=True)
class PlacedSteps(Shown):
    """The predicted steps of placed strategies, the fastest first. network: the file with the cost
    of crossing minipods; empty for published figures."""

    steps: Sequence[PlacedStep]
    network: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary for each strategy with its seconds and spreads, for JSON."""
        rows = [asdict(one) | {"more": one.slowdown} for one in self.steps]
        return {"placed": rows, "network": self.network}

    def parts(self) -> Iterator[Part]:
        """Yield a table, and a sentence on the fastest strategy."""
        header = ("placed, as above", Column("step", in_seconds), Column("uncrossed", in_seconds),
                  Column("by placement", "+.1%"), "DP in", "PP in")  # fmt: skip
        rows = [
            (str(at), one.seconds, one.inside, one.slowdown, one.dp_spread, one.pp_spread)
            for at, one in enumerate(self.steps, 1)
        ]
        yield Table("", header, rows)
        rests = f"as {self.network} says" if self.network else "by published figures (place.network names others)"
        yield f"What crosses minipods costs {self.steps[0].slowdown:+.1%}, {rests}. DP in, PP in: minipods of a group."


def place_steps(
    planning: Planning, plan_answer: PlanAnswer, overrides: Sequence[str]
) -> tuple[PlanAnswer, PlacedSteps]:
    """Return (the answer with its strategies in the order of their predicted steps as placed, the
    fastest first; these steps). Strategies are placed on ``place.topology``, or by
    ``place.rank_table``. Raises JobError for a missing or unfit topology, PlacementError if there
    is no placement."""
    planner = planning.planner
    planner.refuse_framework("placed")
    settings = planner.job.place.changed(overrides)
    if not settings.topology:
        raise JobError(
            "needs a topology that contains its hosts", key="place.rank_table", fix="Set place.topology, too"
        )
    known = RankTable.read(Path(settings.rank_table)) if settings.rank_table else None
    steps = [_placed(planning, one, overrides, settings.topology, known) for one in plan_answer.answer.candidates]
    order = sorted(range(len(steps)), key=lambda at: steps[at].seconds)
    told = PlacedSteps([steps[at] for at in order], settings.network)
    if order == sorted(order):
        return plan_answer, told
    answer = planner.make_answer(
        [plan_answer.answer.candidates[at] for at in order], searched=plan_answer.answer.searched
    )
    return replace(plan_answer, answer=answer), told


def _placed(
    planning: Planning, candidate: Candidate, overrides: Sequence[str], topology: str, table: RankTable | None
) -> PlacedStep:
    planner, cluster = planning.planner, planning.planner.cluster
    plan = planning.input_plan or planner.draft(candidate.job)
    own = [word for word in overrides if word.startswith("place.")]
    placing = PlacementRequest(
        job=Path(candidate.job.run.name or "job"), topology=topology, overrides=own,
        planned_cluster=(plan, cluster.tiers[-1].rate.value, cluster.device.name, cluster.ranks_per_node),
    )  # fmt: skip
    placing.read()
    if placing.ranks_per_node != cluster.ranks_per_node:
        problem = f"nodes have {placing.ranks_per_node} ranks, and those of the cluster {cluster.ranks_per_node}"
        raise JobError(problem, key="place.gpus_per_node", fix="Give the cluster's, or another topology")
    if table:
        hosts = _checked(table, plan, placing)
        pods = tuple(placing.spots[host].minipod for host in hosts)
    else:
        placement = placing.solve()
        hosts, pods = placement.hosts, placement.minipods
    number = {pod: at for at, pod in enumerate(dict.fromkeys(pods))}
    network = placing.problem.network or Network.read()
    there = PlacedOn(pods=tuple(number[pod] for pod in pods), network=network)
    dp, pp = there.prices(plan, cluster).spreads()
    strategy = " ".join(f"{key}={value}" for key, value in candidate.readable.items())
    step = partial(PlacedStep, strategy=strategy, dp_spread=dp, pp_spread=pp, hosts=tuple(hosts))
    if planner.closed_form_only:
        return step(seconds=candidate.seconds + _crossing(candidate, network, dp, pp), inside=candidate.seconds)
    measured = _as_measured(cluster, network)
    placed = simulate_plan(plan, measured, placed=there).seconds
    return step(seconds=placed, inside=simulate_plan(plan, measured).seconds)


def _crossing(candidate: Candidate, network: Network, dp: int, pp: int) -> float:
    """Return the seconds that spreading adds to the exposed communication of the closed form, which
    knows axes but no groups. Traffic of experts counts like that of their DP groups."""
    down = sum(candidate.parts.get(axis, 0.0) for axis in ("dp", "ep"))
    along = candidate.parts.get("pp", 0.0) if pp > 1 else 0.0
    return down * (network.collective_factor(dp) - 1) + along * (network.pair_factor - 1)


def _as_measured(cluster: Cluster, network: Network) -> Cluster:
    """Return the cluster with the rate of collectives inside a minipod that was measured together
    with the rate of the minipod's link; unchanged if that was not measured."""
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


def _checked(table: RankTable, plan: Plan, placing: PlacementRequest) -> tuple[str, ...]:
    """Return the hosts of a rank table. Raises PlacementError if the topology lacks a host, or if
    their number is not the plan's number of nodes."""
    nodes = -(-plan.layout.world_size // placing.ranks_per_node)
    if len(table.hosts) != nodes:
        raise PlacementError(
            f"The rank table has {len(table.hosts)} hosts; the strategy has {plan.layout.world_size} ranks, {nodes} "
            f"nodes of {placing.ranks_per_node}. Give its own table, or none: then it is placed."
        )
    if unknown := [host for host in table.hosts if host not in placing.spots]:
        raise PlacementError(f"The topology has no node '{unknown[0]}' of the rank table. Give the one it is for.")
    return table.hosts
