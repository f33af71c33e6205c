"""Fifty odd documents, in every format, give the tokens that its own library gives in a few lines."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer as Library

from plait.train.data.prepare import CorpusSettings, prepare
from plait.train.data.tokenizer import FileTokenizer, Tokenizer
from tests.support.chats import tokenizer_folder
from tests.train.data.preparing import BYTES
from tests.train.data.test_rows import ODD
from tests.train.data.test_saved import save
from tests.train.data.test_token_files import write_megatron

MORE = [
    b"", b"b", b"\x00", b"no utf-8: \xff\xc3 \xe9t\xe9, and so on", b"a text that is cut off \xf0\x9f\x98",
    b"\xef\xbb\xbfa mark",
    "".join(f"{number} lines of some length, \u00e9\r\n" for number in range(160_000)).encode(),  # 5 MB
    b"a,b;c\td|e", b"'single' \"double\" `back`", b"\\u0041 \\x41 &amp; %41", b"{\"text\": \"a\"", b"[[[[", b"}]",
    b"-", b"NaN", b"1e309", b"true", b"\x7f\x01\x08\x0c", b"\r\n\r\n", b"same", b"same",
]  # fmt: skip
DOCUMENTS = [text.encode() for text in ODD] + MORE[:20]
assert len(DOCUMENTS) == 50
assert max(map(len, DOCUMENTS)) > 5_000_000


def as_json(document: bytes) -> str:
    """A row whose bytes are the document's, also those that are no UTF-8."""
    return json.dumps({"id": 7, "text": document.decode(errors="surrogateescape")}, ensure_ascii=False)


def raw(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def lines(documents: Sequence[bytes]) -> bytes:
    return raw("".join(as_json(one) + "\n" for one in documents))


def listed(documents: Sequence[bytes]) -> bytes:
    return raw("[" + ",\n".join(map(as_json, documents)) + "]")


def separated(documents: Sequence[bytes], delimiter: str = ",") -> bytes:
    target = io.StringIO(newline="")
    rows = [[7, one.decode(errors="surrogateescape")] for one in documents]
    csv.writer(target, delimiter=delimiter).writerows([["id", "text"], *rows])
    return raw(target.getvalue())


def table(documents: Sequence[bytes]) -> pa.Table:
    return pa.table({"id": [7] * len(documents), "text": pa.array(documents, pa.binary()).view(pa.string())})


def parquet(documents: Sequence[bytes]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table(documents), sink, row_group_size=9, compression="snappy")
    return sink.getvalue().to_pybytes()


def arrow(documents: Sequence[bytes], new: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with new(sink, table(documents).schema) as writer:
        writer.write_table(table(documents), max_chunksize=9)
    return sink.getvalue().to_pybytes()


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def of_table(found: pa.Table) -> list[str]:
    return [one.decode(errors="replace") for one in found["text"].cast(pa.binary()).to_pylist()]


def of_lines(stream: IO[bytes]) -> list[str]:
    return [json.loads(line.decode(errors="replace"))["text"] for line in stream]


def of_list(stream: IO[bytes]) -> list[str]:
    return [row["text"] for row in json.loads(stream.read().decode(errors="replace"))]


def of_fields(stream: IO[bytes], delimiter: str = ",") -> list[str]:
    csv.field_size_limit(1 << 30)
    text = io.TextIOWrapper(stream, errors="replace", newline="")
    return [row["text"] for row in csv.DictReader(text, delimiter=delimiter)]


def of_arrow(stream: IO[bytes], open_: Any) -> list[str]:
    return of_table(open_(stream.read()).read_all())


@dataclass(frozen=True)
class Form:
    """How documents become a file, and a script with the format's own library that reads it."""

    write: Callable[[Sequence[bytes]], bytes]
    read: Callable[[IO[bytes]], list[str]]


JSON_LINES, FIELDS = Form(lines, of_lines), Form(separated, of_fields)
FORMS = {
    "a.jsonl": JSON_LINES,
    "a.csv": FIELDS,
    "a.parquet": Form(parquet, lambda stream: of_table(pq.read_table(pa.BufferReader(stream.read())))),
    "a.ndjson": JSON_LINES,
    "a.json": Form(listed, of_list),
    "a.tsv": Form(partial(separated, delimiter="\t"), partial(of_fields, delimiter="\t")),
    "file.arrow": Form(partial(arrow, new=pa.ipc.new_file), partial(of_arrow, open_=pa.ipc.open_file)),
    "stream.arrow": Form(partial(arrow, new=pa.ipc.new_stream), partial(of_arrow, open_=pa.ipc.open_stream)),
}
PACK = {"gz": gzip.compress, "xz": partial(lzma.compress, preset=0), "bz2": bz2.compress, "zst": zstd}
UNPACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.decompress, ".xz": lzma.decompress, ".bz2": bz2.decompress,
    ".zst": lambda content: pa.input_stream(pa.BufferReader(content), "zstd").read(),
}  # fmt: skip
PACKED = [f"{name}.{ending}" for name in ("a.jsonl", "a.json", "a.csv", "a.tsv") for ending in PACK]


def unpacked(path: Path) -> bytes:
    return UNPACK.get(path.suffix, bytes)(path.read_bytes())


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a byte-level tokenizer."""
    return tokenizer_folder(tmp_path_factory.mktemp("tokenizer")) / "tokenizer.json"


class Script:
    """The tokens of texts, each with end-of-text behind it, by ``tokenizers`` alone; kept for the next
    format."""

    def __init__(self, file: Path | None) -> None:
        self.own = Library.from_file(str(file)) if file else None
        self.end = int(self.own.token_to_id("</s>") or 0) if self.own else 256
        self._known: dict[str, np.ndarray] = {}

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        return np.concatenate([np.append(self.ids(text), self.end) for text in texts if text])

    def ids(self, text: str) -> np.ndarray:
        if text not in self._known:
            library = self.own
            found = (
                library.encode(text, add_special_tokens=False).ids if library else np.frombuffer(text.encode(), "u1")
            )
            self._known[text] = np.array(found, np.int64)
        return self._known[text]


Ways = tuple[Tokenizer, Script]


@pytest.fixture(scope="module")
def pairs(pieces: Path) -> Ways:
    return FileTokenizer(pieces), Script(pieces)


@pytest.fixture(params=["byte pairs", "bytes"])
def ways(request: pytest.FixtureRequest, pairs: Ways) -> Ways:
    """Plait's tokenizer, and the script's."""
    return pairs if request.param == "byte pairs" else (BYTES, Script(None))


def tokens(source: Path, tokenizer: Tokenizer) -> np.ndarray:
    settings = CorpusSettings(pattern="*", eval_fraction=0)
    corpus = prepare([source], tokenizer, source.parent / "corpus", settings, say=lambda _: None)
    return corpus.read("train", 0, corpus.num_tokens("train"))


def assert_equal(found: np.ndarray, wanted: np.ndarray) -> None:
    """Without printing millions of numbers."""
    assert len(found) == len(wanted)
    assert not (found != wanted).any()


def first_in_suite(names: Iterable[str], count: int) -> list[Any]:
    """Each reads megabytes; the others are contract tests."""
    return [pytest.param(one, marks=() if at < count else pytest.mark.contract) for at, one in enumerate(names)]


@pytest.mark.parametrize("name", first_in_suite(FORMS, 3))
def test_a_file_of_fifty_documents(tmp_path: Path, ways: Ways, name: str) -> None:
    check_file(tmp_path, ways, name)


@pytest.mark.parametrize("name", first_in_suite(PACKED, 4))
def test_a_compressed_file_of_fifty_documents(tmp_path: Path, name: str) -> None:
    check_file(tmp_path, (BYTES, Script(None)), name)


def check_file(tmp_path: Path, ways: Ways, name: str) -> None:
    tokenizer, script = ways
    inner, _, packing = name.rpartition(".") if name in PACKED else (name, "", "")
    content = FORMS[inner].write(DOCUMENTS)
    (tmp_path / name).write_bytes(PACK[packing](content) if packing else content)
    texts = FORMS[inner].read(io.BytesIO(unpacked(tmp_path / name)))
    assert len(texts) == 50 and texts == [one.decode(errors="replace") for one in DOCUMENTS]
    assert_equal(tokens(tmp_path / name, tokenizer), script(texts))


@pytest.mark.parametrize("packing", first_in_suite(["", *PACK], 2))
def test_a_folder_of_fifty_texts(tmp_path: Path, ways: Ways, packing: str) -> None:
    """The byte tokenizer keeps what is no UTF-8; so would ``read_bytes``."""
    tokenizer, script = ways
    (tmp_path / "in").mkdir()
    for number, one in enumerate(DOCUMENTS):
        one = one if one != b"\x00" else b"c"  # a file of nothing else is no text
        name = f"{number:02}.txt{'.' + packing if packing else ''}"
        (tmp_path / "in" / name).write_bytes(PACK[packing](one) if packing else one)
    found = tokens(tmp_path / "in", tokenizer)
    contents = [unpacked(path) for path in sorted((tmp_path / "in").iterdir())]
    if script.own:
        assert_equal(found, script([one.decode(errors="replace") for one in contents]))
    else:
        parts = [np.append(np.frombuffer(one, "u1").astype(np.int64), 256) for one in contents if one]
        assert_equal(found, np.concatenate(parts))


def test_a_saved_folder_of_fifty_documents(tmp_path: Path) -> None:
    """As Hugging Face datasets saves one: its files in the order of ``state.json``."""
    texts = [one.decode(errors="replace") for one in DOCUMENTS]
    folder = save(tmp_path / "saved", [texts[:9], texts[9:30], texts[30:]])
    names = [one["filename"] for one in json.loads((folder / "state.json").read_text())["_data_files"]]
    found = [text for name in names for text in of_arrow(io.BytesIO((folder / name).read_bytes()), pa.ipc.open_stream)]
    assert sorted(found) == sorted(texts) and found != texts
    assert_equal(tokens(folder, BYTES), Script(None)(found))


def test_megatrons_files_and_numpys(tmp_path: Path, ways: Ways) -> None:
    tokenizer, script = ways
    texts = [one.decode(errors="replace") for one in DOCUMENTS]
    flat, ids = script(texts), [[*script.ids(text), script.end] for text in texts if text]
    for dtype in ("uint16", "int32"):
        path = write_megatron(tmp_path / f"{dtype}_text_document", [[one] for one in ids], dtype)
        assert_equal(tokens(path, tokenizer), np.fromfile(path, dtype))
        assert_equal(tokens(path, tokenizer), flat)
    for dtype in ("<u2", ">u2", "<i8", ">i4"):
        np.save(tmp_path / "a.npy", flat.astype(dtype))
        assert_equal(tokens(tmp_path / "a.npy", tokenizer), np.load(tmp_path / "a.npy"))
