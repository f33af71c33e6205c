"""The sequences of a job: its corpus, prepared once and opened by every rank, and what is trained and
evaluated on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from plait.core.job.spec import Job
from plait.train.data.batches import Batches
from plait.train.data.corpus import Corpus
from plait.train.data.prepare import CorpusSettings, prepare
from plait.train.data.tokenizer import FileTokenizer, load_tokenizer


@dataclass(frozen=True)
class Stream:
    """train: batches of an optimizer step. evaluation: micro-batches; None if the job evaluates nothing."""

    train: Batches
    evaluation: Batches | None

    @staticmethod
    def open(job: Job, folder: Path) -> Stream:
        """From a prepared corpus. Raises DataError for one that gives no batch."""
        corpus, data = Corpus.open(folder), job.data
        train = Batches(
            corpus, "train", batch=job.train.global_batch_size, sequence=data.sequence_length, seed=data.seed
        )
        if not job.train.eval_every:
            return Stream(train, None)
        return Stream(
            train, Batches(corpus, "eval", batch=job.micro_batch, sequence=data.sequence_length, seed=data.seed)
        )


def prepare_corpus(job: Job, folder: Path, say: Callable[[str], None]) -> None:
    """Make the job's corpus in ``folder``, unless it is there."""
    data = job.data
    tokenizer = load_tokenizer(data.tokenizer)
    ends = ""
    if isinstance(tokenizer, FileTokenizer):
        ends = f"; texts end with {tokenizer.token(tokenizer.end_of_text)!r}"
    say(f"preparing {', '.join(data.sources)}{ends}")
    prepare(
        data.sources, tokenizer, folder, CorpusSettings(pattern=data.pattern, eval_fraction=data.eval_fraction), say=say
    )
