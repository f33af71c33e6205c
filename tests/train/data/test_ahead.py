"""What ranks would find late is refused before they start: damage at the end of files, tokens that
there are not."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.core.base.errors import DataError, JobError
from plait.core.job.plan import RunSettings
from plait.core.job.settings import DataSection, TrainSection
from plait.core.job.spec import Job
from plait.train.data import check, documents
from plait.train.data.check import check_data
from plait.train.data.corpus import Corpus
from plait.train.data.rows import rows
from plait.train.data.sequences import Batches
from plait.train.data.sets import prepare_corpus
from plait.train.data.stream import Stream
from tests.support.chats import CHATML, say, tokenizer_folder
from tests.train.data.preparing import take

TRAIN = TrainSection(eval_every=0)
GOOD = json.dumps({"messages": say("a", "b"), "text": "a b c d e f g"}) + "\n"


def chats(folder: Path, name: str, content: bytes, **more: Any) -> DataSection:
    """A job's data: one file."""
    (folder / name).write_bytes(content)
    tokenizer = tokenizer_folder(folder / "base", CHATML) / "tokenizer.json"
    return DataSection(text=str(folder / name), tokenizer=str(tokenizer), sequence_length=4, **more)


@pytest.mark.parametrize("rows", ["chats", "text"])
@pytest.mark.parametrize("look", [1 << 20, 100], ids=["all", "the last line"])
def test_a_line_that_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: str, look: int) -> None:
    monkeypatch.setattr(check, "ROWS", look)
    content = (GOOD * 50).encode()
    check_data(chats(tmp_path, "good.jsonl", content, rows=rows), TRAIN, tmp_path / "out")
    with pytest.raises(JobError, match=r"line.* is not JSON"):
        check_data(chats(tmp_path, "cut.jsonl", content[:-9], rows=rows), TRAIN, tmp_path / "out")


def test_a_row_that_is_no_chat_and_a_file_that_is_cut_off(tmp_path: Path) -> None:
    content = (GOOD * 50 + '{"messages": "x"}\n').encode()
    with pytest.raises(JobError, match=r"line 51.*neither a list nor JSON"):
        check_data(chats(tmp_path, "odd.jsonl", content, rows="chats"), TRAIN, tmp_path / "out")
    with pytest.raises(JobError, match="damaged or cut off"):
        check_data(chats(tmp_path, "a.jsonl.gz", gzip.compress(content)[:-9], rows="chats"), TRAIN, tmp_path / "out")


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_text_that_turns_binary_between_the_places_that_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, packed: bool
) -> None:
    """As the preparation would refuse it, after minutes; of more text than is looked at it still
    does."""
    text = b"words and words in a line of a text\n" * 120_000
    bad = text[: 3 << 20] + bytes(200_000) + text[3 << 20 :]
    names = ("good.txt.gz", "bad.txt.gz") if packed else ("good.txt", "bad.txt")
    for name, content in zip(names, (text, bad), strict=True):
        (tmp_path / name).write_bytes(gzip.compress(content, 1) if packed else content)
    good, damaged = (DataSection(text=str(tmp_path / name), sequence_length=16) for name in names)
    check_data(good, TRAIN, tmp_path / "out")
    with pytest.raises(JobError, match=r"bad\.txt.*of its bytes are zero"):
        check_data(damaged, TRAIN, tmp_path / "out")
    with pytest.raises(DataError, match=r"bad\.txt.*of its bytes are zero"):
        prepare_corpus(damaged, tmp_path / "corpus", lambda _: None)
    monkeypatch.setattr(check, "TEXTS", len(text) // 2)
    monkeypatch.setattr(check, "ROWS", 1000)
    check_data(damaged, TRAIN, tmp_path / "out")


@pytest.mark.parametrize("most", [1 << 20, 40], ids=["all", "stretches"])
@pytest.mark.parametrize("at", [0, -1])
def test_a_token_that_there_is_not_in_a_later_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, at: int
) -> None:
    monkeypatch.setattr(check, "TOKENS", most)
    monkeypatch.setattr(check, "STRETCH", 8)
    tokens = np.arange(2000, dtype=np.uint16) % 250
    for number in range(3):
        np.save(tmp_path / f"{number}.npy", tokens)
    data = DataSection(text=tuple(str(tmp_path / f"{number}.npy") for number in range(3)), sequence_length=16)
    check_data(data, TRAIN, tmp_path / "out")
    tokens[at] = 300
    np.save(tmp_path / "2.npy", tokens)
    with pytest.raises(JobError, match=r"2\.npy: has the token 300, and data\.tokenizer has 257"):
        check_data(data, TRAIN, tmp_path / "out")


def test_tokens_are_no_chats(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(200))
    data = chats(tmp_path, "b.jsonl", GOOD.encode(), rows="chats").model_copy(update={"text": str(tmp_path / "a.npy")})
    with pytest.raises(JobError, match="has tokens, and chats are made of text"):
        check_data(data, TRAIN, tmp_path / "out")


def test_chats_and_texts_in_one_mixture(tmp_path: Path) -> None:
    """Each source as it is alone, with masks; texts count whole."""
    tokenizer = tokenizer_folder(tmp_path / "base", CHATML) / "tokenizer.json"
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"messages": say(f"{n}?", "so " * n)}) + "\n" for n in range(40))
    )
    (tmp_path / "p.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}?", "completion": "b"}) + "\n" for n in range(40))
    )
    (tmp_path / "t.txt").write_text("some text of some length. " * 99)
    sources = [
        {"path": str(tmp_path / "a.jsonl"), "rows": "chats", "weight": 0.5},
        {"path": str(tmp_path / "p.jsonl"), "rows": "pairs", "weight": 0.25},
        {"path": str(tmp_path / "t.txt"), "weight": 0.25},
    ]
    shapes = {"family": "gpt", "num_layers": 1, "hidden": 8, "num_heads": 2}
    job = Job.from_dict(
        {
            "model": shapes,
            "train": {"global_batch_size": 4, "eval_every": 0, "steps": 10},
            "data": {"sources": sources, "tokenizer": str(tokenizer), "sequence_length": 64, "eval_fraction": 0.0},
        }
    )
    assert job.data.masks
    check_data(job.data, job.train, tmp_path / "corpus")
    prepare_corpus(job.data, tmp_path / "corpus", lambda _: None)
    train = Stream.open(RunSettings.of(job), tmp_path / "corpus").train
    found = train.take(0, 40)
    assert found.starts is not None and int((found.targets >= 0).sum()) == train.targets(0, 40)
    assert int(found.tokens.max()) < 320 and int(found.targets.max()) < 320
    assert [share.sequences for share in train.shares(40)] == [20, 10, 10]
    alone = Batches(Corpus.open(tmp_path / "corpus" / "t.txt"), "train", sequence=64, masks=True)
    texts = [number for number in range(40) if (found.targets[number] >= 0).sum() >= 63]
    assert found.targets[texts[0]].tolist() in take(alone, 0, alone.windows).targets.tolist()


def test_rows_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, though the first fill a sequence; of chats only those are rendered."""
    read = list[str]()

    def counted(file: Any, *told: Any) -> Any:
        for row in rows(file, *told):
            read.append(row.where)
            yield row

    monkeypatch.setattr(documents, "rows", counted)
    for kind in ("chats", "text"):
        check_data(chats(tmp_path, f"{kind}.jsonl", (GOOD * 50).encode(), rows=kind), TRAIN, tmp_path / "out")
        assert read == [f"line {number}" for number in range(1, 51)]
        read.clear()


def test_a_corpus_of_tokens_that_is_too_small_is_counted_again(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100))
    short = DataSection(text=str(tmp_path / "a.npy"), sequence_length=16, eval_fraction=0.0)
    prepare_corpus(short, tmp_path / "out", lambda _: None)
    with pytest.raises(JobError, match="100 tokens, are for training"):
        check_data(short.model_copy(update={"sequence_length": 128}), TRAIN, tmp_path / "out")
