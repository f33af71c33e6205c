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


def test_a_file_within_a_folder_of_training_is_named(tmp_path: Path, texts: Path) -> None:
    found = remark(tmp_path, text=str(texts), eval=[{"path": str(texts / "b.txt"), "name": "val"}])
    assert f"trained on, too: eval_loss/val ({texts / 'b.txt'})." in found
    assert remark(tmp_path, text=str(texts), eval=[{"path": str(tmp_path / "other.txt")}]) == ""


def test_other_paths_to_a_file_are_the_same_file(tmp_path: Path, texts: Path) -> None:
    os.symlink(texts / "a.txt", tmp_path / "link.txt")
    os.link(texts / "b.txt", tmp_path / "hard.txt")
    os.symlink(texts, tmp_path / "folder")
    for path in ("link.txt", "hard.txt", "folder/c.txt"):
        assert path in remark(tmp_path, text=str(texts), eval=[{"path": str(tmp_path / path)}]), path


def test_a_file_that_the_pattern_leaves_out_is_not_trained_on(tmp_path: Path, texts: Path) -> None:
    (texts / "val.dat").write_text(TEXT)
    assert remark(tmp_path, text=str(texts), eval=[{"path": str(texts / "val.dat")}]) == ""


def test_files_of_a_set_are_counted(tmp_path: Path, texts: Path) -> None:
    sources = [{"path": str(texts / "b.txt")}, {"path": str(tmp_path / "other.txt")}]
    whole, new = {"path": str(texts), "name": "all"}, {"path": str(texts / "c.txt"), "name": "new"}
    found = remark(tmp_path, sources=sources, eval=[whole, new])
    assert f"eval_loss/all (1 of 3 files, the first {texts / 'b.txt'})." in found
    assert "eval_loss/new" not in found


def test_what_is_never_evaluated_on_is_not_remarked_on(tmp_path: Path, texts: Path) -> None:
    asked: dict[str, Any] = {"text": str(texts), "eval": [{"path": str(texts / "b.txt")}]}
    assert remark(tmp_path, **asked)
    assert remark(tmp_path, **asked, eval_every=0) == ""


def test_two_empty_files_have_no_text_in_common(tmp_path: Path, texts: Path) -> None:
    (texts / "empty.txt").touch()
    paths = [str(texts / "empty.txt"), str(tmp_path / "other.txt")]
    assert remark(tmp_path, text=str(texts), eval=[{"path": paths, "name": "val"}]) == ""


def test_a_prepared_corpus_is_known_by_its_folder(tmp_path: Path, texts: Path) -> None:
    made = tmp_path / "made"
    prepare([str(texts)], ByteTokenizer(), made, CorpusSettings(pattern="*.txt", eval_fraction=0.0))
    os.symlink(made, tmp_path / "link")
    assert "eval_loss/link" in remark(tmp_path, text=str(made), eval=[{"path": str(tmp_path / "link")}])


def test_an_address_is_known_by_its_words(tmp_path: Path, texts: Path) -> None:
    address = "s3://bucket/corpus"
    asked = [{"path": address, "name": "val"}]
    assert f"eval_loss/val ({address})" in remark(tmp_path, text=address, eval=asked)
    assert remark(tmp_path, text=str(texts), eval=asked) == ""


def test_either_file_of_a_pair_of_megatron_means_its_tokens(tmp_path: Path) -> None:
    write_megatron(tmp_path / "pair", [[list(range(60))], [list(range(80))]])
    pair = {"text": str(tmp_path / "pair"), "eval": [{"path": str(tmp_path / "pair.idx"), "name": "val"}]}
    assert "eval_loss/val" in remark(tmp_path, **pair)
