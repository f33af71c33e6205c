"""What each golden file holds, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.golden import adapter

Values = dict[str, Any]


def _jobs(inputs: Values) -> Any:
    return [adapter.of_job(values) for values in inputs["jobs"]]


def _points(inputs: Values) -> Any:
    return {name: adapter.of_points(name, rows) for name, rows in inputs["points"].items()}


def _varied(inputs: Values) -> Any:
    return {name: adapter.of_variants(name, rows) for name, rows in inputs["varied"].items()}


def _answers(inputs: Values) -> Any:
    return {f"{each['model']} on {each['ranks']} {each['cluster']}": adapter.of_question(each)
            for each in inputs["questions"]}  # fmt: skip


def _placements(inputs: Values) -> Any:
    return [adapter.of_problem(values) for values in inputs["problems"]]


def _verdicts(inputs: Values) -> Any:
    recordings = inputs["recordings"]
    return {
        "standstills": {kind: adapter.of_standstill(kind) for kind in recordings["standstills"]},
        "slow": {kind: adapter.of_slow_run(kind) for kind in recordings["slow"]},
    }


CONTENTS: dict[str, Callable[[Values], Any]] = {
    "jobs": _jobs, "points": _points, "varied": _varied, "answers": _answers,
    "placements": _placements, "verdicts": _verdicts,
}  # fmt: skip
