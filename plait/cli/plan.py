"""``plait plan``: from a job to the strategies that would run it fastest, and a plan that ranks obey."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from plait.api.places.base import Place
    from plait.core.base.passed_over import PassedOver
    from plait.core.job.plan import Plan
    from plait.core.job.spec import Job
    from plait.plan.answer import Answer, Candidate, Planner

CHECK = "check"
"""In place of the job, before it: predict its own strategy."""


def plan(
    job: Annotated[
        Path | None, typer.Argument(help="The job file (TOML); check JOB.toml to predict its own strategy.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="SECTION.KEY=VALUE, in place of the file's: cluster.ranks=128.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the plan goes: plan.json beside the job if not given.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="As the word check before the job.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="More columns, where the step goes, what fills the memory.")
    ] = False,
    what_if: Annotated[
        list[str] | None, typer.Option(help="RATE=FACTORx, as in nic=2x, link=0.5, compute=2, memory=2; or gpus=4x.")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Two plans (plan.json), side by side.", metavar="A.json B.json")
    ] = None,
    emit: Annotated[
        str | None, typer.Option(help="Print the strategy as settings of torchtitan or megatron instead.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the predicted step and its memory: FILE.svg, .html, .png, .pdf.")
    ] = None,
    measure: Annotated[
        int, typer.Option(help="Run so many of the best for a few steps, and choose by their measured times.")
    ] = 0,
    on: Annotated[str, typer.Option(help="What this machine is to be: local, or lab:HOSTSxRANKS@RATE.")] = "local",
    clusters: Annotated[bool, typer.Option("--clusters", help="List the clusters that ship.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Choose how to run a job: parallel degrees, sharding, schedule, slices, recomputation.

    A job without [strategy] is searched whole. With one, keys that are auto are searched, and what it leaves
    out has its default (docs/job.md). [cluster] says for what, [plan] what to respect. plait train obeys the
    plan that is written. docs/plan.md has examples.

    Example: plait plan job.toml cluster.preset=h100 cluster.ranks=128
    """
    from plait.core.base.errors import JobError
    from plait.core.job.spec import naming
    from plait.core.model.experts import refuse_experts

    gc.set_threshold(1_000_000, 10, 10)  # schedules are millions of tuples without cycles: looking costs a third
    given = list(overrides or [])
    if clusters:
        from plait.cli.plan_tables import list_clusters

        list_clusters(as_json)
        return
    if compare:
        if job or emit or picture or measure or what_if or out:
            raise JobError("takes two plans and, of all options, --json", key="--compare", fix="Leave out the rest")
        _compare(compare, as_json)
        return
    if job and str(job) == CHECK and given and not job.is_file():
        check, job, given = True, Path(given[0]), given[1:]
    if job is None or (str(job) == CHECK and not job.is_file()):
        raise JobError("no job is given", fix="Write plait plan JOB.toml, plait plan check JOB.toml, or --clusters")
    if measure < 0:
        raise JobError(f"{measure} is not allowed", key="--measure", fix="Allowed: at least 1")
    if measure and what_if:
        raise JobError("what is not there cannot be measured", key="--what-if", fix="Leave out --measure")
    if emit:
        from plait.plan.emit import check_framework

        check_framework(emit)
        if as_json:
            raise JobError("prints settings, not JSON", key="--emit", fix="Leave out one of --emit and --json")
    target = _target(job, out, what_if=bool(what_if))
    if picture:
        from plait.core.base.files import check_target
        from plait.core.base.pictures import FORMATS, check_format

        check_format(picture, (*FORMATS, "html"))
        check_target(picture, fix="Choose another with --picture")
    with naming(job, given):
        line = _CommandLine(job, given, what_if or [], on)
        for wanted, doing in ((measure, "measured"), (picture, "drawn"), (emit, "emitted")):
            if wanted:
                refuse_experts(line.planner.model, doing)
        found = line.planner.checked(line.written) if check or line.written else line.planner.answer()
    plans = [line.written or line.planner.plan(one.job) for one in found.candidates[:measure]]
    measured = _measured(plans, line.place) if plans else {}
    at = min(measured, key=lambda number: measured[number]) if measured else 0
    best = found.candidates[at]
    if target:
        _write(plans[at] if plans else line.planner.plan(best.job), target)
    if picture:
        _draw(line.planner, best, picture, line.written)
    if emit:
        _emit(best.job, emit)
    elif as_json:
        more = {"plan": target and str(target), "what_if": line.factors, "passed_over": line.over.rows()}
        _print_json(found, at, measured, more)
    else:
        _show(found, measured, explain)
        _say_where(target, picture)


def _target(job: Path, out: Path | None, *, what_if: bool) -> Path | None:
    """Where the plan goes; None where none is written. Raises JobError and LaunchError for a file that could
    not be written, or would not be taken as a plan."""
    from plait.core.base.errors import JobError
    from plait.core.base.files import check_target

    written = job.suffix == ".json"
    if written or what_if:
        if out:
            why = f"{job} is a plan already" if written else "--what-if is about what is not there"
            raise JobError(f"nothing is written, since {why}", key="--out", fix="Leave it out")
        return None
    target = out or job.parent / "plan.json"
    if target.suffix != ".json":
        fix = "Choose a name that ends in .json, by which plait train knows a plan"
        raise JobError(f"{target} would not be taken as a plan", key="--out", fix=fix)
    if job.is_file():  # what is wrong with it is said first
        check_target(target, fix="Choose another with --out")
    return target


class _CommandLine:
    """What the command line asks for. written: the plan, where one is given in place of a job."""

    def __init__(self, file: Path, overrides: Sequence[str], changes: Sequence[str], on: str) -> None:
        from plait.api.choose import the_cluster
        from plait.api.places import place_of
        from plait.core.base.errors import JobError
        from plait.core.base.passed_over import PassedOver
        from plait.core.job.plan import Plan
        from plait.core.job.spec import Job
        from plait.plan.answer import Planner
        from plait.plan.asking import with_own_vocabulary
        from plait.plan.other_device import other_device
        from plait.plan.what_if import changed_cluster, changed_ranks, parse_changes
        from plait.train.data.tokenizer import load_tokenizer

        self.written: Plan | None = None
        self.factors, self.over = parse_changes(changes), PassedOver()
        if file.suffix == ".json":
            if overrides:
                problem = f"'{overrides[0]}' would change the plan"
                raise JobError(problem, file=str(file), fix="Change the job file and plan again")
            self.written = Plan.read(file)
            job = job_of(self.written, file)
        else:
            as_written = Job.read(file, overrides).named(file.stem)
            job = with_own_vocabulary(as_written)
            self.over = _passed_over(as_written)
        self.place = place_of(on)
        there = the_cluster(job, self.place.lab)
        if warning := other_device(job, there):
            typer.echo(f"plait: {warning}", err=True)
        vocab = self.written.model.vocab if self.written else load_tokenizer(job.data.tokenizer).vocab
        job, cluster = changed_ranks(job, there, self.factors), changed_cluster(there, self.factors)
        self.planner = Planner(job, cluster, vocab)


def _passed_over(job: Job) -> PassedOver:
    """Say what of the model's files, and of weights that lie here, is not taken, and whose vocabulary is;
    refuse weights of another model."""
    from plait.api.choose import model_notes, vocabulary_note
    from plait.cli import terminal
    from plait.train.checkpoint.weight_files import check_weights
    from plait.train.data.tokenizer import load_tokenizer

    over, vocab = model_notes(job), load_tokenizer(job.data.tokenizer).vocab
    if job.train.init_from and Path(job.train.init_from).exists():  # a plan may be for another machine
        over.add(check_weights(Path(job.train.init_from), job.model_spec(vocab)))
    terminal.passed_over(over)
    terminal.note(vocabulary_note(job, vocab, own=True))
    return over


def job_of(plan: Plan, file: Path) -> Job:
    """The job of a plan. Raises JobError where there is none."""
    from plait.core.base.errors import JobError

    if plan.job is None:
        problem = "was made without a job file and says nothing of a cluster"
        raise JobError(problem, file=str(file), key="job", fix="Name a plan that plait plan or plait train wrote")
    return plan.job


def _measured(plans: Sequence[Plan], place: Place) -> dict[int, float]:
    from plait.api.measure import measure
    from plait.core.base.text import in_seconds

    measured = dict[int, float]()
    for at, seconds in enumerate(measure(plans, place)):
        typer.echo(f"measured {at + 1} of {len(plans)}: {in_seconds(seconds)} a step", err=True)
        measured[at] = seconds
    return measured


def _compare(files: tuple[Path, Path], as_json: bool) -> None:
    from plait.api.choose import the_cluster
    from plait.cli.plan_tables import show_comparison
    from plait.core.job.plan import Plan
    from plait.plan.answer import Planner

    sides: list[tuple[str, Planner, Candidate]] = []
    for file in files:
        plan = Plan.read(file)
        job = job_of(plan, file)
        planner = Planner(job, the_cluster(job, None), plan.model.vocab)
        sides.append((str(file), planner, planner.predict(job, plan)))
    show_comparison(sides[0], sides[1], as_json)


def _draw(planner: Planner, best: Candidate, file: Path, written: Plan | None) -> None:
    from plait.core.base.text import in_seconds
    from plait.diagnose.plots import draw_step
    from plait.plan.over_time import memory_curves, step_bars

    simulated = planner.simulated(best.job, written)
    curves = memory_curves(simulated, planner.step(simulated.simulation.plan), best.memory)
    title = f"{best.job.run.name}: a predicted step of {in_seconds(best.seconds)} on {planner.cluster.name}"
    draw_step(step_bars(simulated), curves, file, title=title, limit=best.memory.usable)


def _emit(job: Job, framework: str) -> None:
    from plait.cli import terminal
    from plait.plan.emit import emit

    emitted = emit(job, framework)
    for what in emitted.unsaid:
        terminal.say(f"# {framework} cannot say: {what}")
    terminal.say(emitted.text.rstrip("\n"))


def _write(plan: Plan, target: Path) -> None:
    from plait.core.base.files import explained

    with explained(f"{target} cannot be written", fix="Choose another with --out"):
        plan.write(target)


def _print_json(found: Answer, chosen: int, measured: dict[int, float], more: dict[str, Any]) -> None:
    from plait.cli import terminal

    values = found.to_dict() | more
    if measured:
        for at, seconds in measured.items():
            values["candidates"][at]["measured"] = seconds
        values["chosen"] = chosen
    terminal.say(json.dumps(values))


def _show(found: Answer, measured: dict[int, float], explain: bool) -> None:
    from plait.cli import terminal
    from plait.cli.plan_tables import show_answer, show_best, show_measured

    show_answer(found, explain)
    if explain:
        show_best(found.best)
    if measured:
        terminal.say("")
        show_measured(found, measured)


def _say_where(target: Path | None, picture: Path | None) -> None:
    from plait.cli import terminal

    if target:
        terminal.text(f"The plan is in {target}; plait train {target} obeys it.")
    if picture:
        terminal.text(f"The predicted step is drawn in {picture}.")
