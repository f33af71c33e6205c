"""Which checkpoints stay: the newest, and one from which a finite step was made."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.core.model.spec import ModelSpec
from plait.core.parallel.sharding import Level, Sharding
from plait.core.parallel.strategy import Strategy
from plait.train.checkpoint.checkpoints import Checkpoints
from plait.train.checkpoint.folder import CheckpointFolder
from plait.train.model.pieces import pieces
from plait.train.model.units import make_units
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
    checkpoints.before_it_counts = lambda: seen.append(names(tmp_path))
    checkpoints.save(3, {}, {}, wait=True)
    assert seen == [["step-00000002", "step-00000003.partial"]]


def test_nothing_goes_as_long_as_no_step_from_the_newest_is_finite(tmp_path: Path, saved: Saved) -> None:
    saved(1, 2, keep=2)
    saved(3, keep=1, prune=False)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]


def test_one_whose_steps_are_not_finite_is_passed_over_and_the_last_of_them_kept(tmp_path: Path, saved: Saved) -> None:
    checkpoints = saved(1, 2, 3, keep=3)
    assert checkpoints.pass_over(3) == "step-00000003.not-finite"
    assert checkpoints.newest() == 2 and checkpoints.passed_over == [(3, "step-00000003.not-finite")]
    assert checkpoints.pass_over(2) == "step-00000002.not-finite"
    restored = checkpoints.restore({})
    assert restored is not None and restored.step == 1 and restored.warnings == ()
    assert names(tmp_path) == ["step-00000001", "step-00000002.not-finite"]
    assert checkpoints.pass_over(7) == "", "there is none"
    checkpoints.pass_over(1)
    assert checkpoints.restore({}) is None, "the run begins anew"


def test_what_else_has_to_be_on_disk_is_there_before_a_checkpoint_counts(tmp_path: Path, saved: Saved) -> None:
    checkpoints, seen = saved(1, keep=2), list[list[int]]()
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
    checkpoints.before_it_counts = lambda: seen.append([one.step for one in folder.complete()])
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
    ["", "null", "[]", pytest.param("[" * 60_000, id="deep"), "\x00", '{"crc32": Infinity}', {"state": []},
     {"state": {"skipped": "many"}}, {"files": []}, {"files": {"../x": [1, 2]}}, {"tensors": {"a": None}},
     {"tensors": {"a": ["F32", [2], [["rank-00000.safetensors", [0], [2]]]]}},
     {"step": "3"}, {"serial": None}],
)  # fmt: skip
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
    """At every level: the boxes of all ranks of a sharding group cover each piece, and none of it twice."""
    sharding, world = Sharding(**shard), 12
    ranks = [
        make_units(pieces(SPEC, Strategy(), 0), SPEC.vocab, 0, sharding, rank, torch.float32, torch.device("cpu"))
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
