"""What a span waited for, across the axes; windows of the timeline; clocks led to each other."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from plait.core.record.timeline import SpanKey
from plait.diagnose.measured.dependencies import SpanDependencies, aligned, dependencies_of
from plait.diagnose.measured.reading import read_run
from plait.diagnose.measured.recording import SPANS, Recording, meetings_of, rollup_of
from plait.view.time_figures import shifted
from tests.support.recordings.made import At, Job, write_run


def slow(at: At) -> float:
    return (0.1 if at.way == "forward" else 0.2) * (1.5 if (at.dp, at.stage) == (1, 0) else 1.0)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    folder = tmp_path_factory.mktemp("run")
    return read_run(write_run(folder / "run", Job(dp=4, pp=2, steps=6, compute=slow))).recording


def test_a_wait_for_another_stage(recording: Recording) -> None:
    wait = SpanKey(3, 4, "idle", "1RECV_F2", 0)
    found = dependencies_of(recording.spans, wait)
    assert found
    sent = found.needs[0]
    assert (sent.key, sent.axis, sent.why) == (SpanKey(3, 0, "transfer", "0SEND_F2", 0), "pp", "transfer")
    back = dependencies_of(recording.spans, sent.key)
    assert back and (wait, "pp", "wait") in [(one.key, one.axis, one.why) for one in back.needed_by]
    computed = [one for one in back.needs if one.why == "order"]
    assert computed[0].key == SpanKey(3, 0, "compute", "mlp0.F0", 2), "what made the tensor that is sent"


def test_a_collective_names_the_last_to_come(recording: Recording) -> None:
    found = dependencies_of(recording.spans, SpanKey(3, 0, "comm", "reduce mlp0", 0))
    assert found
    last = [one for one in found.needs if one.last]
    assert [(one.key.rank, one.axis, one.why) for one in last] == [(1, "dp", "member")]
    assert last[0].late > 0.5
    assert {one.key.rank for one in found.needs if one.why == "member"} == {1, 2, 3}


def table(rows: list[tuple[str, int, str, str, float, float]]) -> pl.DataFrame:
    """(kind, rank, name, axis, start, end) of a step."""
    base = {"step": 0, "seq": 0, "site": "x", "layer": 0, "slice": 0, "direction": "forward", "bytes": 8, "group": "0"}
    lanes = {"comm": "tp", "wait": "processor", "compute": "processor"}
    spans = [{**base, "kind": k, "rank": r, "name": n, "axis": a, "start": s, "end": e} for k, r, n, a, s, e in rows]
    spans = [one | {"lane": lanes[one["kind"]], "meeting": 7 if one["kind"] == "comm" else None} for one in spans]
    return pl.DataFrame(spans, schema_overrides={"meeting": pl.UInt64}).select(list(SPANS)).cast(SPANS)  # type: ignore[arg-type]


def test_a_wait_shows_whom_its_collective_waited_for() -> None:
    spans = table([
        ("compute", 0, "attn0.F0", "", 0.0, 1.0),
        ("comm", 0, "gather mlp0", "tp", 1.0, 4.5),
        ("wait", 0, "need mlp0", "tp", 2.0, 4.5),
        ("compute", 1, "attn0.F0", "", 0.0, 4.0),
        ("comm", 1, "gather mlp0", "tp", 4.0, 4.5),
        ("wait", 1, "need mlp0", "tp", 4.1, 4.5),
    ])  # fmt: skip
    found = dependencies_of(spans, SpanKey(0, 0, "wait", "need mlp0", 0))
    assert found
    assert [(one.key.rank, one.key.kind, one.why, one.last) for one in found.needs] == [
        (0, "comm", "collective", False), (1, "comm", "member", True), (0, "compute", "order", False),
    ]  # fmt: skip
    # Where clocks do not agree, the last to come is in it for the shortest time.
    apart = shifted(spans, {1: -100.0})
    found = dependencies_of(apart, SpanKey(0, 0, "comm", "gather mlp0", 0), clocks_agree=False)
    assert found and [(one.key.rank, one.last) for one in found.needs if one.why == "member"] == [(1, True)]
    assert (0, "wait") in [(one.key.rank, one.key.kind) for one in found.needed_by]


def test_clocks_of_hosts_are_led_to_each_other(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", Job(dp=4, pp=1, steps=20), hosts=2)).recording
    assert not run.clocks_agree
    late = shifted(run.spans, {2: 5.0, 3: 5.0})
    apart = Recording(
        grid=run.grid, rollup=rollup_of(late), meetings=meetings_of(late), spans=late, clocks_agree=False
    )  # fmt: skip
    found = aligned(apart)
    assert found.lost == ()
    assert found.error < 0.01
    assert found.offsets == pytest.approx({0: 0.0, 1: 0.0, 2: -5.0, 3: -5.0}, abs=1e-3)
    alone = aligned(
        Recording(grid=run.grid, rollup=run.rollup, meetings=run.meetings.clear(), spans=run.spans, clocks_agree=False)
    )
    assert alone.lost == ("h1",)
    one_clock = Recording(grid=run.grid, rollup=run.rollup, meetings=run.meetings, spans=run.spans)
    assert aligned(one_clock).offsets == {}


# ---- what held a span up ----


def links(spans: pl.DataFrame, key: SpanKey) -> SpanDependencies:
    found = dependencies_of(spans, key)
    assert found is not None
    return found


def test_what_held_a_span_up() -> None:
    spans = table([
        ("compute", 0, "a", "", 0.0, 1.0), ("compute", 0, "b", "", 1.0, 3.0),
        ("comm", 0, "gather mlp0", "tp", 1.0, 6.0),
        ("wait", 0, "need mlp0", "tp", 3.0, 6.0), ("compute", 0, "c", "", 6.0, 7.0),
        ("compute", 1, "a", "", 0.0, 5.0), ("comm", 1, "gather mlp0", "tp", 5.0, 6.0),
        ("compute", 1, "b", "", 6.0, 7.0),
    ])  # fmt: skip
    wait = links(spans, SpanKey(0, 0, "wait", "need mlp0", 0))
    assert wait.held_up_by is not None and wait.held_up_by.key == SpanKey(0, 1, "comm", "gather mlp0", 0)
    assert [one.key.name for one in wait.needed_by] == ["c"]
    came_last = links(spans, SpanKey(0, 1, "comm", "gather mlp0", 0))
    assert came_last.held_up_by is not None and came_last.held_up_by.key == SpanKey(0, 1, "compute", "a", 0)
    early = links(spans, SpanKey(0, 0, "comm", "gather mlp0", 0))
    assert early.held_up_by is not None and early.held_up_by.key.rank == 1
    assert [(one.key.rank, one.late) for one in early.needs if one.why == "member"] == [(1, 4.0)]
    first = links(spans, SpanKey(0, 0, "compute", "a", 0))
    assert (first.needs, first.held_up_by) == ((), None)
    assert [one.key for one in first.needed_by] == [
        SpanKey(0, 0, "compute", "b", 0),
        SpanKey(0, 0, "comm", "gather mlp0", 0),
    ]
    assert [one.key.name for one in links(spans, SpanKey(0, 0, "compute", "b", 0)).needed_by] == ["need mlp0"], (
        "what was begun before is not its doing"
    )


def test_times_that_are_rounded_keep_their_order() -> None:
    """A millionth of a second may overlap, and no more."""
    for over, found in ((0.9e-6, ["a"]), (1.1e-6, [])):
        spans = table([("compute", 0, "a", "", 0.0, 1.0 + over), ("compute", 0, "b", "", 1.0, 2.0)])
        assert [one.key.name for one in links(spans, SpanKey(0, 0, "compute", "b", 0)).needs] == found
        assert [one.key.name for one in links(spans, SpanKey(0, 0, "compute", "a", 0)).needed_by] == (
            ["b"] if found else []
        )


def test_of_a_large_group_as_many_are_listed_as_a_page_shows() -> None:
    spans = table([("comm", rank, "gather mlp0", "tp", rank / 100, 2.0) for rank in range(70)])
    found = links(spans, SpanKey(0, 69, "comm", "gather mlp0", 0))
    assert len(found.needs) == 63 and not any(one.last for one in found.needs), "it came last itself"
    assert [one.key.rank for one in found.needs[:2]] == [68, 67]
    alone = links(table([("comm", 0, "gather mlp0", "tp", 0.0, 2.0)]), SpanKey(0, 0, "comm", "gather mlp0", 0))
    assert alone.needs == ()


def test_of_what_a_wait_needed_the_last_to_end_held_it_up() -> None:
    """A message, or what the processor did before."""
    for sent, kind in ((4.0, "transfer"), (0.5, "compute")):
        spans = table([("compute", 0, "a", "", 0.0, 1.0), ("wait", 0, "x", "pp", 1.0, 4.0),
                       ("comm", 1, "y", "pp", 0.2, sent)])  # fmt: skip
        spans = spans.with_columns(
            kind=pl.col("kind").cast(pl.String).replace({"wait": "idle", "comm": "transfer"}).cast(SPANS["kind"]),
            meeting=pl.when(pl.col("kind") == "compute").then(None).otherwise(pl.lit(7, pl.UInt64)),
        )
        found = links(spans, SpanKey(0, 0, "idle", "x", 0))
        assert {one.key.kind for one in found.needs} == {"transfer", "compute"}
        assert found.held_up_by is not None and found.held_up_by.key.kind == kind


def test_what_takes_no_time_does_not_need_itself() -> None:
    spans = table(
        [("compute", 0, "a", "", 0.0, 1.0), ("compute", 0, "b", "", 1.0, 1.0), ("compute", 0, "c", "", 1.0, 2.0)]
    )
    found = links(spans, SpanKey(0, 0, "compute", "b", 0))
    assert [one.key.name for one in found.needed_by] == ["c"]
    assert [one.key.name for one in found.needs] == ["a"]
