"""Tables in Parquet files that stay small: whole numbers as differences (DELTA_BINARY_PACKED), texts as
numbers in a dictionary, all of it compressed by zstd. DuckDB, Polars and pandas read them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from plait.core.errors import DataError
from plait.core.files import replacing


def write_columns(path: Path, columns: Mapping[str, tuple[str, Any]], metadata: Mapping[str, str]) -> None:
    """columns: by name, Arrow's type (``int64``, ``float64``, ``string``) and the values. The file appears
    whole or not at all. Raises OSError."""
    arrow, parquet = _arrow()
    schema = arrow.schema([(name, getattr(arrow, kind)()) for name, (kind, _) in columns.items()], metadata=metadata)
    table = arrow.table({name: values for name, (_, values) in columns.items()}, schema=schema)
    texts = [name for name, (kind, _) in columns.items() if kind == "string"]
    whole = {name: "DELTA_BINARY_PACKED" for name, (kind, _) in columns.items() if kind == "int64"}
    with replacing(path) as partial:
        parquet.write_table(table, partial, compression="zstd", use_dictionary=texts, column_encoding=whole or None)


def read_columns(path: Path, version: str) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """A file's columns and its metadata, in which there is ``version``.

    Raises DataError for a file that is missing, truncated or foreign.
    """
    arrow, parquet = _arrow()
    try:
        # Not from a Python file: Arrow's threads then call Python, and one that still does when the process
        # ends takes it down (SIGABRT).
        table = parquet.ParquetFile(arrow.BufferReader(path.read_bytes())).read(use_threads=False)
    except OSError as error:
        raise DataError(f"{path} cannot be read as a timeline: {error.strerror or error}") from None
    except arrow.ArrowException as error:
        raise DataError(f"{path} is truncated or no timeline file: {error}") from None
    stored: dict[bytes, bytes] = table.schema.metadata or {}
    metadata = {key.decode("utf-8", "replace"): value.decode("utf-8", "replace") for key, value in stored.items()}
    if version not in metadata:
        raise DataError(f"{path} is a Parquet file but no Plait timeline")
    return {name: table.column(name).to_pylist() for name in table.column_names}, metadata


def _arrow() -> tuple[Any, Any]:
    """pyarrow and its parquet module, imported where they are used: they are slow to load and untyped."""
    return import_module("pyarrow"), import_module("pyarrow.parquet")
