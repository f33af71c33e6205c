"""Every wait is linked to what it waited for, under every strategy."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from plait.core.record.timeline import SpanKey
from plait.diagnose.measured.dependencies import awaited, dependencies_of
from plait.diagnose.measured.reading import read_run
from tests.support.recordings.made import Job, write_run
from tests.support.recordings.simulated import NAMES, simulated

WAITS = pl.col("kind").is_in(["wait", "idle"])


@pytest.mark.parametrize("name", NAMES)
def test_every_wait_of_a_steady_step_has_one_cause(name: str) -> None:
    plan, spans = simulated(name)
    pairs = awaited(spans)
    assert pairs["wait"].n_unique() == pairs.height
    rows = spans.with_row_index("row")
    waits = rows.filter(WAITS, pl.col("step") == 1)
    alone = waits.join(pairs, left_on="row", right_on="wait", how="anti")
    # Settled without a reduction under way: where nothing is hidden, after every op that adds to a gradient.
    shows = plan.strategy.hides_shards(forward=False)
    assert alone.filter(~pl.col("name").str.starts_with("settle") | shows).is_empty()
    both = (
        pairs.join(rows, left_on="wait", right_on="row")
        .join(rows.select(pl.all().name.suffix("_on")), left_on="on", right_on="row_on")
    )  # fmt: skip
    assert both.filter(pl.col("end_on") > pl.col("end") + 1e-9).is_empty(), "what is waited for ends before"
    assert both.filter(pl.col("axis_on") != pl.col("axis")).is_empty()
    sharding = both.filter(axis="dp").select(
        verb=pl.col("name").str.extract(r"^(\S+)"), of=pl.col("name").str.extract(r" (.*)$"),
        verb_on=pl.col("name_on").str.extract(r"^(\S+)"), of_on=pl.col("name_on").str.extract(r" (.*)$"),
    )  # fmt: skip
    known = {("need", "gather"), ("need", "publish"), ("settle", "reduce")}
    assert set(sharding.select("verb", "verb_on").iter_rows()) <= known
    assert sharding.filter(pl.col("verb") == "need", pl.col("of") != pl.col("of_on")).is_empty()
    others = both.filter(pl.col("axis").is_in(["tp", "cp"]))
    assert others.filter((pl.col("name") != pl.col("name_on")) | (pl.col("seq") != pl.col("seq_on"))).is_empty()


@pytest.mark.parametrize("name", ["zero3", "ring", "pipeline, tied, zero1"])
def test_what_is_shown_of_a_wait_is_its_cause_both_ways(name: str) -> None:
    _, spans = simulated(name)
    step = spans.filter(step=1)
    pairs = awaited(step)
    rows = step.rows(named=True)
    keys = [SpanKey(*(row[field] for field in SpanKey._fields)) for row in rows]
    for wait, on in pairs.gather_every(17).iter_rows():
        found, back = dependencies_of(spans, keys[wait]), dependencies_of(spans, keys[on])
        assert found and back
        assert [link.key for link in found.needs if link.why in ("collective", "transfer")] == [keys[on]]
        assert keys[wait] in [link.key for link in back.needed_by if link.why == "wait"]


def test_who_follows_what_was_needed_last_comes_to_the_beginning() -> None:
    step = simulated("pipeline, tied, zero1")[1].filter(step=1)
    last = step.sort("end").row(-1, named=True)
    came_back_to_its_start(step, SpanKey(*(last[field] for field in SpanKey._fields)))


def test_so_it_is_where_members_come_at_different_times(tmp_path: Path) -> None:
    spans = read_run(write_run(tmp_path / "run", Job(dp=4, pp=1, steps=1))).recording.spans
    for rank in range(4):
        came_back_to_its_start(spans, SpanKey(0, rank, "comm", "reduce mlp0", 0))


def came_back_to_its_start(step: pl.DataFrame, at: SpanKey) -> None:
    """By what each span needed last, to one that needed nothing, and never to the same."""
    seen = set[SpanKey]()
    while (found := dependencies_of(step, at)) and found.held_up_by:
        assert at not in seen
        seen.add(at)
        at = found.held_up_by.key
    assert found and seen
