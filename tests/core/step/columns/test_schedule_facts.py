"""What the planner needs of a schedule: found from short pipelines, against whole ones and dry
runs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from plait.core.base.errors import ScheduleError
from plait.core.step.clock.pipeline_clock import PipelineCosts, dry_run
from plait.core.step.columns import points
from plait.core.step.columns.points import (
    NAMES,
    SCHEDULES,
    StrategyTable,
    num_stages,
    number_of,
    schedule_properties,
    stages_of,
)
from plait.core.step.schedule import Op, Schedule
from plait.core.step.schedules import GENERATORS, Generator, Shape, generate, planned_shape, whole_steps
from plait.core.step.seconds import pipeline_time
from plait.core.step.seconds.pipeline_time import FORMS, Stages, pipeline


def planned(name: str, pp: int, count: int, virtual: int = 2) -> Schedule:
    return generate(name, planned_shape(name, pp, count, virtual))


@pytest.mark.parametrize(
    ("name", "pp", "count", "told"),
    [
        ("1f1b", 4, 100, 8), ("1f1b", 4, 7, 7), ("1f1b", 1, 100, 8), ("zb-v", 8, 100, 16), ("zb-v", 4, 15, 8),
        ("zb-h2", 8, 100, 16), ("gpipe", 4, 100, 100), ("interleaved", 4, 100, 8), ("interleaved", 4, 101, 101),
    ],
)  # fmt: skip
def test_how_many_micro_batches_fill_pp_ranks(name: str, pp: int, count: int, told: int) -> None:
    assert schedule_properties(name).enough(pp, count) == told


def test_what_schedules_do() -> None:
    def having(fact: str) -> list[str]:
        return [name for name in FORMS if getattr(schedule_properties(name), fact)]

    assert having("splits") == ["zb-h1", "zb-h2", "zb-v"]
    assert (having("turns"), having("circles"), having("collects")) == (["zb-v"], ["interleaved"], ["gpipe"])
    assert [schedule_properties(name).apart for name in ("1f1b", "eager-1f1b", "slack-1f1b", "zb-h1", "zb-h2")] == [
        1,
        2,
        2,
        1,
        2,
    ]
    assert schedule_properties("1f1b").fullest_pp_ranks(5) == [0, 1, 4] and schedule_properties(
        "zb-h1"
    ).fullest_pp_ranks(5) == [0, 1, 3, 4]
    assert schedule_properties("zb-h1").fullest_pp_ranks(1) == [0]


@pytest.mark.parametrize("name", GENERATORS)
def test_stages_lie_as_the_generator_has_them(name: str) -> None:
    for pp, virtual in ((1, 2), (2, 3), (5, 2)):
        schedule = planned(name, pp, 3, virtual)
        assert schedule.num_stages == num_stages(name, pp, virtual)
        assert [schedule.stages_of(pp_rank) for pp_rank in range(pp)] == [
            stages_of(name, pp, virtual, pp_rank) for pp_rank in range(pp)
        ]


FIRST_AND_LAST = ((1.0, 1.0), (1.2, 1.5))
"""Seconds of the first and of the last pp rank, of an inner one's."""


def stages(first: float, last: float) -> Stages:
    return Stages(
        first=np.array([first]), inner=np.ones(1), last=np.array([last]), forward=np.array([0.3]),
        weight_gradient=np.array([0.25]),
    )  # fmt: skip


def exact(schedule: Schedule, each: Stages, hop: float) -> float:
    """By a dry run."""
    pp = len(schedule.ranks)
    parts = each.by_pp_rank(np.array([pp]))[:, 0] * pp / schedule.num_stages
    at = [schedule.rank_of[stage] for stage in range(schedule.num_stages)]
    rows = [
        parts[3 * part : 3 * part + 3]
        for part in (0 if pp_rank == 0 else 2 if pp_rank == pp - 1 else 1 for pp_rank in at)
    ]
    forward, back, weight = zip(*rows, strict=True)
    return dry_run(schedule, PipelineCosts(forward, back, weight, dict.fromkeys(schedule.edges, hop))).makespan


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize(("first", "last"), FIRST_AND_LAST)
def test_a_schedule_in_a_file_has_the_seconds_of_its_longest_chain(
    name: str, first: float, last: float, tmp_path: Path
) -> None:
    schedule = planned(name, 4, 10)
    file = tmp_path / "written.txt"
    file.write_text(str(schedule))
    row = {"schedule": number_of(str(file)), "pp": 4, "num_micro": 10, "virtual": schedule.num_stages // 4}
    for hop in (0.0, 0.05):
        found = pipeline(stages(first, last), StrategyTable.of([row]), transfer=hop, hidden=False)
        total = (found.work + found.bubble + found.transfers)[0]
        assert total == pytest.approx(exact(schedule, stages(first, last), hop), rel=2e-3)


def breadth_first(shape: Shape, wanted: Iterable[int]) -> Iterable[list[Op]]:
    """Each stage computes all micro-batches before the rank's next stage (arXiv 2211.05953)."""
    for rank in wanted:
        own = range(rank, shape.num_stages, shape.ranks)
        yield [Op(stage, "F", at) for stage in own for at in range(shape.micro_batches)] + [
            Op(stage, "B", at) for stage in reversed(own) for at in range(shape.micro_batches)
        ]


@pytest.mark.parametrize("name", [*GENERATORS, "breadth-first"])
@pytest.mark.parametrize(("pp", "counts"), [(2, (9, 64)), (4, (31, 32, 256)), (8, (40, 256))])
def test_chains_of_more_rounds_than_are_run(
    name: str, pp: int, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GENERATORS, "breadth-first", Generator(breadth_first, chunks=2))
    monkeypatch.setattr(points, "NAMES", [*SCHEDULES, "breadth-first"])
    monkeypatch.setattr(pipeline_time, "NAMES", points.NAMES)
    for count, (first, last) in product(counts, FIRST_AND_LAST):
        each = stages(first, last)
        row = {"schedule": points.NAMES.index(name), "pp": pp, "num_micro": count, "virtual": 2}
        found = pipeline_time.chain_seconds(StrategyTable.of([row]), each.by_pp_rank(np.array([pp])), 0.05)[0]
        assert found == pytest.approx(exact(planned(name, pp, count), each, 0.05), rel=0.015)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved"])
def test_a_file_does_what_the_schedule_in_it_does(name: str, tmp_path: Path) -> None:
    file = tmp_path / "written.txt"
    file.write_text(str(planned(name, 6, 36)))
    own, told = schedule_properties(NAMES[number_of(str(file))]), schedule_properties(name)
    for fact in ("splits", "turns", "circles", "apart", "collects", "inner", "plain", "fullest"):
        assert getattr(own, fact) == getattr(told, fact), fact
    assert own.enough(6, 36) == 36  # no other number is ever asked


@pytest.mark.parametrize(
    "text", ["rank 0: 0F0 0B0\nrank 1: 1F0 2F0 2B0 1B0", str(whole_steps(2)), "forward only:\nrank 0: 0F0"]
)
def test_files_that_cannot_be_searched(text: str, tmp_path: Path) -> None:
    (tmp_path / "odd.txt").write_text(text)
    with pytest.raises(ScheduleError, match="equally many stages"):
        number_of(str(tmp_path / "odd.txt"))
