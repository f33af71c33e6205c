"""The planner's answer: the best strategies of a job on a cluster, with predictions and reasons.

Finalists of the closed form are simulated, with the same schedule and instruction lists that would
run; their memory is traced exactly. Some jobs are predicted in closed form alone: models with
experts, other features that instruction lists lack (``job_options``), and jobs that run in another
framework.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.core.base.errors import InfeasiblePlan, JobError, PlaitError
from plait.core.base.process import uncollected
from plait.core.base.text import in_bytes
from plait.core.cluster.hardware import Cluster
from plait.core.cluster.mfu import dense_peak, mfu
from plait.core.job.constraint import Margin
from plait.core.job.plan import Plan
from plait.core.job.spec import Job
from plait.core.model.precision import QUANTISED
from plait.core.model.spec import ModelSpec
from plait.core.step.clock.pipeline import Simulated
from plait.core.step.columns.points import SHARD_OVERLAPS, StrategyTable
from plait.core.step.memory.closed_memory import MemoryColumns, step_memory
from plait.core.step.memory.memory_options import MemoryOptions
from plait.core.step.seconds.closed_form import Seconds, step_seconds
from plait.formats.base.frameworks import Framework, Mask, check_widths, fp8_rules, framework_of, sequences
from plait.plan.explain import reasons
from plait.plan.explain.memory_report import MemoryReport, closed_report, memory_report
from plait.plan.explain.moves import (
    OTHER_CLUSTER,
    MemorySaving,
    Move,
    changed_job,
    cheapest,
    describe_savings,
    moves,
    moves_together,
    nearest_change,
    would_fit,
)
from plait.plan.explain.reasons import check_constraints, closed_parts, format_constraints
from plait.plan.make import make_plan
from plait.plan.search.candidate import Answer, Candidate
from plait.plan.search.choices import factors
from plait.plan.search.finalists import DOUBT, Finalists, shared_by_lists
from plait.plan.search.fits import MOST_LAYERS, check_size
from plait.plan.search.job_options import options_of, planned_only
from plait.plan.search.needs import Needs, band
from plait.plan.search.request import job_at, margin_of, point_of, ranks_of, search_request, timed_point
from plait.plan.search.search import LONGER, ROOMIEST, SURELY, first_of_family, safest, search
from plait.plan.search.simulate import simulate_plan
from plait.plan.search.space import SearchRequest, any_point

SIMULATED = 4
"""Number of strategies that are simulated in addition to those shown: they rank lower in closed
form, but may be faster when simulated."""
LIGHT, MANY, WIDE = 40, 20, 1.06
"""Light models. LIGHT: maximum number of layers. MANY: strategies simulated in addition to those
shown. WIDE: they are simulated while their closed-form seconds are at most this factor times the
best's. Their simulation is fast, and the closed form errs most where the host is late and products
are small."""
FEW = 4
"""Number of strategies to simulate if only the best one is needed, quickly."""
PROPOSED = 24
"""Maximum number of changed jobs whose memory is traced, to propose a change if a strategy does not
fit."""
WIDER = 5
"""Number of strategies to rank in closed form, as a multiple of those simulated: each simulation
corrects the closed form of similar strategies. Strategies that differ in tuning alone
(``search.FAMILY``) count once."""
MORE = 8
"""Number of strategies whose memory is traced if none of the first ones fits, as a multiple of the
first number."""
CROWDED = 0.5
"""Fraction of a device's memory: a strategy that fills less gets no advice on freeing memory."""


@dataclass(frozen=True)
class Planner:
    """Predicts strategies of one job on one cluster.

    vocab: of the job's tokenizer. slowed: factor by which ``cluster`` is slower than the actual
    device, to which MFU refers. configured_framework: the framework that is to run the job, with
    settings of its own configuration; None: the one of ``plan.framework``.
    """

    job: Job
    cluster: Cluster
    vocab: int
    slowed: float = 1.0
    configured_framework: Framework | None = None
    _seconds: dict[frozenset[tuple[str, int]], float] = field(
        default_factory=dict[frozenset[tuple[str, int]], float], init=False, compare=False
    )
    """Predicted seconds per step of strategies in this search, by their (column, value) pairs
    (``StrategyTable``)."""

    @cached_property
    def framework(self) -> Framework | None:
        """The framework that is to run the job; None for Plait's own runtime."""
        found, precision = self.configured_framework or framework_of(self.job.plan.framework), self.job.train.precision
        if found and found.name == "megatron" and precision in QUANTISED:
            rules = [*found.rules, *fp8_rules(self.model, self.job.data.sequence_length, precision)]
            return replace(found, rules=rules)
        return found

    @cached_property
    def model(self) -> ModelSpec:
        """The job's model. Raises JobError if it has more than ``MOST_LAYERS`` layers."""
        model = self.job.model_spec(self.vocab)
        if model.num_layers > MOST_LAYERS:
            problem = f"{model.num_layers:,} layers are more than {MOST_LAYERS:,}"
            raise JobError(problem, key="model.num_layers", fix=f"Use at most {MOST_LAYERS}")
        return model

    @cached_property
    def margin(self) -> Margin:
        """Memory that a plan must leave free on every device. Raises JobError if it leaves nothing
        for tensors."""
        return margin_of(self.job, self.cluster)

    @cached_property
    def request(self) -> SearchRequest:
        """The job's search space. If ``[cluster]`` is this machine and the job does not set the
        number of ranks: one rank for each core, or fewer if so many cannot share the batch. Raises
        JobError for settings that no search can respect."""
        asked, section = search_request(self.job, self.model, self.cluster), self.job.cluster
        if self.framework:
            if self.framework.name == "megatron" and self.job.train.precision in QUANTISED:
                check_widths(self.model, self.job.train.precision)
            asked = _part_of(asked, self.framework, self._options(self.job))
        said = section.ranks or section.file or section.preset != "here" or not self.job.leaves_ranks_open
        for ranks in range(asked.ranks, 0, -1) if not said else ():
            fewer = replace(asked, ranks=ranks, domain=min(ranks, asked.domain))
            if any_point(fewer):
                return fewer
        return asked

    @property
    def closed_form_only(self) -> bool:
        """True if the job is predicted by formulas alone and never simulated: instruction lists
        lack a part of it, or it runs in another framework."""
        return bool(self.model.experts or self.model.kv_lora_rank or self.job.planning_only or self.framework)

    @property
    def _light(self) -> bool:
        """True if the model has few enough layers (``LIGHT``) that simulating a strategy takes
        little time."""
        return self.model.num_layers <= LIGHT

    @uncollected()
    def answer(self) -> Answer:
        """Return the ``plan.top`` best strategies with their predictions: the fastest first, or the
        safest if the job asks for that. Raises JobError if the job cannot be searched,
        InfeasiblePlan if nothing fits."""
        shown = self.job.plan.top
        found, searched = self._finalists(shown, more=MANY if self._light else SIMULATED)
        first = first_of_family(
            StrategyTable.of([dict(one.point) for one in found])
        )  # what a person would call different
        found = [found[int(at)] for at in first]
        found = self._safest_first(found) if self.margin.safest else found
        answer, most = self.make_answer(found[:shown], searched=searched), self.job.plan.points
        coarsest = f"plan.points = {most:,}: the coarsest space has more, and {searched:,} strategies were compared."
        return replace(answer, why=[*answer.why, coarsest]) if searched > 2 * most else answer

    @uncollected()
    def chosen(self) -> Candidate:
        """Return the best strategy with its prediction, from ``FEW`` simulations instead of those
        of ``answer``. Raises JobError if the job cannot be searched, InfeasiblePlan if nothing
        fits."""
        found, _ = self._finalists(FEW)
        return self._safest_first(found)[0] if self.margin.safest else found[0]

    def _safest_first(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the safest strategy, then the other ``candidates`` in their order, the fastest
        first. The safest is the most likely to fit into memory of those that take at most
        ``LONGER`` times the fastest's seconds."""
        fastest = candidates[0]
        limit = LONGER * (fastest.closed_form or fastest.seconds)
        points = safest(self.request, self.cluster, self.job.train.precision, seconds=limit, keep=ROOMIEST,
                          most=self.job.plan.points)  # fmt: skip
        tried = self._finalists_of([points.row(at) for at in range(len(points))])
        near = [one for one in (*candidates, *tried) if one and one.seconds <= LONGER * fastest.seconds]
        first = min(near, key=lambda one: (-min(SURELY, one.memory.likely), one.seconds))
        return [first, *(one for one in candidates if one.point != first.point)]

    @uncollected()
    def evaluate(self, plan: Plan | None = None) -> Answer:
        """Return the prediction of the job's own strategy, even if it violates
        ``plan.constraints``, which the answer says.

        plan: the job's plan, if there is one, with slices and costs from timed steps. Raises
        JobError if the job leaves something open. Raises InfeasiblePlan if the strategy does not
        fit: what is too large, by how much, and the nearest change that helps.
        """
        if self.job.open:
            first, *others = self.job.open
            more = f", and so are {', '.join(one.removeprefix('strategy.') for one in others)}" if others else ""
            fix = "Set it, or search: leave out --evaluate. A [strategy] in the job has defaults for what it leaves out"
            raise JobError(f"is left to the planner{more}", key=first, fix=fix)
        check_size(self.job, self.vocab, None)
        world, ranks = self.job.world_size, ranks_of(self.job, self.cluster)
        if ranks != world:
            raise JobError(f"{ranks:,} are not the {world:,} ranks of the strategy", key="cluster.ranks",
                           fix=f"Use {world:,}, or leave it out")  # fmt: skip
        own = self.predict(self.job, plan)
        if not own.memory.fits:
            raise self._too_large(own)
        answer, asked = self.make_answer([own], searched=1), check_constraints(self.job, own.point, own.most_memory)
        instead = self.framework.replacements(point_of(self.job)) if self.framework else []
        return replace(answer, why=[*format_constraints(asked), *instead, *answer.why], constraints=asked)

    def _finalists(self, sure: int, more: int = 0) -> tuple[list[Candidate], int]:
        """Return (candidates, fastest first; number of strategies in the searched space).

        Predicted in full are the ``sure`` best in closed form, those of ``more`` others that may be
        faster, and strategies that differ from the best in one choice. If all of these need too
        much memory, many more are tried. Raises InfeasiblePlan if none can be planned."""
        count, light = sure + more, bool(more) and self._light
        for keep in (2 * count if light else WIDER * count, MORE * count):
            ranked = search(self.request, self.cluster, self.job.train.precision, keep=keep, most=self.job.plan.points)
            doubt = WIDE if light else DOUBT
            tried = Finalists(ranked, self._finalists_of, lambda points: self.fit(points, self.job), doubt, not light)
            tried.first(sure, count)
            if tried.predicted and not self.closed_form_only:
                tried.other_schedules()
                tried.climb()
                tried.around_equals()
            if tried.predicted and "strategy.overlap" in self.job.open:
                tried.improve_best(lambda point: [*reasons.without_overlaps(point).values(), *self._less_hidden(point)])
                tried.predict_near_best(self._less_hidden)
            if tried.predicted:
                self._seconds.update({frozenset(point.items()): one.seconds for point, one in tried.predicted})
                return sorted((one for _, one in tried.predicted), key=lambda one: one.seconds), len(ranked.space)
        why = self._refusal(tried.refused[0]) if tried.refused else ""
        raise InfeasiblePlan(f"None of the {len(ranked.points)} best strategies can be planned. The fastest: {why}")

    def _less_hidden(self, point: Mapping[str, int]) -> list[dict[str, int]]:
        """Return variants of a strategy, as columns of ``StrategyTable``, that are faster in closed
        form: with one overlap less, or with sharding that hides less. Overlap slows down the
        computation that hides it; the search space has only the variant that hides most."""
        kinds = range(len(SHARD_OVERLAPS)) if point["dp"] * point["cp"] > 1 and not self.framework else ()
        rows = [dict(point) | {"shard_overlap": kind} for kind in kinds if self.request.allows("shard_overlap", kind)]
        rows += reasons.without_overlaps(point).values()
        if not rows:
            return []
        told = self.closed_seconds(self.job, StrategyTable.of([point, *rows])).total
        return [row for row, seconds in zip(rows, told[1:], strict=True) if seconds < (1 - reasons.ALIKE) * told[0]]

    def _finalists_of(self, points: Sequence[Mapping[str, int]]) -> list[Candidate | None]:
        return self._with_closed_form(shared_by_lists(self._finalist, points))

    def _with_closed_form(self, candidates: Sequence[Candidate | None]) -> list[Candidate | None]:
        """Return the candidates, with closed-form seconds for those that were only simulated; None
        stays None. One evaluation prices all, which takes as long as one strategy."""
        some = [one for one in candidates if one and not one.closed_form and len(set(one.job.degrees)) == 1]
        points = StrategyTable.of([dict(one.point) for one in some]) if some else None
        said: list[float] = self.closed_seconds(some[0].job, points).total.tolist() if points else []
        told = {id(one): replace(one, closed_form=seconds) for one, seconds in zip(some, said, strict=True)}
        return [told.get(id(one), one) for one in candidates]

    def _finalist(self, point: Mapping[str, int]) -> Candidate | None:
        """Return the prediction of a strategy, given as columns of ``StrategyTable``; None if it
        breaks a rule or needs too much memory (``_refusal`` gives the reason). Memory is checked
        first, since a simulation takes longer."""
        try:
            job = job_at(self.job, point)
            plan = None if self.closed_form_only else self.draft(job)
            memory = self.memory(job, plan)
            return self._predicted(job, plan, memory) if memory.safe and not self._broken(memory) else None
        except PlaitError:
            return None

    def _refusal(self, point: Mapping[str, int]) -> str:
        """Return a sentence on why ``_finalist`` gives None for a strategy: a rule that the search
        space does not check, or memory."""
        try:
            one = self.predict(job_at(self.job, point))
        except PlaitError as error:
            return str(error)
        return self._broken(one.memory) if one.memory.safe else str(self._too_large(one))

    def _broken(self, memory: MemoryReport) -> str:
        """Return a phrase on the memory constraint of ``plan.constraints`` that the fullest rank
        violates; empty if all are met."""
        most = memory.fullest.total
        broken = (one for one in self.request.constraints if one.quantity == "memory" and not one.holds(most))
        return next((f"a rank needs {in_bytes(most)}, against '{one.text}' in plan.constraints" for one in broken), "")

    def _too_large(self, candidate: Candidate) -> InfeasiblePlan:
        if candidate.memory.fits:
            return InfeasiblePlan(candidate.memory.describe_crowded)
        here = OTHER_CLUSTER if self.cluster.name == "here" else ""
        advice = [here, describe_savings(self.memory_savings(candidate)), would_fit(self._nearest_change(candidate))]
        return InfeasiblePlan(
            " ".join([candidate.memory.describe_too_large(self.cluster.device.name), *filter(None, advice)])
        )

    def _nearest_change(self, candidate: Candidate) -> dict[str, Any] | None:
        """Return the change of the job's keys nearest to the candidate with which its job fits, by
        key; None if no usual change helps. Changes that fit in closed form are checked by traced
        memory, at most ``PROPOSED``."""
        walked = count()

        def fits(job: Job) -> bool:
            ranks_of(job, self.cluster)
            if not self.fit(StrategyTable.of([point_of(job)]), job)[0] or next(walked) >= PROPOSED:
                return False
            return (self.predict(job).memory if self.closed_form_only else self.memory(job, self.draft(job))).safe

        return nearest_change(candidate.job, moves_together(candidate.job, more=True), fits)

    def _options(self, job: Job) -> MemoryOptions:
        return options_of(job, self.cluster.device, self.framework)

    def closed_seconds(self, job: Job, points: StrategyTable) -> Seconds:
        """Return the seconds of a step by part, in closed form: arrays with an element for each
        strategy in ``points``."""
        return step_seconds(
            self.model, points, self.cluster, sequence=job.data.sequence_length, precision=job.train.precision,
            options=self._options(job),
        )  # fmt: skip

    def closed_memory(self, job: Job, points: StrategyTable) -> MemoryColumns:
        """Return the bytes on the fullest device by kind, in closed form: arrays with an element
        for each strategy in ``points``."""
        return step_memory(
            self.model, points, sequence=job.data.sequence_length, precision=job.train.precision,
            options=self._options(job), overhead=self.cluster.overhead,
        )  # fmt: skip

    def fit(self, points: StrategyTable, job: Job) -> NDArray[np.bool_]:
        """Return True for each strategy in ``points`` that fits into memory with its margin, in
        closed form."""
        return Needs.of(self.closed_memory(job, points), self.margin, self.cluster).fits()

    def memory(self, job: Job, plan: Plan | None) -> MemoryReport:
        """Return the bytes on the devices of every pp rank under a job's plan: traced from
        instruction lists, or in closed form if there are none or ``plan`` is None."""
        if self.closed_form_only or not plan:
            return self._closed_memory(job, point_of(job))
        return memory_report(plan, self.cluster, self.margin)

    def _closed_memory(self, job: Job, point: Mapping[str, int]) -> MemoryReport:
        return closed_report(self.model, point, self.cluster, job, self._options(job))

    def make_answer(self, candidates: Sequence[Candidate], *, searched: int) -> Answer:
        """Return an answer with these candidates in this order. searched: number of strategies in
        the space."""
        return Answer(
            model=self.model,
            cluster=self.cluster,
            ranks=candidates[0].job.world_size,
            candidates=candidates,
            why=[
                *planned_only(self.job, self.model, self.cluster.device, self._trained(candidates[0])),
                *self.why(candidates),
            ],
            searched=searched,
            framework=self.framework.version if self.framework else "",
            frees=self.memory_savings(candidates[0]),
        )

    def _trained(self, candidate: Candidate) -> float | None:
        """Return the seconds of a step of the job without what Plait cannot train, in closed form;
        None if Plait can train all of it, or if the rest has no prediction."""
        if not self.job.planning_only:
            return None
        try:
            return float(
                self.closed_seconds(
                    candidate.job.without_planning_only, StrategyTable.of([dict(candidate.point)])
                ).total[0]
            )
        except JobError:
            return None

    def memory_savings(self, candidate: Candidate) -> list[MemorySaving]:
        """Return priced changes that free memory, for a strategy with equal pp ranks that fills
        more than ``CROWDED`` of a device; empty for other strategies."""
        if candidate.most_memory < CROWDED * candidate.memory.usable or len(set(candidate.job.degrees)) > 1:
            return []
        point, own, tried, rows = candidate.point, point_of(candidate.job), list[Move](), [dict(candidate.point)]
        layers = -(-self.model.num_layers // (point["pp"] * point["virtual"]))
        local = max(1, self.cluster.ranks_per_node // point["tp"])
        for move in moves(candidate.job, layers, factors(point["dp"] * point["cp"], local)):
            with suppress(PlaitError):  # a change that rules forbid has neither a memory nor a time
                other = point_of(changed_job(candidate.job, move.change)).items()
                row = dict(point) | {name: value for name, value in other if value != own[name]}
                if not self.framework or self.framework.feasible(StrategyTable.of([row]))[0]:
                    tried, rows = [*tried, move], [*rows, row]
        points, kinds = StrategyTable.of(rows), asdict(candidate.memory.fullest.estimate.memory)
        held, seconds = (
            self.closed_memory(candidate.job, points).total,
            self.closed_seconds(candidate.job, points).total,
        )
        return cheapest(tried, kinds, held, seconds, candidate.memory.usable)

    def predict(self, job: Job, plan: Plan | None = None) -> Candidate:
        """Return the prediction of a job that leaves nothing open. plan: the job's plan, if there
        is one already; else a draft is made."""
        one = self._predicted(job, plan)
        return self._with_closed_form([one])[0] or one

    def _predicted(self, job: Job, plan: Plan | None = None, memory: MemoryReport | None = None) -> Candidate:
        """Return the prediction like ``predict``; a simulated candidate lacks ``closed_form``.
        memory: the memory report, if known."""
        if self.framework:
            point = self.framework.adapt(point_of(job), job.train.global_batch_size)
            job = job_at(job, point)
        else:
            plan = plan or self.draft(job)
            point = point_of(job) | timed_point(plan)
        points, sequence = StrategyTable.of([point]), job.data.sequence_length
        if self.closed_form_only:
            if len(set(job.degrees)) > 1:
                others = [self.framework.version] if self.framework else [key for key, _ in self.job.planning_only]
                why = "experts need" if self.model.experts else f"{others[0]} needs"
                raise JobError(
                    f"differs between pp ranks; {why} the same on all", key="strategy.dp", fix="Give one number"
                )
            closed = self.closed_seconds(job, points)
            seconds, parts = float(closed.total[0]), closed_parts(closed)
        else:
            assert plan
            simulated = simulate_plan(plan, self.cluster)
            seconds, parts = simulated.seconds, simulated.exposed
        if not memory:
            memory = self.memory(job, plan) if plan and not self.closed_form_only else self._closed_memory(job, point)
        low, high = band(np.array([seconds]), points, self.cluster)
        batch, used = job.train.global_batch_size, self._mfu(job, seconds)
        return Candidate(
            job=job,
            point=point,
            seconds=seconds,
            low=float(low[0]),
            high=float(high[0]),
            closed_form=seconds if self.closed_form_only else None,
            parts=parts,
            memory=memory,
            tokens_per_second=batch * sequence / seconds,
            mfu=used and used[0],
            mfu_full=used and used[1],
        )

    def _mfu(self, job: Job, seconds: float) -> tuple[float, float] | None:
        """Return (MFU of a step of ``seconds``, MFU that counts all attention scores, causal or
        not); None if the device's peak is unknown."""
        peak = job.run.peak_flops or self.slowed * (dense_peak(self.cluster.device, job.train.precision) or 0.0)
        sequence, batch = job.data.sequence_length, job.train.global_batch_size
        found = mfu(self.model, sequence=sequence, batch=batch, seconds=seconds, devices=job.world_size, peak=peak)
        full = self.model.step_flops(sequence, batch) / self.model.causal_step_flops(sequence, batch)
        return None if found is None else (found, found * full)

    def refuse_framework(self, doing: str) -> None:
        """Raise JobError if another framework is to run the job. doing: what was attempted, a
        participle for the message."""
        if self.framework:
            problem = f"a job for {self.framework.version} cannot be {doing}: Plait does not run its steps"
            raise JobError(problem, key="plan.framework", fix="Leave it out")

    def plan(self, job: Job) -> Plan:
        """Return the plan that ranks follow. Raises JobError if another framework is to run the
        job."""
        self.refuse_framework("made a plan that ranks obey")
        return make_plan(job, self.cluster.hosts, vocab=self.vocab)

    def draft(self, job: Job) -> Plan:
        """Return a plan that only serves predictions: ``make_plan`` with ``draft``. Raises as
        ``make_plan``."""
        return make_plan(job, self.cluster.hosts, vocab=self.vocab, draft=True)

    def simulated(self, job: Job, plan: Plan | None = None) -> Simulated:
        """Return the simulated step of a job that leaves nothing open. plan: as in ``predict``."""
        return simulate_plan(plan or self.draft(job), self.cluster)

    def seconds(self, job: Job) -> float:
        """Return the predicted seconds of a step: simulated, or in closed form if the job has no
        simulation."""
        return (self.predict(job) if self.closed_form_only else self.simulated(job)).seconds

    def why(self, candidates: Sequence[Candidate]) -> list[str]:
        """Return sentences about the first candidate: the fastest, or the safest if the job wants
        the safest."""
        best = candidates[0]
        ahead = reasons.describe_safety_cost(candidates) if self.margin.safest else reasons.runner_up(candidates)
        gains = [
            reasons.describe_gain(name, slower, best.seconds)
            for name, off in reasons.without_overlaps(best.point).items()
            if (slower := self._without(best, off))
        ]
        return [
            reasons.describe_parts(best.parts, best.seconds, best.point["pp"]),
            *ahead,
            *gains,
            *reasons.fixed_order(best.point),
        ]

    def _without(self, best: Candidate, off: Mapping[str, int]) -> float | None:
        """Return the predicted seconds of a step of the best strategy with settings ``off``
        (columns of ``StrategyTable``); None if a rule forbids them."""
        try:
            return self._seconds.get(frozenset(off.items())) or self.seconds(job_at(best.job, off))
        except PlaitError:
            return None


def _part_of(request: SearchRequest, framework: Framework, options: MemoryOptions) -> SearchRequest:
    """Return the part of a search space that a framework supports. options: of the job on its
    device."""

    def can(points: StrategyTable) -> Mask:
        return framework.feasible(points, request.model) & (sequences(points) == request.global_batch)

    fixed, ends = framework.within(request.fixed), options.most_stages(0)
    return replace(request, fixed=fixed, has=framework.values, can=can, options=options, ends=ends)
