"""A run's timeline: its summary, its export as a trace for other tools, and its comparison with a
plan or another run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.base.ignored_input import IgnoredInput
from plait.core.base.text import Column, Part, Shown, Table, counted

if TYPE_CHECKING:
    from plait.core.record.exposure import Exposure
    from plait.diagnose.measured.compare import Comparison, Unmatched
    from plait.diagnose.measured.reading import RecordedRun
    from plait.diagnose.measured.recording import Recording
    from plait.diagnose.series import TimelineSummary

COMPARED = 50
"""The number of steps that are compared, the last ones."""
EXPORTED = 3
"""The number of steps in a trace if the caller names none, the last ones."""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _exposed(exposure: Exposure, waited: float | None = None) -> str:
    """Return text such as ``17.3 ms a step, exposed 11.6 ms (5.0 ms of it in waits), hidden
    33%``."""
    waits = f" ({waited * 1e3:.1f} ms of it in waits)" if waited is not None else ""
    exposed = f"exposed {exposure.exposed * 1e3:.1f} ms{waits}, hidden {exposure.fraction:.0%}"
    return f"{exposure.total * 1e3:.1f} ms a step, {exposed}"


@dataclass(frozen=True)
class RunTimeline(Shown):
    """The measured timeline of a run, for steps with batches of one size."""

    run: Path
    recorded: RecordedRun

    @cached_property
    def summary(self) -> TimelineSummary:
        """The figures of the timeline."""
        from plait.diagnose.series import summarise

        return summarise(self.recorded.uniform.recording)

    def to_dict(self) -> dict[str, Any]:
        """Return seconds of a rank's mean step by kind, and communication with its hidden share,
        for JSON: over all ranks, and as ``hidden_of_rank_0`` of rank 0, which ``metrics.jsonl``
        describes. Steps count from 0."""
        found = self.summary

        def rows(seconds: str) -> list[dict[str, Any]]:
            return [
                {"kind": one.kind, "site": one.site, "direction": one.direction, "seconds": getattr(one, seconds)}
                for one in found.whats
                if getattr(one, seconds) is not None
            ]

        return {
            "spans": found.spans,
            "sampled_spans": found.sampled,
            "steps": len(found.every),
            "last_steps": len(found.last),
            "hidden": found.hidden.fraction,
            "hidden_of_rank_0": found.hidden_first.fraction,
            "communication": {**found.hidden._asdict(), "waited": found.waited},
            "communication_of_all": found.hidden_of_all and found.hidden_of_all._asdict(),
            "per_step": rows("seconds"),
            "per_step_of_all": rows("all_steps"),
            "hidden_by_step": [{"first": g.first, "last": g.last, "hidden": g.hidden.fraction} for g in found.trend],
            "slowest": [one._asdict() for one in found.slowest],
            "notes": list(self.notes),
            "passed_over": self.recorded.passed_over.rows(),
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on the run's files, and on which of its steps the timeline covers."""
        return (*self.recorded.notes, *filter(None, (self.recorded.uniform.note,)))

    def parts(self) -> Iterator[Part]:
        """Yield milliseconds by kind over the steps whose spans are kept, and over all steps;
        hidden communication."""
        from plait.diagnose.measured.shares import step_range

        found = self.summary
        yield from self.notes
        sets = [f"{word}: over steps {step_range(steps[0], steps[-1])}"
                for word, steps in (("last", found.last), ("all", found.every)) if steps]  # fmt: skip
        title = f"{self.run}: ms of the mean rank's mean step; {', '.join(sets)}"
        yield Table(title, ("what", "where", "direction", Column("last", _ms), Column("all", _ms)), found.whats)
        if found.hidden.fraction is not None:
            yield f"communication, over the last: {_exposed(found.hidden, found.waited)}{_ranks_note(found)}"
        if found.hidden_of_all and found.hidden_of_all.fraction is not None and found.every != found.last:
            yield f"communication, over all: {_exposed(found.hidden_of_all)}"
        if len(found.trend) > 1 and found.hidden.fraction is not None:
            shares = (f"{step_range(one.first, one.last)}: {one.hidden.fraction or 0:.0%}" for one in found.trend)
            yield f"hidden, the mean of {counted(len(found.ranks), 'rank')} in steps {', '.join(shares)}"
        if found.slowest:
            slow = (f"{one.step + 1} ({one.seconds:.2f} s, {one.times:.1f} times the median)" for one in found.slowest)
            whose = "rank 0" if self.recorded.metrics else "each step's longest rank"
            yield f"slowest steps, of {whose}: {', '.join(slow)}"

    def against(self, other: Path | str) -> TimelineComparison:
        """Compare the run with a plan's prediction (``plan.json``), or with another run's folder.

        Raises JobError for a plan that the run has not obeyed, DataError for files that cannot be
        read.
        """
        from plait.diagnose.measured.compare import UNMEASURED, compare
        from plait.diagnose.measured.reading import last_steps, planned_kinds, read_timeline, uniform_batches

        other, over = Path(other), IgnoredInput()
        tables = uniform_batches(read_timeline(self.run), self.run)
        recent, notes = last_steps(tables.spans, COMPARED), [*tables.notes]
        over.add(tables.passed_over)
        if other.is_dir():
            there = uniform_batches(read_timeline(other), other)
            notes += [f"{other}: {note}" for note in there.notes]
            over.add(there.passed_over, str(other))
            joined, planned = compare(there.spans, recent, timed=None), False
        else:
            steps = recent["step"].unique().sort().to_list()
            predicted, timed = _predicted(self.run, tables.plan_hash, other, steps)
            notes += [] if timed else [UNMEASURED]
            joined, planned = compare(predicted, planned_kinds(recent), timed=timed), True
        return TimelineComparison(self.run, other, joined, planned, notes, over)


@dataclass(frozen=True)
class TimelineComparison(Shown):
    """A comparison of two timelines. predicted: True if the other timeline is a plan's. notes:
    sentences on files and on the plan. over: counts of input that readers ignored."""

    run: Path
    other: Path
    result: Comparison
    predicted: bool
    notes: Sequence[str]
    over: IgnoredInput

    def to_dict(self) -> dict[str, Any]:
        """Return seconds of both timelines by kind, spans that one timeline lacks, and
        communication."""
        found = self.result

        def communication(comm: Exposure | None) -> dict[str, float | None] | None:
            return comm and {**comm._asdict(), "hidden": comm.fraction}

        return {
            "run": str(self.run),
            "against": str(self.other),
            "steps": found.steps,
            "ranks": found.ranks,
            "rows": self._rows("").records(),
            "never_seen": _unmatched("", found.not_measured).records(),
            "not_planned": _unmatched("", found.not_planned).records(),
            "communication": {"predicted": communication(found.predicted), "measured": communication(found.measured)},
            "notes": list(self.notes),
            "passed_over": self.over.rows(),
        }

    def parts(self) -> Iterator[Part]:
        """Yield a table of the spans in both, then the spans in only one, then communication."""
        from plait.diagnose.measured.shares import step_range

        found = self.result
        here, there = ("", "") if self.predicted else (" (here)", " (there)")
        title = (
            f"{self.run}{here} against {self.other}{there}: the mean rank's mean step, "
            f"over {counted(len(found.ranks), 'rank')} and steps "
            f"{step_range(found.steps[0], found.steps[-1])}"
        )
        yield self._rows(title) if any(row.predicted is not None for row in found.rows) else Table(title)
        words = ("planned, never seen", "seen, not planned")
        words = words if self.predicted else (f"only in {self.other}", f"only in {self.run}")
        for word, unmatched in zip(words, (found.not_measured, found.not_planned), strict=True):
            title = f"{word}: {'in that mean step' if unmatched else 'nothing'}"
            yield _unmatched(title, unmatched) if unmatched else Table(title)
        for word, comm in zip(self._words, (found.predicted, found.measured), strict=True):
            if comm and comm.fraction is not None:
                exposed = f"{_ms(comm.exposed)} of {_ms(comm.total)} ms ({comm.fraction:.0%} hidden)"
                yield f"exposed communication, {word}: {exposed} of that mean step"
        yield from self.notes

    @property
    def _words(self) -> tuple[str, str]:
        return ("predicted", "measured") if self.predicted else ("there", "here")

    def _rows(self, title: str) -> Table:
        first, second = (f"{word} ms" if self.predicted else f"ms {word}" for word in self._words)
        header = (
            Column("what", key="kind"), Column("where", key="site"), "direction", Column(first, _ms, "predicted"),
            Column(second, _ms, "measured"), Column("ratio", ".2f"),
        )  # fmt: skip
        return Table(title, header, [(*row, row.ratio) for row in self.result.rows])


def _ranks_note(summary: TimelineSummary) -> str:
    """Return a sentence on the ranks that the communication covers, if several are known, and on
    rank 0's share, which the run's log lines show."""
    if len(summary.ranks) < 2:
        return ""
    own = summary.hidden_first.fraction
    mean = f"; the mean of {len(summary.ranks)} ranks"
    return mean if own is None else f"{mean} (rank 0 alone, as in the log and metrics.jsonl: hidden {own:.0%})"


def _unmatched(title: str, spans: Sequence[Unmatched]) -> Table:
    header = (
        Column("what", key="kind"), Column("where", key="site"), "direction", Column("number", ".3g", "count"),
        Column("ms", _ms, "seconds"), Column("such as", key="example"),
    )  # fmt: skip
    return Table(title, header, spans)


def read_run_timeline(run: Path | str) -> RunTimeline:
    """Return the timeline of a run's folder, for steps with batches of one size. Raises
    DataError."""
    from plait.diagnose.measured.reading import read_run

    return RunTimeline(Path(run), read_run(Path(run)))


def _predicted(run: Path, obeyed: str, file: Path, steps: Sequence[int]) -> tuple[Any, Collection[str]]:
    """Return predicted spans of ``steps`` as a table, and the kinds whose times come from measured
    costs. Raises JobError for a plan that the run has not obeyed."""
    from plait.core.base.errors import JobError
    from plait.core.job.plan import Plan
    from plait.diagnose.measured.compare import kinds_of_measured_costs, table_of
    from plait.plan.search.simulate import simulate_plan

    plan = Plan.read(file)
    if plan.key != obeyed:
        problem = f"is plan {plan.key[:12]}, and the last steps in {run} were of plan {obeyed[:12]}"
        raise JobError(problem, file=str(file), fix=f"The plan that it obeyed is {run / 'plan.json'}")
    table = table_of(simulate_plan(plan).timeline(steps))
    return table, kinds_of_measured_costs(table) if plan.costs else ()


# ---- traces for other tools ----


@dataclass(frozen=True)
class ExportedTrace:
    """A trace that was written: its numbers of spans, ranks and steps. notes: sentences on the
    run."""

    spans: int
    ranks: int
    steps: int
    notes: Sequence[str]


def export_trace(
    run: Path, out: Path, ranks: Sequence[int] | None = None, steps: Sequence[int] | None = None
) -> ExportedTrace:
    """Write ranks and steps of a run as a trace for ui.perfetto.dev: JSON if the file's name ends
    in .json, else Perfetto's own format. ranks: None: all. steps: from 0; None: the last three.
    Raises DataError if the run kept no such spans, OSError if the file cannot be written."""
    from plait.diagnose.measured.reading import read_run
    from plait.diagnose.perfetto import write_json, write_perfetto

    read = read_run(run)
    chosen = _chosen(read.recording, ranks, steps)
    write = write_json if out.suffix == ".json" else write_perfetto
    count = write(read.recording.chosen(*chosen), out, read.recording.grid)
    return ExportedTrace(count, len(chosen[0]), len(chosen[1]), read.notes)


def _chosen(
    recording: Recording, ranks: Sequence[int] | None, steps: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    """Return (the wanted ranks, the wanted steps) that the recording has. Raises DataError if it
    has none of them."""
    from plait.core.base.errors import DataError

    there = recording.spans["step"].unique().sort().to_list(), recording.spans["rank"].unique().sort().to_list()
    wanted = there[0][-EXPORTED:] if steps is None else steps
    both = sorted({*there[1]}.intersection(there[1] if ranks is None else ranks)), sorted({*there[0]} & {*wanted})
    if recording.chosen(*both).is_empty():
        first, last = (there[0][0] + 1, there[0][-1] + 1) if there[0] else (0, 0)
        raise DataError(
            f"there are no spans of these ranks and steps: spans are kept of steps {first} "
            f"to {last}, "
            f"ranks {there[1][0] if there[1] else 0} to {there[1][-1] if there[1] else 0}"
        )
    return both
