"""Domino's loss curves: a small model trained on two ranks with slices and without, by commands of the page.

Weights, tokens, their order and the learning rate are the same; a precision's last run has other weights.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from benchmarks.keeping import timed
from benchmarks.papers.found import Found, Row, Series, job_file
from benchmarks.papers.planned import Settings, command, settings

JOB = "domino-curves"
PRECISIONS = {"bf16": "bf16-mixed", "fp32": "fp32", "fp64": "fp64"}
SLICES = ((2, 1), (1, 2), (4, 2))
"""(of the batch, of columns): rows alone, columns alone, both."""
BASELINE, SEED = "no slices", "no slices, other weights"


def runs() -> dict[str, Settings]:
    """What is asked of each run, by its name; of each precision first the one that is beside others."""
    found: dict[str, Settings] = {}
    for name, precision in PRECISIONS.items():
        own = settings(train__precision=precision)
        found[f"{name}: {BASELINE}"] = own
        for batch, columns in SLICES:
            found[f"{name}: {batch} x {columns}"] = own + settings(
                strategy__overlap="domino", strategy__slices__batch=batch, strategy__slices__columns=columns
            )
        found[f"{name}: {SEED}"] = own + settings(train__seed=1)
    return {name: asked + settings(run__name=re.sub(r"\W+", "-", name)) for name, asked in found.items()}


def trained(asked: Settings, *more: str) -> list[float]:
    """The loss of every step of such a run."""
    with TemporaryDirectory() as folder:
        timed([sys.executable, "-m", "plait", "train", str(job_file(JOB)), *asked, f"run.folder={folder}", *more])
        (run,) = Path(folder).iterdir()
        lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def apart(losses: Sequence[float], others: Sequence[float]) -> list[float]:
    """How far they are from each other, step by step."""
    return [abs(one - other) for one, other in zip(losses, others, strict=True)]


def curves() -> Found:
    """Section 5: the losses of every run, and of each how far they are from those without slices."""
    return told({name: trained(asked) for name, asked in runs().items()})


def told(losses: Mapping[str, Sequence[float]]) -> Found:
    """Of the losses of all runs: their curves, and a row of each."""
    rows: list[Row] = []
    means: dict[tuple[str, str], float] = {}
    facts: dict[str, float | str] = {"steps": len(losses[f"fp32: {BASELINE}"])}
    for name, asked in runs().items():
        precision, _, which = name.partition(": ")
        value, note = f"loss {losses[name][0]:.3f} at first, {losses[name][-1]:.3f} at last", ""
        if which != BASELINE:
            between = apart(losses[name], losses[f"{precision}: {BASELINE}"])
            means[precision, which] = fmean(between)
            value, note = _short(max(between)), f"{fmean(between):.2g} in the mean; {value}"
            facts |= {f"most, {precision}, {which}": value, f"mean, {precision}, {which}": _short(fmean(between))}
        rows.append(Row(name=name, value=value, command=command(JOB, asked, verb="train"), note=note))
    nearer = all(mean < means[precision, SEED] for (precision, which), mean in means.items() if which != SEED)
    rows.append(Row(name="nine sliced runs match, nearer than other weights", value=nearer))
    facts["rounding"] = _short(fmean(apart(losses[f"bf16: {BASELINE}"], losses[f"fp32: {BASELINE}"])))
    series = [Series(name=name, points=list(enumerate(own, 1))) for name, own in losses.items()]
    return Found(rows=rows, series=series, facts=facts)


def _short(value: float) -> float:
    return float(f"{value:.3g}")
