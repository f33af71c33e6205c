"""The sets of a job: each source of training and of evaluation, prepared in a folder of its own.

| source | folder in ``corpus/`` |
|---|---|
| ``data.text`` | ``text`` |
| ``data.sources`` | its name |
| ``data.eval`` | ``eval/`` and its name |
| a folder that ``plait data prepare`` has made | none: it is opened where it lies |
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from plait.core.base.errors import DataError
from plait.core.base.numbers import shown
from plait.core.job.settings import DataSection, SourceSection
from plait.train.data.addresses import fetched, is_address
from plait.train.data.chats import MARK, AnswerTokenizer, Readers, readers_of
from plait.train.data.checksums import verify
from plait.train.data.corpus import INDEX_FILE, Corpus
from plait.train.data.prepare import CorpusSettings, Progress, prepare
from plait.train.data.tokenizer import FileTokenizer, Tokenizer, load_tokenizer

NO_READERS: Readers = {}
"""For who only opens corpora."""


@dataclass(frozen=True)
class DataSet:
    """One source of a job. folder: where its corpus is. rows: what its rows are. made: whether the user
    prepared it before."""

    name: str
    source: SourceSection
    settings: CorpusSettings
    folder: Path
    rows: str = "text"
    made: bool = False

    def encoder(self, tokenizer: Tokenizer) -> Tokenizer:
        """What encodes its texts: a job's tokenizer, of chats and pairs with marks on answers."""
        return tokenizer if self.rows == "text" else AnswerTokenizer(tokenizer)

    def prepare(self, tokenizer: Tokenizer, say: Callable[[str], None], progress: Progress | None = None) -> Corpus:
        """Its corpus: made, unless it is there. Raises DataError."""
        tokenizer = self.encoder(tokenizer)
        if not self.made:
            paths = [self._local(path, progress) for path in self.source.paths]
            return prepare(paths, tokenizer, self.folder, self.settings, progress=progress, say=say)
        corpus = Corpus.open(self.folder)
        self.check(corpus, tokenizer)
        verify(corpus)
        return corpus

    @property
    def is_elsewhere(self) -> bool:
        """Whether it must be fetched first."""
        return any(map(is_address, self.source.paths))

    def _local(self, path: str, progress: Progress | None) -> str:
        """Where a path's files are; of an address, after they were fetched."""
        if not is_address(path):
            return path
        return str(fetched(path, self.folder.with_name(f"{self.folder.name}.fetched"), progress))

    def at(self, folder: Path) -> DataSet:
        """The same, in another folder."""
        return replace(self, folder=folder)

    def check(self, corpus: Corpus, tokenizer: Tokenizer) -> None:
        """Raise DataError for a corpus of another tokenizer than the source's, or of other rows."""
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
    """The sets that are trained on. folder: of the run's corpora. readers: of rows, to prepare them."""
    return [_set(data, source, folder / source.called, data.held_out, readers) for source in data.train]


def evaluation_sets(data: DataSection, folder: Path, readers: Readers = NO_READERS) -> list[DataSet]:
    """The sets of ``data.eval``."""
    return [_set(data, source, folder / "eval" / source.called, 0.0, readers) for source in data.eval]


def _set(data: DataSection, source: SourceSection, folder: Path, held_out: float, readers: Readers) -> DataSet:
    rows = data.rows_of(source)
    settings = CorpusSettings(
        pattern=source.pattern or data.pattern, eval_fraction=held_out, text_key=source.text_key or data.text_key,
        dtype=source.dtype, chats=readers.get(rows),
    )  # fmt: skip
    prepared = [path for path in source.paths if _is_corpus(path)]
    if prepared and len(source.paths) > 1:
        raise DataError(f"{prepared[0]}: is a prepared corpus and stands beside other paths; name it as a source alone")
    if prepared:
        return DataSet(source.called, source, settings, Path(prepared[0]).expanduser(), rows, True)
    return DataSet(source.called, source, settings, folder, rows)


def _is_corpus(path: str) -> bool:
    """Whether a folder has an index, and shards beside it, or spans; other tools have files of that name."""
    folder = os.path.expanduser(path)
    if not os.path.isfile(os.path.join(folder, INDEX_FILE)):  # Path's raises for names that are none
        return False
    return ".ends" in {os.path.splitext(name)[1] for name in os.listdir(folder)}


def prepare_corpus(
    data: DataSection,
    folder: Path,
    say: Callable[[str], None],
    progress: Callable[[str], Progress] | None = None,
) -> None:
    """Make the corpora of a job in ``folder``, unless they are there. progress: of a set by its name."""
    tokenizer = load_tokenizer(data.tokenizer)
    ends = ""
    if isinstance(tokenizer, FileTokenizer):
        ends = f"; texts end with {tokenizer.token(tokenizer.end_of_text)!r}"
    say(f"preparing {data.told}{ends}")
    readers = readers_of(data, tokenizer)
    for one in (*training_sets(data, folder, readers), *evaluation_sets(data, folder, readers)):
        corpus = one.prepare(tokenizer, say, progress(one.name) if progress else None)
        if one.name != "text" or data.eval:
            splits = corpus.index.splits
            say(f"  {shown(one.name)}: {splits['train'].tokens:,} tokens of {splits['train'].documents:,} documents")
