"""The planner's request derived from a job file: its open settings, cluster and number of ranks.
Also the job that a point of the space stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.core.base.errors import JobError, ScheduleError
from plait.core.base.numbers import check_number
from plait.core.base.text import in_bytes
from plait.core.cluster.hardware import Cluster
from plait.core.job.constraint import MARGIN_KEY, MARGINS, Constraint, Margin
from plait.core.job.plan import Plan
from plait.core.job.settings import OverlapKinds, RecomputeLayers, Slices
from plait.core.job.spec import Job
from plait.core.model.spec import ModelSpec
from plait.core.step.columns.points import (
    NAMES,
    OVERLAPS,
    RECOMPUTES,
    SCHEDULES,
    SHARD_OVERLAPS,
    number_of,
    schedule_properties,
    written,
)
from plait.core.step.memory.closed_memory import usable
from plait.core.step.schedules import GENERATORS
from plait.plan.search.choices import LARGEST_MICRO, MOST_MICRO
from plait.plan.search.job_options import options_of
from plait.plan.search.space import SearchRequest


def search_request(job: Job, model: ModelSpec, cluster: Cluster) -> SearchRequest:
    """Return the search request of a job. Raises JobError for settings that the planner cannot
    search around."""
    fixed = _fixed(job)
    shard = job.strategy.shard
    if "strategy.shard" not in job.open and not isinstance(shard, str):
        fixed |= {key: [value] for key, value in shard.model_dump().items()}
    elif "strategy.shard" in job.open and job.strategy.cuda_graphs is True:
        fixed |= {"params": [1], "grads": [1]}  # a captured graph needs persistent buffers
    inner = cluster.tiers[0].ranks
    ranks = ranks_of(job, cluster)
    _check_batch(job, ranks)
    return SearchRequest(
        model=model,
        ranks=ranks,
        domain=min(inner, ranks) if inner else ranks,
        global_batch=job.train.global_batch_size,
        sequence=job.data.sequence_length,
        fixed=fixed,
        shard=shard if "strategy.shard" not in job.open and isinstance(shard, str) else None,
        options=options_of(job, cluster.device),
        constraints=tuple(map(Constraint.parse, job.plan.constraints)),
        margin=margin_of(job, cluster),
        shared=job.train.rampup_batch_size.shared if job.train.rampup_batch_size else 0,
    )


def margin_of(job: Job, cluster: Cluster) -> Margin:
    """Return the memory that a plan leaves free on every device. Raises JobError for a margin that
    leaves nothing of a device that could hold tensors."""
    margin, room = Margin.parse(job.plan.memory_margin), usable(cluster.device, cluster.overhead)
    left, said = room - cluster.overhead.context.value, job.plan.memory_margin
    if said not in MARGINS and margin.reserved_bytes(0.0, room) >= left > 0:
        problem = f"a margin of {said} leaves no memory on {cluster.device.name}, "
        problem += f"of which a plan may fill {in_bytes(int(left))}"
        fix = f"Allowed: less than that, or {', '.join(MARGINS)}"
        raise JobError(problem, key=MARGIN_KEY, fix=fix)
    return margin


def _check_batch(job: Job, ranks: int) -> None:
    """Raise JobError if the batch gives every replica more micro-batches than the planner tries."""
    batch, micro = job.train.global_batch_size, max(job.train.micro_batch_size, LARGEST_MICRO)
    if batch > (most := ranks * micro * MOST_MICRO):
        problem = (
            f"{batch:,} sequences need more than {MOST_MICRO:,} micro-batches of {micro} on each of {ranks:,} ranks"
        )
        raise JobError(problem, key="train.global_batch_size", fix=f"Use at most {most:,}, or more ranks")


def ranks_of(job: Job, cluster: Cluster) -> int:
    """Return the number of ranks to plan for. Raises JobError if neither the job nor the cluster
    gives one, and if there are more than the cluster has."""
    there, section = cluster.nodes * cluster.ranks_per_node, job.cluster
    ranks = section.ranks or (there if job.leaves_ranks_open else job.world_size)
    if not ranks:
        fix = f"Set at least 1: the number of ranks to use on {cluster.name}"
        raise JobError("is 0 or missing, and the strategy leaves it open", key="cluster.ranks", fix=fix)
    check_number(ranks, "cluster.ranks", whole=True)
    described = section.file is not None or section.preset != "here"
    if described and there and ranks > there:
        nodes = f"{cluster.nodes:,} node{'s' * (cluster.nodes > 1)} of {cluster.ranks_per_node:,}"
        problem = f"{ranks:,} ranks exceed the {there:,} of {cluster.name} ({nodes}) by {ranks - there:,}"
        raise JobError(problem, key="cluster.ranks", fix=f"Use at most {there:,}, or describe more nodes in a file")
    return ranks


def _fixed(job: Job, *, searched: bool = True) -> dict[str, list[int]]:
    """Return the values that the job file fixes, by column of ``StrategyTable``.

    searched: True to raise JobError for settings that a search cannot respect. Otherwise the first
    pp rank stands for all, and 1f1b for a schedule file that cannot be searched."""
    section = job.strategy
    found = {"graphs": [int(section.cuda_graphs is True)]}
    said = {key.partition(".")[2] for key in job.open}
    for key in ("pp", "dp", "tp", "cp", "ep"):
        value = getattr(section, key)
        if key not in said:
            if searched and not isinstance(value, int) and len(set(value)) > 1:
                raise JobError(
                    f"{list(value)} differs between pp ranks; the planner can search only with one number",
                    key=f"strategy.{key}",
                    fix="Give one number, or every key of [strategy]",
                )
            found[key] = [value if isinstance(value, int) else value[0]]
    if searched and section.stage_layers:
        raise JobError(
            f"{list(section.stage_layers)} fixes the layers of stages, with which the planner cannot search",
            key="strategy.stage_layers",
            fix="Leave it out, or give every key of [strategy]",
        )
    if "cp_comm_type" not in said and section.cp > 1:
        found["ring"] = [job.sequence_cut.ring]
    elif "cp_comm_type" not in said and section.cp_comm_type == "ulysses":
        found["ring"] = [1]
    if "schedule" not in said:
        found |= _scheduled(section.schedule, found, searched=searched)
    if "schedule" not in said and (chunks := schedule_properties(NAMES[found["schedule"][0]]).chunks) > 1:
        found["virtual"] = [chunks]  # fixed by the schedule
    elif "virtual_stages" not in said and (section.virtual_stages > 1 or "schedule" not in said):
        found["virtual"] = [section.virtual_stages]
    if "recompute" not in said:
        again = section.recompute
        kind, layers = (again.kind, again.layers) if isinstance(again, RecomputeLayers) else (again, -1)
        found |= {"recompute": [RECOMPUTES.index(kind)], "recompute_layers": [layers]}
    if "overlap" not in said:
        given = section.overlap
        kinds = (
            given
            if isinstance(given, OverlapKinds)
            else OverlapKinds(tp=given, shard="none" if given == "sync" else "both")
        )
        found["overlap"] = [OVERLAPS.index(kinds.tp)]
        found["shard_overlap"] = [SHARD_OVERLAPS.index("both" if kinds.shard == "auto" else kinds.shard)]
    if "slices" not in said and isinstance(section.slices, Slices):
        found |= {"p1": [section.slices.batch], "p2": [section.slices.columns]}
    if "sequence_parallel" not in said and section.sequence_parallel != "auto":
        found["sequence_parallel"] = [int(section.sequence_parallel)]
    if "train.micro_batch_size" not in job.open and job.train.micro_batch_size:
        found["micro"] = [job.train.micro_batch_size]
    return found


def job_at(job: Job, point: Mapping[str, int]) -> Job:
    """Return the job with all open settings filled in from a strategy. point: integers by column of
    ``StrategyTable``."""
    values = job.to_dict()
    values["strategy"] = values["strategy"] | strategy_table(point)
    values["train"] = values["train"] | {"micro_batch_size": point["micro"]}
    return Job.from_dict(values)


def strategy_table(point: Mapping[str, int]) -> dict[str, Any]:
    """Return the keys and values of the job table ``[strategy]`` for a strategy. point: integers by
    column of ``StrategyTable``."""
    ring, kind = point["ring"], RECOMPUTES[point["recompute"]]
    ulysses = point["cp"] // ring
    cp_comm_type: Any = "ulysses" if ring == 1 else "ring" if ulysses == 1 else {"ulysses": ulysses, "ring": ring}
    layers = point["recompute_layers"]
    return {
        **{key: point[key] for key in ("pp", "dp", "cp", "tp", "ep")},
        "cp_comm_type": cp_comm_type,
        "schedule": NAMES[point["schedule"]],
        "virtual_stages": point["virtual"],
        "stage_layers": [],
        "shard": {key: point[key] for key in ("params", "grads", "optim", "secondary")},
        "overlap": {"tp": OVERLAPS[point["overlap"]], "shard": SHARD_OVERLAPS[point["shard_overlap"]]},
        "slices": {"batch": point["p1"], "columns": point["p2"]},
        "sequence_parallel": bool(point["sequence_parallel"]),
        "recompute": kind if layers < 0 else {"kind": kind, "layers": layers},
    }


def _scheduled(name: str, fixed: Mapping[str, list[int]], *, searched: bool) -> dict[str, list[int]]:
    """Return the allowed values of columns that the schedule ``name`` fixes. A schedule in a file
    also fixes the numbers of pp ranks and micro-batches. Raises JobError if these contradict
    ``fixed``."""
    try:
        found = {"schedule": [number_of(name)]}
    except ScheduleError as error:
        if not searched:
            return {"schedule": [SCHEDULES.index("1f1b")]}
        raise JobError(str(error), key="strategy.schedule", fix=f"Use {', '.join(GENERATORS)}, or auto") from None
    if searched and (file := written(name)):
        pp, count = len(file.ranks), file.num_micro_batches
        if fixed.get("pp", [pp]) != [pp]:
            problem = f"{name} is for pp = {pp}, but the job has pp = {fixed['pp'][0]}"
            raise JobError(problem, key="strategy.schedule", changes=[{"strategy.pp": pp}])
        found |= {"pp": [pp], "num_micro": [count]}
    return found


def point_of(job: Job) -> dict[str, int]:
    """Return the strategy of a job as integers by column of ``StrategyTable``. The job fixes all
    settings, except those chosen by timed steps. Unequal pp ranks count like the first one."""
    told = _fixed(job.model_copy(update={"open": ()}), searched=False)
    asked = {key: values[0] for key, values in told.items()}
    dp, tp = job.degrees[0]
    sharding = job.sharding(dp * job.strategy.cp)
    factors = {key: getattr(sharding, key) for key in ("params", "grads", "optim", "secondary")}
    micro = -(-job.micro_batch // dp)
    shape = {"dp": dp, "tp": tp, "ring": job.sequence_cut.ring, "micro": micro, "num_micro": job.num_micro_batches}
    return {"p1": 1, "p2": 1, "sequence_parallel": 0, "virtual": 1, "ep": 1, **asked, **factors, **shape}


def timed_point(plan: Plan) -> dict[str, int]:
    """Return the values that timed steps have chosen in a plan, by column of ``StrategyTable``."""
    strategy = plan.strategy
    return {
        "p1": strategy.p1, "p2": strategy.p2, "sequence_parallel": int(strategy.sequence_parallel),
        "overlap": OVERLAPS.index(strategy.overlap), "shard_overlap": SHARD_OVERLAPS.index(strategy.shard_overlap),
    }  # fmt: skip
