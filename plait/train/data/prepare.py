"""Text files to a prepared corpus: find, cut into documents, split, encode, write shards, publish atomically.

A file up to ``WHOLE`` bytes is one document. A longer file is cut at line ends into documents of up to
``PIECE`` bytes, so that one long file also has an eval split. Whether a document is for training or
evaluation follows from its content alone: adding files never moves others, and equal documents never land on
both sides. End-of-text is written where a
file ends, and inside a file where its next document went to the other split.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import math
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np

from plait.core.errors import DataError, JobError
from plait.train.data.corpus import DTYPES, INDEX_FILE, SPLITS, Corpus, Index, Shard, Split, SplitName
from plait.train.data.sources import SourceFile, find_files
from plait.train.data.tokenizer import Tokenizer

WHOLE, PIECE = 32 << 10, 8 << 10
GROUP = 4 << 20  # bytes encoded at once: enough documents to occupy every core, little memory
OUR_FILES = re.compile(rf"{re.escape(INDEX_FILE)}|({'|'.join(SPLITS)})-\d{{5,}}\.bin")
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Document:
    """A piece of a file; ``offset`` 0 begins a file."""

    text: bytes
    offset: int

    @property
    def place(self) -> float:
        """A number in [0, 1) that depends on the content only; below ``eval_fraction`` is for evaluation."""
        return int.from_bytes(hashlib.blake2b(self.text, digest_size=6).digest(), "big") / 2**48


def prepare(
    sources: Sequence[str | Path],
    tokenizer: Tokenizer,
    out: Path,
    *,
    pattern: str = "*.txt",
    eval_fraction: float = 0.1,
    shard_tokens: int = 1 << 27,
    progress: Progress | None = None,
) -> Corpus:
    """The corpus of ``sources`` in the folder ``out``; at once when it is already there and nothing changed.

    A source is a file, a folder (all files below it whose path there matches ``pattern``, hidden ones left
    out; ``*`` crosses folders) or ``"python-stdlib"``, the sources of the running Python. "Changed" means the
    names, sizes or modification times of the files, the tokenizer, ``eval_fraction`` (of documents; 0 for no
    eval split) or ``shard_tokens``. ``progress(done, total)`` is called in bytes of text.

    ``out`` appears complete or not at all, also when two processes prepare it at once. Raises ``DataError``
    when a source cannot be read, the text is empty, a split would be empty, the disk is full or ``out`` holds
    something else.
    """
    if not 0 <= eval_fraction < 1:
        raise JobError(f"must be at least 0 and below 1, got {eval_fraction}", key="eval_fraction")
    if shard_tokens < 1:
        raise JobError(f"must be at least 1, got {shard_tokens}", key="shard_tokens")
    out = Path(os.path.realpath(Path(out).expanduser()))
    files = find_files(sources, pattern, leave_out=out)
    source = _fingerprint(files, eval_fraction, shard_tokens)
    if corpus := _prepared(out, tokenizer.fingerprint, source):
        return corpus
    _refuse_foreign(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _locked(out) as alone:
            if corpus := _prepared(out, tokenizer.fingerprint, source):  # another process made it while this one waited
                return corpus
            if alone:  # nobody else is writing, so what is here was left by a preparation that was killed
                for leftover in out.parent.glob(f".{glob.escape(out.name)}.tmp-*"):
                    shutil.rmtree(leftover, ignore_errors=True)
            _build(
                out, files, tokenizer, source, eval_fraction=eval_fraction, shard_tokens=shard_tokens, progress=progress
            )
    except OSError as error:
        raise DataError(
            f"{out}: cannot write the corpus: {error.strerror or error}; choose another folder for it"
        ) from error
    if corpus := _prepared(out, tokenizer.fingerprint, source):
        return corpus
    raise DataError(
        f"{out}: another process put a different corpus there at the same time; run again, or give each its own folder"
    )


def _fingerprint(files: list[SourceFile], eval_fraction: float, shard_tokens: int) -> str:
    """A hash of all that decides the corpus, apart from the tokenizer."""
    digest = hashlib.sha256(repr((WHOLE, PIECE, eval_fraction, shard_tokens)).encode())
    for file in files:
        digest.update(b"%s\0%d\0%d\0" % (os.fsencode(file.name), file.bytes, file.mtime_ns))
    return digest.hexdigest()[:32]


def _prepared(out: Path, tokenizer: str, source: str) -> Corpus | None:
    """The corpus in ``out`` when it is whole and made from the same things; anything else is prepared
    anew."""
    try:
        corpus = Corpus.open(out)
    except DataError:
        return None
    return corpus if (corpus.index.tokenizer, corpus.index.source) == (tokenizer, source) else None


@contextmanager
def _locked(out: Path) -> Iterator[bool]:
    """Hold the lock of ``out``; yields False where the file system has no locks, and then the first rename
    wins."""
    # The lock file stays behind: removing it would let a third process lock a new file beside a waiting
    # second one.
    with open(out.with_name(f".{out.name}.lock"), "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            alone = True
        except OSError:
            alone = False
        yield alone


def _refuse_foreign(out: Path) -> None:
    """Raise unless ``out`` may be replaced: it is absent, or holds nothing but a corpus, whole or damaged."""
    if not out.exists():
        return
    other = (
        "not a folder"
        if not out.is_dir()
        else next((p.name for p in out.iterdir() if not OUR_FILES.fullmatch(p.name)), None)
    )
    if other:
        raise DataError(
            f"{out}: will not be replaced by a corpus because it holds other things ({other}); choose another folder"
        )


def _build(
    out: Path, files: list[SourceFile], tokenizer: Tokenizer, source: str, *,
    eval_fraction: float, shard_tokens: int, progress: Progress | None,
) -> None:  # fmt: skip
    """Write the corpus into a temporary folder beside ``out`` and rename it there; on any error nothing
    remains."""
    temporary = out.with_name(f".{out.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    dtype = "uint16" if tokenizer.vocab <= 1 << 16 else "uint32"
    writers: dict[SplitName, _SplitWriter] = {
        name: _SplitWriter(temporary, name, DTYPES[dtype], shard_tokens) for name in SPLITS
    }
    read, tokens, total = 0, 0, sum(file.bytes for file in files)
    free = shutil.disk_usage(out.parent).free
    try:
        temporary.mkdir()
        for read in _encode_all(files, tokenizer, writers, eval_fraction):
            tokens = sum(writer.tokens for writer in writers.values())
            if progress:
                progress(min(read, total), total)
        splits = {str(name): writer.finish() for name, writer in writers.items()}
        _check_splits(out, splits, writers, eval_fraction)
        index = Index(
            dtype=dtype, vocab=tokenizer.vocab, end_of_text=tokenizer.end_of_text,
            tokenizer=tokenizer.fingerprint, source=source, splits=splits,
        )  # fmt: skip
        with open(temporary / INDEX_FILE, "wb") as file:
            file.write(index.to_json().encode())
            file.flush()
            os.fsync(file.fileno())
        _publish(temporary, out, index)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        needed = DTYPES[dtype].itemsize * (total * tokens / read if read else total)
        raise DataError(
            f"{out}: the disk is full: this corpus needs about {needed / 1e6:.1f} MB "
            f"and {free / 1e6:.1f} MB were free; make room, or choose a folder on another disk"
        ) from error
    finally:
        for writer in writers.values():
            writer.close()
        shutil.rmtree(temporary, ignore_errors=True)


def _encode_all(
    files: list[SourceFile], tokenizer: Tokenizer, writers: dict[SplitName, _SplitWriter], eval_fraction: float
) -> Iterator[int]:
    """Write every document to its split; yields the bytes of text done so far."""
    end, last, done = np.array([tokenizer.end_of_text]), None, 0
    for group in _groups(files):
        parts: dict[SplitName, list[np.ndarray]] = {name: [] for name in SPLITS}
        for document, ids in zip(group, tokenizer.encode_many([document.text for document in group]), strict=True):
            place = document.place
            split: SplitName = "eval" if place < eval_fraction else "train"
            if last is not None and (document.offset == 0 or split != last):
                parts[last].append(end)
            parts[split].append(ids)
            writers[split].count(place)
            last, done = split, done + len(document.text)
        for name, ids in parts.items():
            if ids:
                writers[name].add(np.concatenate(ids))
        yield done
    if last is not None:
        writers[last].add(end)


def _groups(files: list[SourceFile]) -> Iterator[list[Document]]:
    """Documents in order, in lists of about ``GROUP`` bytes."""
    group: list[Document] = []
    size = 0
    for document in (document for file in files for document in _documents(file)):
        group.append(document)
        size += len(document.text)
        if size >= GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def _documents(file: SourceFile) -> Iterator[Document]:
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


def _check_splits(
    out: Path, splits: dict[str, Split], writers: dict[SplitName, _SplitWriter], eval_fraction: float
) -> None:
    """Raise when a split that was asked for got no document, with the fraction that would give it one."""
    documents = sum(split.documents for split in splits.values())
    if splits["train"].tokens and (splits["eval"].tokens or not eval_fraction):
        return
    if documents == 1:
        raise DataError(
            f"{out}: all the text is one document, which cannot be both train and eval; "
            "add text or set eval_fraction = 0"
        )
    if not splits["train"].tokens:
        raise DataError(
            f"{out}: all {documents} documents fell into the eval split; "
            f"add text or lower eval_fraction ({eval_fraction})"
        )
    fraction = math.floor(writers["train"].lowest * 1000 + 1) / 1000
    raise DataError(
        f"{out}: the eval split is empty, eval_fraction = {eval_fraction} selects none of {documents} documents; "
        f"add text, set eval_fraction = {fraction} or more, or 0 for no evaluation"
    )


def _publish(temporary: Path, out: Path, index: Index) -> None:
    """Rename ``temporary`` to ``out``. An older corpus there gives way; the same one, from a faster process,
    stays."""
    _fsync(temporary)
    older = temporary.with_name(f"{temporary.name}-older")
    try:
        temporary.rename(out)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if _prepared(out, index.tokenizer, index.source):
            return
        _refuse_foreign(out)  # again: preparation may have taken hours, and what is here now is about to be removed
        out.rename(older)
        temporary.rename(out)
    _fsync(out.parent)
    shutil.rmtree(older, ignore_errors=True)


def _fsync(folder: Path) -> None:
    """Make the names in ``folder`` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _SplitWriter:
    """Cuts the token stream of one split into shards of ``shard_tokens``, the last one shorter."""

    def __init__(self, folder: Path, name: SplitName, dtype: np.dtype, shard_tokens: int) -> None:
        self.folder, self.name, self.dtype, self.shard_tokens = folder, name, dtype, shard_tokens
        self.tokens = self.documents = 0
        self.lowest = 1.0  # of the places of the documents
        self._shards: list[Shard] = []
        self._digest = hashlib.sha256(str(dtype.itemsize).encode())
        self._file: FileIO | None = None
        self._filled = self._crc = 0

    def count(self, place: float) -> None:
        self.documents += 1
        self.lowest = min(self.lowest, place)

    def add(self, ids: np.ndarray) -> None:
        """Append ``ids`` [tokens] to the stream."""
        ids = ids.astype(self.dtype)
        self._digest.update(ids.data)
        while len(ids):
            if self._file is None:
                # Unbuffered: a write to a full disk fails here, and not later in close().
                self._file = FileIO(self.folder / f"{self.name}-{len(self._shards):05d}.bin", "wb")
            piece, ids = np.split(ids, [self.shard_tokens - self._filled])
            data = memoryview(piece.tobytes())
            self._crc = zlib.crc32(data, self._crc)
            while data:
                data = data[self._file.write(data) :]
            self._filled, self.tokens = self._filled + len(piece), self.tokens + len(piece)
            if self._filled == self.shard_tokens:
                self._end_shard()

    def finish(self) -> Split:
        """End the last shard and describe the split."""
        if self._file:
            self._end_shard()
        return Split(documents=self.documents, digest=self._digest.hexdigest()[:32], shards=tuple(self._shards))

    def close(self) -> None:
        """Let go of a shard that was not ended; harmless after ``finish``."""
        if self._file:
            self._file.close()
            self._file = None

    def _end_shard(self) -> None:
        assert self._file is not None
        os.fsync(self._file.fileno())
        file = Path(os.fsdecode(self._file.name)).name
        self._shards.append(
            Shard(file=file, tokens=self._filled, bytes=self._filled * self.dtype.itemsize, crc32=self._crc)
        )
        self.close()
        self._filled = self._crc = 0
