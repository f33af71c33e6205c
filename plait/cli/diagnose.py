"""``plait diagnose``: where the step went, who is slow and what that costs, from what a run recorded."""

from __future__ import annotations

import json as json_format
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plait.cli import diagnose_page, terminal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from plait.core.job.plan import Plan
    from plait.core.runs.evidence import Verdict
    from plait.diagnose.compare import Prediction
    from plait.diagnose.explain import Report
    from plait.diagnose.reading import Run
    from plait.diagnose.recording import Recording

NAMED, UNKNOWN = 3, 1
"""Exit status where a straggler or the cause of a hang was named, and of a hang whose cause is not known; 0
where nothing is wrong, 2 where nothing could be read."""
COMPARED = 64
"""Ranks that are compared with the plan."""


def diagnose(
    run: Annotated[
        list[Path],
        typer.Argument(
            help="A run folder; or recordings of others: profiler traces or flight recorder dumps, files or a "
            "folder; or an operation trace (.parquet) with --meta."
        ),
    ],
    meta: Annotated[Path | None, typer.Option(help="Degrees of parallelism of an operation trace (YAML).")] = None,
    hang: Annotated[
        bool, typer.Option("--hang", help="Why its ranks wait for each other: for whom, and what that one does.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON line.")] = False,
) -> None:
    """Explain a run: where its steps go, which rank, host or link is slow, and what that costs; or why it
    hangs.

    Exit status: 0 nothing is wrong, 3 a straggler or the cause of a hang was named, 1 a hang whose cause is
    not known, 2 there is nothing that can be read.
    """
    if meta or run[0].suffix == ".parquet":
        raise typer.Exit(_tell(_of_trace(run, meta), json))
    from plait.cli.foreign import as_run

    with as_run(run) as folder:
        name = str(folder) if folder in run else " ".join(str(path) for path in run[:3]) + " ..." * (len(run) > 3)
        if hang:
            from plait.cli.hang import hang as explain_hang

            status = explain_hang(folder, as_json=json)
        else:
            status = _tell(replace(_of_run(folder, json), name=name), json)
    raise typer.Exit(status)


def _tell(report: Report, json: bool) -> int:
    """Print what is to be said; the exit status."""
    if json:
        typer.echo(json_format.dumps(report.to_dict()))
    else:
        diagnose_page.show(report)
    if report.stragglers or report.late or (report.hang and report.hang.certain):
        return NAMED
    return UNKNOWN if report.hang else 0


def _of_trace(traces: Sequence[Path], meta: Path | None) -> Report:
    from plait.core.base.errors import JobError
    from plait.diagnose.explain import explain
    from plait.diagnose.operations import read_meta, read_operations

    trace = traces[0]
    if len(traces) > 1:
        raise JobError(f"{len(traces)} files are named", file=str(trace), fix="Name one operation trace")
    if meta is None:
        raise JobError(
            "a trace does not tell its degrees of parallelism", file=str(trace), fix="Name its meta file with --meta"
        )
    return explain(read_operations(trace, read_meta(meta)), str(trace))


def _of_run(folder: Path, as_json: bool) -> Report:
    """Of a run that hung before a step was recorded there is no more than that."""
    from plait.cli.hang import hang
    from plait.core.base.errors import DataError
    from plait.core.runs.evidence import FILE
    from plait.diagnose.imported import imported_notes
    from plait.diagnose.reading import read_run

    try:
        run = read_run(folder)
    except DataError as error:
        if not (folder / FILE).exists():
            raise
        said = imported_notes(folder)
        if said is None:
            typer.echo(terminal.fitted(f"plait: {error}", sys.stderr), err=True)
        status = hang(folder, as_json=as_json)
        for note in (*said.notes, *said.over.lines()) if said and not as_json else ():
            terminal.text(f"note: {note}", indent="  ")
        raise typer.Exit(status) from None
    verdict, notes = hang_of(folder)
    report = report_of(run)
    return replace(report, hang=verdict, notes=(*notes, *report.notes))


def hang_of(folder: Path) -> tuple[Verdict | None, list[str]]:
    """Why the run hung, by what its launcher wrote down; None where it wrote nothing. And what has to be said
    of a file that cannot be read."""
    from plait.core.base.errors import DataError
    from plait.core.runs.evidence import FILE, read_hang

    if not (folder / FILE).exists():
        return None, []
    try:
        verdict = read_hang(folder / FILE)[0]
    except DataError as error:
        return None, [str(error)]
    return (None if verdict.cause == "none" else verdict), []


def report_of(run: Run) -> Report:
    """What is said of a run that gets on, with what its plan predicts."""
    from plait.core.runs.memory_peaks import PROCESS, peaks_of
    from plait.diagnose.explain import explain

    prediction, notes = _prediction(run.plan, run.recording) if run.plan else (None, [])
    memory = {}
    if run.plan and (peaks_of(run.metrics) or peaks_of(run.metrics, PROCESS)):
        memory = {place: sum(kinds.values()) for place, kinds in predicted_memory(run.plan)}
    notes = [*run.notes, *notes]
    return explain(run.recording, str(run.folder), run=run, prediction=prediction, memory=memory, notes=notes)


def predicted_memory(plan: Plan) -> Sequence[tuple[str, Mapping[str, int]]]:
    """Bytes by kind, of a rank of every stage; nothing where the plan does not tell."""
    from plait.core.base.errors import PlaitError
    from plait.plan.estimate import PlannedStep, estimate

    try:
        places = estimate(PlannedStep.of_plan(plan)).places
    except PlaitError:
        return ()
    kinds = ("parameters", "gradients", "optimizer", "buffers", "activations")
    return [(f"stage {n}", {kind: getattr(one.memory, kind) for kind in kinds}) for n, one in enumerate(places)]


def _prediction(plan: Plan, recording: Recording) -> tuple[Prediction | None, list[str]]:
    """What the plan that the run obeyed predicts, if it is made of measured costs; and what has to be said of
    it."""
    from plait.core.base.errors import PlaitError
    from plait.diagnose.compare import UNMEASURED, against, table_of
    from plait.diagnose.recording import grid_of, with_axes
    from plait.plan.simulate import simulate_plan

    if plan.costs is None:
        return None, [UNMEASURED]
    world = plan.layout.world_size
    ranks = None if world <= COMPARED else [rank for mesh in plan.layout.meshes for rank in mesh.ranks[:1]]
    try:
        timeline = simulate_plan(plan).timeline((1,), ranks)
    except PlaitError as error:
        return None, [f"The plan cannot be simulated: {error}"]
    places = {op.stage: place for place, ops in enumerate(plan.schedule.ranks) for op in ops}
    axes = with_axes(table_of(timeline), grid_of(plan.layout), plan.shardings, places)
    return against(recording, timeline, axes), []
