"""What tests of preparation share: small sources, and what a corpus says of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from plait.train.data.corpus import Corpus, SplitName
from plait.train.data.sequences import Batches, Sequences
from plait.train.data.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()


class Untouchable(ByteTokenizer):
    """A tokenizer that must not be asked anything: the corpus is there already."""

    def encode_many(self, texts: object) -> list[np.ndarray]:
        raise AssertionError("the text was encoded again")


def write(folder: Path, texts: dict[str, bytes]) -> Path:
    for name, text in texts.items():
        path = folder / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return folder


def documents(corpus: Corpus, split: SplitName) -> list[bytes]:
    """The split's stream, cut at end-of-text."""
    ids = corpus.read(split, 0, corpus.num_tokens(split))
    assert not ids.size or ids[-1] == BYTES.end_of_text
    cuts = np.flatnonzero(ids == BYTES.end_of_text)
    return [part[part != BYTES.end_of_text].astype(np.uint8).tobytes() for part in np.split(ids, cuts + 1)[:-1]]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }


def take(batches: Batches, start: int, count: int) -> Sequences:
    """Sequences ``start .. start + count`` of a stream."""
    return batches.gather(batches.windows_of(np.arange(start, start + count)))
