"""Read tables of Parquet and Arrow files in a separate process, within a memory limit.

A file of some kilobytes may hold gigabytes: compressed pages, or dictionaries of which every row
names the same long text. Its own counts may be false, and a malicious file may crash a library. So
the operating system limits the memory of the process that reads it. The process sends rows as lines
of JSON, texts and bytes as strings. Values that JSON does not have become ``str``; in a column of
its own, a date for example becomes ``{"date": "2026-01-02"}``, which cannot be mistaken for a text.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.base.env import inherited
from plait.core.base.numbers import shown
from plait.core.base.process import command_of, end_piped
from plait.core.base.programs import TABLES
from plait.train.data import kinds
from plait.train.data.kinds import decoded

if TYPE_CHECKING:
    import pyarrow as pa

MEMORY = 640 << 20
"""Bytes of private memory that the process may use (a memory-mapped file does not count), for an
empty file."""
MEMORY_PER_BYTE, MOST_MEMORY = 4, 3 << 30
"""Additional bytes for each byte of a file, and the limit for any file: one page may hold a
thousand books, and is copied."""
BATCH, BATCH_BYTES = 1024, 16 << 20
"""Rows of a Parquet file that are decoded together, and their bytes, if the file's counts are
true."""
LINE = 64 << 10
"""Bytes of rows that the reading process sends together."""
LARGEST_ROW = 48 << 20
"""Bytes of one row, of any format; a longer one is refused. Reading takes up to ten times as much
memory."""
TOO_LARGE = (
    "reading a page, a batch or a row of it takes more than {} MiB of memory; write it anew with fewer rows in each "
    "(write_batch_size=16 of pyarrow.parquet, max_chunksize=16 of pyarrow.ipc), or as JSON lines"
)
LEAN = {"ARROW_DEFAULT_MEMORY_POOL": "system", "ARROW_IO_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Settings with which the process reserves no memory that it does not use."""
Values = tuple[dict[str, Any], int]
"""A row by column names, and the number of its bytes that were not UTF-8."""
_idle: list[subprocess.Popen[bytes]] = []
os.register_at_fork(after_in_child=_idle.clear)


class Unfit(ValueError):
    """Error for an intact file with a feature that is not supported."""


def table(path: Path, format: str, columns: Sequence[str] | None) -> Iterator[Values]:
    """Yield the rows of a file. columns: the columns to read; all if None, or if none of them
    exists.

    Raises Unfit for unsupported files, ValueError with a description of the damage.
    """
    process = _idle.pop() if _idle else _start()
    assert process.stdin and process.stdout
    problem, unfit = "the process that reads it has ended", False
    try:
        process.stdin.write(json.dumps([os.fspath(path), format, columns]).encode() + b"\n")
        process.stdin.flush()
        while not isinstance((line := json.loads(process.stdout.readline()))[0], str):
            yield from ((values, bad) for values, bad in line)
        problem, unfit = line
    except (OSError, json.JSONDecodeError):
        pass
    finally:
        if problem:
            end_piped(process)
        else:
            _idle.append(process)
    if problem:
        raise (Unfit if unfit else ValueError)(problem)


def _start() -> subprocess.Popen[bytes]:
    pipe, env = subprocess.PIPE, inherited() | LEAN
    return subprocess.Popen(
        command_of(TABLES), stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=env, bufsize=LINE
    )


@atexit.register
def _end_idle() -> None:
    while _idle:
        end_piped(_idle.pop())


# ---- in the process ----


def main() -> int:
    """Read each file that a line names: send its rows, then a pair: the problem (empty if there is
    none), and True if it is ``Unfit``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the end of input follows
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import pyarrow as pa
    import pyarrow.parquet  # imported before the memory limit is set

    own = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    for line in sys.stdin:
        path, format, columns = json.loads(line)
        memory, end = MEMORY, ("", False)
        try:
            memory = min(MEMORY + MEMORY_PER_BYTE * os.stat(path).st_size, MOST_MEMORY)
            resource.setrlimit(resource.RLIMIT_DATA, (own + memory, most))
            _send(read(Path(path), format, columns))
        except MemoryError:
            end = (TOO_LARGE.format(memory >> 20), True)
        except (pa.ArrowException, OSError, ValueError) as error:
            end = (" ".join(str(error).split())[:200], isinstance(error, Unfit))
        sys.stdout.buffer.write(json.dumps(end).encode() + b"\n")
        sys.stdout.buffer.flush()
    return 0


def _send(rows: Iterator[Values]) -> None:
    """Write lists of rows, one line of JSON each; also the rows before an error."""
    group, size = list[Values](), 0
    try:
        for row in rows:
            more = sum(LINE if isinstance(one, list | dict) else len(one) if isinstance(one, str) else 8
                       for one in row[0].values())  # fmt: skip
            if group and size + more > LINE:
                _write(group)
                size = 0
            group.append(row)
            size += more
    finally:
        if group:
            _write(group)


_encode = json.JSONEncoder(default=str, ensure_ascii=False).encode


def _write(group: list[Values]) -> None:
    packed = _encode(group).encode()
    if len(group) == 1 and len(packed) > LARGEST_ROW:
        raise Unfit(f"a row of it has {len(packed):,} bytes, and at most {LARGEST_ROW:,} are read")
    sys.stdout.buffer.write(packed + b"\n")
    group.clear()


def read(path: Path, format: str, columns: Sequence[str] | None) -> Iterator[Values]:
    """Yield the rows of ``table``, in this process. Raises MemoryError, OSError, ValueError and
    ArrowException, too."""
    for batch in _READERS[format](path, columns):
        names, values = batch.schema.names, [_values(column) for column in batch.columns]
        for each in zip(*values, strict=True):
            yield {name: value for name, (value, _) in zip(names, each, strict=True)}, sum(bad for _, bad in each)


def _values(column: pa.Array) -> Iterator[tuple[Any, int]]:
    """Yield a column's values as Python objects, each with its number of bytes that were not UTF-8.
    Raises ArrowInvalid for invalid offsets and similar damage in a malicious file."""
    import pyarrow as pa

    plain = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
    texts = pa.types.is_dictionary(column.type) and column.type.value_type in plain
    if texts:
        kept = column.dictionary
        column = pa.DictionaryArray.from_arrays(column.indices, kept.view(plain[kept.type]), safe=False)
    elif texts := column.type in plain:
        column = column.view(plain[column.type])
    column.validate(full=True)
    for one in column:
        value = one.as_py()
        if isinstance(value, bytes):
            yield decoded(value) if texts else (value.decode(errors="replace"), 0)
        elif value is None or isinstance(value, int | float | list | dict):
            yield value, 0
        else:
            yield {type(value).__name__: str(value)}, 0


# ---- files ----


def _parquet(path: Path, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, buffer_size=1 << 20) as file:
        names = _kept(file.schema_arrow, columns)
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            size = min(BATCH, max(1, BATCH_BYTES * group.num_rows // max(1, group.total_byte_size)))
            yield from file.iter_batches(size, row_groups=[number], columns=names, use_threads=False)


def _arrow(path: Path, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        reader = pa.ipc.open_file(source)
        batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        yield from _selected(batches, _kept(reader.schema, columns))


def _arrow_stream(path: Path, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        reader = pa.ipc.open_stream(source)
        yield from _selected(reader, _kept(reader.schema, columns))


def _selected(batches: Iterable[pa.RecordBatch], names: list[str] | None) -> Iterator[pa.RecordBatch]:
    return (batch.select(names) if names else batch for batch in batches)


_READERS = {kinds.PARQUET: _parquet, kinds.ARROW: _arrow, kinds.ARROW_STREAM: _arrow_stream}


def _kept(schema: pa.Schema, columns: Sequence[str] | None) -> list[str] | None:
    """Return the columns to read: the requested ones that exist; None for all, so that an error
    message can name them. Raises Unfit for a duplicate column."""
    twice = next((name for name in columns or schema.names if schema.names.count(name) > 1), None)
    if twice is not None:
        raise Unfit(f"it has the column {shown(twice)} twice")
    there = [name for name in columns or () if name in schema.names]
    return there or None


if __name__ == "__main__":
    sys.exit(main())
