"""How files are cut into documents, and which of these are for evaluation."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from plait.core.base.errors import DataError
from plait.train.data import documents as cutting
from plait.train.data.documents import (
    PIECE,
    SHARD_TOKENS,
    WHOLE,
    Document,
    documents,
    groups,
    source_fingerprint,
)
from plait.train.data.sources import SourceFile, find_files


def source(folder: Path, content: bytes, name: str = "text") -> SourceFile:
    (folder / name).write_bytes(content)
    return SourceFile(path=folder / name, name=name, bytes=len(content), mtime_ns=0)


def sizes(file: SourceFile) -> list[int]:
    return [len(document.text) for document in documents(file)]


def test_a_file_is_whole_up_to_a_size_and_then_in_pieces(tmp_path: Path) -> None:
    assert sizes(source(tmp_path, b"a" * WHOLE)) == [WHOLE]
    assert sizes(source(tmp_path, b"a" * (WHOLE + 1))) == [PIECE] * 4 + [1]
    assert sizes(source(tmp_path, b"a\n" * (WHOLE // 2 - 1) + b"a\n\n")) == [PIECE] * 4 + [1]
    assert sizes(source(tmp_path, b"")) == []


@pytest.mark.parametrize(
    ("text", "first"),
    [
        (b"a" * 7 + b"\n" + b"b" * 30, 8),  # after a line
        (b"a\nb\nc" + b"d" * 30, 4),  # after the last line of the piece
        (b"\n" + b"d" * 30, 1),
        (b"a" * 7 + "é".encode() + b"b" * 30, 7),  # before a character that would be cut
        (b"a" * 6 + "é".encode() + b"b" * 30, 6),  # and one that may go on, for all that its first bytes tell
        (b"a" * 5 + "é".encode() + b"b" * 30, 8),
        (b"a" * 6 + "€".encode() + b"b" * 30, 6),
        (b"a" * 5 + "€".encode() + b"b" * 30, 5),
        (b"a" * 4 + "€".encode() + b"b" * 30, 8),
        (b"a" * 5 + "\U0001f600".encode() + b"b" * 30, 5),
    ],
)
def test_long_files_are_cut_between_lines_or_else_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes, first: int
) -> None:
    monkeypatch.setattr(cutting, "WHOLE", 16)
    monkeypatch.setattr(cutting, "PIECE", 8)
    found = list(documents(source(tmp_path, text)))
    assert (len(found[0].text), found[0].offset, found[1].offset) == (first, 0, first)
    assert b"".join(document.text for document in found) == text


def test_what_is_left_of_a_piece_counts_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "WHOLE", 16)
    monkeypatch.setattr(cutting, "PIECE", 8)
    assert sizes(source(tmp_path, b"abcdef\n" * 3 + b"g" * 20)) == [7, 7, 7, 8, 8, 4]


def test_texts_are_handed_on_in_groups_of_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "GROUP", 10)
    files = [source(tmp_path, b"a" * size, f"{at}") for at, size in enumerate((4, 6, 9, 0, 3, 20, 2))]
    assert [[len(text.text) for text in group] for group in groups(files, 0)] == [[4, 6], [9, 3], [20], [2]]
    assert [text.text for text in next(groups(files[:2], 0))] == [b"aaaa", b"aaaaaa"]
    assert list(groups([], 0)) == []


def test_pieces_of_one_side_are_one_text_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "WHOLE", 16)
    monkeypatch.setattr(cutting, "PIECE", 8)
    content = b"".join(b"line %d\n" % number for number in range(40))
    files = [source(tmp_path, content, "1"), source(tmp_path, b"another", "2")]
    whole = [text for group in groups(files, 0) for text in group]
    assert [(text.text, text.begins) for text in whole] == [(content, True), (b"another", True)]
    assert [text.done for text in whole] == [len(content), len(content) + 7]
    cut = [text for group in groups(files[:1], 0.3) for text in group]
    assert b"".join(text.text for text in cut) == content
    assert len(cut) > 4
    assert all(one.split != next_.split and next_.begins for one, next_ in pairwise(cut))


@pytest.mark.parametrize("begins", [b"", b"short\n"])
def test_a_text_that_is_too_long_to_be_encoded_at_once_is_cut_at_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: bytes
) -> None:
    for name, size in (("WHOLE", 16), ("PIECE", 8), ("LONGEST", 100), ("PART", 30)):
        monkeypatch.setattr(cutting, name, size)
    content = begins + b"".join(b"line %d\n" % number for number in range(40))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": content.decode()}) + '\n{"text": "other"}\n')
    rows_file = find_files([tmp_path / "rows.jsonl"], "*")[0]
    for file in (source(tmp_path, content), rows_file):
        found = [text for text in next(groups([file], 0)) if text.text != b"other"]
        assert b"".join(text.text for text in found) == content
        assert [text.begins for text in found] == [True] + [False] * (len(found) - 1)
        assert all(len(text.text) <= 30 and text.text.endswith(b"\n") for text in found)


@pytest.mark.parametrize(
    ("text", "hash_fraction"), [(b"", 0.866604), (b"a", 0.262590), (b"always for evaluation 1", 0.270414)]
)
def test_a_document_has_its_place_in_every_version(text: bytes, hash_fraction: float) -> None:
    """A corpus that grows, prepared by a newer Plait, moves no document to the other side."""
    document = Document(text=text, offset=3)
    assert document.hash_fraction == replace(document, offset=0).hash_fraction == pytest.approx(hash_fraction, abs=1e-6)
    assert document.split(document.hash_fraction) == "train" and document.split(document.hash_fraction + 1e-9) == "eval"


def test_what_decides_a_corpus_is_in_its_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = source(tmp_path, b"aa", "1"), source(tmp_path, b"b", "2")
    base = source_fingerprint([one, other], 0.1)
    assert len(base) == 32 and base == source_fingerprint([replace(one, path=tmp_path, named=True), other], 0.1)
    assert base == source_fingerprint([one, other], 0.1, SHARD_TOKENS)
    changed = [
        source_fingerprint([other, one], 0.1), source_fingerprint([one], 0.1), source_fingerprint([one, other], 0.2),
        source_fingerprint([one, other], 0.1, 7), source_fingerprint([replace(one, name="x"), other], 0.1),
        source_fingerprint([one, other], 0.1, text_key="x"),
        source_fingerprint([replace(one, bytes=3), other], 0.1),
        source_fingerprint([replace(one, mtime_ns=1), other], 0.1),
    ]  # fmt: skip
    for name in ("WHOLE", "PIECE", "LONGEST", "PART"):
        with monkeypatch.context() as patch:
            patch.setattr(cutting, name, 9)
            changed.append(source_fingerprint([one, other], 0.1))
    assert base not in changed and len(set(changed)) == len(changed)


def test_a_file_that_is_gone_meanwhile_is_named(tmp_path: Path) -> None:
    file = source(tmp_path, b"text")
    file.path.unlink()
    with pytest.raises(DataError, match="text: cannot read this source file: No such file or directory; repair or"):
        list(documents(file))
