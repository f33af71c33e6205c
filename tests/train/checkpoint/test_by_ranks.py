"""What several ranks save and load together; ranks as threads. Deaths of ranks are in
``tests/dist``."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from plait.core.base.errors import CheckpointError
from plait.core.model.spec import ModelSpec
from plait.train.checkpoint import checkpoints as module
from plait.train.checkpoint import ranges
from plait.train.checkpoint.checkpoints import Checkpoints, Peers
from plait.train.checkpoint.memory import MemoryCheckpoints
from plait.train.comm import world
from tests.dist import checkpointing
from tests.dist.checkpointing import GPT, LLAMA, build, tensors_of
from tests.support.held import held_of
from tests.support.threads import threads


@pytest.fixture(autouse=True)
def _groups() -> Iterator[None]:
    with mock.patch.object(checkpointing, "group_of", lambda size: world.new_group(range(size))):
        yield


@pytest.mark.parametrize("chunk", [ranges.CHUNK, 64])
@pytest.mark.parametrize("spec", [LLAMA, GPT], ids=["llama", "gpt"])
def test_loads_bit_for_bit_at_every_degree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: ModelSpec, chunk: int
) -> None:
    """Key and value heads that two ranks hold, a rank without a word; tensors one by one and at
    once."""
    monkeypatch.setattr(ranges, "CHUNK", chunk)
    for saved in (2, 4):
        threads(saved).run(checkpointing.save, tmp_path, spec, saved, saved, saved)
        for tp in (1, 2, 4):
            for answer in threads(tp).run(checkpointing.load, tmp_path, spec, tp, saved):
                assert answer == (saved, {"step": saved, "rank": 0}, [])


def test_copies_are_written_once_by_all_and_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads(2).run(checkpointing.save, tmp_path / "once", LLAMA, 2, 2, 1)
    threads(4).run(checkpointing.save, tmp_path / "copied", LLAMA, 2, 4, 1)
    once, copied = (
        sum(file.stat().st_size for file in (tmp_path / name).rglob("*.safetensors")) for name in ("once", "copied")
    )
    assert copied == pytest.approx(once, rel=0.02)
    assert len(list((tmp_path / "copied").rglob("*.safetensors"))) == 4, "all ranks share the writing"
    read = list[int]()
    real = module.read_ranges

    def noted(folder: Path, ranges: Any, tensors: Any) -> None:
        read.append(sum(one.tensor.nbytes for one in ranges))
        real(folder, ranges, tensors)

    monkeypatch.setattr(module, "read_ranges", noted)

    def restored(rank: int) -> bool:
        model = build(LLAMA, 1)
        found = checkpointing.zeros_like(tensors_of(model, 1))
        group = world.new_group()
        assert Checkpoints(tmp_path / "copied", held_of(model.pieces), group=group).restore(found) is not None
        return not checkpointing.differences(model, found, tensors_of(model, 1))

    assert threads(3).run(restored) == [True] * 3
    assert len(read) == 3 and sum(read) < 1.5 * once, "three ranks hold the same, and one reads each"


def test_one_rank_without_room_fails_for_all_and_the_next_is_tried(tmp_path: Path) -> None:
    real = module.write_ranges

    def full(folder: Path, rank: int, *rest: Any) -> str | None:
        if rank == 1 and "00000002" in folder.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(folder, rank, *rest)

    def saves(rank: int) -> list[str]:
        model, said = build(GPT, 2, rank), list[str]()
        checkpoints = Checkpoints(tmp_path, held_of(model.pieces), group=world.new_group())
        for step in (1, 2, 3):
            try:
                checkpoints.save(step, tensors_of(model, step), {}, wait=True)
                said.append("")
            except CheckpointError as error:
                said.append(str(error))
        return said

    with mock.patch.object(module, "write_ranges", full):
        for first, second, third in threads(2).run(saves):
            assert (first, third) == ("", "")
            assert (
                "no room for the checkpoint of step 2" in second and "The checkpoint of step 1 is untouched" in second
            )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_a_damaged_file_is_found_whoever_reads_it(tmp_path: Path) -> None:
    for step in (1, 2):
        threads(4).run(checkpointing.save, tmp_path, GPT, 4, 4, step)
    file = max((tmp_path / "step-00000002").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    for message, untouched in threads(4).run(checkpointing.load_damaged, tmp_path):
        assert f"{file}: damaged: its checksum does not match" in message and untouched
        assert message.endswith("The folder also holds step 1")
    for step, (warning,), differ in threads(4).run(checkpointing.restore_damaged, tmp_path):
        assert (step, differ) == (1, [])
        assert "its checksum does not match" in warning and "it is now" not in warning
    assert (tmp_path / "step-00000002.unusable").is_dir()


# ---- ranks that read or write together ----

ERRORS = {
    "checkpoint": (CheckpointError("told"), CheckpointError, "told"),
    "system": (OSError(errno.ENOSPC, "no room", "file"), OSError, "no room"),
    "without a number": (OSError("odd"), OSError, "odd"),
    "bug": (ValueError("a bug"), (ValueError, RuntimeError), "a bug"),
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("culprit", [0, 1])
def test_an_error_of_one_rank_is_that_of_all(name: str, culprit: int) -> None:
    error, kinds, words = ERRORS[name]

    def agree(rank: int) -> None:
        def work() -> int:
            if rank == culprit:
                raise error
            return rank

        with pytest.raises(kinds, match=words) as told:
            Peers(world.new_group()).run_on_all(work)
        if name == "system":
            assert (told.value.errno, told.value.filename) == (errno.ENOSPC, "file")  # type: ignore[union-attr]

    threads(2).run(agree)


def test_only_the_first_rank_leads() -> None:
    def lead(rank: int) -> tuple[Any, list[Any]]:
        peers = Peers(world.new_group())
        with pytest.raises(OSError, match="no disk"):
            peers.run_on_first(lambda: (_ for _ in ()).throw(OSError("no disk")))
        return peers.run_on_first(lambda: {"of": rank}), peers.run_on_all(lambda: rank * 2)

    assert threads(3).run(lead) == [({"of": 0}, [0, 2, 4])] * 3


# ---- in the memory of hosts ----


def state_of(rank: int, step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"master": {"a": torch.full((3 + rank,), float(step)), "b": torch.tensor([1.0 + rank])}}


@pytest.mark.parametrize("lost", [None, 0, 1])
def test_a_host_that_is_lost_leaves_its_copies_with_its_neighbour(tmp_path: Path, lost: int | None) -> None:
    """Two hosts of two ranks."""

    def memory(rank: int) -> MemoryCheckpoints:
        return MemoryCheckpoints(tmp_path / str(rank // 2), plan="p", neighbour=2, group=world.new_group())

    def keeps(rank: int) -> Exception | None:
        own = memory(rank)
        for step in (2, 4, 6):
            own.keep(step, state_of(rank, step), {"step": step})
        own.finish()
        return own.failure

    assert threads(4).run(keeps) == [None] * 4
    assert len(list((tmp_path / "0").glob("*.json"))) == 2 * 4, "two steps of its own ranks and of its neighbours"
    for file in (tmp_path / str(lost)).iterdir() if lost is not None else ():
        file.unlink()

    def goes_on(rank: int) -> tuple[int, dict[str, Any], bool]:
        own, found = memory(rank), state_of(rank, 0)
        found["master"]["b"].zero_()
        step = own.newest()
        state = own.restore(step, found)
        wanted = state_of(rank, step)["master"]
        return step, state, all(torch.equal(found["master"][name], wanted[name]) for name in wanted)

    assert threads(4).run(goes_on) == [(6, {"step": 6}, True)] * 4
    assert threads(4).run(lambda rank: memory(rank).newest()) == [6] * 4


def test_a_step_that_one_rank_does_not_have_is_none(tmp_path: Path) -> None:
    def keeps(rank: int) -> int:
        own = MemoryCheckpoints(tmp_path / str(rank), plan="p", neighbour=0, group=world.new_group())
        for step in (2, 4) if rank == 0 else (2,):
            own.keep(step, state_of(rank, step), {})
        return own.newest()

    assert threads(2).run(keeps) == [2, 2]
    for file in (tmp_path / "1").iterdir():
        file.unlink()

    def newest(rank: int) -> int:
        return MemoryCheckpoints(tmp_path / str(rank), plan="p", neighbour=0, group=world.new_group()).newest()

    assert threads(2).run(newest) == [0, 0]
