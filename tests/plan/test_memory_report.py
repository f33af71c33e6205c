"""What fills each device, and what would make it fit."""

from __future__ import annotations

import pytest

from plait.core.cluster import Cluster
from plait.plan.closed_memory import fits, step_memory
from plait.plan.memory_report import fitting_changes, memory_report
from plait.plan.point_step import step_of
from plait.plan.points import RECOMPUTES, Points
from tests.support.models import seven_billion

SEVEN = seven_billion()
A100 = Cluster.preset("a100-80")


def point(**values: int) -> dict[str, int]:
    return Points.of([values]).row(0)


def test_a_table_of_every_place() -> None:
    row = point(pp=4, dp=8, num_micro=8, optim=8, recompute=RECOMPUTES.index("full"))
    report = memory_report(step_of(SEVEN, row, sequence=4096, precision="bf16-mixed", gpu=True), A100)
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
    assert not fits(SEVEN, Points.of([row]), A100, sequence=sequence)[0]
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
