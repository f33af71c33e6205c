"""``plait diagnose --hang``: why a run hangs, or hung."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from plait.api.diagnosing import explain_hang
from plait.cli import terminal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plait.core.runs.evidence import Evidence, Verdict

FOUND = 3
"""Exit status where a cause is named."""


def hang(folder: Path, *, as_json: bool) -> int:
    """Print why the run in ``folder`` hangs; the exit status: 0 if it does not, 3 if the cause is named, 1 if
    it hangs and the cause is not known.

    What the launcher found is read again. Without it, the evidence is put together here: of a run that goes
    on, or of one whose ranks were started by torchrun or a cluster manager.
    """
    hung = explain_hang(folder)
    verdict, evidence = hung.verdict, hung.evidence
    for problem in hung.problems:
        terminal.aside(f"plait: left out: {problem}")
    if as_json:
        found = {"verdict": asdict(verdict), "evidence": [_short(one) for one in evidence]}
        typer.echo(json.dumps(found | {"passed_over": hung.over.rows()}))
    else:
        _tell(verdict, evidence)
    return FOUND if verdict.certain else 0 if verdict.cause == "none" else 1


def _tell(verdict: Verdict, evidence: Sequence[Evidence]) -> None:
    """The verdict, the chain of those who wait, and a line for each rank that matters."""
    from plait.core.runs.evidence import spoken_ranks

    terminal.title(verdict.heading)
    terminal.text(verdict.why)
    for other in verdict.also:
        terminal.text(f"Besides: {other.why}")
    if verdict.chain:
        terminal.title("\nWho waits for whom")
        for link in verdict.chain:
            on = f" for {spoken_ranks(link.on)}" if link.on else ""
            terminal.text(f"{spoken_ranks(link.ranks)}{on}: {link.call}", indent="    ")
    if shown := _worth_showing(verdict, evidence):
        terminal.title("\nTheir states")
        rows = [[str(one.rank), one.host, _state(one), one.doing, one.stack[-1] if one.stack else ""] for one in shown]
        terminal.table(["rank", "host", "state", "doing", "where"], rows)
        if left := len(evidence) - len(shown):
            terminal.say(f"{left} more with --json" if left > 1 else "1 more with --json")


MOST = 16
"""Ranks in the table."""


def _worth_showing(verdict: Verdict, evidence: Sequence[Evidence]) -> list[Evidence]:
    """Those that are named, then those in the chain."""
    wanted = [*verdict.ranks, *(rank for link in verdict.chain for rank in (*link.on, *link.ranks))]
    by_rank = {one.rank: one for one in evidence}
    return [by_rank[rank] for rank in list(dict.fromkeys(wanted))[:MOST] if rank in by_rank]


def _state(one: Evidence) -> str:
    if one.state == "ended":
        return "ended" if one.status is None else f"ended ({one.status})"
    if one.state == "runs":
        return {"waits": "waits", "works": "works", "silent": "does not answer", "unknown": "runs"}[one.thread]
    return one.state if one.recorded else "no evidence"


def _short(one: Evidence) -> dict[str, Any]:
    """Of a rank, for programs; its calls as text."""
    values: dict[str, Any] = {name: getattr(one, name) for name in one.__dataclass_fields__ if name != "calls"}
    return values | {"open": [str(call) for call in one.calls if not call.over]}
