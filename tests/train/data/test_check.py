"""Whether there is enough to train and to evaluate on: found before ranks start, with what to
change."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import JobError, PlaitError
from plait.core.job.settings import DataSection, TrainSection
from plait.train.data import check
from plait.train.data.check import check_data
from plait.train.data.corpus import Corpus
from plait.train.data.documents import Document
from plait.train.data.prepare import CorpusSettings, prepare
from plait.train.data.stream import Batches
from plait.train.data.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()


def write(folder: Path, texts: list[bytes]) -> Path:
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_bytes(text)
    return folder


def sections(texts: Path, *, eval_every: int = 100, **data: Any) -> tuple[DataSection, TrainSection]:
    return DataSection(text=str(texts), **data), TrainSection(eval_every=eval_every)


def really(data: DataSection, train: TrainSection, out: Path) -> None:
    """What ranks do."""
    settings = CorpusSettings(pattern=data.pattern, eval_fraction=data.eval_fraction)
    corpus = prepare([str(data.text)], BYTES, out / "text", settings)
    _use(corpus, data, train)


def _use(corpus: Corpus, data: DataSection, train: TrainSection) -> None:
    Batches(corpus, "train", sequence=data.sequence_length)
    if train.eval_every:
        Batches(corpus, "eval", sequence=data.sequence_length)


def refused(function: Any, *args: Any) -> bool:
    try:
        function(*args)
    except PlaitError:
        return True
    return False


@given(
    texts=st.lists(
        st.one_of(st.text("abcé \n", max_size=60).map(str.encode), st.binary(max_size=60)), max_size=8, min_size=1
    ),
    fraction=st.sampled_from([0.0, 1e-6, 0.2, 0.5, 0.9]),
    sequence=st.integers(1, 120),
    eval_every=st.sampled_from([0, 5]),
    prepared=st.booleans(),
)
def test_it_refuses_what_ranks_would_refuse_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[bytes],
    fraction: float,
    sequence: int,
    eval_every: int,
    prepared: bool,
) -> None:
    root = tmp_path_factory.mktemp("check")
    settings = sections(write(root / "texts", texts), eval_fraction=fraction, sequence_length=sequence)
    data, train = settings[0], TrainSection(eval_every=eval_every)
    if prepared:
        refused(really, data, train, root / "corpus")
    assert refused(check_data, data, train, root / "corpus") == refused(really, data, train, root / "corpus")


def test_no_document_for_evaluation_comes_with_a_fraction_that_selects_one(tmp_path: Path) -> None:
    texts = write(tmp_path / "texts", [b"text number %d" % number * 20 for number in range(30)])
    data, train = sections(texts, eval_fraction=1e-6, sequence_length=64)
    with pytest.raises(JobError) as caught:
        check_data(data, train, tmp_path / "corpus")
    assert "0 of 30 documents, 0 tokens, are for evaluation, and one sequence of 64 needs 65" in str(caught.value)
    assert "train.eval_every = 0" in str(caught.value)
    assert caught.value.key == "data.eval_fraction"
    advised = re.search(r"data\.eval_fraction = (\S+) or more", str(caught.value))
    assert advised
    check_data(*sections(texts, eval_fraction=float(advised[1]), sequence_length=64), tmp_path / "corpus")
    check_data(*sections(texts, eval_fraction=1e-6, sequence_length=64, eval_every=0), tmp_path / "corpus")


@pytest.mark.parametrize("made", [False, True], ids=["new", "prepared"])
def test_a_split_shorter_than_a_sequence_comes_with_a_length_that_fits(tmp_path: Path, made: bool) -> None:
    texts = write(tmp_path / "texts", [b"a text of some words, number %d" % number for number in range(20)])
    if made:
        prepare([texts], BYTES, tmp_path / "corpus" / "text", CorpusSettings(pattern="*", eval_fraction=0.2))
    for sequence, part in ((400, "evaluation"), (5000, "training")):
        with pytest.raises(JobError) as caught:
            check_data(*sections(texts, eval_fraction=0.2, sequence_length=sequence), tmp_path / "corpus")
        assert f"are for {part}, and one sequence of {sequence} needs {sequence + 1} tokens" in str(caught.value)
        assert caught.value.key == "data.sequence_length"
        advised = re.search(r"data\.sequence_length = (\d+) or less", str(caught.value))
        assert advised
        fits = sections(
            texts, eval_fraction=0.2, sequence_length=int(advised[1]), eval_every=100 * (part != "training")
        )
        check_data(*fits, tmp_path / "corpus")


def test_no_fraction_and_an_evaluation_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    texts = write(tmp_path / "texts", [b"words " * 99])
    with pytest.raises(JobError, match=r"data\.eval_fraction: 0 keeps no text .* or train\.eval_every = 0"):
        check_data(*sections(texts, eval_fraction=0.0), tmp_path / "corpus")


def test_of_much_text_only_the_beginning_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough was found, or as much was read as may be: then nothing is claimed."""
    texts = write(tmp_path / "texts", [b"%d words " % number * 99 for number in range(200)])
    read: list[str] = []
    documents = check.documents
    monkeypatch.setattr(check, "documents", lambda file, reading: (read.append(file.name), documents(file, reading))[1])
    check_data(*sections(texts, eval_fraction=0.5, sequence_length=64), tmp_path / "corpus")
    assert len(read) < 20
    read.clear()
    monkeypatch.setattr(check, "COUNTED", 2000)
    check_data(*sections(texts, eval_fraction=1e-9, sequence_length=64), tmp_path / "corpus")
    assert len(read) < 20


@pytest.mark.system
def test_torch_is_not_imported() -> None:
    code = "import sys, plait.train.data.check; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def told_of(texts: Path, out: Path, **values: Any) -> str:
    with pytest.raises(JobError) as caught:
        check_data(*sections(texts, **values), out / "corpus")
    return str(caught.value)


def test_tokens_are_counted_with_the_end_of_each_text(tmp_path: Path) -> None:
    """Two files of five and six bytes are thirteen tokens."""
    texts = write(tmp_path / "texts", [b"words", b"and so"])
    whole: dict[str, Any] = {"eval_every": 0, "eval_fraction": 0.0}
    check_data(*sections(texts, sequence_length=12, **whole), tmp_path / "corpus")
    told = told_of(texts, tmp_path, sequence_length=13, **whole)
    assert "2 of 2 documents, 13 tokens, are for training, and one sequence of 13 needs 14 tokens" in told
    assert told.endswith("Add text or set data.sequence_length = 12 or less.")


def test_a_text_that_is_cut_into_pieces_ends_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = write(tmp_path / "texts", [b"x"])
    pieces = [Document(text=b"words", offset=0), Document(text=b" more", offset=5), Document(text=b"other", offset=0)]
    monkeypatch.setattr(check, "documents", lambda file, reading: iter(pieces))
    monkeypatch.setattr(check, "check_formats", lambda files, most, dtype: Counter[str]())
    told = told_of(texts, tmp_path, sequence_length=64, eval_every=0, eval_fraction=0.0)
    assert "3 of 3 documents, 17 tokens" in told
    places = sorted(one.hash_fraction for one in pieces)
    told = told_of(texts, tmp_path, sequence_length=64, eval_every=0, eval_fraction=places[0] + 1e-9)
    alone = next(one for one in pieces if one.hash_fraction == places[0])
    ends = {b"words": 1 + 1, b" more": 1 + 1, b"other": 1}[alone.text]  # of texts whose last piece is for training
    assert f"2 of 3 documents, {10 + ends} tokens, are for training" in told
    assert "lower data.eval_fraction" in told


def test_nothing_can_be_shortened_to_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = write(tmp_path / "texts", [b"x"])
    monkeypatch.setattr(check, "check_formats", lambda files, most, dtype: Counter[str]())
    whole: dict[str, Any] = {"sequence_length": 64, "eval_every": 0, "eval_fraction": 0.0}
    for text, advised in ((b"", "Add text."), (b"a", "Add text or set data.sequence_length = 1 or less.")):
        monkeypatch.setattr(check, "documents", lambda file, reading, text=text: iter([Document(text=text, offset=0)]))
        assert told_of(texts, tmp_path, **whole).endswith(advised)


def test_a_fraction_is_advised_only_where_one_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = write(tmp_path / "texts", [b"x"])
    monkeypatch.setattr(check, "check_formats", lambda files, most, dtype: Counter[str]())
    places = {b"low": 0.25, b"high": 0.9999, b"middle": 0.5}

    def told(*names: bytes) -> str:
        monkeypatch.setattr(
            Document, "hash_fraction", property(lambda self: places[self.text[: self.text.index(b" ")]])
        )
        monkeypatch.setattr(
            check, "documents", lambda file, reading: iter(Document(text=name + b" x" * 99, offset=0) for name in names)
        )
        return told_of(texts, tmp_path, sequence_length=16, eval_fraction=1e-6)

    assert "set data.eval_fraction = 0.251 or more" in told(b"middle", b"low", b"high")
    assert "data.eval_fraction =" not in told(b"low")  # then nothing would be left to train on
    assert "data.eval_fraction =" not in told(b"high", b"high")


def test_standard_error_is_as_before(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    texts = write(tmp_path / "texts", [b"words " * 99])
    check_data(*sections(texts, eval_fraction=0.0, eval_every=0, sequence_length=8), tmp_path / "corpus")
    os.write(2, b"heard")
    assert capfd.readouterr().err == "heard"


def test_no_more_is_encoded_than_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A split that has one token more than a sequence has enough; one that is full and no more has
    not."""
    texts, encoded = write(tmp_path / "texts", [b"x"]), list[bytes]()
    monkeypatch.setattr(check, "check_formats", lambda files, most, dtype: Counter[str]())
    monkeypatch.setattr(Document, "hash_fraction", property(lambda self: 0.1 if self.text.startswith(b"e") else 0.9))
    encode = ByteTokenizer.encode
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text: encoded.append(text) or encode(self, text))
    texts_of = [b"t2345678", b"e23", b"t234", b"tooo", b"e23456789"]
    monkeypatch.setattr(check, "documents", lambda file, reading: (Document(text=one, offset=1) for one in texts_of))
    check_data(*sections(texts, eval_fraction=0.5, sequence_length=8), tmp_path / "corpus")
    assert encoded == [b"t2345678", b"e23", b"t234", b"e23456789"] or encoded == [b"t2345678", b"e23", b"e23456789"]


def test_what_is_evaluated_on_is_looked_at_whether_or_not_it_is_evaluated(tmp_path: Path) -> None:
    """It is prepared in any case."""
    texts = write(tmp_path / "texts", [b"words " * 200])
    data, train = sections(texts, eval_every=0, eval=[{"path": str(tmp_path / "none.txt")}])
    with pytest.raises(JobError, match=r"none\.txt: no such file or folder") as caught:
        check_data(data, train, tmp_path / "out")
    assert caught.value.key == "data.eval"
    short = write(tmp_path / "short", [b"a"])
    check_data(*sections(texts, eval_every=0, eval=[{"path": str(short)}]), tmp_path / "out")


def test_a_text_that_no_fraction_shares_out_is_told_what_does(tmp_path: Path) -> None:
    texts = write(tmp_path / "texts", [b"words " * 200])
    told = told_of(texts, tmp_path, eval_fraction=0.999999)
    assert "set data.eval_fraction = 0 and train.eval_every = 0" in told and "lower" not in told
    check_data(*sections(texts, eval_fraction=0.0, eval_every=0), tmp_path / "out")
