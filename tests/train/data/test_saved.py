"""Folders saved by Hugging Face datasets: their files, in their order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from plait.core.base.errors import DataError
from plait.core.base.ignored_input import IgnoredInput
from plait.train.data.prepare import CorpusSettings, prepare
from plait.train.data.sources import find_files
from tests.train.data.preparing import BYTES, documents


def save(folder: Path, shards: list[list[str]], **state: Any) -> Path:
    """As ``Dataset.save_to_disk`` writes: Arrow streams, and a file that says their order."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(shards):05d}.arrow" for number in range(len(shards))]
    for name, texts in zip(names, shards, strict=True):
        table = pa.table({"text": texts, "id": list(range(len(texts)))})
        with pa.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(table)
    files = [{"filename": name} for name in reversed(names)]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": None, **state}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_files_are_read_in_the_order_that_the_state_says(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", [["a", "b"], ["c"], ["d", "e"]])
    (folder / "cache-0123.arrow").write_bytes(b"of an earlier map()")
    corpus = prepare([folder], BYTES, tmp_path / "c", CorpusSettings(eval_fraction=0))
    assert documents(corpus, "train") == [b"d", b"e", b"c", b"a", b"b"]


def test_of_several_splits_that_of_training_is_read(tmp_path: Path) -> None:
    for name in ("train", "test"):
        save(tmp_path / "saved" / name, [[name]])
    (tmp_path / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    over = IgnoredInput()
    assert [file.path.parent.name for file in find_files([tmp_path / "saved"], "*", over=over)] == ["train"]
    (line,) = over.lines()
    assert "1 split of a saved dataset" in line and line.endswith(f"{tmp_path / 'saved' / 'test'})")
    (tmp_path / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": ["test"]}))
    with pytest.raises(DataError, match="with the splits 'test'; name one of these folders"):
        find_files([tmp_path / "saved"], "*")


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"_indices_data_files": [{"filename": "indices.arrow"}]}, "with a selection of its rows; save it again"),
        ({"_data_files": [{"filename": "../x.arrow"}]}, r"names the file '\.\./x\.arrow', which is not in its folder"),
        ({"_data_files": [{"filename": "none.arrow"}]}, "names the file 'none.arrow', which is not in its folder"),
        ({"_data_files": [3]}, "names the file 3"),
        ({"_data_files": []}, "has no '_data_files'"),
    ],
)
def test_a_state_that_does_not_hold_is_named(tmp_path: Path, state: dict[str, Any], says: str) -> None:
    folder = save(tmp_path / "saved", [["a"]], **state)
    with pytest.raises(DataError, match=says):
        find_files([folder], "*")
