"""Token files of other programs, read in place: Megatron's ``.bin`` and ``.idx``, NumPy's ``.npy``, bare
numbers.

| file | tokens | documents |
|---|---|---|
| ``.bin`` with ``.idx`` | as the index says: data type, where each sequence lies | as the index says |
| ``.npy`` of one axis | all | end with the tokenizer's end-of-text |
| ``.npy`` of two axes | all, row by row | rows |
| ``.bin`` with ``dtype`` in ``data.sources`` | all, little-endian | end with the tokenizer's end-of-text |

No token is copied, added or left out. A document longer than ``WHOLE`` tokens is cut into pieces of
``PIECE``, of which each may be for evaluation, as in texts.

The layout of ``.idx`` (Megatron-LM d98e8a6, megatron/core/datasets/indexed_dataset.py, ``_IndexReader``): 9
bytes ``MMIDIDX``, version 1 (uint64), code of the data type (uint8), number of sequences and of document
indices (uint64 each); then lengths of sequences (int32), where they begin in the ``.bin`` in bytes (int64),
and the document indices (int64): document d is sequences ``indices[d] .. indices[d + 1]``. Modes of
sequences (int8) may follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plait.core.base.errors import DataError
from plait.train.data import kinds
from plait.train.data.corpus import TokenFile
from plait.train.data.sources import SourceFile

WHOLE, PIECE = 32 << 10, 8 << 10
"""Tokens of a document that is not cut, and of pieces of a longer one."""
SCAN = 1 << 20
"""Tokens that are looked through at once."""
_CODES = {1: "u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Megatron's codes of data types; 6 and 7 are float64 and float32, which no token is."""
DTYPES = {"uint8": "|u1", "uint16": "<u2", "uint32": "<u4", "int32": "<i4", "int64": "<i8"}
"""What ``dtype`` of a source may be, and NumPy's names of them."""
_HEADER = np.dtype([("magic", "S9"), ("version", "<u8"), ("code", "u1"), ("sequences", "<u8"), ("documents", "<u8")])

Part = tuple[int, int]
"""Of a document: where it begins in the file, how many tokens it has."""


@dataclass(frozen=True)
class Tokens:
    """A token file. documents: each as its parts, none of them empty."""

    file: TokenFile
    array: np.ndarray
    documents: Iterator[list[Part]]


def open_tokens(file: SourceFile, format: str, dtype: str, end_of_text: int) -> Tokens:
    """A token file of a format, mapped. dtype: of bare numbers. Raises DataError for one that is damaged or
    holds no tokens; for an index that does not agree with itself once documents are read."""
    try:
        if format == kinds.MEGATRON:
            return _megatron(file)
        return _numpy(file, end_of_text) if format == kinds.NUMPY else _bare(file, dtype, end_of_text)
    except OSError as error:
        raise DataError(f"{file.path}: cannot be read: {error.strerror or error}; check it") from error


def _told(path: Path, dtype: np.dtype, offset: int, count: int) -> TokenFile:
    status = path.stat()
    return TokenFile(
        path=str(path.absolute()), dtype=dtype.str, offset=offset, tokens=count, bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
    )  # fmt: skip


def _bare(file: SourceFile, dtype: str, end_of_text: int) -> Tokens:
    kind = np.dtype(DTYPES[dtype])
    if file.bytes % kind.itemsize:
        raise DataError(f"{file.path}: has {file.bytes} bytes, no whole number of {dtype}; correct dtype")
    told = _told(file.path, kind, 0, file.bytes // kind.itemsize)
    array = told.mapped()
    return Tokens(told, array, _ending(array, end_of_text))


def _numpy(file: SourceFile, end_of_text: int) -> Tokens:
    try:
        with open(file.path, "rb") as stream:
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(stream, max_header_size=10_000)
            offset = stream.tell()
    except (ValueError, EOFError, SyntaxError) as error:
        raise _damaged(file.path, "a NumPy array", " ".join(str(error).split())[:200]) from None
    if dtype.kind not in "iu" or len(shape) not in (1, 2) or (fortran and len(shape) == 2):
        raise DataError(
            f"{file.path}: is an array {list(shape)} of {dtype}, and tokens are integers in one or two axes, row by "
            "row; write it anew with numpy.save"
        )
    count = int(np.prod(shape, dtype=object))
    if min(shape) < 0 or file.bytes != offset + count * dtype.itemsize:
        raise _damaged(
            file.path, "a NumPy array", f"{file.bytes} bytes, and its header says {offset + count * dtype.itemsize}"
        )
    told = _told(file.path, dtype, offset, count)
    array = told.mapped()
    rows = ([(number * shape[1], shape[1])] for number in range(shape[0]) if shape[1]) if len(shape) == 2 else None
    return Tokens(told, array, rows or _ending(array, end_of_text))


def _ending(array: np.ndarray, end_of_text: int) -> Iterator[list[Part]]:
    """Documents that end with end-of-text; what follows the last is one more."""
    begin = 0
    for start in range(0, len(array), SCAN):
        for at in np.flatnonzero(array[start : start + SCAN] == end_of_text).tolist():
            yield [(begin, start + at + 1 - begin)]
            begin = start + at + 1
    if begin < len(array):
        yield [(begin, len(array) - begin)]


def _megatron(file: SourceFile) -> Tokens:
    path = file.path.with_suffix(".bin")
    index = file.path.with_suffix(".idx")
    if not path.is_file():
        raise DataError(f"{index}: is an index of Megatron, and {path.name} is not beside it; name both")
    size = index.stat().st_size
    if size < _HEADER.itemsize:
        raise _damaged(index, "an index of Megatron", f"{size} bytes")
    header = np.memmap(index, np.uint8, "r", shape=(_HEADER.itemsize,)).view(_HEADER)[0]
    sequences, documents = int(header["sequences"]), int(header["documents"])
    if header["magic"] != b"MMIDIDX" or header["version"] != 1:
        raise _damaged(index, "an index of Megatron", f"version {header['version']}, and version 1 is read")
    if int(header["code"]) not in _CODES:
        raise DataError(f"{index}: its data type has the code {header['code']}, and tokens have one of {[*_CODES]}")
    needed = _HEADER.itemsize + 12 * sequences + 8 * documents
    if size not in (needed, needed + sequences):
        raise _damaged(index, "an index of Megatron", f"{size} bytes, and its header says {needed}")
    dtype = np.dtype(_CODES[int(header["code"])])
    told = _told(path, dtype, 0, path.stat().st_size // dtype.itemsize)
    whole = np.memmap(index, np.uint8, "r") if sequences and documents else np.empty(0, np.uint8)
    cuts = np.cumsum([_HEADER.itemsize, 4 * sequences, 8 * sequences, 8 * documents])
    lengths, begins, indices = (
        whole[first:last].view(kind) for first, last, kind in zip(cuts, cuts[1:], ("<i4", "<i8", "<i8"), strict=False)
    )

    def found() -> Iterator[list[Part]]:
        _check_index(index, lengths, begins, indices, told)
        yield from _indexed(lengths, begins, indices, dtype.itemsize)

    return Tokens(told, told.mapped(), found())


def _check_index(index: Path, lengths: np.ndarray, begins: np.ndarray, indices: np.ndarray, told: TokenFile) -> None:
    """Raise DataError for sequences outside the file, and documents that are none."""
    width = np.dtype(told.dtype).itemsize
    for start in range(0, len(lengths), SCAN):
        count, begin = lengths[start : start + SCAN].astype(np.int64), begins[start : start + SCAN]
        wrong = (count < 0) | (begin < 0) | (begin % width != 0) | (begin // width > told.tokens - count)
        if wrong.any():
            at = start + int(np.flatnonzero(wrong)[0])
            problem = f"sequence {at} is {lengths[at]} tokens at byte {begins[at]} of {told.bytes}"
            raise _damaged(index, "an index of Megatron", problem)
    rise = len(indices) == 0 or (indices[0] == 0 and int(indices[-1]) == len(lengths))
    for start in range(0, len(indices), SCAN):
        rise = rise and bool((np.diff(indices[start : start + SCAN + 1]) >= 0).all())
    if not rise:
        raise _damaged(index, "an index of Megatron", "its documents do not cover its sequences in order")


def _indexed(lengths: np.ndarray, begins: np.ndarray, indices: np.ndarray, width: int) -> Iterator[list[Part]]:
    """Documents of an index: sequences that follow each other in the file are one part."""
    first = 0
    for start in range(0, max(0, len(indices) - 1), SCAN):
        for last in indices[start + 1 : start + SCAN + 1].tolist():
            parts: list[Part] = []
            for begin, count in zip((begins[first:last] // width).tolist(), lengths[first:last].tolist(), strict=True):
                if parts and sum(parts[-1]) == begin:
                    parts[-1] = (parts[-1][0], parts[-1][1] + count)
                elif count:
                    parts.append((begin, count))
            first = last
            yield parts


def _damaged(path: Path, what: str, problem: str) -> DataError:
    return DataError(f"{path}: is {what} that is damaged or cut off ({problem}); fetch it again or remove it")
