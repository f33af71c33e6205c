"""Copies of the state in a host's memory: which of them counts, and what is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from plait.train.checkpoint.memory import MemoryCheckpoints
from tests.support.threads import threads


def state(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"master": {"a": torch.full((3,), value)}, "exp_avg": {"a": torch.full((3,), -value)}}


def memory(folder: Path, plan: str = "p") -> MemoryCheckpoints:
    return MemoryCheckpoints(folder, plan=plan, neighbour=0, group=None)


def test_the_newest_copy_comes_back_and_two_are_kept(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        memory(tmp_path).keep(step, state(float(step)), {"skipped": 1})
    assert len(list(tmp_path.glob("*.json"))) == 2
    again, found = memory(tmp_path), state(0.0)
    assert again.newest() == 6
    assert again.restore(6, found) == {"skipped": 1}
    assert found["master"]["a"].tolist() == [6.0] * 3 and found["exp_avg"]["a"].tolist() == [-6.0] * 3
    assert memory(tmp_path, plan="another").newest() == 0


def changed(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: file.write_text(""),
    "deep": lambda file: file.write_text("[" * 60_000),
    "null": lambda file: file.write_text("null"),
    "a list": lambda file: file.write_text("[]"),
    "no copy": lambda file: changed(file, copy=None),
    "a short copy": lambda file: changed(file, copy=[0, 4]),
    "texts": lambda file: changed(file, copy=["0", "4", "5", "6", {}]),
    "Infinity": lambda file: changed(file, copy=[0, float("inf"), 5, 6, {}]),
    "state": lambda file: changed(file, copy=[0, 4, 5, 6, []]),
    "cut off": lambda file: file.with_suffix(".safetensors").write_bytes(b"x"),
    "gone": lambda file: file.with_suffix(".safetensors").unlink(),
}


@pytest.mark.parametrize("damage", list(DAMAGE.values()), ids=list(DAMAGE))
def test_of_a_damaged_copy_the_one_before_counts(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    for step in (2, 4):
        memory(tmp_path).keep(step, state(float(step)), {})
    damage(tmp_path / "rank-00000-step-00000004.json")
    assert memory(tmp_path).newest() == 2


def test_copies_of_other_types_or_another_world_do_not_count(tmp_path: Path) -> None:
    memory(tmp_path).keep(4, state(4.0), {})
    told = tmp_path / "rank-00000-step-00000004.json"
    kept = told.read_text()
    size, crc = json.loads(kept)["copy"][2:4]
    for copy in (["0", 4, size, crc, {}], [0, 4, size, crc, []], [0, 4, size, crc], [0, 4, size, crc + 1, {}],
                 [0, 4, size + 1, crc, {}]):  # fmt: skip
        changed(told, copy=copy)
        assert memory(tmp_path).newest() == 0
    told.write_text(kept)
    assert memory(tmp_path).newest() == 4
    changed(told, world=2)
    assert memory(tmp_path).newest() == 0


def test_a_full_memory_is_a_failure_of_the_copy_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    one = memory(tmp_path / "file")
    one.keep(2, state(2.0), {})
    assert isinstance(one.failure, OSError)
    assert one.newest() == 0
    one.folder = tmp_path / "other"
    one.keep(4, state(4.0), {})
    assert one.failure is None and one.newest() == 4


@pytest.mark.parametrize("neighbour", [1, 2])
def test_what_a_lost_host_had_comes_back_from_the_neighbour_that_has_it(tmp_path: Path, neighbour: int) -> None:
    """Three hosts of one rank each; the copy of the second is gone with its memory."""

    def run(rank: int) -> tuple[list[str], int, dict[str, object], list[float]]:
        folder = tmp_path / f"host{rank}"
        group: Any = dist.new_group()
        one = MemoryCheckpoints(folder, plan="p", neighbour=neighbour, group=group)
        one.keep(4, state(float(rank + 1)), {"skipped": 7})
        one.finish()
        assert one.failure is None
        names = sorted(path.name for path in folder.glob("*.json"))
        if rank == 1:
            for path in folder.iterdir():
                path.unlink()
        again, found = MemoryCheckpoints(folder, plan="p", neighbour=neighbour, group=group), state(0.0)
        newest = again.newest()
        return names, newest, again.restore(newest, found), found["master"]["a"].tolist()

    for rank, (names, newest, told, value) in enumerate(threads(3).run(run)):
        held = sorted({rank, (rank - neighbour) % 3})
        assert names == [f"rank-{one:05d}-step-00000004.json" for one in held]
        assert (newest, told, value) == (4, {"skipped": 7}, [float(rank + 1)] * 3)


def test_two_newest_copies_of_each_rank_are_kept(tmp_path: Path) -> None:
    def run(rank: int) -> tuple[list[str], list[str]]:
        folder = tmp_path / f"host{rank}"
        group: Any = dist.new_group()
        one = MemoryCheckpoints(folder, plan="p", neighbour=1, group=group)
        for step in (2, 4, 6):
            one.keep(step, state(float(step)), {})
        one.finish()
        return sorted(path.name for path in folder.glob("*.json")), sorted(
            path.stem for path in folder.glob("*.safetensors")
        )

    for told, files in threads(2).run(run):
        assert [name[5:] for name in told] == [
            f"{rank:05d}-step-{step:08d}.json" for rank in range(2) for step in (4, 6)
        ]
        assert files == [name.removesuffix(".json") for name in told]
