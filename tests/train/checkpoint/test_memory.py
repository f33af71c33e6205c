"""Copies of the state in a host's memory: which of them counts, and what is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from plait.train.checkpoint.memory import Memory


def state(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"master": {"a": torch.full((3,), value)}, "exp_avg": {"a": torch.full((3,), -value)}}


def memory(folder: Path, plan: str = "p") -> Memory:
    return Memory(folder, plan=plan, neighbour=0, group=None)


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
