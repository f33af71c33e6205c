"""Token files of others as a corpus: which spans of them each split is, where documents end; no token is
copied."""

from __future__ import annotations

import hashlib
import os
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from plait.core.base.errors import DataError
from plait.train.data.corpus import END, SPLITS, Split, SplitName, TokenFile, ends_name, spans_name
from plait.train.data.documents import Document
from plait.train.data.token_files import PIECE, SCAN, WHOLE, Part, Tokens


class _SplitSpans:
    """The spans of one split, as they are found."""

    def __init__(self) -> None:
        self.spans, self.ends = array("q"), array("q")
        self.tokens = 0

    def add(self, file: int, begin: int, count: int) -> None:
        """The next span; one that goes on where the last ended makes that longer."""
        spans = self.spans
        if spans and spans[-3] == file and spans[-2] + spans[-1] == begin:
            spans[-1] += count
        else:
            spans.extend((file, begin, count))
        self.tokens += count

    def end(self) -> None:
        """A document ends here."""
        if self.tokens and (not self.ends or self.ends[-1] != self.tokens):
            self.ends.append(self.tokens)


def write_spans(
    folder: Path, files: Sequence[Tokens], eval_fraction: float, vocab: int
) -> tuple[tuple[TokenFile, ...], dict[SplitName, Split]]:
    """Look through token files and write what an index needs of them into ``folder``. Raises DataError for a
    token that is none of ``vocab``."""
    found: dict[SplitName, _SplitSpans] = {name: _SplitSpans() for name in SPLITS}
    for number, tokens in enumerate(files):
        check_vocabulary(tokens, vocab)
        _add(found, number, tokens, eval_fraction)
    arrays = [tokens.array for tokens in files]
    return tuple(tokens.file for tokens in files), {
        name: _written(folder, name, found[name], arrays) for name in SPLITS
    }


def _add(found: dict[SplitName, _SplitSpans], number: int, tokens: Tokens, eval_fraction: float) -> None:
    """Deal a file's documents out to the splits; of a long one, pieces."""
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


def dealt(tokens: np.ndarray, document: list[Part], eval_fraction: float) -> Iterator[tuple[SplitName, list[Part]]]:
    """The split of each piece of a document, with the piece's parts."""
    for parts in _pieces(document) if eval_fraction else [document]:
        yield _side(tokens, parts, eval_fraction) if eval_fraction else "train", parts


def _pieces(document: list[Part]) -> list[list[Part]]:
    """A document as it is; a long one in pieces."""
    if sum(count for _, count in document) <= WHOLE:
        return [document]
    return [
        [(at, min(PIECE, begin + count - at))] for begin, count in document for at in range(begin, begin + count, PIECE)
    ]


def _side(tokens: np.ndarray, parts: list[Part], eval_fraction: float) -> SplitName:
    content = b"".join(tokens[begin : begin + count].astype("<i8").tobytes() for begin, count in parts)
    return Document(text=content, offset=0).split(eval_fraction)


def check_vocabulary(tokens: Tokens, vocab: int, begin: int = 0, end: int | None = None) -> None:
    """Raise DataError for a token, from ``begin`` to ``end``, that the tokenizer does not have."""
    last = len(tokens.array) if end is None else min(end, len(tokens.array))
    for start in range(begin, last, SCAN):
        part = tokens.array[start : min(start + SCAN, last)]
        low, high = int(part.min()), int(part.max())
        if low < 0 or high >= vocab:
            raise DataError(
                f"{tokens.file.path}: has the token {low if low < 0 else high}, and data.tokenizer has {vocab} tokens, "
                f"0 to {vocab - 1}; name the tokenizer that made this file"
            )


def _written(folder: Path, name: SplitName, found: _SplitSpans, arrays: Sequence[np.ndarray]) -> Split:
    """The split as its index has it, its files written."""
    spans = np.asarray(found.spans, END).reshape(-1, 3)
    ends = np.asarray(found.ends, END)
    for file, values in ((spans_name(name), spans), (ends_name(name), ends)):
        if values.size:
            with open(folder / file, "wb") as stream:
                stream.write(values.tobytes())
                stream.flush()
                os.fsync(stream.fileno())
    digest = hashlib.sha256(b"8")
    for file, begin, count in spans.tolist():
        for at in range(begin, begin + count, SCAN):
            digest.update(arrays[file][at : min(at + SCAN, begin + count)].astype("<i8").tobytes())
    return Split(
        tokens=found.tokens, documents=len(ends), ends_crc32=zlib.crc32(ends.tobytes()), digest=digest.hexdigest()[:32],
        spans=len(spans), spans_crc32=zlib.crc32(spans.tobytes()),
    )  # fmt: skip
