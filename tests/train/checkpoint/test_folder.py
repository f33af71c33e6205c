"""Which checkpoints stay: the newest, and one from which a finite step was made."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.core.base.errors import CheckpointError
from plait.core.model.spec import ModelSpec
from plait.core.parallel.sharding import Level, Sharding
from plait.core.parallel.strategy import Strategy
from plait.train.checkpoint.checkpoints import Checkpoints
from plait.train.checkpoint.folder import CheckpointFolder, Keep, file_of, measure
from plait.train.model.pieces import pieces
from plait.train.model.units import ShardSpec, make_units
from tests.train.checkpoint.writing import GPT

SPEC = ModelSpec.from_dict({**GPT, "vocab": 19})
Saved = Callable[..., Checkpoints]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """Saves steps with so many to keep, as one process."""

    def save(*steps: int, keep: int, prune: bool = True) -> Checkpoints:
        checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", {}, keep=keep)
        for step in steps:
            checkpoints.save(step, {}, {"step": step}, wait=True, prune=prune)
        return checkpoints

    return save


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())


@pytest.mark.parametrize(("keep", "left"), [(1, [3, 4]), (2, [3, 4]), (3, [2, 3, 4]), (9, [1, 2, 3, 4])])
def test_the_newest_stay_and_never_one_alone(tmp_path: Path, saved: Saved, keep: int, left: list[int]) -> None:
    saved(1, 2, 3, 4, keep=keep)
    assert names(tmp_path) == [f"step-{step:08d}" for step in left]


def test_of_one_to_keep_the_one_before_goes_when_the_next_begins(tmp_path: Path, saved: Saved) -> None:
    """So that no more is on disk than the newest and the one that is written."""
    seen: list[list[str]] = []
    checkpoints = saved(1, 2, keep=1)
    checkpoints.before_commit = lambda: seen.append(names(tmp_path))
    checkpoints.save(3, {}, {}, wait=True)
    assert seen == [["step-00000002", "step-00000003.partial"]]


def test_nothing_goes_as_long_as_no_step_from_the_newest_is_finite(tmp_path: Path, saved: Saved) -> None:
    saved(1, 2, keep=2)
    saved(3, keep=1, prune=False)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]


def test_one_whose_steps_are_not_finite_is_passed_over_and_the_last_of_them_kept(tmp_path: Path, saved: Saved) -> None:
    checkpoints = saved(1, 2, 3, keep=3)
    assert checkpoints.mark_not_finite(3) == "step-00000003.not-finite"
    assert checkpoints.newest() == 2 and checkpoints.not_finite == [(3, "step-00000003.not-finite")]
    assert checkpoints.mark_not_finite(2) == "step-00000002.not-finite"
    restored = checkpoints.restore({})
    assert restored is not None and restored.step == 1 and restored.warnings == ()
    assert names(tmp_path) == ["step-00000001", "step-00000002.not-finite"]
    assert checkpoints.mark_not_finite(7) == "", "there is none"
    checkpoints.mark_not_finite(1)
    assert checkpoints.restore({}) is None, "the run begins anew"


def test_what_else_has_to_be_on_disk_is_there_before_a_checkpoint_counts(tmp_path: Path, saved: Saved) -> None:
    checkpoints, seen = saved(1, keep=2), list[list[int]]()
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
    checkpoints.before_commit = lambda: seen.append([one.step for one in folder.complete()])
    checkpoints.save(2, {}, {}, wait=True)
    assert seen == [[1]] and [one.step for one in folder.complete()] == [2, 1]


def rewritten(folder: Path, **changes: Any) -> str:
    """A manifest whose values somebody has changed, with the checksum that belongs to them."""
    body = json.loads((folder / "manifest.json").read_text()) | changes
    body.pop("crc32")
    crc = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    return json.dumps({**body, "crc32": crc})


@pytest.mark.parametrize(
    "damage",
    ["", "[]", pytest.param("[" * 60_000, id="deep"), '{"crc32": Infinity}', {"files": {"../x": [1, 2]}}],
)
def test_of_a_damaged_manifest_the_one_before_is_used(
    tmp_path: Path, saved: Saved, damage: str | dict[str, Any]
) -> None:
    checkpoints = saved(1, 2, keep=2)
    newest = tmp_path / "run" / "checkpoints" / "step-00000002"
    text = damage if isinstance(damage, str) else rewritten(newest, **damage)
    (newest / "manifest.json").write_text(text)
    restored = checkpoints.restore({})
    assert restored is not None and restored.step == 1
    (warning,) = restored.warnings
    assert "step-00000002/manifest.json: damaged" in warning and "The checkpoint of step 1 is used instead" in warning


def test_a_pipe_for_a_manifest_is_not_waited_for(tmp_path: Path, saved: Saved) -> None:
    checkpoints = saved(1, 2, keep=2)
    manifest = tmp_path / "run" / "checkpoints" / "step-00000002" / "manifest.json"
    manifest.unlink()
    os.mkfifo(manifest)
    restored = checkpoints.restore({})
    assert restored is not None and restored.step == 1


@pytest.mark.parametrize("shard", [{}, {"optim": 2}, {"grads": 2, "optim": 2}, {"params": 3, "grads": 3, "optim": 3},
                                   {"params": 2, "grads": 4, "optim": 4}])  # fmt: skip
@pytest.mark.parametrize("level", ["params", "grads", "optim"])
def test_what_ranks_hold_of_a_sharded_unit_is_every_number_once(shard: dict[str, int], level: Level) -> None:
    """At every level: the boxes of all ranks of a sharding group cover each piece, and none of it
    twice."""
    sharding, world = Sharding(**shard), 12
    ranks = [
        make_units(
            pieces(SPEC, Strategy(), 0), SPEC.vocab, 0, ShardSpec(sharding, rank, torch.float32, torch.device("cpu"))
        )
        for rank in range(world)
    ]
    for unit, first in ranks[0].items():
        count = {"params": first.params, "grads": first.grads, "optim": sharding.optim}[level]
        for piece in first.pieces:
            counted = torch.zeros(piece.shape)
            for units in ranks[:count]:
                store = units[unit]
                for held in store.held(level):
                    if held.piece.name == piece.name:
                        counted[tuple(map(slice, held.box.start, held.box.stop))] += 1
                        assert held.start + held.box.elements <= store.numel
            assert bool((counted == 1).all()), (unit, piece.name)


# ---- a folder of its own ----


def folder_of(root: Path, *steps: int) -> CheckpointFolder:
    """A folder with complete checkpoints of one file each, in that order."""
    folder = CheckpointFolder(root)
    folder.open()
    for step in steps:
        folder.begin(step, 0)
        file = folder.partial(step) / file_of(0)
        file.write_bytes(b"%d" % step)
        folder.commit(step, {file_of(0): measure(file)}, {"step": step})
    return folder


def test_what_a_crash_has_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "checkpoints", 1)
    for name in ("step-00000002.partial", "step-00000001.old.partial", "step-00000003.unusable", "mine.partial"):
        (folder.root / name).mkdir()
    folder.open()
    assert sorted(path.name for path in folder.root.iterdir()) == [
        "mine.partial", "step-00000001", "step-00000003.unusable",
    ]  # fmt: skip
    assert folder.survey() == ([1], [], [str(folder.root / "step-00000003.unusable")])


def test_a_checkpoint_that_has_no_room_is_not_begun(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match=r"step 5: it needs \d+ bytes and \d+ are free. It would be the first"):
        folder.begin(5, 1 << 62)
    assert not folder.partial(5).exists()
    folder = folder_of(tmp_path / "checkpoints", 1, 3)
    with pytest.raises(CheckpointError, match="The checkpoint of step 3 is untouched"):
        folder.begin(5, 1 << 62)


def test_a_checkpoint_is_begun_anew_also_where_all_others_were_removed(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run" / "checkpoints", 1)
    folder.begin(2, 0)
    (folder.partial(2) / "left").touch()
    folder.begin(2, 0)
    assert list(folder.partial(2).iterdir()) == []
    shutil.rmtree(folder.root)
    folder.begin(2, 0)
    assert folder.partial(2).is_dir()
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(CheckpointError, match="this folder is gone: it was removed or renamed during the run"):
        folder.begin(2, 0)
    assert not (tmp_path / "run").exists()


def test_a_file_that_the_first_rank_does_not_see_makes_no_checkpoint(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "checkpoints", 1)
    folder.begin(2, 0)
    (folder.partial(2) / file_of(1)).write_bytes(b"four")
    for size in (3, 5):
        with pytest.raises(
            CheckpointError, match=r"rank-00001\.safetensors: not what its rank wrote, seen from rank 0"
        ):
            folder.commit(2, {file_of(1): (size, 0)}, {})
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors: not what its rank wrote"):
        folder.commit(2, {file_of(0): (4, 0)}, {})
    assert folder.survey()[0] == [1]


def test_a_run_that_went_back_comes_by_again(tmp_path: Path) -> None:
    """What was written last is the newest, whatever its step."""
    folder = folder_of(tmp_path / "checkpoints", 1, 2, 3)
    folder_of(tmp_path / "checkpoints", 2)
    assert [(one.step, one.serial) for one in folder.complete()] == [(2, 4), (3, 3), (1, 1)]
    assert sorted(path.name for path in folder.root.iterdir()) == [f"step-0000000{step}" for step in (1, 2, 3)]
    folder.prune(Keep(2))
    assert folder.survey()[0] == [2, 3]
    assert not folder.path(1).exists() and not folder.partial(1).exists()


def test_what_is_set_aside_takes_the_place_of_an_older_one_of_its_name(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "checkpoints", 1, 2)
    (folder.root / "step-00000002.unusable").mkdir()
    (folder.root / "step-00000009.not-finite").mkdir()
    (folder.root / "step-00000002.unusable" / "old").touch()
    assert folder.set_aside(2) == "step-00000002.unusable"
    assert not (folder.root / "step-00000002.unusable" / "old").exists()
    assert (folder.root / "step-00000009.not-finite").exists()
    assert folder.set_aside(1, "not-finite") == "step-00000001.not-finite"
    assert not (folder.root / "step-00000009.not-finite").exists()


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ((), "There is no other checkpoint in this folder"),
        ((3,), "The folder also holds step 3"),
        ((4, 3), "The folder also holds steps 3, 4"),
    ],
)
def test_of_a_checkpoint_that_is_not_there_the_others_are_told(
    tmp_path: Path, others: tuple[int, ...], says: str
) -> None:
    folder = folder_of(tmp_path / "checkpoints", *others)
    with pytest.raises(CheckpointError, match=f"step-00000007: no complete checkpoint there. {says}$"):
        folder.read(7)
    folder = folder_of(tmp_path / "checkpoints", 7)
    (folder.path(7) / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=f"manifest.json: damaged: its checksum does not match. {says}$"):
        folder.read(7)


def test_what_is_wrong_with_a_checkpoint_is_seen_from_sizes_and_then_from_contents(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "checkpoints", 5, 6)
    file = folder.path(6) / file_of(0)
    (sound,) = (one for one in folder.complete() if one.step == 6)
    assert folder.problem(sound, [file_of(0)]) is None and folder.problem(sound, []) is None
    file.write_bytes(b"7")
    assert folder.survey()[0] == [6, 5], "contents are not read"
    changed = "damaged: its checksum does not match, some bytes have changed since it was written"
    assert folder.problem(sound, [file_of(0)]) == f"{file}: {changed}"
    for content, says in ((b"66", "damaged: 2 bytes, 1 were written"), (b"", "damaged: 0 bytes, 1 were written")):
        file.write_bytes(content)
        assert folder.problem(sound, [file_of(0)]) == f"{file}: {says}"
        assert folder.survey() == ([5], [(6, f"{file}: {says}")], [])
    file.unlink()
    assert folder.problem(sound, [file_of(0)]) == f"{file}: missing"
    assert folder.survey()[1] == [(6, f"{file}: missing")]
    file.symlink_to(file)
    assert folder.problem(sound, [file_of(0)]) == f"{file}: cannot be read: Too many levels of symbolic links"


def test_a_folder_that_was_renamed_is_no_checkpoint_of_that_step(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "checkpoints", 5)
    folder.path(5).rename(folder.path(6))
    (folder.root / "step-7").mkdir()
    (folder.root / "notes").mkdir()
    folder.path(8).mkdir()
    steps, problems, _ = folder.survey()
    assert steps == []
    assert problems == [
        (6, f"{folder.path(6)}/manifest.json: damaged: it belongs to step 5; the folder was renamed"),
        (8, f"{folder.path(8)}/manifest.json: missing"),
    ]
    assert CheckpointFolder(tmp_path / "none").survey() == ([], [], [])


def test_steps_of_more_than_eight_digits_are_steps(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "checkpoints", 123456789)
    assert folder.survey()[0] == [123456789]


def test_files_are_measured_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.train.checkpoint.folder._BLOCK", 3)
    for text in (b"", b"abc", b"abcd", b"abcdefgh"):
        (tmp_path / "file").write_bytes(text)
        assert measure(tmp_path / "file") == (len(text), zlib.crc32(text))


# ---- in the background ----


def test_what_is_being_written_is_told_and_what_went_wrong_comes_with_the_next(tmp_path: Path, saved: Saved) -> None:
    checkpoints, going, seen = saved(1, keep=2), threading.Event(), threading.Event()
    assert (checkpoints.saving, checkpoints.writing) == (False, 0)

    def fail() -> None:
        seen.set()
        going.wait()
        raise OSError(5, "the disk is broken")

    checkpoints.before_commit = fail
    checkpoints.save(2, {}, {})
    seen.wait()
    assert (checkpoints.saving, checkpoints.writing) == (True, 2)
    (writing,) = (thread for thread in threading.enumerate() if thread.name == "checkpoint")
    going.set()
    writing.join()
    assert (checkpoints.saving, checkpoints.writing) == (False, 0)
    checkpoints.before_commit = lambda: None
    with pytest.raises(CheckpointError, match=r"step-00000002.partial: cannot be written: .*the disk is broken"):
        checkpoints.save(3, {}, {})
    checkpoints.finish()
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_meanwhile_is_said_with_what_was_needed(tmp_path: Path, saved: Saved, number: int) -> None:
    checkpoints = saved(1, keep=2)

    def fill() -> None:
        raise OSError(number, "full")

    checkpoints.before_commit = fill
    with pytest.raises(
        CheckpointError, match=r"no room for the checkpoint of step 2: it needs \d+ bytes and .* step 1 is untouched"
    ):
        checkpoints.save(2, {}, {}, wait=True)
    assert names(tmp_path) == ["step-00000001"]


def test_what_ranks_say_beside_a_checkpoint_is_of_the_last(tmp_path: Path) -> None:
    words = iter(["one", "two"])
    checkpoints = Checkpoints(tmp_path / "checkpoints", {}, statistics=lambda: next(words))
    assert checkpoints.gathered_statistics == []
    checkpoints.save(1, {}, {}, wait=True)
    assert checkpoints.gathered_statistics == ["one"]
    checkpoints.save(2, {}, {}, wait=True)
    assert checkpoints.gathered_statistics == ["two"]


def test_a_state_is_what_it_was_when_saving_began(tmp_path: Path) -> None:
    checkpoints, state = Checkpoints(tmp_path / "checkpoints", {}), {"rows": [1]}
    checkpoints.before_commit = lambda: state["rows"].append(2)
    checkpoints.save(4, {}, state, wait=True)
    assert checkpoints.load(4, {}) == {"rows": [1]}


def test_of_a_run_that_goes_on_nothing_is_changed_by_who_looks(tmp_path: Path, saved: Saved) -> None:
    saved(1, 2, keep=2)
    root = tmp_path / "run" / "checkpoints"
    (root / "step-00000003.partial").mkdir()
    (root / "step-00000002" / "manifest.json").write_text("?")
    looking = Checkpoints(root, {}, read_only=True)
    restored = looking.restore({})
    assert restored is not None and restored.step == 1
    assert restored.warnings[0].endswith("The checkpoint of step 1 is used instead")
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003.partial"]
    restored = Checkpoints(root, {}).restore({})
    assert restored is not None
    assert restored.warnings[0].endswith("; the unusable one is now step-00000002.unusable")
    assert names(tmp_path) == ["step-00000001", "step-00000002.unusable"]


def test_a_run_none_of_whose_checkpoints_can_be_used_does_not_begin_anew(tmp_path: Path, saved: Saved) -> None:
    saved(1, keep=2)
    root = tmp_path / "run" / "checkpoints"
    (root / "step-00000001" / "manifest.json").write_text("?")
    for problem in ("step-00000001/manifest.json: damaged", "step-00000001.unusable"):
        with pytest.raises(CheckpointError, match=f"none of its checkpoints can be used. .*{problem}.*run.name=NAME"):
            Checkpoints(root, {}).restore({})
        if (root / "step-00000001").exists():
            (root / "step-00000001").rename(root / "step-00000001.unusable")
    with pytest.raises(CheckpointError, match="cannot hold checkpoints: "):
        Checkpoints(root / "step-00000001.unusable" / "manifest.json", {})


def test_only_what_a_run_has_passed_over_is_told(tmp_path: Path, saved: Saved) -> None:
    checkpoints = saved(1, keep=2)
    for name in ("step-x.not-finite", "step-.not-finite", "step-00000012.not-finite", "step-00000003.unusable"):
        (tmp_path / "run" / "checkpoints" / name).mkdir()
    assert checkpoints.not_finite == [(12, "step-00000012.not-finite")]
    assert Checkpoints(tmp_path / "none", {}).newest() == 0
