"""What fills each device, and what would make it fit."""

from __future__ import annotations

import pytest

from plait.core.cluster import Cluster
from plait.plan.closed_memory import fits, step_memory
from plait.plan.memory_report import memory_report, shortfall
from plait.plan.point_work import work_of
from plait.plan.points import RECOMPUTES, Points
from tests.models import seven_billion

SEVEN = seven_billion()
A100 = Cluster.preset("a100-80")


def point(**values: int) -> dict[str, int]:
    return Points.of([values]).row(0)


def test_a_table_of_every_place() -> None:
    row = point(pp=4, dp=8, num_micro=8, optim=8, recompute=RECOMPUTES.index("full"))
    report = memory_report(work_of(SEVEN, row, sequence=4096, precision="bf16-mixed", gpu=True), A100)
    assert report.fits
    head, *lines = report.rows()
    assert len(lines) == 4
    assert all(len(line) == len(head) for line in lines)
    assert lines[0][head.index("fullest")].endswith("4 micro-batches alive")
    assert "backward of stage 3" in lines[3][head.index("fullest")]
    assert report.fullest.total == max(place.total for place in report.places)
    found = step_memory(SEVEN, Points.of([row]), sequence=4096)
    assert report.fullest.total == pytest.approx(found.total[0], rel=0.03)


def test_what_fits_falls_short_of_nothing() -> None:
    row = point(dp=8, params=8, grads=8, optim=8)
    assert shortfall(SEVEN, row, A100, sequence=4096, precision="bf16-mixed") is None


@pytest.mark.parametrize(("row", "sequence", "says"), [
    (point(dp=8, num_micro=4), 2048, ["exceed", "of place 0", "fits with shard = zero1"]),
    (point(dp=8, micro=4, params=8, grads=8, optim=8), 8192, ["activations of place 0 exceed by", "recompute = "]),
    (point(dp=128, optim=128), 262144, ["activations", "cp = "]),
], ids=["states", "activations", "sequence"])  # fmt: skip
def test_the_nearest_change_fits(row: dict[str, int], sequence: int, says: list[str]) -> None:
    found = shortfall(SEVEN, row, A100, sequence=sequence, precision="bf16-mixed")
    assert found is not None
    assert not fits(SEVEN, Points.of([row]), A100, sequence=sequence)[0]
    for words in says:
        assert words in str(found)
    assert found.bytes > 0


def test_what_nothing_helps() -> None:
    found = shortfall(SEVEN, point(dp=1), A100, sequence=262144, precision="bf16-mixed")
    assert found is not None
    assert found.change is None
    assert "none of the usual changes" in str(found)
