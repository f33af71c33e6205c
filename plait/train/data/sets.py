"""Define the data sets of a job: each source of training and of evaluation, prepared in its own
folder.

| source | folder in ``corpus/`` |
|---|---|
| ``data.text`` | ``text`` |
| ``data.sources`` | its name |
| ``data.eval`` | ``eval/`` and its name |
| a folder that ``plait data prepare`` has made | none: it is opened in place |
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from plait.core.base.errors import DataError
from plait.core.base.numbers import shown
from plait.core.job.settings import DataSection, SourceSection
from plait.train.data.chats import MARK, AnswerTokenizer, Readers, readers_of
from plait.train.data.corpus import INDEX_FILE, Corpus
from plait.train.data.prepare import CorpusSettings, prepare
from plait.train.data.sources import Progress, fetched, is_address
from plait.train.data.tokenizer import FileTokenizer, Tokenizer, load_tokenizer

NO_READERS: Readers = {}
"""No readers of rows, for callers that only open corpora."""


@dataclass(frozen=True)
class DataSet:
    """One source of a job. folder: the folder of its corpus. rows: the kind of its rows. made: True
    if the user prepared the corpus beforehand."""

    name: str
    source: SourceSection
    settings: CorpusSettings
    folder: Path
    rows: str = "text"
    made: bool = False

    def encoder(self, tokenizer: Tokenizer) -> Tokenizer:
        """Return the tokenizer for the set's texts: the job's tokenizer; for chats and pairs with
        marks on answers."""
        return tokenizer if self.rows == "text" else AnswerTokenizer(tokenizer)

    def prepare(self, tokenizer: Tokenizer, say: Callable[[str], None], progress: Progress | None = None) -> Corpus:
        """Return the set's corpus, prepared now unless it exists. Raises DataError as
        ``prepare.prepare`` does."""
        tokenizer = self.encoder(tokenizer)
        if not self.made:
            paths = [self._local(path, progress) for path in self.source.paths]
            return prepare(paths, tokenizer, self.folder, self.settings, progress=progress, say=say)
        corpus = Corpus.open(self.folder)
        self.check(corpus, tokenizer)
        corpus.verify_changed()
        return corpus

    @property
    def is_elsewhere(self) -> bool:
        """True if the set must be fetched first."""
        return any(map(is_address, self.source.paths))

    def _local(self, path: str, progress: Progress | None) -> str:
        """Return the local path of a source path; an address is fetched first."""
        if not is_address(path):
            return path
        return str(fetched(path, self.folder.with_name(f"{self.folder.name}.fetched"), progress))

    def at(self, folder: Path) -> DataSet:
        """Return the same set with its corpus in another folder."""
        return replace(self, folder=folder)

    def check(self, corpus: Corpus, tokenizer: Tokenizer) -> None:
        """Raise DataError for a corpus with another tokenizer than the job's, or with another kind
        of rows than the set's."""
        if (corpus.index.vocab > MARK) != (self.rows != "text"):
            holds = "chats or pairs" if corpus.index.vocab > MARK else "texts"
            raise DataError(f"{self.folder}: was prepared of {holds}, and its rows are {self.rows}; correct data.rows, "
                            "or rows of this source")  # fmt: skip
        if corpus.index.tokenizer != tokenizer.fingerprint:
            raise DataError(
                f"{self.folder}: was prepared with another tokenizer than data.tokenizer; name the one that it was "
                "prepared with, or prepare it again"
            )


def training_sets(data: DataSection, folder: Path, readers: Readers = NO_READERS) -> list[DataSet]:
    """Return the training sets. folder: the folder of the run's corpora. readers: readers of rows,
    to prepare them."""
    return [_set(data, source, folder / source.called, data.held_out, readers) for source in data.train]


def evaluation_sets(data: DataSection, folder: Path, readers: Readers = NO_READERS) -> list[DataSet]:
    """Return the sets of ``data.eval``."""
    return [_set(data, source, folder / "eval" / source.called, 0.0, readers) for source in data.eval]


def _set(data: DataSection, source: SourceSection, folder: Path, held_out: float, readers: Readers) -> DataSet:
    rows = data.rows_of(source)
    settings = CorpusSettings(
        pattern=source.pattern or data.pattern, eval_fraction=held_out, text_key=source.text_key or data.text_key,
        dtype=source.dtype, chats=readers.get(rows),
    )  # fmt: skip
    prepared = [path for path in source.paths if _is_corpus(path)]
    if prepared and len(source.paths) > 1:
        raise DataError(f"{prepared[0]}: is a prepared corpus, listed with other paths; make it a source of its own")
    if prepared:
        return DataSet(source.called, source, settings, Path(prepared[0]).expanduser(), rows, True)
    return DataSet(source.called, source, settings, folder, rows)


def _is_corpus(path: str) -> bool:
    """Return True for a folder with an index and document ends; other tools use the same name for
    their index."""
    folder = os.path.expanduser(path)
    if not os.path.isfile(os.path.join(folder, INDEX_FILE)):  # Path.is_file raises for invalid names
        return False
    return ".ends" in {os.path.splitext(name)[1] for name in os.listdir(folder)}


def prepare_corpus(
    data: DataSection,
    folder: Path,
    say: Callable[[str], None],
    progress: Callable[[str], Progress] | None = None,
) -> None:
    """Prepare the corpora of a job in ``folder``, unless they exist. progress: returns the progress
    callback for a set's name."""
    tokenizer = load_tokenizer(data.tokenizer)
    ends = ""
    if isinstance(tokenizer, FileTokenizer):
        ends = f"; texts end with {tokenizer.token(tokenizer.end_of_text)!r}"
    say(f"preparing the data: {data.paths_text}{ends}")
    readers = readers_of(data, tokenizer)
    for one in (*training_sets(data, folder, readers), *evaluation_sets(data, folder, readers)):
        corpus = one.prepare(tokenizer, say, progress(one.name) if progress else None)
        split = corpus.index.splits["train"]
        say(f"  {shown(one.name)}: {split.tokens:,} tokens of {split.documents:,} documents")
