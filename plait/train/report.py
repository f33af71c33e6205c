"""What a run tells people and programs: a progress bar or plain lines, metrics as JSON lines, a summary."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from plait.core.dry_run import peak_activations
from plait.core.files import replacing
from plait.core.plan import Plan
from plait.core.refine import Measurements, Timed


class Reporter:
    """Rank 0's voice; on the other ranks (``speaks`` False) every method does nothing."""

    def __init__(self, folder: Path, *, speaks: bool, steps: int) -> None:
        self.folder, self.speaks, self.steps = folder, speaks, steps
        self.console = Console(file=sys.stdout, highlight=False)
        self.bar: Progress | None = None
        self.last: dict[str, Any] = {}

    def __enter__(self) -> Reporter:
        if self.speaks:
            self._metrics = open(self.folder / "metrics.jsonl", "a")
        return self

    def begin(self, start: int) -> None:
        """Training begins after ``start`` steps: metrics of steps beyond, from a run that was cut off, are
        forgotten."""
        if not self.speaks:
            return
        path = self.folder / "metrics.jsonl"
        kept = [line for line in path.read_text().splitlines() if _step_of(line) in range(start + 1)]
        self._metrics.close()
        _write(path, "".join(line + "\n" for line in kept))
        self._metrics = open(path, "a")  # noqa: SIM115
        if self.console.is_terminal:
            self.bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.task = self.bar.add_task("", total=self.steps, completed=start)
            self.bar.start()

    def end(self, done: int, *, stopped: bool, seconds: float, tokens: int, plan: Plan) -> None:
        """The run is over or was stopped, and is saved: a summary for people and in ``summary.json``."""
        if not self.speaks:
            return
        if self.bar:
            self.bar.stop()
        started = {"steps": done, "seconds": seconds, "tokens": tokens}  # the latter two since this start
        latest = {key: _json(value) for key, value in self.last.items()}
        summary = {**started, "plan": plan.hash, "strategy": plan.strategy.to_dict(), "latest": latest}
        _write(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        if stopped:
            self.say(f"stopped and saved after step {done}; the same command goes on from there")
        else:
            self.say(f"trained {done} steps in {seconds:.0f} s; the run is in {self.folder}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar:
            self.bar.stop()
        if self.speaks:
            self._metrics.close()

    def say(self, text: str) -> None:
        """One line for people."""
        if self.speaks:
            self.console.print(text, soft_wrap=True)

    def step(self, metrics: dict[str, Any], *, show: bool) -> None:
        """Metrics of one step: always to the file, to people when ``show``."""
        if not self.speaks:
            return
        self.last.update(metrics)
        self._metrics.write(json.dumps({key: _json(value) for key, value in metrics.items()}) + "\n")
        self._metrics.flush()
        text = describe(metrics)
        if self.bar:
            self.bar.update(self.task, completed=metrics["step"], description=text)
        if show and not (self.bar and "eval_loss" not in metrics):
            self.say(f"step {metrics['step']:>6}/{self.steps}  {text}")

    def choice(self, found: Measurements, plan: Plan) -> None:
        """What timed steps have found, and the plan that followed from it."""
        if not self.speaks:
            return
        for timed in (found.strategies, found.overlaps):
            if timed:
                self.console.print(_timed(timed, plan))
        if found.times:
            alive = ", ".join(str(peak) for peak in peak_activations(plan.schedule).values())
            self.say(
                f"slack from measured times: at most {alive} micro-batches alive on the stages, one after the other"
            )


def _timed(timed: Sequence[Timed], plan: Plan) -> Table:
    """Candidates, the fastest first."""
    best = min(one.seconds for one in timed)
    columns = ("p1", "p2", "sequence parallel", "sharding hides", "ms", "against best")
    table = Table(*columns, title="Measured before training")
    for one in sorted(timed, key=lambda each: each.seconds):
        s = one.strategy
        row = (
            str(s.p1),
            str(s.p2),
            "yes" if s.sequence_parallel else "no",
            s.shard_overlap,
            f"{one.seconds * 1e3:.1f}",
            f"{one.seconds / best:.2f}x",
        )
        table.add_row(*row, style="bold" if s == plan.strategy else "")
    return table


def describe(metrics: dict[str, Any]) -> str:
    """Metrics in the few words that fit beside a progress bar."""
    parts = [f"loss {metrics['loss']:.3f}"]
    if "eval_loss" in metrics:
        parts.append(f"eval {metrics['eval_loss']:.3f}")
    if metrics.get("skipped"):
        parts.append(f"{metrics['skipped']} updates skipped")
    parts.append(f"{metrics['tokens_per_second']:,.0f} tokens/s")
    if metrics.get("mfu") is not None:
        parts.append(f"MFU {metrics['mfu']:.0%}")
    if "idle" in metrics:
        parts.append(f"first stage idle {metrics['idle']:.0%}")
    if metrics.get("hidden") is not None:
        parts.append(f"communication {metrics['communication_seconds'] * 1e3:.0f} ms, hidden {metrics['hidden']:.0%}")
    return "  ".join(parts)


def _json(value: Any) -> Any:
    """JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _step_of(line: str) -> int:
    """The step of a metrics line, -1 for one that was cut off."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):
        return -1


def _write(path: Path, text: str) -> None:
    """Replace a small file in one step."""
    with replacing(path) as partial:
        partial.write_text(text)
