"""Steps with batches of one size: while a batch ramps up, or after it was changed, steps are not alike, and
their median, their drift and a prediction say nothing of any of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import polars as pl

from plait.core.base.numbers import is_number
from plait.diagnose.recording import Recording

FEW = 8
"""Last steps that have one size, from which on they stand for the run."""


@dataclass(frozen=True)
class Alike:
    """Those steps of a run. tokens: of each; None where nobody knows. note: which they are, where the run has
    others too."""

    recording: Recording
    metrics: Sequence[Mapping[str, Any]]
    tokens: int | None = None
    note: str = ""


def alike(recording: Recording, metrics: Sequence[Mapping[str, Any]]) -> Alike:
    """Steps of the last size; where few have it, of the size that most have. metrics: lines of metrics.jsonl,
    which tell the sizes."""
    one = one_size(metrics, recording.seconds)
    if not one.note:
        return Alike(recording, metrics, one.tokens)
    here = pl.col("step").is_in(one.steps)
    chosen = replace(
        recording,
        rollup=recording.rollup.filter(here), meetings=recording.meetings.filter(here),
        spans=recording.spans.filter(here), seconds={step: recording.seconds[step] for step in one.steps},
    )  # fmt: skip
    return Alike(chosen, [line for line in metrics if dict(_size(line)).keys() & {*one.steps}], one.tokens, one.note)


class OneSize(NamedTuple):
    """Steps, from 0, in order, and tokens of each; None where nobody knows. note: as ``Alike.note``."""

    steps: list[int]
    tokens: int | None
    note: str


def one_size(metrics: Iterable[Mapping[str, Any]], known: Collection[int], drawn: Collection[int] = ()) -> OneSize:
    """Of ``known`` steps those of the last size; where few have it, of the size that most have. drawn: steps
    of which some should be among them, if there are any."""
    sizes = {step: tokens for line in metrics for step, tokens in _size(line) if step in known}
    if len({*sizes.values()}) < 2:
        return OneSize(sorted(known), next(iter(sizes.values()), None), "")
    counts = Counter(size for step, size in sizes.items() if step in drawn) or Counter(sizes.values())
    tokens = sizes[max(step for step, size in sizes.items() if size in counts)]
    if counts[tokens] < FEW:
        tokens = max(counts, key=lambda size: (counts[size], size))
    steps = sorted(step for step, size in sizes.items() if size == tokens)
    note = (
        f"Steps have batches of {len({*sizes.values()})} sizes: what is told of a step is of the {len(steps)} with "
        f"{tokens:,} tokens, from {steps[0] + 1} to {steps[-1] + 1}"
    )
    return OneSize(steps, tokens, note)


def _size(line: Mapping[str, Any]) -> list[tuple[int, int]]:
    """The step, counted from 0, and its tokens, of a line that tells both."""
    step = line.get("step")
    known = all(is_number(line.get(name)) for name in ("seconds", "tokens_per_second"))
    if not known or not isinstance(step, int) or isinstance(step, bool):
        return []
    tokens = float(line["seconds"]) * float(line["tokens_per_second"])
    return [(step - 1, round(tokens))] if math.isfinite(tokens) else []
