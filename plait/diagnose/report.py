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
from plait.diagnose.progress import CheckpointPauses, Goodput, Loss
from plait.diagnose.shares import Drift, StepShare, StepTimes
from plait.diagnose.stragglers import Straggler, Verdicts
from plait.diagnose.utilisation import Utilisation
from plait.diagnose.what_if import WhatIf

VERSION = 1
ROWS = 8
"""Rows of a table on the page, at most."""
WORTH = 0.001
"""Share of a step from which on a row of it is shown."""
WASTED = 1.1
"""Memory measured, of what is predicted, from which on it is said what else is in it."""


@dataclass(frozen=True, kw_only=True)
class Report(Shown):
    """name: of the run or trace. axes: degrees, as far as ranks differ on them; none where nobody knows where
    ranks stand. costs: seconds by which a step would be shorter without each straggler; None where no spans
    were kept to replay, or where traces of others do not tell which messages belong together. late: of
    recordings of others, a rank whose host is late. hang: why it hung, by what its launcher wrote down; None
    where nothing was. passed_over: what of its files was not taken."""

    name: str
    ranks: int
    axes: Mapping[str, int]
    steps: StepTimes | None
    shares: tuple[StepShare, ...]
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
            "healthiest": {
                "rank": spread.unit, "effect": spread.effect, "z": spread.z, "named_from": spread.named_from
            },
            "comparable_ranks": self.verdicts.comparable,
            "arrivals": [vars(one) for one in self.verdicts.arrivals],
            "shares": [one._asdict() for one in self.shares],
            "what_if": self.what_if and _what_if(self.what_if),
            "stages": self.stages and self.stages._asdict(),
            "micro_batches": self.batches and self.batches._asdict(),
            "drift": self.drift and {**self.drift._asdict(), "share": self.drift.share},
            "predicted": self.prediction and _prediction(self.prediction),
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
        for told in (_hang, _steps, _verdict, _shares, _not_equal, _predicted, _memory, _progress):
            yield from told(self)
        yield from (f"note: {note}" for note in self.notes)


def _counted(**steps: int) -> dict[str, int]:
    return {key: step + 1 for key, step in steps.items()}


def _straggler(one: Straggler, cost: float | None) -> dict[str, Any]:
    return {
        **vars(one), "ranks": list(one.ranks), "hosts": list(one.hosts),
        **_counted(since=one.since, until=one.until), "cost_seconds_per_step": cost,
    }  # fmt: skip


def _what_if(found: WhatIf) -> dict[str, Any]:
    worst = [worker._asdict() for worker in found.worst[:5]]
    return {**vars(found), "worst": worst, "costs": list(found.costs), "slowdown": found.slowdown}


def _prediction(found: Prediction) -> dict[str, Any]:
    return {
        "rows": [row.named("axis") for row in found.rows],
        "overlap": [{**one._asdict(), "missed": one.missed} for one in found.overlap],
        "step_seconds": found.seconds and dict(zip(("predicted", "measured"), found.seconds, strict=True)),
        "matched": found.matched,
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
        f"{steps.count} steps ({steps.first + 1} to {steps.last + 1}), median {_time(steps.median)} (10 % under "
        f"{_time(steps.p10)}, 10 % over {_time(steps.p90)}), longest {_time(steps.longest)} at step "
        f"{steps.longest_at + 1}{speed}"
    )
    if report.utilisation:
        yield report.utilisation.told


# ---- who is slow ----


def _verdict(report: Report) -> Iterator[Part]:
    yield ""
    if not report.stragglers:
        yield _nobody(report)
    if report.late:
        yield _late(report.late)
    for one, cost in zip(report.stragglers, report.costs, strict=True):
        yield _sentence(one)
        if cost is not None and report.what_if:
            step = report.what_if.replayed
            share = f" ({cost / step:.0%} of it)" if step > 0 else ""
            what = "it" if len(one.ranks) == 1 else "they"
            yield (f"  If {what} were as the others, a step would be {_time(max(0.0, cost))} shorter{share}.")
        elif cost is None and report.what_if and one.what != "slow link":
            yield ("  What that costs is not known: the traces do not tell which messages belong together.")
    for one in report.verdicts.arrivals:
        named = {rank for straggler in report.stragglers for rank in straggler.ranks}
        if one.behind in named and one.rank != one.behind:
            yield (
                f"  The last to come to {one.axis} ({one.what}) is most often rank {one.rank}, {_time(one.lateness)} "
                f"after the first; it waits for rank {one.behind}, which is in its pipeline."
            )
    what_if = report.what_if
    if what_if and what_if.slowdown >= 1.05:
        shares = [  # 3 % of few workers are none
            f"{who} cost {share:.0%} of what is lost"
            for share, who in ((what_if.m_w, _worst(what_if)), (what_if.m_s, "the last stage's ranks"))
            if share is not None and share >= 0.2
        ]
        more = f"; {', '.join(shares)}" if shares else ""
        yield (
            f"On average a step takes {what_if.slowdown:.2f} times what it would with all ranks equal "
            f"({_time(what_if.ideal)}){more}."
        )


def _worst(found: WhatIf) -> str:
    every = len(found.worst)
    return f"the worst {found.few} of {every} workers" if found.few > 1 else f"the worst of {every} workers"


def _nobody(report: Report) -> str:
    from plait.diagnose.outliers import FEWEST

    spread, comparable = report.verdicts.spread, report.verdicts.comparable
    if comparable < 2:
        why = (
            "there are too few steps"
            if not report.steps or report.steps.count < FEWEST
            else "every rank is alone with what it does (its stage and its part of sequences), with nobody to be "
            "compared with"
        )
        return f"No straggler can be told: {why}."
    lasting = ", were it so in most steps and for longer" if spread.z >= spread.named_from else ""
    slowest = (
        f" The slowest of {comparable} comparable ranks is rank {spread.unit}: {spread.effect:+.1%} against its "
        f"equals, z {spread.z:.1f} (named from {spread.named_from:.1f} on{lasting})."
        if spread.unit >= 0
        else ""
    )
    return f"No straggler.{slowest}"


def _late(one: Late) -> str:
    if not one.in_steps:
        why = "dumps do not tell why"
    elif one.computing >= 0.5 * one.seconds:
        why = f"it computes {_time(one.computing)} longer"
    else:
        why = "it computes no longer than they do: its host is late (loading of data, launches, other processes)"
    often, each = ("steps", "a step") if one.in_steps else ("its collectives", "each")
    return (
        f"LATE: rank {one.rank} is the last to come to {one.axis} collectives in {one.recurs:.0%} of {often}, "
        f"{_time(one.seconds)} of {each} behind the others; {why}."
    )


def _sentence(one: Straggler) -> str:
    ranks = f"rank {one.ranks[0]}" if len(one.ranks) == 1 else f"ranks {', '.join(map(str, one.ranks[:8]))}"
    more = f" and {len(one.ranks) - 8} more" if len(one.ranks) > 8 else ""
    on = f" on {' and '.join(one.hosts)}" if one.hosts else ""
    place = f" ({one.where})" if one.where else ""
    if one.what == "slow link":
        return (
            f"SLOW LINK at {ranks}{more}{on}{place}, since step {one.since + 1}: transfers take "
            f"{1 + one.effect:.1f} times what others' of the same bytes do once all have come, "
            f"{_time(one.seconds)} of a step, in {one.recurs:.0%} of steps (z {one.z:.0f})."
        )
    kind = {"slow processor": "SLOW PROCESSOR", "slow host": "SLOW HOST"}[one.what]
    how = (
        f"{one.computing:.0%} of it in computation"
        if one.computing >= 0.5
        else f"{1 - one.computing:.0%} of it between ops: the host launches late"
    )
    return (
        f"{kind}: {ranks}{more}{on}{place}, since step {one.since + 1}: {one.effect:.0%} more own work than its "
        f"equals, {_time(one.seconds)} of a step, {how}, in {one.recurs:.0%} of steps (z {one.z:.0f})."
    )


# ---- where steps go ----


def _shares(report: Report) -> Iterator[Part]:
    from plait.diagnose.recording import AFTER
    from plait.diagnose.shares import NAMES

    rows = [
        (
            f"{NAMES.get(one.what, one.what)}{', between steps' if one.what in AFTER else ''}",
            one.seconds, f"{'+' if one.what in AFTER else ''}{one.share:.1%}", one.late,
        )
        for one in sorted(report.shares, key=lambda one: one.what in AFTER)
        if one.share >= WORTH
    ]  # fmt: skip
    if rows:
        yield ""
        some = 4 if any(row[3] is not None for row in rows) else 3
        header = ("where a mean rank's step goes", Column("time", _time), "share",
                  Column("for the last to come", _time, none=""))  # fmt: skip
        yield Table("", header[:some], [row[:some] for row in rows[: ROWS + 2]])
    drift = report.drift
    if drift:
        word = "longer" if drift.share > 0 else "shorter"
        yield (
            f"Steps became {abs(drift.share):.0%} {word}: {_time(drift.first)} in the first quarter, "
            f"{_time(drift.last)} in the last{_grew(drift)}."
        )


def _grew(drift: Drift) -> str:
    """The part that changed most, and its share of the change."""
    from plait.diagnose.shares import NAMES

    if not drift.of > 0:
        return ""
    what = f"{NAMES.get(drift.grew, drift.grew)} ({drift.by * 1e3:+.1f} ms)"
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
    header = ("against the plan", "axis", "direction", Column("predicted ms", _ms), Column("measured ms", _ms),
              Column("ratio", ".2f"))  # fmt: skip
    yield Table("", header, rows)
    step = report.steps.median if report.steps else 0.0
    for one in found.overlap:
        if one.missed >= MISSED * step:
            yield (
                f"{one.axis}: {one.planned:.0%} of its communication was to be hidden, and {one.measured:.0%} was: "
                f"{_time(one.missed)} of a step that overlap was to save."
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
        each = f", each pauses training for {_time(saved.seconds)}{share}" if saved.seconds is not None else ""
        last = f", the end waits {_time(saved.last)} for the last" if saved.last is not None else ""
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


def _time(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"
