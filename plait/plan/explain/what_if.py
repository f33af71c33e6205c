"""Hypothetical clusters: links, devices or memory multiplied by factors, a slower node, or more
ranks.

A refusal that the change causes says that it is hypothetical, and names the change
(``under_changes``).
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

from plait.core.base.errors import InfeasiblePlan, JobError, PlaitError, nearest
from plait.core.cluster.hardware import Cluster, Constant
from plait.core.job.spec import Job
from plait.plan.search.request import ranks_of

CHANGES = {
    "nic": "rate of links between nodes",
    "link": "rate of all links",
    "compute": "peaks of the device",
    "memory": "memory of the device",
    "straggler": "slowest node's time",
    "gpus": "ranks",
}
"""Quantities that can be multiplied by a factor."""
ROOM = ("memory", "gpus")
"""Changes that alter which strategies fit; the others only change the seconds of a step."""
LEAST, MOST = 1e-6, 1e6
"""Smallest and largest factor allowed."""
_CHANGE = re.compile(r"\s*([a-z_]+)\s*=\s*([0-9]*\.?[0-9]+)\s*x?\s*")


def parse_changes(texts: Sequence[str]) -> dict[str, float]:
    """Return the factors by the quantity that they multiply. Raises JobError if a text is not a
    valid change."""
    found = dict[str, float]()
    for text in texts:
        match = _CHANGE.fullmatch(text)
        if not match or not LEAST <= float(match[2]) <= MOST:
            fix = f"Write it as in nic=2x or link=0.5, with a factor from {LEAST:g} to {MOST:g}"
            raise JobError(f"'{text}' is not a valid change", key="--what-if", fix=fix)
        if match[1] not in CHANGES:
            known = ", ".join(f"{name} ({what})" for name, what in CHANGES.items())
            raise JobError(f"'{text}': unknown{nearest(match[1], CHANGES)}", key="--what-if", fix=f"Known: {known}")
        if match[1] in found:
            problem = f"'{text}': {match[1]} is changed twice"
            raise JobError(problem, key="--what-if", fix="Give one factor for each")
        if match[1] == "straggler" and float(match[2]) < 1:
            problem = f"'{text}': the slowest node would be faster than the others"
            raise JobError(problem, key="--what-if", fix="Allowed: a factor of at least 1, as in straggler=1.2x")
        found[match[1]] = float(match[2])
    return found


def changed_cluster(cluster: Cluster, factors: Mapping[str, float]) -> Cluster:
    """Return the cluster with rates and sizes multiplied. factors: by key of ``CHANGES``. If the
    number of ranks grows, the number of nodes becomes unlimited."""
    if factors.get("gpus", 1.0) > 1.0:
        outer = cluster.tiers[-1].model_copy(update={"ranks": 0})
        cluster = cluster.model_copy(update={"nodes": 0, "tiers": (*cluster.tiers[:-1], outer)})
    inside = cluster.tiers[0].name if cluster.ranks_per_node > 1 else None
    link, nic = factors.get("link", 1.0), factors.get("nic", 1.0)
    tiers = tuple(
        tier.model_copy(update={"rate": scaled(tier.rate, link * (1.0 if tier.name == inside else nic))})
        for tier in cluster.tiers
    )
    # A step waits for its slowest node in every collective, so it is as late as if all nodes were as slow.
    late = 1 / factors.get("straggler", 1.0)
    given, compute = cluster.device, factors.get("compute", 1.0) * late
    device = given.model_copy(
        update={
            "peak": {key: scaled(value, compute) for key, value in given.peak.items()},
            "memory_rate": scaled(given.memory_rate, late),
            "memory": scaled(given.memory, factors.get("memory", 1.0)),
        }
    )
    return cluster.model_copy(update={"tiers": tiers, "device": device})


def changed_ranks(job: Job, cluster: Cluster, factors: Mapping[str, float]) -> Job:
    """Return the job with its number of ranks multiplied, and the same global batch. Raises
    JobError if the job fixes its ranks, or if the product is not a whole number."""
    factor = factors.get("gpus", 1.0)
    if factor == 1.0:
        return job
    if not job.leaves_ranks_open:
        problem = f"gpus={factor:g}x changes nothing: the strategy is one of {job.world_size} ranks"
        raise JobError(problem, key="--what-if", fix="Leave strategy.dp to auto")
    ranks = ranks_of(job, cluster) * factor
    if ranks != int(ranks):
        raise JobError(
            f"gpus={factor:g}x makes {ranks:g} ranks", key="--what-if", fix="Choose a factor that gives a whole number"
        )
    with under_changes(factors):
        return job.changed([f"cluster.ranks={int(ranks)}"])


def format_changes(factors: Mapping[str, float]) -> str:
    """Return the changes in words.

    >>> format_changes({"nic": 2.0, "gpus": 4.0})
    '2 times the rate of links between nodes, 4 times the ranks'
    """
    return ", ".join(f"{factor:g} times the {CHANGES[name]}" for name, factor in factors.items())


@contextmanager
def under_changes(factors: Mapping[str, float], before: PlaitError | None = None) -> Generator[None]:
    """Prefix refusals raised inside the context with the changes under which they hold.

    Of several changes, only those that can cause a refusal (``ROOM``) are named, if there are any.
    before: the refusal of the unchanged cluster, if there is one. A refusal that is the same
    without the changes is raised as it is.
    """
    try:
        yield
    except (InfeasiblePlan, JobError) as error:
        if not factors or str(error) == str(before):
            raise
        room = {name: factor for name, factor in factors.items() if name in ROOM}
        what = f"if there were {format_changes(room or factors)} (--what-if): "
        after = "As things are, nothing can be planned either" if before else ""
        if isinstance(error, JobError):
            problem, fix = f"{what}{error.problem}", ". ".join(filter(None, (error.fix, after)))
            raise JobError(problem, file=error.file, key=error.key, fix=fix) from None
        raise InfeasiblePlan(f"I{what[1:]}{error}{after and f' {after}.'}") from None


def scaled(constant: Constant, factor: float) -> Constant:
    """Return the constant multiplied by ``factor``; its source mentions the factor."""
    if factor == 1.0:
        return constant
    return constant.model_copy(
        update={"value": constant.value * factor, "source": f"{constant.source}; {factor:g} times that"}
    )
