"""The process that reads tables: its rows are the file's, and what a file unpacks to has a
limit."""

from __future__ import annotations

import mmap
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from plait.core.base.process import command_of
from plait.train.data import kinds, tables

pytestmark = pytest.mark.system
CHAT = [{"role": "user", "content": "é"}, {"role": "assistant", "content": None}]
SOUND = pa.table(
    {
        "text": pa.array([b"a", b"b\xff", None] * 700).view(pa.string()),
        "named": pa.array(["x", "y", None] * 700).dictionary_encode(),
        "messages": [CHAT] * 2100,
        "raw": [b"\xff"] * 2100,
        "day": [date(2026, 1, 2)] * 2100,
    }
)


def to_parquet(table: pa.Table, path: Path) -> None:
    """Packed, in several groups of rows."""
    pq.write_table(table, path, row_group_size=2000, compression="zstd")


def to_arrow(table: pa.Table, path: Path) -> None:
    """Packed, in a batch."""
    with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)


@pytest.mark.parametrize(("format", "write"), [(kinds.PARQUET, to_parquet), (kinds.ARROW, to_arrow)])
def test_rows_are_those_of_the_file(tmp_path: Path, format: str, write: Callable[[pa.Table, Path], None]) -> None:
    write(SOUND, path := tmp_path / "a")
    first = next(iter(tables.table(path, format, None)))  # the process ends with what is not read
    for _ in range(2):
        found = list(tables.table(path, format, None))
        assert found == [first, ({**first[0], "text": "b\ufffd", "named": "y"}, 1), (found[2][0], 0)] * 700
    assert first == (
        {"text": "a", "named": "x", "messages": CHAT, "raw": "\ufffd", "day": {"date": "2026-01-02"}},
        0,
    )
    assert [row for row, _ in tables.table(path, format, ["day"])] == [{"day": {"date": "2026-01-02"}}] * 2100


def test_a_process_that_a_file_ends_is_said(tmp_path: Path) -> None:
    to_parquet(SOUND, path := tmp_path / "a")
    list(tables.table(path, kinds.PARQUET, None))
    tables._idle[-1].kill()
    with pytest.raises(ValueError, match="the process that reads it has ended"):
        list(tables.table(path, kinds.PARQUET, None))
    assert len(list(tables.table(path, kinds.PARQUET, ["text"]))) == 2100


def zeros(rows: int, size: int) -> pa.Array:
    """Texts of NUL, of memory that the system has not given yet."""
    offsets = pa.array(range(0, (rows + 1) * size, size), pa.int32()).buffers()[1]
    return pa.Array.from_buffers(pa.string(), rows, [None, offsets, pa.py_buffer(mmap.mmap(-1, rows * size))])


def one_text(rows: int, size: int) -> pa.Array:
    """A dictionary of one text that all rows have."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), zeros(1, size))


BOMBS = {
    "dictionary.parquet": (to_parquet, one_text(2, 60 << 20)),
    "dictionary.arrow": (to_arrow, one_text(2, 60 << 20)),
    "page.parquet": (to_parquet, zeros(36, 20 << 20)),
    "batch.arrow": (to_arrow, zeros(48, 16 << 20)),
}
LIMITS = r"a row of it (has [0-9,]+ bytes, and at most 50,331,648 are read|takes more than 64. MiB of memory)"
MEASURED = """
import resource, subprocess, sys
status = subprocess.call(sys.argv[1:])
print("KiB", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(status)
"""


@pytest.mark.parametrize("name", BOMBS)
def test_what_unpacks_to_much_takes_little_memory(tmp_path: Path, name: str) -> None:
    write, texts = BOMBS[name]
    write(pa.table({"text": texts}), path := tmp_path / name)
    assert path.stat().st_size < 1 << 20
    command = [*command_of("plait.cli.main"), "data", "prepare", str(path), "--out", str(tmp_path / "out")]
    measured = [sys.executable, "-c", MEASURED, *command]
    done = subprocess.run(measured, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert re.search(LIMITS, " ".join(done.stderr.split()))
    assert int(done.stdout.split("KiB")[1]) < 700 << 10  # of the largest process
