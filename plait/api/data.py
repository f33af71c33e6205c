"""Training data: corpora that are tokenised once for several runs, and their contents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.base.text import Column, Part, Shown, Table, printable

if TYPE_CHECKING:
    from plait.train.data.corpus import Corpus, SplitName
    from plait.train.data.tokenizer import Tokenizer

SAMPLE = 60
"""The length of a sample, in tokens."""
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class PreparedData(Shown):
    """Corpora that were tokenised, or existed already, by name. seconds: the duration of the
    call."""

    corpora: tuple[tuple[str, Corpus], ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the counts of documents and tokens of each corpus, for JSON."""
        return {"seconds": round(self.seconds, 3), "corpora": self._table().records()}

    def parts(self) -> Iterator[Part]:
        """Yield a table of the corpora."""
        yield self._table()

    def _table(self) -> Table:
        header = (Column("source", key="name"), Column("split"), Column("documents", ",", "documents"),
                  Column("tokens", ",", "tokens"), Column("shards", ","), Column("folder", str))  # fmt: skip
        rows = [
            (name, split, found.documents, found.tokens, len(found.shards), str(corpus.folder))
            for name, corpus in self.corpora
            for split, found in corpus.index.splits.items()
            if found.tokens
        ]
        return Table("", header, rows)


@dataclass(frozen=True)
class ShownData(Shown):
    """The contents of a corpus. rows: by split, counts and percentiles of the documents' lengths in
    tokens. samples: the beginning of one document."""

    folder: Path
    vocab: int
    end_of_text: str
    rows: tuple[tuple[Any, ...], ...]
    samples: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Return counts, lengths in tokens, and samples, for JSON."""
        return {
            "folder": str(self.folder), "vocab": self.vocab, "end_of_text": self.end_of_text,
            "splits": self._table().records(), "samples": list(self.samples), "notes": list(self.notes),
        }  # fmt: skip

    def parts(self) -> Iterator[Part]:
        """Yield a table of splits, then samples and notes."""
        yield self._table()
        yield f"{self.vocab:,} tokens in the vocabulary; documents end with {self.end_of_text}"
        for sample in self.samples:
            yield f"a document: {sample}"
        yield from self.notes

    def _table(self) -> Table:
        lengths = [Column(f"{one} %", ",", f"length_p{one}") for one in PERCENTILES]
        header = (Column("split"), Column("documents", ","), Column("tokens", ","), Column("shortest", ","), *lengths,
                  Column("longest", ","), Column("without an end", ",", "without_end"))  # fmt: skip
        return Table("Tokens of a document", header, self.rows)


def prepare_data(
    what: Sequence[str], out: Path | None, settings: dict[str, Any], say: Callable[[str], None] = print
) -> PreparedData:
    """Tokenise sources into the folder ``out``; or tokenise a job's training and evaluation data
    into the folder where its run looks for them.

    what: files and folders, or a job file (TOML) and ``section.key=value`` overrides. settings:
    keys of [data] for files and folders. A call that is killed and repeated continues where it
    ended. Raises JobError, DataError.
    """
    import sys
    import time

    from plait.core.base.codec.data import decode
    from plait.core.base.errors import DataError, JobError
    from plait.core.base.ignored_input import IgnoredInput
    from plait.core.job.settings import DataSection
    from plait.core.job.spec import Job
    from plait.train.data.chats import readers_of
    from plait.train.data.sets import evaluation_sets, training_sets
    from plait.train.data.sources import find_files
    from plait.train.data.tokenizer import load_tokenizer
    from plait.train.screen import ByteProgress, Screen

    begun = time.monotonic()
    is_job = Path(what[0]).suffix == ".toml"
    if is_job:
        job = Job.read(what[0], what[1:]).named(Path(what[0]).stem)
        data, folder = job.data, out or job.run.path / "corpus"
    elif out is None:
        raise JobError("is missing", key="--out", fix="Name the folder to write, or a job file in place of sources")
    else:
        data, folder = decode(DataSection, {"text": list(what), **settings}), out
    tokenizer = load_tokenizer(data.tokenizer)
    readers = readers_of(data, tokenizer)
    sets = [*training_sets(data, folder, readers), *evaluation_sets(data, folder, readers)]
    if not is_job and sets[0].made:
        raise DataError(f"{what[0]}: is a prepared corpus already; name it as data.text, or as a source, of a job")
    if not is_job:
        sets = [sets[0].at(folder)]
    over = IgnoredInput()
    for one in sets:
        if not (one.made or one.is_elsewhere):
            find_files(one.source.paths, one.settings.pattern, leave_out=one.folder, over=over)
    for line in over.lines():
        say(f"note: {line}")
    screen, found = Screen(sys.stderr), list[tuple[str, "Corpus"]]()
    for one in sets:
        found.append((one.name, one.prepare(tokenizer, say, ByteProgress(screen, f"tokenising {one.name}"))))
    return PreparedData(tuple(found), time.monotonic() - begun)


def show_data(folder: Path, tokenizer: str | None = None, document: int | None = None) -> list[ShownData]:
    """Return the contents of a prepared corpus, or of all corpora of a run. document: the index of
    the document to sample; None: the middle one. Raises DataError if the folder is neither,
    JobError for a document that does not exist."""
    from plait.core.base.errors import DataError
    from plait.core.job.spec import Job
    from plait.train.data.corpus import INDEX_FILE, Corpus

    if (folder / INDEX_FILE).is_file():
        return [_shown(Corpus.open(folder), tokenizer, document)]
    found = sorted(file.parent for file in (folder / "corpus").rglob(INDEX_FILE))
    if not found:
        raise DataError(f"{folder}: is no prepared corpus and no folder of a run that has one; name such a folder")
    if tokenizer is None and (folder / "job.toml").is_file():
        tokenizer = Job.read(folder / "job.toml").data.tokenizer
    return [_shown(Corpus.open(one), tokenizer, document) for one in found]


def _shown(corpus: Corpus, name: str | None, document: int | None) -> ShownData:
    import numpy as np

    from plait.core.base.errors import JobError
    from plait.train.data.chats import MARK, unmarked

    index, notes = corpus.index, list[str]()
    tokenizer = _tokenizer(corpus, name, notes)
    rows, samples = list[tuple[Any, ...]](), list[str]()
    for split, found in index.splits.items():
        if not found.documents:
            continue
        ends = corpus.ends(split, 0, found.tokens)
        lengths = np.diff(ends, prepend=0)
        percentiles = [int(value) for value in np.percentile(lengths, PERCENTILES, method="lower")]
        rows.append((split, found.documents, found.tokens, int(lengths.min()), *percentiles, int(lengths.max()),
                     _without_end(corpus, split, ends)))  # fmt: skip
        if tokenizer and not samples:
            at = found.documents // 2 if document is None else document
            if not 0 <= at < found.documents:
                raise JobError(f"{at} is none of the {found.documents:,} documents of {corpus.folder}",
                               key="--document", fix=f"Use 0 to {found.documents - 1}")  # fmt: skip
            ids = corpus.read(split, int(ends[at] - lengths[at]), min(SAMPLE, int(lengths[at])))
            samples.append(printable(repr(tokenizer.decode(unmarked(ids)))))
    spelled = f"{index.end_of_text}"
    if tokenizer and hasattr(tokenizer, "token"):
        spelled += f" ({tokenizer.token(index.end_of_text)})"  # type: ignore[attr-defined]
    return ShownData(corpus.folder, index.vocab % MARK, spelled, tuple(rows), tuple(samples), tuple(notes))


def _without_end(corpus: Corpus, split: SplitName, ends: Any) -> int:
    """Return the number of documents in a split that do not end with the end-of-text token, as in
    token files of other tools."""
    if not corpus.index.in_place:
        return 0
    end = corpus.index.end_of_text
    return sum(int(corpus.read(split, int(at) - 1, 1)[0]) != end for at in ends)


def _tokenizer(corpus: Corpus, name: str | None, notes: list[str]) -> Tokenizer | None:
    """Return the tokenizer that decodes a corpus; None, with a note, if it is unknown."""
    from plait.core.base.errors import DataError
    from plait.train.data.chats import AnswerTokenizer
    from plait.train.data.tokenizer import load_tokenizer

    for one in (name, corpus.index.tokenizer_file or None, "bytes"):
        if one is None:
            continue
        try:
            found = load_tokenizer(one)
        except DataError as error:
            if one == name:
                raise
            notes.append(str(error))
            continue
        if corpus.index.tokenizer in (found.fingerprint, AnswerTokenizer(found).fingerprint):
            return found
        if one == name:
            notes.append(f"{name} is another tokenizer than the one that made this corpus")
    notes.append("no sample: name the tokenizer that made this corpus with --tokenizer")
    return None
