"""The table behind ``plait timeline``."""

from __future__ import annotations

import json as json_format
from collections import defaultdict
from pathlib import Path

import typer

from plait.cli import terminal
from plait.core.errors import DataError
from plait.core.timeline import Timeline, hidden


def summarise(run: Path, perfetto: Path | None, json: bool) -> None:
    """Print seconds per step by kind of op, over the steps that the run's timeline still holds."""
    parts = sorted((run / "timeline").glob("*.parquet"))
    if not parts:
        raise DataError(f"{run} holds no timeline; train with run.timeline_steps above 0")
    whole = Timeline.concat([Timeline.read_parquet(part) for part in parts])
    if perfetto:
        last = max(span.step for span in whole.spans)
        Timeline(tuple(s for s in whole.spans if s.step > last - 5), whole.plan_hash).write_perfetto(perfetto)
        terminal.say(f"{perfetto} holds the last steps; open it at ui.perfetto.dev")
    lanes = len({(span.step, span.rank) for span in whole.spans})
    seconds: dict[tuple[str, str, str], float] = defaultdict(float)
    for span in whole.spans:
        seconds[span.kind, span.site, span.direction] += span.seconds / lanes
    comm = hidden(whole.spans)
    if json:
        rows = [{"kind": k, "site": s, "direction": d, "seconds": v} for (k, s, d), v in seconds.items()]
        typer.echo(json_format.dumps({"spans": len(whole.spans), "hidden": comm.fraction, "per_step": rows}))
        return
    terminal.title(f"{run}: mean of {lanes} rank-steps")
    rows = sorted(seconds.items(), key=lambda item: -item[1])
    header = ("what", "where", "direction", "ms per step")
    terminal.table(header, [(*what, f"{value * 1e3:.2f}") for what, value in rows])
    if comm.fraction is not None:
        terminal.text(f"communication {comm.total / lanes * 1e3:.1f} ms a step, hidden {comm.fraction:.0%}")
