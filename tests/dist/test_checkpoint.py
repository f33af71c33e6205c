"""Checkpoints: the same logical tensors under every degree, and which of them stay."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.core.base.errors import CheckpointError
from plait.train.checkpoint import checkpoints as module
from plait.train.checkpoint.checkpoints import Checkpoints
from tests.dist import checkpointing
from tests.dist.checkpointing import GPT, LLAMA, One, build, differences, tensors_of, zeros_like
from tests.support.held import held_of
from tests.support.ranks import Ranks

# ---- what comes back ----


def test_loads_bit_for_bit_at_other_degrees(four: Ranks, tmp_path: Path) -> None:
    """At tp = 4 key/value heads are held twice. More, on threads, in ``tests/train/checkpoint``."""
    four.run(checkpointing.save, tmp_path, LLAMA, 4, 4, 4)
    for tp in (1, 2):
        for answer in four.run(checkpointing.load, tmp_path, LLAMA, tp, 4)[:tp]:
            assert answer == (4, {"step": 4, "rank": 0}, [])


@pytest.mark.unit
def test_later_changes_are_not_seen(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    changed, real = threading.Event(), module.write_ranges

    def late(*args: Any, **kwargs: Any) -> Any:
        assert changed.wait(30)
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "write_ranges", late)
    tensors, state = tensors_of(one.model, 3), {"list": [1]}
    one.checkpoints.save(3, tensors, state)
    assert one.checkpoints.saving
    for by_name in tensors.values():
        for tensor in by_name.values():
            tensor.zero_()
    state["list"].append(2)
    changed.set()
    one.checkpoints.finish()
    assert not one.checkpoints.saving
    assert one.checkpoints.load(3, tensors) == {"list": [1]}
    assert differences(one.model, tensors, tensors_of(one.model, 3)) == []


@pytest.mark.unit
def test_a_save_waits_for_the_one_before(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, real = threading.Event(), module.write_ranges

    def late(*args: Any, **kwargs: Any) -> Any:
        assert goes_on.wait(30)
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "write_ranges", late)
    one.save(3, wait=False)
    assert "step-00000003" not in one.names()
    second = threading.Thread(target=one.save, args=(4,), kwargs={"wait": False})
    second.start()
    second.join(0.1)
    assert second.is_alive()
    goes_on.set()
    second.join(30)
    assert "step-00000003" in one.names()
    one.checkpoints.finish()
    assert one.names() == ["step-00000003", "step-00000004"]


@pytest.mark.unit
def test_part_of_a_checkpoint_can_be_loaded(one: One) -> None:
    expected = {"weights": tensors_of(one.model, 2)["weights"]}
    found = zeros_like(expected)
    one.checkpoints.load(2, found)
    assert differences(one.model, found, expected) == []


@pytest.mark.unit
def test_numbers_of_a_state_come_back_exactly(one: One) -> None:
    state = {"loss": 0.1 + 0.2, "sequences": 2**60 + 1, "plan": "c0ffee", "none": None}
    one.checkpoints.save(3, {}, state, wait=True)
    assert one.checkpoints.load(3, {}) == state
    assert torch.tensor(one.checkpoints.load(3, {})["loss"], dtype=torch.float64) == 0.1 + 0.2


# ---- which checkpoints stay ----


@pytest.mark.unit
def test_keeps_the_newest(one: One) -> None:
    for step in (3, 4, 10):
        one.save(step)
        assert one.latest() == step
    assert one.names() == ["step-00000004", "step-00000010"]


@pytest.mark.unit
def test_going_back_counts_as_newest(tmp_path: Path) -> None:
    one = One(tmp_path, keep=3)
    one.save(3)
    for step, latest in ((1, 1), (2, 2)):  # an abandoned step 3 must neither be resumed from nor push these out
        one.save(step)
        assert one.latest() == latest
    one.save(4)
    assert one.names() == ["step-00000001", "step-00000002", "step-00000004"]


@pytest.mark.unit
def test_an_empty_folder_has_none(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "a" / "b", held_of(build(GPT).pieces))
    assert checkpoints.restore({}) is None
    with pytest.raises(
        CheckpointError, match=r"no complete checkpoint there\. There is no other checkpoint in this folder"
    ):
        checkpoints.load(5, {})
