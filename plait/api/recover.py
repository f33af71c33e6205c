"""What becomes of a run's plan and placement when hosts fail: another host in a failed one's place, or a plan
for fewer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.core.job.plan import Plan
    from plait.core.job.spec import Job
    from plait.core.topology.rank_table import RankTable
    from plait.lab import LabSpec


def repaired(plan: Plan, lab: LabSpec, table: RankTable, down: Sequence[str], spares: Sequence[str]) -> RankTable:
    """The table with spares in place of the hosts that are down, of which there are no more.

    Groups spread over no more minipods than they must. Where placing finds nothing (no room for what stays
    together in one minipod, nothing known of what the job sends), spares are taken in their order: the run is
    to go on.
    """
    from plait.core.base.errors import PlaitError

    try:
        return _placed(plan, lab, table, down, spares)
    except PlaitError:
        for host, spare in zip(down, spares, strict=False):
            table = table.with_host(table.node_rank(host), spare)
        return table


def _placed(plan: Plan, lab: LabSpec, table: RankTable, down: Sequence[str], spares: Sequence[str]) -> RankTable:
    """As ``plait place --repair`` has it. Raises PlacementError."""
    from plait.api.placing import volumes_of
    from plait.core.job.communication import CommunicationMatrix
    from plait.place.affinity import affinity_of, known_profiled
    from plait.place.pools import Wanted, pools_of, spots_of
    from plait.place.problem import Problem
    from plait.place.repair import from_table, repair

    tree = lab.as_topology
    matrix = CommunicationMatrix.of(plan, ranks_per_node=table.ranks_per_node, volumes=volumes_of(plan))
    spots = spots_of(tree, None)
    elsewhere = frozenset(spots) - {*table.hosts, *spares}
    problem = Problem.of(
        matrix, pools_of(tree, Wanted(avoid=elsewhere)), alpha=affinity_of(matrix, known_profiled(), "").alpha,
        plan=plan.key, topology=tree.key,
    )  # fmt: skip
    old = replace(from_table(problem, table, spots), spares=tuple(spares))
    return repair(problem, old, down=set(down), where=spots).placement.rank_table


def fewer(plan: Plan, open_job: Job | None, lab: LabSpec, hosts: int) -> Plan | None:
    """The plan for so many hosts of the lab; None where there is none.

    What the job leaves to the planner is planned anew; otherwise the run has fewer data-parallel replicas,
    with the same global batches in the same order. open_job: as the user wrote it. Raises JobError or
    InfeasiblePlan where the planner finds no strategy.
    """
    from plait.core.base.errors import PlaitError
    from plait.plan.make import make_plan

    assert plan.job is not None
    vocab, room = plan.model.vocab, hosts * lab.ranks_per_host
    small = replace(lab, hosts=hosts, pods=lab.pods if hosts % lab.pods == 0 else 1,
                    core=lab.core if hosts % lab.pods == 0 else "unlimited")  # fmt: skip
    if open_job is not None and open_job.leaves_ranks_open:
        from plait.api.choose import planned

        job, _ = planned(open_job, vocab, small)
        return make_plan(job, small.as_hosts, vocab=vocab)
    for job in _smaller(plan.job):
        if job.world_size <= room and job.world_size % lab.ranks_per_host == 0:
            with suppress(PlaitError):  # then for still fewer
                return make_plan(job, small.as_hosts, vocab=vocab)
    return None


def _smaller(job: Job) -> Iterator[Job]:
    """The same job with fewer data-parallel replicas, as many as can be first."""
    from plait.core.base.errors import JobError

    dp = job.strategy.dp
    degrees = (dp,) if isinstance(dp, int) else tuple(dp)
    if len(set(degrees)) > 1:
        return
    for less in range(degrees[0] - 1, 0, -1):
        value = less if isinstance(dp, int) else list((less,) * len(degrees))
        try:
            yield job.changed([f"strategy.dp={value}"])
        except JobError:  # batches, or shards, that do not come out even
            continue
