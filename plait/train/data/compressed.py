"""Compressed files, read as a stream of what they hold."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from plait.core.base.errors import DataError

GZIP, XZ, ZSTD, BZIP2 = "gzip", "xz", "zstd", "bzip2"
COMPRESSED = (GZIP, XZ, ZSTD, BZIP2)


@contextmanager
def opened(path: Path, compression: str = "") -> Generator[IO[bytes]]:
    """What a file holds, as a stream of bytes. Raises DataError for one that is damaged or cannot be
    read."""
    try:
        with _stream(path, compression) as stream:
            yield stream
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise _damaged(path, compression, error) from None
    except OSError as error:
        if error.errno is None:  # of bz2 and zstd, without a class of its own
            raise _damaged(path, compression, error) from None
        raise DataError(f"{path}: cannot read this source file: {error.strerror}; repair or remove it") from error


def _stream(path: Path, compression: str) -> IO[bytes]:
    if compression == GZIP:
        return io.BufferedReader(gzip.GzipFile(path, "rb"), 1 << 20)  # type: ignore[arg-type]
    if compression == BZIP2:
        return io.BufferedReader(bz2.BZ2File(path, "rb"), 1 << 20)  # type: ignore[arg-type]
    if compression == XZ:
        return io.BufferedReader(lzma.LZMAFile(path, "rb"), 1 << 20)  # type: ignore[arg-type]
    if compression == ZSTD:
        import pyarrow as pa  # of all frames, and it notices a file that was cut off; the package zstandard does not

        return io.BufferedReader(pa.input_stream(str(path), compression="zstd"), 1 << 20)  # type: ignore[arg-type]
    return open(path, "rb")


def _damaged(path: Path, compression: str, error: Exception) -> DataError:
    return DataError(f"{path}: is {compression} that is damaged or cut off ({error}); fetch it again or remove it")
