"""Source files cut into documents, and which of them are for evaluation.

A row of JSON lines, JSON, CSV, Parquet or Arrow is a document: the text under ``data.text_key``. So is a text
file up to ``WHOLE`` bytes. A longer one is cut at line ends into pieces of up to ``PIECE`` bytes, so that one
long file also has an eval split. Whether a piece is for training or evaluation follows from its content
alone: adding files never moves others, and equal documents never land on both sides.

Pieces that follow each other in a file and go to the same side are one text again (``texts``): they are
encoded together, and only behind the last stands end-of-text.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from plait.core.base.errors import DataError
from plait.core.base.numbers import shown
from plait.core.base.passed_over import PassedOver
from plait.train.data import kinds
from plait.train.data.chats import Chats
from plait.train.data.compressed import opened
from plait.train.data.corpus import SplitName
from plait.train.data.kinds import FileKind, kind_of_file
from plait.train.data.rows import Row, rows
from plait.train.data.sources import SourceFile
from plait.train.data.utf8 import HALVES, UNDECODABLE, too_many, undecodable

WHOLE, PIECE = 32 << 10, 8 << 10
LONGEST, PART = 6 << 20, 256 << 10
"""Bytes of a text that is encoded at once: up to LONGEST, and of a longer one parts of about PART. A
tokenizer takes some 120 bytes of memory for each."""
SHARD_TOKENS = 1 << 27
GROUP = 1 << 20  # bytes encoded at once: enough texts to occupy every core, little memory
MOST_WITHOUT = 0.01
"""Share of a file's rows that may have no text."""
WITHOUT, EMPTY = "row(s) without a text", "empty document(s)"


@dataclass(frozen=True, kw_only=True)
class Document:
    """A piece of a file, or a row of it; ``offset`` 0 begins a document."""

    text: bytes
    offset: int

    @property
    def place(self) -> float:
        """A number in [0, 1) that depends on the content only; below ``eval_fraction`` is for evaluation."""
        return int.from_bytes(hashlib.blake2b(self.text, digest_size=6).digest(), "big") / 2**48

    def split(self, eval_fraction: float) -> SplitName:
        """Where it belongs."""
        return "eval" if self.place < eval_fraction else "train"


@dataclass(frozen=True, kw_only=True)
class Text:
    """What is encoded at once. begins: a document, before which the last one ends. done: bytes of files that
    are read when it is."""

    text: bytes
    split: SplitName
    begins: bool
    done: int = 0


@dataclass(frozen=True)
class Reading:
    """How files are read. chats: if rows are no texts. over: counts what is passed over. rendered: asked
    before each chat; if not, it is only looked at, and gives no document."""

    text_key: str = "text"
    chats: Chats | None = None
    over: PassedOver = field(default_factory=PassedOver)
    rendered: Callable[[], bool] = lambda: True


def source_fingerprint(
    files: Sequence[SourceFile], eval_fraction: float, shard_tokens: int = SHARD_TOKENS, text_key: str = "text"
) -> str:
    """A hash of all that decides a corpus, apart from the tokenizer."""
    decided = (WHOLE, PIECE, LONGEST, PART, eval_fraction, shard_tokens, text_key)
    digest = hashlib.sha256(repr(decided).encode())
    for file in files:
        digest.update(b"%s\0%d\0%d\0" % (os.fsencode(file.name), file.bytes, file.mtime_ns))
    return digest.hexdigest()[:32]


def groups(files: Sequence[SourceFile], eval_fraction: float, reading: Reading | None = None) -> Iterator[list[Text]]:
    """Texts in order, in lists of about ``GROUP`` bytes."""
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
    """What is encoded, in order: documents of one side that follow each other in a file, together."""
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
    """Pieces that follow each other and go to the same side: a text, in parts if it is too long to be encoded
    at once."""

    def __init__(self, split: SplitName = "train") -> None:
        self.split: SplitName = split
        self._pieces: list[bytes] = []
        self._size, self._begins = 0, True

    def add(self, piece: bytes, done: int) -> Iterator[Text]:
        """The next piece; gives parts that are full. A text that has them stays in parts."""
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
        """What is left."""
        if self._size:
            yield self._part(b"".join(self._pieces), done)

    def _part(self, text: bytes, done: int) -> Text:
        begins, self._begins = self._begins, False
        return Text(text=text, split=self.split, begins=begins, done=done)


def documents(file: SourceFile, reading: Reading | None = None) -> Iterator[Document]:
    """The documents of one file, read a piece at a time; none when it is empty. Raises DataError for a file
    that is not read, or is damaged, or has too many bytes that are no UTF-8."""
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
    """A file of text, in pieces, each with its bytes that are zero or no UTF-8."""
    with opened(file.path, kind.compression) as stream:
        text, offset = stream.read(WHOLE + 1), 0
        limit = WHOLE if len(text) <= WHOLE else PIECE
        while text := text if len(text) >= limit else text + stream.read(limit - len(text)):
            cut = len(text) if len(text) < limit or limit == WHOLE else _cut(text[:limit])
            yield Document(text=text[:cut], offset=offset), undecodable(text[:cut])
            offset, text = offset + cut, text[cut:]


def _cut(text: bytes) -> int:
    """Where to cut ``text``: after its last line end, or else before a UTF-8 character that may go on behind
    it."""
    if line := text.rfind(b"\n") + 1:
        return line
    for back in range(1, min(4, len(text))):
        if text[-back] & 0xC0 != 0x80:  # the first byte of the last character
            return len(text) - back if text[-back] >= 0xC0 else len(text)
    return len(text)


def _texts_of_rows(file: SourceFile, kind: FileKind, reading: Reading) -> Iterator[tuple[Document, int]]:
    """The texts of a file's rows, each with its bytes that were no UTF-8."""
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
            content, halves = _encoded(text)
            yield Document(text=content, offset=0), row.bad + halves
    if without > count * MOST_WITHOUT:
        raise DataError(
            f"{file.path}: {without} of {count} rows have no text under {shown(reading.text_key)} (the first: "
            f"{first}), at most {MOST_WITHOUT:.0%} may have none; name another key with data.text_key, or take them out"
        )
    reading.over.note(WITHOUT, f"{file.path}: {first}", without)


def _texts_of_chats(file: SourceFile, kind: FileKind, chats: Chats, reading: Reading) -> Iterator[tuple[Document, int]]:
    """The marked texts of a file's chats or pairs, as above."""
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
    """The text of a row; None where it has none. Raises DataError for a value that is no text."""
    value = row.values if isinstance(row.values, str) else row.values.get(key)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    fix = "name another key with data.text_key"
    if isinstance(value, list) and value and all(isinstance(one, int) for one in cast("list[Any]", value)):
        fix = "token ids are read from .npy, and from .bin with .idx; write them so, or name the key of the texts"
    if _is_chat(value):
        fix = _as_chats(key)
    raise DataError(f"{file.path}: {row.where}: {shown(key)} is {shown(value)}, no text; {fix}")


def _as_chats(key: str) -> str:
    """How rows whose messages have this key are named in a job."""
    return 'set data.rows = "chats"' + (f" and data.messages_key = {shown(key)}" if key != "messages" else "")


def _is_chat(value: object) -> bool:
    """Whether a value is a list of messages."""
    if not isinstance(value, list) or not value:
        return False
    first = cast("list[Any]", value)[0]
    return isinstance(first, dict) and bool({"role", "from"} & cast("dict[str, Any]", first).keys())


def _encoded(text: str) -> tuple[bytes, int]:
    """UTF-8, and how many halves of surrogate pairs there were, which JSON can spell and UTF-8 cannot:
    U+FFFD stands for them."""
    try:
        return text.encode(), 0
    except UnicodeEncodeError:
        whole, count = HALVES.subn("\ufffd", text)
        return whole.encode(), count


def _no_key(file: SourceFile, values: dict[str, object], key: str) -> DataError:
    """The refusal of a file whose first row has no such key."""
    texts = [name for name, value in values.items() if isinstance(value, str)]
    names = ", ".join(map(shown, list(values)[:12])) or "nothing"
    best = max(texts, key=lambda name: len(str(values[name])), default="")
    fix = f"set data.text_key = {shown(best)}" if best else "name the key of its texts with data.text_key"
    if len(values) == 1 and re.search(r"[,;|\t]", best) and re.search(r"[,;|\t]", str(values[best])):
        fix = "its fields are not separated by what its ending says: commas in .csv, tabs in .tsv; write it anew"
    if chats := next((name for name, value in values.items() if _is_chat(value)), ""):
        fix = _as_chats(chats)
    return DataError(f"{file.path}: its rows have no {shown(key)}, but {names}; {fix}, or take the file out")
