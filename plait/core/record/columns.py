"""Tables in Parquet files that stay small: whole numbers as differences (DELTA_BINARY_PACKED), texts as
numbers in a dictionary, all of it compressed by zstd. DuckDB, Polars and pandas read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from plait.core.base.codec.json_text import DOCUMENT
from plait.core.base.errors import DataError
from plait.core.base.files import contents_within, kind_of, replacing

if TYPE_CHECKING:
    import numpy as np


class Coded(NamedTuple):
    """A column of few different texts: what they are, and which of them stands in every row."""

    texts: Sequence[str]
    codes: np.ndarray

    def tolist(self) -> list[str]:
        """Row by row."""
        return [self.texts[int(code)] for code in self.codes]


def write_columns(path: Path, columns: Mapping[str, tuple[str, Any]], metadata: Mapping[str, str]) -> None:
    """columns: by name, Arrow's type (``int64``, ``float64``, ``string``) and the values, of texts also as
    ``Coded``. The file appears whole or not at all. Raises OSError."""
    arrow, _ = _arrow()
    schema = arrow.schema([(name, getattr(arrow, kind)()) for name, (kind, _) in columns.items()], metadata=metadata)
    arrays = [_array(kind, values) for kind, values in columns.values()]
    _write(path, arrow.Table.from_arrays(arrays, schema=schema))


def _array(kind: str, values: Any) -> Any:
    """Arrow's form of a column. Arrays as their buffers: Arrow would look whether they are pandas', and load
    all of that, which takes longer than all writing of a short run."""
    import numpy as np

    arrow, _ = _arrow()
    if isinstance(values, Coded):
        texts = [text.encode() for text in values.texts]
        ends = np.cumsum([0, *map(len, texts)]).astype(np.int32)
        known = arrow.StringArray.from_buffers(len(texts), arrow.py_buffer(ends), arrow.py_buffer(b"".join(texts)))
        return arrow.DictionaryArray.from_arrays(_array("int32", values.codes), known).dictionary_decode()
    if not isinstance(values, np.ndarray) or kind == "string":
        return arrow.array(values, kind)
    whole = np.ascontiguousarray(values, kind)
    return arrow.Array.from_buffers(getattr(arrow, kind)(), len(whole), [None, arrow.py_buffer(whole)])


def _write(path: Path, table: Any) -> None:
    _, parquet = _arrow()
    texts = [field.name for field in table.schema if str(field.type) == "string"]
    whole = {field.name: "DELTA_BINARY_PACKED" for field in table.schema if str(field.type) == "int64"}
    with replacing(path) as partial:
        parquet.write_table(table, partial, compression="zstd", use_dictionary=texts, column_encoding=whole)


def copy_rows(source: Path, target: Path, column: str, wanted: Callable[[int], bool]) -> None:
    """The rows of a file whose value of ``column`` is wanted, into a file of their own; no file without rows,
    or where ``source`` is none. Raises OSError."""
    import numpy as np

    arrow, _ = _arrow()
    try:
        table = _opened(source).read(use_threads=False)
    except (DataError, arrow.ArrowException):  # damaged: there is nothing to keep
        return
    values = _array("int64", np.array([value for value in table.column(column).unique().to_pylist() if wanted(value)]))
    table = table.filter(import_module("pyarrow.compute").is_in(table.column(column), values))
    if len(table):
        _write(target, table)


def metadata_of(path: Path) -> dict[str, str]:
    """A file's metadata; nothing if it has none, or cannot be read."""
    try:
        return Unpacked().metadata(path)
    except DataError:
        return {}


def read_columns(path: Path, version: str) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """A file's columns and its metadata, in which there is ``version``.

    Raises DataError for a file that is missing, truncated, foreign or too large.
    """
    arrow, _ = _arrow()
    try:
        table = _opened(path).read(use_threads=False)
    except OSError as error:
        raise DataError(f"{path} cannot be read as a timeline: {error.strerror or error}") from None
    except (arrow.ArrowException, DataError) as error:
        raise DataError(f"{path} is truncated or no timeline file: {error}") from None
    metadata = _metadata(table.schema.metadata)
    if version not in metadata:
        raise DataError(f"{path} is a Parquet file but no Plait timeline")
    return {name: table.column(name).to_pylist() for name in table.column_names}, metadata


# ---- how much a file holds ----

ROW = 96
"""Bytes that a row takes in memory, at least: twelve columns of numbers or of short texts."""
FREE, TIMES = 32 << 20, 24
"""Bytes that tables may take in memory for nothing, and for each of their bytes on the disk, of which those
of real runs take some 14."""


class Unpacked:
    """What the tables of some files would take in memory, file by file, before any is read: three megabytes
    may say that they hold sixty million equal rows.

    >>> Unpacked().room(1000)
    33578432
    """

    def __init__(self) -> None:
        self._read = self._taken = 0

    def room(self, size: int) -> int:
        """Bytes that another file of ``size`` bytes may take."""
        return FREE + TIMES * (self._read + size) - self._taken

    def metadata(self, path: Path) -> dict[str, str]:
        """A file's metadata; from now on the file counts. Raises DataError for what is no regular file or no
        Parquet file, and for one that would take more than it may."""
        arrow, parquet = _arrow()
        try:
            if (kind := kind_of(path)) != "file":
                raise DataError(f"it is a {kind}, no regular file" if kind else "it is not there")
            with arrow.OSFile(str(path)) as file:
                return self.checked(parquet.read_metadata(file), file.size())
        except (OSError, ValueError, arrow.ArrowException) as error:
            raise DataError(f"it is truncated or no Parquet file: {first_line(error)}") from None

    def checked(self, found: Any, size: int) -> dict[str, str]:
        """The same of a footer that was read already. size: of the file."""
        packed = sum(found.row_group(number).total_byte_size for number in range(found.num_row_groups))
        takes, may = max(found.num_rows * ROW, packed), self.room(size)
        if takes > may:
            raise DataError(
                f"it holds {found.num_rows} rows, {takes} bytes unpacked, in {size} bytes; at most {may} bytes are read"
            )
        self._read, self._taken = self._read + size, self._taken + takes
        return _metadata(found.metadata)


def first_line(error: Exception) -> str:
    """Of what it says."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _opened(path: Path) -> Any:
    """A file whose tables can be read. Raises OSError, and DataError for one that is damaged or too large."""
    arrow, parquet = _arrow()
    try:
        data = contents_within(path, DOCUMENT)
        # Not from a Python file: Arrow's threads then call Python, and one that still does when the process
        # ends takes it down (SIGABRT).
        file = parquet.ParquetFile(arrow.BufferReader(data))
    except (ValueError, arrow.ArrowException) as error:
        raise DataError(first_line(error)) from None
    Unpacked().checked(file.metadata, len(data))
    return file


def _metadata(stored: Mapping[bytes, bytes] | None) -> dict[str, str]:
    stored = stored or {}
    return {key.decode("utf-8", "replace"): value.decode("utf-8", "replace") for key, value in stored.items()}


def _arrow() -> tuple[Any, Any]:
    """pyarrow and its parquet module, imported where they are used: they are slow to load and untyped."""
    return import_module("pyarrow"), import_module("pyarrow.parquet")
