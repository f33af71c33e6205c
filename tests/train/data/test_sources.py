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
from plait.core.base.ignored_input import IgnoredInput
from plait.core.job.settings import DataSection, TrainSection
from plait.train.data import sources
from plait.train.data.check import check_data
from plait.train.data.sources import find_files


def test_the_standard_library_is_a_corpus() -> None:
    files = find_files(["python-stdlib"], "*.txt")
    assert 2 << 20 < sum(file.bytes for file in files) <= sources.STDLIB_BYTES
    names = {file.name for file in files}
    assert "abc.py" in names
    assert not any(re.search(r"(^|/)(site-packages|tests?)/", name) for name in names)
    assert not any(file.named for file in files)


def test_what_is_no_source_is_refused_in_words(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "a").symlink_to(tmp_path / "gone")
    (tmp_path / "empty").touch()
    (tmp_path / "none").mkdir()
    (tmp_path / "docs").mkdir()
    for name in ("a.md", "Makefile", *(f"x.{number:02}" for number in range(12))):
        (tmp_path / "docs" / name).write_text("text")
    deep = {depth: tmp_path.joinpath(f"deep{depth}", *["d"] * depth) for depth in (DEEPEST, DEEPEST + 1)}
    for bottom in deep.values():
        bottom.mkdir(parents=True)
        (bottom / "a.txt").write_text("text")
    for source, says in (
        ("/dev/zero", "/dev/zero: is a device, no regular file"),
        ("pipe", "pipe: is a pipe, no regular file"),
        ("gone", r"gone: no such file or folder; correct the path \(nothing is downloaded\), or use 'python-stdlib'"),
        ("docs/a.md/none", "none: no such file or folder"),
        ("*.txt", r"no such file or folder; name a folder, and its files with data\.pattern"),
        ("loop", "loop: cannot be read: Too many levels of symbolic links"),
        ("x" * 300, "cannot be read: File name too long"),
        ("links", "a: cannot read this source file: No such file or directory; repair or remove"),
        ("docs", r"docs: no file in it matches the pattern '\*\.txt', its files end in .00, .*, .07; change"),
        ("none", "has no file"),
        ("empty", "empty: the corpus is empty; name a file or folder that has text"),
        (f"deep{DEEPEST + 1}", "nested more than 100 deep"),
    ):
        pattern = "*.txt" if source == "docs" else "*"
        with pytest.raises(DataError, match=says):
            find_files([tmp_path / source], pattern)
    with pytest.raises(DataError, match=r"^no source: the corpus is empty"):
        find_files([], "*")
    for source, says in (("", "'' is no path"), ("a\0b", "is no path"), ("~nobody-there/x", "no such file or folder")):
        with pytest.raises(JobError, match=says) as refused:
            check_data(DataSection(text=source), TrainSection(), tmp_path)
        assert refused.value.key == "data.text" and "\0" not in str(refused.value)
    (tmp_path / "[x].txt").write_text("text")
    assert found(tmp_path / "[x].txt", tmp_path / f"deep{DEEPEST}") == ["[x].txt", "d/" * DEEPEST + "a.txt"]


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
    over = IgnoredInput()
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


def test_footers_of_a_parquet_folder_are_no_files_of_rows(tmp_path: Path) -> None:
    part = tmp_path / "lang=en" / "part-0.parquet"
    part.parent.mkdir()
    footers: list[pq.FileMetaData] = []
    pq.write_table(pa.table({"text": ["words"] * 9}), part, metadata_collector=footers)
    footers[0].set_file_path("lang=en/part-0.parquet")
    pq.write_metadata(pa.schema([("text", pa.string())]), tmp_path / "_metadata", footers)
    pq.write_metadata(pa.schema([("text", pa.string())]), tmp_path / "_common_metadata")
    over = IgnoredInput()
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


def test_what_comes_after_a_file_without_room_is_left_out_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A corpus of the library is its beginning, not whatever is small."""
    for name, size in (("a", 10), ("b", 100), ("c", 10)):
        (tmp_path / f"{name}.py").write_bytes(b"#" * size)
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(sources, "STDLIB_BYTES", 50)
    assert found("python-stdlib") == ["a.py"]


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
