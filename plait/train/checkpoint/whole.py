"""Load a run's checkpoint as one whole model in this process, whatever parallel degrees the run
had."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import torch

from plait.core.base.errors import CheckpointError, JobError
from plait.core.base.numbers import LARGEST, shown
from plait.core.job.plan import Plan
from plait.core.parallel.strategy import Strategy
from plait.train.checkpoint.checkpoints import Checkpoints
from plait.train.checkpoint.folder import CheckpointFolder, best_of
from plait.train.model.transformer import Transformer


class Whole(NamedTuple):
    """A model after ``step`` steps. warnings: a line for every damaged checkpoint that was
    skipped."""

    model: Transformer
    step: int
    warnings: tuple[str, ...]


def master_dtype(plan: Plan) -> torch.dtype:
    """Return the dtype of a run's master weights, which its optimizer updates."""
    return torch.float64 if plan.workload.precision == "fp64" else torch.float32


_NUMBER = re.compile(r"-?[0-9]{1,18}")
"""Pattern of a step's number; steps have at most 18 digits."""


def step_of(run: Path, word: str | int | None) -> int | None:
    """Return the step that ``word`` names: a number, or ``best``, the checkpoint with the least
    evaluation loss; None for the newest. Raises JobError for another word, CheckpointError if no
    checkpoint has an evaluation."""
    if word is None or isinstance(word, int):
        return word
    if _NUMBER.fullmatch(word):
        return int(word)
    if word != "best":
        raise JobError(f"{shown(word)} is no step", key="--step", fix="Write a number, or best")
    folder = CheckpointFolder(run / "checkpoints")
    found = best_of(folder.complete())
    if not found:
        problem = "no checkpoint there was evaluated when it was made"
        fix = "Let train.eval_every and train.checkpoint_every fall together"
        raise CheckpointError(f"{folder.root}: {problem}. {fix}")
    return found[0].step


def check_step(step: int | None) -> None:
    """Raise JobError for a number outside the range of steps."""
    if step is not None and not 1 <= step <= LARGEST:
        raise JobError(f"{shown(step)} is no step", key="--step", fix=f"Allowed: 1 to {LARGEST}")


def load_whole(run: Path, step: int | None = None) -> Whole:
    """Load the model of ``step`` (None: of the newest checkpoint that is intact). The run may be
    training.

    Raises CheckpointError for a run without such a checkpoint; JobError for a folder without a run,
    and for an invalid step.
    """
    check_step(step)
    plan = Plan.read(run / "plan.json")
    model = Transformer(plan.model, Strategy(), dtype=master_dtype(plan))
    held = {store.key: store.held("optim") for store in model.units.values()}
    checkpoints = Checkpoints(run / "checkpoints", held, read_only=True)
    weights = {"master": {store.key: store.kept for store in model.units.values()}}
    if step is not None:
        checkpoints.load(step, weights)
        return Whole(model, step, ())
    restored = checkpoints.restore(weights)
    if restored is None:
        raise CheckpointError(f"{run} holds no complete checkpoint yet")
    return Whole(model, restored.step, restored.warnings)
