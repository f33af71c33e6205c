"""The section ``[data]`` of a job file: the data to train and evaluate on."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from plait.core.base.codec.data import Count, Positive, Section
from plait.core.base.errors import JobError
from plait.core.base.numbers import MOST_SEED, shown

Seed = Annotated[int, Field(ge=-MOST_SEED - 1, le=MOST_SEED)]
Fraction = Annotated[float, Field(ge=0, lt=1)]

STDLIB, BYTES = "python-stdlib", "bytes"
LEAST_SHARE = 1 / (1 << 20)
"""Least share of a source in a mixture: the order of sources repeats after at most 1 / LEAST_SHARE
sequences."""
_NAME = re.compile(r"\w[\w.+ -]{0,100}")


Rows = Literal["text", "chats", "pairs"]
TokenType = Literal["", "uint8", "uint16", "uint32", "int32", "int64"]
Paths = Annotated[str | Annotated[tuple[str, ...], Field(strict=False, min_length=1)], Field()]


class SourceSection(Section):
    """One source of a mixture or of an evaluation."""

    path: Paths
    """Files and folders, as in ``data.text``; or a folder that ``plait data prepare`` has
    written."""
    name: str = ""
    """Name of the source in tables and metrics. Empty: the last part of its path."""
    weight: Positive | None = None
    """Share of the sequences that comes from this source, relative to the other weights. Left out
    in every source: shares follow the number of sequences of each source, times ``epochs``."""
    epochs: Positive | None = None
    """Passes over the source. Without ``weight``: passes over this source relative to the
    ``epochs`` of the other sources (1 if left out). With ``weight``: the most passes; a run that
    would need more is refused."""
    text_key: str = ""
    """Key or column of a row's text. Empty: ``data.text_key``."""
    rows: Rows | None = None
    """Kind of the source's rows, so that chats and texts can be mixed. Left out: ``data.rows``."""
    pattern: str = ""
    """Pattern of the names of files in a folder. Empty: ``data.pattern``."""
    dtype: TokenType = ""
    """Type of bare token ids in a file without a header (``.bin``)."""

    @property
    def paths(self) -> tuple[str, ...]:
        """``path`` as a list."""
        return (self.path,) if isinstance(self.path, str) else self.path

    @property
    def called(self) -> str:
        """The source's name, or the last part of its path."""
        return self.name or self.paths[0].rstrip("/").rpartition("/")[2]


Sources = Annotated[tuple[SourceSection, ...], Field(strict=False)]


class DataSection(Section):
    """The data to train and evaluate on, and how they become sequences of tokens."""

    text: str | Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = STDLIB
    """Files and folders to train on: text and source files, ``.jsonl``, ``.json``, ``.csv``,
    ``.tsv`` (each also in gzip, xz, zstd or bzip2), ``.parquet``, ``.arrow``. Or ``python-stdlib``,
    the source of Python's standard library, which is always there."""
    sources: Sources = ()
    """A mixture of sources, in place of ``text``: tables ``{ path, weight, epochs }``. The order of
    sequences keeps the shares of the sources exactly."""
    eval: Sources = ()
    """Data to evaluate on, each source with a loss of its own: tables ``{ path, name }``. Empty:
    ``eval_fraction`` of the documents of each training source."""
    text_key: str = "text"
    """Key or column that holds the text of a row, in JSON, CSV, Parquet and Arrow."""
    pattern: str = "*"
    """Pattern of the names of files to read in a folder."""
    tokenizer: str = BYTES
    """``bytes``, or a Hugging Face ``tokenizer.json``."""
    sequence_length: Count = 128
    """Tokens of a training sequence."""
    eval_fraction: Fraction = 0.02
    """Share of the documents that is held out for evaluation."""
    vocab_multiple: Count = 1
    """The tokenizer's vocabulary is rounded up to a multiple of this number (50,257 to 50,304 with
    64) for the model. No added id is ever sampled. Must be 1 if ``model.vocab`` is set."""
    seed: Seed = 0
    """Seed of the order of sequences."""
    documents: Literal["join", "mask"] | None = None
    """Attention across documents that share a sequence. ``mask``: attention stops at document ends,
    and positions start again there. ``join``: attention crosses document ends. Left out: ``mask``
    if a source has chats or pairs, else ``join``."""
    rows: Rows = "text"
    """Kind of a row of JSON lines, JSON, CSV, Parquet or Arrow: a text; a chat, rendered by the
    tokenizer's chat template; or a prompt with its answer. Chats and pairs are packed whole into
    sequences."""
    messages_key: str = "messages"
    """Key of a chat's messages, a list of tables with ``role`` and ``content`` (or ``from``,
    ``value``). Messages of the role ``assistant`` are answers, unless they have ``weight = 0``."""
    prompt_key: str = "prompt"
    """Key of a pair's prompt: a text, or a list of messages."""
    answer_key: str = "completion"
    """Key of a pair's answer: a text, or a list of messages."""
    chat_template: str | None = None
    """File with a chat template (Jinja) to use instead of the tokenizer's own."""
    loss: Literal["answers", "all"] = "answers"
    """Tokens of chats and pairs over which the loss is averaged: those of answers, or all."""

    @property
    def masks(self) -> bool:
        """True if attention stops at document ends."""
        return self.documents == "mask" or (self.documents is None and bool(self.chat_rows))

    def rows_of(self, source: SourceSection) -> Rows:
        """Return the kind of rows of a source."""
        return source.rows or self.rows

    @property
    def chat_rows(self) -> set[Literal["chats", "pairs"]]:
        """Kinds of rows that are not plain text, over all sources of training and evaluation."""
        return {kind for source in (*self.train, *self.eval) if (kind := self.rows_of(source)) != "text"}

    @property
    def train(self) -> tuple[SourceSection, ...]:
        """Sources to train on; ``text`` counts as one source."""
        return self.sources or (SourceSection(path=self.text, name="text"),)

    @property
    def paths_text(self) -> str:
        """Comma-separated paths of the training sources, for messages."""
        return ", ".join(path for source in self.train for path in source.paths)

    @property
    def held_out(self) -> float:
        """Share of the documents of each source that is held out for evaluation."""
        return 0.0 if self.eval else self.eval_fraction

    @model_validator(mode="after")
    def _agree(self) -> DataSection:
        if self.sources and self.text != STDLIB:
            raise JobError("conflicts with data.text", key="data.sources",
                           changes=[{"data.text": None}, {"data.sources": None}])  # fmt: skip
        for key, sources in (("data.sources", self.sources), ("data.eval", self.eval)):
            names = [source.called for source in sources]
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise JobError(f"two sources are called {shown(twice)}", key=key, fix='Give one of them a name = "..."')
            for name in names:
                if not _NAME.fullmatch(name):
                    fix = 'Give the source a name = "..." of letters, digits, dots and dashes'
                    raise JobError(f"{shown(name)} is no name of a folder", key=key, fix=fix)
        given = [source.weight is not None for source in self.sources]
        if any(given) and not all(given):
            raise JobError("some sources have a weight and others have none", key="data.sources",
                           fix="Give each a weight, or none")  # fmt: skip
        weights = [source.weight for source in self.sources if source.weight is not None]
        if weights and (share := min(weights) / sum(weights)) < LEAST_SHARE:
            raise JobError(
                f"the weight {min(weights):g} is a share of {share:.3g}, and the least is one sequence in "
                f"{1 / LEAST_SHARE:,.0f}", key="data.sources", fix="Give the source a larger weight, or leave it out"
            )  # fmt: skip
        if self.eval and "eval" in [source.called for source in self.sources]:
            raise JobError("a source is called 'eval', the name of the evaluation data's folder", key="data.sources",
                           fix='Give it another name = "..."')  # fmt: skip
        if any(source.weight or source.epochs for source in self.eval):
            raise JobError("evaluation sources take no weight and no epochs", key="data.eval", fix="Leave them out")
        return self
