"""``[data]``: what to train on."""

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
"""Of a source in a mixture: the order of sources repeats after so many sequences at most."""
_NAME = re.compile(r"\w[\w.+ -]{0,100}")


Rows = Literal["text", "chats", "pairs"]
TokenType = Literal["", "uint8", "uint16", "uint32", "int32", "int64"]
Paths = Annotated[str | Annotated[tuple[str, ...], Field(strict=False, min_length=1)], Field()]


class SourceSection(Section):
    """One source of a mixture, or of an evaluation."""

    path: Paths
    """Files and folders, as in ``data.text``; or a folder that ``plait data prepare`` has made."""
    name: str = ""
    """What tables and metrics call it. Empty: the last part of its path."""
    weight: Positive | None = None
    """Its share of the sequences, beside the other weights. Left out everywhere: as many as it has, times
    ``epochs``."""
    epochs: Positive | None = None
    """How often it may be read. Without ``weight``: how often it is read while the others are read as often
    as they say (1 if left out). With it: a run that would read it more often is refused."""
    text_key: str = ""
    """Empty: ``data.text_key``."""
    rows: Rows | None = None
    """Left out: ``data.rows``. So chats and texts can stand in one mixture."""
    pattern: str = ""
    """Empty: ``data.pattern``."""
    dtype: TokenType = ""
    """The type of bare token ids without a header (``.bin``)."""

    @property
    def paths(self) -> tuple[str, ...]:
        """``path`` as a list."""
        return (self.path,) if isinstance(self.path, str) else self.path

    @property
    def called(self) -> str:
        """Its name."""
        return self.name or self.paths[0].rstrip("/").rpartition("/")[2]


Sources = Annotated[tuple[SourceSection, ...], Field(strict=False)]


class DataSection(Section):
    """What to train on."""

    text: str | Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = STDLIB
    """Files and folders: text and source files, ``.jsonl``, ``.json``, ``.csv``, ``.tsv`` (each also in gzip,
    xz, zstd or bzip2), ``.parquet``, ``.arrow``. Or ``python-stdlib``, the source of Python's standard
    library, which is always there."""
    sources: Sources = ()
    """A mixture, in place of ``text``: tables ``{ path, weight, epochs }``, of which the order of sequences
    takes its shares exactly."""
    eval: Sources = ()
    """What to evaluate on, each with a loss of its own: tables ``{ path, name }``. Empty: ``eval_fraction``
    of the documents of each source."""
    text_key: str = "text"
    """The key or column that holds the text of a row, in JSON, CSV, Parquet and Arrow."""
    pattern: str = "*"
    """Which files of a folder."""
    tokenizer: str = BYTES
    """``bytes``, or a Hugging Face ``tokenizer.json``."""
    sequence_length: Count = 128
    """Tokens of a training sequence."""
    eval_fraction: Fraction = 0.02
    """Share of the documents that is kept for evaluation."""
    vocab_multiple: Count = 1
    """The model's vocabulary is the tokenizer's, rounded up to a multiple of this (50,257 to 50,304 with
    64). No id that was added is ever sampled. Where ``model.vocab`` says its size: 1."""
    seed: Seed = 0
    """Seed of the order of sequences."""
    documents: Literal["join", "mask"] | None = None
    """``mask``: attention stops at document ends, and positions begin anew there. ``join``: it crosses them.
    Left out: ``mask`` where a source has chats or pairs, else ``join``."""
    rows: Rows = "text"
    """What a row of JSON lines, JSON, CSV, Parquet or Arrow is: a text; a chat, rendered by the tokenizer's
    chat template; or a prompt with its answer. Chats and pairs are packed whole into sequences."""
    messages_key: str = "messages"
    """The key of a chat's messages, a list of tables with ``role`` and ``content`` (or ``from``, ``value``).
    Messages of the role ``assistant`` are answers, unless they say ``weight = 0``."""
    prompt_key: str = "prompt"
    """The key of a pair's prompt: a text, or a list of messages."""
    answer_key: str = "completion"
    """The key of a pair's answer: a text, or a list of messages."""
    chat_template: str | None = None
    """A file with a chat template (Jinja) to use instead of the tokenizer's own."""
    loss: Literal["answers", "all"] = "answers"
    """Of chats and pairs: the loss is a mean over the tokens of answers, or over all."""

    @property
    def masks(self) -> bool:
        """Whether attention stops at document ends."""
        return self.documents == "mask" or (self.documents is None and bool(self.chat_rows))

    def rows_of(self, source: SourceSection) -> Rows:
        """What a row of a source is."""
        return source.rows or self.rows

    @property
    def chat_rows(self) -> set[Literal["chats", "pairs"]]:
        """The kinds of rows of its sources that are no texts."""
        return {kind for source in (*self.train, *self.eval) if (kind := self.rows_of(source)) != "text"}

    @property
    def train(self) -> tuple[SourceSection, ...]:
        """The sources of training; ``text`` is one."""
        return self.sources or (SourceSection(path=self.text, name="text"),)

    @property
    def told(self) -> str:
        """The paths of the sources, for people."""
        return ", ".join(path for source in self.train for path in source.paths)

    @property
    def held_out(self) -> float:
        """Share of the documents of each source that is kept for evaluation."""
        return 0.0 if self.eval else self.eval_fraction

    @model_validator(mode="after")
    def _agree(self) -> DataSection:
        if self.sources and self.text != STDLIB:
            raise JobError("stands beside data.text", key="data.sources",
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
            raise JobError("a source is called 'eval', as the folder of what is evaluated on", key="data.sources",
                           fix='Give it another name = "..."')  # fmt: skip
        if any(source.weight or source.epochs for source in self.eval):
            raise JobError("what is evaluated on has no weight and no epochs", key="data.eval", fix="Leave them out")
        return self
