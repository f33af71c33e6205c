"""Use token files of other programs as a corpus, read in place: Megatron's ``.bin`` and ``.idx``,
NumPy's ``.npy``, bare numbers. An index stores the spans of each split and the document ends; no
token is copied, added or left out.

| file | tokens | documents |
|---|---|---|
| ``.bin`` with ``.idx`` | as the index says: data type, position of each sequence | as the index says |
| ``.npy`` of one axis | all | end with the tokenizer's end-of-text |
| ``.npy`` of two axes | all, row by row | rows |
| ``.bin`` with ``dtype`` in ``data.sources`` | all, little-endian | end with the tokenizer's end-of-text |

A document longer than ``WHOLE`` tokens is cut into pieces of ``PIECE``, each of which may be for
evaluation, as in texts.

The layout of ``.idx`` (Megatron-LM d98e8a6, megatron/core/datasets/indexed_dataset.py,
``_IndexReader``): 9 bytes ``MMIDIDX``, version 1 (uint64), code of the data type (uint8), number of
sequences and of document indices (uint64 each); then lengths of sequences (int32), their offsets in
the ``.bin`` in bytes (int64), and the document indices (int64): document d is sequences
``indices[d] .. indices[d + 1]``. Modes of sequences (int8) may follow.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from plait.core.base.errors import DataError
from plait.core.base.files import write_synced
from plait.train.data import kinds
from plait.train.data.corpus import END, SPLITS, Split, SplitName, TokenFile, ends_name, spans_name
from plait.train.data.documents import Document
from plait.train.data.sources import SourceFile, damaged

WHOLE, PIECE = 32 << 10, 8 << 10
"""Tokens up to which a document is not cut, and of the pieces of a longer one."""
SCAN = 1 << 20
"""Tokens that are scanned at once."""
_CODES = {1: "u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Megatron's codes of data types; 6 and 7 are float64 and float32, which no token has."""
DTYPES = {"uint8": "|u1", "uint16": "<u2", "uint32": "<u4", "int32": "<i4", "int64": "<i8"}
"""Values of a source's ``dtype``, and NumPy's names of them."""
_HEADER = np.dtype([("magic", "S9"), ("version", "<u8"), ("code", "u1"), ("sequences", "<u8"), ("documents", "<u8")])
_INDEX = "an index of Megatron"

Part = tuple[int, int]
"""A span of a document: its begin in the file, and its length, in tokens."""


@dataclass(frozen=True)
class Tokens:
    """A token file. documents: each as its parts, none of which is empty."""

    file: TokenFile
    array: np.ndarray
    documents: Iterator[list[Part]]


def open_tokens(file: SourceFile, format: str, dtype: str, end_of_text: int) -> Tokens:
    """Map a token file. dtype: of bare numbers. Raises DataError for a file that is damaged or
    holds no tokens; for an inconsistent index only while documents are read."""
    try:
        if format == kinds.MEGATRON:
            return _megatron(file)
        return _numpy(file, end_of_text) if format == kinds.NUMPY else _bare(file, dtype, end_of_text)
    except OSError as error:
        raise DataError(f"{file.path}: cannot be read: {error.strerror or error}; check it") from error


def _token_file(path: Path, dtype: np.dtype, offset: int, count: int) -> TokenFile:
    status = path.stat()
    return TokenFile(
        path=str(path.absolute()), dtype=dtype.str, offset=offset, tokens=count, bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
    )  # fmt: skip


def _bare(file: SourceFile, dtype: str, end_of_text: int) -> Tokens:
    kind = np.dtype(DTYPES[dtype])
    if file.bytes % kind.itemsize:
        raise DataError(f"{file.path}: has {file.bytes} bytes, no whole number of {dtype}; correct dtype")
    found = _token_file(file.path, kind, 0, file.bytes // kind.itemsize)
    array = found.mapped()
    return Tokens(found, array, _ending(array, end_of_text))


def _numpy(file: SourceFile, end_of_text: int) -> Tokens:
    try:
        with open(file.path, "rb") as stream:
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(stream, max_header_size=10_000)
            offset = stream.tell()
    except (ValueError, EOFError, SyntaxError) as error:
        raise damaged(file.path, "a NumPy array", error) from None
    if dtype.kind not in "iu" or len(shape) not in (1, 2) or (fortran and len(shape) == 2):
        raise DataError(
            f"{file.path}: is an array {list(shape)} of {dtype}, and tokens are integers in one or two axes, row by "
            "row; write it anew with numpy.save"
        )
    count = int(np.prod(shape, dtype=object))
    needed = offset + count * dtype.itemsize
    if min(shape) < 0 or file.bytes != needed:
        raise damaged(file.path, "a NumPy array", f"{file.bytes} bytes, and its header says {needed}")
    found = _token_file(file.path, dtype, offset, count)
    array = found.mapped()
    if len(shape) == 1:
        return Tokens(found, array, _ending(array, end_of_text))
    return Tokens(found, array, ([(row * shape[1], shape[1])] for row in range(shape[0]) if shape[1]))


def _ending(array: np.ndarray, end_of_text: int) -> Iterator[list[Part]]:
    """Yield documents that end with end-of-text; the tokens after the last end-of-text are one more
    document."""
    begin = 0
    for start in range(0, len(array), SCAN):
        for at in np.flatnonzero(array[start : start + SCAN] == end_of_text).tolist():
            yield [(begin, start + at + 1 - begin)]
            begin = start + at + 1
    if begin < len(array):
        yield [(begin, len(array) - begin)]


def _megatron(file: SourceFile) -> Tokens:
    path, index = file.path.with_suffix(".bin"), file.path.with_suffix(".idx")
    if not path.is_file():
        raise DataError(f"{index}: is {_INDEX}, and {path.name} is not beside it; name both")
    size = index.stat().st_size
    if size < _HEADER.itemsize:
        raise damaged(index, _INDEX, f"{size} bytes")
    whole = np.memmap(index, np.uint8, "r")
    header = whole[: _HEADER.itemsize].view(_HEADER)[0]
    code, sequences, documents = int(header["code"]), int(header["sequences"]), int(header["documents"])
    if header["magic"] != b"MMIDIDX" or header["version"] != 1:
        raise damaged(index, _INDEX, f"version {header['version']}, and version 1 is read")
    if code not in _CODES:
        raise DataError(f"{index}: its data type has the code {code}, and tokens have one of {[*_CODES]}")
    needed = _HEADER.itemsize + 12 * sequences + 8 * documents
    if size not in (needed, needed + sequences):
        raise damaged(index, _INDEX, f"{size} bytes, and its header says {needed}")
    dtype = np.dtype(_CODES[code])
    found = _token_file(path, dtype, 0, path.stat().st_size // dtype.itemsize)
    cuts = np.cumsum([_HEADER.itemsize, 4 * sequences, 8 * sequences, 8 * documents])
    arrays = [whole[a:b].view(kind) for a, b, kind in zip(cuts, cuts[1:], ("<i4", "<i8", "<i8"), strict=False)]
    return Tokens(found, found.mapped(), _indexed(index, found, *arrays))


def _indexed(
    index: Path, file: TokenFile, lengths: np.ndarray, begins: np.ndarray, indices: np.ndarray
) -> Iterator[list[Part]]:
    """Yield documents of an index; sequences that are adjacent in the file form one part. Raises
    DataError for sequences outside the file, and inconsistent document indices."""
    width = np.dtype(file.dtype).itemsize
    for start in range(0, len(lengths), SCAN):
        count, begin = lengths[start : start + SCAN].astype(np.int64), begins[start : start + SCAN]
        wrong = (count < 0) | (begin < 0) | (begin % width != 0) | (begin // width > file.tokens - count)
        if wrong.any():
            at = start + int(np.flatnonzero(wrong)[0])
            problem = f"sequence {at} is {lengths[at]} tokens at byte {begins[at]} of {file.bytes}"
            raise damaged(index, _INDEX, problem)
    if len(indices) and (indices[0] != 0 or indices[-1] != len(lengths) or (indices[1:] < indices[:-1]).any()):
        raise damaged(index, _INDEX, "its documents do not cover its sequences in order")
    for start in range(0, max(0, len(indices) - 1), SCAN):
        bounds = indices[start : start + SCAN + 1].tolist()
        for first, last in pairwise(bounds):
            parts: list[Part] = []
            for begin, count in zip((begins[first:last] // width).tolist(), lengths[first:last].tolist(), strict=True):
                if parts and sum(parts[-1]) == begin:
                    parts[-1] = (parts[-1][0], parts[-1][1] + count)
                elif count:
                    parts.append((begin, count))
            yield parts


# ---- a corpus of token files ----


class _SplitSpans:
    """The spans (file, first token, number of tokens) of one split, collected in order."""

    def __init__(self) -> None:
        self.spans, self.ends = array("q"), array("q")
        self.tokens = 0

    def add(self, file: int, begin: int, count: int) -> None:
        """Add a span; one that continues the last span extends it."""
        spans = self.spans
        if spans and spans[-3] == file and spans[-2] + spans[-1] == begin:
            spans[-1] += count
        else:
            spans.extend((file, begin, count))
        self.tokens += count

    def end(self) -> None:
        """End a document here."""
        if self.tokens and (not self.ends or self.ends[-1] != self.tokens):
            self.ends.append(self.tokens)

    def written(self, folder: Path, name: SplitName, arrays: Sequence[np.ndarray]) -> Split:
        """Write the split's files, and return the split for the index."""
        spans, ends = np.asarray(self.spans, END).reshape(-1, 3), np.asarray(self.ends, END)
        for file, values in ((spans_name(name), spans), (ends_name(name), ends)):
            if values.size:
                write_synced(folder / file, [values.tobytes()])
        digest = hashlib.sha256(b"8")
        for file, begin, count in spans.tolist():
            for at in range(begin, begin + count, SCAN):
                digest.update(arrays[file][at : min(at + SCAN, begin + count)].astype("<i8").tobytes())
        return Split(
            tokens=self.tokens, documents=len(ends), ends_crc32=zlib.crc32(ends.tobytes()),
            digest=digest.hexdigest()[:32], spans=len(spans), spans_crc32=zlib.crc32(spans.tobytes()),
        )  # fmt: skip


def write_spans(
    folder: Path, files: Sequence[Tokens], eval_fraction: float, vocab: int
) -> tuple[tuple[TokenFile, ...], dict[SplitName, Split]]:
    """Scan token files and write the files of their index into ``folder``. Raises DataError for a
    token outside the vocabulary."""
    found: dict[SplitName, _SplitSpans] = {name: _SplitSpans() for name in SPLITS}
    for number, tokens in enumerate(files):
        check_vocabulary(tokens, vocab)
        for document in tokens.documents:
            last: SplitName | None = None
            for side, parts in dealt(tokens.array, document, eval_fraction):
                if last and side != last:
                    found[last].end()
                for begin, count in parts:
                    found[side].add(number, begin, count)
                last = side
            if last:
                found[last].end()
    arrays = [tokens.array for tokens in files]
    return tuple(one.file for one in files), {name: found[name].written(folder, name, arrays) for name in SPLITS}


def dealt(tokens: np.ndarray, document: list[Part], eval_fraction: float) -> Iterator[tuple[SplitName, list[Part]]]:
    """Yield the split of each piece of a document, with the piece's parts; a short document is one
    piece."""
    if not eval_fraction:
        yield "train", document
        return
    pieces = [document]
    if sum(count for _, count in document) > WHOLE:
        pieces = [
            [(at, min(PIECE, begin + count - at))]
            for begin, count in document
            for at in range(begin, begin + count, PIECE)
        ]
    for parts in pieces:
        content = b"".join(tokens[begin : begin + count].astype("<i8").tobytes() for begin, count in parts)
        yield Document(text=content, offset=0).split(eval_fraction), parts


def check_vocabulary(tokens: Tokens, vocab: int, begin: int = 0, end: int | None = None) -> None:
    """Raise DataError for a token, from ``begin`` to ``end``, outside the tokenizer's
    vocabulary."""
    last = len(tokens.array) if end is None else min(end, len(tokens.array))
    for start in range(begin, last, SCAN):
        part = tokens.array[start : min(start + SCAN, last)]
        low, high = int(part.min()), int(part.max())
        if low < 0 or high >= vocab:
            raise DataError(
                f"{tokens.file.path}: has the token {low if low < 0 else high}, and data.tokenizer has {vocab} tokens, "
                f"0 to {vocab - 1}; name the tokenizer that made this file"
            )
