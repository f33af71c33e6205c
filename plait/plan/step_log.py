"""Step times that a training log prints, and which of them count.

| line | what becomes of it |
|---|---|
| of a step that another line had just before | passed over: another rank's; refused where most times differ |
| of a batch that is not the full one | left out: the batch is still growing |
| the first after a start, and those that hold one of the first ``WARM`` steps | left out: warm-up |
| further from the median than ``FAR`` deviations and ``LEAST_FAR`` | left out: outlier |
| all others | their median is the step's seconds |

A step number below the one before begins another start. A deviation is 1.4826 times the median distance from
the median, of logarithms.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from plait.core.base.errors import JobError
from plait.core.base.passed_over import PassedOver
from plait.plan.recorded import FEWEST, LEAST, MOST, WARM

FAR, LEAST_FAR = 5.0, 0.1
DEVIATION = 1.4826
"""Of a normal distribution, its standard deviation over the median distance from its median."""
TWO_RUNS = 0.1
"""Logarithm of the ratio of a step's times on two ranks, which wait for each other, that no run has."""
MOST_LINES = 1_000_000


class StepLine(NamedTuple):
    """What one line says. step: its number. seconds: of one step, the mean since the line before. batch:
    sequences of a step, None where the line does not say."""

    step: int
    seconds: float
    batch: int | None = None


@dataclass(frozen=True, kw_only=True)
class LoggedSteps:
    """seconds: of a step. error: relative, of this median. lines: that count. left_out: lines, by why."""

    seconds: float
    error: float
    lines: int
    left_out: Mapping[str, int]

    def __str__(self) -> str:
        left = ", ".join(f"{count:,} {why}" for why, count in self.left_out.items() if count)
        return f"{self.seconds:.4g} s a step, the median of {self.lines:,} lines" + (f"; left out: {left}" * bool(left))


def step_times(lines: Sequence[StepLine], batch: int | None, file: str, over: PassedOver) -> LoggedSteps:
    """Of a log's lines. batch: the full one's sequences. Raises JobError where too few lines are left."""
    first_ranks = _of_one_rank(lines, file, over)
    full = [one for one in first_ranks if batch is None or one.batch in (None, batch)]
    warm = [one for start in _starts(full) for one in _after_warm_up(start)]
    kept = _without_outliers([one.seconds for one in warm])
    left_out = {
        "of a growing batch": len(first_ranks) - len(full),
        "in warm-up": len(full) - len(warm),
        "outliers": len(warm) - len(kept),
    }
    if len(kept) < FEWEST:
        said = ", ".join(f"{count} {why}" for why, count in left_out.items() if count) or "none left out"
        problem = f"has {len(kept)} lines of steps that count ({said}), which tell too little"
        fix = f"Give a log of at least {WARM + FEWEST} lines with step times, or train longer"
        raise JobError(problem, file=file, fix=fix)
    middle = statistics.median(kept)
    error = _deviation(kept) * math.sqrt(math.pi / 2 / len(kept))
    return LoggedSteps(seconds=middle, error=error, lines=len(kept), left_out=left_out)


def add_line(lines: list[StepLine], line: StepLine, file: str) -> None:
    """Append a line. Raises JobError for seconds that no step takes, and for too many lines."""
    if not LEAST <= line.seconds <= MOST:
        raise JobError(f"{line.seconds:g} s are no seconds of a step", file=file, key=f"step {line.step}")
    if len(lines) >= MOST_LINES:
        raise JobError(f"has more than {MOST_LINES:,} lines of steps", file=file, fix="Keep those of one run")
    lines.append(line)


def _of_one_rank(lines: Sequence[StepLine], file: str, over: PassedOver) -> list[StepLine]:
    """The first line of each step. Raises JobError for the lines of two runs: ranks of one take as long."""
    found, apart = list[StepLine](), list[float]()
    for line in lines:
        if found and line.step == found[-1].step:
            over.note("line(s) of a step that another line had before", f"step {line.step}")
            apart.append(abs(math.log(line.seconds / found[-1].seconds)))
        else:
            found.append(line)
    if len(apart) >= FEWEST and statistics.median(apart) > TWO_RUNS:
        problem = f"has two times for a step, {math.expm1(statistics.median(apart)):.0%} apart: two runs are mixed"
        raise JobError(problem, file=file, fix="Give each run's log by itself")
    return found


def _starts(lines: Sequence[StepLine]) -> list[list[StepLine]]:
    """Lines by start of the program."""
    found: list[list[StepLine]] = []
    for line in lines:
        if not found or line.step < found[-1][-1].step:
            found.append([])
        found[-1].append(line)
    return found


def _after_warm_up(lines: Sequence[StepLine]) -> list[StepLine]:
    """Of one start those that hold none of its first steps."""
    if len(lines) < 2:
        return []
    gap = lines[1].step - lines[0].step
    begun = max(1, lines[0].step - gap + 1)
    return [line for before, line in pairwise(lines) if before.step + 1 - begun >= WARM]


def _without_outliers(seconds: Sequence[float]) -> list[float]:
    if not seconds:
        return []
    middle = statistics.median(seconds)
    most = max(LEAST_FAR, FAR * _deviation(seconds))
    return [one for one in seconds if abs(math.log(one / middle)) <= most]


def _deviation(seconds: Sequence[float]) -> float:
    """Relative, robust."""
    middle = statistics.median(seconds)
    return DEVIATION * statistics.median(abs(math.log(one / middle)) for one in seconds)
