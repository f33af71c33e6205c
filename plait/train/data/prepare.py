"""Prepare a corpus from text files: find, cut into documents, split, encode, write shards, publish
atomically.

End-of-text is written at the end of each file, and inside a file where its next document is in the
other split.
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
from plait.core.base.files import sync_folder
from plait.core.base.ignored_input import IgnoredInput
from plait.train.data.chats import Chats
from plait.train.data.corpus import (
    DTYPES,
    INDEX_FILE,
    SPLITS,
    VERIFIED_FILE,
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
from plait.train.data.kinds import IN_PLACE, check_formats, kind_of_file
from plait.train.data.shards import PROGRESS_FILE, Draft, encode_ahead
from plait.train.data.sources import Progress, SourceFile, find_files
from plait.train.data.token_files import Tokens, open_tokens, write_spans
from plait.train.data.tokenizer import Tokenizer

OTHER_FILES = re.compile(
    "|".join(map(re.escape, (INDEX_FILE, PROGRESS_FILE, *map(ends_name, SPLITS), *map(spans_name, SPLITS))))
    + rf"|\.?{re.escape(VERIFIED_FILE)}(\..*)?"
)
Say = Callable[[str], None]


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class CorpusSettings:
    """Settings of a corpus. pattern: selects files of a folder. eval_fraction: share of documents
    for evaluation. shard_tokens: tokens of a shard, at most. text_key: key of a row's text. dtype:
    of bare numbers; empty for files that name their format. chats: converter of rows that are no
    plain texts."""

    pattern: str = "*.txt"
    eval_fraction: float = 0.1
    shard_tokens: int = SHARD_TOKENS
    text_key: str = "text"
    dtype: str = ""
    chats: Chats | None = None

    def __post_init__(self) -> None:
        """Raise JobError, naming the setting, for a value out of range."""
        if not 0 <= self.eval_fraction < 1:
            raise JobError(f"must be at least 0 and below 1, got {self.eval_fraction}", key="eval_fraction")
        if self.shard_tokens < 1:
            raise JobError(f"must be at least 1, got {self.shard_tokens}", key="shard_tokens")

    def fingerprint(self, files: Sequence[SourceFile]) -> str:
        """Return a hash of everything that a corpus of ``files`` depends on, except the
        tokenizer."""
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
    """Prepare the corpus of ``sources`` in the folder ``out`` and return it; at once if it exists
    and nothing changed.

    A source is a file, a folder (all files below it whose path there matches ``pattern``, except
    hidden ones; ``*`` crosses folders) or ``"python-stdlib"``, the sources of the running Python.
    "Changed" means the names, sizes or modification times of the files, the tokenizer or the
    settings. ``progress(done, total, tokens)`` is called in bytes of files.

    An existing corpus is verified (``Corpus.verify_changed``). If it is damaged and its sources are
    unchanged, it is prepared again, with a message to ``say``; the result must be the same stream.
    An unreadable index is damage, too.

    ``out`` appears complete or not at all, also when two processes prepare it at once. The output
    of a killed preparation is kept beside it, and the next preparation from the same sources and
    settings resumes there. Raises DataError if a source cannot be read, there is no text, nothing
    is left to train on, the disk is full, or ``out`` holds other files or a corpus that may not be
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
            draft = Draft(_draft_folder(out, made_from, alone=alone), _dtype(tokenizer), settings.shard_tokens)
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


def _draft_folder(out: Path, made_from: tuple[str, str], *, alone: bool) -> Path:
    """Return the folder beside ``out`` to write into: that of an earlier, killed preparation of the
    same corpus, if no other process is writing. Drafts of other corpora are then removed."""
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
    """An existing corpus in a folder, made from the same sources and settings: intact; or its
    damage, and its index if that is readable."""

    corpus: Corpus | None = None
    index: Index | None = None
    damage: str = ""


def _look(out: Path, made_from: tuple[str, str]) -> _EarlierCorpus:
    """Return the existing corpus in ``out``. An unreadable index does not show what the corpus was
    made from; a resumed run checks the identity of its stream. Raises DataError for an index of
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
        corpus.verify_changed()
    except DamagedCorpus as error:
        return _EarlierCorpus(index=index, damage=error.what)
    return _EarlierCorpus(corpus=corpus)


@contextmanager
def _locked(out: Path) -> Iterator[bool]:
    """Hold the lock of ``out``. Yield False if the file system has no locks; then the first rename
    wins."""
    # The lock file is kept: if it were removed, a third process could lock a new file while a second one
    # still waits for the old.
    with open(out.with_name(f".{out.name}.lock"), "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            alone = True
        except OSError:
            alone = False
        yield alone


def _refuse_foreign(out: Path) -> None:
    """Raise DataError unless ``out`` may be replaced: it is absent, or holds nothing but a corpus,
    intact or damaged."""
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
    """Inputs of a corpus's preparation. damaged: the index of the damaged corpus that the result
    must equal."""

    tokenizer: Tokenizer
    settings: CorpusSettings
    damaged: Index | None
    progress: Progress | None
    say: Say


def _build(out: Path, draft: Draft, files: list[SourceFile], making: _Making) -> IgnoredInput:
    """Write the corpus into the draft and rename it to ``out``; return what was passed over. On an
    error nothing remains, unless a later preparation can resume from it."""
    tokenizer, settings, total = making.tokenizer, making.settings, sum(file.bytes for file in files)
    reading, progress = Reading(settings.text_key, settings.chats), making.progress or (lambda *_: None)
    tokens = done = 0
    free = shutil.disk_usage(out.parent).free
    try:
        formats = check_formats(files, dtype=settings.dtype)
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
                tokens = draft.tokens
                progress(done, total, tokens)
            splits = {name: writer.finish() for name, writer in draft.writers.items()}
        progress(total, total, tokens)
        _check_splits(out, splits, making)
        index = Index(
            dtype=_dtype(tokenizer), vocab=tokenizer.vocab, end_of_text=tokenizer.end_of_text,
            tokenizer=tokenizer.fingerprint, source=settings.fingerprint(files), splits=splits,
            in_place=in_place,
            tokenizer_file=str(getattr(getattr(tokenizer, "plain", tokenizer), "path", "")),
        )  # fmt: skip
        draft.end(index.to_json())
        made = Corpus(draft.folder, index)
        if made.is_large:
            made.remember()  # its checksums were just computed
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
    """Open token files. Raises DataError if the job's rows are chats or pairs."""
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
    """Write every text to its split, from where an earlier preparation ended; yield the bytes of
    files that are done. A document's end-of-text is written when the next document begins."""
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
    """Raise DataError if nothing is left to train on, or a repaired corpus differs from the damaged
    one."""
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
    """Rename ``temporary`` to ``out``. An older corpus there is replaced; the same corpus, from a
    faster process, stays."""
    sync_folder(temporary)
    older = temporary.with_name(f"{temporary.name}-older")
    try:
        temporary.rename(out)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if _look(out, (index.tokenizer, index.source)).corpus:
            return
        _refuse_foreign(out)  # again: preparation may have taken hours, and the folder is about to be removed
        out.rename(older)
        temporary.rename(out)
    sync_folder(out.parent)
    shutil.rmtree(older, ignore_errors=True)
