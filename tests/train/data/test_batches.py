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
from plait.core.cluster.hardware import HERE
from plait.core.job.spec import Job
from plait.plan.make import make_plan
from plait.train.data.corpus import Corpus
from plait.train.data.prepare import CorpusSettings, prepare
from plait.train.data.stream import Batches, _permute
from plait.train.engine.feed import micro_batches
from tests.train.data.conftest import make
from tests.train.data.preparing import BYTES

MODEL = {"family": "gpt", "num_layers": 2, "hidden": 8, "num_heads": 2}


def batch_at(batches: Batches, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batches.take(step * batches.batch, batches.batch)[:2]


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
    inputs, targets, _ = batches.take(epoch * windows, windows)
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
    whole, _, _ = batches.take(start, sum(parts))
    begins = start + np.cumsum([0, *parts[:-1]])
    assert torch.equal(
        whole, torch.cat([batches.take(int(begin), count)[0] for begin, count in zip(begins, parts, strict=True)])
    )


@settings(max_examples=40, deadline=None)
@given(steps=st.integers(0, 30), old=st.sampled_from([1, 2, 4, 12]), new=st.sampled_from([1, 3, 4, 6]))
def test_another_batch_size_continues_the_stream(
    corpora: Callable[[int], Corpus], steps: int, old: int, new: int
) -> None:
    before, after = (Batches(corpora(257), "train", sequence=8, batch=batch) for batch in (old, new))
    assert before.identity == after.identity
    consumed = steps * old * new
    assert torch.equal(before.take(consumed, new)[1], batch_at(after, steps * old)[1])


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 8, [2, 4]], ids=str)
def test_the_order_of_the_data_does_not_depend_on_the_number_of_ranks(
    corpora: Callable[[int], Corpus], dp: int | list[int]
) -> None:
    """On every stage, the rows of its replicas one after the other are the batch that one rank would have."""
    strategy = {"dp": dp, "pp": len(dp)} if isinstance(dp, list) else {"dp": dp}
    train = {"global_batch_size": 8, "micro_batch_size": 0}
    job = Job.from_dict({"model": MODEL, "data": {"sequence_length": 8}, "train": train, "strategy": strategy})
    plan = make_plan(job, HERE, vocab=257)
    batches = Batches(corpora(257), "train", sequence=8, batch=8)
    for step in (0, 3):
        tokens, targets = batch_at(batches, step)
        samples = torch.arange(step * 8, step * 8 + 8)
        micro = micro_batches(tokens, targets, samples, plan.workload.micro_batch, step)
        for mesh in plan.layout.meshes:
            parts = [(one, plan.rows_of(rank, plan.workload.micro_batch)) for one in micro for rank in mesh.ranks]
            assert torch.equal(torch.cat([one.tokens[rows] for one, rows in parts]), tokens)
            assert torch.equal(torch.cat([one.targets[rows] for one, rows in parts]), targets)
            assert torch.equal(torch.cat([one.samples[rows] for one, rows in parts]), samples)


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
    assert torch.equal(batch_at(first, start)[0], batch_at(second, start)[0])


def test_a_batch_is_int64_and_shifted_by_one(corpora: Callable[[int], Corpus]) -> None:
    tokens, targets = batch_at(Batches(corpora(257), "train", sequence=16, batch=4), 0)
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


@pytest.mark.parametrize("sequence", [1, 2, 3, 8, 20])
def test_where_documents_begin_and_which_targets_count(tmp_path: Path, sequence: int) -> None:
    texts = [b"ab", b"", b"c", b"defghij", b"k" * 30]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text.decode()}) + "\n" for text in texts))
    corpus = prepare([tmp_path / "a.jsonl"], BYTES, tmp_path / "c", CorpusSettings(eval_fraction=0))
    batches = Batches(corpus, "train", sequence=sequence, batch=1, masks=True)
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
    Batches(corpora(33), "train", sequence=32, batch=1)
    with pytest.raises(DataError, match="the train split has 33 tokens and one sequence of 33 needs 34"):
        Batches(corpora(33), "train", sequence=33, batch=1)
    with pytest.raises(
        DataError, match=r"the eval split has 0 tokens .* a larger data\.eval_fraction, or turn evaluation off"
    ):
        Batches(corpora(33), "eval", sequence=4, batch=1)
