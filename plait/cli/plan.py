"""``plait plan``: from a job to the strategies that would run it fastest, and a plan that ranks
obey."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plait.cli import terminal
from plait.cli.terminal import grouped

if TYPE_CHECKING:
    from plait.api.planning import Planning


DETAILS = "details"
"""The value of ``--show`` that is no framework."""


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
    on: Annotated[str, typer.Option(help="What this machine is to be: local, or lab:HOSTSxRANKS@RATE.")] = "local"


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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False


@grouped
def plan(
    question: PlanRequest,
    shown: PlanOutput,
    job: Annotated[
        Path | None,
        typer.Argument(
            metavar="[JOB]",
            help="The job file (TOML), a plan, or a configuration of Megatron-LM, torchtitan or DeepSpeed. Without "
            "one, the clusters that ship are listed.",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SECTION.KEY=VALUE]...",
            help="In place of the file's: cluster.ranks=128. A second plan behind a first: both side by side.",
        ),
    ] = None,
) -> None:
    """Choose how to run a job: parallel degrees, sharding, schedule, slices, recomputation.

    A job without [strategy] is searched whole. With one, keys that are auto are searched, and what
    it leaves out has its default (docs/job.md). [cluster] says for what, [plan] what to respect.
    plait train obeys the plan that is written. docs/plan.md has examples.

    Example: plait plan job.toml cluster.preset=h100 cluster.ranks=128
    """
    from plait.api.places import place_of
    from plait.api.planning import (
        check_emits,
        check_framework,
        compare_plans,
        draw_step,
        emit_settings,
        known_clusters,
        measure_best,
        plan_job,
    )
    from plait.core.base.errors import JobError
    from plait.core.base.files import explained
    from plait.core.job.spec import naming

    gc.set_threshold(1_000_000, 10, 10)  # schedules are millions of tuples without cycles: a search costs a third
    given = list(overrides or [])
    out, draw, as_json = shown.out, shown.draw, shown.as_json
    emit = shown.show if shown.show != DETAILS else None
    measure, what_if = question.measure, question.what_if
    if job is None:
        if question.evaluate or shown.show or draw or measure or what_if or out:
            raise JobError("no job is given", fix="Write plait plan JOB.toml")
        terminal.answer(known_clusters(), as_json=as_json)
        return
    files = [word for word in (str(job), *given) if "=" not in word]
    if files and "=" in str(job):  # settings may stand before the file
        given.insert(0, str(job))
        given.remove(files[0])
        job = Path(files[0])
    if job.suffix == ".json" and len(files) > 1 and files[1].endswith(".json"):
        if len(given) > 1 or shown.show or draw or measure or what_if or out:
            raise JobError("a comparison of two plans takes no option but --json", fix="Leave out the rest")
        terminal.answer(compare_plans(job, Path(files[1])), as_json=as_json)
        return
    if measure < 0:
        raise JobError(f"{measure} is not allowed", key="--measure", fix="Allowed: at least 1")
    if measure and what_if:
        raise JobError("a hypothetical cluster cannot be measured", key="--what-if", fix="Leave out --measure")
    if emit:
        check_framework(emit, [DETAILS])
        if as_json:
            raise JobError("prints settings, not JSON", key="--show", fix="Leave out one of --show and --json")
    if draw:
        from plait.api.pictures import FORMATS, check_format
        from plait.core.base.files import check_target

        check_format(draw, (*FORMATS, "html"))
        check_target(draw, fix="Choose another with --draw")
    with naming(job, given):
        place = place_of(question.on)
        asked = plan_job(job, given, place, what_if or [], evaluate=question.evaluate)
        target = _target(asked, job, out, what_if=bool(what_if))
        _remark(asked)
        for wanted, doing in ((measure, "measured"), (draw, "drawn")):
            if wanted:
                asked.planner.job.check_trains(asked.planner.model, doing)
                asked.planner.refuse_framework(doing)
        if emit:
            check_emits(asked, emit)
        found, placed = asked.answer(explain=shown.show == DETAILS), None
        where = asked.planner.job.place.changed(given)
        if where.topology or where.rank_table:
            from plait.api.placed_step import place_steps  # imports the placer, a tenth of all imports

            found, placed = place_steps(asked, found, given)
    if measure:
        found = measure_best(asked, found, place, measure, lambda line: typer.echo(line, err=True))
    replaced = False
    if target:
        chosen, old = asked.plan(found.best), _hash_in(target)
        replaced = old not in ("", chosen.hash)
        with explained(f"{target} cannot be written", fix="Choose another with --out"):
            chosen.write(target)
    if draw:
        draw_step(asked, found.best, draw)
    if emit:
        emitted, both = emit_settings(asked, found.best, emit)
        for line in (*emitted.launch, both, *(f"{emit} cannot say: {what}" for what in emitted.unsupported)):
            terminal.say(f"# {line}")
        terminal.say(emitted.text.rstrip("\n"))
        return
    more = {"plan": target and str(target), "what_if": asked.factors, "passed_over": asked.ignored.rows()}
    more |= {"read": asked.config.to_dict()} if asked.config else {}
    more |= {"placement": placed.to_dict()} if placed else {}
    terminal.answer(found, as_json=as_json, **more)
    if placed and not as_json:
        terminal.answer(placed, as_json=False)
    older = job.parent / "plan.json"
    if target and not shown.out and older.exists():
        terminal.note(f"{older} is not this plan, which is in {target}")
    if target and not as_json:
        after = "" if asked.planner.closed_form_only else f"; plait train {target} obeys it"
        old = ", in place of another plan (--out FILE keeps both)" if replaced else ""
        terminal.text(f"The plan is in {target}{old}{after}.")
    if draw and not as_json:
        terminal.text(f"The predicted step is drawn in {draw}.")


def _target(planning: Planning, job: Path, out: Path | None, *, what_if: bool) -> Path | None:
    """Return the file for the plan; None if no plan is written. Raises JobError and LaunchError for
    a file that cannot be written, or whose name is no plan's."""
    from plait.core.base.errors import JobError
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
