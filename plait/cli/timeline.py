"""``plait timeline``: what a run measured, alone or beside what was predicted or another run measured."""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.cli import terminal
from plait.core.base.passed_over import PassedOver

if TYPE_CHECKING:
    from plait.core.record.exposure import Exposure
    from plait.diagnose.compare import Comparison, Unmatched
    from plait.diagnose.reading import Tables
    from plait.diagnose.summary import TimelineSummary

DRAWN = 5
"""Steps that a trace holds, the last ones."""


def timeline(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    against: Annotated[
        Path | None, typer.Option(help="Compare with this plan.json, as predicted, or with this other run folder.")
    ] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev to this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON line.")] = False,
) -> None:
    """Summarise a run's measured timeline: what took how long, and how much communication was hidden."""
    from plait.core.base.files import check_target, explained
    from plait.diagnose.reading import read_timeline

    fix = "Choose another with --perfetto"
    if perfetto:
        check_target(perfetto, fix=fix)
    measured = read_timeline(run)
    if perfetto:
        with explained(f"{perfetto} cannot be written", fix=fix):
            _draw(run, measured, perfetto)
        if not json:
            terminal.say(f"{perfetto} holds the last steps; open it at ui.perfetto.dev")
    if against:
        _compare(run, measured, against, json)
    else:
        _summarise(run, measured, json)


def _draw(run: Path, measured: Tables, file: Path) -> None:
    from plait.diagnose.perfetto import write_json
    from plait.diagnose.reading import placed

    recording = placed(measured, run, DRAWN)
    write_json(recording.spans, file, recording.grid)


# ---- one run ----


def _summarise(run: Path, measured: Tables, json: bool) -> None:
    """Seconds per step by kind of op, over the steps that the timeline still holds, and over all."""
    from plait.diagnose.summary import summarise

    found = summarise(measured.spans, measured.sampled, measured.rollups)
    for note in () if json else measured.notes:
        terminal.text(note)
    if json:
        typer.echo(json_format.dumps({**_summary(found), **_left_out(measured.notes, measured.passed_over)}))
        return
    steps = f"steps {found.steps[0] + 1} to {found.steps[-1] + 1}"
    terminal.title(f"{run}: ms of a rank's mean step; last: mean of {found.lanes} rank-steps, all: of {steps}")
    rows = [(row.kind, row.site, row.direction, _ms(row.seconds), _ms(row.of_all)) for row in found.whats]
    terminal.table(("what", "where", "direction", "last", "all"), rows)
    if found.hidden.fraction is not None:
        total, exposed = (part / found.lanes for part in found.hidden)
        terminal.say(
            f"communication {total * 1e3:.1f} ms a step: exposed {exposed * 1e3:.1f} ms, hidden "
            f"{found.hidden.fraction:.0%}"
        )
    if len(found.trend) > 1 and found.hidden.fraction is not None:
        shares = (f"{_steps(one.first, one.last)} {one.hidden.fraction or 0:.0%}" for one in found.trend)
        terminal.say(f"hidden by step: {', '.join(shares)}")
    if found.slowest:
        slow = (f"{one.step + 1} ({one.seconds:.2f} s, {one.times:.1f} times the median)" for one in found.slowest)
        terminal.text(f"slowest steps: {', '.join(slow)}")


def _left_out(notes: Sequence[str], over: PassedOver) -> dict[str, Any]:
    """What was not taken of a run's files, for programs."""
    return {"notes": list(notes), "passed_over": over.rows()}


def _summary(found: TimelineSummary) -> dict[str, Any]:
    recent = [row for row in found.whats if row.seconds is not None]
    all_of_them = [row for row in found.whats if row.of_all is not None]

    def rows(of: Sequence[Any], seconds: str) -> list[dict[str, Any]]:
        return [{"kind": r.kind, "site": r.site, "direction": r.direction, "seconds": getattr(r, seconds)} for r in of]

    return {
        "spans": found.spans,
        "sampled_spans": found.sampled,
        "steps": len(found.steps),
        "hidden": found.hidden.fraction,
        "communication": {name: part / max(1, found.lanes) for name, part in found.hidden._asdict().items()},
        "per_step": rows(recent, "seconds"),
        "per_step_of_all": rows(all_of_them, "of_all"),
        "hidden_by_step": [{"first": g.first, "last": g.last, "hidden": g.hidden.fraction} for g in found.trend],
        "slowest": [one._asdict() for one in found.slowest],
    }


# ---- two timelines ----


def _compare(run: Path, measured: Tables, against: Path, json: bool) -> None:
    from plait.api.comparing import compare_run

    found = compare_run(run, measured, against)
    if json:
        values = {"run": str(run), "against": str(against), **_plain(found.result)}
        typer.echo(json_format.dumps({**values, **_left_out(found.notes, found.over)}))
        return
    names = ("", "") if found.predicted else (str(against), str(run))
    _show(found.result, f"{run} against {against}", names)
    for note in found.notes:
        terminal.text(note)


def _show(result: Comparison, what: str, names: tuple[str, str]) -> None:
    """A table of what both have, then what only one has, then communication. names: of two runs."""
    first, second = ("ms there", "ms here") if names[0] else ("predicted ms", "measured ms")
    steps, ranks = result.steps, len(result.ranks)
    terminal.title(f"{what}: a rank's mean step over {ranks} ranks, steps {steps[0] + 1} to {steps[-1] + 1}")
    if any(row.predicted is not None for row in result.rows):
        rows = [
            (row.kind, row.where, row.direction, _ms(row.predicted), _ms(row.measured), _ratio(row.ratio))
            for row in result.rows
        ]
        terminal.table(("what", "where", "direction", first, second, "ratio"), rows)
    words = (f"only in {names[0]}", f"only in {names[1]}") if names[0] else ("planned, never seen", "seen, not planned")
    for word, unmatched in zip(words, (result.never_seen, result.not_planned), strict=True):
        terminal.title(f"{word}: {'nothing' if not unmatched else 'in a mean step'}")
        if unmatched:
            found = [(*one[:3], f"{one.count:.3g}", _ms(one.seconds), one.example) for one in unmatched]
            terminal.table(("what", "where", "direction", "number", "ms", "such as"), found)
    for word, comm in zip((first, second), (result.predicted, result.measured), strict=True):
        word = word.replace("ms ", "").replace(" ms", "")
        if comm and comm.fraction is not None:
            exposed, total = _ms(comm.exposed), _ms(comm.total)
            terminal.say(f"exposed communication, {word}: {exposed} of {total} ms ({comm.fraction:.0%} hidden)")


def _plain(result: Comparison) -> dict[str, Any]:
    def unmatched(several: Sequence[Unmatched]) -> list[dict[str, Any]]:
        return [one._asdict() for one in several]

    def communication(comm: Exposure | None) -> dict[str, float | None] | None:
        return comm and {**comm._asdict(), "hidden": comm.fraction}

    return {
        "steps": result.steps,
        "ranks": result.ranks,
        "rows": [row.named("site") for row in result.rows],
        "never_seen": unmatched(result.never_seen),
        "not_planned": unmatched(result.not_planned),
        "communication": {"predicted": communication(result.predicted), "measured": communication(result.measured)},
    }


def _steps(first: int, last: int) -> str:
    """Numbered from 1, as everywhere."""
    return str(first + 1) if first == last else f"{first + 1}-{last + 1}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
