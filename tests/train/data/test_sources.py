"""Which files a corpus is made from."""

from __future__ import annotations

import gzip
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from plait.core.base.errors import DataError, JobError
from plait.core.base.files import DEEPEST
from plait.core.base.passed_over import PassedOver
from plait.core.job.settings import DataSection, TrainSection
from plait.train.data import sources
from plait.train.data.check import check_data
from plait.train.data.prepare import prepare
from plait.train.data.sources import find_files
from plait.train.data.tokenizer import ByteTokenizer


def test_the_standard_library_is_a_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = find_files(["python-stdlib"], "*.txt")
    assert 2 << 20 < sum(file.bytes for file in files) <= sources.STDLIB_BYTES
    names = {file.name for file in files}
    assert "abc.py" in names
    assert not any(re.search(r"(^|/)(site-packages|tests?)/", name) for name in names)
    monkeypatch.setattr(sources, "STDLIB_BYTES", 200_000)
    corpus = prepare(["python-stdlib"], ByteTokenizer(), tmp_path / "corpus")
    assert 50_000 < corpus.num_tokens("train") + corpus.num_tokens("eval") < 210_000


def test_a_source_that_is_neither_file_nor_folder_is_said_to_be_that(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("text")
    for source, says in (
        ("/dev/zero", "/dev/zero: is a device, no regular file"),
        (str(tmp_path / "pipe"), "pipe: is a pipe, no regular file"),
        (str(tmp_path / "none"), "none: no such file or folder"),
        (str(tmp_path / "file" / "none"), "none: no such file or folder"),
        (str(tmp_path / "loop"), "loop: cannot be read: Too many levels of symbolic links"),
        (str(tmp_path / ("x" * 300)), "cannot be read: File name too long"),
    ):
        with pytest.raises(DataError, match=says):
            find_files([source], "*")
    assert [file.name for file in find_files([tmp_path / "file"], "*")] == ["file"]


@pytest.mark.parametrize(("depth", "refused"), [(DEEPEST, False), (DEEPEST + 1, True)])
def test_folders_without_end_are_refused(tmp_path: Path, depth: int, refused: bool) -> None:
    bottom = tmp_path.joinpath("text", *["d"] * depth)
    bottom.mkdir(parents=True)
    (bottom / "a.txt").write_text("text")
    if refused:
        with pytest.raises(DataError, match="more than 100 deep in each other"):
            find_files([tmp_path / "text"], "*")
    else:
        assert [file.path.name for file in find_files([tmp_path / "text"], "*")] == ["a.txt"]


def found(*sources_: str | Path, pattern: str = "*", **more: Any) -> list[str]:
    return [file.name for file in find_files(list(sources_), pattern, **more)]


def test_files_of_a_folder_are_those_that_match_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for name in ("b/2.txt", "a.txt", "b/1.md", "b/c/3.txt", "B.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert found(tmp_path) == ["B.txt", "a.txt", "b/1.md", "b/2.txt", "b/c/3.txt"]
    assert found(tmp_path, pattern="*.txt") == ["B.txt", "a.txt", "b/2.txt", "b/c/3.txt"]
    assert found(tmp_path, pattern="b/*.txt") == ["b/2.txt", "b/c/3.txt"]
    assert found(tmp_path / "b" / "1.md", tmp_path, pattern="*.txt") == [
        "1.md",
        "B.txt",
        "a.txt",
        "b/2.txt",
        "b/c/3.txt",
    ]
    named = find_files([tmp_path / "a.txt", tmp_path], "*")
    assert [(file.name, file.named) for file in named][:2] == [("a.txt", True), ("B.txt", False)]
    assert [file.name for file in find_files(str(tmp_path / "a.txt"), "*")] == ["a.txt"]
    status = (tmp_path / "a.txt").stat()
    assert (named[0].bytes, named[0].mtime_ns) == (5, status.st_mtime_ns)


def test_what_is_passed_over_is_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    os.link(tmp_path / "a.txt", tmp_path / "b.txt")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("no")
    over = PassedOver()
    assert found(tmp_path, over=over) == ["a.txt", "empty"]
    assert over.counts == {
        "pipes, devices and sockets": 1, "file(s) met before": 1, "empty files": 1,
        "hidden files and folders": 2,
    }  # fmt: skip


def test_a_corpus_inside_of_its_source_is_left_out_and_a_circle_walked_once(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "train.bin").write_text("tokens")
    (tmp_path / "a").write_text("text")
    (tmp_path / "round").symlink_to(tmp_path)
    assert found(tmp_path) == ["a", "corpus/train.bin"]
    assert found(tmp_path, leave_out=tmp_path / "corpus") == ["a"]
    assert found(tmp_path / "corpus", leave_out=tmp_path / "corpus") == ["train.bin"], "if it is named, it is meant"


def test_a_source_without_text_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for name in ("a.md", "b.md", "Makefile"):
        (tmp_path / "docs" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "docs" / name).write_text("text")
    with pytest.raises(
        DataError, match=r"docs: no file in it matches the pattern '\*\.txt', its files end in .md, Make"
    ):
        find_files([tmp_path / "docs"], "*.txt")
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="has no file"):
        find_files([tmp_path / "none"], "*")
    with pytest.raises(DataError, match="empty: the corpus is empty; name a file or folder that has text"):
        find_files([tmp_path / "empty"], "*")
    with pytest.raises(DataError, match=r"^no source: the corpus is empty"):
        find_files([], "*")
    for number in range(12):
        (tmp_path / "docs" / f"x.{number:02}").write_text("text")
    with pytest.raises(DataError, match=r"its files end in .00, .01, .02, .03, .04, .05, .06, .07; change"):
        find_files([tmp_path / "docs"], "*.txt")


def test_a_pattern_in_a_path_is_told_where_it_goes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"no such file or folder; name a folder, and its files with data\.pattern"):
        find_files([tmp_path / "*.txt"], "*")
    (tmp_path / "[x].txt").write_text("text")
    assert found(tmp_path / "[x].txt") == ["[x].txt"]


def test_footers_of_a_parquet_folder_are_no_files_of_rows(tmp_path: Path) -> None:
    part = tmp_path / "lang=en" / "part-0.parquet"
    part.parent.mkdir()
    footers: list[pq.FileMetaData] = []
    pq.write_table(pa.table({"text": ["words"] * 9}), part, metadata_collector=footers)
    footers[0].set_file_path("lang=en/part-0.parquet")
    pq.write_metadata(pa.schema([("text", pa.string())]), tmp_path / "_metadata", footers)
    pq.write_metadata(pa.schema([("text", pa.string())]), tmp_path / "_common_metadata")
    over = PassedOver()
    assert found(tmp_path, over=over) == ["lang=en/part-0.parquet"]
    assert over.counts == {"footer(s) of a Parquet folder, which have no rows": 2}


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "a").write_text("text")
    real = os.scandir

    def scan(path: str) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scan)
    with pytest.raises(DataError, match="closed: cannot list this source folder: Permission denied; check its perm"):
        find_files([tmp_path], "*")


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match="a: cannot read this source file: No such file or directory; repair or remove"):
        find_files([tmp_path], "*")


def test_of_the_standard_library_files_are_taken_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = find_files("python-stdlib", "*")
    first = sum(file.bytes for file in everything[:20])
    for limit, count in ((first, 20), (first - 1, 19)):
        monkeypatch.setattr(sources, "STDLIB_BYTES", limit)
        assert len(find_files("python-stdlib", "*")) == count
    assert not any(file.named for file in everything)
    over = PassedOver()
    find_files("python-stdlib", "*", over=over)
    assert "empty files" not in over.counts, "nobody asked which of its files are"


def test_what_comes_after_a_file_without_room_is_left_out_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A corpus of the library is its beginning, not whatever is small."""
    for name, size in (("a", 10), ("b", 100), ("c", 10)):
        (tmp_path / f"{name}.py").write_bytes(b"#" * size)
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(sources, "STDLIB_BYTES", 50)
    assert found("python-stdlib") == ["a.py"]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("", "'' is no path"),
        ("a\0b", "is no path"),
        ("~nobody-there/x", "no such file or folder"),
        ("x" * 300, "too long"),
    ],
)
def test_what_is_no_path_is_refused_by_name(tmp_path: Path, source: str, says: str) -> None:
    with pytest.raises(JobError, match=says) as refused:
        check_data(DataSection(text=source), TrainSection(), tmp_path)
    assert refused.value.key == "data.text" and "\0" not in str(refused.value)


def test_a_folder_without_files_is_not_a_matter_of_the_pattern(tmp_path: Path) -> None:
    (tmp_path / ".hidden").write_text("text")
    with pytest.raises(DataError, match="has no file"):
        find_files([tmp_path], "*")


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt.gz", "a.npy", "a.parquet"])
def test_files_without_a_document_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(
        {"a.jsonl": b"\n\n", "a.csv": b"text\n", "a.txt.gz": gzip.compress(b"")}.get(name, b"")
    )
    if name == "a.npy":
        np.save(tmp_path / name, np.zeros(0, np.int32))
    if name == "a.parquet":
        pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / name)
    with pytest.raises(JobError, match=rf"{name}: there is no text or token in it") as refused:
        check_data(DataSection(text=str(tmp_path / name)), TrainSection(eval_every=0), tmp_path / "out")
    assert refused.value.key == "data.text"


def test_a_column_that_comes_twice_and_an_array_of_less_than_nothing(tmp_path: Path) -> None:
    pq.write_table(pa.table([["a"] * 20, ["b"] * 20], names=["text", "text"]), tmp_path / "a.parquet")
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (-10, -10), }".ljust(117) + b"\n"
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00v\x00" + header + bytes(800))
    for name, says in (("a.parquet", "the column 'text' twice"), ("a.npy", "damaged")):
        with pytest.raises(JobError, match=says):
            check_data(DataSection(text=str(tmp_path / name)), TrainSection(eval_every=0), tmp_path / "out")
