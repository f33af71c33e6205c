"""What the planner answers: the best strategies of a job on a cluster, what each is predicted to take, and
why the first is the first.

Finalists of the closed form are simulated, through the very schedule and segment lists that would run; their
memory is the exact walk's. Models with experts, what else no list of ops has (``job_options``), and jobs that
another framework is to run are predicted in closed form alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.core.base.errors import InfeasiblePlan, JobError, PlaitError
from plait.core.base.text import in_bytes
from plait.core.base.uncollected import uncollected
from plait.core.cluster.hardware import Cluster
from plait.core.cluster.mfu import dense_peak, mfu
from plait.core.job.constraint import Margin
from plait.core.job.plan import Plan
from plait.core.job.spec import Job
from plait.core.model.precision import QUANTISED
from plait.core.model.spec import ModelSpec
from plait.core.step.clock.pipeline import Simulated
from plait.core.step.columns.points import SHARD_OVERLAPS, Points
from plait.core.step.memory.closed_memory import step_memory
from plait.core.step.memory.memory_options import MemoryOptions
from plait.core.step.seconds.closed_form import Seconds, step_seconds
from plait.plan import reasons
from plait.plan.asking import asked_of, job_at, margin_of, point_of, ranks_of, timed_point
from plait.plan.band import band
from plait.plan.candidate import Answer, Candidate
from plait.plan.experts_answer import closed_parts, closed_report
from plait.plan.finalists import DOUBT, Finalists, shared_by_lists
from plait.plan.fits import MOST_LAYERS, check_size
from plait.plan.fp8_shapes import check_widths, fp8_rules
from plait.plan.frameworks import Framework, framework_of
from plait.plan.freeing import Freed, freed, told_together
from plait.plan.job_options import options_of, planned_only
from plait.plan.make import make_plan
from plait.plan.memory_report import MemoryReport, memory_report
from plait.plan.nearest import changes, more_ranks, nearest_change, trades, would_fit
from plait.plan.needs import Needs
from plait.plan.respected import respected, told_constraints
from plait.plan.safest import LONGER, ROOMIEST, SURELY, roomiest
from plait.plan.search import first_of_family, search
from plait.plan.simulate import simulate_plan
from plait.plan.space import SearchRequest, any_point

SIMULATED = 4
"""Finalists of the closed form that are simulated beyond those that are shown, if they may be faster."""
LIGHT, MANY, WIDE = 40, 20, 1.06
"""Of models of no more layers, whose simulation takes little, so many are, and further from the best: late
hosts and small products are where the closed form errs most."""
FEW = 4
"""Finalists where only the best is asked for, and soon."""
PROPOSED = 24
"""Changes that are walked where a strategy does not fit, at most."""
WIDER = 5
"""So many times as many families are ranked as are simulated, where these correct what is said of others."""
MORE = 8
"""So many times as many are walked where none of them fits."""
CROWDED = 0.5
"""Of a device's memory: what fills less needs no advice on freeing it."""


@dataclass(frozen=True)
class Planner:
    """Predicts strategies of one job on one cluster. vocab: of the job's tokenizer. slowed: so many times as
    long as a device takes, ``cluster`` has it take; utilisation is of the device. told_framework: the one
    that is to run the job, with what a configuration of its own says; None: what ``plan.framework`` names."""

    job: Job
    cluster: Cluster
    vocab: int
    slowed: float = 1.0
    told_framework: Framework | None = None
    _seconds: dict[frozenset[tuple[str, int]], float] = field(default_factory=dict, init=False, compare=False)
    """Of a step, by points that were finalists."""

    @cached_property
    def framework(self) -> Framework | None:
        """Which is to run the job; None for Plait's own runtime."""
        found, precision = self.told_framework or framework_of(self.job.plan.framework), self.job.train.precision
        if found and found.name == "megatron" and precision in QUANTISED:
            rules = [*found.rules, *fp8_rules(self.model, self.job.data.sequence_length, precision)]
            return replace(found, rules=rules)
        return found

    @cached_property
    def model(self) -> ModelSpec:
        """Of the job. Raises JobError for more layers than anything is planned for."""
        model = self.job.model_spec(self.vocab)
        if model.num_layers > MOST_LAYERS:
            problem = f"{model.num_layers:,} layers are more than {MOST_LAYERS:,}"
            raise JobError(problem, key="model.num_layers", fix=f"Use at most {MOST_LAYERS}")
        return model

    @cached_property
    def margin(self) -> Margin:
        """Memory of every device that a plan leaves free."""
        return margin_of(self.job, self.cluster)

    @cached_property
    def asked(self) -> SearchRequest:
        """The space of the job. On this machine, where the job does not say how many ranks there are to be,
        of as many cores as can share its batch."""
        asked, section = asked_of(self.job, self.model, self.cluster), self.job.cluster
        if self.framework:
            if self.framework.name == "megatron" and self.job.train.precision in QUANTISED:
                check_widths(self.model, self.job.train.precision)
            asked = self.framework.asked(asked, self._options(self.job))
        said = section.ranks or section.file or section.preset != "here" or not self.job.leaves_ranks_open
        for ranks in range(asked.ranks, 0, -1) if not said else ():
            fewer = replace(asked, ranks=ranks, domain=min(ranks, asked.domain))
            if any_point(fewer):
                return fewer
        return asked

    @property
    def closed(self) -> bool:
        """Whether it is predicted in closed form alone, since lists of ops do not have all of it."""
        return bool(self.model.experts or self.model.kv_lora_rank or self.job.untrained or self.framework)

    @property
    def _light(self) -> bool:
        """Whether simulating a finalist takes little."""
        return self.model.num_layers <= LIGHT

    @uncollected()
    def answer(self) -> Answer:
        """The best strategies. Raises JobError for what cannot be searched, InfeasiblePlan where nothing
        fits."""
        shown = self.job.plan.top
        found, searched = self._finalists(shown, more=MANY if self._light else SIMULATED)
        first = first_of_family(Points.of([dict(one.point) for one in found]))  # what a person would call different
        found = [found[at] for at in first]
        found = self._safest_first(found) if self.margin.safest else found
        answer, most = self.told(found[:shown], searched=searched), self.job.plan.points
        coarsest = f"plan.points = {most:,}: the coarsest space has more, and {searched:,} strategies were compared."
        return replace(answer, why=[*answer.why, coarsest]) if searched > 2 * most else answer

    @uncollected()
    def chosen(self) -> Candidate:
        """The best, of fewer finalists than ``answer`` simulates. Raises as it does."""
        found, _ = self._finalists(FEW)
        return self._safest_first(found)[0] if self.margin.safest else found[0]

    def _safest_first(self, found: Sequence[Candidate]) -> list[Candidate]:
        """Before candidates, the fastest first, the one that is most sure to fit of those that take hardly
        longer than the fastest."""
        fastest = found[0]
        limit = LONGER * (fastest.closed_form or fastest.seconds)
        points = roomiest(self.asked, self.cluster, self.job.train.precision, seconds=limit, keep=ROOMIEST,
                          most=self.job.plan.points)  # fmt: skip
        tried = self._finalists_of([points.row(at) for at in range(len(points))])
        near = [one for one in (*found, *tried) if one and one.seconds <= LONGER * fastest.seconds]
        safest = min(near, key=lambda one: (-min(SURELY, one.memory.likely), one.seconds))
        return [safest, *(one for one in found if one.point != safest.point)]

    @uncollected()
    def checked(self, plan: Plan | None = None) -> Answer:
        """The job's own strategy, with whether it meets ``plan.constraints``: it is predicted even if it does
        not. plan: the job's as it stands, if there is one, with the slices and the costs that timed steps
        found. Raises JobError where it leaves something open, InfeasiblePlan where it does not fit: what is
        too much, by how much, and the nearest change."""
        if self.job.open:
            first, *others = self.job.open
            more = f", and so are {', '.join(one.removeprefix('strategy.') for one in others)}" if others else ""
            fix = "Say it, or search: leave out --evaluate. A [strategy] in the job has defaults for what it leaves out"
            raise JobError(f"is left to the planner{more}", key=first, fix=fix)
        check_size(self.job, self.vocab, None)
        world, ranks = self.job.world_size, ranks_of(self.job, self.cluster)
        if ranks != world:
            raise JobError(f"{ranks:,} are not the {world:,} ranks of the strategy", key="cluster.ranks",
                           fix=f"Use {world:,}, or leave it out")  # fmt: skip
        own = self.predict(self.job, plan)
        if not own.memory.fits:
            raise self._too_large(own)
        answer, asked = self.told([own], searched=1), respected(self.job, own.point, own.most_memory)
        instead = self.framework.instead(point_of(self.job)) if self.framework else []
        return replace(answer, why=[*told_constraints(asked), *instead, *answer.why], constraints=asked)

    def _finalists(self, sure: int, more: int = 0) -> tuple[list[Candidate], int]:
        """The fastest first, of so many, of some ``more`` that may be faster than these, and of neighbours of
        the best; and how many points were searched. Memory in closed form may be too little: where all
        finalists turn out too large, many more are walked."""
        count, light = sure + more, bool(more) and self._light
        for keep in (2 * count if light else WIDER * count, MORE * count):
            ranked = search(self.asked, self.cluster, self.job.train.precision, keep=keep, most=self.job.plan.points)
            doubt = WIDE if light else DOUBT
            tried = Finalists(ranked, self._finalists_of, lambda points: self.fit(points, self.job), doubt, not light)
            tried.first(sure, count)
            if tried.found and not self.closed:
                tried.other_schedules()
                tried.climb()
                tried.around_equals()
            if tried.found and "strategy.overlap" in self.job.open:
                tried.instead(lambda point: [*reasons.without(point).values(), *self._less_hidden(point)])
                tried.beside(self._less_hidden)
            if tried.found:
                self._seconds.update({frozenset(point.items()): one.seconds for point, one in tried.found})
                return sorted((one for _, one in tried.found), key=lambda one: one.seconds), len(ranked.space)
        why = self._refusal(tried.refused[0]) if tried.refused else ""
        raise InfeasiblePlan(f"None of the {len(ranked.points)} best strategies can be planned. The fastest: {why}")

    def _less_hidden(self, point: Mapping[str, int]) -> list[dict[str, int]]:
        """With an overlap less, or sharding that hides less, where the closed form finds it faster: what is
        hidden slows down what hides it. The space has only that which hides most."""
        kinds = range(len(SHARD_OVERLAPS)) if point["dp"] * point["cp"] > 1 and not self.framework else ()
        rows = [dict(point) | {"shard_overlap": kind} for kind in kinds if self.asked.allows("shard_overlap", kind)]
        rows += reasons.without(point).values()
        if not rows:
            return []
        told = self.closed_seconds(self.job, Points.of([point, *rows])).total
        return [row for row, seconds in zip(rows, told[1:], strict=True) if seconds < (1 - reasons.ALIKE) * told[0]]

    def _finalists_of(self, points: Sequence[Mapping[str, int]]) -> list[Candidate | None]:
        return self._with_closed_form(shared_by_lists(self._finalist, points))

    def _with_closed_form(self, found: Sequence[Candidate | None]) -> list[Candidate | None]:
        """With what the closed form says of what was simulated: asked for all at once, which takes as long as
        for one."""
        some = [one for one in found if one and not one.closed_form and len(set(one.job.degrees)) == 1]
        points = Points.of([dict(one.point) for one in some]) if some else None
        said = self.closed_seconds(some[0].job, points).total.tolist() if points else []
        told = {id(one): replace(one, closed_form=seconds) for one, seconds in zip(some, said, strict=True)}
        return [told.get(id(one), one) for one in found]

    def _finalist(self, point: Mapping[str, int]) -> Candidate | None:
        """A point predicted; None where ``_refusal`` says why. Memory first: a simulation takes longer."""
        try:
            job = job_at(self.job, point)
            plan = None if self.closed else self.draft(job)
            memory = self.memory(job, plan)
            return self._predicted(job, plan, memory) if memory.safe and not self._broken(memory) else None
        except PlaitError:
            return None

    def _refusal(self, point: Mapping[str, int]) -> str:
        """A rule that columns do not know, or memory."""
        try:
            one = self.predict(job_at(self.job, point))
        except PlaitError as error:
            return str(error)
        return self._broken(one.memory) if one.memory.safe else str(self._too_large(one))

    def _broken(self, memory: MemoryReport) -> str:
        """Which limit of memory that the job sets is not kept by what was walked, if any."""
        most = memory.fullest.total
        broken = (one for one in self.asked.constraints if one.quantity == "memory" and not one.holds(most))
        return next((f"a rank needs {in_bytes(most)}, against '{one.text}' in plan.constraints" for one in broken), "")

    def _too_large(self, one: Candidate) -> InfeasiblePlan:
        if one.memory.fits:
            return InfeasiblePlan(one.memory.told_crowded)
        advice = [told_together(self.freeing(one)), would_fit(self._nearest_change(one))]
        return InfeasiblePlan(" ".join([one.memory.told_too_large(self.cluster.device.name), *filter(None, advice)]))

    def _nearest_change(self, one: Candidate) -> dict[str, Any] | None:
        """With which its job fits as it would be run: what fits in closed form is walked."""
        walked = count()

        def fits(job: Job) -> bool:
            ranks_of(job, self.cluster)
            if not self.fit(Points.of([point_of(job)]), job)[0] or next(walked) >= PROPOSED:
                return False
            return (self.predict(job).memory if self.closed else self.memory(job, self.draft(job))).safe

        return nearest_change(one.job, chain(changes(one.job), trades(one.job), more_ranks(one.job)), fits)

    def _options(self, job: Job) -> MemoryOptions:
        return options_of(job, self.cluster.device, self.framework)

    def closed_seconds(self, job: Job, points: Points) -> Seconds:
        """Of strategies of a job, in closed form."""
        return step_seconds(
            self.model, points, self.cluster, sequence=job.data.sequence_length, precision=job.train.precision,
            options=self._options(job),
        )  # fmt: skip

    def fit(self, points: Points, job: Job) -> NDArray[np.bool_]:
        """Which points of a job fit in closed form."""
        found = step_memory(
            self.model, points, sequence=job.data.sequence_length, precision=job.train.precision,
            options=self._options(job), overhead=self.cluster.overhead,
        )  # fmt: skip
        return Needs.of(found, self.margin, self.cluster).fits()

    def memory(self, job: Job, plan: Plan | None) -> MemoryReport:
        """What fills every place under a job's plan: walked, or in closed form where no list is."""
        if self.closed or not plan:
            return self._closed_memory(job, point_of(job))
        return memory_report(plan, self.cluster, self.margin)

    def _closed_memory(self, job: Job, point: Mapping[str, int]) -> MemoryReport:
        return closed_report(self.model, point, self.cluster, job, self._options(job))

    def told(self, found: Sequence[Candidate], *, searched: int) -> Answer:
        """An answer of candidates in this order."""
        return Answer(
            model=self.model,
            cluster=self.cluster,
            ranks=found[0].job.world_size,
            candidates=found,
            why=[*planned_only(self.job, self.model, self.cluster.device, self._trained(found[0])), *self.why(found)],
            searched=searched,
            framework=self.framework.version if self.framework else "",
            frees=self.freeing(found[0]),
        )

    def _trained(self, one: Candidate) -> float | None:
        """Seconds in closed form without what can only be planned for; None where there is no such thing."""
        if not self.job.untrained:
            return None
        try:
            return float(self.closed_seconds(one.job.trained, Points.of([dict(one.point)])).total[0])
        except JobError:
            return None

    def freeing(self, one: Candidate) -> list[Freed]:
        """What would free memory of a strategy of equal places that fills more than half of a device."""
        if one.most_memory < CROWDED * one.memory.usable or len(set(one.job.degrees)) > 1:
            return []
        return freed(self.model, one.job, one.point, one.memory, self.cluster, self._options(one.job))

    def predict(self, job: Job, plan: Plan | None = None) -> Candidate:
        """A job that leaves nothing open. plan: the job's, if there is one already; else a draft of it."""
        one = self._predicted(job, plan)
        return self._with_closed_form([one])[0] or one

    def _predicted(self, job: Job, plan: Plan | None = None, memory: MemoryReport | None = None) -> Candidate:
        """As ``predict``, where it is simulated without ``closed_form``. memory: what fills it, if that is
        known."""
        if self.framework:
            point = self.framework.point(point_of(job), job.train.global_batch_size)
            job = job_at(job, point)
        else:
            plan = plan or self.draft(job)
            point = point_of(job) | timed_point(plan)
        points, sequence = Points.of([point]), job.data.sequence_length
        if self.closed:
            if len(set(job.degrees)) > 1:
                others = [self.framework.version] if self.framework else [key for key, _ in self.job.untrained]
                why = "experts need" if self.model.experts else f"{others[0]} needs"
                raise JobError(f"are unequal places; {why} equal ones", key="strategy.dp", fix="Give one number")
            closed = self.closed_seconds(job, points)
            seconds, parts = float(closed.total[0]), closed_parts(closed)
        elif plan:
            simulated = simulate_plan(plan, self.cluster)
            seconds, parts = simulated.seconds, simulated.exposed
        if not memory:
            memory = self.memory(job, plan) if plan and not self.closed else self._closed_memory(job, point)
        low, high = band(np.array([seconds]), points, self.cluster)
        batch, used = job.train.global_batch_size, self._mfu(job, seconds)
        return Candidate(
            job=job,
            point=point,
            seconds=seconds,
            low=float(low[0]),
            high=float(high[0]),
            closed_form=seconds if self.closed else None,
            parts=parts,
            memory=memory,
            tokens_per_second=batch * sequence / seconds,
            mfu=used and used[0],
            mfu_full=used and used[1],
        )

    def _mfu(self, job: Job, seconds: float) -> tuple[float, float] | None:
        """Utilisation of a step of ``seconds``, and the same with all of attention's scores counted."""
        peak = job.run.peak_flops or self.slowed * (dense_peak(self.cluster.device, job.train.precision) or 0.0)
        sequence, batch = job.data.sequence_length, job.train.global_batch_size
        found = mfu(self.model, sequence=sequence, batch=batch, seconds=seconds, devices=job.world_size, peak=peak)
        full = self.model.step_flops(sequence, batch) / self.model.causal_step_flops(sequence, batch)
        return None if found is None else (found, found * full)

    def refuse_framework(self, doing: str) -> None:
        """Raise JobError for a job that another framework is to run, which cannot be what ``doing`` says."""
        if self.framework:
            problem = f"what {self.framework.version} is to run cannot be {doing}: Plait does not run its steps"
            raise JobError(problem, key="plan.framework", fix="Leave it out")

    def plan(self, job: Job) -> Plan:
        """What ranks would obey. Raises JobError for a job that another framework is to run."""
        self.refuse_framework("made a plan that ranks obey")
        return make_plan(job, self.cluster.hosts, vocab=self.vocab)

    def draft(self, job: Job) -> Plan:
        """As much of it as predictions read."""
        return make_plan(job, self.cluster.hosts, vocab=self.vocab, draft=True)

    def simulated(self, job: Job, plan: Plan | None = None) -> Simulated:
        """A step of a job that leaves nothing open. plan: as for ``predict``."""
        return simulate_plan(plan or self.draft(job), self.cluster)

    def seconds(self, job: Job) -> float:
        """Of a step, as ``predict`` says."""
        return (self.predict(job) if self.closed else self.simulated(job)).seconds

    def why(self, found: Sequence[Candidate]) -> list[str]:
        """Sentences about the first of several, the fastest first; where the safest is asked for, this."""
        best = found[0]
        ahead = reasons.given_up(found) if self.margin.safest else reasons.runner_up(found)
        gains = [
            reasons.gains(name, slower, best.seconds)
            for name, off in reasons.without(best.point).items()
            if (slower := self._without(best, off))
        ]
        return [reasons.limits(best.parts, best.seconds), *ahead, *gains, *reasons.fixed_order(best.point)]

    def _without(self, best: Candidate, off: Mapping[str, int]) -> float | None:
        """Seconds of a step of another strategy than the best; None where a rule forbids it."""
        try:
            return self._seconds.get(frozenset(off.items())) or self.seconds(job_at(best.job, off))
        except PlaitError:
            return None
