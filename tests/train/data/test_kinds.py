"""What is no text is refused by its name, before training; what is text, however odd, is read."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import random
import re
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import DataError, JobError
from plait.core.job.settings import DataSection, TrainSection
from plait.train.data import kinds
from plait.train.data.check import check_data
from plait.train.data.documents import Reading
from plait.train.data.documents import documents as documents_of
from plait.train.data.kinds import UNDECODABLE, check_formats
from plait.train.data.prepare import CorpusSettings, prepare
from plait.train.data.sources import find_files
from tests.train.data.preparing import BYTES, documents

WORDS = "river stone lamp winter copper signal market orchard paper engine"
PROSE = "".join(f"{number} {WORDS}.\n" for number in range(200)).encode()
ROWS = "".join(json.dumps({"text": WORDS, "id": number}) + "\n" for number in range(50)).encode()


def _tar() -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    return target.getvalue()


def _zip() -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("a.txt", PROSE)
    return target.getvalue()


def _npy() -> bytes:
    target = io.BytesIO()
    np.save(target, np.arange(300, dtype=np.uint16))
    return target.getvalue()


def _safetensors() -> bytes:
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    return len(header).to_bytes(8, "little") + header + bytes(8)


def _zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def _noise(size: int = 5000) -> bytes:
    return random.Random(3).randbytes(size)


PARQUET = b"PAR1\x15\x04\x00" + _noise() + b"PAR1"
NAMED: dict[str, tuple[bytes, str]] = {
    "gzip": (gzip.compress(PROSE), "gzip"),
    "bzip2": (bz2.compress(PROSE), "bzip2"),
    "xz": (lzma.compress(PROSE), "xz"),
    "zstd": (b"\x28\xb5\x2f\xfd\x04\x00" + _noise(), "zstd"),
    "zip": (_zip(), "an archive"),
    "tar": (_tar(), "an archive"),
    "parquet": (PARQUET, "Parquet"),
    "arrow": (b"ARROW1\x00\x00" + _noise(), "Arrow"),
    "arrow stream": (b"\xff\xff\xff\xff\x78\0\0\0\x10\0\0\0" + _noise(), "Arrow"),
    "npy": (_npy(), "NumPy"),
    "pickle": (pickle.dumps([WORDS] * 9), "pickle"),
    "megatron": (b"MMIDIDX\x00\x00" + bytes(100), "Megatron"),
    "pdf": (b"%PDF-1.7\n" + PROSE, "PDF"),
    "json lines": (ROWS, "JSON lines"),
    "one line of json": (ROWS.splitlines()[0], "JSON lines"),
    "json array": (json.dumps([{"text": WORDS}] * 9).encode(), "JSON"),
    "json array, printed": (json.dumps([{"text": WORDS}] * 9, indent=2).encode(), "JSON"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 49\n", "Git LFS"),
    "utf-16": ("\ufeff".encode("utf-16-le") + PROSE.decode().encode("utf-16-le"), "UTF-16"),
    "utf-32": ("\ufeff".encode("utf-32-le") + PROSE.decode().encode("utf-32-le"), "UTF-32"),
    "warc": (b"WARC/1.0\r\nWARC-Type: warcinfo\r\n\r\n" + PROSE, "pages of a crawl"),
    "arc": (b"filedesc://a.arc 0.0.0.0 20080101 text/plain 76\n" + PROSE, "pages of a crawl"),
    "sqlite": (b"SQLite format 3\x00" + PROSE, "a database"),
    "avro": (b"Obj\x01" + PROSE, "data file of another program"),
}
SHARES: dict[str, tuple[bytes, str]] = {
    "png": (b"\x89PNG\r\n\x1a\n" + _noise(), "no text in UTF-8"),
    "elf": (b"\x7fELF\x02\x01\x01" + bytes(100), "of its bytes are zero"),
    "safetensors": (_safetensors(), "of its bytes are zero"),
    "utf-16 without a mark": (PROSE.decode().encode("utf-16-be"), "UTF-16"),
    "uint16 tokens": (np.arange(200, dtype="<u2").tobytes(), "numbers"),
    "only 0xff": (b"\xff" * 5000, "no text in UTF-8: 100.0% of its bytes"),
    "0xff, then noise": (b"\xff\xff\xff\xff\xff\xff\xff\xff" + _noise(), "no text in UTF-8"),
    "random": (_noise(), "no text in UTF-8"),
    "latin-1": ("Straße café naïve ".encode("latin-1") * 300, "no text in UTF-8: 16.7% of its bytes"),
    "shift-jis": ("冬の市場 ".encode("shift-jis") * 300, "iconv -f ENCODING -t UTF-8"),
    "zeros behind text": (PROSE + bytes(len(PROSE) // 2), "33.3% of its bytes are zero"),
    "zeros within text": (b"log\x00\x00\x00" * 2000, "50.0% of its bytes are zero"),
    "only zeros": (bytes(500), "100.0% of its bytes are zero"),
}
BINARY = NAMED | SHARES
TEXTS: dict[str, bytes] = {
    "prose": PROSE,
    "braces": b"{sic} he said.\n" + PROSE,
    "a brace on each line": b"{one}\n{two}\n" + PROSE,
    "json in prose": b'Write {"a": 1} into it.\n' + PROSE,
    "json after prose": PROSE + ROWS,
    "markdown list": b"[a](b)\n[{c}](d)\n" + PROSE,
    "code": b'{\n    "indented": 1\n}\n',
    "html": b"<html><body>" + PROSE,
    "byte order mark": b"\xef\xbb\xbf" + PROSE.replace(b"\n", b"\r\n"),
    "blank": b" \n\t\n" * 9,
    "emoji": "\U0001f9d1\U0001f3fd\u200d\U0001f680".encode() * 20000,
    "letters of formats": b"MZ and PAR1 are letters. " + "Überprüfung".encode() * 9,
    "long": "价格 é\n".encode() * 60000,
    "one stray byte": PROSE + b"\xff",
    "one letter": b"a",
}


def check(folder: Path, text: str | None = None, **data: Any) -> list[str]:
    section = DataSection(text=text or str(folder), eval_fraction=0, sequence_length=1, **data)
    return check_data(section, TrainSection(eval_every=0), folder / "none").over.lines()


READ = (
    "gzip", "bzip2", "xz", "npy", "megatron", "json lines", "one line of json", "json array", "json array, printed",
)  # fmt: skip
"""What is read where no ending says that it is something else."""


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in BINARY for name in ("00.txt", "00") if name == "00.txt" or kind not in READ],
)
def test_what_is_no_text_is_refused_by_name(tmp_path: Path, kind: str, name: str) -> None:
    content, says = BINARY[kind]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(JobError) as caught:
        check(tmp_path)
    assert caught.value.key == "data.text"
    assert f"{tmp_path / name}: " in str(caught.value)
    assert says in str(caught.value)
    with pytest.raises(DataError, match=re.escape(says)):
        prepare([tmp_path], BYTES, tmp_path / "none" / "corpus", CorpusSettings(pattern="*"))


@pytest.mark.parametrize("kind", TEXTS)
def test_odd_text_is_text(tmp_path: Path, kind: str) -> None:
    (tmp_path / "00.txt").write_bytes(TEXTS[kind])
    (tmp_path / "01.txt").write_bytes(PROSE)
    assert check(tmp_path) == []
    said: list[str] = []
    corpus = prepare([tmp_path], BYTES, tmp_path / "none" / "c", CorpusSettings(eval_fraction=0), say=said.append)
    assert (said == []) == (kind != "one stray byte")
    assert b"".join(documents(corpus, "train")) == TEXTS[kind] + PROSE


@pytest.mark.parametrize(
    "ending", [".PARQUET", ".gz", ".jsonl.zst", ".xz", ".bz2", ".bin", ".idx", ".npy", ".arrow", ".ipynb"]
)
@pytest.mark.parametrize("content", [PROSE, _noise()], ids=["text", "noise"])
def test_an_ending_of_another_format_is_enough(tmp_path: Path, ending: str, content: bytes) -> None:
    (tmp_path / f"part{ending}").write_bytes(content)
    with pytest.raises(JobError, match=rf"part{re.escape(ending)}: is, by its ending"):
        check(tmp_path)


@given(content=st.binary(min_size=2000, max_size=4000), ending=st.sampled_from(["", ".txt", ".md", ".parquet", ".py"]))
def test_random_bytes_are_refused_whatever_they_are_called(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, ending: str
) -> None:
    folder = tmp_path_factory.mktemp("random")
    noise = bytes(a ^ b for a, b in zip(content, _noise(len(content)), strict=True))
    (folder / f"file{ending}").write_bytes(noise)
    with pytest.raises(JobError, match="file"):
        check(folder)


def test_a_mixed_folder_names_one_and_counts_the_others_and_the_advice_works(tmp_path: Path) -> None:
    for name, content in (("a.png", BINARY["png"][0]), ("b.parquet", PROSE), ("f.gz", PROSE)):
        (tmp_path / name).write_bytes(content)
    for name in ("c.txt", "d.txt", "e.md"):
        (tmp_path / name).write_bytes(PROSE)
    with pytest.raises(
        JobError, match=r"a\.png: is no text in UTF-8.* \(2 more files of the corpus are not read either\)"
    ):
        check(tmp_path)
    with pytest.raises(JobError) as caught:
        check(tmp_path)
    advised = re.search(r'set data\.pattern = "([^"]*)"', str(caught.value))
    assert advised
    assert check(tmp_path, pattern=advised[1]) == []


def test_a_file_that_is_named_itself_is_not_advised_a_pattern(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(ROWS)
    with pytest.raises(JobError, match=r"name it a\.jsonl") as caught:
        check(tmp_path, text=str(tmp_path / "a.txt"))
    assert "pattern" not in str(caught.value)


def test_bytes_that_are_not_utf8_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(PROSE + b"\xff\xfe\xfd")
    (tmp_path / "b.txt").write_bytes(b"\xe9" + PROSE)
    assert check_formats(find_files([tmp_path], "*")) == {"text": 2}
    said: list[str] = []
    prepare([tmp_path], BYTES, tmp_path / "none" / "corpus", say=said.append)
    assert said == [f"note: passed over 4 {UNDECODABLE} (the first: {tmp_path / 'a.txt'})"]


def test_a_few_zeros_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(PROSE + bytes(3))
    reading = Reading()
    assert len(list(documents_of(find_files([tmp_path], "*")[0], reading))) == 1
    assert reading.over.counts == {UNDECODABLE: 3}


def test_characters_at_the_edges_of_what_is_looked_at_are_whole(tmp_path: Path) -> None:
    for shift in range(4):
        text = b"a" * shift + "价格😀".encode() * 60000
        (tmp_path / "a.txt").write_bytes(text)
        assert check_formats(find_files([tmp_path], "*")) == {"text": 1}


def test_the_standard_library_is_text() -> None:
    assert check_formats(find_files(["python-stdlib"], "*")).keys() == {"text"}


@pytest.mark.parametrize("write", [json.dumps, lambda rows: "\n".join(map(json.dumps, rows))])
@pytest.mark.parametrize("name", ["part", "part.json", "part.jsonl"])
def test_rows_without_the_key_are_refused_with_one_that_they_have(
    tmp_path: Path, write: Callable[[list[dict[str, str]]], str], name: str
) -> None:
    (tmp_path / name).write_text(write([{"id": "a", "content": WORDS}] * 3))
    with pytest.raises(JobError, match=r"have no 'text', but 'id', 'content'; set data\.text_key = 'content'"):
        check(tmp_path)
    assert check(tmp_path, text_key="content") == []


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", PROSE, "line 1 is not JSON"),
        ("a.jsonl", _noise(), "no text in UTF-8"),
        ("a.json", PROSE, "value 1 is 0, neither an object nor a text"),
        ("a.csv", PROSE, "its rows have no 'text', but '0 river"),
        ("a.csv", _noise(), "no text in UTF-8"),
        ("a.jsonl", gzip.compress(ROWS), "is gzip by its content, and its ending is .jsonl; name it a.jsonl.gz"),
        ("a.jsonl.gz", lzma.compress(ROWS), "is xz by its content, and its ending is .gz; name it a.jsonl.xz"),
        ("a.txt", ROWS, "is JSON lines by its content, and its ending is .txt; name it a.jsonl"),
        ("a.parquet", ROWS, "is JSON lines by its content, and its ending is .parquet"),
        ("a.txt.gz", gzip.compress(_noise()), "is gzip, and what it holds is no text in UTF-8"),
        ("a.txt.gz", gzip.compress(gzip.compress(PROSE)), "and what it holds is gzip by its content"),
        ("a.gz", gzip.compress(_tar()), "and what it holds is an archive"),
        ("a.tgz", gzip.compress(_tar()), "and what it holds is an archive"),
        ("a.parquet.gz", gzip.compress(PARQUET), "is Parquet in gzip; decompress it"),
        ("a.jsonl.gz", gzip.compress(ROWS)[:-9], "is gzip that is damaged or cut off"),
        ("a.jsonl.xz", lzma.compress(ROWS)[:-9], "is xz that is damaged or cut off"),
        ("a.jsonl.bz2", bz2.compress(ROWS)[:-9], "is bzip2 that is damaged or cut off"),
        ("a.jsonl.zst", _zstd(ROWS)[:-9], "is zstd that is damaged or cut off"),
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfd\x04\x00" + _noise(), "is zstd that is damaged or cut off"),
        ("a.parquet", PARQUET, "is Parquet that is damaged or cut off"),
        ("a.arrow", BINARY["arrow"][0], "is Arrow that is damaged or cut off"),
        ("a.arrow", BINARY["arrow stream"][0], "is Arrow stream that is damaged or cut off"),
    ],
)
def test_content_and_name_must_agree(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(JobError, match=re.escape(says)) as caught:
        check(tmp_path)
    assert f"{tmp_path / name}: " in str(caught.value)


@pytest.mark.parametrize("kind", BINARY)
def test_no_binary_content_is_text_under_any_ending(tmp_path: Path, kind: str) -> None:
    """It is refused, or it is a format, and its ending one that such files have."""
    for ending in (*kinds._ENDINGS, ".txt", ".py", ""):
        path = tmp_path / f"file{ending}"
        path.write_bytes(BINARY[kind][0])
        found = kinds.kind_of_file(find_files([path], "*")[0])
        said = {kinds._ENDINGS.get(ending, "text"), *(one for one, more in kinds._MORE.items() if ending in more)}
        fits = ending == "" or {found.format, found.compression} & said
        assert found.problem or ((found.format != "text" or found.compression) and fits), (ending, found)
