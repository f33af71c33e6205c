"""What tables would take in memory is known before they are read."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from plait.core.base.errors import DataError
from plait.core.record.columns import (
    FREE,
    ROW,
    Coded,
    Unpacked,
    copy_rows,
    first_line,
    metadata_of,
    read_columns,
    write_columns,
)

META = {"plait.timeline.version": "2"}


def equal_rows(path: Path, rows: int) -> Path:
    """A file of some kilobytes with so many rows."""
    block = pa.table({"step": pa.array(np.zeros(min(rows, 1_000_000), np.int64))}).replace_schema_metadata(META)
    with pq.ParquetWriter(path, block.schema, compression="zstd") as writer:
        for first in range(0, rows, 1_000_000):
            writer.write_table(block.slice(0, min(rows - first, 1_000_000)))
    return path


def test_a_file_may_hold_what_its_size_is_worth(tmp_path: Path) -> None:
    small = equal_rows(tmp_path / "small.parquet", FREE // ROW)
    assert Unpacked().metadata(small)["plait.timeline.version"] == "2"
    large = equal_rows(tmp_path / "large.parquet", 60_000_000)
    assert large.stat().st_size < 4_000_000
    with pytest.raises(DataError, match=r"it holds 60000000 rows, .* bytes unpacked, in \d+ bytes; at most"):
        Unpacked().metadata(large)
    with pytest.raises(DataError, match="60000000 rows"):
        read_columns(large, "plait.timeline.version")
    assert metadata_of(large) == {}
    copy_rows(large, tmp_path / "copy.parquet", "step", lambda step: True)
    assert not (tmp_path / "copy.parquet").exists()


def test_many_files_may_not_hold_more_than_one(tmp_path: Path) -> None:
    most = equal_rows(tmp_path / "most.parquet", FREE // ROW)
    read = Unpacked()
    read.metadata(most)
    with pytest.raises(DataError, match="at most"):
        read.metadata(most)


def test_numbers_that_differ_are_worth_their_size(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    table = pa.table({name: pa.array(rng.integers(0, 2**40, 500_000)) for name in ("start_ns", "end_ns")})
    pq.write_table(table, tmp_path / "real.parquet", compression="zstd")
    assert 500_000 * ROW > FREE
    Unpacked().metadata(tmp_path / "real.parquet")


def test_a_long_text_counts_as_what_it_is_unpacked(tmp_path: Path) -> None:
    pq.write_table(pa.table({"name": ["x" * (64 << 20)]}), tmp_path / "text.parquet", compression="zstd")
    assert (tmp_path / "text.parquet").stat().st_size < 100_000
    with pytest.raises(DataError, match="it holds 1 rows"):
        Unpacked().metadata(tmp_path / "text.parquet")


def test_pipes_and_devices_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.parquet")
    with pytest.raises(DataError, match="it is a pipe, no regular file"):
        Unpacked().metadata(tmp_path / "pipe.parquet")
    with pytest.raises(DataError, match="it is a device"):
        Unpacked().metadata(Path("/dev/zero"))
    with pytest.raises(DataError, match="it is not there"):
        Unpacked().metadata(tmp_path / "nothing.parquet")
    (tmp_path / "short.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="it is truncated or no Parquet file"):
        Unpacked().metadata(tmp_path / "short.parquet")


def test_columns_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Arrays and lists, texts and numbers."""
    columns = {
        "step": ("int64", np.arange(4, dtype=np.int32)[::2]), "list": ("int64", [5, 6]),
        "share": ("float64", np.array([0.5, 1.5])), "word": ("string", ["a", "b"]),
        "text": ("string", np.array(["c", "d"])), "coded": ("string", Coded(["x", "yé"], np.array([1, 0], np.int32))),
    }  # fmt: skip
    write_columns(tmp_path / "a.parquet", columns, META)
    found = pq.read_table(tmp_path / "a.parquet").to_pydict()
    assert found == {
        "step": [0, 2], "list": [5, 6], "share": [0.5, 1.5], "word": ["a", "b"], "text": ["c", "d"],
        "coded": ["yé", "x"],
    }  # fmt: skip


def test_rows_that_are_wanted_are_copied(tmp_path: Path) -> None:
    write_columns(tmp_path / "a.parquet", {"step": ("int64", [1, 2, 2, 3]), "n": ("int64", [5, 6, 7, 8])}, META)
    copy_rows(tmp_path / "a.parquet", tmp_path / "b.parquet", "step", lambda step: step < 3)
    assert pq.read_table(tmp_path / "b.parquet").to_pydict() == {"step": [1, 2, 2], "n": [5, 6, 7]}
    assert metadata_of(tmp_path / "b.parquet")["plait.timeline.version"] == "2"
    copy_rows(tmp_path / "a.parquet", tmp_path / "c.parquet", "step", lambda step: step > 3)
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1" * 9)
    copy_rows(tmp_path / "damaged.parquet", tmp_path / "c.parquet", "step", lambda step: True)
    assert not (tmp_path / "c.parquet").exists()


def test_an_error_of_a_library_is_told_in_a_line() -> None:
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError("one")) == "one"
    assert first_line(ValueError()) == "ValueError"


def test_what_is_unknown_is_none(tmp_path: Path) -> None:
    write_columns(tmp_path / "a.parquet", {"n": ("int64", [5, None]), "word": ("string", [None, "b"])}, META)
    assert pq.read_table(tmp_path / "a.parquet").to_pydict() == {"n": [5, None], "word": [None, "b"]}
