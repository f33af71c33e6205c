"""Mixtures: every prefix has its shares, every position is the same however it is reached."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import JobError
from plait.core.job.plan import RunSettings
from plait.core.job.rampup import BatchSizes
from plait.core.job.settings import SourceSection
from plait.core.job.spec import Job
from plait.train.data import stream as module
from plait.train.data.prepare import CorpusSettings, prepare
from plait.train.data.sets import prepare_corpus
from plait.train.data.stream import MOST, Batches, Mixed, Mixture, Order, Stream, weights_of, whole_weights
from tests.train.data.preparing import BYTES, take

WEIGHTS = st.lists(
    st.one_of(st.integers(1, 9), st.floats(1e-4, 10), st.sampled_from([0.1, 0.7, 1e-6])), min_size=1, max_size=8
)


@given(weights=WEIGHTS, start=st.integers(0, 900), count=st.integers(1, 300))
def test_every_prefix_has_its_shares(weights: list[float], start: int, count: int) -> None:
    """Within one sequence, at every number, and the same from wherever one begins."""
    whole = whole_weights(weights)
    found = Order(whole).sources(0, start + count)
    given_ = (found[:, None] == np.arange(len(whole))).cumsum(axis=0)
    wanted = np.arange(1, start + count + 1)[:, None] * (np.array(whole) / sum(whole))
    assert np.abs(given_ - wanted).max() < 1
    order = Order(whole)
    assert order.sources(start, count).tolist() == found[start:].tolist()
    assert order.before(start).tolist() == np.bincount(found[:start], minlength=len(whole)).tolist()


@given(weights=WEIGHTS)
def test_weights_are_exact_or_to_a_millionth(weights: list[float]) -> None:
    whole = whole_weights(weights)
    assert min(whole) >= 1 and sum(whole) <= MOST
    total = sum(Fraction(str(weight)) for weight in weights)
    for weight, share in zip(weights, whole, strict=True):
        assert abs(Fraction(str(weight)) / total - Fraction(share, sum(whole))) <= Fraction(len(weights), MOST)


def test_an_order_repeats_after_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", 4)
    order = Order((5, 3, 2))
    assert order.sources(0, 30).tolist() == order.sources(0, 10).tolist() * 3
    assert [order.before(position).sum() for position in range(35)] == list(range(35))
    assert order.before(20).tolist() == [10, 6, 4]


@given(
    phases=st.lists(st.tuples(st.integers(1, 60), st.lists(st.integers(1, 5), min_size=3, max_size=3)), max_size=4),
    first=st.lists(st.integers(1, 5), min_size=2, max_size=2),
    cuts=st.lists(st.integers(1, 90), max_size=6),
)
def test_each_source_goes_on_through_changes(
    phases: list[tuple[int, list[int]]], first: list[int], cuts: list[int]
) -> None:
    """No item of a source is left out or comes twice, however the places are asked for."""
    starts = np.cumsum([length for length, _ in phases]).tolist()
    mixture = Mixture([(0, (*first, 0)), *((at, weights) for at, (_, weights) in zip(starts, phases, strict=True))])
    end = 300
    sources, items = mixture.items(0, end)
    for source in range(3):
        assert items[sources == source].tolist() == list(range(int((sources == source).sum())))
    if starts:
        assert 2 not in sources[: starts[0]]
    at = 0
    for cut in (*cuts, end):
        count = min(cut, end - at)
        found = mixture.items(at, count)
        assert found[0].tolist() == sources[at : at + count].tolist()
        assert found[1].tolist() == items[at : at + count].tolist()
        assert mixture.before(at).tolist() == [int((sources[:at] == source).sum()) for source in range(3)]
        at += count


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Batches]:
    found = []
    for seed, size in ((1, 4000), (2, 900), (3, 2500)):
        folder = tmp_path_factory.mktemp(str(seed))
        text = np.random.default_rng(seed).integers(32, 127, size, dtype=np.uint8).tobytes()
        (folder / "text.txt").write_bytes(text)
        corpus = prepare([folder / "text.txt"], BYTES, folder / "c", CorpusSettings(eval_fraction=0))
        found.append(Batches(corpus, "train", sequence=8, seed=4))
    return found


def mixed(parts: list[Batches], *sources: dict[str, Any]) -> Mixed:
    given_ = [SourceSection(path=f"/{number}", **source) for number, source in enumerate(sources)]
    return Mixed(parts, [source.called for source in given_], [(0, weights_of(given_, parts))])


def test_a_source_in_a_mixture_gives_its_own_stream(parts: list[Batches]) -> None:
    both = mixed(parts, {"weight": 0.6}, {"weight": 0.3}, {"weight": 0.1})
    sources, items = both.mixture.items(0, 10_000)
    counts = [int((sources == both._order.index(at)).sum()) for at in range(3)]
    assert counts == [6000, 3000, 1000]
    tokens, targets, _ = both.take(977, 50)
    for row, (number, item) in enumerate(zip(sources[977:1027], items[977:1027], strict=True)):
        alone = take(parts[both._order[number]], int(item), 1)
        assert torch.equal(tokens[row : row + 1], alone[0]) and torch.equal(targets[row : row + 1], alone[1])


def test_without_weights_a_source_is_read_once_while_the_others_are(parts: list[Batches]) -> None:
    plain = mixed(parts, {}, {}, {})
    total = sum(part.windows for part in parts)
    assert [one.sequences for one in plain.shares(total)] == [part.windows for part in parts]
    twice = mixed(parts, {}, {"epochs": 3}, {})
    total += 2 * parts[1].windows
    assert [round(one.epochs, 2) for one in twice.shares(total)] == [1, 3, 1]


def test_a_run_that_reads_a_source_too_often_is_refused_with_steps_that_would_do(parts: list[Batches]) -> None:
    sources = [
        SourceSection(path="/a", weight=1),
        SourceSection(path="/b", weight=1, epochs=2),
        SourceSection(path="/c", weight=2),
    ]
    stream = Mixed(parts, ["a", "b", "c"], [(0, weights_of(sources, parts))])
    with pytest.raises(
        JobError, match=r"b would be read \d+\.\d+ times, and its epochs are 2.*at most (\d+) steps"
    ) as caught:
        stream.check_epochs(sources, 1000, BatchSizes.of(6, None))
    most = int(str(caught.value).rpartition("at most ")[2].partition(" ")[0])
    stream.check_epochs(sources, most, BatchSizes.of(6, None))


def job_of(folder: Path, sources: list[dict[str, Any]], **data: Any) -> Job:
    return Job.from_dict({
        "model": {"family": "gpt", "num_layers": 1, "hidden": 8, "num_heads": 1, "max_sequence": 16},
        "data": {"sources": sources, "sequence_length": 16, "eval_fraction": 0.3, **data},
        "train": {"steps": 30, "global_batch_size": 5, "eval_every": 3, "eval_batches": 3},
    }, folder)  # fmt: skip


def test_a_share_too_small_for_the_order_and_a_name_taken_are_refused(tmp_path: Path) -> None:
    few = [{"path": "a", "weight": 1e-9}, {"path": "b", "weight": 1}]
    with pytest.raises(
        JobError, match=r"the weight 1e-09 is a share of 1e-09, and the least is one sequence in 1,048,576"
    ):
        job_of(tmp_path, few)
    job_of(tmp_path, [{"path": "a", "weight": 1e-6}, {"path": "b", "weight": 1}])
    with pytest.raises(JobError, match="a source is called 'eval'"):
        job_of(tmp_path, [{"path": "a", "name": "eval"}, {"path": "b"}], eval=[{"path": "c"}])


def texts(folder: Path, name: str, count: int) -> None:
    (folder / name).mkdir()
    for number in range(count):
        (folder / name / f"{number}.txt").write_text(f"text {number} of {name} " * 9)


@pytest.mark.parametrize("stops", [[7], [3, 4, 5, 6, 7]])
def test_sources_may_be_added_when_a_run_goes_on(tmp_path: Path, stops: list[int]) -> None:
    """What was there goes on where it was; of what comes after, nothing depends on how often one
    stopped."""
    for name in "abc":
        texts(tmp_path, name, 20)
    a, b, c = ({"path": name, "weight": 2} for name in "abc")
    open_ = lambda *sources: Stream.open(RunSettings.of(job_of(tmp_path, list(sources))), tmp_path / "corpus")  # noqa: E731
    prepare_corpus(job_of(tmp_path, [a, b, c]).data, tmp_path / "corpus", lambda text: None)
    stream, state, seen = open_(a, b), None, []
    for at, stop in zip([0, *stops], [*stops, 14], strict=True):
        if at:
            now = open_(b, c, a) if at == stops[-1] else open_(b, a)
            resumed = now.resumed(state, at * 5)
            assert resumed
            stream = resumed
        state = stream.train.identity
        seen += [stream.train.take(step * 5, 5)[0] for step in range(at, stop)]
        assert open_(c, a).resumed(state, 35) is None, "b is gone"
    whole = open_(a, b, c).resumed(open_(a, b).train.identity, stops[-1] * 5)
    assert whole
    assert torch.equal(torch.cat(seen), whole.train.take(0, 70)[0])


def test_one_source_keeps_the_order_that_it_has_alone(tmp_path: Path) -> None:
    texts(tmp_path, "a", 20)
    texts(tmp_path, "b", 9)
    job = job_of(tmp_path, [{"path": "a"}])
    prepare_corpus(job_of(tmp_path, [{"path": "a"}, {"path": "b"}]).data, tmp_path / "corpus", lambda text: None)
    stream = Stream.open(RunSettings.of(job), tmp_path / "corpus")
    part = stream.train.parts[0]
    assert stream.train.identity == part.identity
    assert torch.equal(stream.train.take(13, 40)[0], take(part, 13, 40)[0])
    more = Stream.open(RunSettings.of(job_of(tmp_path, [{"path": "a"}, {"path": "b"}])), tmp_path / "corpus")
    assert more.resumed(part.identity, 50) and not stream.resumed("another", 50)
    assert more.resumed([[0, 3]], 50) is None and more.resumed(None, 50) is None


def test_each_source_is_evaluated(tmp_path: Path) -> None:
    for name in "abc":
        texts(tmp_path, name, 20)
    job = job_of(tmp_path, [{"path": "a"}, {"path": "b"}])
    prepare_corpus(job.data, tmp_path / "corpus", lambda text: None)
    found = Stream.open(RunSettings.of(job), tmp_path / "corpus").evaluation
    assert [(one.name, one.batches.split) for one in found] == [("a", "eval"), ("b", "eval")]
    job = job_of(tmp_path, [{"path": "a"}, {"path": "b"}], eval=[{"path": "c"}])
    prepare_corpus(job.data, tmp_path / "corpus", lambda text: None)
    stream = Stream.open(RunSettings.of(job), tmp_path / "corpus")
    assert [(one.name, one.batches.split, one.count) for one in stream.evaluation] == [("", "train", 15)]
    assert stream.train.parts[0].corpus.num_tokens("eval") == 0
