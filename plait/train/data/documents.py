"""Cut source files into documents, and assign each to training or evaluation.

A row of JSON lines, JSON, CSV, Parquet or Arrow is a document: the text under ``data.text_key``. So
is a text file up to ``WHOLE`` bytes. A longer one is cut at line ends into pieces of up to
``PIECE`` bytes, so that one long file also has an eval split. The assignment depends on a piece's
content alone: adding files never moves other pieces, and equal documents are never in both splits.

Consecutive pieces of a file that go to the same split are one text again (``texts``): they are
encoded together, and end-of-text follows only the last.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from plait.core.base.errors import DataError
from plait.core.base.ignored_input import IgnoredInput
from plait.core.base.numbers import shown
from plait.train.data import kinds
from plait.train.data.chats import Chats
from plait.train.data.corpus import SplitName
from plait.train.data.kinds import (
    UNDECODABLE,
    FileKind,
    encoded,
    kind_of_file,
    opened,
    too_many,
    undecodable,
    whole_characters,
)
from plait.train.data.rows import Row, rows
from plait.train.data.sources import SourceFile

WHOLE, PIECE = 32 << 10, 8 << 10
LONGEST, PART = 6 << 20, 256 << 10
"""Bytes of text that is encoded at once: up to LONGEST; a longer text is encoded in parts of about
PART. A tokenizer takes some 120 bytes of memory per byte of text."""
SHARD_TOKENS = 1 << 27
GROUP = 1 << 20  # bytes encoded at once: enough texts to occupy every core, little memory
MOST_WITHOUT = 0.01
"""Largest share of a file's rows that may have no text."""
WITHOUT, EMPTY = "row(s) without a text", "empty document(s)"


@dataclass(frozen=True, kw_only=True)
class Document:
    """A piece of a file, or a row of it; ``offset`` 0 begins a document."""

    text: bytes
    offset: int

    @property
    def hash_fraction(self) -> float:
        """A number in [0, 1) that depends on the content only; below ``eval_fraction`` the document
        is for evaluation."""
        return int.from_bytes(hashlib.blake2b(self.text, digest_size=6).digest(), "big") / 2**48

    def split(self, eval_fraction: float) -> SplitName:
        """Return the document's split."""
        return "eval" if self.hash_fraction < eval_fraction else "train"


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text that is encoded at once. begins: True if it begins a document, which ends the one
    before. done: bytes of files that have been read after this text."""

    text: bytes
    split: SplitName
    begins: bool
    done: int = 0


@dataclass(frozen=True)
class Reading:
    """Settings of reading files. chats: converter of rows that are no plain texts. over: counts
    what is passed over. rendered: called before each chat; if it returns False, the chat is only
    checked and yields no document."""

    text_key: str = "text"
    chats: Chats | None = None
    over: IgnoredInput = field(default_factory=IgnoredInput)
    rendered: Callable[[], bool] = lambda: True


def source_fingerprint(
    files: Sequence[SourceFile], eval_fraction: float, shard_tokens: int = SHARD_TOKENS, text_key: str = "text"
) -> str:
    """Return a hash of everything that decides a corpus, apart from the tokenizer."""
    decided = (WHOLE, PIECE, LONGEST, PART, eval_fraction, shard_tokens, text_key)
    digest = hashlib.sha256(repr(decided).encode())
    for file in files:
        digest.update(b"%s\0%d\0%d\0" % (os.fsencode(file.name), file.bytes, file.mtime_ns))
    return digest.hexdigest()[:32]


def groups(files: Sequence[SourceFile], eval_fraction: float, reading: Reading | None = None) -> Iterator[list[Text]]:
    """Yield texts in order, in lists of about ``GROUP`` bytes."""
    group: list[Text] = []
    size = 0
    for text in texts(files, eval_fraction, reading or Reading()):
        group.append(text)
        size += len(text.text)
        if size >= GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def texts(files: Sequence[SourceFile], eval_fraction: float, reading: Reading) -> Iterator[Text]:
    """Yield the texts to encode, in order: consecutive documents of a file with the same split form
    one text."""
    before = 0
    for file in files:
        run, read, done = _Run(), 0, before
        for document in documents(file, reading):
            side = document.split(eval_fraction)
            if document.offset == 0 or side != run.split:
                yield from run.end(done)
                run = _Run(side)
            read += len(document.text)
            done = before + min(read, file.bytes)
            yield from run.add(document.text, done)
        before += file.bytes
        yield from run.end(before)


class _Run:
    """A run of consecutive pieces of a file with the same split, which become one text; in parts if
    it is too long to be encoded at once."""

    def __init__(self, split: SplitName = "train") -> None:
        self.split: SplitName = split
        self._pieces: list[bytes] = []
        self._size, self._begins = 0, True

    def add(self, piece: bytes, done: int) -> Iterator[Text]:
        """Add the next piece of the file; yield texts that are full. Once a text has parts, it
        stays in parts. done: bytes of files read so far."""
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size > (LONGEST if self._begins else PART):
            rest, at = b"".join(self._pieces), 0
            while len(rest) - at > PART:
                part = rest[at : at + PART]
                cut = _cut(part)
                yield self._part(part[:cut], done)
                at += cut
            self._pieces, self._size = [rest[at:]], len(rest) - at

    def end(self, done: int) -> Iterator[Text]:
        """Yield the remaining part."""
        if self._size:
            yield self._part(b"".join(self._pieces), done)

    def _part(self, text: bytes, done: int) -> Text:
        begins, self._begins = self._begins, False
        return Text(text=text, split=self.split, begins=begins, done=done)


def documents(file: SourceFile, reading: Reading | None = None) -> Iterator[Document]:
    """Yield the documents of one file, reading a piece at a time; none for an empty file. Raises
    DataError for a file in a format that is not read, that is damaged, or that has too many bytes
    that are not UTF-8."""
    reading = reading or Reading()
    if not file.bytes:
        return
    kind = kind_of_file(file)
    assert kind.format not in kinds.IN_PLACE, f"{file.path} has tokens, no text"
    if kind.problem:
        raise DataError(f"{file.path}: {kind.problem}")
    if reading.chats:
        found = _texts_of_chats(file, kind, reading.chats, reading)
    else:
        found = _pieces(file, kind) if kind.format == kinds.TEXT else _texts_of_rows(file, kind, reading)
    size = count = zeros = 0
    for document, bad in found:
        size, count = size + len(document.text), count + bad
        if kind.format == kinds.TEXT:
            zeros += document.text.count(0)
        yield document
    if problem := too_many(count, zeros, size):
        raise DataError(f"{file.path}: {problem}")
    reading.over.note(UNDECODABLE, str(file.path), count)


def _pieces(file: SourceFile, kind: FileKind) -> Iterator[tuple[Document, int]]:
    """Yield the pieces of a text file, each with its number of bytes that are zero or not UTF-8."""
    with opened(file.path, kind.compression) as stream:
        text, offset = stream.read(WHOLE + 1), 0
        limit = WHOLE if len(text) <= WHOLE else PIECE
        while text := text if len(text) >= limit else text + stream.read(limit - len(text)):
            cut = len(text) if len(text) < limit or limit == WHOLE else _cut(text[:limit])
            yield Document(text=text[:cut], offset=offset), undecodable(text[:cut])
            offset, text = offset + cut, text[cut:]


def _cut(text: bytes) -> int:
    """Return where to cut ``text``: after its last line end, or else before a UTF-8 character that
    may be incomplete."""
    return text.rfind(b"\n") + 1 or whole_characters(text) or len(text)


def _texts_of_rows(file: SourceFile, kind: FileKind, reading: Reading) -> Iterator[tuple[Document, int]]:
    """Yield the texts of a file's rows, each with its number of bytes that were not UTF-8."""
    count = without = 0
    first = ""
    for row in rows(file, kind, [reading.text_key]):
        count += 1
        text = _text_of(row, file, reading.text_key)
        if text is None:
            without, first = without + 1, first or row.where
            if count == 1 and isinstance(row.values, dict) and reading.text_key not in row.values:
                raise _no_key(file, row.values, reading.text_key)
        elif not text:
            reading.over.note(EMPTY, f"{file.path}: {row.where}")
        else:
            content, halves = encoded(text)
            yield Document(text=content, offset=0), row.bad + halves
    if without > count * MOST_WITHOUT:
        raise DataError(
            f"{file.path}: {without} of {count} rows have no text under {shown(reading.text_key)} (the first: "
            f"{first}), at most {MOST_WITHOUT:.0%} may have none; name another key with data.text_key, or take them out"
        )
    reading.over.note(WITHOUT, f"{file.path}: {first}", without)


def _texts_of_chats(file: SourceFile, kind: FileKind, chats: Chats, reading: Reading) -> Iterator[tuple[Document, int]]:
    """Yield the marked texts of a file's chats or pairs, each with its number of bytes that were
    not UTF-8."""
    if kind.format == kinds.TEXT:
        raise DataError(
            f"{file.path}: is {kind.format} without rows, and data.rows = {shown(chats.settings.rows)}; name files of "
            "JSON lines, JSON, CSV, Parquet or Arrow, with their endings"
        )
    for row in rows(file, kind):
        where = f"{file.path}: {row.where}"
        if not reading.rendered():
            chats.check(row.values, where)
            continue
        for text in chats.texts(row.values, where, reading.over):
            yield Document(text=text, offset=0), row.bad


def _text_of(row: Row, file: SourceFile, key: str) -> str | None:
    """Return the text of a row; None if it has none. Raises DataError for a value that is no
    text."""
    value = row.values if isinstance(row.values, str) else row.values.get(key)
    if value is None or isinstance(value, str):
        return value
    fix = "name another key with data.text_key"
    if isinstance(value, list) and value and all(isinstance(one, int) for one in cast("list[Any]", value)):
        fix = "token ids are read from .npy, and from .bin with .idx; write them so, or name the key of the texts"
    elif _is_chat(value):
        fix = _as_chats(key)
    raise DataError(f"{file.path}: {row.where}: {shown(key)} is {shown(value)}, no text; {fix}")


def _as_chats(key: str) -> str:
    """Return the job settings for rows whose messages have this key."""
    return 'set data.rows = "chats"' + (f" and data.messages_key = {shown(key)}" if key != "messages" else "")


def _is_chat(value: object) -> bool:
    """Return True if a value is a list of messages."""
    if not isinstance(value, list) or not value:
        return False
    first = cast("list[Any]", value)[0]
    return isinstance(first, dict) and bool({"role", "from"} & cast("dict[str, Any]", first).keys())


def _no_key(file: SourceFile, values: dict[str, object], key: str) -> DataError:
    """Return the error for a file whose first row does not have the key."""
    names = ", ".join(map(shown, list(values)[:12])) or "nothing"
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    best = max(texts, key=lambda name: len(texts[name]), default="")
    if chats := next((name for name, value in values.items() if _is_chat(value)), ""):
        fix = _as_chats(chats)
    elif len(values) == 1 and re.search(r"[,;|\t]", best) and re.search(r"[,;|\t]", texts[best]):
        fix = "its fields are not separated by what its ending says: commas in .csv, tabs in .tsv; write it anew"
    else:
        fix = f"set data.text_key = {shown(best)}" if best else "name the key of its texts with data.text_key"
    return DataError(f"{file.path}: its rows have no {shown(key)}, but {names}; {fix}, or take the file out")
