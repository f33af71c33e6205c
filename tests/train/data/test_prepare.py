"""Preparation: what a stream contains, when it is reused, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.base.errors import DataError, JobError
from plait.train.data import documents as cutting
from plait.train.data.prepare import CorpusSettings, prepare
from plait.train.data.tokenizer import ByteTokenizer
from tests.train.data.preparing import BYTES, Untouchable, documents, snapshot, write

TEXTS = st.dictionaries(
    st.text("abcxyz", min_size=1, max_size=6),
    st.text("abcé \n", min_size=1, max_size=40).map(str.encode),
    min_size=1,
    max_size=12,
)


# What a stream contains


@settings(max_examples=25)
@given(texts=TEXTS)
def test_a_stream_is_the_documents_in_order_of_path(
    tmp_path_factory: pytest.TempPathFactory, texts: dict[str, bytes]
) -> None:
    root = tmp_path_factory.mktemp("order")
    corpus = prepare([str(write(root / "texts", texts))], BYTES, root / "corpus", CorpusSettings(eval_fraction=0))
    assert documents(corpus, "train") == [texts[name] for name in sorted(texts, key=lambda name: f"{name}.txt")]
    assert corpus.index.splits["train"].documents == len(texts)


@settings(max_examples=25)
@given(texts=TEXTS, more=TEXTS)
def test_adding_files_never_moves_a_document(
    tmp_path_factory: pytest.TempPathFactory, texts: dict[str, bytes], more: dict[str, bytes]
) -> None:
    root = tmp_path_factory.mktemp("grow")
    fixed = {"0train": b"always for training", "0eval": b"always for evaluation 1"}  # so that no split is empty
    before, after = (
        prepare(
            [write(root / name, {**fixed, **content})],
            BYTES,
            root / f"{name}-corpus",
            CorpusSettings(eval_fraction=0.5),
        )
        for name, content in (("before", texts), ("after", {**more, **texts}))
    )
    for split in ("train", "eval"):
        assert set(documents(before, split)) <= set(documents(after, split))
        assert not set(documents(after, split)) & set(documents(after, "eval" if split == "train" else "train"))


def test_one_long_file_has_both_splits(tmp_path: Path) -> None:
    content = b"".join(b"line %d of a long file\n" % number for number in range(20_000))
    (tmp_path / "long").write_bytes(content)
    corpus = prepare([tmp_path / "long"], BYTES, tmp_path / "corpus")  # the pattern does not filter a file named itself
    train, held_out = documents(corpus, "train"), documents(corpus, "eval")
    assert len(train) > 1
    assert held_out
    assert sum(map(len, train + held_out)) == len(content)
    assert all(part in content and part.endswith(b"\n") for part in train + held_out), (
        "end-of-text wherever the text jumps"
    )
    assert corpus.num_tokens("train") == sum(map(len, train)) + len(train)


def test_a_large_vocabulary_is_stored_in_four_bytes(tmp_path: Path, texts: Path) -> None:
    class Large(ByteTokenizer):
        vocab, end_of_text, fingerprint = 70_000, 69_999, "large"

    small = prepare([texts], BYTES, tmp_path / "small")
    large = prepare([texts], Large(), tmp_path / "large")
    assert (small.index.dtype, large.index.dtype) == ("uint16", "uint32")
    ids = large.read("train", 0, large.num_tokens("train"))
    assert ids.max() == 69_999
    assert (ids[ids < 256] == (old := small.read("train", 0, len(ids)))[old < 256]).all()


def test_progress_reaches_the_total(tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "GROUP", 1000)
    calls: list[tuple[int, ...]] = []
    made = prepare([texts], BYTES, tmp_path / "corpus", progress=lambda *told: calls.append(told))
    total = sum(path.stat().st_size for path in texts.iterdir())
    assert len(calls) > 2
    assert calls == sorted(calls)
    # The end of the last text is written afterwards.
    assert calls[-1] == (total, total, sum(split.tokens for split in made.index.splits.values()) - 1)
    assert snapshot(tmp_path / "corpus") == snapshot(prepare([texts], BYTES, tmp_path / "again").folder), (
        "whatever the grouping"
    )


# When it is reused


def test_the_same_sources_are_prepared_once(tmp_path: Path, texts: Path) -> None:
    first = prepare([texts], BYTES, tmp_path / "corpus")
    times = {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    moved = texts.rename(tmp_path / "moved")
    again = prepare([moved], Untouchable(), tmp_path / "corpus")
    assert again.index == first.index
    assert times == {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}


@pytest.mark.parametrize("what", ["file", "time", "tokenizer", "fraction", "shards"])
def test_a_change_prepares_anew(tmp_path: Path, texts: Path, what: str) -> None:
    first = prepare([texts], BYTES, tmp_path / "corpus")
    options: dict[str, float] = {"fraction": {"eval_fraction": 0.3}, "shards": {"shard_tokens": 999}}.get(what, {})
    tokenizer = ByteTokenizer()
    if what == "file":
        (texts / "new.txt").write_bytes(b"new")
    elif what == "time":
        os.utime(texts / "00.txt", ns=(1, 1))
    elif what == "tokenizer":
        tokenizer.fingerprint = "another"
    untouchable = Untouchable()
    untouchable.fingerprint = tokenizer.fingerprint
    with pytest.raises(AssertionError, match="encoded again"):
        prepare([texts], untouchable, tmp_path / "corpus", CorpusSettings(**options))  # type: ignore[arg-type]
    again = prepare([texts], tokenizer, tmp_path / "corpus", CorpusSettings(**options))  # type: ignore[arg-type]
    again.verify()
    assert again.index != first.index


# What is refused


@pytest.mark.parametrize("key, value", [("eval_fraction", 1.0), ("eval_fraction", -0.1), ("shard_tokens", 0)])
def test_wrong_settings_are_job_errors(tmp_path: Path, texts: Path, key: str, value: float) -> None:
    with pytest.raises(JobError) as caught:
        CorpusSettings(**{key: value})  # type: ignore[arg-type]
    assert caught.value.key == key


def test_nothing_left_to_train_on_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {"only": b"a short text"}) / "only.txt"
    with pytest.raises(DataError, match=r"all 1 documents fell into the eval split; add text or lower eval_fraction"):
        prepare([path], BYTES, tmp_path / "corpus", CorpusSettings(eval_fraction=0.999999))
    for fraction in (0, 1e-6):
        corpus = prepare([path], BYTES, tmp_path / "corpus", CorpusSettings(eval_fraction=fraction))
        assert [corpus.num_tokens("train"), corpus.num_tokens("eval")] == [13, 0]
