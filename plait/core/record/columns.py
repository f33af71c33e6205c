"""Compact tables in Parquet files: whole numbers as differences (DELTA_BINARY_PACKED), texts as
dictionary codes, all compressed by zstd. DuckDB, Polars and pandas can read the files."""

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
    """A column with few distinct texts: the texts, and the index of each row's text."""

    texts: Sequence[str]
    codes: np.ndarray

    def tolist(self) -> list[str]:
        """Return the text of each row."""
        return [self.texts[int(code)] for code in self.codes]


def write_columns(path: Path, columns: Mapping[str, tuple[str, Any]], metadata: Mapping[str, str]) -> None:
    """Write a Parquet file atomically. columns: by name, Arrow's type (``int64``, ``float64``,
    ``string``) and the values; texts may be ``Coded``. Raises OSError."""
    arrow, _ = _arrow()
    schema = arrow.schema([(name, getattr(arrow, kind)()) for name, (kind, _) in columns.items()], metadata=metadata)
    arrays = [_array(kind, values) for kind, values in columns.values()]
    _write(path, arrow.Table.from_arrays(arrays, schema=schema))


def _array(kind: str, values: Any) -> Any:
    """Return a column as an Arrow array. NumPy arrays are passed as buffers. Otherwise Arrow
    imports pandas to check for its types, which takes longer than all writing of a short run."""
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
    """Copy the rows whose value of ``column`` is wanted to a new file. No file is written if no row
    is wanted or ``source`` is no valid file. Raises OSError."""
    import numpy as np

    arrow, _ = _arrow()
    try:
        table = _opened(source).read(use_threads=False)
    except (DataError, arrow.ArrowException):  # damaged: no rows to keep
        return
    values = _array("int64", np.array([value for value in table.column(column).unique().to_pylist() if wanted(value)]))
    table = table.filter(import_module("pyarrow.compute").is_in(table.column(column), values))
    if len(table):
        _write(target, table)


def metadata_of(path: Path) -> dict[str, str]:
    """Return a file's metadata; empty if it has none or cannot be read."""
    try:
        return Unpacked().metadata(path)
    except DataError:
        return {}


def read_columns(path: Path, version: str) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Return a file's columns and its metadata, which must contain the key ``version``.

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


# ---- sizes of tables in memory ----

ROW = 96
"""The fewest bytes of a row in memory: twelve columns of numbers or of short texts."""
FREE, TIMES = 32 << 20, 24
"""The memory limit of tables: ``FREE`` bytes plus ``TIMES`` bytes per byte of their files. Tables
of real runs take some 14 bytes per byte."""


class Unpacked:
    """The memory that the tables of several files would take, added up from their footers before
    the tables are read. A file of three megabytes may claim sixty million equal rows.

    >>> Unpacked().room(1000)
    33578432
    """

    def __init__(self) -> None:
        self._read = self._taken = 0

    def room(self, size: int) -> int:
        """Return the bytes in memory that another file of ``size`` bytes may take."""
        return FREE + TIMES * (self._read + size) - self._taken

    def metadata(self, path: Path) -> dict[str, str]:
        """Return a file's metadata and count the file's memory. Raises DataError if it is no
        regular file, no Parquet file, or too large in memory."""
        arrow, parquet = _arrow()
        try:
            if (kind := kind_of(path)) != "file":
                raise DataError(f"it is a {kind}, no regular file" if kind else "it is not there")
            with arrow.OSFile(str(path)) as file:
                return self.checked(parquet.read_metadata(file), file.size())
        except (OSError, ValueError, arrow.ArrowException) as error:
            raise DataError(f"it is truncated or no Parquet file: {first_line(error)}") from None

    def checked(self, footer: Any, size: int) -> dict[str, str]:
        """Return the metadata from a footer, and count and check the file's memory as ``metadata``
        does. footer: the footer. size: the file's bytes."""
        packed = sum(footer.row_group(number).total_byte_size for number in range(footer.num_row_groups))
        takes, may = max(footer.num_rows * ROW, packed), self.room(size)
        if takes > may:
            raise DataError(
                f"it holds {footer.num_rows} rows, {takes} bytes unpacked, in {size} bytes; at most "
                f"{may} bytes are read"
            )
        self._read, self._taken = self._read + size, self._taken + takes
        return _metadata(footer.metadata)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message; its type's name if the message is empty."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _opened(path: Path) -> Any:
    """Return an open Parquet file. Raises OSError, and DataError if it is damaged or too large."""
    arrow, parquet = _arrow()
    try:
        data = contents_within(path, DOCUMENT)
        # Not a Python file object: Arrow's threads would call Python, and such a call at the end of the
        # process aborts it (SIGABRT).
        file = parquet.ParquetFile(arrow.BufferReader(data))
    except (ValueError, arrow.ArrowException) as error:
        raise DataError(first_line(error)) from None
    Unpacked().checked(file.metadata, len(data))
    return file


def _metadata(stored: Mapping[bytes, bytes] | None) -> dict[str, str]:
    stored = stored or {}
    return {key.decode("utf-8", "replace"): value.decode("utf-8", "replace") for key, value in stored.items()}


def _arrow() -> tuple[Any, Any]:
    """Return pyarrow and its parquet module, imported here because they are slow to load and
    untyped."""
    return import_module("pyarrow"), import_module("pyarrow.parquet")
