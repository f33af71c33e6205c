"""What fills each device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.core.cluster.hardware import Cluster
from plait.core.model.spec import ModelSpec
from plait.core.parallel.sharding import Sharding
from plait.core.step.columns.points import RECOMPUTES, SCHEDULES, StrategyTable
from plait.core.step.memory.closed_memory import step_memory, usable
from plait.core.step.memory.estimate import step_of
from plait.plan.explain.memory_report import memory_report
from tests.support.models import seven_billion

SEVEN = seven_billion()
A100 = Cluster.preset("a100-80")


def point(**values: int) -> dict[str, int]:
    return StrategyTable.of([values]).row(0)


def test_a_table_of_every_pp_rank() -> None:
    row = point(pp=4, dp=8, num_micro=8, optim=8, recompute=RECOMPUTES.index("full"))
    report = memory_report(step_of(SEVEN, row, sequence=4096, precision="bf16-mixed"), A100)
    assert report.fits
    head, *lines = report.rows()
    assert len(lines) == 4
    assert all(len(line) == len(head) for line in lines)
    assert lines[0][head.index("fullest")].endswith("4 micro-batches alive")
    assert "backward of stage 3" in lines[3][head.index("fullest")]
    assert report.fullest.total == max(each.total for each in report.pp_ranks)
    found = step_memory(SEVEN, StrategyTable.of([row]), sequence=4096)
    assert report.fullest.total == pytest.approx(found.total[0], rel=0.03)


GPT = ModelSpec(family="gpt", num_layers=8, hidden=64, num_heads=8, vocab=96, max_sequence=256)


def test_usable_memory_and_overhead_of_a_report_are_the_devices() -> None:
    row = point(pp=2, dp=2, cp=2, ring=2, tp=2, num_micro=4, params=2, grads=2, optim=4)
    step = step_of(GPT, row, sequence=256, precision="bf16-mixed")
    report = memory_report(step, A100)
    assert report.usable == int(usable(A100.device, A100.overhead))
    sharding, groups = Sharding(params=2, grads=2, optim=4), 6  # all, tp, pp, a ring; params, optim
    assert step.shardings == (sharding,) * 2
    for one in report.pp_ranks:
        memory, overhead = one.estimate.memory, A100.overhead
        moving = memory.activations + memory.buffers
        told = overhead.context.value + groups * overhead.communicator.value + overhead.stuck.value * moving
        assert one.overhead == int(told)
        assert one.total == memory.total + one.overhead
        assert one.estimate.sent == {}
    assert report.fits
    assert not replace(report, usable=report.fullest.total - 1).fits
    assert replace(report, usable=report.fullest.total).fits


def test_rows_of_a_table() -> None:
    row = point(pp=2, num_micro=4, schedule=SCHEDULES.index("interleaved"), virtual=2)
    report = memory_report(step_of(GPT, row, sequence=256, precision="fp32"), Cluster.preset("lab"))
    head, first, last = report.rows()
    assert head[:2] == ("pp rank", "layers") and head[-5:] == ("overhead", "total", "p10-p90", "of device", "fullest")
    assert (first[0], first[1], last[0]) == ("0", "2+2", "1")
    assert first[-2] == f"{report.pp_ranks[0].total / report.usable:.0%}"
    alive = report.pp_ranks[0].estimate.memory.alive
    assert first[-1] == f"{report.pp_ranks[0].estimate.memory.when}, {alive} micro-batches alive"
    one = memory_report(step_of(GPT, point(), sequence=256, precision="fp32"), Cluster.preset("lab"))
    assert list(one.rows())[1][-1] == one.pp_ranks[0].estimate.memory.when
