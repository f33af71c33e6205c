"""What a page knows of a run, and when: a first picture of totals, then all sums, then spans and
verdicts."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from plait.core.record.columns import Coded
from plait.core.record.rollup import COLUMNS, RollupSource, rollup_file, write_rollup
from plait.diagnose.measured.reading import read_run
from plait.view.callbacks import first_paint, status_of
from plait.view.store import Snapshot, Watched, heat_of
from tests.support.recordings.made import plan_of, spans_of_job, write_run
from tests.view.served import CULPRIT, SLOW

TIER = "unit"

ORDER = ("pp", "dp")


def coded(values: pl.Series) -> Coded:
    texts = values.unique().sort().to_list()
    return Coded(texts, np.array([texts.index(value) for value in values], np.int32))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """With sums and totals of two hosts."""
    folder = write_run(tmp_path / "run", SLOW)
    length = ((pl.col("end") - pl.col("start")) * 1e9).round().cast(pl.Int64)
    sums = (
        spans_of_job(SLOW)
        .group_by("step", "rank", "kind", "site", "direction")
        .agg(n=pl.len().cast(pl.Int64), sum_ns=length.sum(), min_ns=length.min(), max_ns=length.max())
    )
    for ranks in (range(4), range(4, 8)):
        own = sums.filter(pl.col("rank").is_in(list(ranks)))
        columns = {
            name: coded(own[name]) if own.schema[name] == pl.String else own[name].to_numpy() for name in COLUMNS
        }
        source = RollupSource(plan=plan_of(SLOW).key, began=0, rings=dict.fromkeys(ranks, (1, 11)))
        write_rollup(rollup_file(folder / "timeline", ranks, 0), columns, source)
    return folder


def wait(watched: Watched, until: Callable[[Snapshot], object], *, all_of_it: bool) -> Snapshot:
    end = time.monotonic() + 240
    while not until(snapshot := watched.look(all_of_it=all_of_it)):
        assert time.monotonic() < end
        time.sleep(0.01)
    return snapshot


def test_the_first_picture_is_there_before_any_sum_is_read(run: Path) -> None:
    watched = Watched(run, "run")
    painted = first_paint(watched)
    snapshot = wait(watched, lambda _: not watched._reading, all_of_it=False)
    assert snapshot.run is None and snapshot.glance is not None and painted["figure"]["data"]
    assert status_of(snapshot) == "run: 8 ranks, steps 1 to 12, has ended"
    assert heat_of(snapshot, "median", None, ORDER, "segments") is None, "which totals do not tell"
    first = heat_of(snapshot, "mean", None, ORDER, "segments")
    sums = replace_run(snapshot, run)
    second = heat_of(sums, "mean", None, ORDER, "segments")
    assert first is not None and second is not None and first.columns == second.columns
    assert np.allclose(first.seconds, second.seconds, rtol=1e-6, equal_nan=True)
    told = wait(watched, lambda one: one.report, all_of_it=True)
    assert told.has_spans and told.named() == {CULPRIT: "slow processor"}
    assert heat_of(told, "median", None, ORDER, "steps") is not None


def replace_run(snapshot: Snapshot, folder: Path) -> Snapshot:
    return Snapshot(name="run", folder=folder, run=read_run(folder, spans=False), grid=snapshot.grid)


def test_totals_that_are_broken_are_said_and_sums_come_without(run: Path) -> None:
    first, second = sorted((run / "timeline" / "totals").rglob("*.parquet"))
    first.write_bytes(first.read_bytes()[:-8])
    half = Watched(run, "run")
    half.first()
    snapshot = wait(half, lambda _: not half._reading, all_of_it=False)
    assert snapshot.glance is not None and first.name in " ".join(snapshot.notes)
    assert "4 ranks" in status_of(snapshot)
    second.write_bytes(b"nothing")
    watched = Watched(run, "run")
    snapshot = wait(watched, lambda one: one.run, all_of_it=False)
    assert snapshot.glance is None and snapshot.recording is not None and snapshot.recording.ranks == 8


def test_sums_that_cannot_be_read_are_tried_once(run: Path) -> None:
    for path in (run / "timeline").rglob("*.parquet"):
        if "totals" not in path.parts:
            path.write_bytes(b"nothing")
    watched = Watched(run, "run")
    wait(watched, lambda one: one.glance, all_of_it=False)
    snapshot = wait(watched, lambda one: one.problem and not watched._reading, all_of_it=True)
    assert "holds no timeline that can be read" in snapshot.problem
    assert snapshot.glance is not None, "what was seen stays"
    watched.look(all_of_it=True)
    assert not watched._reading
