"""Report a run to the user and to programs: a progress line or plain lines, metrics as JSON lines,
a summary."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, TextIO

from plait.core.base.files import replacing
from plait.core.base.text import duration, paragraph, printable, progress_line, table
from plait.core.job.plan import Plan
from plait.core.job.refine import Measurements, TimedTrial
from plait.core.runs.history import TERMINAL
from plait.core.runs.progress import Missing
from plait.core.step.clock.pipeline_clock import peak_activations
from plait.train.record.metrics import UNREADABLE, MetricsFile, finite
from plait.train.screen import ByteProgress, LineFile, Screen

WIDTH = 100
"""Columns of a log line, at most."""
STEP_WIDTH = 120
"""Columns of the line of a step, at most."""
RECENT = 50
"""The number of recent steps whose median is the length of the remaining ones."""


class Reporter:
    """The log output of rank 0. On other ranks (``speaks`` False) only warnings are printed, to the
    rank's log."""

    def __init__(self, folder: Path, *, speaks: bool, steps: int, out: TextIO | None = None) -> None:
        self.folder, self.speaks, self.steps = folder, speaks, steps
        self.screen = Screen(out or sys.stdout, LineFile(folder / "logs" / TERMINAL) if speaks else None)
        self.last: dict[str, Any] = {}
        self._missing: list[Missing] = []
        self._ended: deque[float] = deque(maxlen=RECENT + 1)
        """The times at which the last steps were done, and at first that at which training began."""
        self._metrics = MetricsFile(folder, self.missing("metrics.jsonl")) if speaks else None

    def __enter__(self) -> Reporter:
        return self

    def begin(self, start: int) -> None:
        """Mark the begin of training after ``start`` steps. Metrics of later steps, from a run that
        was cut off, are removed."""
        if self._metrics:
            if damaged := self._metrics.remove_after(start):
                what = f"{damaged} line{'s' * (damaged > 1)} of metrics.jsonl cannot be read"
                self.warn(f"warning: {what}; set aside in {UNREADABLE}")
            self._ended.append(time.monotonic())

    def end(self, done: int, *, stopped: bool, seconds: float, tokens: int, plan: Plan) -> None:
        """Print a summary of a run that is complete or stopped, and saved; write it to
        ``summary.json``.

        Raises RankFailure if the run folder is gone.
        """
        self.screen.live("")
        if not self._metrics:
            return
        self._metrics.check()
        started = {"steps": done, "seconds": seconds, "tokens": tokens}  # seconds and tokens are since this start
        summary = {**started, "plan": plan.key, "strategy": plan.strategy.to_dict(), "latest": finite(self.last)}
        try:
            with replacing(self.folder / "summary.json") as partial:
                partial.write_text(json.dumps(summary, indent=2) + "\n")
        except OSError as error:
            self.warn(f"warning: summary.json cannot be written ({error.strerror or error})")
        if gaps := [str(one) for one in self._missing if one.steps]:
            self.warn(f"warning: this run could not write everything; missing: {', '.join(gaps)}")
        if stopped:
            self.say(f"stopped and saved after step {done}; the same command goes on from there")
        else:
            self.say(f"trained {done} steps in {seconds:.0f} s; the run is in {self.folder}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.screen.live("")
        if self._metrics:
            self._metrics.close()
        if self.screen.copy:
            self.screen.copy.close()

    def progress(self, name: str) -> ByteProgress:
        """Return a progress display for the tokenising of a source."""
        return ByteProgress(self.screen, f"tokenising {name}")

    def sync(self) -> None:
        """Flush metrics to the disk; may be called by another thread."""
        if self._metrics:
            self._metrics.sync()

    def missing(self, what: str) -> Missing:
        """Return a counter of the steps for which ``what`` could not be written. It warns when that
        happens, and ``end`` reports its total."""
        self._missing.append(Missing(what, self.warn))
        return self._missing[-1]

    def say(self, text: str) -> None:
        """Print one line."""
        if self.speaks:
            self.screen.line(text)

    def note(self, text: str) -> None:
        """Print some sentences, wrapped into lines."""
        self.say(paragraph(text, min(self.screen.width or WIDTH, WIDTH), "  "))

    def warn(self, text: str) -> None:
        """Print one line of warning, whichever rank it comes from."""
        if self.speaks:
            self.screen.line(text)
        else:
            with suppress(OSError):
                print(printable(text), file=sys.stderr, flush=True)

    def step(self, metrics: dict[str, Any], *, show: bool) -> None:
        """Write the metrics of one step to the file; print them too if ``show``. Raises RankFailure
        if the run folder is gone."""
        if not self._metrics:
            return
        self.last.update(metrics)
        self._metrics.add(metrics)
        self._ended.append(time.monotonic())
        done = metrics["step"]
        if show:
            line = step_line(metrics, self.steps, self._left(done))
            if not self.screen.redraws or "eval_loss" in metrics:
                self.say(line)
            elif self.screen.copy:  # the live line shows the metrics, but does not keep them
                self.screen.copy.add(line)
        if self.screen.redraws:
            self.screen.live(self._progress(done) if done < self.steps else "")

    def _progress(self, done: int) -> str:
        loss, *more = describe(self.last)
        columns = (self.screen.width or 80) - 1  # some terminals wrap after the last column
        return progress_line(done, self.steps, loss, self._left(done), more, columns)

    def _left(self, done: int) -> float | None:
        """Return the seconds that the steps after ``done`` take if each is as long as the median of
        the last ones; None before two times are known."""
        lengths = [after - before for before, after in pairwise(self._ended)]
        return median(lengths) * max(0, self.steps - done) if lengths else None

    def choice(self, measured: Measurements, plan: Plan) -> None:
        """Print the measured times of the candidates, and the plan that was chosen."""
        for timed in (measured.strategies, measured.overlaps):
            if timed:
                self.say("Measured before training, a micro-batch:")
                for line in _timed(timed, plan, self.screen.width):
                    self.say(line)
        for what, note in measured.notes.items():
            self.note(f"{what}: {note}")
        if measured.times:
            alive = ", ".join(str(peak) for peak in peak_activations(plan.schedule).values())
            self.say(f"slack from measured times: at most {alive} micro-batches in flight on the stages, in order")


def _timed(timed: Sequence[TimedTrial], plan: Plan, width: int | None) -> list[str]:
    """Return a table of the candidates, the fastest first."""
    best = min(one.seconds for one in timed)
    header = ("batch slices", "column slices", "sequence parallel", "sharding hides", "ms", "against best", "")
    rows = [
        (str(s.p1), str(s.p2), "yes" if s.sequence_parallel else "no", s.shard_overlap,
         f"{seconds * 1e3:.1f}", f"{seconds / best:.2f}x", "chosen" if s == plan.strategy else "")
        for s, seconds in sorted(((one.strategy, one.seconds) for one in timed), key=lambda each: each[1])
    ]  # fmt: skip
    return table(header, rows, width)


def step_line(metrics: dict[str, Any], steps: int, left: float | None) -> str:
    """Return the line of one of ``steps`` steps, in ``STEP_WIDTH`` columns: the least important
    texts are left out where they do not fit. left: seconds left; None if unknown.

    >>> step_line({"step": 3, "loss": 2.5, "learning_rate": 3e-4, "tokens_per_second": 1234.5}, 40, 75)
    'step  3/40  loss 2.500  lr 3.0e-04  1,234 tokens/s  1:15 left'
    """
    parts = [f"step {metrics['step']:>{len(str(steps))}}/{steps}", *describe(metrics)]
    end = [f"{duration(left)} left"] if left else []
    while len(line := "  ".join(parts + end)) > STEP_WIDTH and len(parts) > 3:
        parts.pop()
    return line if len(line) <= STEP_WIDTH else paragraph(line, STEP_WIDTH, "  ")  # many sets were evaluated


def describe(metrics: dict[str, Any]) -> list[str]:
    """Return metrics as short texts, the loss first, then by importance. exposed, hidden: as
    ``core.record.exposure`` defines them; exposed also as a share of the step."""
    loss = metrics["loss"]
    parts = [f"loss {loss:.3f}" if abs(loss) < 1e5 else f"loss {loss:.3g}"]
    if "eval_loss" in metrics:
        each = {
            name.removeprefix("eval_loss/"): loss for name, loss in metrics.items() if name.startswith("eval_loss/")
        }
        told = ", ".join(f"{name} {loss:.3f}" for name, loss in each.items())
        parts.append(f"eval {metrics['eval_loss']:.3f}" + (f" ({told})" if told else ""))
    if metrics.get("skipped"):
        parts.append(f"{metrics['skipped']} updates skipped")
    if "learning_rate" in metrics:
        parts.append(f"lr {metrics['learning_rate']:.1e}")
    parts.append(f"{metrics['tokens_per_second']:,.0f} tokens/s")
    if metrics.get("hidden") is not None:
        exposed = metrics["exposed_seconds"]
        parts.append(f"exposed {_ms(exposed)} ({exposed / metrics['seconds']:.0%}), hidden {metrics['hidden']:.0%}")
    if metrics.get("mfu") is not None:
        parts.append(f"MFU {metrics['mfu']:.0%}")
    if "idle" in metrics:
        parts.append(f"idle {metrics['idle']:.0%}")
    return parts


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.01 else f"{seconds * 1e3:,.0f} ms"
