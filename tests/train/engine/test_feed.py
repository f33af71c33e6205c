"""What a rank reads of the stream is its part of what all read together, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.core.job.plan import RunSettings
from plait.core.job.spec import Job
from plait.core.parallel.strategy import slice_sizes
from plait.train.data.corpus import Corpus
from plait.train.data.prepare import CorpusSettings, prepare
from plait.train.data.stream import Batches, EvalSet, Mixed, Stream, weights_of
from plait.train.engine.feed import Feed, micro_batches
from plait.train.engine.inflight import MicroBatch
from plait.train.model.embedding import IGNORED
from tests.train.data.preparing import BYTES


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    text = np.random.default_rng(7).integers(32, 127, 2000, dtype=np.uint8).tobytes()
    (folder / "text.txt").write_bytes(text)
    return prepare([folder / "text.txt"], BYTES, folder / "prepared", CorpusSettings(eval_fraction=0))


def feed_of(corpus: Corpus, batch: int, micro: int, seed: int) -> Feed:
    job = Job.from_dict({
        "model": {"family": "gpt", "num_layers": 1, "hidden": 8, "num_heads": 1, "max_sequence": 16},
        "data": {"text": ["here"], "sequence_length": 16, "seed": seed},
        "train": {"steps": 9, "global_batch_size": batch, "micro_batch_size": micro, "eval_every": 3,
                  "eval_batches": 3},
    })  # fmt: skip
    train = Batches(corpus, "train", sequence=16, seed=seed)
    mixed = Mixed([train], ["text"], [(0, weights_of(job.data.train, [train]))])
    return Feed(RunSettings.of(job), Stream(mixed, (EvalSet("", train, min(3 * batch, train.windows)),)))


def same(one: MicroBatch, other: MicroBatch) -> bool:
    tensors = (("tokens", "targets", "samples"), (one.scale, one.step), (other.scale, other.step))
    return tensors[1] == tensors[2] and all(torch.equal(getattr(one, n), getattr(other, n)) for n in tensors[0])


@given(
    micro=st.integers(1, 6),
    count=st.integers(1, 3),
    dp=st.integers(1, 7),
    step=st.integers(0, 40),
    seed=st.integers(0, 5),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_rows_of_all_ranks_are_the_batch(corpus: Corpus, micro: int, count: int, dp: int, step: int, seed: int) -> None:
    """Replicas with unequal shares, and with none, among them."""
    feed = feed_of(corpus, micro * count, micro, seed)
    size = micro * count
    tokens, targets, _ = feed.stream.train.take(step * size, size)
    samples = torch.arange(step * size, (step + 1) * size)
    whole = micro_batches(tokens, targets, samples, micro, step)
    assert all(same(one, other) for one, other in zip(feed.step(step), whole, strict=True))
    ((_, evaluation),) = feed.evaluation()
    assert len(evaluation) == feed.evaluations == 3 * count
    for rank in range(dp):

        def rows(size: int, rank: int = rank) -> slice:
            sizes = slice_sizes(size, dp)
            return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))

        for found, all_of_it in ((feed.step(step, rows), whole), (feed.evaluation(rows)[0][1], evaluation)):
            for one, other in zip(found, all_of_it, strict=True):
                r = rows(len(other.tokens))
                part = MicroBatch(other.tokens[r], other.targets[r], other.samples[r], other.scale, other.step)
                assert same(one, part)


def test_a_rank_reads_no_more_than_its_rows(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    feed, read = feed_of(corpus, 12, 4, 0), list[int]()
    gather = Batches.gather
    monkeypatch.setattr(Batches, "gather", lambda self, ids: read.append(len(ids)) or gather(self, ids))
    feed.step(3, lambda size: slice(size // 2, size))
    assert read == [2, 2, 2]


def test_a_batch_of_another_size_goes_on_after_the_last_sequence(corpus: Corpus) -> None:
    """Three steps of four, two of six, then one of two: no sequence is left out, none comes
    twice."""
    seen, step, position = list[int](), 0, None
    for batch, count in ((4, 3), (6, 2), (2, 1)):
        feed = feed_of(corpus, batch, 2, 0).resumed_at(step, position)
        for number in range(step, step + count):
            seen += [int(sample) for one in feed.step(number) for sample in one.samples]
        step += count
        position = feed.position(step)
    assert seen == list(range(4 * 3 + 6 * 2 + 2)) and position == len(seen)


@pytest.mark.parametrize("count", [1, 5, 12, 36])
def test_an_evaluation_is_the_same_sequences_in_every_shape(corpus: Corpus, count: int) -> None:
    """However many micro-batches a step has; what fills the last has no target."""
    found = []
    for micro in (1, 3, 4, 12):
        feed = feed_of(corpus, 12, micro, 0)
        one = EvalSet("", feed.stream.train.parts[0], count)
        ((_, batches),) = Feed(feed.settings, Stream(feed.stream.train, (one,))).evaluation()
        tokens, targets = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("tokens", "targets"))
        assert len(tokens) == -(-count // micro) * micro
        assert (targets[count:] == IGNORED).all() and (targets[:count] != IGNORED).all()
        assert {batch.scale for batch in batches} == {1 / (count * 16)}
        found.append((tokens[:count], targets[:count]))
    assert all(torch.equal(one[at], found[0][at]) for one in found for at in (0, 1))
    assert torch.equal(found[0][0].flatten(), torch.from_numpy(corpus.read("train", 0, count * 16)))
