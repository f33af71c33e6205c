"""The stream of sequences: exact coverage, exact resume, the same for every number of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.base.errors import DataError
from plait.train.data.corpus import Corpus
from plait.train.data.prepare import CorpusSettings, prepare
from plait.train.data.sequences import Batches, _permute
from tests.train.data.conftest import make
from tests.train.data.preparing import BYTES, take


@given(size=st.integers(1, 3000), key=st.text(max_size=5))
def test_permute_is_a_bijection(size: int, key: str) -> None:
    assert np.array_equal(np.sort(_permute(np.arange(size), size, key)), np.arange(size))


def test_permute_never_changes_between_versions() -> None:
    assert _permute(np.arange(10), 10, "0/0").tolist() == [5, 2, 0, 3, 1, 8, 4, 6, 7, 9]
    assert _permute(np.array([0, 1, 2]), 1 << 40, "0/0").tolist() == [126919833786, 725669176727, 453630027819]


@pytest.mark.parametrize("size", [2, 3, 5, 16, 60])
def test_permute_sends_every_place_everywhere_equally_often(size: int) -> None:
    trials, counts = 600, np.zeros((size, size))
    for trial in range(trials):
        counts[np.arange(size), _permute(np.arange(size), size, f"0/{trial}")] += 1
    # Each row and each column has a fixed sum, which leaves (size - 1) ** 2 degrees of freedom.
    statistic = (size - 1) / size * ((counts - trials / size) ** 2 / (trials / size)).sum()
    freedom = (size - 1) ** 2
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom), "chi-square five deviations off"


@given(
    tokens=st.sampled_from([2, 9, 33, 100, 257]),
    sequence=st.integers(1, 12),
    seed=st.integers(-5, 5),
    epoch=st.integers(0, 3),
)
def test_an_epoch_shows_every_token_once(
    corpora: Callable[[int], Corpus], tokens: int, sequence: int, seed: int, epoch: int
) -> None:
    corpus, windows = corpora(tokens), (tokens - 1) // sequence
    if not windows:
        return
    batches = Batches(corpus, "train", sequence=sequence, seed=seed)
    inputs, targets, _ = take(batches, epoch * windows, windows)
    stream = corpus.read("train", 0, tokens)
    order = np.argsort(batches.windows_of(np.arange(epoch * windows, (epoch + 1) * windows)))
    assert inputs[order].flatten().tolist() == stream[: windows * sequence].tolist()
    assert targets[order].flatten().tolist() == stream[1 : windows * sequence + 1].tolist()


@given(start=st.integers(0, 200), parts=st.lists(st.integers(1, 9), min_size=1, max_size=8), seed=st.integers(0, 3))
def test_the_stream_is_the_same_however_it_is_cut(
    corpora: Callable[[int], Corpus], start: int, parts: list[int], seed: int
) -> None:
    batches = Batches(corpora(257), "train", sequence=7, seed=seed)
    whole, _, _ = take(batches, start, sum(parts))
    begins = start + np.cumsum([0, *parts[:-1]])
    assert torch.equal(
        whole, torch.cat([take(batches, int(begin), count)[0] for begin, count in zip(begins, parts, strict=True)])
    )


@settings(max_examples=12)
@given(shard_tokens=st.integers(5, 400), start=st.integers(0, 300), count=st.integers(0, 100))
def test_shards_of_any_size_give_the_same_stream(
    tmp_path_factory: pytest.TempPathFactory,
    corpora: Callable[[int], Corpus],
    shard_tokens: int,
    start: int,
    count: int,
) -> None:
    one = corpora(401)
    many = make(one.folder.parent, 401, shard_tokens=shard_tokens)
    assert len(many.index.splits["train"].shards) == -(-401 // shard_tokens)
    assert np.array_equal(one.read("train", start, count), many.read("train", start, count))
    first, second = (Batches(corpus, "train", sequence=6, seed=1) for corpus in (one, many))
    assert first.identity == second.identity
    assert torch.equal(take(first, start, 5).tokens, take(second, start, 5).tokens)


def test_epochs_and_seeds_differ(corpora: Callable[[int], Corpus]) -> None:
    batches = Batches(corpora(257), "train", sequence=4)
    numbers = np.arange(batches.windows)
    orders = {tuple(batches.windows_of(numbers + epoch * batches.windows)) for epoch in range(5)}
    other = Batches(corpora(257), "train", sequence=4, seed=1)
    assert len(orders | {tuple(other.windows_of(numbers))}) == 6
    assert batches.identity != other.identity


@pytest.mark.parametrize("sequence", [1, 2, 3, 8, 20])
def test_where_documents_begin_and_which_targets_count(tmp_path: Path, sequence: int) -> None:
    texts = [b"ab", b"", b"c", b"defghij", b"k" * 30]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text.decode()}) + "\n" for text in texts))
    corpus = prepare([tmp_path / "a.jsonl"], BYTES, tmp_path / "c", CorpusSettings(eval_fraction=0))
    batches = Batches(corpus, "train", sequence=sequence, masks=True)
    tokens, targets, starts = batches.gather(np.arange(batches.windows))
    assert starts is not None
    document = [number for number, text in enumerate(filter(None, texts)) for _ in [*text, 256]]
    stream = [byte for text in filter(None, texts) for byte in [*text, 256]]
    for window in range(batches.windows):
        own = range(window * sequence, (window + 1) * sequence)
        assert tokens[window].tolist() == stream[own.start : own.stop]
        begins = [max(document.index(document[at]), own.start) - own.start for at in own]
        assert starts[window].tolist() == begins
        same = [document[at] == document[at + 1] for at in own]
        assert targets[window].tolist() == [stream[at + 1] if it else -100 for at, it in zip(own, same, strict=True)]
    assert batches.view.targets(np.arange(batches.windows)) == int((targets != -100).sum())


def test_too_little_text_is_named(corpora: Callable[[int], Corpus]) -> None:
    Batches(corpora(33), "train", sequence=32)
    with pytest.raises(DataError, match="the train split has 33 tokens and one sequence of 33 needs 34"):
        Batches(corpora(33), "train", sequence=33)
    with pytest.raises(
        DataError, match=r"the eval split has 0 tokens .* a larger data\.eval_fraction, or turn evaluation off"
    ):
        Batches(corpora(33), "eval", sequence=4)
