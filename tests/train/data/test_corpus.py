"""Corpora on disk and the stream of sequences: exact coverage, exact resume, and every kind of damage
named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.errors import DataError, JobError
from plait.train.data.corpus import Batches, Corpus, _permute
from plait.train.data.prepare import prepare
from plait.train.data.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()


def make(folder: Path, tokens: int, *, shard_tokens: int = 1 << 20) -> Corpus:
    """A train split of ``tokens`` tokens of which no two neighbourhoods are alike (the last is
    end-of-text)."""
    folder.mkdir(exist_ok=True)
    text = np.random.default_rng(7).integers(0, 256, tokens - 1, dtype=np.uint8).tobytes()
    (folder / "text.txt").write_bytes(text)
    return prepare(
        [folder / "text.txt"], BYTES, folder / f"corpus-{shard_tokens}", eval_fraction=0, shard_tokens=shard_tokens
    )


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Corpus]:
    root, made = tmp_path_factory.mktemp("corpora"), dict[int, Corpus]()

    def of_size(tokens: int) -> Corpus:
        if tokens not in made:
            made[tokens] = make(root / str(tokens), tokens)
        return made[tokens]

    return of_size


@given(size=st.integers(1, 3000), key=st.text(max_size=5))
def test_permute_is_a_bijection(size: int, key: str) -> None:
    assert np.array_equal(np.sort(_permute(np.arange(size), size, key)), np.arange(size))


def test_permute_never_changes_between_versions() -> None:
    assert _permute(np.arange(10), 10, "0/0").tolist() == [5, 2, 0, 3, 1, 8, 4, 6, 7, 9]
    assert _permute(np.array([0, 1, 2]), 1 << 40, "0/0").tolist() == [126919833786, 725669176727, 453630027819]


@pytest.mark.parametrize("size", [2, 3, 5, 16, 60])
def test_permute_sends_every_place_everywhere_equally_often(size: int) -> None:
    trials, counts = 1500, np.zeros((size, size))
    for trial in range(trials):
        counts[np.arange(size), _permute(np.arange(size), size, f"0/{trial}")] += 1
    # Each row and each column has a fixed sum, which leaves (size - 1) ** 2 degrees of freedom.
    statistic = (size - 1) / size * ((counts - trials / size) ** 2 / (trials / size)).sum()
    freedom = (size - 1) ** 2
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom), "chi-square five deviations off"


@settings(max_examples=60, deadline=None)
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
    batches = Batches(corpus, "train", sequence=sequence, batch=3, seed=seed)
    inputs, targets = batches.take(epoch * windows, windows)
    stream = corpus.read("train", 0, tokens)
    order = np.argsort(batches.window_ids(epoch * windows, windows))
    assert inputs[order].flatten().tolist() == stream[: windows * sequence].tolist()
    assert targets[order].flatten().tolist() == stream[1 : windows * sequence + 1].tolist()


@settings(max_examples=60, deadline=None)
@given(start=st.integers(0, 200), parts=st.lists(st.integers(1, 9), min_size=1, max_size=8), seed=st.integers(0, 3))
def test_the_stream_is_the_same_however_it_is_cut(
    corpora: Callable[[int], Corpus], start: int, parts: list[int], seed: int
) -> None:
    batches = Batches(corpora(257), "train", sequence=7, batch=4, seed=seed)
    whole, _ = batches.take(start, sum(parts))
    begins = start + np.cumsum([0, *parts[:-1]])
    assert torch.equal(
        whole, torch.cat([batches.take(int(begin), count)[0] for begin, count in zip(begins, parts, strict=True)])
    )


@settings(max_examples=40, deadline=None)
@given(
    steps=st.integers(0, 30),
    old=st.sampled_from([1, 2, 4, 12]),
    new=st.sampled_from([1, 3, 4, 6]),
    world=st.sampled_from([1, 2, 3]),
)
def test_a_resume_with_another_batch_size_continues_the_stream(
    corpora: Callable[[int], Corpus], steps: int, old: int, new: int, world: int
) -> None:
    corpus = corpora(257)
    before, after = (Batches(corpus, "train", sequence=8, batch=batch) for batch in (old, new * world))
    assert before.identity == after.identity
    consumed = steps * old
    ranks = [after.batch_after(consumed, rank=rank, world=world)[1] for rank in range(world)]
    assert torch.equal(torch.cat(ranks), before.take(consumed, new * world)[1])
    ids = [after.sample_ids_after(consumed, rank=rank, world=world) for rank in range(world)]
    assert np.concatenate(ids).tolist() == list(range(consumed, consumed + new * world))


@settings(max_examples=25, deadline=None)
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
    first, second = (Batches(corpus, "train", sequence=6, batch=5, seed=1) for corpus in (one, many))
    assert first.identity == second.identity
    assert torch.equal(first.batch_at(start)[0], second.batch_at(start)[0])


def test_batch_at_is_int64_and_shifted_by_one(corpora: Callable[[int], Corpus]) -> None:
    tokens, targets = Batches(corpora(257), "train", sequence=16, batch=4).batch_at(0)
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.shape == targets.shape == (4, 16)
    assert tokens.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    tokens.zero_()  # a copy: neither the targets nor the file are touched
    assert targets.any()


def test_epochs_and_seeds_differ(corpora: Callable[[int], Corpus]) -> None:
    batches = Batches(corpora(257), "train", sequence=4, batch=4)
    orders = {tuple(batches.window_ids(epoch * batches.windows, batches.windows)) for epoch in range(5)}
    other = Batches(corpora(257), "train", sequence=4, batch=4, seed=1)
    assert len(orders | {tuple(other.window_ids(0, other.windows))}) == 6
    assert batches.identity != other.identity
    assert batches.epoch(batches.windows * 3) == 3


def test_sample_ids_number_the_stream(corpora: Callable[[int], Corpus]) -> None:
    batches = Batches(corpora(257), "train", sequence=4, batch=6)
    assert batches.sample_ids(2).tolist() == [12, 13, 14, 15, 16, 17]
    assert batches.sample_ids(2, rank=1, world=3).tolist() == [14, 15]


def test_eval_batches_are_in_order_full_and_shared_over_ranks(corpora: Callable[[int], Corpus]) -> None:
    corpus = corpora(257)
    batches = Batches(corpus, "train", sequence=8, batch=4)
    found = list(batches.eval_batches(3))
    assert torch.equal(
        torch.cat([tokens for tokens, _ in found]).flatten(), torch.from_numpy(corpus.read("train", 0, 96))
    )
    halves = [list(batches.eval_batches(3, rank=rank, world=2)) for rank in range(2)]
    assert all(torch.equal(torch.cat([a[0], b[0]]), whole[0]) for a, b, whole in zip(*halves, found, strict=True))
    assert len(list(batches.eval_batches(100))) == 8, "no window twice"
    few = list(Batches(corpus, "train", sequence=100, batch=3).eval_batches(5))
    assert [tokens.shape for tokens, _ in few] == [(3, 100)], "two windows fill one batch of three"


@pytest.mark.parametrize(
    "change, key", [({"sequence": 0}, "sequence"), ({"batch": -1}, "batch"), ({"split": "test"}, "split")]
)
def test_wrong_settings_are_job_errors(corpora: Callable[[int], Corpus], change: dict[str, int], key: str) -> None:
    with pytest.raises(JobError) as caught:
        Batches(corpora(33), **{"split": "train", "sequence": 4, "batch": 2, **change})  # type: ignore[arg-type]
    assert caught.value.key == key


def test_a_batch_must_divide_over_the_ranks(corpora: Callable[[int], Corpus]) -> None:
    with pytest.raises(JobError, match="4 sequences do not divide over 3 ranks"):
        Batches(corpora(33), "train", sequence=4, batch=4).batch_at(0, world=3)


def test_too_little_text_is_named(corpora: Callable[[int], Corpus]) -> None:
    Batches(corpora(33), "train", sequence=32, batch=1)
    with pytest.raises(DataError, match="the train split has 33 tokens and one sequence of 33 needs 34"):
        Batches(corpora(33), "train", sequence=33, batch=1)
    with pytest.raises(
        DataError, match="the eval split is empty; prepare the corpus again with a larger eval_fraction"
    ):
        Batches(corpora(33), "eval", sequence=4, batch=1)


def test_open_maps_what_prepare_wrote(corpora: Callable[[int], Corpus]) -> None:
    corpus = Corpus.open(str(corpora(100).folder))
    corpus.verify()
    assert corpus.num_tokens("train") == 100
    assert corpus.num_tokens("eval") == 0
    assert corpus.read("train", 99, 1).tolist() == [BYTES.end_of_text]
    assert corpus.read("train", 100, 0).size == 0


@pytest.mark.parametrize("size", [0, 77, 82])
def test_a_shard_of_another_size_is_named_with_both_sizes(tmp_path: Path, size: int) -> None:
    folder = make(tmp_path, 100, shard_tokens=40).folder
    os.truncate(folder / "train-00001.bin", size)
    with pytest.raises(
        DataError, match=rf"train-00001\.bin: has {size} bytes and the index says 80; delete the folder .* prepare"
    ):
        Corpus.open(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = make(tmp_path, 100, shard_tokens=40).folder
    (folder / "train-00002.bin").unlink()
    with pytest.raises(
        DataError, match=r"train-00002\.bin: the shard is missing, expected 40 bytes; delete the folder"
    ):
        Corpus.open(folder)


def test_a_changed_byte_is_found_by_verify(tmp_path: Path) -> None:
    folder = make(tmp_path, 100, shard_tokens=40).folder
    content = bytearray((folder / "train-00001.bin").read_bytes())
    content[17] ^= 1
    (folder / "train-00001.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"train-00001\.bin: damaged \(checksum"):
        Corpus.open(folder).verify()


def test_a_folder_without_index_is_not_a_corpus(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"index\.json: no such file, so .* is not a prepared corpus; prepare it first"):
        Corpus.open(tmp_path)


def _without(key: str) -> Callable[[dict], object]:
    return lambda index: {name: value for name, value in index.items() if name != key}


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda index: {**index, "version": 2}, "version 2, and this Plait reads version 1"),
        (lambda index: {**index, "format": "x"}, "format is 'x'"),
        (lambda index: {**index, "dtype": "float"}, "dtype 'float'"),
        (lambda index: [], "not a usable corpus index"),
        (lambda index: {**index, "splits": 3}, "not a usable corpus index"),
        (_without("vocab"), "has no key 'vocab'"),
        (
            lambda index: index["splits"]["train"]["shards"][0].update(tokens=7) or index,
            "shard 'train-00000.bin' is described wrongly",
        ),
        (
            lambda index: index["splits"]["train"]["shards"][0].update(file="../x") or index,
            "shard '../x' is described wrongly",
        ),
    ],
)
def test_a_wrong_index_is_explained(tmp_path: Path, edit: Callable[[dict], object], message: str) -> None:
    index = make(tmp_path, 50).folder / "index.json"
    index.write_text(json.dumps(edit(json.loads(index.read_text()))))
    with pytest.raises(DataError, match=r"index\.json: ") as caught:
        Corpus.open(index.parent)
    assert message in str(caught.value)
    assert "prepare the corpus again" in str(caught.value)


@given(cut=st.integers(0, 400))
@settings(max_examples=20, deadline=None)
def test_a_truncated_index_never_opens(
    tmp_path_factory: pytest.TempPathFactory, corpora: Callable[[int], Corpus], cut: int
) -> None:
    whole = (corpora(100).folder / "index.json").read_bytes()
    folder = tmp_path_factory.mktemp("cut")
    (folder / "index.json").write_bytes(whole[: min(cut, len(whole) - 2)])
    with pytest.raises(DataError, match=r"index\.json: "):
        Corpus.open(folder)
