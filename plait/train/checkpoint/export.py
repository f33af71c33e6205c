"""A run's newest checkpoint as a Hugging Face folder, assembled in one process whatever the run's degree
was."""

from __future__ import annotations

from pathlib import Path

from plait.core.errors import CheckpointError
from plait.core.plan import Plan
from plait.core.strategy import Strategy
from plait.train.checkpoint.checkpoints import Checkpoints
from plait.train.checkpoint.huggingface import save
from plait.train.comm.wire import NullWire
from plait.train.model.transformer import Transformer


def export_run(run: Path, out: Path) -> int:
    """Write ``out``; returns the step. Raises CheckpointError for a run without a usable checkpoint."""
    plan = Plan.read(run / "plan.json")
    model = Transformer(plan.model, Strategy())
    held = {store.key: store.held("optim") for store in model.units.values()}
    checkpoints = Checkpoints(run / "checkpoints", held, read_only=True)  # the run may be alive
    step = checkpoints.latest()
    if step is None:
        raise CheckpointError(f"{run} holds no complete checkpoint yet")
    checkpoints.load(step, {"master": {store.key: store.kept for store in model.units.values()}})
    save(model, NullWire(), out)
    return step
