"""Whether a job's data are enough to train and to evaluate on: asked before a rank starts."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from plait.core.base.errors import DataError, JobError
from plait.core.base.passed_over import Checked, PassedOver
from plait.core.job.settings import DataSection, TrainSection
from plait.train.data.ahead import RowsAhead, look_at_tokens
from plait.train.data.chats import readers_of
from plait.train.data.corpus import INDEX_FILE, SPLITS, Corpus, Index, SplitName
from plait.train.data.documents import Document, Reading, documents
from plait.train.data.in_place import dealt
from plait.train.data.kinds import IN_PLACE, look_at
from plait.train.data.prepare import opened_tokens
from plait.train.data.sets import DataSet, evaluation_sets, training_sets
from plait.train.data.sources import SourceFile, find_files
from plait.train.data.tokenizer import Tokenizer, load_tokenizer, quiet
from plait.train.data.trained_on import SetFiles, also_trained_on

LOOK = 64 << 20
"""Bytes of text that are read at most, some tenths of a second. Who finds no document for evaluation in so
many leaves the answer to the preparation."""


MOST_FILES = 10_000
"""Files that are looked at, half a second; the preparation looks at all."""


def check_data(data: DataSection, train: TrainSection, out: Path) -> Checked:
    """Refuse at once what ranks would refuse when they have started and the corpus is prepared in ``out``;
    remarks on what is in order.

    That is: sources or a tokenizer that are not there, files that are no text, and a split that would not
    fill one sequence. Tokens are counted as the preparation counts them, from the first document on, and only
    until there are enough. Raises JobError.
    """
    over = PassedOver()
    with _of("data.tokenizer"):
        tokenizer = load_tokenizer(data.tokenizer)
    with _of("data.chat_template" if data.chat_template else "data.tokenizer"):
        readers = readers_of(data, tokenizer)
    if train.eval_every and not data.eval and not data.eval_fraction:
        fix = "Set a fraction such as 0.02, name data.eval, or train.eval_every = 0"
        raise JobError(f"0 keeps no text for the evaluation of train.eval_every = {train.eval_every}",
                       key="data.eval_fraction", fix=fix)  # fmt: skip
    key = "data.sources" if data.sources else "data.text"
    held_out = SPLITS if train.eval_every and not data.eval else ("train",)
    trained = [
        _check_set(_Count(one, tokenizer, data, held_out, key), over)
        for one in _sets(partial(training_sets, readers=readers), data, out, key)
    ]
    evaluated = ("train",) if train.eval_every else ()  # it is prepared in any case
    looked_at = [
        _check_set(_Count(one, tokenizer, data, evaluated, "data.eval"), over)
        for one in _sets(partial(evaluation_sets, readers=readers), data, out, "data.eval")
    ]
    return Checked(over, also_trained_on(trained, looked_at) if evaluated else "")


def _sets(sets: Callable[[DataSection, Path], list[DataSet]], data: DataSection, out: Path, key: str) -> list[DataSet]:
    with _of(key):
        return sets(data, Path(os.path.realpath(out.expanduser())))


def _check_set(counted: _Count, over: PassedOver) -> SetFiles:
    """Look at the files of a source, and count as far as is needed."""
    one = counted.one
    with _of(counted.key):
        if one.made:
            counted.of_corpus(Corpus.open(one.folder))
        elif one.is_elsewhere:  # rank 0 fetches it
            return SetFiles(one, ())
        else:
            counted.files = find_files(one.source.paths, one.settings.pattern, leave_out=one.folder, over=over)
            if not (counted.of_index() and counted.enough):
                counted.formats = look_at(counted.files, MOST_FILES, one.settings.dtype)
                counted.by_reading()
    if counted.complete:
        for split in counted.needed:
            _refuse_short(split, counted)
    return SetFiles(one, counted.files)


@contextmanager
def _of(key: str) -> Generator[None]:
    """Say which key of the job names what a DataError is about."""
    try:
        yield
    except DataError as error:
        raise JobError(str(error), key=key) from None


class _Count:
    """Tokens of each split, up to what one sequence needs. complete: whether all text was seen."""

    def __init__(
        self, one: DataSet, tokenizer: Tokenizer, data: DataSection, needed: Sequence[SplitName], key: str
    ) -> None:
        self.one, self.tokenizer, self.data, self.needed, self.key = one, one.encoder(tokenizer), data, needed, key
        self.least = 1 if one.settings.chats else data.sequence_length + 1
        """Tokens that a split needs: chats are packed, and what is left of a sequence is padded."""
        self.files: Sequence[SourceFile] = ()
        self.tokens: Counter[SplitName] = Counter()
        self.documents: Counter[SplitName] = Counter()
        self.lowest = 1.0
        """Of the places of the documents that are for training."""
        self.complete = False
        self._read = 0
        self.formats = Counter[str]()

    @property
    def enough(self) -> bool:
        """Whether every split that is needed fills a sequence."""
        return all(self.tokens[split] >= self.least for split in self.needed)

    @property
    def _counts(self) -> bool:
        """Whether the next document is counted."""
        return not self.enough and self._read < LOOK

    def of_index(self) -> bool:
        """Take the counts of the corpus that is there already, if it is made of the same things.

        Of a corpus that is too small the documents are read again: they say which fraction would do.
        """
        try:
            index = Index.read(self.one.folder / INDEX_FILE)
        except DataError:
            return False
        if (index.tokenizer, index.source) != (self.tokenizer.fingerprint, self.one.settings.fingerprint(self.files)):
            return False
        self._take(index)
        return True

    def of_corpus(self, corpus: Corpus) -> None:
        """Take the counts of a corpus that the user has prepared. Raises DataError for one of another
        tokenizer."""
        self.one.check(corpus, self.tokenizer)
        self._take(corpus.index)
        self.complete = True

    def _take(self, index: Index) -> None:
        for split in SPLITS:
            self.tokens[split], self.documents[split] = index.splits[split].tokens, index.splits[split].documents

    def by_reading(self) -> None:
        """Read documents until there are enough, and on where ranks would find damage later."""
        self._read = 0
        self.tokens.clear()
        self.documents.clear()
        if self.formats.keys() & IN_PLACE:
            self._by_looking_through()
            return
        reading = Reading(self.one.settings.text_key, self.one.settings.chats, rendered=lambda: self._counts)
        last, ahead = None, RowsAhead()
        for number, file in enumerate(self.files):
            whole = number < MOST_FILES and ahead.whole(file)
            if not (self._counts or whole):
                continue
            for document in documents(file, reading):
                if self._counts:
                    last = self._counted(document, last)
                elif not whole:
                    break
        self.complete = self._counts
        if last is not None and self.complete:
            self.tokens[last] += 1

    def _counted(self, document: Document, last: SplitName | None) -> SplitName:
        """One document more behind one of side ``last``; its side."""
        split = document.split(self.one.settings.eval_fraction)
        if last is not None and (document.offset == 0 or split != last):
            self.tokens[last] += 1  # end-of-text
        if self.tokens[split] < self.least:  # encoding is the slow part
            with _of("data.tokenizer"), quiet():
                self.tokens[split] += len(self.tokenizer.encode(document.text))
        if split == "train":
            self.lowest = min(self.lowest, document.place)
        self.documents[split] += 1
        self._read += len(document.text)
        return split

    def _by_looking_through(self) -> None:
        """Count token files of others, as far as is needed."""
        files = opened_tokens(self.files[:MOST_FILES], self.one.settings, self.tokenizer)
        look_at_tokens(files, self.tokenizer.vocab)
        for tokens in files:
            for document in tokens.documents:
                for side, parts in dealt(tokens.array, document, self.one.settings.eval_fraction):
                    self.tokens[side] += sum(count for _, count in parts)
                    self.documents[side] += 1
                if self.enough:
                    return
        self.complete = True


def _refuse_short(split: SplitName, counted: _Count) -> None:
    """Raise JobError if a split does not fill one sequence."""
    data = counted.data
    have, need, documents = counted.tokens[split], counted.least, sum(counted.documents.values())
    if have >= need:
        return
    where = "evaluation" if split == "eval" or counted.key == "data.eval" else "training"
    of = "" if counted.one.name == "text" else f"of {counted.one.name}, "
    if not documents:
        chats = counted.one.settings.chats
        what = chats.without_answers if chats else "there is no text or token in it"
        raise JobError(f"{', '.join(counted.one.source.paths)}: {what}", key=counted.key, fix="Name other files")
    what = f"{of}{counted.documents[split]} of {documents} documents, {have} tokens,"
    fixes = ["Add text"]
    if have > 1:
        fixes.append(f"set data.sequence_length = {have - 1} or less")
    if split == "eval":
        fraction = math.floor(counted.lowest * 1000 + 1) / 1000  # selects one document more
        if counted.documents["train"] > 1 and fraction < 1:
            fixes.append(f"set data.eval_fraction = {fraction} or more")
        fixes.append("set train.eval_every = 0")
    elif documents == 1 and counted.documents["eval"]:  # which no fraction shares out
        fixes.append("set data.eval_fraction = 0 and train.eval_every = 0")
    elif counted.documents["eval"]:
        fixes.append(f"lower data.eval_fraction ({data.eval_fraction:g})")
    raise JobError(
        f"{what} are for {where}, and one sequence of {data.sequence_length} needs {need} tokens",
        key="data.sequence_length" if counted.documents[split] else "data.eval_fraction",
        fix=f"{', '.join(fixes[:-1])} or {fixes[-1]}" if len(fixes) > 1 else fixes[0],
    )
