"""``plait timeline``: what a run measured, alone or beside what was predicted or another run measured."""

from __future__ import annotations

import json as json_format
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.cli import terminal

if TYPE_CHECKING:
    from plait.core.timeline import Hidden, Timeline
    from plait.diagnose.compare import Comparison, Unmatched

COMPARED = 50
"""Steps that are compared, the last ones."""
GROUPS = 5
"""Groups of steps over which the trend of hidden communication is shown."""


def timeline(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    against: Annotated[
        Path | None, typer.Option(help="Compare with this plan.json, as predicted, or with this other run folder.")
    ] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev to this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON line.")] = False,
) -> None:
    """Summarise a run's measured timeline: what took how long, and how much communication was hidden."""
    from plait.core.timeline import Timeline

    measured = _measured(run)
    if perfetto:
        last = max(span.step for span in measured.spans)
        Timeline(tuple(s for s in measured.spans if s.step > last - 5), measured.plan_hash).write_perfetto(perfetto)
        if not json:
            terminal.say(f"{perfetto} holds the last steps; open it at ui.perfetto.dev")
    if against:
        _compare(run, measured, against, json)
    else:
        _summarise(run, measured, json)


def _measured(run: Path) -> Timeline:
    """What a run has kept of its last shape; of a step that was done twice, the second time."""
    from plait.core.errors import DataError
    from plait.core.timeline import Timeline

    if not run.is_dir():
        raise DataError(f"{run}: no such run folder")
    parts = [Timeline.read_parquet(part) for part in sorted((run / "timeline").glob("*.parquet"))]
    parts = [part for part in parts if part.spans]
    if not parts:
        raise DataError(f"{run} holds no timeline; train with run.timeline_steps above 0")
    newest = max(parts, key=lambda part: part.spans[-1].step)
    owner = {(span.step, span.rank): part for part in parts for span in part.spans}  # later files come later
    kept = [
        Timeline(tuple(span for span in part.spans if owner[span.step, span.rank] is part), part.plan_hash)
        for part in parts
        if part.plan_hash == newest.plan_hash
    ]
    return Timeline.concat(kept)


# ---- one run ----


def _summarise(run: Path, measured: Timeline, json: bool) -> None:
    """Seconds per step by kind of op, over the steps that the timeline still holds."""
    from plait.core.timeline import hidden, hidden_by_step

    lanes = len({(span.step, span.rank) for span in measured.spans})
    seconds: dict[tuple[str, str, str], float] = defaultdict(float)
    for span in measured.spans:
        seconds[span.kind, span.site, span.direction] += span.seconds / lanes
    comm, trend = hidden(measured.spans), _trend(hidden_by_step(measured))
    if json:
        rows = [{"kind": k, "site": s, "direction": d, "seconds": v} for (k, s, d), v in seconds.items()]
        groups = [{"first": first, "last": last, "hidden": each.fraction} for first, last, each in trend]
        found = {"spans": len(measured.spans), "hidden": comm.fraction, "per_step": rows, "hidden_by_step": groups}
        typer.echo(json_format.dumps(found))
        return
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    terminal.title(f"{run}: mean of {lanes} rank-steps")
    terminal.table(("what", "where", "direction", "ms per step"), [(*what, _ms(value)) for what, value in ordered])
    if comm.fraction is not None:
        terminal.say(f"communication {comm.total / lanes * 1e3:.1f} ms a step, hidden {comm.fraction:.0%}")
    if len(trend) > 1 and comm.fraction is not None:
        shares = (f"{first}-{last} {each.fraction or 0:.0%}" for first, last, each in trend)
        terminal.say(f"hidden by step: {', '.join(shares)}")


def _trend(steps: dict[int, Hidden]) -> list[tuple[int, int, Hidden]]:
    """(first step, last step, communication) of a few groups of equally many steps."""
    from plait.core.timeline import Hidden

    numbers = sorted(steps)
    size = -(-len(numbers) // GROUPS)
    groups = [numbers[at : at + size] for at in range(0, len(numbers), size)]
    return [
        (own[0], own[-1], Hidden(sum(steps[n].total for n in own), sum(steps[n].exposed for n in own)))
        for own in groups
    ]


# ---- two timelines ----


def _compare(run: Path, measured: Timeline, against: Path, json: bool) -> None:
    from plait.core.timeline import PLANNED, Timeline
    from plait.diagnose.compare import compare

    steps = sorted({span.step for span in measured.spans})[-COMPARED:]
    recent = Timeline(tuple(span for span in measured.spans if span.step >= steps[0]), measured.plan_hash)
    names, note = ("", ""), ""
    if against.is_dir():
        other, names = _measured(against), (str(against), str(run))
    else:
        other, note = _predicted(run, recent, against, steps)
        recent = Timeline(tuple(span for span in recent.spans if span.kind in PLANNED), recent.plan_hash)
    result = compare(other, recent)
    if json:
        typer.echo(json_format.dumps({"run": str(run), "against": str(against), **_plain(result)}))
        return
    _show(result, f"{run} against {against}", names)
    if note:
        terminal.say(note)


def _predicted(run: Path, measured: Timeline, file: Path, steps: Sequence[int]) -> tuple[Timeline, str]:
    """What a plan predicts for ``steps``, and what has to be said of it. Raises JobError for a plan that the
    run has not obeyed."""
    from plait.core.errors import JobError
    from plait.core.plan import Plan
    from plait.core.segment_costs import BANDWIDTH, FLOPS
    from plait.plan.simulate import simulate_plan

    plan = Plan.read(file)
    if plan.hash != measured.plan_hash:
        problem = f"is plan {plan.hash[:12]}, and the last steps in {run} were of plan {measured.plan_hash[:12]}"
        raise JobError(problem, file=str(file), fix=f"The plan that it obeyed is {run / 'plan.json'}")
    note = (
        f"The plan holds no measured costs: predicted times are those of {FLOPS / 1e9:.0f} GFLOP/s a rank and "
        f"{BANDWIDTH * 8 / 1e9:.0f} Gbit/s a link, and only their proportions mean something"
    )
    return simulate_plan(plan).timeline(steps), "" if plan.costs else note


def _show(result: Comparison, what: str, names: tuple[str, str]) -> None:
    """A table of what both have, then what only one has, then communication. names: of two runs."""
    first, second = ("ms there", "ms here") if names[0] else ("predicted ms", "measured ms")
    steps, ranks = result.steps, len(result.ranks)
    terminal.title(f"{what}: a rank's mean step over {ranks} ranks, steps {steps[0] + 1} to {steps[-1] + 1}")
    rows = [
        (row.kind, row.site, row.direction, _ms(row.predicted), _ms(row.measured), _ratio(row.ratio))
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
        if comm.fraction is not None:
            word = word.replace("ms ", "").replace(" ms", "")
            exposed, total = _ms(comm.exposed), _ms(comm.total)
            terminal.say(f"exposed communication, {word}: {exposed} of {total} ms ({comm.fraction:.0%} hidden)")


def _plain(result: Comparison) -> dict[str, Any]:
    def unmatched(several: Sequence[Unmatched]) -> list[dict[str, Any]]:
        return [one._asdict() for one in several]

    def communication(comm: Hidden) -> dict[str, float | None]:
        return {**comm._asdict(), "hidden": comm.fraction}

    return {
        "steps": result.steps,
        "ranks": result.ranks,
        "rows": [{**row._asdict(), "ratio": row.ratio} for row in result.rows],
        "never_seen": unmatched(result.never_seen),
        "not_planned": unmatched(result.not_planned),
        "communication": {"predicted": communication(result.predicted), "measured": communication(result.measured)},
    }


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
