"""Which files a corpus is made from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
