"""Keys of every file that Plait writes, and a run of an earlier version that is resumed.

Other programs read the files, and old folders must go on. A key that is new in file_keys.json, or
gone, is a change that CHANGELOG names.

``python -m tests.cli.test_written_files`` writes file_keys.json anew.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from safetensors import safe_open

from tests.cli.test_json_keys import keys
from tests.cli.test_measure import LOG
from tests.cli.test_place import JOB as PLACED
from tests.cli.test_place import TOPOLOGY
from tests.support.command import succeed, values

HERE = Path(__file__).parent
KEYS = HERE / "file_keys.json"
FOLDER = Path("/tmp/plait-old-run")
"""The folder in which the kept run was trained: a resumed run must find its text under the same
name."""
LOSSES = (4.571762, 4.414039, 4.242534, 4.167343, 4.110003, 4.126693)
"""Steps 7 to 12, which the version that trained the first six goes on to compute."""


def written(folder: Path) -> Iterator[Path]:
    """Train the kept run on; place a job, import links, draw an order of ranks: files of all
    kinds."""
    with tarfile.open(HERE / "old_run.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    succeed("train", "job.toml", "run.folder=runs", "train.steps=12", folder=folder)
    (folder / "placed.toml").write_text(PLACED)
    (folder / "switches.conf").write_text(TOPOLOGY)
    (folder / "links.log").write_text(LOG)
    succeed("place", "placed.toml", "place.topology=switches.conf", "--out", "ranks.json", folder=folder)
    succeed("measure", "machine", "--import", "links.log", "--out", "links.json", folder=folder)
    succeed("trace", "export", "runs/job", "--out", "trace.json", folder=folder)
    yield from (path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size)


def keys_of(path: Path) -> list[str] | None:
    """Paths to all keys of a file, or names of its columns; None for a text."""
    if path.suffix == ".parquet":
        return sorted(pq.read_schema(path).names)
    if path.suffix == ".safetensors":
        with safe_open(path, "numpy") as file:
            return sorted({*file.keys(), *(f"metadata.{key}" for key in file.metadata() or {})})
    if path.suffix == ".toml":
        return sorted(set(keys(tomllib.loads(path.read_text()))))
    if path.suffix in (".json", ".jsonl", ".names"):
        lines = path.read_text().splitlines() if path.suffix != ".json" else [path.read_text()]
        documents = [json.loads(line) for line in lines]
        versions = {f"{key} = {each[key]}" for each in documents for key in ("version", "format") if key in each}
        return sorted({key for each in documents for key in keys(each)} | versions)
    return None


def all_keys(folder: Path) -> dict[str, list[str]]:
    """Keys by file; files of all steps and ranks under one name."""
    named = dict[str, set[str]]()
    for path in written(folder):
        if (found := keys_of(path)) is not None:
            named.setdefault(re.sub(r"\d{5,}", "N", str(path.relative_to(folder))), set()).update(found)
    return {name: sorted(re.sub(r"\d{5,}", "N", key) for key in found) for name, found in named.items()}


@pytest.fixture(scope="module")
def resumed() -> Iterator[dict[str, list[str]]]:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    yield all_keys(FOLDER)
    shutil.rmtree(FOLDER)


def test_keys_of_written_files_stay(resumed: dict[str, list[str]]) -> None:
    assert resumed == json.loads(KEYS.read_text())


def test_a_run_of_an_earlier_version_goes_on(resumed: dict[str, list[str]]) -> None:
    lines = [json.loads(line) for line in (FOLDER / "runs/job/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["loss"] for line in lines[6:]] == pytest.approx(LOSSES, rel=1e-4)
    assert values("diagnose", FOLDER / "runs/job")["steps"]["count"]


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    KEYS.write_text(json.dumps(all_keys(FOLDER), indent=1) + "\n")
    shutil.rmtree(FOLDER)
    sys.exit(0)
