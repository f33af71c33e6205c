"""Step times printed in a training log, and the choice of lines that count.

| line | handling |
|---|---|
| repeats the step of the line before | ignored as another rank's; refused if most times differ |
| the batch is not the full one | left out: the batch is still growing |
| the first line after a start, or the line covers one of the first ``WARM`` steps | left out: warm-up |
| further from the median than ``FAR`` deviations and ``LEAST_FAR`` | left out: outlier |
| any other line | the median of these lines is the step's seconds |

A step number lower than the line before marks a restart. A deviation is 1.4826 times the median
distance from the median, both of logarithms.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from plait.core.base.errors import JobError
from plait.core.base.ignored_input import IgnoredInput

LEAST, MOST = 1e-9, 1e9
"""The shortest and the longest step time that is accepted, in seconds."""
WARM = 3
"""Warm-up: the number of first steps of a run that are left out."""
FEWEST = 3
"""Least number of step lines that must remain in a log to take their median."""
FAR, LEAST_FAR = 5.0, 0.1
DEVIATION = 1.4826
"""A normal distribution's standard deviation divided by its median absolute deviation."""
TWO_RUNS = 0.1
"""Log ratio of two times of one step from which the lines are of two runs: ranks of one run wait
for each other."""
MOST_LINES = 1_000_000


class StepLine(NamedTuple):
    """The step that a line of a training log reports. step: the step's number. seconds: of one
    step, the mean since the line before. batch: sequences per step, None if the line has no batch
    size."""

    step: int
    seconds: float
    batch: int | None = None


@dataclass(frozen=True, kw_only=True)
class LoggedSteps:
    """The step time of a log. seconds: the median of a step. error: the median's relative standard
    error. lines: the number of lines that count. left_out: numbers of lines by the reason for
    leaving them out."""

    seconds: float
    error: float
    lines: int
    left_out: Mapping[str, int]

    def __str__(self) -> str:
        left = ", ".join(f"{count:,} {why}" for why, count in self.left_out.items() if count)
        return f"{self.seconds:.4g} s a step, the median of {self.lines:,} lines" + (f"; left out: {left}" * bool(left))


def step_times(lines: Sequence[StepLine], batch: int | None, file: str, over: IgnoredInput) -> LoggedSteps:
    """Return the step time of a log's lines. batch: sequences of the full batch. Raises JobError if
    fewer than ``FEWEST`` lines remain."""
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
        problem = f"has {len(kept)} usable step lines ({said}), but needs at least {FEWEST}"
        fix = f"Give a log of at least {WARM + FEWEST} lines with step times, or train longer"
        raise JobError(problem, file=file, fix=fix)
    middle = statistics.median(kept)
    error = _deviation(kept) * math.sqrt(math.pi / 2 / len(kept))
    return LoggedSteps(seconds=middle, error=error, lines=len(kept), left_out=left_out)


def add_line(lines: list[StepLine], line: StepLine, file: str) -> None:
    """Append a line. Raises JobError for impossible seconds, and for more than ``MOST_LINES``
    lines."""
    if not LEAST <= line.seconds <= MOST:
        raise JobError(f"{line.seconds:g} s is not a valid step time", file=file, key=f"step {line.step}")
    if len(lines) >= MOST_LINES:
        raise JobError(f"has more than {MOST_LINES:,} lines of steps", file=file, fix="Keep those of one run")
    lines.append(line)


def _of_one_rank(lines: Sequence[StepLine], file: str, over: IgnoredInput) -> list[StepLine]:
    """Return the first line of each step. Raises JobError if times of one step differ as only two
    runs' do."""
    found, apart = list[StepLine](), list[float]()
    for line in lines:
        if found and line.step == found[-1].step:
            over.note("line(s) of a step that an earlier line has", f"step {line.step}")
            apart.append(abs(math.log(line.seconds / found[-1].seconds)))
        else:
            found.append(line)
    if len(apart) >= FEWEST and statistics.median(apart) > TWO_RUNS:
        problem = f"has two times for a step, {math.expm1(statistics.median(apart)):.0%} apart: two runs are mixed"
        raise JobError(problem, file=file, fix="Give each run's log by itself")
    return found


def _starts(lines: Sequence[StepLine]) -> list[list[StepLine]]:
    """Return the lines of each start of the program; a lower step number begins a new start."""
    found: list[list[StepLine]] = []
    for line in lines:
        if not found or line.step < found[-1][-1].step:
            found.append([])
        found[-1].append(line)
    return found


def _after_warm_up(lines: Sequence[StepLine]) -> list[StepLine]:
    """Return the lines of one start that cover none of its first ``WARM`` steps."""
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
    """Return the robust standard deviation of step times, relative to their median."""
    middle = statistics.median(seconds)
    return DEVIATION * statistics.median(abs(math.log(one / middle)) for one in seconds)
