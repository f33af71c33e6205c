"""Planning: from a job, or a plan, to the strategies that would run it fastest, and their plans."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from plait.core.base.ignored_input import IgnoredInput
from plait.core.base.text import Part, Shown

if TYPE_CHECKING:
    from plait.api.places.base import LaunchTarget
    from plait.api.plan_answer import ComparedPlans, KnownClusters, PlanAnswer, PredictedPlan
    from plait.core.job.plan import Plan
    from plait.core.job.spec import Job
    from plait.formats.base.parsed_config import ParsedConfig
    from plait.plan.answer import Planner
    from plait.plan.emit import Emitted, OwnStrategy
    from plait.plan.search.candidate import Answer, Candidate


@dataclass(frozen=True, kw_only=True)
class Planning(Shown):
    """A job on a cluster, ready to be planned.

    input_plan: the plan, if one was given in place of a job. evaluate_only: True to predict only
    the job's own strategy. factors: what-if changes of the cluster; planner_unchanged: the planner
    without them. warning: a sentence on a device that is not the cluster's. note: remarks on the
    job and its cluster; may be empty. ignored: input that readers ignored. config: the
    configuration of another framework, if one was given in place of a job; overrides: settings that
    override it.
    """

    planner: Planner
    input_plan: Plan | None = None
    evaluate_only: bool = False
    factors: Mapping[str, float] = field(default_factory=dict[str, float])
    planner_unchanged: Planner | None = None
    warning: str = ""
    note: str = ""
    ignored: IgnoredInput = field(default_factory=IgnoredInput)
    config: ParsedConfig | None = None
    overrides: Sequence[str] = ()

    def answer(self, *, evaluate: bool = False, explain: bool = False) -> PlanAnswer:
        """Return the best strategies; for a plan, or if ``evaluate`` is set here or in
        ``plan_job``, only its own strategy. explain: True to show all columns. Raises
        InfeasiblePlan and JobError, whose messages name a what-if change that causes them."""
        from plait.api.plan_answer import ClusterChange, PlanAnswer
        from plait.core.base.errors import InfeasiblePlan, JobError
        from plait.plan.explain.hints import cuda_graphs_hints, divisor_hints
        from plait.plan.explain.what_if import under_changes

        own = evaluate or self.evaluate_only or self.input_plan or (self.config and not self.planner.job.open)

        def answer_of(planner: Planner) -> Answer:
            return planner.evaluate(self.input_plan) if own else planner.answer()

        before = refused = None
        if self.planner_unchanged:
            try:
                before = answer_of(self.planner_unchanged).best
            except (InfeasiblePlan, JobError) as error:
                refused = error
        with under_changes(self.factors, refused):
            answer = answer_of(self.planner)
        fastest = min(answer.candidates, key=lambda one: one.seconds)
        hints = [] if own else [*divisor_hints(self.planner, fastest), *cuda_graphs_hints(self.planner, answer.best)]
        change = ClusterChange(self.factors, before) if self.planner_unchanged else None
        written = None if own else self._own_strategy(answer.best)
        closing = self._how_to_search(answer) if own and self.config and self._searchable else ""
        return PlanAnswer(answer=answer, explain=explain, what_if=change, hints=hints, file_strategy=written,
                          closing_note=closing)  # fmt: skip

    def _how_to_search(self, answer: Answer) -> str:
        """Return a sentence on the settings with which another framework's file is searched; those
        for degrees alone only if the file can be read with them."""
        from plait.core.base.errors import PlaitError
        from plait.plan.emit import DEGREES, HOW

        assert self.config
        given = " ".join(one for one in self.overrides if one.startswith(("strategy.", "train.")))
        file = f"{Path(self.config.file).name} {f'with {given}' if given else 'as it is'}"
        how = HOW.format(file=file, framework=answer.framework)
        batch = f" train.global_batch_size={answer.best.job.train.global_batch_size}" * bool(self.config.local_batch)
        try:
            self.config.job([*self.overrides, *f"{DEGREES}{batch}".split()])
        except PlaitError:
            return f"{how}."
        return f"{how}; with {DEGREES}{batch}, only for other parallel degrees."

    @property
    def _searchable(self) -> bool:
        """True for another framework's file whose strategy has alternatives to search."""
        return self.config is not None and self.config.runs is not None and not self.evaluate_only

    def _own_strategy(self, best: Candidate) -> OwnStrategy | None:
        """Return the strategy of another framework's file, compared with the best strategy."""
        from plait.core.base.errors import PlaitError
        from plait.plan.emit import own_strategy

        if not self._searchable or not self.config:
            return None
        try:
            own = self.config.file_job(self.overrides)
        except PlaitError as error:
            own = error
        return own_strategy(self.planner, self.config, own, best)

    def to_dict(self) -> dict[str, Any]:
        """Return the job, its cluster's name, and what-if changes."""
        planner = self.planner
        found = {"job": planner.job.to_dict(), "cluster": planner.cluster.name, "what_if": dict(self.factors)}
        return found | ({"read": self.config.to_dict()} if self.config else {})

    def parts(self) -> Iterator[Part]:
        """Yield a sentence on the job and its cluster, and remarks."""
        planner = self.planner
        yield f"{planner.job.run.name}: {planner.model.num_parameters:,} parameters, for {planner.cluster.name}"
        read = self.config.lines() if self.config else []
        yield from (f"note: {one}" for one in (self.warning, self.note, *self.ignored.lines(), *read) if one)

    def plan(self, candidate: Candidate) -> Plan:
        """Return the plan of a candidate; the given plan, if there is one."""
        from plait.core.job.plan import setting_origins

        return self.input_plan or replace(self.planner.plan(candidate.job), chosen=setting_origins(self.planner.job))


def plan_job(
    file: Path | str, overrides: Sequence[str] = (), place: LaunchTarget | None = None, changes: Sequence[str] = (),
    *, evaluate: bool = False,
) -> Planning:  # fmt: skip
    """Read a job file (TOML), a plan (``JOB.plan.json``) or a configuration of another framework
    (``plait.plan.read_config``), and find its cluster.

    place: an emulated cluster that stands for this machine. changes: what-if changes such as
    ``nic=2x``. evaluate: True to predict only the job's own strategy; if ``overrides`` set keys of
    a job without [strategy], the strategy's other keys have their defaults instead of being
    searched. Raises JobError and DataError; also for missing files that the job names but the
    prediction ignores, because no topology locates its ranks.
    """
    from plait.api.choices import cluster_of, model_notes, precision_note, unplaced_note, vocabulary_note
    from plait.core.base.errors import JobError
    from plait.core.job.plan import Plan, format_defaults
    from plait.core.job.spec import Job
    from plait.plan.answer import Planner
    from plait.plan.explain.job_cluster import (
        describe_device_mismatch,
        describe_stated_peak,
        describe_substitute,
        unusual_values,
    )
    from plait.plan.explain.what_if import changed_cluster, changed_ranks, parse_changes
    from plait.plan.read_config import read_configuration
    from plait.train.checkpoint.initial import check_initial
    from plait.train.data.tokenizer import load_tokenizer

    file = Path(file)
    factors, over, note = parse_changes(changes), IgnoredInput(), ""
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
        left_out = "" if told or evaluate else format_defaults(job)
        some = vocabulary_note(job, vocab), precision_note(job), left_out
        note = "" if told else ". ".join(filter(None, some))
    where = job.place.changed(overrides)
    job.check_predicted(where)
    there = cluster_of(job, place.lab if place else None)
    remarks = (
        note,
        unplaced_note(where),
        describe_substitute(job, there),
        describe_stated_peak(job, there),
        *unusual_values(job, there),
    )
    note = ". ".join(filter(None, remarks))
    warning = describe_device_mismatch(job, there) or ""
    slowed = factors.get("straggler", 1.0)
    runs = told.runs if told else None
    planner = Planner(changed_ranks(job, there, factors), changed_cluster(there, factors), vocab, slowed, runs)
    unchanged = Planner(job, there, vocab, configured_framework=runs) if factors else None
    if told:
        over.add(told.ignored())
    return Planning(
        planner=planner, input_plan=written, evaluate_only=evaluate, factors=factors, planner_unchanged=unchanged,
        warning=warning, note=note, ignored=over, config=told, overrides=overrides,
    )  # fmt: skip


def compare_plans(first: Path | str, second: Path | str) -> ComparedPlans:
    """Return two plans (``JOB.plan.json``) side by side, each predicted on its cluster. Raises
    JobError."""
    from plait.api.plan_answer import ComparedPlans

    return ComparedPlans(predict_plan(Path(first)), predict_plan(Path(second)))


def predict_plan(file: Path) -> PredictedPlan:
    """Return the prediction of a plan (``JOB.plan.json``) on its cluster. Raises JobError."""
    from plait.api.choices import cluster_of
    from plait.api.plan_answer import PredictedPlan
    from plait.core.job.plan import Plan
    from plait.plan.answer import Planner

    plan = Plan.read(file)
    job = job_of(plan, file)
    planner = Planner(job, cluster_of(job, None), plan.model.vocab)
    return PredictedPlan(str(file), planner, planner.predict(job, plan))


def known_clusters() -> KnownClusters:
    """Return the clusters that ship with Plait."""
    from plait.api.plan_answer import KnownClusters
    from plait.core.base.env import specs_folder
    from plait.core.cluster.hardware import Cluster

    names = sorted(file.stem for file in (specs_folder() / "clusters").glob("*.toml"))
    return KnownClusters({name: Cluster.preset(name) for name in names})


def emit_settings(planning: Planning, best: Candidate, framework: str) -> tuple[Emitted, str]:
    """Return a candidate's strategy as settings of another framework (torchtitan, megatron,
    deepspeed), and a sentence. It compares the predicted seconds as planned and as that framework
    would run the settings. Raises JobError."""
    from plait.plan.emit import compare_predictions, emit

    emitted = emit(best.job, framework, planning.planner.cluster.ranks_per_node)
    return emitted, compare_predictions(planning.planner, best, emitted, framework)


def check_emits(planning: Planning, framework: str) -> None:
    """Raise JobError for a job that has no known settings in a framework."""
    from plait.plan import emit

    emit.check_emits(planning.planner.job, framework)


def check_framework(framework: str, other_values: Sequence[str] = ()) -> None:
    """Raise JobError for a framework that ``emit_settings`` does not know. other_values: further
    values that
    --show takes."""
    from plait.plan import emit

    emit.check_framework(framework, other_values)


def job_of(plan: Plan, file: Path) -> Job:
    """Return the job of a plan. Raises JobError if the plan has none."""
    from plait.core.base.errors import JobError

    if plan.job is None:
        problem = "was made without a job file, so its cluster is unknown"
        raise JobError(problem, file=str(file), key="job", fix="Name a plan that plait plan or plait train wrote")
    return plan.job


def draw_step(planning: Planning, best: Candidate, file: Path) -> None:
    """Draw the predicted step of a candidate, and its memory over time, into a picture or an HTML
    page."""
    from plait.api import pictures
    from plait.core.base.text import in_seconds
    from plait.plan.search.simulate import memory_curves, step_bars

    planner = planning.planner
    simulated = planner.simulated(best.job, planning.input_plan)
    curves = memory_curves(simulated, simulated.simulation.step, best.memory, gpu=planner.cluster.device.kind == "cuda")
    title = f"{best.job.run.name}: a predicted step of {in_seconds(best.seconds)} on {planner.cluster.name}"
    pictures.draw_step(step_bars(simulated), curves, file, title=title, limit=best.memory.usable)


STEPS, SKIPPED = 10, 4
"""The number of steps of a measured run, and of its first steps that do not count."""


def measure_plans(plans: Sequence[Plan], place: LaunchTarget) -> Iterator[float]:
    """Yield the median seconds per step of each plan. Raises JobError if its ranks do not exist
    here, and the errors of a run."""
    for plan in plans:
        _check_ranks(plan, place)
    with TemporaryDirectory(prefix="plait-measure-") as folder:
        for number, plan in enumerate(plans):
            yield _seconds(_short(plan, Path(folder), f"{number + 1}"), place)


def measure_best(
    planning: Planning, answer: PlanAnswer, place: LaunchTarget, count: int, report: Callable[[str], None] | None = None
) -> PlanAnswer:
    """Return the answer with measured seconds of its first ``count`` candidates. report: called
    with a line for each. Raises the errors of ``measure_plans``."""
    from plait.core.base.text import in_seconds

    plans, measured = [planning.plan(one) for one in answer.candidates[:count]], dict[int, float]()
    for at, seconds in enumerate(measure_plans(plans, place)):
        measured[at] = seconds
        if report:
            report(f"measured {at + 1} of {len(plans)}: {in_seconds(seconds)} a step")
    return replace(answer, measured=measured)


def _check_ranks(plan: Plan, place: LaunchTarget) -> None:
    """Raise JobError or InfeasiblePlan for a plan whose ranks do not exist or fit here."""
    from plait.api.job_check import check_start
    from plait.core.base.errors import JobError
    from plait.plan.explain.job_cluster import ranks_here

    assert plan.job
    world, lab = plan.layout.world_size, place.lab
    there = lab.world_size if lab else ranks_here(plan.job.run.device)
    enough = world == there if lab else world <= there
    if not enough:
        where = "the lab" if lab else "this machine"
        fix = "Change --on" if lab else "Plan for fewer with cluster.ranks, or emulate them: --on lab:HOSTSxRANKS@RATE"
        raise JobError(f"the plans have {world:,} ranks, and {where} has {there}", key="--measure", fix=fix)
    check_start(plan, place)


def _short(plan: Plan, folder: Path, name: str) -> Plan:
    """Return the plan for a few steps, without evaluations or checkpoints."""
    assert plan.job
    changes = {
        "train.tokens": 0, "train.steps": STEPS, "train.warmup_steps": 0, "train.lr_decay_steps": 0,
        "train.lr_wsd_decay_steps": 0, "train.eval_every": 0, "train.checkpoint_every": 0, "train.log_every": STEPS,
        "run.timeline_steps": 0,
        "run.restarts": 0,
    }  # fmt: skip
    names = [f"run.folder={json.dumps(str(folder))}", f"run.name={json.dumps(name)}"]
    job = plan.job.changed([*(f"{key}={value}" for key, value in changes.items()), *names])
    return without_batch_rampup(replace(plan, job=job))


def without_batch_rampup(plan: Plan) -> Plan:
    """Return the plan without a batch-size ramp: every step has the whole batch, as predicted."""
    assert plan.job
    train = plan.job.train.model_copy(update={"rampup_batch_size": None})
    return replace(plan, job=plan.job.model_copy(update={"train": train}))


def _seconds(plan: Plan, place: LaunchTarget) -> float:
    from plait.api.training import run_plan
    from plait.core.base.errors import LaunchError
    from plait.plan.calibrate.recorded import read_seconds

    assert plan.job
    folder = plan.job.run.path
    if run_plan(plan, folder, place, silent=True):
        raise LaunchError("a measured run was stopped; nothing is chosen")
    return statistics.median(read_seconds(folder)[SKIPPED:])
