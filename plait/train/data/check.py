"""Whether a job's data are enough to train and to evaluate on: asked before a rank starts."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from plait.core.base.errors import DataError, JobError
from plait.core.base.passed_over import PassedOver
from plait.core.job.settings import DataSection, TrainSection
from plait.train.data.corpus import INDEX_FILE, SPLITS, Index, SplitName
from plait.train.data.documents import Reading, documents, source_fingerprint
from plait.train.data.in_place import dealt
from plait.train.data.kinds import IN_PLACE, kind_of_file, look_at
from plait.train.data.sources import SourceFile, find_files
from plait.train.data.token_files import open_tokens
from plait.train.data.tokenizer import Tokenizer, load_tokenizer, quiet

LOOK = 64 << 20
"""Bytes of text that are read at most, some tenths of a second. Who finds no document for evaluation in so
many leaves the answer to the preparation."""


MOST_FILES = 10_000
"""Files that are looked at, half a second; the preparation looks at all."""


def check_data(data: DataSection, train: TrainSection, out: Path) -> PassedOver:
    """Refuse at once what ranks would refuse when they have started and the corpus is prepared in ``out``;
    what of the sources is passed over.

    That is: sources or a tokenizer that are not there, files that are no text, and a split that would not
    fill one sequence. Tokens are counted as the preparation counts them, from the first document on, and only
    until there are enough. Raises JobError.
    """
    over = PassedOver()
    with _of("data.tokenizer"):
        tokenizer = load_tokenizer(data.tokenizer)
    with _of("data.text"):
        real = Path(os.path.realpath(out.expanduser()))
        files = find_files(data.texts, data.pattern, leave_out=real, over=over)
    if train.eval_every and not data.eval_fraction:
        fix = "Set a fraction such as 0.02, or train.eval_every = 0"
        raise JobError(f"0 keeps no text for the evaluation of train.eval_every = {train.eval_every}",
                       key="data.eval_fraction", fix=fix)  # fmt: skip
    needed: tuple[SplitName, ...] = SPLITS if train.eval_every else ("train",)
    counted = _Count(files, tokenizer, data, needed)
    with _of("data.text"):
        if not counted.of_index(out):
            counted.formats = look_at(files, MOST_FILES)
        if not counted.enough:
            counted.by_reading()
    if counted.complete:
        for split in needed:
            _refuse_short(split, counted, data)
    return over


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
        self, files: Sequence[SourceFile], tokenizer: Tokenizer, data: DataSection, needed: Sequence[SplitName]
    ) -> None:
        self.files, self.tokenizer, self.data, self.needed = files, tokenizer, data, needed
        self.tokens: Counter[SplitName] = Counter()
        self.documents: Counter[SplitName] = Counter()
        self.lowest = 1.0
        """Of the places of the documents that are for training."""
        self.complete = False
        self.formats = Counter[str]()

    @property
    def enough(self) -> bool:
        """Whether every split that is needed fills a sequence."""
        return all(self.tokens[split] > self.data.sequence_length for split in self.needed)

    def of_index(self, out: Path) -> bool:
        """Take the counts of the corpus that is there already, if it is made of the same things.

        Of a corpus that is too small the documents are read again: they say which fraction would do.
        """
        try:
            index = Index.read(out / INDEX_FILE)
        except DataError:
            return False
        source = source_fingerprint(self.files, self.data.eval_fraction, text_key=self.data.text_key)
        if (index.tokenizer, index.source) != (self.tokenizer.fingerprint, source):
            return False
        for split in SPLITS:
            self.tokens[split], self.documents[split] = index.splits[split].tokens, index.splits[split].documents
        return True

    def by_reading(self) -> None:
        """Read documents until there are enough."""
        self.tokens.clear()
        self.documents.clear()
        if self.formats.keys() & IN_PLACE:
            self._by_looking_through()
            return
        read, last = 0, None
        reading = Reading(self.data.text_key)
        for document in (document for file in self.files for document in documents(file, reading)):
            split = document.split(self.data.eval_fraction)
            if last is not None and (document.offset == 0 or split != last):
                self.tokens[last] += 1  # end-of-text
            if self.tokens[split] <= self.data.sequence_length:  # encoding is the slow part
                with _of("data.tokenizer"), quiet():
                    self.tokens[split] += len(self.tokenizer.encode(document.text))
            if split == "train":
                self.lowest = min(self.lowest, document.place)
            self.documents[split] += 1
            read, last = read + len(document.text), split
            if self.enough or read >= LOOK:
                return
        if last is not None:
            self.tokens[last] += 1
        self.complete = True

    def _by_looking_through(self) -> None:
        """Count token files of others, as far as is needed."""
        for file in self.files:
            tokens = open_tokens(file, kind_of_file(file).format, "", self.tokenizer.end_of_text)
            for document in tokens.documents:
                for side, parts in dealt(tokens.array, document, self.data.eval_fraction):
                    self.tokens[side] += sum(count for _, count in parts)
                    self.documents[side] += 1
                if self.enough:
                    return
        self.complete = True


def _refuse_short(split: SplitName, counted: _Count, data: DataSection) -> None:
    """Raise JobError if a split does not fill one sequence."""
    have, need, documents = counted.tokens[split], data.sequence_length + 1, sum(counted.documents.values())
    if have >= need:
        return
    where = {"train": "training", "eval": "evaluation"}[split]
    what = f"{counted.documents[split]} of {documents} documents, {have} tokens,"
    fixes = ["Add text"]
    if have > 1:
        fixes.append(f"set data.sequence_length = {have - 1} or less")
    if split == "eval":
        fraction = math.floor(counted.lowest * 1000 + 1) / 1000  # selects one document more
        if counted.documents["train"] > 1 and fraction < 1:
            fixes.append(f"set data.eval_fraction = {fraction} or more")
        fixes.append("set train.eval_every = 0")
    elif counted.documents["eval"]:
        fixes.append(f"lower data.eval_fraction ({data.eval_fraction:g})")
    raise JobError(
        f"{what} are for {where}, and one sequence of {data.sequence_length} needs {need} tokens",
        key="data.sequence_length" if counted.documents[split] else "data.eval_fraction",
        fix=f"{', '.join(fixes[:-1])} or {fixes[-1]}" if len(fixes) > 1 else fixes[0],
    )
