"""What fills each device, and what would make it fit."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from plait.core.cluster.hardware import Cluster
from plait.core.model.spec import ModelSpec
from plait.core.parallel.sharding import Sharding
from plait.core.step.columns.point_step import step_of
from plait.core.step.columns.points import RECOMPUTES, SCHEDULES, Points
from plait.core.step.memory.closed_memory import plait_on, step_memory, usable
from plait.plan import memory_report as module
from plait.plan.memory_report import fitting_changes, memory_report
from tests.support.models import seven_billion

SEVEN = seven_billion()
A100 = Cluster.preset("a100-80")


def point(**values: int) -> dict[str, int]:
    return Points.of([values]).row(0)


def test_a_table_of_every_place() -> None:
    row = point(pp=4, dp=8, num_micro=8, optim=8, recompute=RECOMPUTES.index("full"))
    report = memory_report(step_of(SEVEN, row, sequence=4096, precision="bf16-mixed"), A100)
    assert report.fits
    head, *lines = report.rows()
    assert len(lines) == 4
    assert all(len(line) == len(head) for line in lines)
    assert lines[0][head.index("fullest")].endswith("4 micro-batches alive")
    assert "backward of stage 3" in lines[3][head.index("fullest")]
    assert report.fullest.total == max(place.total for place in report.places)
    found = step_memory(SEVEN, Points.of([row]), sequence=4096)
    assert report.fullest.total == pytest.approx(found.total[0], rel=0.03)


def test_what_fits_needs_no_change() -> None:
    row = point(dp=8, params=8, grads=8, optim=8)
    assert next(fitting_changes(SEVEN, row, A100, sequence=4096, precision="bf16-mixed")) == {}


@pytest.mark.parametrize(("row", "sequence", "key"), [
    (point(dp=8, num_micro=4), 2048, "strategy.shard"),
    (point(dp=8, micro=4, params=8, grads=8, optim=8), 8192, "strategy.recompute"),
    (point(dp=128, optim=128), 262144, "strategy.cp"),
], ids=["states", "activations", "sequence"])  # fmt: skip
def test_the_nearest_change(row: dict[str, int], sequence: int, key: str) -> None:
    found = next(fitting_changes(SEVEN, row, A100, sequence=sequence, precision="bf16-mixed"), None)
    options = plait_on(A100.device)
    needed = step_memory(SEVEN, Points.of([row]), sequence=sequence, options=options, overhead=A100.overhead)
    assert needed.total[0] > usable(A100.device, A100.overhead)
    assert found is not None
    assert key in found
    assert key != "strategy.shard" or found == {key: "zero1"}


def test_what_nothing_helps() -> None:
    assert next(fitting_changes(SEVEN, point(dp=1), A100, sequence=262144, precision="bf16-mixed"), None) is None


def test_what_rules_forbid_is_not_named() -> None:
    """Of 32 heads no 64 ranks have a share each, and 32 layers are no more than 32 places."""
    row = point(dp=4, tp=8, pp=8, sequence_parallel=1)
    found = list(fitting_changes(SEVEN, row, A100, sequence=4096, precision="bf16-mixed", ranks=True))
    assert {change.get("strategy.tp", 8) for change in found} == {8, 16, 32}
    assert {change.get("strategy.pp", 8) for change in found} == {8, 16, 32}
    apart = list(fitting_changes(SEVEN, row, A100, sequence=4096, precision="bf16-mixed"))
    assert {change.get("strategy.tp", 8) for change in apart} == {8, 16, 32}
    assert len(apart) < len(found)


# ---- changes of a point, where memory is what a formula says ----


GPT = ModelSpec(family="gpt", num_layers=8, hidden=64, num_heads=8, vocab=96, max_sequence=256)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """The points whose memory is asked, of which all fit."""
    rows = list[dict[str, int]]()

    def fit(_model: object, points: Points, **_: object) -> Any:
        rows.extend(points.row(at) for at in range(len(points)))
        return SimpleNamespace(total=np.full(len(points), 1.0))

    monkeypatch.setattr(module, "step_memory", fit)
    return rows


def tried(asked: list[dict[str, int]], row: dict[str, int], *, ranks: bool = False) -> dict[str, dict[str, int]]:
    """Points by the change that makes them."""
    changes = list(fitting_changes(GPT, row, A100, sequence=256, precision="bf16-mixed", ranks=ranks))
    assert asked[0] == row and changes[0] == {}
    return {" ".join(f"{key.partition('.')[2]}={value}" for key, value in change.items()): point
            for change, point in zip(changes, asked, strict=True)}  # fmt: skip


ROW = point(dp=4, cp=2, ring=2, tp=2, micro=4, num_micro=3, params=2, grads=4, optim=8, p1=2, recompute_layers=-1)


def test_a_change_keeps_the_batch_and_what_it_does_not_name(asked: list[dict[str, int]]) -> None:
    found = tried(asked, ROW)
    full = {"recompute": RECOMPUTES.index("full"), "recompute_layers": -1}
    assert found["shard=zero1"] == ROW | {"params": 1, "grads": 1, "optim": 8}
    assert found["shard=fsdp"] == ROW | {"params": 8, "grads": 8, "optim": 8}
    assert found["recompute=full"] == ROW | full
    assert found["micro_batch_size=2"] == ROW | {"micro": 2, "num_micro": 6}
    assert found["micro_batch_size=1"] == ROW | {"micro": 1, "num_micro": 12, "p1": 1}
    # Fewer replicas: more micro-batches, and factors that divide them.
    assert found["tp=4 dp=2"] == ROW | {"tp": 4, "dp": 2, "num_micro": 6, "params": 2, "grads": 4, "optim": 4}
    assert found["cp=4 dp=2"] == ROW | {"cp": 4, "ring": 4, "dp": 2, "num_micro": 6}
    assert found["cp=8 dp=1"] == ROW | {"cp": 8, "ring": 8, "dp": 1, "num_micro": 12}
    assert found["pp=2 dp=2"] == ROW | {"pp": 2, "dp": 2, "num_micro": 6, "params": 2, "grads": 4, "optim": 4}
    last = "recompute=full shard=fsdp micro_batch_size=1 tp=8 dp=1"
    assert found[last] == ROW | full | {
        "tp": 8, "dp": 1, "micro": 1, "num_micro": 48, "p1": 1, "params": 2, "grads": 2, "optim": 2,
    }  # fmt: skip
    assert not any("pp=64" in change for change in found)


def test_more_ranks_come_last_and_are_asked_for(asked: list[dict[str, int]]) -> None:
    fewer = tried(asked, ROW)
    asked.clear()
    found = tried(asked, ROW, ranks=True)
    assert list(found)[: len(fewer)] == list(fewer)
    more = [change for change in found if change not in fewer]
    assert more[0] == "tp=4"
    assert found["tp=4"] == ROW | {"tp": 4}
    wide = "recompute=full shard=fsdp micro_batch_size=1 dp=8"
    assert found[wide]["num_micro"] == 6
    assert found[wide]["optim"] == 16
    assert any("dp=64" in change for change in more)  # fewer than a micro-batch each are one
    assert found["recompute=full shard=fsdp micro_batch_size=1 dp=256"]["num_micro"] == 1


def test_kinds_of_context_parallelism_stay(asked: list[dict[str, int]]) -> None:
    heads = tried(asked, ROW | {"ring": 1})
    assert (heads["cp=4 dp=2"]["cp"], heads["cp=4 dp=2"]["ring"]) == (4, 1)
    asked.clear()
    none = tried(asked, point(dp=4, micro=1, num_micro=3))
    assert (none["cp=2 dp=2"]["cp"], none["cp=2 dp=2"]["ring"]) == (2, 1)
    asked.clear()
    both = tried(asked, ROW | {"cp": 4, "ring": 2, "dp": 2, "optim": 8})
    assert (both["cp=8 dp=1"]["cp"], both["cp=8 dp=1"]["ring"]) == (8, 2)


def test_a_cut_sequence_and_experts_follow(asked: list[dict[str, int]]) -> None:
    found = tried(asked, ROW | {"sequence_parallel": 0, "ep": 8})
    assert found["sequence_parallel=True"] == ROW | {"sequence_parallel": 1, "ep": 8}
    assert (found["tp=4 dp=2"]["ep"], found["pp=4 dp=1"]["ep"]) == (4, 2)
    assert found["shard=zero1"]["ep"] == 8


def test_what_fits_is_told_nearest_first_and_what_is_as_large_as_the_device_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = usable(A100.device, A100.overhead)
    told = iter([limit * 1.01, limit, limit * 0.5])

    def sizes(_model: object, points: Points, **_: object) -> Any:
        return SimpleNamespace(total=np.array([next(told, limit * 2) for _ in range(len(points))]))

    monkeypatch.setattr(module, "step_memory", sizes)
    found = list(fitting_changes(GPT, ROW, A100, sequence=256, precision="bf16-mixed"))
    assert found == [{"strategy.shard": "zero1"}, {"strategy.shard": "fsdp"}]


def test_usable_memory_and_overhead_of_a_report_are_the_devices() -> None:
    row = point(pp=2, dp=2, cp=2, ring=2, tp=2, num_micro=4, params=2, grads=2, optim=4)
    step = step_of(GPT, row, sequence=256, precision="bf16-mixed")
    report = memory_report(step, A100)
    assert report.usable == int(usable(A100.device, A100.overhead))
    sharding, groups = Sharding(params=2, grads=2, optim=4), 6  # all, tp, pp, a ring; params, optim
    assert step.shardings == (sharding,) * 2
    for one in report.places:
        memory, overhead = one.place.memory, A100.overhead
        moving = memory.activations + memory.buffers
        told = overhead.context.value + groups * overhead.communicator.value + overhead.stuck.value * moving
        assert one.overhead == int(told)
        assert one.total == memory.total + one.overhead
        assert one.place.sent == {}
    assert report.fits
    assert not replace(report, usable=report.fullest.total - 1).fits
    assert replace(report, usable=report.fullest.total).fits


def test_rows_of_a_table() -> None:
    row = point(pp=2, num_micro=4, schedule=SCHEDULES.index("interleaved"), virtual=2)
    report = memory_report(step_of(GPT, row, sequence=256, precision="fp32"), Cluster.preset("lab"))
    head, first, last = report.rows()
    assert head[:2] == ("place", "layers") and head[-4:] == ("overhead", "total", "of device", "fullest")
    assert (first[0], first[1], last[0]) == ("0", "2+2", "1")
    assert first[-2] == f"{report.places[0].total / report.usable:.0%}"
    alive = report.places[0].place.memory.alive
    assert first[-1] == f"{report.places[0].place.memory.when}, {alive} micro-batches alive"
    one = memory_report(step_of(GPT, point(), sequence=256, precision="fp32"), Cluster.preset("lab"))
    assert list(one.rows())[1][-1] == one.places[0].place.memory.when
