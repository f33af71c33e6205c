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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np

from plait.core.base.errors import DataError, JobError
from plait.core.base.passed_over import PassedOver
from plait.train.data.chats import Chats
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
    TokenFile,
    ends_name,
    is_shard,
    spans_name,
)
from plait.train.data.documents import SHARD_TOKENS, Reading, Text, groups, source_fingerprint
from plait.train.data.encoding import encode_ahead
from plait.train.data.in_place import write_spans
from plait.train.data.kinds import IN_PLACE, kind_of_file, look_at
from plait.train.data.shards import PROGRESS_FILE, Draft
from plait.train.data.sources import SourceFile, find_files
from plait.train.data.token_files import Tokens, open_tokens
from plait.train.data.tokenizer import Tokenizer

OTHER_FILES = re.compile(
    "|".join(map(re.escape, (INDEX_FILE, PROGRESS_FILE, *map(ends_name, SPLITS), *map(spans_name, SPLITS))))
    + rf"|\.?{re.escape(VERIFIED_FILE)}(\..*)?"
)
Progress = Callable[[int, int], None]
Say = Callable[[str], None]


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class CorpusSettings:
    """How files become a corpus. pattern: files of a folder. eval_fraction: share of documents that is kept
    for evaluation. shard_tokens: tokens of a shard, at most. text_key: what holds the text of a row. dtype:
    of bare numbers; empty where files say what they are. chats: if rows are no texts."""

    pattern: str = "*.txt"
    eval_fraction: float = 0.1
    shard_tokens: int = SHARD_TOKENS
    text_key: str = "text"
    dtype: str = ""
    chats: Chats | None = None

    def __post_init__(self) -> None:
        """Raises JobError, naming the setting, for what cannot be."""
        if not 0 <= self.eval_fraction < 1:
            raise JobError(f"must be at least 0 and below 1, got {self.eval_fraction}", key="eval_fraction")
        if self.shard_tokens < 1:
            raise JobError(f"must be at least 1, got {self.shard_tokens}", key="shard_tokens")

    def fingerprint(self, files: Sequence[SourceFile]) -> str:
        """A hash of what a corpus of ``files`` depends on besides the tokenizer."""
        identity = self.chats.identity if self.chats else ""
        return source_fingerprint(files, self.eval_fraction, self.shard_tokens, self.text_key + self.dtype + identity)


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
    names, sizes or modification times of the files, the tokenizer or the settings. ``progress(done, total)``
    is called in bytes of files.

    What is there already is read and compared with its checksums (``plait.train.data.checksums``). Where it
    is damaged and its sources are unchanged it is prepared again, which ``say`` says; the result must be the
    same stream. An index that cannot be read is damage, too.

    ``out`` appears complete or not at all, also when two processes prepare it at once. What a killed
    preparation wrote is kept beside it, and the next one of the same things goes on from there. Raises
    ``DataError`` when a source cannot be read, the text is empty, nothing is left to train on, the disk is
    full, ``out`` holds something else, or it holds a corpus of which nobody can tell whether it may be
    replaced.
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
            draft = Draft(_place_of(out, made_from, alone=alone), _dtype(tokenizer), settings.shard_tokens)
            if found.damage:
                known = "Its sources are unchanged, so the" if found.index else "The"
                say(f"warning: {found.damage}. {known} corpus is prepared again")
            over = _build(out, draft, files, _Making(tokenizer, settings, found.index, progress, say))
            for line in over.lines():
                say(f"note: {line}")
            for line in settings.chats.lines() if settings.chats else ():
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


def _place_of(out: Path, made_from: tuple[str, str], *, alone: bool) -> Path:
    """The folder beside ``out`` to write into: that of an earlier preparation of the same things that was
    killed, if nobody else is writing. Drafts of other things are then removed."""
    name = f".{out.name}.tmp-"
    if not alone:
        return out.with_name(f"{name}{os.getpid()}-{secrets.token_hex(4)}")
    draft = out.with_name(name + hashlib.sha256(repr(made_from).encode()).hexdigest()[:16])
    for leftover in out.parent.glob(f"{glob.escape(name)}*"):
        if leftover != draft:
            shutil.rmtree(leftover, ignore_errors=True)
    return draft


def _dtype(tokenizer: Tokenizer) -> Literal["uint16", "uint32"]:
    return "uint16" if tokenizer.vocab <= 1 << 16 else "uint32"


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


@dataclass(frozen=True)
class _Making:
    """How a corpus is made. damaged: what it must be the same as."""

    tokenizer: Tokenizer
    settings: CorpusSettings
    damaged: Index | None
    progress: Progress | None
    say: Say


def _build(out: Path, draft: Draft, files: list[SourceFile], making: _Making) -> PassedOver:
    """Write the corpus into the draft and rename it to ``out``; what of the sources is passed over. On an
    error nothing remains, unless it can be gone on with."""
    tokenizer, settings, total = making.tokenizer, making.settings, sum(file.bytes for file in files)
    reading, progress = Reading(settings.text_key, settings.chats), making.progress or (lambda done, total: None)
    tokens = done = 0
    free = shutil.disk_usage(out.parent).free
    try:
        formats = look_at(files, dtype=settings.dtype)
        if len(formats) > 1:
            told = ", ".join(f"{count:,} {format}" for format, count in formats.most_common())
            making.say(f"note: files of several formats: {told}; data.pattern chooses some")
        draft.begin()
        if draft.kept:
            making.say(f"going on with a preparation that was ended after {draft.tokens:,} tokens")
        in_place: tuple[TokenFile, ...] = ()
        splits: dict[SplitName, Split]
        if formats.keys() & IN_PLACE:
            in_place, splits = write_spans(
                draft.folder, opened_tokens(files, settings, tokenizer), settings.eval_fraction, tokenizer.vocab
            )
        else:
            for done in _write_all(groups(files, settings.eval_fraction, reading), tokenizer, draft):
                progress(done, total)
                tokens = draft.tokens
            splits = {name: writer.finish() for name, writer in draft.writers.items()}
        progress(total, total)
        _check_splits(out, splits, making)
        index = Index(
            dtype=_dtype(tokenizer), vocab=tokenizer.vocab, end_of_text=tokenizer.end_of_text,
            tokenizer=tokenizer.fingerprint, source=settings.fingerprint(files), splits=splits,
            in_place=in_place,
            tokenizer_file=str(getattr(getattr(tokenizer, "plain", tokenizer), "path", "")),
        )  # fmt: skip
        draft.end(index.to_json())
        if is_large(index):
            remember(Corpus(draft.folder, index))  # its checksums were made a moment ago
        _publish(draft.folder, out, index)
        return reading.over
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        needed = DTYPES[draft.dtype].itemsize * (total * tokens / done if done else total)
        raise DataError(
            f"{out}: the disk is full: this corpus needs about {needed / 1e6:.1f} MB and {free / 1e6:.1f} MB were "
            "free; make room, or choose a folder on another disk"
        ) from error
    finally:
        draft.close()
        if not draft.is_kept:
            shutil.rmtree(draft.folder, ignore_errors=True)


def opened_tokens(files: Sequence[SourceFile], settings: CorpusSettings, tokenizer: Tokenizer) -> list[Tokens]:
    """Token files. Raises DataError where rows are wanted that are no texts."""
    if settings.chats:
        raise DataError(
            f"{files[0].path}: has tokens, and {settings.chats.settings.rows} are made of text; name it as a source of "
            'data.sources with rows = "text"'
        )
    formats = [kind_of_file(file, settings.dtype).format for file in files]
    return [
        open_tokens(file, format, settings.dtype, tokenizer.end_of_text)
        for file, format in zip(files, formats, strict=True)
        if file.bytes
    ]


def _write_all(found: Iterator[list[Text]], tokenizer: Tokenizer, draft: Draft) -> Iterator[int]:
    """Write every text to its split, from where an earlier preparation was ended; yields the bytes of files
    that are done. End-of-text stands behind a document, written when the next begins."""
    end, kept = np.array([tokenizer.end_of_text]), draft.kept
    number, last = (kept.groups, kept.last) if kept else (0, None)
    for group, encoded in encode_ahead(islice(found, number, None), tokenizer):
        parts: dict[SplitName, list[np.ndarray]] = {name: [] for name in SPLITS}
        ends: dict[SplitName, list[int]] = {name: [] for name in SPLITS}
        sizes: dict[SplitName, int] = dict.fromkeys(SPLITS, 0)
        for text, ids in zip(group, encoded, strict=True):
            if last is not None and text.begins:
                parts[last].append(end)
                sizes[last] += 1
                ends[last].append(sizes[last])
            parts[text.split].append(ids)
            sizes[text.split] += len(ids)
            last = text.split
        for name, ids in parts.items():
            if ids:
                draft.writers[name].add(np.concatenate(ids), ends[name])
        number += 1
        draft.keep(groups=number, last=last)
        yield group[-1].done
    if last is not None:
        draft.writers[last].add(end, [1])


def _check_splits(out: Path, splits: dict[SplitName, Split], making: _Making) -> None:
    """Raise when nothing is left to train on, or a corpus that is to be repaired becomes another one."""
    chats, damaged = making.settings.chats, making.damaged
    if not any(split.tokens for split in splits.values()):
        raise DataError(f"{out}: {chats.without_answers if chats else 'there is no text or token in its sources'}")
    if not splits["train"].tokens:
        raise DataError(
            f"{out}: all {splits['eval'].documents} documents fell into the eval split; "
            f"add text or lower eval_fraction ({making.settings.eval_fraction})"
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
