"""Every format gives the documents that the format's own library reads."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.base.errors import DataError
from plait.train.data import rows as module
from plait.train.data.documents import EMPTY, WITHOUT, Reading, documents
from plait.train.data.kinds import UNDECODABLE
from plait.train.data.prepare import CorpusSettings, prepare
from plait.train.data.sources import find_files
from tests.train.data.preparing import BYTES
from tests.train.data.preparing import documents as of_corpus

ODD = [
    "", "a", "two\r\nlines\r\n", "nul \0 inside", "\U0001f9d1\U0001f3fd\u200d\U0001f680", "line \u2028 end \x85",
    '"quoted", with, commas', "\ttabs\t", " leading and trailing ", "\n\n", "价格 é ß", "{}", "[1]", "null",
    "\ufeffmark",
    "back\\slash \\n", "duplicate", "duplicate", "\x1c\x1d\x1e", "x" * 200_000, "long line\n" * 50_000, "'", '"', "\\",
    "\u202eright to left", "e\u0301", "\ud7ff\ue000\ufffd", "\r", "\n", " ",
]  # fmt: skip


def _csv(texts: list[str], delimiter: str = ",") -> bytes:
    target = io.StringIO(newline="")
    writer = csv.writer(target, delimiter=delimiter)
    writer.writerows([["id", "text"], *([1, text] for text in texts)])
    return target.getvalue().encode()


def _table(texts: list[str]) -> pa.Table:
    return pa.table({"id": [1] * len(texts), "text": texts})


def _parquet(texts: list[str]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(_table(texts), sink, row_group_size=7, compression="zstd")
    return sink.getvalue().to_pybytes()


def _arrow(texts: list[str], new: Callable[..., Any]) -> bytes:
    sink = pa.BufferOutputStream()
    with new(sink, _table(texts).schema) as writer:
        writer.write_table(_table(texts), max_chunksize=7)
    return sink.getvalue().to_pybytes()


def _lines(texts: list[str], **options: Any) -> bytes:
    return "".join(json.dumps({"id": 1, "text": text}, **options) + "\n" for text in texts).encode()


WRITE: dict[str, Callable[[list[str]], bytes]] = {
    "a.jsonl": _lines,
    "utf8.jsonl": lambda texts: _lines(texts, ensure_ascii=False),
    "crlf.jsonl": lambda texts: _lines(texts).replace(b"\n", b"\r\n"),
    "mark.jsonl": lambda texts: b"\xef\xbb\xbf" + _lines(texts) + b"\n  \n",
    "marks.jsonl": lambda texts: b"".join(b"\xef\xbb\xbf" + _lines(part) for part in (texts[:9], texts[9:])),
    "strings.jsonl": lambda texts: "\n".join(json.dumps(text) for text in texts).encode(),
    "lines.json": _lines,
    "list.json": lambda texts: json.dumps([{"text": text} for text in texts], ensure_ascii=False).encode(),
    "printed.json": lambda texts: json.dumps([{"text": text} for text in texts], indent=3).encode(),
    "values.json": lambda texts: b"".join(json.dumps({"text": text}, indent=1).encode() for text in texts),
    "strings.json": lambda texts: json.dumps(texts).encode(),
    "a.csv": _csv,
    "a.parquet": _parquet,
    "file.arrow": lambda texts: _arrow(texts, pa.ipc.new_file),
    "stream.arrow": lambda texts: _arrow(texts, pa.ipc.new_stream),
    "a.jsonl.gz": lambda texts: gzip.compress(_lines(texts)) + gzip.compress(_lines([])),
    "a.json.xz": lambda texts: lzma.compress(_lines(texts)),
    "a.csv.bz2": lambda texts: bz2.compress(_csv(texts)),
    "a.tsv.zst": lambda texts: pa.compress(_csv(texts, "\t"), "zstd", asbytes=True),
    "no-ending": _lines,
    "part.jsonl-00000-of-00002": _lines,
}


def read(path: Path, content: bytes, **reading: Any) -> list[str]:
    path.write_bytes(content)
    file = find_files([path], "*")[0]
    return [document.text.decode() for document in documents(file, Reading(**reading))]


@pytest.mark.parametrize("name", WRITE)
def test_a_format_gives_the_texts_that_were_written(tmp_path: Path, name: str) -> None:
    assert read(tmp_path / name, WRITE[name](ODD)) == [text for text in ODD if text]


@pytest.mark.parametrize("name", ["a.jsonl", "list.json", "a.csv", "a.parquet", "stream.arrow", "a.jsonl.gz"])
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), min_size=1, max_size=20))
@settings(max_examples=25)
def test_any_texts_come_back(tmp_path_factory: pytest.TempPathFactory, name: str, texts: list[str]) -> None:
    assert read(tmp_path_factory.mktemp("any") / name, WRITE[name](texts)) == [text for text in texts if text]


def test_a_corpus_of_rows_says_where_each_document_ends(tmp_path: Path) -> None:
    texts = [text for text in ODD if len(text) < 1000]
    (tmp_path / "a.jsonl").write_bytes(_lines(texts))
    said: list[str] = []
    corpus = prepare([tmp_path / "a.jsonl"], BYTES, tmp_path / "c", CorpusSettings(eval_fraction=0), say=said.append)
    kept = [text.encode() for text in texts if text]
    assert of_corpus(corpus, "train") == kept
    assert corpus.index.splits["train"].documents == len(kept)
    ends = corpus.ends("train", 0, corpus.num_tokens("train"))
    assert ends.tolist() == [sum(len(text) + 1 for text in kept[: at + 1]) for at in range(len(kept))]
    assert said == [f"note: passed over 1 empty document (the first: {tmp_path / 'a.jsonl'}: line 1)"]


def test_values_longer_than_a_block_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 5)
    texts = ["é" * size + "\U0001f600" for size in range(40)]
    content = json.dumps([{"text": text} for text in texts], ensure_ascii=False).encode()
    assert read(tmp_path / "a.json", content) == texts


def test_bytes_that_are_not_utf8_are_counted(tmp_path: Path) -> None:
    good = _lines(["good words " * 20] * 20)
    for name, bad in (("a.jsonl", b'{"text": "b\xffd\xe9"}\n'), ("a.json", b'{"text": "b\xffd\xe9"}')):
        reading = Reading()
        assert read(tmp_path / name, good + bad, over=reading.over)[-1] == "b\ufffdd\ufffd"
        assert reading.over.counts == {UNDECODABLE: 2}
    reading = Reading()
    assert read(tmp_path / "a.csv", _csv(["good words " * 90]) + b"1,b\xffd\n", over=reading.over)[-1] == "b\ufffdd"
    assert reading.over.counts == {UNDECODABLE: 1}
    array = pa.array([b"good words " * 90, b"b\xffd"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": array}), tmp_path / "a.parquet")
    reading = Reading()
    assert read(tmp_path / "a.parquet", (tmp_path / "a.parquet").read_bytes(), over=reading.over)[-1] == "b\ufffdd"
    assert reading.over.counts == {UNDECODABLE: 1}


def test_halves_of_surrogate_pairs_are_counted(tmp_path: Path) -> None:
    """JSON spells them, UTF-8 has none."""
    reading = Reading()
    content = _lines(["good words " * 20] * 20) + b'{"text": "half \\ud83d, whole \\ud83d\\ude00"}\n'
    assert read(tmp_path / "a.jsonl", content, over=reading.over)[-1] == "half \ufffd, whole \U0001f600"
    assert reading.over.counts == {UNDECODABLE: 1}


def test_too_many_bytes_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    rng = random.Random(1)
    words = _lines(["good words " * 2000] * 30)
    noise = b'{"text": "' + bytes(rng.choice(range(128, 256)) for _ in range(100_000)) + b'"}\n'
    with pytest.raises(DataError, match=r"a\.jsonl: is no text in UTF-8"):
        read(tmp_path / "a.jsonl", words + noise + words)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"\n', "line 2 is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n[1, 2]\n', "line 2 is [1, 2], neither an object nor a text"),
        ("a.jsonl", b'{"text": "a"}\n' + b"[" * 100_000 + b"\n", "line 2 is nested too deeply"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ["b"]}\n', "line 2: 'text' is ['b'], no text"),
        ("a.jsonl", b'{"text": "a"}\n{"text": null}\n', "1 of 2 rows have no text"),
        ("a.jsonl", b'{"text": "a"}\n{"id": 3}\n', "1 of 2 rows have no text"),
        ("a.json", b'[{"text": "a"}, {"text": "b"}', "the list is cut off after value 2"),
        ("a.json", b'[{"text": "a"} {"text": "b"}]', "after value 1 of the list stands '{', no comma"),
        ("a.json", b'[{"text": "a"}] x', "something stands behind the list"),
        ("a.json", b'{"rows": [{"text": "a"}]}', "its rows have no 'text', but 'rows'"),
        ("a.json", b'[{"text": "a"}, ' + b"[" * 100_000, "value 2 is nested too deeply"),
        ("a.csv", b"id,text\n1,a\n2,b,c\n", "line 3: 3 fields, and the header has 2"),
        ("a.csv", b"text,text\n1,a\n", "the header has 'text' twice"),
        ("a.csv", b'id,text\n1,"a\n', "line 2: unexpected end of data: a field that begins with a quote"),
        ("a.tsv", b'id\ttext\n1\ta\n2\t"a\nb"\n3\t"open\n4\td\n5\te\n', "lines 5 to 7: unexpected end of data"),
        ("a.csv", b'id,text\r\n"1","a ""b"""\r\n2,"open\r\n3,"c"\r\n', "lines 3 to 4: ',' expected after"),
        ("a.csv", b'id,text\n1,a "b" c\n2,"b" c\n', "line 3: ',' expected after"),
        ("a.csv", b'id,text\n1,"a\nb,3"\n2,"c\nd",4\n', "lines 4 to 5: 3 fields, and the header has 2"),
        ("a.csv", b"id,text\r1,a\r2,b\r", "a line ends with CR alone; write line ends anew"),
        ("a.csv", b"text;id\nsome words;3\n", "not separated by what its ending says: commas in .csv"),
        ("a.tsv", b"text,id\nsome words,3\n", "not separated by what its ending says: commas in .csv, tabs in .tsv"),
        ("a.csv", b"title; or so\nwords\n", "set data.text_key = 'title; or so'"),
        ("a.jsonl", b'{"text": [{"role": "user", "content": "a"}]}\n', 'set data.rows = "chats" and data.messages_key'),
        ("a.jsonl", b'{"text": [5, 7]}\n', "token ids are read from .npy, and from .bin with .idx"),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": "a"}]}\n', 'set data.rows = "chats", or take'),
        (
            "a.jsonl",
            b'{"id": 1, "conversations": [{"from": "human"}]}\n',
            "set data.rows = \"chats\" and data.messages_key = 'conversations'",
        ),
        ("a.tsv", b"id,text\n1,a\n", "its rows have no 'text', but 'id,text'"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path / name, content)
    assert str(caught.value).startswith(f"{tmp_path / name}: ")
    assert says in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_few_rows_without_text_are_counted(tmp_path: Path) -> None:
    reading = Reading()
    content = _lines(["words"] * 200) + b'{"text": null}\n{"other": 1}\n'
    assert len(read(tmp_path / "a.jsonl", content, over=reading.over)) == 200
    assert reading.over.counts == {WITHOUT: 2}
    assert EMPTY not in reading.over.counts


@given(flips=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=4), cut=st.floats(0, 1))
@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "stream.arrow", "a.jsonl.gz", "list.json", "a.csv"])
def test_a_damaged_file_ends_in_one_paragraph(
    tmp_path_factory: pytest.TempPathFactory, name: str, flips: list[tuple[float, int]], cut: float
) -> None:
    content = bytearray(WRITE[name](["some words", "é", "other words " * 20] * 6))
    for place, value in flips:
        content[int(place * (len(content) - 1))] = value
    path = tmp_path_factory.mktemp("damaged") / name
    told = refusal(path, bytes(content[: max(1, int(len(content) * max(cut, 0.5)))]))
    assert told is None or (str(path) in told and "\n" not in told)


def refusal(path: Path, content: bytes) -> str | None:
    """What is said of a file that is refused; every other error ends the test."""
    try:
        read(path, content)
    except DataError as error:
        return str(error)
    return None
