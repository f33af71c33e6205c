"""The report of a run, put together from all that is found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import polars as pl

from plait.diagnose.alike import Alike
from plait.diagnose.compare import Prediction
from plait.diagnose.imbalance import batches_of, stages_of
from plait.diagnose.late import late_of
from plait.diagnose.memory_use import memory_use
from plait.diagnose.network import slow_network
from plait.diagnose.progress import checkpoints_of, goodput_of, loss_of
from plait.diagnose.reading import RecordedRun
from plait.diagnose.recording import Recording
from plait.diagnose.report import Report
from plait.diagnose.shares import drift_of, mean_step, steps_of
from plait.diagnose.stragglers import Straggler, Verdicts, verdicts
from plait.diagnose.utilisation import utilisation_of
from plait.diagnose.what_if import WhatIf, what_if


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
    said, metrics = run.said if run else None, run.metrics if run else ()
    some = run.alike if run else Alike(recording, metrics)
    unknown = set(said.unknown) if said else set[int]()
    found = verdicts(recording)
    kept = tuple(one for one in found.stragglers if one.what == "slow link" or not unknown & set(one.ranks))
    found = replace(found, stragglers=kept, arrivals=found.arrivals if said is None or said.one_clock else ())
    replayed, costs = _costs(some.recording, found, linked=not (said and _unlinked(recording)))
    found = replace(found, stragglers=tuple(costs))
    in_steps = said is None or said.steps
    late = None
    if said and said.one_clock and not found.stragglers:
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
        goodput=goodput_of(recording, run.attempts, metrics, run.alive) if run and ours else None,
        memory=memory_use(metrics, memory or {}),
        utilisation=utilisation_of(some.metrics, steps.median) if steps else None,
        late=late,
        network=None if links else slow_network(some.recording, planned, found.stragglers),
        passed_over=run.passed_over if run else recording.passed_over,
        notes=(*notes, *filter(None, (some.note,)), *recording.notes),
    )


def _costs(
    recording: Recording, found: Verdicts, *, linked: bool
) -> tuple[WhatIf | None, dict[Straggler, float | None]]:
    """The replay, and the stragglers with what each costs. A host whose ranks together cost nothing is none:
    its ranks stand alone. linked: whether the replay carries on the delays of all transfers."""
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
    """True for a recording of transfers without a known other end: no replay carries on their delays."""
    transfers = recording.spans.filter(pl.col("kind") == "transfer")
    return bool(transfers["meeting"].is_null().any())
