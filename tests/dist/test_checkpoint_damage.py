"""Checkpoints: a usable one is left whatever happens while writing, and what is damaged is
found."""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from plait.core.base.errors import CheckpointError
from plait.core.model.spec import ModelSpec
from plait.train.checkpoint import checkpoints as module
from plait.train.checkpoint.checkpoints import Checkpoints
from plait.train.checkpoint.folder import CheckpointFolder, file_of
from tests.dist import checkpointing
from tests.dist.checkpointing import GPT, One, build, differences, tensors_of, zeros_like
from tests.support.held import held_of
from tests.support.ranks import CONTEXT


@pytest.mark.parametrize("stage, usable", [("write", 1), ("measure", 1), ("rename", 1), ("delete", 2)])
def test_killed_while_saving(tmp_path: Path, stage: str, usable: int) -> None:
    process = CONTEXT.Process(target=checkpointing.killed_at, args=(stage, tmp_path))
    process.start()
    process.join(60)
    assert process.exitcode == -9
    assert any(name.endswith(".partial") for name in (entry.name for entry in tmp_path.iterdir()))
    model = build(GPT)
    checkpoints = Checkpoints(tmp_path, held_of(model.pieces))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [f"step-{usable:08d}"]
    found = zeros_like(tensors_of(model, usable))
    assert checkpoints.restore(found) == (usable, {"n": usable}, ())
    assert differences(model, found, tensors_of(model, usable)) == []


def test_one_rank_killed_while_saving(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    processes = [
        CONTEXT.Process(target=checkpointing.one_of_two_killed, args=(rank, tmp_path / "store", folder))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, -9]
    assert "cannot be written" in (folder / "verdict.txt").read_text()
    assert sorted(entry.name for entry in folder.iterdir()) == ["step-00000001", "verdict.txt"]
    model = build(GPT)
    found = zeros_like(tensors_of(model, 1))
    assert Checkpoints(folder, held_of(model.pieces)).load(1, found) == {"n": 1}
    assert differences(model, found, tensors_of(model, 1)) == []


def flip(file: Path, at: int = -1) -> None:
    """Change one bit."""
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "flipped": flip,
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-2]),
    "empty": lambda file: file.write_bytes(b""),
    "missing": lambda file: file.unlink(),
}


@pytest.mark.unit
@pytest.mark.parametrize("damage", list(DAMAGES))
@pytest.mark.parametrize("name", [file_of(0), "manifest.json"])
def test_a_run_goes_on_from_the_newest_that_is_whole(one: One, name: str, damage: str) -> None:
    file = one.folder / "step-00000002" / name
    DAMAGES[damage](file)
    tensors = zeros_like(tensors_of(one.model, 2))
    with pytest.raises(CheckpointError, match=r"step-00000002.*The folder also holds step 1"):
        one.checkpoints.load(2, tensors)
    assert not any(tensor.any() for by_name in tensors.values() for tensor in by_name.values())

    reader = Checkpoints(one.folder, held_of(one.model.pieces), read_only=True)
    for checkpoints, last in ((reader, ""), (one.checkpoints, "; the unusable one is now step-00000002.unusable")):
        restored = checkpoints.restore(tensors)
        assert restored is not None
        assert (restored.step, restored.state) == (1, {"step": 1})
        (line,) = restored.warnings
        assert line.startswith(f"{file}: ")
        assert line.endswith(f". The checkpoint of step 1 is used instead{last}")
        assert differences(one.model, tensors, tensors_of(one.model, 1)) == []
    assert one.names() == ["step-00000001", "step-00000002.unusable"]

    assert one.checkpoints.restore(tensors) == (1, {"step": 1}, ())  # it was said once
    for step in (2, 3, 4):
        one.save(step)
    assert one.names() == ["step-00000002.unusable", "step-00000003", "step-00000004"]
    assert one.latest() == 4


@pytest.mark.unit
def test_a_damaged_checkpoint_takes_no_good_ones_place(one: One) -> None:
    flip(one.folder / "step-00000002" / file_of(0))
    assert one.latest() == 1
    one.save(3)
    assert one.names() == ["step-00000001", "step-00000002.unusable", "step-00000003"]


@pytest.mark.unit
def test_none_is_left(one: One) -> None:
    tensors = zeros_like(tensors_of(one.model, 2))
    flip(one.folder / "step-00000001" / file_of(0))
    DAMAGES["truncated"](one.folder / "step-00000002" / "manifest.json")
    for _ in range(2):  # nothing is set aside, so that a second start does not begin anew without a word
        with pytest.raises(
            CheckpointError,
            match=r"none of its checkpoints can be used\. .*step-00000001/rank-00000\.safetensors: damaged.*"
            r"step-00000002/manifest\.json: damaged.*To start anew, remove the folder",
        ):
            one.checkpoints.restore(tensors)
    assert not any(tensor.any() for by_name in tensors.values() for tensor in by_name.values())
    shutil.rmtree(one.folder / "step-00000001")
    (one.folder / "step-00000002").rename(one.folder / "step-00000002.unusable")
    with pytest.raises(CheckpointError, match=r"none of its checkpoints can be used\. .*step-00000002\.unusable\."):
        one.checkpoints.restore(tensors)


@pytest.mark.unit
def test_every_flipped_bit_is_found(one: One) -> None:
    files, draw = sorted((one.folder / "step-00000002").iterdir()), random.Random(5)
    tensors = zeros_like(tensors_of(one.model, 2))
    for _ in range(60):
        file = draw.choice(files)
        whole = file.read_bytes()
        at = draw.randrange(len(whole))
        file.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << draw.randrange(8))]) + whole[at + 1 :])
        with pytest.raises(CheckpointError, match=rf"{file.name}: damaged"):
            one.checkpoints.load(2, tensors)
        file.write_bytes(whole)
    assert not any(tensor.any() for by_name in tensors.values() for tensor in by_name.values())
    one.checkpoints.load(2, tensors)


@pytest.mark.unit
def test_another_model_is_refused(one: One) -> None:
    bigger = build(ModelSpec(**{**GPT.to_dict(), "vocab": 6}))
    tensors = tensors_of(bigger, 2)
    with pytest.raises(CheckpointError, match=r"'weights/embedding.weight' is \[5, 8\] of bfloat16, expected \[6, 8\]"):
        Checkpoints(one.folder, held_of(bigger.pieces)).load(2, tensors)
    as_double = {"exp_avg": {name: tensor.double() for name, tensor in tensors_of(one.model, 2)["exp_avg"].items()}}
    with pytest.raises(CheckpointError, match=r"of float32, expected .* of float64"):
        one.checkpoints.load(2, as_double)
    with pytest.raises(CheckpointError, match=r"holds no 'momentum/embedding.weight'"):
        one.checkpoints.load(2, {"momentum": tensors["exp_avg"]})
    assert differences(bigger, tensors, tensors_of(bigger, 2)) == []


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.mark.parametrize("announced", [True, False], ids=["seen before", "met while writing"])
def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, announced: bool) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root may mount a small file system to fill")
    try:
        one = One(tmp_path / "checkpoints")
        (tmp_path / "ballast").write_bytes(b"x" * (shutil.disk_usage(tmp_path).free - 8192))
        if not announced:
            monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, 1 << 40))
        one.save(3, wait=False)
        with pytest.raises(
            CheckpointError, match=r"no room for the checkpoint of step 3: it needs \d+ bytes.*step 2 is untouched"
        ):
            one.checkpoints.finish()
        assert one.names() == ["step-00000001", "step-00000002"]
        (tmp_path / "ballast").unlink()
        one.save(4)
        assert one.latest() == 4
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def fail(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of step 3 that breaks in the background."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "measure", mock.Mock(side_effect=OSError(5, "Input/output error")))
        one.save(3, wait=False)
        while one.checkpoints.saving:
            time.sleep(0.01)


@pytest.mark.unit
def test_a_failed_save_is_reported_by_the_next(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(one, monkeypatch)
    with pytest.raises(CheckpointError, match=r"cannot be written: .*Input/output error"):
        one.save(4, wait=False)
    one.checkpoints.finish()
    assert one.latest() == 4


@pytest.mark.unit
def test_the_last_save_does_not_mind_the_one_before(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(one, monkeypatch)
    one.save(4)
    assert one.latest() == 4


@pytest.mark.unit
def test_reading_leaves_a_running_job_alone(one: One) -> None:
    (one.folder / "step-00000003.partial").mkdir()
    reader = Checkpoints(one.folder, held_of(one.model.pieces), read_only=True)
    assert reader.restore({}) == (2, {"step": 2}, ())
    assert one.names() == ["step-00000001", "step-00000002", "step-00000003.partial"]
    assert Checkpoints(one.folder / "none", held_of(one.model.pieces), read_only=True).restore({}) is None
    assert not (one.folder / "none").exists()


@pytest.mark.unit
def test_a_folder_of_checkpoints_that_was_removed_alone_is_made_again(tmp_path: Path) -> None:
    one = One(tmp_path / "run" / "checkpoints")
    shutil.rmtree(one.folder)
    one.save(3)
    assert one.names() == ["step-00000003"] and one.latest() == 3


@pytest.mark.unit
def test_the_folder_of_a_run_that_is_gone_is_an_error(tmp_path: Path) -> None:
    one = One(tmp_path / "run" / "checkpoints")
    shutil.rmtree(one.folder.parent)
    one.save(3, wait=False)
    with pytest.raises(CheckpointError, match=r"checkpoints: this folder is gone"):
        one.save(4, wait=False)
    with pytest.raises(CheckpointError, match=r"checkpoints: this folder is gone"):
        one.checkpoints.finish()
    assert not one.folder.exists(), "a run that is gone is not begun anew"


@pytest.mark.unit
def test_a_folder_that_goes_while_it_is_written(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.write_ranges

    def write(*args: Any) -> Any:
        shutil.rmtree(one.folder)
        return real(*args)

    monkeypatch.setattr(module, "write_ranges", write)
    with pytest.raises(CheckpointError, match=r"step-00000003\.partial: cannot be written: .*No such file"):
        one.save(3)


def test_a_rank_that_does_not_answer(tmp_path: Path) -> None:
    processes = [
        CONTEXT.Process(target=checkpointing.one_of_two_silent, args=(rank, tmp_path / "store", tmp_path / "folder"))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        processes[0].join(120)
        assert processes[0].exitcode == 0
    finally:
        for process in processes:
            process.kill()
            process.join()
    for verdict in ("save", "restore"):
        assert "Timed out" in (tmp_path / "folder" / f"{verdict}.txt").read_text()


@pytest.mark.unit
def test_bugs_are_not_dressed_up(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "measure", None)
    one.save(3, wait=False)
    with pytest.raises(TypeError):
        one.checkpoints.finish()


@pytest.mark.unit
def test_a_folder_that_nodes_do_not_share(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.begin(1, 0)
    with pytest.raises(
        CheckpointError, match=r"rank-00007.safetensors: not what its rank wrote, seen from rank 0. .* all nodes share"
    ):
        folder.commit(1, {"rank-00007.safetensors": (10, 0)}, {})


@pytest.mark.unit
def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot hold checkpoints"):
        Checkpoints(tmp_path / "file", {})
