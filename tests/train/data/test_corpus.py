"""Corpora on disk: every kind of damage is named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.base.errors import DataError
from plait.train.data import corpus as module
from plait.train.data.corpus import VERIFIED_FILE, Corpus, Index
from tests.train.data.conftest import make


def test_a_folder_without_index_is_not_a_corpus(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"index\.json: no such file, so .* is not a prepared corpus; prepare it first"):
        Corpus.open(tmp_path)


def _without(key: str) -> Callable[[dict], object]:
    return lambda index: {name: value for name, value in index.items() if name != key}


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda index: {**index, "version": 3}, "version 3, and this Plait reads version 2"),
        (lambda index: {**index, "format": "x"}, "format is 'x'"),
        (lambda index: {**index, "dtype": "float"}, 'dtype: "float" is not allowed. Allowed: "uint16" or "uint32"'),
        (lambda index: [], "not a usable corpus index"),
        (lambda index: {**index, "splits": 3}, "not a usable corpus index"),
        (_without("vocab"), "vocab: is missing"),
        (
            lambda index: index["splits"]["train"]["shards"][0].update(tokens=7) or index,
            "shard 'train-00000.bin' is described wrongly",
        ),
        (
            lambda index: index["splits"]["train"]["shards"][0].update(file="../train-00000.bin") or index,
            "shard '../train-00000.bin' stands where 'train-00000.bin' belongs",
        ),
        (
            lambda index: index["splits"]["train"]["shards"].append(index["splits"]["train"]["shards"][0]) or index,
            "shard 'train-00000.bin' stands where 'train-00001.bin' belongs",
        ),
        (lambda index: {**index, "vocab": 70_000}, "vocab is 70000 of uint16"),
        (lambda index: {**index, "vocab": -1}, "vocab: -1 is not allowed"),
        (lambda index: {**index, "end_of_text": 257}, "and end_of_text 257"),
        (lambda index: {**index, "tokenizer": None}, "tokenizer: None is not allowed. Allowed: a text"),
    ],
)
def test_a_wrong_index_is_explained(tmp_path: Path, edit: Callable[[dict], object], message: str) -> None:
    index = make(tmp_path, 50).folder / "index.json"
    index.write_text(json.dumps(edit(json.loads(index.read_text()))))
    with pytest.raises(DataError, match=r"index\.json: ") as caught:
        Corpus.open(index.parent)
    assert message in str(caught.value)
    assert "prepare the corpus again" in str(caught.value)


WRONG = st.one_of(
    st.none(), st.booleans(), st.floats(), st.integers(), st.integers(10**30, 10**40), st.text(max_size=20),
    st.just("../../etc/passwd"), st.just("train-00000.bin\0"), st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in parsed JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, each in inner for place in _places(each, (*at, key)))]


@given(data=st.data())
@settings(max_examples=150)
def test_no_index_with_a_wrong_value_ends_in_anything_but_one_paragraph(
    tmp_path_factory: pytest.TempPathFactory, corpora: Callable[[int], Corpus], data: st.DataObject
) -> None:
    """Anywhere in the index, any other value: refused by one paragraph, or it is of no
    consequence."""
    whole = json.loads((corpora(100).folder / "index.json").read_text())
    place = data.draw(st.sampled_from(_places(whole)))
    wrong = data.draw(WRONG)
    changed: Any = wrong
    if place:
        changed = json.loads(json.dumps(whole))
        inner = changed
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = wrong
    folder = tmp_path_factory.mktemp("wrong")
    for file in ("train-00000.bin", "train.ends"):
        (folder / file).write_bytes((corpora(100).folder / file).read_bytes())
    (folder / "index.json").write_text(json.dumps(changed))
    if refusal := _refusal(folder):
        assert refusal.startswith(str(folder))
        assert "\n" not in refusal
        assert len(refusal) < 600
    else:
        opened = Corpus.open(folder)
        assert json.loads(opened.index.to_json()).keys() == whole.keys()
        assert opened.read("train", 0, 100).max() < opened.index.vocab


def _refusal(folder: Path) -> str:
    """Why a corpus is refused, nothing if it is not; every other error ends the test."""
    try:
        Corpus.open(folder).verify()
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff\xfe{", "not a usable corpus index"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b'{"version": ' + b"9" * 5000 + b"}", "not a usable corpus index"),
        (b"", "not a usable corpus index"),
    ],
    ids=["not UTF-8", "lists", "tables", "huge number", "empty"],
)
def test_a_hostile_index_is_one_paragraph(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "index.json").write_bytes(content)
    with pytest.raises(DataError, match=rf"index\.json: .*{says}"):
        Corpus.open(tmp_path)


def test_tokens_beyond_the_vocabulary_are_found(tmp_path: Path) -> None:
    folder = make(tmp_path, 100).folder
    values = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**values, "vocab": 200, "end_of_text": 0}))
    with pytest.raises(DataError, match=r"train-00000\.bin: has token 256 and the vocabulary ends at 199"):
        Corpus.open(folder).verify()


# When a start compares checksums


def _flip(file: Path) -> None:
    """Change one bit, and neither size nor times nor inode."""
    status = file.stat()
    with open(file, "r+b") as stream:
        stream.seek(17)
        byte = stream.read(1)[0]
        stream.seek(17)
        stream.write(bytes([byte ^ 1]))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_corpus_of_ordinary_size_is_read_at_every_start(tmp_path: Path) -> None:
    corpus = make(tmp_path, 100, shard_tokens=40)
    corpus.verify_changed()
    _flip(corpus.folder / "train-00001.bin")
    with pytest.raises(DataError, match=r"train-00001\.bin: damaged"):
        Corpus.open(corpus.folder).verify_changed()
    assert not (corpus.folder / VERIFIED_FILE).exists()


def test_of_a_large_corpus_only_what_changed_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY_START", 0)
    read: list[str] = []
    verify = Corpus._verify

    def counted(self: Corpus, file: str, *more: Any) -> None:
        read.extend([file] if file.endswith(".bin") else [])
        verify(self, file, *more)

    monkeypatch.setattr(Corpus, "_verify", counted)
    folder = make(tmp_path, 100, shard_tokens=40).folder
    assert read == [], "their checksums were made when they were written"
    os.utime(folder / "train-00001.bin")
    Corpus.open(folder).verify_changed()
    assert read == ["train-00001.bin"]
    Corpus.open(folder).verify_changed()
    assert read == ["train-00001.bin"], "found intact, and remembered"
    for useless in (b"", b"[1]", b"[" * 100_000, b'{"train-00000.bin": 3}'):
        (folder / VERIFIED_FILE).write_bytes(useless)
        read.clear()
        Corpus.open(folder).verify_changed()
        assert read == [f"train-0000{number}.bin" for number in range(3)]
    copy = folder.rename(tmp_path / "moved")
    (copy / "train-00002.bin").write_bytes((copy / "train-00002.bin").read_bytes()[::-1])
    with pytest.raises(DataError, match=r"train-00002\.bin: damaged"):
        Corpus.open(copy).verify_changed()


def test_a_folder_that_cannot_be_written_is_read_at_every_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path, 100).folder

    def refuse(path: Path) -> None:
        raise OSError("read-only file system")

    monkeypatch.setattr(module, "EVERY_START", 0)
    monkeypatch.setattr(module, "replacing", refuse)
    Corpus.open(folder).verify_changed()
    assert [path.name for path in sorted(folder.iterdir())] == ["index.json", "train-00000.bin", "train.ends"]
    assert Index.read(folder / "index.json") == Corpus.open(folder).index
