"""``plait plan``: from a job to the strategies that would run it fastest, and a plan that ranks
obey."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plait.cli import terminal
from plait.cli.commands import JOB_SETTINGS, AsJson
from plait.core.base.errors import JobError

if TYPE_CHECKING:
    from plait.api.placed_step import PlacedSteps
    from plait.api.plan_answer import PlanAnswer
    from plait.api.planning import Planning
    from plait.core.job.plan import Plan


DETAILS = "details"
"""The value of ``--show`` that is no framework."""


@dataclass(frozen=True)
class JobArguments:
    """The job, and settings in place of the file's."""

    job: Annotated[
        Path | None,
        typer.Argument(
            metavar="JOB",
            help="The job file (TOML), a plan, or a script or configuration of Megatron-LM, torchtitan or DeepSpeed. "
            "Without one, the clusters that ship are listed.",
        ),
    ] = None
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar=JOB_SETTINGS,
            help="In place of the file's: cluster.ranks=128. A second plan behind a first: both side by side.",
        ),
    ] = None

    @property
    def words(self) -> list[str]:
        """Files and settings, as they were written."""
        return [*([str(self.job)] if self.job else []), *(self.overrides or [])]


@dataclass(frozen=True)
class PlanRequest:
    """Options for the planner's task, besides the job."""

    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="Predict the job's own strategy; search for no other.")
    ] = False
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RATE=FACTORx",
            help="Other hardware: nic=2x, link=0.5, compute=2, memory=2; or gpus=4x. Repeatable.",
        ),
    ] = None
    measure: Annotated[
        int, typer.Option(metavar="N", help="Run the N best for a few steps, and choose by their measured times.")
    ] = 0
    on: Annotated[
        str, typer.Option(metavar="PLACE", help="What this machine is to be: local, or lab:HOSTSxRANKS@RATE.")
    ] = "local"


@dataclass(frozen=True)
class PlanOutput:
    """Options for the output of the answer."""

    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="Write the plan here, not in JOB.plan.json.")
    ] = None
    show: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT",
            help="details: more columns, where the step goes, what fills the memory; torchtitan, megatron "
            "or deepspeed: the strategy as its settings instead.",
        ),
    ] = None
    draw: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the predicted step and its memory: .svg, .html, .png or .pdf."),
    ] = None
    as_json: AsJson = False

    @property
    def framework(self) -> str | None:
        """The framework whose settings are printed in place of the answer; None for the answer."""
        return None if self.show == DETAILS else self.show


def plan(arguments: JobArguments, question: PlanRequest, shown: PlanOutput) -> None:
    """Choose the parallelism that runs a job fastest.

    That is parallel degrees, sharding, schedule, slices and recomputation. A job without [strategy]
    is searched whole. With one, keys that are auto are searched, and what it leaves out has its
    default (docs/job.md). A script keeps its own strategy; strategy=auto searches for a faster one.
    [cluster] says for what, [plan] what to respect. plait train obeys the plan that is written.
    docs/plan.md has examples.

    Examples:
        plait plan first.toml
        plait plan pretrain_gpt.sh cluster.preset=h100 strategy=auto
    """
    from plait.api.planning import compare_plans, known_clusters

    gc.set_threshold(1_000_000, 10, 10)  # schedules are millions of tuples without cycles: a search costs a third
    words = arguments.words
    files = [word for word in words if "=" not in word] or words[:1]
    plain = question == PlanRequest() and shown in (PlanOutput(), PlanOutput(as_json=True))
    if not files:
        if not plain:
            raise JobError("no job is given", fix="Write plait plan JOB.toml")
        terminal.answer(known_clusters(), as_json=shown.as_json)
    elif len(files) > 1 and files[0].endswith(".json") and files[1].endswith(".json"):
        if len(words) > 2 or not plain:
            raise JobError("a comparison of two plans takes no option but --json", fix="Leave out the rest")
        terminal.answer(compare_plans(Path(files[0]), Path(files[1])), as_json=shown.as_json)
    else:
        words.remove(files[0])  # settings may stand before the file
        _check_options(question, shown)
        _plan_job(Path(files[0]), words, question, shown)


def _check_options(question: PlanRequest, shown: PlanOutput) -> None:
    """Raise JobError for options that are wrong, or contradict each other."""
    from plait.api.planning import check_framework

    if question.measure < 0:
        raise JobError(f"{question.measure} is not allowed", key="--measure", fix="Allowed: 0 or more")
    if question.measure and question.what_if:
        raise JobError("a hypothetical cluster cannot be measured", key="--what-if", fix="Leave out --measure")
    if shown.framework:
        check_framework(shown.framework, [DETAILS])
        if shown.as_json:
            raise JobError("prints settings, not JSON", key="--show", fix="Leave out one of --show and --json")
    if shown.draw:
        from plait.api.pictures import FORMATS, check_format
        from plait.core.base.files import check_target

        check_format(shown.draw, (*FORMATS, "html"))
        check_folder(shown.draw, "--draw")
        check_target(shown.draw, fix="Choose another with --draw")


def _plan_job(job: Path, given: list[str], question: PlanRequest, shown: PlanOutput) -> None:
    """Plan a job with settings from the command line; write, draw and print the answer."""
    from plait.api.places import place_of
    from plait.api.planning import draw_step, measure_best, plan_job
    from plait.core.job.spec import naming

    with naming(job, given):
        place = place_of(question.on)
        if not place.is_local:
            fix = "Use local, or lab:HOSTSxRANKS@RATE; cluster.preset=NAME plans for another cluster"
            raise JobError(f"'{question.on}' is not allowed: nothing is started there", key="--on", fix=fix)
        asked = plan_job(job, given, place, question.what_if or [], evaluate=question.evaluate)
        target = _target(asked, job, shown.out, what_if=bool(question.what_if))
        _remark(asked)
        _check_answer(asked, question, shown)
        found, placed = _answer(asked, given, explain=shown.show == DETAILS)
    if question.measure:
        found = measure_best(asked, found, place, question.measure, lambda line: typer.echo(line, err=True))
    replaced = target is not None and _write(asked.plan(found.best), target)
    if shown.draw:
        draw_step(asked, found.best, shown.draw)
    if shown.framework:
        _print_settings(asked, found, shown.framework)
        return
    more = {"plan": target and str(target), "what_if": asked.factors, "passed_over": asked.ignored.rows()}
    more |= {"read": asked.config.to_dict()} if asked.config else {}
    more |= {"placement": placed.to_dict()} if placed else {}
    terminal.answer(found, as_json=shown.as_json, **more)
    if placed and not shown.as_json:
        terminal.answer(placed, as_json=False)
    older = job.parent / "plan.json"
    if target and not shown.out and older.exists():
        terminal.note(f"{older} is not this plan, which is in {target}")
    if target and not shown.as_json:
        after = "" if asked.planner.closed_form_only else f"; plait train {target} obeys it"
        old = ", in place of another plan (--out FILE keeps both)" if replaced else ""
        terminal.text(f"The plan is in {target}{old}{after}.")
    if shown.draw and not shown.as_json:
        terminal.text(f"The predicted step is drawn in {shown.draw}.")


def _check_answer(asked: Planning, question: PlanRequest, shown: PlanOutput) -> None:
    """Raise JobError for an answer that this job cannot have."""
    from plait.api.planning import check_emits

    for wanted, doing in ((question.measure, "measured"), (shown.draw, "drawn")):
        if wanted:
            asked.planner.job.check_trains(asked.planner.model, doing)
            asked.planner.refuse_framework(doing)
    if shown.framework:
        check_emits(asked, shown.framework)


def _answer(asked: Planning, given: list[str], *, explain: bool) -> tuple[PlanAnswer, PlacedSteps | None]:
    """Return the best strategies; and their steps as placed, for a job with a topology."""
    found, where = asked.answer(explain=explain), asked.planner.job.place.changed(given)
    if not (where.topology or where.rank_table):
        return found, None
    from plait.api.placed_step import place_steps  # imports the placer, a tenth of all imports

    return place_steps(asked, found, given)


def _write(plan: Plan, target: Path) -> bool:
    """Write a plan; return True if it replaces another one."""
    from plait.core.base.files import explained

    old = _hash_in(target)
    with explained(f"{target} cannot be written", fix="Choose another with --out"):
        plan.write(target)
    return old not in ("", plan.hash)


def _print_settings(asked: Planning, found: PlanAnswer, framework: str) -> None:
    """Print the best strategy as another framework's settings."""
    from plait.api.planning import emit_settings

    emitted, both = emit_settings(asked, found.best, framework)
    for line in (*emitted.launch, both, *(f"{framework} cannot say: {what}" for what in emitted.unsupported)):
        terminal.say(f"# {line}")
    terminal.say(emitted.text.rstrip("\n"))


def check_folder(file: Path, option: str) -> None:
    """Raise JobError for a file whose folder does not exist."""
    if not file.parent.is_dir():
        fix = f"Make it first: mkdir -p {file.parent}"
        raise JobError(f"there is no folder {file.parent}", key=option, fix=fix)


def _target(planning: Planning, job: Path, out: Path | None, *, what_if: bool) -> Path | None:
    """Return the file for the plan; None if no plan is written. Raises JobError and LaunchError for
    a file that cannot be written, or whose name is no plan's."""
    from plait.core.base.files import check_target

    framework, written = planning.planner.framework, planning.input_plan is not None
    if framework or written or what_if:
        if out:
            why = f"{job} is a plan already" if written else "--what-if is about what is not there"
            why = f"{framework.version} does not obey a plan" if framework else why
            raise JobError(f"nothing is written, since {why}", key="--out", fix="Leave it out")
        return None
    target = out or job.with_suffix(".plan.json")
    if target.suffix != ".json":
        fix = "Choose a name that ends in .json, by which plait train knows a plan"
        raise JobError(f"{target} would not be taken as a plan", key="--out", fix=fix)
    check_folder(target, "--out")
    check_target(target, fix="Choose another with --out")
    if _hash_in(target) is None:
        raise JobError(f"{target} is no plan, and a plan would replace it", key="--out", fix="Choose another name")
    return target


def _hash_in(file: Path) -> str | None:
    """Return the hash in a plan's file; empty if there is no file, None if it is no plan's."""
    from plait.core.base.codec.json_text import read_table

    try:
        return str(read_table(file).get("hash", "")) or None if file.exists() else ""
    except (OSError, ValueError):
        return None


def _remark(planning: Planning) -> None:
    """Print on standard error the input that was ignored, and remarks."""
    terminal.passed_over(planning.ignored)
    terminal.note(planning.note)
    for line in planning.config.lines() if planning.config else ():
        terminal.note(line)
    if planning.warning:
        typer.echo(f"plait: {planning.warning}", err=True)
