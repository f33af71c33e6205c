"""Check before a rank starts that a job's data suffice to train and to evaluate on.

Tokens are counted as in the preparation, from the first document on, until a sequence is full.
Beyond that, files are checked at a bounded cost for damage that ranks would meet later. The ranks
check everything:

| files | what is checked |
|---|---|
| rows: JSON lines, JSON, CSV, Parquet, Arrow | up to ``ROWS`` bytes of files of a source |
| JSON lines beyond that, not compressed | the last line |
| text | up to ``TEXTS`` bytes of files of a source; compressed text counts as rows |
| token files | all tokens up to ``TOKENS`` of a source; beyond, both ends of each file |
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from plait.core.base.errors import DataError, JobError
from plait.core.base.ignored_input import Checked, IgnoredInput
from plait.core.job.settings import DataSection, TrainSection
from plait.train.data import kinds
from plait.train.data.chats import readers_of
from plait.train.data.corpus import INDEX_FILE, SPLITS, Corpus, Index, SplitName
from plait.train.data.documents import Document, Reading, documents
from plait.train.data.kinds import IN_PLACE, check_formats, kind_of_file
from plait.train.data.prepare import opened_tokens
from plait.train.data.sets import DataSet, evaluation_sets, training_sets
from plait.train.data.sources import SourceFile, find_files
from plait.train.data.token_files import Tokens, check_vocabulary, dealt
from plait.train.data.tokenizer import Tokenizer, load_tokenizer, quiet

COUNTED = 64 << 20
"""Bytes of text to count, at most: some tenths of a second. If they contain no document for
evaluation, the preparation decides."""
MOST_FILES = 10_000
"""The number of files to check, half a second; the preparation checks all."""
ROWS, TEXTS = 32 << 20, 128 << 20
"""Bytes of files to check: about a second; for files in the page cache a fifth of that."""
UNPACKED, ROW = 160 << 20, 256
"""Bytes of text to check in a file of rows, and the bytes that each row adds to its text: a
compressed file of some kilobytes may have a hundred million rows."""
TAIL = 1 << 20
"""Bytes at the end of a JSON-lines file in which its last line is looked for."""
TOKENS, STRETCH = 256 << 20, 4096
"""Tokens to check, about a second for a file in the page cache; and the least number of tokens at
either end."""


def check_data(data: DataSection, train: TrainSection, out: Path) -> Checked:
    """Check a job's data before ranks start, as the ranks would. Return remarks. out: the folder in
    which the corpus will be prepared.

    Raises JobError for missing sources or a missing tokenizer, files that are no text, and a split
    that does not fill one sequence.
    """
    over = IgnoredInput()
    with _of("data.tokenizer"):
        tokenizer = load_tokenizer(data.tokenizer)
    with _of("data.chat_template" if data.chat_template else "data.tokenizer"):
        readers = readers_of(data, tokenizer)
    if train.eval_every and not data.eval and not data.eval_fraction:
        fix = "Set a fraction such as 0.02, name data.eval, or train.eval_every = 0"
        raise JobError(f"0 keeps no text for the evaluation of train.eval_every = {train.eval_every}",
                       key="data.eval_fraction", fix=fix)  # fmt: skip

    def checked(sets: Callable[..., list[DataSet]], key: str, needed: Sequence[SplitName]) -> list[_Count]:
        with _of(key):
            found = sets(data, Path(os.path.realpath(out.expanduser())), readers)
        counts = [_Count(one, tokenizer, data, needed, key) for one in found]
        for count in counts:
            count.check(over)
        return counts

    held_out = SPLITS if train.eval_every and not data.eval else ("train",)
    trained = checked(training_sets, "data.sources" if data.sources else "data.text", held_out)
    evaluated = checked(evaluation_sets, "data.eval", ("train",) if train.eval_every else ())  # prepared in any case
    return Checked(over, _also_trained_on(trained, evaluated) if train.eval_every else "")


@contextmanager
def _of(key: str) -> Generator[None]:
    """Turn a DataError into a JobError that names the job's key."""
    try:
        yield
    except DataError as error:
        raise JobError(str(error), key=key) from None


@dataclass
class _Count:
    """Count of a source's tokens in each split, up to what one sequence needs. complete: True if
    all documents were counted."""

    one: DataSet
    plain: Tokenizer
    data: DataSection
    needed: Sequence[SplitName]
    key: str

    def __post_init__(self) -> None:
        self.tokenizer = self.one.encoder(self.plain)
        self.least = 1 if self.one.settings.chats else self.data.sequence_length + 1
        """Tokens that a split needs: chats are packed, and the rest of a sequence is padded."""
        self.files: Sequence[SourceFile] = ()
        self.tokens, self.documents = Counter[SplitName](), Counter[SplitName]()
        self.lowest = 1.0
        """The least ``hash_fraction`` of the training documents."""
        self.complete = False
        self._read = 0

    def check(self, over: IgnoredInput) -> None:
        """Check the files, and count tokens as far as needed. Raises JobError."""
        one = self.one
        with _of(self.key):
            if one.made:
                corpus = Corpus.open(one.folder)
                one.check(corpus, self.tokenizer)
                self._take(corpus.index)
                self.complete = True
            elif not one.is_elsewhere:  # rank 0 fetches it later
                self.files = find_files(one.source.paths, one.settings.pattern, leave_out=one.folder, over=over)
                if not (self._is_prepared() and self._enough):
                    self._by_reading(check_formats(self.files, MOST_FILES, one.settings.dtype))
        if self.complete:
            for split in self.needed:
                self._refuse_short(split)

    @property
    def _enough(self) -> bool:
        """True if every needed split fills a sequence."""
        return all(self.tokens[split] >= self.least for split in self.needed)

    @property
    def _counts(self) -> bool:
        """True if the next document is to be counted."""
        return not self._enough and self._read < COUNTED

    def _is_prepared(self) -> bool:
        """Take the counts of an existing corpus, if it was made from the same sources and settings.

        The documents of a corpus that is too small are read again: they show which fraction would
        suffice.
        """
        try:
            index = Index.read(self.one.folder / INDEX_FILE)
        except DataError:
            return False
        if (index.tokenizer, index.source) != (self.tokenizer.fingerprint, self.one.settings.fingerprint(self.files)):
            return False
        self._take(index)
        return True

    def _take(self, index: Index) -> None:
        for name, split in index.splits.items():
            self.tokens[name], self.documents[name] = split.tokens, split.documents

    def _by_reading(self, formats: Counter[str]) -> None:
        """Read documents until there are enough tokens, and further to find damage that ranks would
        meet later."""
        self.tokens.clear()
        self.documents.clear()
        if formats.keys() & IN_PLACE:
            self._by_looking_through()
            return
        reading = Reading(self.one.settings.text_key, self.one.settings.chats, rendered=lambda: self._counts)
        last, ahead = None, _Ahead()
        for number, file in enumerate(self.files):
            left = ahead.of(file) if number < MOST_FILES else 0
            if not (self._counts or left):
                continue
            for document in documents(file, reading):
                if self._counts:
                    last = self._counted(document, last)
                elif (left := left - len(document.text) - ROW) < 0:
                    break
        self.complete = self._counts
        if last is not None and self.complete:
            self.tokens[last] += 1

    def _counted(self, document: Document, last: SplitName | None) -> SplitName:
        """Count one more document; return its split. last: the split of the document before."""
        split = document.split(self.one.settings.eval_fraction)
        if last is not None and (document.offset == 0 or split != last):
            self.tokens[last] += 1  # end-of-text
        if self.tokens[split] < self.least:  # encoding is the slow part
            with _of("data.tokenizer"), quiet():
                self.tokens[split] += len(self.tokenizer.encode(document.text))
        if split == "train":
            self.lowest = min(self.lowest, document.hash_fraction)
        self.documents[split] += 1
        self._read += len(document.text)
        return split

    def _by_looking_through(self) -> None:
        """Count the tokens of token files, as far as needed."""
        files = opened_tokens(self.files[:MOST_FILES], self.one.settings, self.tokenizer)
        _look_at_tokens(files, self.tokenizer.vocab)
        for tokens in files:
            for document in tokens.documents:
                for side, parts in dealt(tokens.array, document, self.one.settings.eval_fraction):
                    self.tokens[side] += sum(count for _, count in parts)
                    self.documents[side] += 1
                if self._enough:
                    return
        self.complete = True

    def _refuse_short(self, split: SplitName) -> None:
        """Raise JobError if a split does not fill one sequence."""
        data, settings = self.data, self.one.settings
        have, documents = self.tokens[split], sum(self.documents.values())
        if have >= self.least:
            return
        if not documents:
            problem = settings.chats.without_answers if settings.chats else "there is no text or token in it"
            raise JobError(f"{', '.join(self.one.source.paths)}: {problem}", key=self.key, fix="Name other files")
        fixes = ["Add text"]
        if have > 1:
            fixes.append(f"set data.sequence_length = {have - 1} or less")
        if split == "eval":
            fraction = math.floor(self.lowest * 1000 + 1) / 1000  # selects one more document
            if self.documents["train"] > 1 and fraction < 1:
                fixes.append(f"set data.eval_fraction = {fraction} or more")
            fixes.append("set train.eval_every = 0")
        elif documents == 1 and self.documents["eval"]:  # no fraction splits one document
            fixes.append("set data.eval_fraction = 0 and train.eval_every = 0")
        elif self.documents["eval"]:
            fixes.append(f"lower data.eval_fraction ({data.eval_fraction:g})")
        of = "" if self.one.name == "text" else f"of {self.one.name}, "
        where = "evaluation" if split == "eval" or self.key == "data.eval" else "training"
        raise JobError(
            f"{of}{self.documents[split]} of {documents} documents, {have} tokens, are for {where}, and one sequence "
            f"of {data.sequence_length} needs {self.least} tokens",
            key="data.sequence_length" if self.documents[split] else "data.eval_fraction",
            fix=" or ".join(filter(None, (", ".join(fixes[:-1]), fixes[-1]))),
        )


# ---- damage ahead ----


class _Ahead:
    """Budgets of bytes that are still to be checked for damage beyond the counted documents,
    consumed in the order of the files."""

    def __init__(self) -> None:
        self._rows, self._texts = ROWS, TEXTS

    def of(self, file: SourceFile) -> int:
        """Return the bytes of a file's text to check; 0 for none. Raises DataError for a truncated
        last line, if a file of rows is not read completely."""
        kind = kind_of_file(file)
        if kind.format == kinds.TEXT and not kind.compression:
            if file.bytes <= kinds.AT_ONCE:  # read completely to determine its kind
                return 0
            self._texts -= file.bytes
            return 2 * file.bytes if self._texts >= 0 else 0
        self._rows -= file.bytes
        if self._rows >= 0:
            return UNPACKED if file.bytes else 0
        if kind.format == kinds.JSON_LINES and not kind.compression:
            _look_at_last_line(file)
        return 0


def _look_at_last_line(file: SourceFile) -> None:
    with open(file.path, "rb") as stream:
        stream.seek(-min(TAIL, file.bytes), os.SEEK_END)
        lines = stream.read().rstrip().split(b"\n")
    try:
        json.loads(lines[-1].decode(errors="replace") if len(lines) > 1 else "0")  # "0": the line is longer than TAIL
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{file.path}: its last line is not JSON ({error}); the file may be cut off: fetch it again"
        ) from None


def _look_at_tokens(files: Sequence[Tokens], vocab: int) -> None:
    """Raise DataError for a token outside the vocabulary."""
    whole = sum(len(one.array) for one in files) <= TOKENS
    for one in files:
        count = len(one.array)
        part = count if whole else max(STRETCH, TOKENS // (2 * len(files)))
        check_vocabulary(one, vocab, 0, part)
        check_vocabulary(one, vocab, max(part, count - part), count)


# ---- evaluation data that is also training data ----


def _also_trained_on(training: Sequence[_Count], evaluated: Sequence[_Count]) -> str:
    """Return a sentence that names the sets of ``data.eval`` with files of the training data: their
    loss does not measure unseen text. Empty if there are none."""
    trained = {item for one in training if evaluated for item, _ in _items(one)}
    found = list[str]()
    for one in evaluated:
        items = dict(_items(one))
        if both := [name for item, name in items.items() if item in trained]:
            count = f"{len(both):,} of {len(items):,} files, the first " if len(items) > 1 else ""
            found.append(f"eval_loss/{one.one.name} ({count}{both[0]})")
    if not found:
        return ""
    return (
        f"data.eval contains training data: {'; '.join(found)}. Its loss does not measure text that the model "
        "has not seen. Take it out of the training data, or name other text."
    )


def _items(count: _Count) -> Iterator[tuple[Hashable, str]]:
    """Yield an identity and a display name for each container of a source's text: files, whatever
    paths lead to them; a prepared corpus; addresses."""
    if count.one.made:
        yield _identity(count.one.folder), str(count.one.folder)
    elif count.one.is_elsewhere:
        yield from ((path, path) for path in count.one.source.paths)
    yield from ((_identity(file.path), str(file.path)) for file in count.files if file.bytes)


def _identity(path: Path) -> Hashable:
    """Return a key that is equal for all paths to the same file. For a Megatron pair, it is that of
    the token file."""
    try:
        found = os.stat(path.with_suffix(".bin") if path.suffix == ".idx" else path)
    except OSError:  # reading the file will report the error
        return str(path)
    return found.st_dev, found.st_ino
