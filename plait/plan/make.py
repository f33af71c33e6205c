"""Makes a plan from a job and its hosts, before any rank starts.

A plan fixes the schedule with its transfers, proven free of deadlock; the layers of every stage;
how tensors are resharded at every boundary; and the candidates that timed steps choose from.
``assemble_plan`` makes a plan from parts, for programs without a job file.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cached_property, lru_cache
from typing import Any

from plait.core.base.errors import JobError
from plait.core.cluster.hardware import MEMORY_RATE, Hosts
from plait.core.job.plan import Choices, Plan, Reshards
from plait.core.job.spec import Job
from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import Layout, Mesh
from plait.core.parallel.strategy import Strategy, slice_sizes
from plait.core.reshard.layouts import Reshard, TensorLayout
from plait.core.reshard.plan import ReshardPlan
from plait.core.step.clock.pipeline_clock import dry_run
from plait.core.step.schedule import Edge, Schedule, with_edges, with_transfers
from plait.core.step.schedules import GENERATORS, Shape, find_schedule, whole_steps
from plait.core.step.step import Step, Workload
from plait.plan.reshard.boundary import plan_reshard
from plait.plan.reshard.cost import Fabric

P1, P2 = (1, 2, 4, 8), (1, 2)
"""Numbers of Domino's slices that are timed if the job leaves them open: of a micro-batch's
sequences, and of columns."""


def make_plan(job: Job, hosts: Hosts, *, vocab: int, draft: bool = False) -> Plan:
    """Return the plan of a job. vocab: of its tokenizer, for models that do not set one.

    draft: make a plan that only serves a prediction on a described cluster. It omits resharding,
    and the proof that a generated schedule has no deadlock. For long pipelines a draft takes a
    fifth of the time. Raises JobError if pp ranks, layers or micro-batches do not fit,
    ScheduleError if the schedule cannot run.
    """
    step = job_step(job, vocab)
    layout = step.layout
    choices = Choices(
        strategies=_candidates(job, step.model, step.workload),
        shard_overlap=job.tunes_sharding and max(mesh.replicas for mesh in layout.meshes) > 1,
        slack=job.measures_slack and len(layout.degrees) > 1,
        compile=job.strategy.compile == "auto",
        # Captured steps must be alike.
        cuda_graphs=job.strategy.cuda_graphs == "auto" and not job.data.masks and not step.model.experts,
    )
    generated = job.strategy.schedule in GENERATORS and step.schedule.name in GENERATORS
    if draft and generated:  # many drafts of a search share one schedule
        step = replace(step, schedule=_lowered(step.schedule.name, _shape(job), tuple(step.crossings)))
    return assemble_plan(step, hosts, job=job, choices=choices, draft=draft, generated=generated)


def job_step(job: Job, vocab: int) -> Step:
    """Return the step of a job, with its schedule. The schedule has no transfers yet, unless it is
    from a file that has them. vocab: of the job's tokenizer, for models that do not set one. Raises
    JobError if layers or stages do not fit."""
    layout, schedule = job.layout, job_schedule(job, job.layout)
    _check_fits(schedule, layout, job_workload(job))
    shardings = [job.sharding(mesh.replicas) for mesh in layout.meshes]
    return Step.of(
        job.model_spec(vocab), job_workload(job), job.base_strategy, layout, schedule,
        stage_layers=job.strategy.stage_layers, shardings=shardings,
    )  # fmt: skip


def assemble_plan(
    step: Step,
    hosts: Hosts,
    *,
    job: Job | None = None,
    choices: Choices | None = None,
    draft: bool = False,
    generated: bool = False,
) -> Plan:
    """Return the plan of a step, whose schedule may lack transfers. draft: as in ``make_plan``,
    with the same errors. generated: the schedule is from a generator; a draft trusts it to run."""
    schedule, choices = step.schedule, choices or Choices()
    _check_fits(schedule, step.layout, step.workload)
    if schedule.computes_only:
        schedule = with_transfers(with_edges(schedule, step.crossings), proven=generated)
    elif set(schedule.edges) != set(step.crossings):
        wanted = " ".join(f"{a}>{b}" for a, b in step.crossings)
        problem = f"{schedule.name} has other edges than the model, which has {wanted}"
        raise JobError(problem, key="strategy.schedule", fix=f"Write edges: {wanted} in it")
    if not (draft and generated):  # also checks the instruction lists
        dry_run(schedule, transfers="rendezvous")
    streams = {one.sequence_parallel for one in choices.strategies} or {step.strategy.sequence_parallel}
    boundaries = _Boundaries(replace(step, schedule=schedule), hosts)
    known: dict[str, Any] = {one.name: getattr(step, one.name) for one in fields(Step)}
    known["schedule"] = schedule
    return Plan(
        **known,
        job=job,
        reshards={} if draft else {parallel: boundaries.reshards(parallel) for parallel in sorted(streams)},
        choices=choices,
        seed=job.train.seed if job else 0,
        hosts=hosts if hosts.rate else None,
    )


def job_workload(job: Job) -> Workload:
    """Return the workload of one step of a job: its sequences, their length in tokens, and
    micro-batches."""
    return Workload(
        micro_batch=job.micro_batch,
        num_micro_batches=job.num_micro_batches,
        sequence=job.data.sequence_length,
        precision=job.train.precision,
        optimizer=job.train.optimizer,
        matrix_itemsize=job.train.muon.itemsize(job.train.precision),
        matrix_steps=job.train.muon.ns_steps,
        reduce_dtype=job.strategy.reduce_dtype,
        optimizer_dtype=job.train.optimizer_dtype,
    )


def job_schedule(job: Job, layout: Layout) -> Schedule:
    """Return the job's schedule, without transfers unless it is from a file that has them."""
    asked, count = job.strategy, job.num_micro_batches
    alone = asked.pp == asked.virtual_stages == 1 and layout.meshes[0].replicas == 1
    if alone and asked.schedule in GENERATORS:
        return whole_steps(count)
    return find_schedule(asked.schedule, _shape(job))[0]


def _shape(job: Job) -> Shape:
    """Return the pp ranks, micro-batches and stages of the job's schedule. Slack that the job
    leaves open is measured after the ranks start; until then it is that of eager-1f1b."""
    asked = job.strategy
    slack = (2,) * (asked.pp - 1) if job.measures_slack else asked.slack
    return Shape(ranks=asked.pp, micro_batches=job.num_micro_batches, chunks=asked.virtual_stages, slack=slack)


@lru_cache(maxsize=32)
def _lowered(name: str, shape: Shape, edges: tuple[Edge, ...]) -> Schedule:
    """Return the schedule of the generator ``name``, with its transfers."""
    return with_transfers(with_edges(find_schedule(name, shape)[0], edges), proven=True)


def _check_fits(schedule: Schedule, layout: Layout, workload: Workload) -> None:
    pp, count = len(layout.degrees), workload.num_micro_batches
    if len(schedule.ranks) != pp:
        problem = f"{schedule.name} is for pp = {len(schedule.ranks)}, but the job has pp = {pp}"
        raise JobError(problem, key="strategy.schedule", changes=[{"strategy.pp": len(schedule.ranks)}])
    if schedule.num_micro_batches != count:
        raise JobError(
            f"{schedule.name} is for {schedule.num_micro_batches} micro-batches, a step has {count}",
            key="strategy.schedule",
            fix="Change train.global_batch_size or train.micro_batch_size",
        )
    for dp, _ in layout.degrees:
        if dp > workload.micro_batch:
            problem = f"dp = {dp} exceeds the {workload.micro_batch} sequences of a micro-batch over all replicas"
            raise JobError(problem, key="strategy.dp", fix=f"Use dp <= {workload.micro_batch}")


def _candidates(job: Job, model: ModelSpec, workload: Workload) -> tuple[Strategy, ...]:
    """Return strategies with the slices and sequence parallelism that the job leaves open, if every
    pp rank allows them. Empty if nothing is open, or if no pp rank has communication of tp or cp to
    hide."""
    asked, base = job.strategy, job.base_strategy
    alone = all(tp == 1 for _, tp in job.degrees)
    if "auto" not in (asked.slices, asked.sequence_parallel) or (alone and (base.cp == 1 or asked.slices != "auto")):
        return ()
    both = asked.sequence_parallel == "auto" and not alone
    parallel, columns = (False, True) if both else (base.sequence_parallel,), (1,) if alone else P2
    grid = [(p1, p2) for p1 in P1 for p2 in columns] if asked.slices == "auto" else [(base.p1, base.p2)]
    every = [replace(base, p1=p1, p2=p2, sequence_parallel=sp) for sp in parallel for p1, p2 in grid]
    return tuple(one for one in every if _allowed(one, job, model, workload))


def _allowed(strategy: Strategy, job: Job, model: ModelSpec, workload: Workload) -> bool:
    """True if every pp rank can run the strategy, with its smallest share of a micro-batch."""
    for dp, tp in job.degrees:
        share = slice_sizes(workload.micro_batch, dp)[-1]
        try:
            replace(strategy, tp=tp).check(model, batch=share, sequence=workload.sequence)
        except JobError:
            return False
    return True


class _Boundaries:
    """Plans the resharding of every tensor sent between pp ranks, once for each pair of layouts."""

    def __init__(self, step: Step, hosts: Hosts) -> None:
        self.schedule, self.layout, self.workload = step.schedule, step.layout, step.workload
        self.hidden, self.tensors, self.hosts = step.model.hidden, step.crossings, hosts
        self._known: dict[object, ReshardPlan] = {}
        self._moved: dict[object, ReshardPlan] = {}  # stages on the same two pp ranks share a plan

    def reshards(self, sequence_parallel: bool) -> Reshards:
        """Return the reshard plans of every edge between pp ranks, in both directions."""
        meshes, rank_of = self.layout.meshes, self.schedule.rank_of
        lying = [_layout(meshes[rank_of[stage]], sequence_parallel) for stage in range(self.schedule.num_stages)]
        found: dict[Edge, dict[str, ReshardPlan]] = {}
        for source, target in (*self.schedule.edges, *((b, a) for a, b in self.schedule.edges)):
            if rank_of[source] != rank_of[target]:
                for name, level in self.tensors[min(source, target), max(source, target)]:
                    way = lying[source], lying[target], level
                    if way not in self._moved:
                        self._moved[way] = self._plan(*way)
                    found.setdefault((source, target), {})[name] = self._moved[way]
        return found

    def _plan(self, source: TensorLayout, target: TensorLayout, level: int) -> ReshardPlan:
        """Return the reshard plan of a boundary. Boundaries that differ only in their first rank
        share one search."""
        first = min(*source.ranks, *target.ranks)
        alike = source.shifted(-first), target.shifted(-first), level, self._hosts_from(first, source, target)
        found = self._known.get(alike)
        if found is None:
            work = self.workload
            shape = (work.sequence >> level, work.micro_batch, self.hidden)
            rate = self.hosts.rate or MEMORY_RATE
            fabric = Fabric(hosts=self._hosts, rate=rate, nics_per_host=self.hosts.nics)
            found = self._known[alike] = plan_reshard(Reshard(source, target, shape, work.itemsize), fabric)
        return found.shifted(first - min(*found.source.ranks, *found.destination.ranks))

    @cached_property
    def _hosts(self) -> tuple[int, ...]:
        """Hosts of all ranks: the host's number, by rank."""
        return self.hosts.of(self.layout.world_size)

    def _hosts_from(self, first: int, *layouts: TensorLayout) -> tuple[int, ...]:
        """Return the hosts of a boundary's ranks as numbers relative to the host of rank ``first``,
        so that boundaries alike on other hosts share one plan."""
        return tuple(self._hosts[rank] - self._hosts[first] for each in layouts for rank in each.ranks)


def _layout(mesh: Mesh, sequence_parallel: bool) -> TensorLayout:
    """Return the layout of a tensor [S, B, H] on a mesh (dp, cp, tp): B over dp, S over cp, and
    also over tp if ranks hold shards of S between layers.

    The order of tokens in S is the same on every pp rank, so the layout does not depend on it.
    """
    return TensorLayout(
        (mesh.dp, mesh.cp, mesh.tp), tuple(mesh.ranks), ((1, 2) if sequence_parallel else (1,), (0,), ())
    )
