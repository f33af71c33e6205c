"""What an order of nodes scores by the definition (docs/place.md), and the least that any order of
them can: by counting all. No line of the placer's own is used."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from plait.core.cluster.hardware import HERE
from plait.core.job.plan import Plan
from plait.core.job.spec import Job
from plait.core.topology.switches import Topology
from plait.plan.make import make_plan


def a_plan(dp: int, pp: int, alpha: float) -> Plan:
    """Of dp x pp ranks."""
    model = {"family": "gpt", "num_layers": 2 * pp, "hidden": 32, "num_heads": 2, "max_sequence": 32, "vocab": 16}
    job = {
        "model": model, "data": {"sequence_length": 32}, "strategy": {"dp": dp, "pp": pp},
        "train": {"global_batch_size": 4 * dp, "micro_batch_size": 1},
        "place": {"alpha": alpha}, "run": {"name": "job"},
    }  # fmt: skip
    return make_plan(Job.from_dict(job), HERE, vocab=16)


def score(plan: Plan, tree: Topology, hosts: Sequence[str]) -> float:
    """Of nodes with a rank each, in the order of ranks: stages of the pipeline outside, replicas
    inside."""
    return _score(plan, [tree.path(host)[0] for host in hosts])


def least_score(plan: Plan, tree: Topology, hosts: Sequence[str]) -> float:
    """Of any order of them; no order of nodes inside a minipod matters."""
    orders = set(itertools.permutations(tree.path(host)[0] for host in hosts))
    return min(_score(plan, pods) for pods in orders)


def _score(plan: Plan, pods: Sequence[str]) -> float:
    """pods: the minipod of every rank."""
    assert plan.job
    alpha = float(plan.job.place.alpha or 0.0)
    replicas, stages = (
        max(len({pods[rank] for rank in group}) for group in plan.layout.groups(axis)) for axis in ("dp", "pp")
    )
    return alpha * replicas + (1 - alpha) * stages
