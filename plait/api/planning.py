"""Planning: from a job, or a plan, to the strategies that would run it fastest, and their plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.base.passed_over import PassedOver
from plait.core.base.text import Part, Shown

if TYPE_CHECKING:
    from plait.api.places.base import LaunchTarget
    from plait.api.plan_answer import ComparedPlans, KnownClusters, PlanAnswer, PredictedPlan
    from plait.core.job.plan import Plan
    from plait.core.job.spec import Job
    from plait.plan.answer import Planner
    from plait.plan.candidate import Answer, Candidate
    from plait.plan.emit import Emitted
    from plait.plan.own_strategy import OwnStrategy
    from plait.plan.told import Told


@dataclass(frozen=True, kw_only=True)
class Planning(Shown):
    """A job on a cluster, ready to be planned.

    written: the plan, if one was given in place of a job. alone: whether the job's own strategy alone is
    asked for. factors: changes of the cluster that are only
    tried; unchanged: the planner without them. warning: a sentence on a device that is not the cluster's.
    note: sentences on the vocabulary and on keys that nobody chose, or nothing. over: what readers passed
    over. told: what a configuration of another framework says, if one was given in place of a job; overrides:
    settings beside it.
    """

    planner: Planner
    written: Plan | None = None
    alone: bool = False
    factors: Mapping[str, float] = field(default_factory=dict[str, float])
    unchanged: Planner | None = None
    warning: str = ""
    note: str = ""
    over: PassedOver = field(default_factory=PassedOver)
    told: Told | None = None
    overrides: Sequence[str] = ()

    def answer(self, *, evaluate: bool = False, explain: bool = False) -> PlanAnswer:
        """The best strategies; of a plan, and with evaluate, here or before, its own strategy alone.
        explain: whether the answer shows all of its columns. Raises InfeasiblePlan and JobError, which say
        so where they come of a change that is only tried."""
        from plait.api.plan_answer import Hypothesis, PlanAnswer
        from plait.core.base.errors import InfeasiblePlan, JobError
        from plait.plan.capturing import captured_hints
        from plait.plan.divisors import divisor_hints
        from plait.plan.own_strategy import HOW
        from plait.plan.sensitivity import sensitivity
        from plait.plan.what_if import supposed

        own = evaluate or self.alone or self.written or (self.told and not self.planner.job.open)

        def found(planner: Planner) -> Answer:
            return planner.checked(self.written) if own else planner.answer()

        before = refused = None
        if self.unchanged:
            try:
                before = found(self.unchanged).best
            except (InfeasiblePlan, JobError) as error:
                refused = error
        with supposed(self.factors, refused):
            answer = found(self.planner)
        fastest = min(answer.candidates, key=lambda one: one.seconds)
        hints = [] if own else [*divisor_hints(self.planner, fastest), *captured_hints(self.planner, answer.best)]
        turned = None
        if explain and len(answer.candidates) > 1 and fastest is answer.best:
            turned = sensitivity(self.planner, *answer.candidates[:2])
        change = Hypothesis(self.factors, before) if self.unchanged else None
        written = None if own else self._own_strategy(answer.best)
        closing = written.told(answer.best) if written else HOW if own and self._searchable else ""
        return PlanAnswer(answer=answer, explain=explain, change=change, hints=hints, turned=turned, written=written,
                          closing=closing)  # fmt: skip

    @property
    def _searchable(self) -> bool:
        """Whether a file of another framework has a strategy besides which there are others."""
        return self.told is not None and self.told.runs is not None and not self.alone

    def _own_strategy(self, best: Candidate) -> OwnStrategy | None:
        """The strategy of another framework's file beside the best that was found."""
        from plait.core.base.errors import PlaitError
        from plait.plan.own_strategy import own_strategy

        if not self._searchable or not self.told:
            return None
        try:
            own = self.told.own_job(self.overrides)
        except PlaitError as error:
            own = error
        return own_strategy(self.planner, self.told, own, best)

    def to_dict(self) -> dict[str, Any]:
        """The job, its cluster's name, and changes of the cluster."""
        planner = self.planner
        found = {"job": planner.job.to_dict(), "cluster": planner.cluster.name, "what_if": dict(self.factors)}
        return found | ({"read": self.told.to_dict()} if self.told else {})

    def parts(self) -> Iterator[Part]:
        """The job and its cluster in a sentence, and remarks."""
        planner = self.planner
        yield f"{planner.job.run.name}: {planner.model.num_parameters:,} parameters, for {planner.cluster.name}"
        read = self.told.lines() if self.told else []
        yield from (f"note: {one}" for one in (self.warning, self.note, *self.over.lines(), *read) if one)

    def plan(self, candidate: Candidate) -> Plan:
        """The plan of a candidate; the plan that was given, if one was."""
        from plait.core.job.plan import chosen_by

        return self.written or replace(self.planner.plan(candidate.job), chosen=chosen_by(self.planner.job))


def plan_job(
    file: Path | str, overrides: Sequence[str] = (), place: LaunchTarget | None = None, changes: Sequence[str] = (),
    *, evaluate: bool = False,
) -> Planning:  # fmt: skip
    """Read a job file (TOML), a plan (``JOB.plan.json``) or a configuration of another framework
    (``plait.plan.read_config``), and find its cluster.

    place: an emulated cluster, which stands for this machine. changes: what-if texts such as ``nic=2x``.
    evaluate: for the job's own strategy alone; keys that neither the job nor ``overrides`` say are not left
    open by a job without [strategy], if ``overrides`` say any.
    Raises JobError and DataError; also for files that the job names and that no prediction would read, since
    it says of no topology where its ranks lie.
    """
    from plait.api.choose import model_notes, precision_note, the_cluster, unplaced_note, vocabulary_note
    from plait.core.base.errors import JobError
    from plait.core.job.plan import Plan, told_left_out
    from plait.core.job.spec import Job
    from plait.plan.answer import Planner
    from plait.plan.read_config import read_configuration
    from plait.plan.what_if import changed_cluster, changed_ranks, parse_changes
    from plait.plan.where import other_device, stated_peak, stood_for, unusual_values
    from plait.train.checkpoint.initial import check_initial
    from plait.train.data.tokenizer import load_tokenizer

    file = Path(file)
    factors, over, note = parse_changes(changes), PassedOver(), ""
    written, told = None, read_configuration(file, overrides)
    if file.suffix == ".json" and told is None:
        written = Plan.read(file)
        if other := [one for one in overrides if not one.startswith("place.")]:
            problem = f"'{other[0]}' would change the plan"
            raise JobError(problem, file=str(file), fix="Change the job file and plan again")
        job, vocab = job_of(written, file), written.model.vocab
    else:
        job = (told.job(overrides) if told else Job.read(file, overrides, searched=not evaluate)).named(
            file.stem.partition(".")[0]
        )
        over, vocab, weights = model_notes(job), load_tokenizer(job.data.tokenizer).vocab, job.train.init_from
        if weights and Path(weights).exists():  # a plan may be for another machine
            over.add(check_initial(Path(weights), job.model_spec(vocab)))
        left_out = "" if told or evaluate else told_left_out(job)
        some = vocabulary_note(job, vocab), precision_note(job), left_out
        note = "" if told else ". ".join(filter(None, some))
    where = job.place.changed(overrides)
    job.check_predicted(where)
    there = the_cluster(job, place.lab if place else None)
    remarks = (note, unplaced_note(where), stood_for(job, there), stated_peak(job, there), *unusual_values(job, there))
    note = ". ".join(filter(None, remarks))
    warning = other_device(job, there) or ""
    slowed = factors.get("straggler", 1.0)
    runs = told.runs if told else None
    planner = Planner(changed_ranks(job, there, factors), changed_cluster(there, factors), vocab, slowed, runs)
    unchanged = Planner(job, there, vocab, told_framework=runs) if factors else None
    if told:
        over.add(told.over())
    return Planning(
        planner=planner, written=written, alone=evaluate, factors=factors, unchanged=unchanged, warning=warning,
        note=note, over=over, told=told, overrides=overrides,
    )  # fmt: skip


def compare_plans(first: Path | str, second: Path | str) -> ComparedPlans:
    """Two plans (``JOB.plan.json``), each predicted on its cluster, side by side. Raises JobError."""
    from plait.api.plan_answer import ComparedPlans
    from plait.plan.sensitivity import sensitivity

    found = ComparedPlans(predict_plan(Path(first)), predict_plan(Path(second)))
    if found.same_work:
        faster, slower = sorted((found.first, found.second), key=lambda one: one.candidate.seconds)
        turned = sensitivity(faster.planner, faster.candidate, slower.candidate)
        return replace(found, turned=turned)
    return found


def predict_plan(file: Path) -> PredictedPlan:
    """The prediction of a plan (``JOB.plan.json``) on its cluster. Raises JobError."""
    from plait.api.choose import the_cluster
    from plait.api.plan_answer import PredictedPlan
    from plait.core.job.plan import Plan
    from plait.plan.answer import Planner

    plan = Plan.read(file)
    job = job_of(plan, file)
    planner = Planner(job, the_cluster(job, None), plan.model.vocab)
    return PredictedPlan(str(file), planner, planner.predict(job, plan))


def known_clusters() -> KnownClusters:
    """The clusters that ship with Plait."""
    from plait.api.plan_answer import KnownClusters
    from plait.core.base.env import specs_folder
    from plait.core.cluster.hardware import Cluster

    names = sorted(file.stem for file in (specs_folder() / "clusters").glob("*.toml"))
    return KnownClusters({name: Cluster.preset(name) for name in names})


def emit_settings(asked: Planning, best: Candidate, framework: str) -> tuple[Emitted, str]:
    """A candidate's strategy as settings of another framework (torchtitan, megatron), and a sentence on what
    they take as planned and as that framework would run them. Raises JobError."""
    from plait.plan.as_emitted import told_both
    from plait.plan.emit import emit

    emitted = emit(best.job, framework, asked.planner.cluster.ranks_per_node)
    return emitted, told_both(asked.planner, best, emitted, framework)


def check_emits(asked: Planning, framework: str) -> None:
    """Raise JobError for a job of which a framework's settings are not known."""
    from plait.plan import emit

    emit.check_emits(asked.planner.job, framework)


def check_framework(framework: str, others: Sequence[str] = ()) -> None:
    """Raise JobError for a framework that ``emit_settings`` does not know. others: what --show takes, too."""
    from plait.plan import emit

    emit.check_framework(framework, others)


def job_of(plan: Plan, file: Path) -> Job:
    """The job of a plan. Raises JobError where there is none."""
    from plait.core.base.errors import JobError

    if plan.job is None:
        problem = "was made without a job file and says nothing of a cluster"
        raise JobError(problem, file=str(file), key="job", fix="Name a plan that plait plan or plait train wrote")
    return plan.job


def draw_step(asked: Planning, best: Candidate, file: Path) -> None:
    """Draw the predicted step of a candidate, and its memory over time, into a picture or a page."""
    from plait.api import pictures
    from plait.core.base.text import in_seconds
    from plait.plan.over_time import memory_curves, step_bars

    planner = asked.planner
    simulated = planner.simulated(best.job, asked.written)
    curves = memory_curves(simulated, simulated.simulation.step, best.memory, gpu=planner.cluster.device.kind == "cuda")
    title = f"{best.job.run.name}: a predicted step of {in_seconds(best.seconds)} on {planner.cluster.name}"
    pictures.draw_step(step_bars(simulated), curves, file, title=title, limit=best.memory.usable)
