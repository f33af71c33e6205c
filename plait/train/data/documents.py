"""Source files cut into documents, and which of them are for evaluation.

A file up to ``WHOLE`` bytes is one document. A longer file is cut at line ends into documents of up to
``PIECE`` bytes, so that one long file also has an eval split. Whether a document is for training or
evaluation follows from its content alone: adding files never moves others, and equal documents never land on
both sides.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from plait.core.base.errors import DataError
from plait.train.data.corpus import SplitName
from plait.train.data.sources import SourceFile

WHOLE, PIECE = 32 << 10, 8 << 10
SHARD_TOKENS = 1 << 27
GROUP = 4 << 20  # bytes encoded at once: enough documents to occupy every core, little memory


@dataclass(frozen=True, kw_only=True)
class Document:
    """A piece of a file; ``offset`` 0 begins a file."""

    text: bytes
    offset: int

    @property
    def place(self) -> float:
        """A number in [0, 1) that depends on the content only; below ``eval_fraction`` is for evaluation."""
        return int.from_bytes(hashlib.blake2b(self.text, digest_size=6).digest(), "big") / 2**48

    def split(self, eval_fraction: float) -> SplitName:
        """Where it belongs."""
        return "eval" if self.place < eval_fraction else "train"


def source_fingerprint(files: Sequence[SourceFile], eval_fraction: float, shard_tokens: int = SHARD_TOKENS) -> str:
    """A hash of all that decides a corpus, apart from the tokenizer."""
    digest = hashlib.sha256(repr((WHOLE, PIECE, eval_fraction, shard_tokens)).encode())
    for file in files:
        digest.update(b"%s\0%d\0%d\0" % (os.fsencode(file.name), file.bytes, file.mtime_ns))
    return digest.hexdigest()[:32]


def groups(files: Sequence[SourceFile]) -> Iterator[list[Document]]:
    """Documents in order, in lists of about ``GROUP`` bytes."""
    group: list[Document] = []
    size = 0
    for document in (document for file in files for document in documents(file)):
        group.append(document)
        size += len(document.text)
        if size >= GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def documents(file: SourceFile) -> Iterator[Document]:
    """The documents of one file, read a piece at a time; none when it is empty."""
    limit, offset, rest = WHOLE if file.bytes <= WHOLE else PIECE, 0, b""
    try:
        with open(file.path, "rb") as stream:
            while text := rest + stream.read(limit - len(rest)):
                cut = len(text) if len(text) < limit or limit == WHOLE else _cut(text)
                yield Document(text=text[:cut], offset=offset)
                offset, rest = offset + cut, text[cut:]
    except OSError as error:
        raise DataError(f"{file.path}: cannot read this source file: {error.strerror}; repair or remove it") from error


def _cut(text: bytes) -> int:
    """Where to cut ``text``: after its last line end, or else before a UTF-8 character that may go on behind
    it."""
    if line := text.rfind(b"\n") + 1:
        return line
    for back in range(1, min(4, len(text))):
        if text[-back] & 0xC0 != 0x80:  # the first byte of the last character
            return len(text) - back if text[-back] >= 0xC0 else len(text)
    return len(text)
