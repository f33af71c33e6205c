"""Sums of all steps of a host's ranks: a file for each block, and its totals; one start after the
other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.record.columns import Coded
from plait.core.record.records import Records
from plait.core.record.ring import Header, Name, OpPlace, RecordKind, numbered, row_type
from plait.core.record.ring_writer import this_process
from plait.core.record.rollup import COLUMNS, HOST, STEP_SUMS, TOTAL_COLUMNS, joined, totals_of
from plait.core.record.timeline import Notes
from plait.diagnose.measured.reading import glance, read_run, read_timeline
from plait.diagnose.measured.tables import read_tables, read_totals, timeline_files
from plait.diagnose.rank_map import by_segment, heat_of_segments
from plait.launch.collect.timeline_files import MAX_WAITING_FILES, STEPS, Sums

TIER = "unit"

NAMES = {1: Name("mlp0.F0", OpPlace("mlp", 0, 0, True)), 2: Name("attn0.D0", OpPlace("attn", 0, 0, False))}


def ring(rank: int, *, wall: int = 1, token: int = 7, plan: str = "feed") -> Header:
    return replace(this_process(rank=rank, world=16, plan=plan), wall=wall, token=token)


def records(steps: range, taken: int = 1000) -> Records:
    """Of every step two forwards, the second one twice as long, and a backward."""
    rows = np.zeros(3 * len(steps), row_type())
    rows["kind"], rows["step"] = RecordKind.COMPUTE, np.repeat(np.array(steps), 3)
    rows["name"] = np.tile([1, 1, 2], len(steps))
    rows["started"] = 10_000
    rows["ended"] = 10_000 + np.tile([taken, 2 * taken, 5 * taken], len(steps))
    return Records(numbered(rows, np.arange(len(rows))), NAMES, {})


def files(folder: Path, what: str) -> list[str]:
    return sorted(str(path.relative_to(folder / what)) for path in (folder / what).rglob("*.parquet"))


def test_a_host_has_one_file_for_each_block_and_one_of_its_totals(tmp_path: Path) -> None:
    sums = Sums(tmp_path, range(8, 16))
    for first in range(0, 1040, 20):
        for rank in (9, 15):
            sums.add(ring(rank), records(range(first, first + 20), taken=1000 + rank))
        assert sums.flush() is None
    assert sums.flush(last=True) is None
    names = ["block=0/ranks-00008-00015-step-00000000.parquet", "block=1/ranks-00008-00015-step-00001000.parquet"]
    assert files(tmp_path, "rollup") == files(tmp_path, "totals") == names
    table = pl.read_parquet(tmp_path / "rollup" / "**" / "*.parquet", hive_partitioning=True)
    assert table.group_by("rank").agg(pl.n_unique("step")).sort("rank").rows() == [(9, 1040), (15, 1040)]
    of_rank = pl.col("rank") == 9, pl.col("kind").is_in([HOST, *STEP_SUMS])
    whole = table.filter(pl.col("step") == 1017, *of_rank).select("kind", "sum_ns").rows()
    assert sorted(whole) == [("communication", 0), ("host", 0)]
    rows = table.filter(pl.col("step") == 1017, of_rank[0], ~of_rank[1]).drop("step", "rank", "block").rows()
    assert sorted(rows) == [
        ("compute", "attn", "backward", 1, 5045, 5045, 5045),
        ("compute", "mlp", "forward", 2, 3027, 1009, 2018),
    ]
    totals = pl.read_parquet(tmp_path / "totals" / "**" / "*.parquet", hive_partitioning=True)
    rows = totals.filter(pl.col("block") == 0, of_rank[0], ~of_rank[1]).drop("rank", "block").rows()
    assert sorted(rows) == [
        ("compute", "attn", "backward", 1000, 1000, 5045000, 5045, 5045),
        ("compute", "mlp", "forward", 1000, 2000, 3027000, 1009, 2018),
    ]


def test_a_file_waits_until_it_pays_or_is_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sums = Sums(tmp_path, range(1))
    sums.add(ring(0), records(range(STEPS - 1)))
    assert sums.flush() is None and not files(tmp_path, "rollup")
    sums.add(ring(0), records(range(STEPS - 1, STEPS)))
    assert sums.flush() is None and len(files(tmp_path, "rollup")) == 1
    sums.add(ring(0), records(range(STEPS, STEPS + 1)))
    before = (tmp_path / "rollup" / files(tmp_path, "rollup")[0]).stat().st_mtime_ns
    assert sums.flush() is None
    assert (tmp_path / "rollup" / files(tmp_path, "rollup")[0]).stat().st_mtime_ns == before
    monkeypatch.setattr("plait.launch.collect.timeline_files.REWRITE_SECONDS", 0.0)
    assert sums.flush() is None
    assert sums.written(ring(0)) == Sums(tmp_path, range(1)).written(ring(0)) == STEPS


def test_what_an_agent_before_has_written_is_known_by_ring(tmp_path: Path) -> None:
    sums = Sums(tmp_path, range(4))
    for rank in range(4):
        sums.add(ring(rank, token=rank + 1), records(range(10 + rank)))
    assert sums.flush(last=True) is None
    (tmp_path / "rollup" / "block=0" / "ranks-00000-00003-step-x.parquet").write_bytes(b"nothing")
    again = Sums(tmp_path, range(2, 6))
    assert [again.written(ring(rank, token=rank + 1)) for rank in (2, 3)] == [11, 12]
    assert again.written(ring(2, token=99)) == -1
    assert Sums(tmp_path, range(4, 8)).written(ring(4)) == -1


def test_of_what_a_rank_does_again_the_later_start_counts(tmp_path: Path) -> None:
    """Also while other ranks still hand in what they did before."""
    sums = Sums(tmp_path / "timeline", range(2))
    for rank in (0, 1):
        sums.add(ring(rank, wall=100), records(range(20)))
    sums.add(ring(0, wall=300, token=8), records(range(15, 30), taken=3))
    assert sums.flush(last=True) is None
    sums.add(ring(1, wall=100), records(range(20, 22)))
    sums.add(ring(1, wall=200, token=8), records(range(15, 30), taken=3))  # by a clock that is behind
    assert sums.flush(last=True) is None
    found = read_timeline(tmp_path).rollups.filter(site="attn")
    assert found.group_by("rank", "step").len()["len"].to_list() == [1] * 60
    long = found.filter(pl.col("sum") > 1e-6).group_by("rank").agg(pl.max("step")).sort("rank")
    assert long.rows() == [(0, 14), (1, 14)]


def test_a_new_plan_has_files_of_its_own(tmp_path: Path) -> None:
    sums = Sums(tmp_path, range(1))
    sums.add(ring(0, plan="one"), records(range(5)))
    sums.add(ring(0, plan="two"), records(range(5, 9)))
    assert sums.flush(last=True) is None
    notes = Notes()
    for plan, steps in (("one", range(5)), ("two", range(5, 9))):
        _, found = read_tables(timeline_files(tmp_path), plan, notes)
        assert found["step"].unique().sort().to_list() == list(steps)
        seen = read_totals(tmp_path, plan)
        assert seen is not None and (seen.first, seen.last) == (steps[0], steps[-1])
    assert set(notes.lines) == {"1 files belong to other plans of this run, and were left out"}


def test_a_full_disk_is_waited_for_and_costs_blocks_that_are_over(tmp_path: Path) -> None:
    folder = tmp_path / "timeline"
    folder.write_text("in the way")
    sums = Sums(folder, range(1))
    blocks = MAX_WAITING_FILES + 3
    for first in range(0, 1000 * blocks, 500):
        sums.add(ring(0), records(range(first, first + 500)))
        assert isinstance(sums.flush(), OSError)
    assert sums.lost == 2000
    folder.unlink()
    assert sums.flush(last=True) is None
    assert pl.read_parquet(folder / "rollup" / "**" / "*.parquet")["step"].n_unique() == 1000 * blocks - 2000


def test_steps_of_which_nothing_is_summed_make_no_file(tmp_path: Path) -> None:
    sums, empty = Sums(tmp_path, range(1)), records(range(3))
    empty.table["ended"] = 0  # nothing of it has ended
    sums.add(ring(0), empty)
    assert sums.flush(last=True) is None and files(tmp_path, "rollup") == []
    sums.add(ring(0), records(range(3, 5)))
    assert sums.flush(last=True) is None
    assert files(tmp_path, "rollup") == ["block=0/ranks-00000-00000-step-00000003.parquet"]
    assert sums.lost == 0


def test_names_of_files_are_taken_by_no_other(tmp_path: Path) -> None:
    """Three starts of a rank, one after the other and then at once."""
    for token in (7, 8):
        sums = Sums(tmp_path, range(1))
        sums.add(ring(0, token=token, wall=token), records(range(4)))
        assert sums.flush(last=True) is None
    sums = Sums(tmp_path, range(1))
    for token in (9, 10):
        sums.add(ring(0, token=token, wall=token), records(range(4)))
    assert sums.flush(last=True) is None
    first = "block=0/ranks-00000-00000-step-00000000"
    assert files(tmp_path, "rollup") == [f"{first}{more}.parquet" for more in ("-2", "-3", "-4", "")]


def test_at_a_glance_a_run_looks_as_its_sums_do(tmp_path: Path) -> None:
    """Of several hosts; broken and foreign files are said and skipped."""
    for first in (0, 4):
        sums = Sums(tmp_path / "timeline", range(first, first + 4))
        for rank in range(first, first + 4):
            sums.add(ring(rank), records(range(1100), taken=1000 + rank))
        assert sums.flush(last=True) is None
    seen, run = glance(tmp_path), read_run(tmp_path, spans=False)
    assert seen is not None and (seen[0].first, seen[0].last, seen[0].notes) == (0, 1099, ())
    maps = (
        heat_of_segments(seen[0].segments, seen[1]),
        heat_of_segments(by_segment(run.recording.rollup), run.recording.grid),
    )
    assert maps[0].columns == maps[1].columns and maps[0].ranks.tolist() == list(range(8))
    assert np.allclose(maps[0].seconds, maps[1].seconds, rtol=1e-12)
    block = tmp_path / "timeline" / "totals" / "block=0"
    first, second = sorted(block.iterdir())
    first.write_bytes(first.read_bytes()[:-20])
    pl.DataFrame({"a": [1]}).write_parquet(block / "foreign.parquet")
    (block / "folder.parquet").mkdir()
    again = glance(tmp_path)
    assert again is not None
    said = " ".join(again[0].notes)
    assert first.name in said and "foreign.parquet" in said and "folder.parquet" in said and second.name not in said
    assert again[0].segments["rank"].n_unique() == 8, "the other block's are whole"
    assert read_run(tmp_path).notes == run.notes, "totals are none of the tables"


def test_runs_without_totals_have_no_glance(tmp_path: Path) -> None:
    assert glance(tmp_path) is None
    (tmp_path / "timeline" / "totals" / "block=0").mkdir(parents=True)
    (tmp_path / "timeline" / "totals" / "block=0" / "ranks-00000-00000-step-00000000.parquet").write_bytes(b"PAR1")
    assert glance(tmp_path) is None


ROW = st.tuples(
    st.integers(0, 3), st.integers(0, 2), st.sampled_from("ab"), st.sampled_from("xyz"), st.sampled_from(["", "f"]),
    st.integers(1, 9), st.integers(0, 10**12), st.integers(0, 99), st.integers(100, 999),
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(ROW, min_size=1, max_size=20), min_size=1, max_size=4))
def test_totals_are_sums_over_steps(parts: list[list[tuple[int | str, ...]]]) -> None:
    texts = ("kind", "site", "direction")

    def columns(rows: list[tuple[int | str, ...]]) -> dict[str, object]:
        found: dict[str, object] = {}
        for name, values in zip(COLUMNS, zip(*rows, strict=True), strict=True):
            known = sorted(set(map(str, values)))
            codes = np.array([known.index(str(value)) for value in values], np.int32) if name in texts else None
            found[name] = Coded(known, codes) if codes is not None else np.array(values, np.int64)
        return found

    whole = joined([columns(rows) for rows in parts])
    plain = pl.DataFrame([row for rows in parts for row in rows], schema=COLUMNS, orient="row")
    assert [whole[name].tolist() for name in COLUMNS] == [plain[name].to_list() for name in COLUMNS]
    found = totals_of(whole)
    expected = plain.group_by("rank", *texts).agg(
        steps=pl.len(), n=pl.sum("n"), sum_ns=pl.sum("sum_ns"), min_ns=pl.min("min_ns"),
        max_ns=pl.max("max_ns"),
    )  # fmt: skip
    rows = zip(*(found[name].tolist() for name in TOTAL_COLUMNS), strict=True)
    assert sorted(rows) == sorted(expected.select(TOTAL_COLUMNS).rows())
