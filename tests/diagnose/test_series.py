"""What a run's small files tell over time."""

from __future__ import annotations

from typing import Any

import pytest

from plait.core.runs.memory_peaks import PROCESS, TENSORS
from plait.diagnose.series import NEVER, SERIES, AttemptRow, StepSeries, attempts_of, memory_of, series_of


def attempt(*, live: bool = False, **line: Any) -> AttemptRow:
    return attempts_of([{}, line], live=live)[1]


def test_numbers_of_steps_are_taken_and_all_else_left() -> None:
    lines: list[dict[str, Any]] = [
        {"step": 1, "loss": 3, "mfu": 0.5, "device": {"peak_flops": 1e12}}, {"step": True, "loss": 2.0},
        {"loss": 2.0}, {"step": 2, "loss": True},
        {"step": 3, "loss": "2"}, {"step": 4, "loss": float("inf")}, {"step": 5.0, "loss": 0},
        {"step": 6, "mfu": 0.59},  # of earlier versions: a share of a measured rate
    ]  # fmt: skip
    assert series_of(lines) == [StepSeries("loss", (1, 5), (3, 0)), StepSeries("mfu", (1,), (0.5,))]
    assert series_of(lines, ["mfu"]) == [StepSeries("mfu", (1,), (0.5,))]
    assert [
        one.name for one in series_of([{"step": 1, "device": {"peak_flops": 1.0}, **dict.fromkeys(SERIES, 1.0)}])
    ] == list(SERIES)


def test_memory_of_tensors_is_of_every_rank() -> None:
    lines: list[dict[str, Any]] = [
        {"step": 1, TENSORS: {"stage 0": 3, "stage 1": None}, "loss": 1.0}, {"step": 2, TENSORS: [4], PROCESS: 9},
    ]  # fmt: skip
    assert memory_of(lines) == [StepSeries("tensors, stage 0", (1,), (3,))]


def test_an_attempt_of_which_nothing_is_told() -> None:
    assert attempt() == AttemptRow("2", "", "", "", "", "", "")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"attempt": 5}, {"number": "5"}),
        ({"started": 0, "ended": 86400.5}, {"started": "1970-01-01 00:00:00", "ended": "1970-01-02 00:00:00"}),
        ({"started": "noon", "ended": 1e300}, {"started": "noon", "ended": "1e+300"}),
        ({"started": True, "ended": None}, {"started": "True", "ended": ""}),
        ({"outcome": "failed", "cause": "killed"}, {"outcome": "failed", "cause": "killed"}),
        ({"outcome": "running"}, {"outcome": "cut off"}),
        ({"hosts": ["a", 1]}, {"hosts": "a, 1"}), ({"hosts": "a"}, {"hosts": "a"}), ({"hosts": []}, {"hosts": ""}),
        ({"step": 7, "steps": 3}, {"step": "7"}), ({"steps": 4}, {"step": "4"}),
        ({"step": 0}, {"step": "0"}), ({"step": -1}, {"step": NEVER}), ({"step": -2}, {"step": "-2"}),
    ],
)  # fmt: skip
def test_what_lines_of_attempts_tell(line: dict[str, Any], told: dict[str, str]) -> None:
    assert attempt(**line) == attempt()._replace(**told)


def test_of_a_run_that_goes_on_an_attempt_runs() -> None:
    assert attempt(live=True, outcome="running").outcome == "running"
    assert attempt(live=True, outcome="failed").outcome == "failed"
