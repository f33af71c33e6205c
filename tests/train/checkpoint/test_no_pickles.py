"""No file of a run folder executes anything: a payload that only makes a file, in each of them."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

from plait.core.base.errors import CheckpointError, DataError, JobError
from plait.core.job.plan import Plan
from plait.core.job.spec import Job
from plait.core.record.timeline import Span, Timeline
from plait.train.checkpoint.export import export_run
from plait.train.checkpoint.folder import file_of, measure
from plait.train.checkpoint.whole import load_whole
from plait.train.data.corpus import Index
from plait.train.data.tokenizer import load_tokenizer
from tests.train.checkpoint.writing import LLAMA, write_run


class Payload:
    """Makes ``file`` when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Path]]:
        return Path.touch, (self.file,)


class Trap:
    """A run folder and a payload; afterwards the payload must not have run."""

    def __init__(self, folder: Path) -> None:
        self.run, self.made = folder / "run", folder / "executed"
        self.payload = pickle.dumps(Payload(self.made))
        pickle.loads(self.payload)
        assert self.made.exists(), "the payload does what it is for"
        self.made.unlink()
        write_run(self.run, LLAMA, steps=(1, 2))

    def step(self, number: int) -> Path:
        return self.run / "checkpoints" / f"step-{number:08d}"


@pytest.fixture
def trap(tmp_path: Path) -> Any:
    found = Trap(tmp_path)
    yield found
    assert not found.made.exists()


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """As somebody does who knows its checksum."""
    body = json.loads((folder / "manifest.json").read_text())
    del body["crc32"]
    change(body)
    body["crc32"] = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    (folder / "manifest.json").write_text(json.dumps(body))


def write_timeline(file: Path) -> Timeline:
    one = Timeline((Span(0, 0, "compute", "attn0.F0", 0, "attn", 0, 0, "forward", 0.0, 1.0, 0),), "hash")
    one.write_parquet(file)
    return one


def test_a_manifest(trap: Trap) -> None:
    (trap.step(2) / "manifest.json").write_bytes(trap.payload)
    whole = load_whole(trap.run)
    assert whole.step == 1
    assert "manifest.json: damaged" in whole.warnings[0]
    with pytest.raises(CheckpointError, match=r"manifest\.json: damaged"):
        load_whole(trap.run, 2)


@pytest.mark.parametrize("saved", [False, True], ids=["bare", "torch.save"])
def test_tensors_under_a_checksum_that_fits(trap: Trap, saved: bool) -> None:
    file = trap.step(2) / file_of(0)
    file.write_bytes(trap.payload)
    if saved:
        torch.save({"weights": Payload(trap.made)}, file)
    change_manifest(trap.step(2), lambda body: body["files"].update({file_of(0): measure(file)}))
    for step in (None, 2):
        with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors: cannot be read as safetensors"):
            load_whole(trap.run, step)


def write_older_format(folder: Path, payload: bytes) -> None:
    """A checkpoint as torch.distributed.checkpoint left it, under a manifest whose checksums
    fit."""
    for file in folder.iterdir():
        file.unlink()
    (folder / ".metadata").write_bytes(payload)
    (folder / "__0_0.distcp").write_bytes(payload)
    files = {name: measure(folder / name) for name in (".metadata", "__0_0.distcp")}
    body = {"format": 1, "step": int(folder.name[-8:]), "serial": 9, "state": {}, "files": files}
    crc = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    (folder / "manifest.json").write_text(json.dumps({**body, "crc32": crc}))


def test_a_checkpoint_of_the_older_format(trap: Trap, tmp_path: Path) -> None:
    write_older_format(trap.step(2), trap.payload)
    says = r"manifest\.json: it has format 1, .*older Plait, holds a pickle"
    with pytest.raises(CheckpointError, match=says):
        load_whole(trap.run, 2)
    write_older_format(trap.step(1), trap.payload)
    with pytest.raises(CheckpointError, match=rf"none of its checkpoints can be used.*{says}.*train\.init_from"):
        export_run(trap.run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_pickle_beside_the_files_of_a_checkpoint(trap: Trap) -> None:
    (trap.step(2) / ".metadata").write_bytes(trap.payload)
    assert load_whole(trap.run).step == 2


def test_entries_that_are_not_what_the_file_holds(trap: Trap) -> None:
    key = "master/norm.weight"
    change_manifest(trap.step(1), lambda body: body["tensors"][key].__setitem__(0, "F64"))
    with pytest.raises(CheckpointError, match=f"'{key}' is .* of float64, expected .* of float32"):
        load_whole(trap.run, 1)
    change_manifest(trap.step(2), lambda body: body["tensors"][key][2].__setitem__(0, [file_of(0), [0], [8]]))
    with pytest.raises(CheckpointError, match=r"cannot be read as safetensors: .*master/norm\.weight\[0:8\]"):
        load_whole(trap.run, 2)
    change_manifest(trap.step(2), lambda body: body["tensors"][key].__setitem__(2, []))
    with pytest.raises(CheckpointError, match=f"holds '{key}' only in part"):
        load_whole(trap.run, 2)


@pytest.mark.parametrize(
    "name, read",
    [
        ("plan.json", Plan.read),
        ("job.toml", Job.read),
        ("index.json", Index.read),
        ("tokenizer.json", load_tokenizer),
        ("rank-00000-step-00000001.parquet", Timeline.read_parquet),
    ],
)
def test_the_other_files(trap: Trap, name: str, read: Callable[[Path], Any]) -> None:
    file = trap.run / name
    file.write_bytes(trap.payload)
    with pytest.raises((JobError, DataError), match=name):
        read(file)


def test_a_timeline_with_a_pickled_type(trap: Trap) -> None:
    """Arrow once unpickled Python's extension types from a file's schema (CVE-2023-47248)."""
    file = trap.run / "one.parquet"
    one = write_timeline(file)
    table = pyarrow.parquet.read_table(file)
    metadata = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": trap.payload}
    fields = [field.with_metadata(metadata) for field in table.schema]
    pyarrow.parquet.write_table(table.cast(pyarrow.schema(fields, metadata=table.schema.metadata)), file)
    assert b"arrow.py_extension_type" in base64.b64decode(pyarrow.parquet.read_metadata(file).metadata[b"ARROW:schema"])
    assert Timeline.read_parquet(file) == one
