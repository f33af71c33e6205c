"""What the ranks of the checkpoint tests do: tensors that are functions of their logical names,
saved and loaded at any degree."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from plait.core.base.errors import CheckpointError
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.train.checkpoint import checkpoints as module
from plait.train.checkpoint.checkpoints import Checkpoints
from plait.train.checkpoint.folder import file_of
from plait.train.model.transformer import ModelCut, Transformer
from tests.support.held import held_of
from tests.support.models import llama

LLAMA = llama()
GPT = ModelSpec(
    family="gpt", num_layers=1, hidden=8, num_heads=4, vocab=5, max_sequence=4
)  # at tp = 4 the last rank holds no word
KINDS = {"weights": torch.bfloat16, "master": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}

_groups: dict[int, Any] = {}


def group_of(size: int) -> Any:
    """A group of the first ``size`` ranks; called by all ranks of the world."""
    if size not in _groups:
        _groups[size] = dist.new_group(list(range(size)), backend="gloo")
    return _groups[size]


def tensors_of(model: Transformer, salt: int) -> dict[str, dict[str, Tensor]]:
    """Random numbers by kind and piece, the same logical tensors at every degree; NaN where no
    piece lies."""
    result: dict[str, dict[str, Tensor]] = {}
    for kind, dtype in KINDS.items():
        by_name = result[kind] = {
            name: torch.full(p.shape, float("nan"), dtype=dtype) for name, p in model.named.items()
        }
        for piece in model.pieces:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{salt}/{kind}/{piece.name}".encode()))
            piece.view(by_name[piece.parameter]).copy_(piece.cut(torch.randn(piece.shape, generator=generator)))
    return result


def differences(
    model: Transformer, found: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]]
) -> list[str]:
    """Names of the pieces whose bits differ."""
    return [
        f"{kind}/{piece.name}"
        for kind, by_name in expected.items()
        for piece in model.pieces
        if not torch.equal(piece.view(found[kind][piece.parameter]), piece.view(by_name[piece.parameter]))
    ]


def zeros_like(tensors: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    return {
        kind: {name: torch.zeros_like(tensor) for name, tensor in by_name.items()} for kind, by_name in tensors.items()
    }


def build(spec: ModelSpec, tp: int = 1, rank: int = 0) -> Transformer:
    return Transformer(spec, Strategy(tp=tp), ModelCut(tp_rank=rank % tp))


class One:
    """A single process with two complete checkpoints, steps 1 and 2."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.model = folder, build(GPT)
        self.checkpoints = Checkpoints(folder, held_of(self.model.pieces), keep=keep)
        for step in (1, 2):
            self.save(step)

    def save(self, step: int, *, wait: bool = True) -> None:
        self.checkpoints.save(step, tensors_of(self.model, step), {"step": step}, wait=wait)

    def latest(self) -> int:
        """The step that a run would go on from."""
        restored = self.checkpoints.restore({})
        assert restored is not None
        return restored.step

    def names(self) -> list[str]:
        return sorted(entry.name for entry in self.folder.iterdir())


def save(rank: int, folder: Path, spec: ModelSpec, tp: int, world: int, step: int) -> None:
    """Save at degree ``tp``, with as many data-parallel copies as fit into ``world`` ranks."""
    group = group_of(world) if world > 1 else None
    if rank < world:
        model = build(spec, tp, rank)
        checkpoints = Checkpoints(folder, held_of(model.pieces), group=group)
        checkpoints.save(step, tensors_of(model, step), {"step": step, "rank": rank}, wait=True)


def load(
    rank: int, folder: Path, spec: ModelSpec, tp: int, step: int
) -> tuple[int | None, dict[str, Any], list[str]] | None:
    """(step, state, names of pieces that differ from what was saved)."""
    group = group_of(tp) if tp > 1 else None
    if rank >= tp:
        return None
    model = build(spec, tp, rank)
    expected = tensors_of(model, step)
    found = zeros_like(expected)
    checkpoints = Checkpoints(folder, held_of(model.pieces), group=group)
    restored = checkpoints.restore(found)
    assert restored is not None
    assert restored.warnings == ()
    padding = found["weights"]["embedding.weight"][model.pieces[0].local_shape[0] :]
    assert not padding.any(), "padding of the vocabulary was overwritten"
    return restored.step, restored.state, differences(model, found, expected)


def load_damaged(rank: int, folder: Path) -> tuple[str, bool]:
    """(message, whether the tensors were left alone) for a checkpoint of step 2 that cannot be
    used."""
    model = build(GPT, 4, rank)
    tensors = zeros_like(tensors_of(model, 2))
    try:
        Checkpoints(folder, held_of(model.pieces), group=group_of(4)).load(2, tensors)
    except CheckpointError as error:
        return str(error), not any(tensor.any() for by_name in tensors.values() for tensor in by_name.values())
    return "nothing was raised", False


def restore_damaged(rank: int, folder: Path) -> tuple[int, tuple[str, ...], list[str]]:
    """(step, warnings, names of pieces that differ from step 1's)."""
    model = build(GPT, 4, rank)
    expected = tensors_of(model, 1)
    found = zeros_like(expected)
    restored = Checkpoints(folder, held_of(model.pieces), group=group_of(4)).restore(found)
    assert restored is not None
    return restored.step, restored.warnings, differences(model, found, expected)


def die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_at(stage: str, folder: Path) -> None:
    """One process that completes step 1 and is killed while it writes the next."""
    model = build(GPT)
    checkpoints = Checkpoints(folder, held_of(model.pieces), keep=1)
    checkpoints.save(1, tensors_of(model, 1), {"n": 1}, wait=True)
    owner, name, deadly = {
        "write": (module, "write_ranges", _half_a_file),
        "measure": (module, "measure", die),
        "rename": (Path, "rename", _last_rename),
        "delete": (shutil, "rmtree", _half_a_deletion),
    }[stage]
    step = 2
    if stage == "delete":  # the first goes when a step was made from the second
        checkpoints.save(step, tensors_of(model, step), {"n": step}, wait=True)
        step += 1
    with mock.patch.object(owner, name, deadly):
        checkpoints.save(step, tensors_of(model, step), {"n": step}, wait=True)


def _half_a_file(folder: Path, *_: Any) -> None:
    (folder / file_of(0)).write_bytes(b"half")
    die()


def _last_rename(path: Path, target: Path) -> None:
    if target.name == "step-00000002":
        die()
    os.rename(path, target)


def _half_a_deletion(path: Path, **_: Any) -> None:
    if path.name == "step-00000001.partial":
        next(path.glob("*.safetensors")).unlink()
        die()


def one_of_two_killed(rank: int, store: Path, folder: Path) -> None:
    """Rank 1 is killed in the middle of step 2; rank 0 writes down what it was told."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = build(GPT, 2, rank)
    checkpoints = Checkpoints(folder, held_of(model.pieces), group=group_of(2))
    checkpoints.save(1, tensors_of(model, 1), {"n": 1}, wait=True)
    with mock.patch.object(module, "write_ranges", die) if rank == 1 else contextlib.nullcontext():
        checkpoints.save(2, tensors_of(model, 2), {"n": 2})
        try:
            checkpoints.finish()
        except CheckpointError as error:
            (folder / "verdict.txt").write_text(str(error))
    os._exit(0)  # a group that has lost a rank cannot be taken down in order


def one_of_two_silent(rank: int, store: Path, folder: Path) -> None:
    """Rank 1 stops answering; rank 0 writes down what it is told, within the group's timeout."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = build(GPT, 2, rank)
    dist.barrier()  # their timeout is not for whoever starts late
    groups: list[Any] = [dist.new_group(backend="gloo", timeout=timedelta(seconds=3)) for _ in range(2)]
    saving, restoring = (Checkpoints(folder, held_of(model.pieces), group=group) for group in groups)
    if rank == 1:
        time.sleep(600)
    for name, work in (
        ("save", lambda: saving.save(2, tensors_of(model, 2), {}, wait=True)),
        ("restore", lambda: restoring.restore(tensors_of(model, 2))),
    ):
        try:
            work()
        except CheckpointError as error:
            (folder / f"{name}.txt").write_text(str(error))
    os._exit(0)
