"""Which files a corpus is made from."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from plait.core.base.errors import DataError
from plait.core.base.files import DEEPEST
from plait.train.data import sources
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
