from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import DataError
from plait.core.record.timeline import SCHEMA_VERSION, Span, SpanKind, Timeline


def span(
    kind: SpanKind, start: float, end: float, *, name: str = "attn0.R0", step: int = 0, rank: int = 0, seq: int = 0
) -> Span:
    return Span(step, rank, kind, name, seq, "attn", 0, 0, "forward", start, end, 64 if kind == "comm" else 0)


TIMELINE = Timeline(
    (
        span("compute", 0.0, 1.0),
        span("comm", 1.0, 3.0),
        span("compute", 1.0, 2.5, name="mlp0.F0"),
        span("wait", 2.5, 3.0),
    ),
    "feed",
)
times = st.integers(0, 10**15).map(lambda ns: ns / 1e9)
spans = st.builds(
    Span,
    step=st.integers(0, 3),
    rank=st.integers(0, 2),
    kind=st.sampled_from(["compute", "wait", "comm"]),
    name=st.text(max_size=5),
    seq=st.integers(0, 3),
    site=st.just("mlp"),
    layer=st.integers(0, 2**40),
    slice=st.integers(0, 3),
    direction=st.sampled_from(["forward", "backward"]),
    start=times,
    end=times,
    bytes=st.integers(0, 2**50),
)


@given(st.lists(spans, max_size=10))
def test_parquet_round_trips(tmp_path: Path, several: list[Span]) -> None:
    timeline = Timeline(tuple(several), "feed")
    timeline.write_parquet(tmp_path / "t.parquet")
    assert Timeline.read_parquet(tmp_path / "t.parquet") == timeline
    assert [file.name for file in tmp_path.iterdir()] == ["t.parquet"]


def test_a_truncated_foreign_or_missing_file_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = tmp_path / "t.parquet"
    with pytest.raises(DataError, match="No such file"):
        Timeline.read_parquet(file)
    TIMELINE.write_parquet(file)
    whole = file.read_bytes()
    for size in (0, 3, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(DataError, match="truncated or no timeline"):
            Timeline.read_parquet(file)
    pq.write_table(pa.table({"step": [1]}), file)
    with pytest.raises(DataError, match="no Plait timeline"):
        Timeline.read_parquet(file)
    pq.write_table(pa.table({"step": [1]}, metadata={"plait.timeline.version": "99"}), file)
    with pytest.raises(DataError, match="version 99"):
        Timeline.read_parquet(file)


def test_concat_keeps_one_plan() -> None:
    assert Timeline.concat([TIMELINE, TIMELINE]).spans == TIMELINE.spans * 2
    assert Timeline.concat([]) == Timeline(())
    with pytest.raises(DataError, match="2 different plans"):
        Timeline.concat([TIMELINE, Timeline((), "beef")])


def test_columns_are_arrays() -> None:
    columns = TIMELINE.columns()
    assert columns["kind"].tolist() == ["compute", "comm", "compute", "wait"]
    assert (columns["end"] - columns["start"]).sum() == 5.0
    assert columns["step"].dtype == "int64"


@pytest.mark.parametrize(
    ("kind", "lane"),
    [("comm", "network"), ("transfer", "network"), ("wait", "processor"), ("compute", "processor"),
     ("idle", "processor"), ("checkpoint", "processor")],
)  # fmt: skip
def test_which_resource_a_span_occupies(kind: SpanKind, lane: str) -> None:
    one = Span(0, 0, kind, "a", 0, "", 0, 0, "", 1.5, 4.0)
    assert (one.lane, one.seconds) == (lane, 2.5)


@pytest.mark.parametrize(
    ("drop", "version", "says"),
    [
        ("seq", SCHEMA_VERSION, "without seq"),
        ("", "1", "a timeline of version 1; this"),
        ("seq", "1", "version 1, without seq;"),
    ],
)
def test_a_timeline_of_other_columns_or_another_version_is_refused(
    tmp_path: Path, drop: str, version: str, says: str
) -> None:
    file = tmp_path / "t.parquet"
    TIMELINE.write_parquet(file)
    table = pq.read_table(file)
    table = table.drop_columns([drop] if drop else [])
    pq.write_table(table.replace_schema_metadata({"plait.timeline.version": version}), file)
    with pytest.raises(DataError, match=says):
        Timeline.read_parquet(file)


def test_a_timeline_has_the_version_that_others_read(tmp_path: Path) -> None:
    TIMELINE.write_parquet(tmp_path / "t.parquet")
    assert pq.read_schema(tmp_path / "t.parquet").metadata[b"plait.timeline.version"] == b"2"
