"""Everything that is said of a run, as plain values: what the command line prints and programs read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import polars as pl

from plait.core.base.passed_over import PassedOver
from plait.core.runs.evidence import Verdict
from plait.diagnose.compare import Prediction
from plait.diagnose.imbalance import BatchImbalance, StageImbalance, batches_of, stages_of
from plait.diagnose.late import Late, late_of
from plait.diagnose.memory_use import MemoryUse, memory_use
from plait.diagnose.progress import CheckpointPauses, Goodput, Loss, checkpoints_of, goodput_of, loss_of
from plait.diagnose.reading import RecordedRun
from plait.diagnose.recording import Recording
from plait.diagnose.shares import Drift, StepShare, StepTimes, drift_of, shares, steps_of
from plait.diagnose.stragglers import Straggler, Verdicts, verdicts
from plait.diagnose.what_if import WhatIf, what_if

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Report:
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
    late: Late | None = None
    hang: Verdict | None = None
    passed_over: PassedOver = field(default_factory=PassedOver)
    notes: tuple[str, ...] = ()

    @property
    def stragglers(self) -> tuple[Straggler, ...]:
        """Those that are named."""
        return self.verdicts.stragglers

    def to_dict(self) -> dict[str, Any]:
        """For JSON. Steps are counted from 1, as in metrics.jsonl."""
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
            "passed_over": self.passed_over.rows(),
            "notes": list(self.notes),
        }  # fmt: skip


def explain(
    recording: Recording,
    name: str,
    *,
    run: RecordedRun | None = None,
    prediction: Prediction | None = None,
    memory: Mapping[str, int] | None = None,
    notes: Sequence[str] = (),
) -> Report:
    """run: whose folder the recording came from, for its metrics, checkpoints and attempts. memory: bytes
    that are predicted for a rank of each stage."""
    said = run.said if run else None
    unknown = set(said.unknown) if said else set[int]()
    found = verdicts(recording)
    kept = tuple(one for one in found.stragglers if one.what == "slow link" or not unknown & set(one.ranks))
    found = replace(found, stragglers=kept, arrivals=found.arrivals if said is None or said.one_clock else ())
    named = [one.ranks for one in found.stragglers if one.what != "slow link"]
    since = max((one.since for one in found.stragglers), default=None)
    replayed = what_if(recording, named, since)
    costs = iter(replayed.costs if replayed and not (said and _unlinked(recording)) else ())
    metrics = run.metrics if run else ()
    in_steps = said is None or said.steps
    late = None
    if said and said.one_clock and not found.stragglers:
        late = late_of(recording, in_steps=in_steps)
    late = None if late and late.rank in unknown else late
    ours = run is not None and bool(run.plan or metrics or run.attempts)
    return Report(
        name=name,
        ranks=recording.ranks,
        axes=_axes(recording) if run is None or run.plan else {},
        steps=steps_of(recording, metrics) if in_steps else None,
        shares=tuple(shares(recording)) if in_steps else (),
        verdicts=found,
        costs=tuple(None if one.what == "slow link" else next(costs, None) for one in found.stragglers),
        what_if=replayed,
        stages=stages_of(recording),
        batches=batches_of(recording),
        drift=drift_of(recording),
        prediction=prediction,
        loss=loss_of(metrics),
        checkpoints=checkpoints_of(recording, run.folder) if run else None,
        goodput=goodput_of(recording, run.attempts, metrics, run.alive) if run and ours else None,
        memory=memory_use(metrics, memory or {}),
        late=late,
        passed_over=run.passed_over if run else recording.passed_over,
        notes=(*notes, *recording.notes),
    )


def _axes(recording: Recording) -> dict[str, int]:
    return {axis: n for axis in ("pp", "dp", "cp", "tp") if (n := recording.grid[axis].n_unique()) > 1}


def _unlinked(recording: Recording) -> bool:
    """Whether it has transfers of which nobody knows the other end, so that no replay carries on a delay."""
    transfers = recording.spans.filter(pl.col("kind") == "transfer")
    return bool(transfers["meeting"].is_null().any())


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
