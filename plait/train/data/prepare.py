"""Text files to a prepared corpus: find, cut into documents, split, encode, write shards, publish atomically.

End-of-text is written where a file ends, and inside a file where its next document went to the other split.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import os
import re
import secrets
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np

from plait.core.base.errors import DataError, JobError
from plait.core.base.passed_over import PassedOver
from plait.train.data.checksums import VERIFIED_FILE, is_large, remember, verify
from plait.train.data.corpus import (
    DTYPES,
    INDEX_FILE,
    SPLITS,
    Corpus,
    DamagedCorpus,
    Index,
    Split,
    SplitName,
    TokenShard,
    is_shard,
    shard_name,
)
from plait.train.data.documents import SHARD_TOKENS, groups, source_fingerprint
from plait.train.data.kinds import Decodable, look_at
from plait.train.data.sources import SourceFile, find_files
from plait.train.data.tokenizer import Tokenizer

OTHER_FILES = re.compile(rf"{re.escape(INDEX_FILE)}|\.?{re.escape(VERIFIED_FILE)}(\..*)?")
Progress = Callable[[int, int], None]
Say = Callable[[str], None]


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class CorpusSettings:
    """How files become a corpus. pattern: files of a folder. eval_fraction: share of documents that is kept
    for evaluation. shard_tokens: tokens of a shard, at most."""

    pattern: str = "*.txt"
    eval_fraction: float = 0.1
    shard_tokens: int = SHARD_TOKENS

    def __post_init__(self) -> None:
        """Raises JobError, naming the setting, for what cannot be."""
        if not 0 <= self.eval_fraction < 1:
            raise JobError(f"must be at least 0 and below 1, got {self.eval_fraction}", key="eval_fraction")
        if self.shard_tokens < 1:
            raise JobError(f"must be at least 1, got {self.shard_tokens}", key="shard_tokens")

    def fingerprint(self, files: Sequence[SourceFile]) -> str:
        """A hash of what a corpus of ``files`` depends on besides the tokenizer."""
        return source_fingerprint(files, self.eval_fraction, self.shard_tokens)


USUAL = CorpusSettings()


def prepare(
    sources: Sequence[str | Path],
    tokenizer: Tokenizer,
    out: Path,
    settings: CorpusSettings = USUAL,
    *,
    progress: Progress | None = None,
    say: Say = _to_stderr,
) -> Corpus:
    """The corpus of ``sources`` in the folder ``out``; at once when it is already there and nothing changed.

    A source is a file, a folder (all files below it whose path there matches ``pattern``, hidden ones left
    out; ``*`` crosses folders) or ``"python-stdlib"``, the sources of the running Python. "Changed" means the
    names, sizes or modification times of the files, the tokenizer, ``eval_fraction`` (of documents; 0 for no
    eval split) or ``shard_tokens``. ``progress(done, total)`` is called in bytes of text.

    What is there already is read and compared with its checksums (``plait.train.data.checksums``). Where it
    is damaged and its sources are unchanged it is prepared again, which ``say`` says; the result must be the
    same stream. An index that cannot be read is damage, too.

    ``out`` appears complete or not at all, also when two processes prepare it at once. Raises ``DataError``
    when a source cannot be read, the text is empty, nothing is left to train on, the disk is full, ``out``
    holds something else, or it holds a corpus of which nobody can tell whether it may be replaced.
    """
    out = Path(os.path.realpath(Path(out).expanduser()))
    files = find_files(sources, settings.pattern, leave_out=out)
    made_from = (tokenizer.fingerprint, settings.fingerprint(files))
    if corpus := _look(out, made_from).corpus:
        return corpus
    _refuse_foreign(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _locked(out) as alone:
            found = _look(out, made_from)
            if found.corpus:  # another process made it while this one waited
                return found.corpus
            if alone:  # nobody else is writing, so what is here was left by a preparation that was killed
                for leftover in out.parent.glob(f".{glob.escape(out.name)}.tmp-*"):
                    shutil.rmtree(leftover, ignore_errors=True)
            if found.damage:
                known = "Its sources are unchanged, so the" if found.index else "The"
                say(f"warning: {found.damage}. {known} corpus is prepared again")
            over = _build(out, files, tokenizer, settings, progress=progress, damaged=found.index)
            for line in over.lines():
                say(f"note: {line}")
    except OSError as error:
        raise DataError(
            f"{out}: cannot write the corpus: {error.strerror or error}; choose another folder for it"
        ) from error
    if corpus := _look(out, made_from).corpus:
        return corpus
    raise DataError(
        f"{out}: another process put a different corpus there at the same time; run again, or give each its own folder"
    )


@dataclass(frozen=True)
class _EarlierCorpus:
    """What a folder holds already of a corpus made from the same things: itself, or what is damaged and what
    it was."""

    corpus: Corpus | None = None
    index: Index | None = None
    damage: str = ""


def _look(out: Path, made_from: tuple[str, str]) -> _EarlierCorpus:
    """What is in ``out``. An index that cannot be read says nothing of what the corpus was made from; whether
    it is the same again, a run that goes on finds by its stream's identity. Raises DataError for an index of
    another version of Plait."""
    if not (out / INDEX_FILE).exists():
        return _EarlierCorpus()
    try:
        index = Index.read(out / INDEX_FILE)
    except DamagedCorpus as error:
        return _EarlierCorpus(damage=error.what)
    if (index.tokenizer, index.source) != made_from:
        return _EarlierCorpus()
    try:
        corpus = Corpus.open(out)
        verify(corpus)
    except DamagedCorpus as error:
        return _EarlierCorpus(index=index, damage=error.what)
    return _EarlierCorpus(corpus=corpus)


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
        else next((p.name for p in out.iterdir() if not (is_shard(p.name) or OTHER_FILES.fullmatch(p.name))), None)
    )
    if other:
        raise DataError(
            f"{out}: will not be replaced by a corpus because it holds other things ({other}); choose another folder"
        )


def _build(
    out: Path,
    files: list[SourceFile],
    tokenizer: Tokenizer,
    settings: CorpusSettings,
    *,
    progress: Progress | None,
    damaged: Index | None,
) -> PassedOver:
    """Write the corpus into a temporary folder beside ``out`` and rename it there; on any error nothing
    remains. damaged: what it must be the same as. Returns how much of the text was no UTF-8."""
    temporary = out.with_name(f".{out.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    dtype = "uint16" if tokenizer.vocab <= 1 << 16 else "uint32"
    writers: dict[SplitName, _SplitWriter] = {
        name: _SplitWriter(temporary, name, DTYPES[dtype], settings.shard_tokens) for name in SPLITS
    }
    read, tokens, total = 0, 0, sum(file.bytes for file in files)
    decodable = Decodable(files)
    free = shutil.disk_usage(out.parent).free
    try:
        look_at(files)
        temporary.mkdir()
        for read in _encode_all(files, tokenizer, writers, settings.eval_fraction, decodable):
            tokens = sum(writer.tokens for writer in writers.values())
            if progress:
                progress(min(read, total), total)
        splits: dict[SplitName, Split] = {name: writer.finish() for name, writer in writers.items()}
        _check_splits(out, splits, damaged, settings.eval_fraction)
        index = Index(
            dtype=dtype, vocab=tokenizer.vocab, end_of_text=tokenizer.end_of_text,
            tokenizer=tokenizer.fingerprint, source=settings.fingerprint(files), splits=splits,
        )  # fmt: skip
        with open(temporary / INDEX_FILE, "wb") as file:
            file.write(index.to_json().encode())
            file.flush()
            os.fsync(file.fileno())
        if is_large(index):
            remember(Corpus(temporary, index))  # its checksums were made a moment ago
        _publish(temporary, out, index)
        return decodable.over
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        needed = DTYPES[dtype].itemsize * (total * tokens / read if read else total)
        raise DataError(
            f"{out}: the disk is full: this corpus needs about {needed / 1e6:.1f} MB and {free / 1e6:.1f} MB were "
            "free; make room, or choose a folder on another disk"
        ) from error
    finally:
        for writer in writers.values():
            writer.close()
        shutil.rmtree(temporary, ignore_errors=True)


def _encode_all(
    files: list[SourceFile],
    tokenizer: Tokenizer,
    writers: dict[SplitName, _SplitWriter],
    eval_fraction: float,
    decodable: Decodable,
) -> Iterator[int]:
    """Write every document to its split; yields the bytes of text done so far."""
    end, last, done = np.array([tokenizer.end_of_text]), None, 0
    for group in groups(files):
        for document in group:
            decodable.add(document.text, begins=document.offset == 0)
        parts: dict[SplitName, list[np.ndarray]] = {name: [] for name in SPLITS}
        for document, ids in zip(group, tokenizer.encode_many([document.text for document in group]), strict=True):
            split = document.split(eval_fraction)
            if last is not None and (document.offset == 0 or split != last):
                parts[last].append(end)
            parts[split].append(ids)
            writers[split].documents += 1
            last, done = split, done + len(document.text)
        for name, ids in parts.items():
            if ids:
                writers[name].add(np.concatenate(ids))
        yield done
    decodable.end()
    if last is not None:
        writers[last].add(end)


def _check_splits(out: Path, splits: dict[SplitName, Split], damaged: Index | None, eval_fraction: float) -> None:
    """Raise when nothing is left to train on, or a corpus that is to be repaired becomes another one."""
    if not splits["train"].tokens:
        raise DataError(
            f"{out}: all {splits['eval'].documents} documents fell into the eval split; "
            f"add text or lower eval_fraction ({eval_fraction})"
        )
    if damaged and any(splits[name].digest != split.digest for name, split in damaged.splits.items()):
        raise DataError(
            f"{out}: is damaged, and cannot be made again: its sources have other contents than when it was prepared, "
            "though their names, sizes and times are the same; restore them, or delete the folder to train on what "
            "they hold now"
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
        if _look(out, (index.tokenizer, index.source)).corpus:
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
        self._shards: list[TokenShard] = []
        self._digest = hashlib.sha256(str(dtype.itemsize).encode())
        self._file: FileIO | None = None
        self._filled = self._crc = 0

    def add(self, ids: np.ndarray) -> None:
        """Append ``ids`` [tokens] to the stream."""
        ids = ids.astype(self.dtype)
        self._digest.update(ids.data)
        while len(ids):
            if self._file is None:
                # Unbuffered: a write to a full disk fails here, and not later in close().
                self._file = FileIO(self.folder / shard_name(self.name, len(self._shards)), "wb")
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
            TokenShard(file=file, tokens=self._filled, bytes=self._filled * self.dtype.itemsize, crc32=self._crc)
        )
        self.close()
        self._filled = self._crc = 0
