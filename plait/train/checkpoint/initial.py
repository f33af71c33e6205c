"""Where initial weights come from: a folder of Hugging Face's, of torchtitan's, or of a run of Plait's.

| in the folder | it is |
|---|---|
| ``.metadata`` | torch.distributed.checkpoint's, in torchtitan's names |
| ``plan.json`` and ``checkpoints``; ``manifest.json`` | a run, of which the newest checkpoint is taken; one
checkpoint |
| else | Hugging Face's |
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from plait.core.base.errors import CheckpointError
from plait.core.base.passed_over import PassedOver
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.train.checkpoint.dcp import METADATA
from plait.train.checkpoint.folder import MANIFEST, CheckpointFolder
from plait.train.checkpoint.torchtitan_names import weights_in
from plait.train.checkpoint.weight_files import check_weights
from plait.train.model.pieces import pieces

if TYPE_CHECKING:
    from plait.train.model.transformer import Share

Kind = Literal["huggingface", "torchtitan", "plait"]


def kind_of(folder: Path) -> Kind:
    """Whose weights a folder holds."""
    if (folder / METADATA).is_file():
        return "torchtitan"
    own = (folder / MANIFEST).is_file() or (folder / "plan.json").is_file()
    return "plait" if own else "huggingface"


class Saved(NamedTuple):
    """A checkpoint of a run."""

    root: Path
    step: int


def saved_in(folder: Path) -> Saved:
    """The checkpoint that a folder is, or the newest of the run that it is. Raises CheckpointError."""
    name = folder.resolve().name
    if (folder / MANIFEST).is_file() and name.removeprefix("step-").isdigit():
        return Saved(folder.resolve().parent, int(name.removeprefix("step-")))
    root = folder / "checkpoints"
    steps = [manifest.step for manifest in CheckpointFolder(root).complete()]
    if not steps:
        raise CheckpointError(f"{folder} holds no complete checkpoint")
    return Saved(root, steps[0])


def check_initial(folder: Path, spec: ModelSpec) -> PassedOver:
    """Refuse at once what ranks would refuse when they have started; what was passed over. Raises JobError
    and CheckpointError."""
    match kind_of(folder):
        case "huggingface":
            return check_weights(folder, spec)
        case "torchtitan":
            weights_in(spec, folder)
        case "plait":
            found = saved_in(folder)
            tensors = CheckpointFolder(found.root).read(found.step).tensors
            for piece in pieces(spec, Strategy(), 0):
                stored = tensors.get(f"master/{piece.name}")
                if stored is None or stored.shape != piece.shape:
                    told = f"is {list(stored.shape)}" if stored else "is missing"
                    raise CheckpointError(
                        f"{folder}: '{piece.name}' {told}, and the job's model has {list(piece.shape)}"
                    )
    return PassedOver()


def load_initial(model: Share, folder: Path) -> None:
    """Fill this rank's weights. Called by all ranks at the same point. Raises CheckpointError."""
    from plait.train.checkpoint import huggingface, torchtitan

    match kind_of(folder):
        case "huggingface":
            huggingface.load(model, folder)
        case "torchtitan":
            torchtitan.load(model, folder)
        case "plait":
            _load_own(model, saved_in(folder))


def _load_own(model: Share, saved: Saved) -> None:
    import torch.distributed as dist

    from plait.train.checkpoint.checkpoints import Checkpoints
    from plait.train.checkpoint.safetensors_folder import DTYPES
    from plait.train.comm.world import new_group

    tensors = CheckpointFolder(saved.root).read(saved.step).tensors
    dtype = DTYPES[next(one.dtype for key, one in tensors.items() if key.startswith("master/"))]
    held = {store.key: store.held("params") for store in model.units.values()}
    found = {store.key: store.kept.to(dtype, copy=True) for store in model.units.values()}
    group = new_group() if dist.is_initialized() else None
    Checkpoints(saved.root, held, group=group, read_only=True).load(saved.step, {"master": found})
    for store in model.units.values():
        store.kept.copy_(found[store.key])
