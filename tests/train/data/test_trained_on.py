"""An evaluation on files that are trained on is remarked on, whatever path leads to them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from plait.core.job.settings import DataSection, TrainSection
from plait.train.data.check import check_data
from plait.train.data.prepare import CorpusSettings, prepare
from plait.train.data.tokenizer import ByteTokenizer
from tests.train.data.test_token_files import write_megatron

TEXT = "words of a text that is long enough\n" * 20


def remark(folder: Path, *, eval_every: int = 10, **data: Any) -> str:
    """What is said of a job's evaluation."""
    section = DataSection.model_validate({"sequence_length": 16, "pattern": "*.txt", **data})
    return check_data(section, TrainSection(eval_every=eval_every), folder / "out").note


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Three texts in a folder, and one beside it."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("texts/a.txt", "texts/b.txt", "texts/c.txt", "other.txt"):
        (tmp_path / name).write_text(f"{name} {TEXT}")
    return folder


def test_what_is_trained_on_too_is_named_by_its_set(tmp_path: Path, texts: Path) -> None:
    """Whatever path leads to it."""
    os.symlink(texts / "a.txt", tmp_path / "link.txt")
    os.link(texts / "b.txt", tmp_path / "hard.txt")
    os.symlink(texts, tmp_path / "folder")
    (texts / "val.dat").write_text(TEXT)
    (texts / "empty.txt").touch()
    prepare([str(texts)], ByteTokenizer(), tmp_path / "made", CorpusSettings(pattern="*.txt", eval_fraction=0.0))
    os.symlink(tmp_path / "made", tmp_path / "again")
    write_megatron(tmp_path / "pair", [[list(range(60))], [list(range(80))]])
    address = "s3://bucket/corpus"
    for trained, path, said in (
        ("texts", "texts/b.txt", f"contains training data: eval_loss/val ({texts / 'b.txt'})."),
        ("texts", "other.txt", ""),
        *(("texts", path, path) for path in ("link.txt", "hard.txt", "folder/c.txt")),
        ("texts", "texts/val.dat", ""),  # which the pattern leaves out
        ("texts", ("texts/empty.txt", "other.txt"), ""),  # two empty files have no text in common
        ("made", "again", "eval_loss/val"),
        (address, address, f"eval_loss/val ({address})"),
        ("texts", address, ""),
        ("pair", "pair.idx", "eval_loss/val"),
    ):
        paths = [one if one == address else str(tmp_path / one) for one in ([path] if isinstance(path, str) else path)]
        text = trained if trained == address else str(tmp_path / trained)
        asked: dict[str, Any] = {"text": text, "eval": [{"path": paths, "name": "val"}]}
        found = remark(tmp_path, **asked)
        assert (said in found) if said else not found, (path, found)
        assert remark(tmp_path, **asked, eval_every=0) == "", "never evaluated on"


def test_files_of_a_set_are_counted(tmp_path: Path, texts: Path) -> None:
    sources = [{"path": str(texts / "b.txt")}, {"path": str(tmp_path / "other.txt")}]
    whole, new = {"path": str(texts), "name": "all"}, {"path": str(texts / "c.txt"), "name": "new"}
    found = remark(tmp_path, sources=sources, eval=[whole, new])
    assert f"eval_loss/all (1 of 3 files, the first {texts / 'b.txt'})." in found
    assert "eval_loss/new" not in found
