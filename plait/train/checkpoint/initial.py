"""Load initial weights: from a Hugging Face folder, or from a run of Plait.

| the folder has | its weights |
|---|---|
| ``plan.json`` and ``checkpoints`` | of a run, from its newest checkpoint |
| ``manifest.json`` | of one checkpoint of a run |
| else | Hugging Face's: safetensors, or torch.distributed.checkpoint's files (``.metadata``) |
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from plait.core.base.errors import CheckpointError
from plait.core.base.ignored_input import IgnoredInput
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.train.checkpoint.folder import MANIFEST, CheckpointFolder
from plait.train.checkpoint.weight_files import check_weights
from plait.train.model.pieces import pieces

if TYPE_CHECKING:
    from plait.train.model.transformer import Share


class Saved(NamedTuple):
    """A checkpoint of a run."""

    root: Path
    step: int


def saved_in(folder: Path) -> Saved | None:
    """Return the checkpoint in a checkpoint's folder, or the newest checkpoint in a run's folder;
    None for other folders. Raises CheckpointError for a run without a complete checkpoint."""
    real = folder.resolve()
    if (folder / MANIFEST).is_file() and real.name.removeprefix("step-").isdigit():
        return Saved(real.parent, int(real.name.removeprefix("step-")))
    if not any((folder / name).is_file() for name in (MANIFEST, "plan.json")):
        return None
    root = folder / "checkpoints"
    steps = [manifest.step for manifest in CheckpointFolder(root).complete()]
    if not steps:
        raise CheckpointError(f"{folder} holds no complete checkpoint")
    return Saved(root, steps[0])


def check_initial(folder: Path, spec: ModelSpec) -> IgnoredInput:
    """Check a folder of initial weights before ranks start, and return what it passes over. Raises
    JobError or CheckpointError where the ranks would."""
    saved = saved_in(folder)
    if saved is None:
        return check_weights(folder, spec)
    tensors = CheckpointFolder(saved.root).read(saved.step).tensors
    for piece in pieces(spec, Strategy(), 0):
        stored = tensors.get(f"master/{piece.name}")
        if stored is None or stored.shape != piece.shape:
            problem = f"is {list(stored.shape)}" if stored else "is missing"
            raise CheckpointError(f"{folder}: '{piece.name}' {problem}, and the job's model has {list(piece.shape)}")
    return IgnoredInput()


def load_initial(model: Share, folder: Path) -> None:
    """Fill this rank's weights from a folder: a run of Plait, one of its checkpoints, or a Hugging
    Face model. Called by all ranks at the same point. Raises CheckpointError."""
    from plait.train.checkpoint import huggingface

    if saved := saved_in(folder):
        _load_own(model, saved)
    else:
        huggingface.load(model, folder)


def _load_own(model: Share, saved: Saved) -> None:
    import torch.distributed as dist

    from plait.train.checkpoint.checkpoints import Checkpoints
    from plait.train.checkpoint.ranges import DTYPES
    from plait.train.comm.world import new_group

    tensors = CheckpointFolder(saved.root).read(saved.step).tensors
    dtype = DTYPES[next(one.dtype for key, one in tensors.items() if key.startswith("master/"))]
    held = {store.key: store.held("params") for store in model.units.values()}
    found = {store.key: store.kept.to(dtype, copy=True) for store in model.units.values()}
    group = new_group() if dist.is_initialized() else None
    Checkpoints(saved.root, held, group=group, read_only=True).load(saved.step, {"master": found})
    for store in model.units.values():
        store.kept.copy_(found[store.key])
