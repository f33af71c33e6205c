"""What a run's small files tell over time: numbers of every step, and how often it was started."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from plait.core.cluster.mfu import mfu_of
from plait.core.runs.memory_peaks import PROCESS, TENSORS

SERIES = {
    "seconds": "seconds of a step",
    "loss": "loss",
    "eval_loss": "loss in evaluations",
    "tokens_per_second": "tokens a second",
    "mfu": "model FLOPs utilisation",
    "hidden": "communication hidden",
    "norm": "norm of the gradients",
}
"""Of the lines of metrics.jsonl."""


APART = (PROCESS, "memory_peak")
"""Memory that is no tensors': of a whole process, and what earlier versions wrote."""


SAID = {TENSORS: "tensors"}
"""Names of memory in words."""


NEVER = "never trained"
"""In place of a step."""


class StepSeries(NamedTuple):
    """A quantity over steps, counted from 1."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


class AttemptRow(NamedTuple):
    """A time the run was started. Texts, for people; empty where it is not known."""

    number: str
    started: str
    ended: str
    outcome: str
    cause: str
    hosts: str
    step: str


def series_of(metrics: Iterable[Mapping[str, Any]], names: Sequence[str] = tuple(SERIES)) -> list[StepSeries]:
    """Those of ``names`` that there are. What is no finite number is left out."""
    rows = [line for line in metrics if _number(line.get("step")) is not None]
    found: list[StepSeries] = []
    for name in names:
        pairs = [(int(line["step"]), value) for line in rows if (value := _number(_read(line, name))) is not None]
        if pairs:
            found.append(StepSeries(name, *zip(*pairs, strict=True)))
    return found


def _read(line: Mapping[str, Any], name: str) -> Any:
    return mfu_of(line) if name == "mfu" else line.get(name)


def memory_of(metrics: Sequence[Mapping[str, Any]]) -> list[StepSeries]:
    """Whatever lines say of tensors' memory, in bytes: a number, or one for each rank (a list, or an
    object)."""
    split: list[dict[str, Any]] = []
    for line in metrics:
        row: dict[str, Any] = {"step": line.get("step")}
        for name, value in line.items():
            if "memory" not in name or name in APART:
                continue
            if isinstance(value, list):
                row |= {f"{name}, rank {rank}": one for rank, one in enumerate(value)}
            elif isinstance(value, dict):
                row |= {f"{SAID.get(name, name)}, {key}": one for key, one in value.items()}
            else:
                row[name] = value
        split.append(row)
    names = list(dict.fromkeys(name for row in split for name in row if name != "step"))
    return series_of(split, names)


def attempts_of(lines: Sequence[Mapping[str, Any]], *, live: bool) -> list[AttemptRow]:
    """Of attempts.jsonl, as far as its lines tell. live: whether the run goes on; else an attempt that is
    said to run was cut off with whoever wrote that."""
    found: list[AttemptRow] = []
    for place, line in enumerate(lines, 1):
        hosts = line.get("hosts")
        step = next(
            (line[key] for key in ("step", "step_reached", "reached", "steps") if line.get(key) is not None), ""
        )
        step = NEVER if _number(step) == -1 else step
        found.append(
            AttemptRow(
                str(line.get("number", line.get("attempt", place))), _moment(line.get("started")),
                _moment(line.get("ended")), "cut off" if line.get("outcome") == "running" and not live
                else str(line.get("outcome") or ""), str(line.get("cause") or ""),
                ", ".join(map(str, hosts)) if isinstance(hosts, list) else str(hosts or ""), str(step),
            )
        )  # fmt: skip
    return found


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _moment(value: Any) -> str:
    """Seconds since 1970, or whatever else stands there."""
    number = _number(value)
    if number is None:
        return str(value or "")
    try:
        return datetime.fromtimestamp(number, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return str(value)
