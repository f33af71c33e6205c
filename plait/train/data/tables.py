"""Tables of Parquet and Arrow files, read in a process of its own, within a limit of memory.

A file of some kilobytes may hold gigabytes: packed pages, dictionaries of which every row names the same long
text. Its own numbers need not be true, and what is hostile may crash a library. So the system keeps the
process that reads it from taking more than its limit. It gives lines of JSON.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.base.env import inherited
from plait.core.base.numbers import shown
from plait.core.base.process import command_of
from plait.core.base.programs import TABLES
from plait.train.data import kinds
from plait.train.data.utf8 import not_utf8

if TYPE_CHECKING:
    import pyarrow as pa

MEMORY = 640 << 20
"""Bytes that the process may write to (a file that is mapped is not among them), for a file without bytes."""
MEMORY_PER_BYTE, MOST_MEMORY = 4, 3 << 30
"""More for each byte of a file, and for any: a thousand books may stand in one page, which is copied."""
BATCH, BATCH_BYTES = 1024, 16 << 20
"""Rows of a Parquet file that are unpacked together, and their bytes, if its numbers are true."""
LINE = 64 << 10
"""Bytes of rows that come together."""
LARGEST_ROW = 48 << 20
"""Bytes of one row, of any format; a longer one is refused. What is read takes up to ten times as much."""
TOO_LARGE = (
    "reading a page, a batch or a row of it takes more than {} MiB of memory; write it anew with fewer rows in each "
    "(write_batch_size=16 of pyarrow.parquet, max_chunksize=16 of pyarrow.ipc), or as JSON lines"
)
LEAN = {"ARROW_DEFAULT_MEMORY_POOL": "system", "ARROW_IO_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Settings under which the process reserves no memory that it does not use."""
OTHER = "plait.other"
"""The key under which a value stands that JSON does not have."""
Values = tuple[dict[str, Any], int]
"""A row by the names of its columns, and how many bytes of it were no UTF-8."""
_idle: list[subprocess.Popen[bytes]] = []
os.register_at_fork(after_in_child=_idle.clear)


class Unfit(ValueError):
    """What a sound file has that is not read."""


@dataclass(frozen=True)
class Other:
    """A value that JSON does not have, such as a date: only how it prints."""

    printed: str

    def __str__(self) -> str:
        return self.printed

    __repr__ = __str__


def _unpacked(line: bytes) -> Any:
    return json.loads(line, object_hook=_with_others if OTHER.encode() in line else None)


def _with_others(found: dict[str, Any]) -> Any:
    if OTHER not in found:
        return found
    return found["bytes"].encode("latin-1") if "bytes" in found else Other(found[OTHER])


def _other(value: Any) -> dict[str, str]:
    return {OTHER: "", "bytes": value.decode("latin-1")} if isinstance(value, bytes) else {OTHER: str(value)}


def table(path: Path, format: str, columns: Sequence[str] | None) -> Iterator[Values]:
    """The rows of a file. columns: which to read; None, or if none of them is there: all.

    Raises Unfit for what is not read, ValueError that says what is damaged.
    """
    process = _idle.pop() if _idle else _start()
    assert process.stdin and process.stdout
    problem, unfit = "the process that reads it has ended", False
    try:
        process.stdin.write(json.dumps([os.fspath(path), format, columns]).encode() + b"\n")
        process.stdin.flush()
        while not isinstance((line := _unpacked(process.stdout.readline()))[0], str):
            yield from ((values, bad) for values, bad in line)
        problem, unfit = line
    except (OSError, json.JSONDecodeError):
        pass
    finally:
        if problem:
            _end(process)
        else:
            _idle.append(process)
    if problem:
        raise (Unfit if unfit else ValueError)(problem)


def _start() -> subprocess.Popen[bytes]:
    pipe, env = subprocess.PIPE, inherited() | LEAN
    return subprocess.Popen(
        command_of(TABLES), stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=env, bufsize=LINE
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Have it end, and wait until it has."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        assert pipe
        with suppress(OSError):
            pipe.close()
    process.wait()


@atexit.register
def _end_idle() -> None:
    while _idle:
        _end(_idle.pop())


# ---- in the process ----


def main() -> int:
    """Read each file that a line names: its rows, then a pair: what is wrong, empty if nothing is, and
    whether it is ``Unfit``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the end of input follows
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import pyarrow as pa
    import pyarrow.parquet  # before the limit

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
    """Lists of rows, a line of JSON each; those before an error, too."""
    group, size = list[bytes](), 0
    try:
        for row in rows:
            group.append(_packed(row))
            size += len(group[-1])
            if size >= LINE:
                _write(group)
                group, size = [], 0
    finally:
        if group:
            _write(group)


def _write(group: Sequence[bytes]) -> None:
    sys.stdout.buffer.write(b"[")
    sys.stdout.buffer.write(b",".join(group))
    sys.stdout.buffer.write(b"]\n")


_encode = json.JSONEncoder(default=_other, ensure_ascii=False).encode


def _packed(row: Values) -> bytes:
    packed = _encode(row).encode()
    if len(packed) > LARGEST_ROW:
        raise Unfit(f"a row of it has {len(packed):,} bytes, and at most {LARGEST_ROW:,} are read")
    return packed


def read(path: Path, format: str, columns: Sequence[str] | None) -> Iterator[Values]:
    """As ``table``, in this process. Raises MemoryError, OSError, ValueError and ArrowException, too."""
    for batch in _READERS[format](path, columns):
        names, values = batch.schema.names, [_values(column) for column in batch.columns]
        for each in zip(*values, strict=True):
            yield {name: value for name, (value, _) in zip(names, each, strict=True)}, sum(bad for _, bad in each)


def _values(column: pa.Array) -> Iterator[tuple[Any, int]]:
    """Values of Python, each with the bytes in it that were no UTF-8. Raises ArrowInvalid for offsets and the
    like that a hostile file has wrong."""
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
        if texts and value is not None:
            yield value.decode(errors="replace"), not_utf8(value)
        else:
            yield value, 0


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
        names = _kept(reader.schema, columns)
        for number in range(reader.num_record_batches):
            yield _selected(reader.get_batch(number), names)


def _arrow_stream(path: Path, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        reader = pa.ipc.open_stream(source)
        names = _kept(reader.schema, columns)
        for batch in reader:
            yield _selected(batch, names)


_READERS = {kinds.PARQUET: _parquet, kinds.ARROW: _arrow, kinds.ARROW_STREAM: _arrow_stream}


def _kept(schema: pa.Schema, columns: Sequence[str] | None) -> list[str] | None:
    """The columns to read: those asked for that are there, or all, so that a refusal can name them. Raises
    Unfit for one that is there twice."""
    twice = next((name for name in columns or schema.names if schema.names.count(name) > 1), None)
    if twice is not None:
        raise Unfit(f"it has the column {shown(twice)} twice")
    there = [name for name in columns or () if name in schema.names]
    return there or None


def _selected(batch: pa.RecordBatch, names: list[str] | None) -> pa.RecordBatch:
    return batch.select(names) if names else batch


if __name__ == "__main__":
    sys.exit(main())
