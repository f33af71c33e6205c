"""What tables would take in memory is known before they are read."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from plait.core.columns import FREE, ROW, Unpacked, copy_rows, metadata_of, read_columns
from plait.core.errors import DataError

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
