"""Report on a run: the findings as plain values (JSON), and as a page of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

from plait.core.base.ignored_input import IgnoredInput
from plait.core.base.text import Column, Part, Shown, Table, counted, duration, in_bytes, seconds_text
from plait.core.runs.evidence import Verdict
from plait.diagnose.measured.compare import Prediction
from plait.diagnose.measured.reading import RecordedRun
from plait.diagnose.measured.recording import Recording
from plait.diagnose.measured.run_files import UniformRun
from plait.diagnose.measured.shares import Drift, MeanStep, StepTimes, drift_of, mean_step, step_range, steps_of
from plait.diagnose.verdicts.bottlenecks import (
    BatchImbalance,
    Late,
    SlowNetwork,
    StageImbalance,
    batches_of,
    late_of,
    slow_network,
    stages_of,
)
from plait.diagnose.verdicts.progress import (
    CheckpointPauses,
    Goodput,
    Loss,
    MemoryUse,
    Utilisation,
    checkpoints_of,
    goodput_of,
    loss_of,
    memory_use,
    utilisation_of,
)
from plait.diagnose.verdicts.stragglers import Straggler, Verdicts, verdicts
from plait.diagnose.verdicts.verdict_words import WORTH, verdict_words
from plait.diagnose.verdicts.what_if import WhatIf, what_if

ROWS = 8
"""The largest number of rows of a table on the report's page."""
WASTED = 1.1
"""Ratio of measured to predicted memory above which the page explains the difference."""


@dataclass(frozen=True, kw_only=True)
class Report(Shown):
    """The findings on a run. name: of the run or trace. axes: degrees of the axes on which ranks
    differ; empty if coordinates are unknown.

    costs: seconds by which a step would be shorter without each straggler; None without spans to
    replay, or if an imported trace does not identify messages. late: a rank whose host is late, for
    imported recordings. network: a network that is slow for all ranks. hang: why the run hung, as
    its launcher recorded it; None if unrecorded. passed_over: skipped content of the run's files.
    """

    name: str
    ranks: int
    axes: Mapping[str, int]
    steps: StepTimes | None
    mean: MeanStep | None
    verdicts: Verdicts
    costs: tuple[float | None, ...]
    what_if: WhatIf | None
    stages: StageImbalance | None
    batches: BatchImbalance | None
    drift: Drift | None
    prediction: Prediction | None = None
    loss: Loss | None = None
    checkpoints: CheckpointPauses | None = None
    goodput: Goodput | None = None
    memory: tuple[MemoryUse, ...] = ()
    utilisation: Utilisation | None = None
    late: Late | None = None
    network: SlowNetwork | None = None
    hang: Verdict | None = None
    passed_over: IgnoredInput = field(default_factory=IgnoredInput)
    notes: tuple[str, ...] = ()

    @property
    def stragglers(self) -> tuple[Straggler, ...]:
        """The named stragglers."""
        return self.verdicts.stragglers

    def to_dict(self) -> dict[str, Any]:
        """Return the values for JSON. Steps are counted from 1, as in metrics.jsonl."""
        spread, mean, what_if = self.verdicts.spread, self.mean, self.what_if
        costs = zip(self.stragglers, self.costs, strict=True)
        return {
            "run": self.name,
            "ranks": self.ranks,
            "hang": self.hang and asdict(self.hang),
            "axes": dict(self.axes),
            "steps": _values(self.steps, steps=("first", "last", "longest_at")),
            "stragglers": [
                _values(one, steps=("since", "until"), without=("parts",)) | {"cost_seconds_per_step": cost}
                for one, cost in costs
            ],
            "late": _values(self.late),
            "network": _values(self.network, steps=("since", "until")),
            "lateness": [_values(one, steps=("since",)) for one in self.verdicts.lateness],
            "nearest": {
                "rank": spread.peer, "z": spread.z, "named_from": spread.named_from, "by": self.verdicts.nearest_by
            },
            "comparable_ranks": self.verdicts.comparable,
            "arrivals": [_values(one) for one in self.verdicts.arrivals],
            "shares": [_values(one) for one in mean.parts] if mean else [],
            "mean_step": _values(mean, steps=("first", "last"), without=("parts",)),
            "what_if": what_if
            and _values(what_if, ("slowdown",)) | {"worst": [_values(one) for one in what_if.worst[:5]]},
            "stages": _values(self.stages),
            "micro_batches": _values(self.batches),
            "drift": _values(self.drift, ("by", "of", "share")),
            "predicted": self.prediction and _prediction(self.prediction, self.steps),
            "loss": _values(self.loss),
            "checkpoints": _values(self.checkpoints),
            "goodput": _values(self.goodput, ("share",)),
            "memory": [_values(one) for one in self.memory],
            "utilisation": _values(self.utilisation),
            "passed_over": self.passed_over.rows(),
            "notes": list(self.notes),
        }  # fmt: skip

    def parts(self) -> Iterator[Part]:
        """Yield the parts of the page for people."""
        axes = ", ".join(f"{axis} {n}" for axis, n in self.axes.items())
        yield Table(f"{self.name}: {counted(self.ranks, 'rank')}{f' ({axes})' if axes else ''}")
        for told in (_hang, _steps, verdict_words, _shares, _not_equal, _predicted, _memory, _progress):
            yield from told(self)
        yield from (f"note: {note}" for note in self.notes)


def _values(one: Any, more: Sequence[str] = (), *, steps: Sequence[str] = (), without: Sequence[str] = ()) -> Any:
    """Return the fields of a value as a dictionary, without ``without``, and with its properties
    ``more``; None for None. steps: fields that count steps from 0, returned counted from 1."""
    if one is None:
        return None
    values: dict[str, Any] = one._asdict() if hasattr(one, "_asdict") else dict(one.__dict__)
    for name in steps:
        values[name] = None if values[name] is None else values[name] + 1
    found = {
        name: list(cast("tuple[Any, ...]", value)) if type(value) is tuple else value
        for name, value in values.items()
        if name not in without
    }
    return found | {name: getattr(one, name) for name in more}


def _prediction(found: Prediction, steps: StepTimes | None) -> dict[str, Any]:
    return _values(found, steps=("first", "last"), without=("seconds", "steps", "ranks")) | {
        "rows": [row.named("axis") for row in found.rows],
        "overlap": [_values(one, ("missed",)) for one in found.overlap],
        "step_seconds": found.seconds and {"predicted": found.seconds, "measured": steps and steps.median},
        "count": found.steps,
    }


# ---- the page ----


def _hang(report: Report) -> Iterator[Part]:
    if report.hang:
        yield (f"{report.hang.heading}. {report.hang.why}")
        for other in report.hang.also:
            yield (f"Besides: {other.why}")
        yield (f"plait diagnose {report.name} --hang says who waited for whom.")
        yield ""


def _steps(report: Report) -> Iterator[Part]:
    steps = report.steps
    if not steps:
        return
    whose = ", of each step's longest rank"
    if steps.tokens_per_second:
        whose = f", of rank 0; {steps.tokens_per_second:,.0f} tokens/s of all ranks in the median step"
    yield (
        f"{steps.count} steps ({step_range(steps.first, steps.last)}), median "
        f"{seconds_text(steps.median)} "
        f"(10 % under {seconds_text(steps.p10)}, 10 % over {seconds_text(steps.p90)}), "
        f"longest {seconds_text(steps.longest)} at step {steps.longest_at + 1}{whose}"
    )
    if report.utilisation:
        yield report.utilisation.sentence


# ---- breakdown of the step ----


def _shares(report: Report) -> Iterator[Part]:
    from plait.diagnose.measured.recording import AFTER
    from plait.diagnose.measured.shares import NAMES

    mean, drift = report.mean, report.drift
    rows = [
        (
            f"{NAMES.get(one.what, one.what)}{', between steps' if one.what in AFTER else ''}",
            one.seconds, f"{'+' if one.what in AFTER else ''}{one.share:.1%}", one.late,
        )
        for one in sorted(mean.parts if mean else (), key=lambda one: one.what in AFTER)
        if one.share >= WORTH
    ]  # fmt: skip
    if mean and rows:
        yield ""
        some = 4 if any(row[3] is not None for row in rows) else 3
        header = ("where it goes", Column("time", seconds_text), "share",
                  Column("waiting for the last rank", seconds_text, none=""))  # fmt: skip
        title = (
            f"the mean rank's mean step, {seconds_text(mean.seconds)}, over "
            f"{counted(report.ranks, 'rank')} and "
            f"{counted(mean.count, 'step')} ({step_range(mean.first, mean.last)})"
        )
        yield Table(title, header[:some], [row[:some] for row in rows[: ROWS + 2]])
    if drift:
        word = "longer" if drift.share > 0 else "shorter"
        yield (
            f"Steps became {abs(drift.share):.0%} {word}: {seconds_text(drift.first)} in "
            f"the first quarter, {seconds_text(drift.last)} in the last{_grew(drift)}."
        )


def _grew(drift: Drift) -> str:
    """Return a phrase with the part of the step that changed most, and its share of the change."""
    from plait.diagnose.measured.shares import NAMES

    if not drift.grew:
        return " (medians); the part that changed is unknown: an earlier version wrote these steps' sums"
    of = " (the mean rank's means over the middle half of each quarter by length); "
    what = f"{NAMES.get(drift.grew, drift.grew)} ({seconds_text(drift.before)} to {seconds_text(drift.after)})"
    if drift.of > 1:
        return f"{of}{what} changed by more than that, other parts the other way"
    return f"{of}{drift.of:.0%} of that is {what}{', the largest part' if drift.of < 0.5 else ''}"


def _not_equal(report: Report) -> Iterator[Part]:
    from plait.diagnose.verdicts.bottlenecks import ALIKE, HEAVY, UNEVEN

    stages, batches = report.stages, report.batches
    if stages and stages.ratio >= HEAVY and not report.stragglers:
        yield (
            f"Stage {stages.heaviest} computes {stages.ratio:.2f} times as long as the "
            "other stages' mean, over their ranks and all steps but the first: no rank's "
            "fault; other stage boundaries would help."
        )
    if batches and batches.spread >= UNEVEN and batches.alike >= ALIKE and batches.turns >= 0.5:
        yield (
            "Micro-batches are uneven: in a rank's step their computation varies by "
            f"{batches.spread:.0%} (median of ranks and steps), forward and backward "
            f"alike, and a step's slowest rank, which computes {batches.longer:.0%} longer "
            "than its stage's mean (median of steps), is another one in most steps. That "
            "is the data's fault, not a machine's."
        )


def _predicted(report: Report) -> Iterator[Part]:
    found = report.prediction
    if not found:
        return
    from plait.diagnose.measured.compare import MISSED

    yield ""
    rows = [
        (row.kind, row.where or None, row.direction or None, row.predicted or 0.0, row.measured, row.ratio)
        for row in found.rows[:ROWS]
    ]
    title = (
        "compared with the plan's measured costs: the mean rank's mean step, over "
        f"{counted(found.ranks, 'rank')} and "
        f"{counted(found.steps, 'step')} ({step_range(found.first, found.last)})"
    )
    header = ("what", "axis", "direction", Column("predicted ms", _ms), Column("measured ms", _ms),
              Column("ratio", ".2f"))  # fmt: skip
    yield Table(title, header, rows)
    step = report.steps.median if report.steps else 0.0
    for one in found.overlap:
        if one.missed >= MISSED * step:
            yield (
                f"{one.axis}: {one.planned:.0%} of its communication was to be hidden, and "
                f"{one.measured:.0%} was: "
                f"{seconds_text(one.missed)} of that mean step, which overlap was to save."
            )


def _memory(report: Report) -> Iterator[Part]:
    if not report.memory:
        return
    yield ""
    rows = [
        (one.place, one.predicted, one.measured,
         one.measured / one.predicted if one.predicted and one.measured else None, one.rank, one.process)
        for one in report.memory[:ROWS]
    ]  # fmt: skip
    header = ("tensors of a rank, at most", Column("predicted", in_bytes), Column("measured", in_bytes),
              Column("ratio", ".2f"), "rank", Column("its process", in_bytes))  # fmt: skip
    yield Table("memory in the second step after each start: of each stage the rank with the most", header, rows)
    if any(ratio and ratio > WASTED for *_, ratio, _, _ in rows):
        yield (
            "On a CPU what a process grows by in a step is measured: buffers of libraries "
            "and what the C library's allocator wastes are in it and are no tensors, 10 "
            "to 40 % on a quiet machine and more on a busy one."
        )


# ---- progress ----


def _progress(report: Report) -> Iterator[Part]:
    said: list[str] = []
    loss = report.loss
    if loss:
        evaluated = f", last evaluation {loss.evaluation:.3f}" if loss.evaluation is not None else ""
        skipped = f", {loss.skipped} updates skipped" if loss.skipped else ""
        said.append(
            f"loss of all ranks, first to last step: {loss.first:.3f} to {loss.last:.3f} "
            f"(least {loss.least:.3f}{evaluated}{skipped})"
        )
    saved = report.checkpoints
    if saved:
        share = f", {saved.share:.1%} of the time" if saved.share is not None else ""
        each, last = "", ""
        if saved.seconds is not None:
            each = f", each pauses training for {seconds_text(saved.seconds)} (median, the slowest rank's{share})"
        if saved.last is not None:
            last = f", the end waits {seconds_text(saved.last)} for the last (the slowest rank's)"
        said.append(f"{counted(saved.count, 'checkpoint')} kept{each}{last}")
    good = report.goodput
    if good:
        said.append(_goodput(good))
    if said:
        yield ""
        yield ("; ".join(said) + ".")


def _goodput(good: Goodput) -> str:
    attempts = f" in {good.attempts} attempts" if good.attempts > 1 else ""
    redone = f", {good.redone} step{'s' if good.redone > 1 else ''} done again" if good.redone else ""
    apart = f"; no launcher ran for another {duration(good.apart)}" if good.apart >= 1 else ""
    spent = f"{duration(good.productive)} of {duration(good.total)} in steps"
    return f"goodput {good.share:.0%}: {spent}{attempts}{redone}{apart}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


def explain(
    recording: Recording,
    name: str,
    *,
    run: RecordedRun | None = None,
    prediction: Prediction | None = None,
    memory: Mapping[str, int] | None = None,
    notes: Sequence[str] = (),
) -> Report:
    """Return the report on a recording. run: the run's folder, for metrics, checkpoints and
    attempts. memory: predicted bytes of a rank, by stage."""
    said, metrics = run.import_remarks if run else None, run.metrics if run else ()
    some = run.uniform if run else UniformRun(recording, metrics)
    unknown = set(said.unknown) if said else set[int]()
    found = verdicts(recording)
    kept = tuple(one for one in found.stragglers if one.what == "slow link" or not unknown & set(one.ranks))
    found = replace(found, stragglers=kept, arrivals=found.arrivals if said is None or said.shared_clock else ())
    replayed, costs = _costs(some.recording, found, linked=not (said and _unlinked(recording)))
    found = replace(found, stragglers=tuple(costs))
    in_steps = said is None or said.steps
    late = None
    if said and said.shared_clock and not found.stragglers:
        late = late_of(recording, in_steps=in_steps)
    late = None if late and late.rank in unknown else late
    steps = steps_of(some.recording, some.metrics) if in_steps else None
    planned = run.plan.hosts.rank_rate if run and run.plan and run.plan.hosts else None
    links = any(one.what == "slow link" for one in found.stragglers)
    ours = run is not None and bool(run.plan or metrics or run.attempts)
    return Report(
        name=name,
        ranks=recording.ranks,
        axes=_axes(recording) if run is None or run.plan else {},
        steps=steps,
        mean=mean_step(some.recording) if in_steps else None,
        verdicts=found,
        costs=tuple(costs.values()),
        what_if=replayed,
        stages=stages_of(some.recording),
        batches=batches_of(some.recording),
        drift=drift_of(some.recording),
        prediction=prediction,
        loss=loss_of(metrics),
        checkpoints=checkpoints_of(recording, run.folder) if run else None,
        goodput=goodput_of(recording, run.attempts, metrics, run.last_written) if run and ours else None,
        memory=memory_use(metrics, memory or {}),
        utilisation=utilisation_of(some.metrics, steps.median) if steps else None,
        late=late,
        network=None if links else slow_network(some.recording, planned, found.stragglers),
        passed_over=run.passed_over if run else IgnoredInput(),
        notes=(*notes, *filter(None, (some.note,))),
    )


def _costs(
    recording: Recording, found: Verdicts, *, linked: bool
) -> tuple[WhatIf | None, dict[Straggler, float | None]]:
    """Return (the replay of the recording, seconds by which a step would be shorter without each
    straggler). A slow host whose ranks together cost nothing is replaced by its single ranks.
    linked: True if the replay propagates the delays of all transfers; otherwise costs are None."""
    slow = [part for one in found.stragglers if one.what != "slow link" for part in (one, *one.parts)]
    since = max((one.since for one in found.stragglers), default=None)
    replayed = what_if(recording, [one.ranks for one in slow], since)
    costs = dict(zip(slow, replayed.costs, strict=True)) if replayed and linked else {}
    kept = [
        part for one in found.stragglers
        for part in (one.parts if one.parts and costs.get(one, 1.0) <= 0 else (one,))
    ]  # fmt: skip
    if replayed and costs:
        replayed = replace(replayed, costs=tuple(costs[one] for one in kept if one in costs))
    return replayed, {one: costs.get(one) for one in kept}


def _axes(recording: Recording) -> dict[str, int]:
    return {axis: n for axis in ("pp", "dp", "cp", "tp") if (n := recording.grid[axis].n_unique()) > 1}


def _unlinked(recording: Recording) -> bool:
    """True if a transfer's other end is unknown, so that no replay propagates its delay."""
    transfers = recording.spans.filter(kind="transfer")
    return bool(transfers["meeting"].is_null().any())
