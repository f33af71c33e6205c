"""The report of a run: what was found, as plain values, and a page that tells it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from plait.core.base.passed_over import PassedOver
from plait.core.base.text import Column, Part, Shown, Table, counted, duration, in_bytes
from plait.core.runs.evidence import Verdict
from plait.diagnose.compare import Prediction
from plait.diagnose.imbalance import BatchImbalance, StageImbalance
from plait.diagnose.late import Late
from plait.diagnose.memory_use import MemoryUse
from plait.diagnose.network import SlowNetwork
from plait.diagnose.peers import Lateness
from plait.diagnose.progress import CheckpointPauses, Goodput, Loss
from plait.diagnose.shares import Drift, MeanStep, StepTimes
from plait.diagnose.stragglers import Straggler, Verdicts
from plait.diagnose.utilisation import Utilisation
from plait.diagnose.verdict_words import WORTH, short_time, verdict_words
from plait.diagnose.what_if import WhatIf

VERSION = 2
ROWS = 8
"""Rows of a table on the page, at most."""
WASTED = 1.1
"""Memory measured, of what is predicted, from which on it is said what else is in it."""


@dataclass(frozen=True, kw_only=True)
class Report(Shown):
    """name: of the run or trace. axes: degrees, as far as ranks differ on them; none where nobody knows where
    ranks stand. costs: seconds by which a step would be shorter without each straggler; None where no spans
    were kept to replay, or where traces of others do not tell which messages belong together. late: of
    recordings of others, a rank whose host is late. network: one that is slow for all who share it. hang: why
    it hung, by what its launcher wrote down; None where nothing was. passed_over: what of its files was not
    taken."""

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
    passed_over: PassedOver = field(default_factory=PassedOver)
    notes: tuple[str, ...] = ()

    @property
    def stragglers(self) -> tuple[Straggler, ...]:
        """Stragglers that are named."""
        return self.verdicts.stragglers

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON. Steps are counted from 1, as in metrics.jsonl."""
        spread = self.verdicts.spread
        return {
            "version": VERSION,
            "run": self.name,
            "ranks": self.ranks,
            "hang": self.hang and asdict(self.hang),
            "axes": dict(self.axes),
            "steps": self.steps and self.steps._asdict() | _counted(
                first=self.steps.first, last=self.steps.last, longest_at=self.steps.longest_at
            ),
            "stragglers": [
                _straggler(one, cost) for one, cost in zip(self.stragglers, self.costs, strict=True)
            ],
            "late": self.late and self.late._asdict(),
            "network": self.network
            and self.network._asdict() | _counted(since=self.network.since, until=self.network.until),
            "lateness": [_late_rank(one) for one in self.verdicts.lateness],
            "nearest": {
                "rank": spread.unit, "z": spread.z, "named_from": spread.named_from, "by": self.verdicts.nearest_by
            },
            "comparable_ranks": self.verdicts.comparable,
            "arrivals": [vars(one) for one in self.verdicts.arrivals],
            "shares": [one._asdict() for one in self.mean.parts] if self.mean else [],
            "mean_step": self.mean and {"seconds": self.mean.seconds, "count": self.mean.count}
            | _counted(first=self.mean.first, last=self.mean.last),
            "what_if": self.what_if and _what_if(self.what_if),
            "stages": self.stages and self.stages._asdict(),
            "micro_batches": self.batches and self.batches._asdict(),
            "drift": self.drift
            and {**self.drift._asdict(), "by": self.drift.by, "of": self.drift.of, "share": self.drift.share},
            "predicted": self.prediction and _prediction(self.prediction, self.steps),
            "loss": self.loss and self.loss._asdict(),
            "checkpoints": self.checkpoints and self.checkpoints._asdict(),
            "goodput": self.goodput and {**self.goodput._asdict(), "share": self.goodput.share},
            "memory": [one._asdict() for one in self.memory],
            "utilisation": self.utilisation and self.utilisation._asdict(),
            "passed_over": self.passed_over.rows(),
            "notes": list(self.notes),
        }  # fmt: skip

    def parts(self) -> Iterator[Part]:
        """A page for people."""
        axes = ", ".join(f"{axis} {n}" for axis, n in self.axes.items())
        yield Table(f"{self.name}: {counted(self.ranks, 'rank')}{f' ({axes})' if axes else ''}")
        for told in (_hang, _steps, verdict_words, _shares, _not_equal, _predicted, _memory, _progress):
            yield from told(self)
        yield from (f"note: {note}" for note in self.notes)


def _counted(**steps: int) -> dict[str, int]:
    return {key: step + 1 for key, step in steps.items()}


def _late_rank(one: Lateness) -> dict[str, Any]:
    return one._asdict() | (_counted(since=one.since) if one.since is not None else {})


def _straggler(one: Straggler, cost: float | None) -> dict[str, Any]:
    return {
        **{name: value for name, value in vars(one).items() if name != "parts"},
        "ranks": list(one.ranks), "hosts": list(one.hosts),
        **_counted(since=one.since, until=one.until), "cost_seconds_per_step": cost,
    }  # fmt: skip


def _what_if(found: WhatIf) -> dict[str, Any]:
    worst = [worker._asdict() for worker in found.worst[:5]]
    return {**vars(found), "worst": worst, "costs": list(found.costs), "slowdown": found.slowdown}


def _prediction(found: Prediction, steps: StepTimes | None) -> dict[str, Any]:
    return {
        "rows": [row.named("axis") for row in found.rows],
        "overlap": [{**one._asdict(), "missed": one.missed} for one in found.overlap],
        "step_seconds": found.seconds and {"predicted": found.seconds, "measured": steps and steps.median},
        "matched": found.matched,
        "count": found.steps,
        **_counted(first=found.first, last=found.last),
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
    speed = f", {steps.tokens_per_second:,.0f} tokens/s" if steps.tokens_per_second else ""
    yield (
        f"{steps.count} steps ({steps.first + 1} to {steps.last + 1}), median {short_time(steps.median)} (10 % under "
        f"{short_time(steps.p10)}, 10 % over {short_time(steps.p90)}), longest {short_time(steps.longest)} at step "
        f"{steps.longest_at + 1}{speed}"
    )
    if report.utilisation:
        yield report.utilisation.told


# ---- where steps go ----


def _shares(report: Report) -> Iterator[Part]:
    from plait.diagnose.recording import AFTER
    from plait.diagnose.shares import NAMES

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
        header = ("where it goes", Column("time", short_time), "share",
                  Column("for the last to come", short_time, none=""))  # fmt: skip
        title = (
            f"the mean rank's mean step, {short_time(mean.seconds)}, over {counted(mean.count, 'step')} ({_span(mean)})"
        )
        yield Table(title, header[:some], [row[:some] for row in rows[: ROWS + 2]])
    if drift:
        word = "longer" if drift.share > 0 else "shorter"
        yield (
            f"Steps became {abs(drift.share):.0%} {word}: {short_time(drift.first)} in the first quarter, "
            f"{short_time(drift.last)} in the last{_grew(drift)}."
        )


def _span(mean: MeanStep) -> str:
    return f"{mean.first + 1} to {mean.last + 1}" if mean.count > 1 else f"{mean.first + 1}"


def _grew(drift: Drift) -> str:
    """The part that changed most, and its share of the change."""
    from plait.diagnose.shares import NAMES

    if not drift.grew:
        return "; what changed is not known of steps whose sums an earlier version wrote"
    what = f"{NAMES.get(drift.grew, drift.grew)} ({short_time(drift.before)} to {short_time(drift.after)})"
    if drift.of > 1:
        return f"; {what} changed by more than that, other parts the other way"
    return f"; {drift.of:.0%} of that is {what}{', the largest part' if drift.of < 0.5 else ''}"


def _not_equal(report: Report) -> Iterator[Part]:
    from plait.diagnose.imbalance import ALIKE, HEAVY, UNEVEN

    stages, batches = report.stages, report.batches
    if stages and stages.ratio >= HEAVY and not report.stragglers:
        yield (
            f"Stage {stages.heaviest} computes {stages.ratio:.2f} times as long as the other stages' mean: no rank's "
            "fault; other bounds between stages would help."
        )
    if batches and batches.spread >= UNEVEN and batches.alike >= ALIKE and batches.turns >= 0.5:
        yield (
            f"Micro-batches are uneven: their computation varies by {batches.spread:.0%}, forward and backward alike, "
            f"and a step's slowest rank, which computes {batches.longer:.0%} longer than its stage's mean, is "
            "another one in most steps. That is the data's fault, not a machine's."
        )


def _predicted(report: Report) -> Iterator[Part]:
    found = report.prediction
    if not found:
        return
    from plait.diagnose.compare import MISSED

    yield ""
    rows = [
        (row.kind, row.where or None, row.direction or None, row.predicted or 0.0, row.measured, row.ratio)
        for row in found.rows[:ROWS]
    ]
    title = f"against the plan, by the costs that it was measured with, over {counted(found.steps, 'step')} " \
        f"({found.first + 1} to {found.last + 1})"  # fmt: skip
    header = ("what", "axis", "direction", Column("predicted ms", _ms), Column("measured ms", _ms),
              Column("ratio", ".2f"))  # fmt: skip
    yield Table(title, header, rows)
    step = report.steps.median if report.steps else 0.0
    for one in found.overlap:
        if one.missed >= MISSED * step:
            yield (
                f"{one.axis}: {one.planned:.0%} of its communication was to be hidden, and {one.measured:.0%} was: "
                f"{short_time(one.missed)} of a step that overlap was to save."
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
    yield Table("", header, rows)
    if any(ratio and ratio > WASTED for *_, ratio, _, _ in rows):
        yield (
            "On a CPU what a process grows by in a step is measured: buffers of libraries and what the C library's "
            "allocator wastes are in it and are no tensors, 10 to 40 % on a quiet machine and more on a busy one."
        )


# ---- how it got on ----


def _progress(report: Report) -> Iterator[Part]:
    said: list[str] = []
    loss = report.loss
    if loss:
        evaluated = f", evaluation {loss.evaluation:.3f}" if loss.evaluation is not None else ""
        skipped = f", {loss.skipped} updates skipped" if loss.skipped else ""
        said.append(f"loss {loss.first:.3f} to {loss.last:.3f} (least {loss.least:.3f}{evaluated}{skipped})")
    saved = report.checkpoints
    if saved:
        share = f" ({saved.share:.1%} of the time)" if saved.share is not None else ""
        each = f", each pauses training for {short_time(saved.seconds)}{share}" if saved.seconds is not None else ""
        last = f", the end waits {short_time(saved.last)} for the last" if saved.last is not None else ""
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
    apart = f"; beside that nobody ran it for {duration(good.apart)}" if good.apart >= 1 else ""
    spent = f"{duration(good.productive)} of {duration(good.total)} in steps"
    return f"goodput {good.share:.0%}: {spent}{attempts}{redone}{apart}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"
