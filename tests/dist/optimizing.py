"""What each rank runs in ``test_optimizers``: some steps of a job under an optimizer, its state saved and
read under other strategies, its weights compared with a single process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.core.job.plan import Plan
from plait.core.job.settings import TrainSection
from plait.core.model.spec import ModelSpec
from plait.train.checkpoint.checkpoints import Checkpoints
from plait.train.engine.assembly import RankPart, assemble
from plait.train.engine.optimizer import Optimizer
from plait.train.engine.steps import train_step
from plait.train.model.dropout import DropoutKey
from tests.dist.equality import CLIP, DEVICE, RATE, SEED, STEPS, adamw, batch_of, relative_error
from tests.dist.pipelining import Sizes, sizes_of
from tests.support.peers import Peer
from tests.support.reference import Reference


def reference(spec: ModelSpec, sizes: Sizes, train: TrainSection) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights before the first step and after the last, of a single process."""
    model = Peer(spec) if spec.qk_norm or spec.window else Reference(spec)
    model.perturb()
    weights = model.weights
    start = {name: weight.detach().clone() for name, weight in weights.items()}
    states = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights.items()}
    for step in range(STEPS):
        tokens, targets, samples = batch_of(spec, step, sizes.batch, sizes.sequence)
        for w in weights.values():
            w.grad = None
        model.loss(tokens, targets, dropout=DropoutKey(SEED, step), samples=samples).backward()
        gradients = {name: w.grad for name, w in weights.items() if w.grad is not None}
        norm = torch.sqrt(sum((g.square().sum() for g in gradients.values()), torch.zeros(()))).item()
        for name, w in weights.items():
            update(name, w, gradients[name] * min(1.0, CLIP / norm), states[name], step + 1, train)
    return start, {name: w.detach().clone() for name, w in weights.items()}


@torch.no_grad()
def update(
    name: str, weight: Tensor, gradient: Tensor, states: tuple[Tensor, Tensor], count: int, train: TrainSection
) -> None:
    """One weight's, as the optimizers' papers have it."""
    _update(name, weight, gradient, states, count, train)
    for state in states if train.optimizer_dtype == "bf16" else ():
        state.copy_(state.bfloat16())


def _update(
    name: str, weight: Tensor, gradient: Tensor, states: tuple[Tensor, Tensor], count: int, train: TrainSection
) -> None:
    first, _ = states
    if train.optimizer == "sgd":
        gradient = gradient + (0.1 * weight if weight.ndim > 1 else 0.0)
        first.mul_(train.sgd.momentum).add_(gradient)
        weight -= RATE * first
    elif train.optimizer == "muon" and weight.ndim == 2 and name.split(".")[0] in ("layers", "down", "up"):
        m = train.muon.momentum
        first.mul_(m).add_(gradient, alpha=1 - m)
        ahead = gradient * (1 - m) + first * m
        rate = RATE * 0.2 * max(weight.shape) ** 0.5
        weight *= 1 - RATE * 0.1
        weight -= rate * newton_schulz(ahead, train.muon.ns_coefficients)
    else:
        adamw(weight, gradient, states, count)


def newton_schulz(matrix: Tensor, coefficients: tuple[float, float, float]) -> Tensor:
    """By singular values: each iteration maps s to a s + b s^3 + c s^5."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    a, b, c = coefficients
    s = s / s.square().sum().sqrt()
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ v


def trained(
    rank: int, planned: Plan, steps: tuple[int, int], folder: Path | None = None
) -> tuple[float, str, dict[str, int]]:
    """Train from step to step; the first from the start, or from what ``folder`` holds. The largest error of
    a weight after the last, and which; numbers that states hold, by kind."""
    assert planned.job is not None
    train, sizes = planned.job.train, sizes_of(planned)
    start, want = reference(planned.model, sizes, train)
    part = assemble(replace(planned, seed=SEED), rank, DEVICE)
    try:
        for store in part.models.units.values():
            store.fill(lambda piece: piece.cut(start[piece.name]))
        optimizer = Optimizer(part.models, part.gradients, train, part.matrices)
        checkpoints = _checkpoints(folder, optimizer)
        if steps[0]:
            assert checkpoints is not None
            assert checkpoints.restore(optimizer.state()) is not None
            optimizer.loaded(steps[0])
            if part.shards:
                part.shards.publish()
        for step in range(*steps):
            train_step(part.step, optimizer, sizes.step(part, step), learning_rate=RATE, clip=CLIP)
        if part.shards:
            part.shards.settle()
        if checkpoints and steps[1] < STEPS:
            checkpoints.save(steps[1], optimizer.state(), {}, wait=True)
        errors = _errors(part, want) if steps[1] == STEPS else [(0.0, "")]
        if part.shards:
            part.shards.stop()
        optimizer.close()
        kept = {kind: sum(t.numel() for t in by.values()) for kind, by in optimizer.states.items()}
        return *max(errors), kept
    finally:
        part.lanes.close()


def _checkpoints(folder: Path | None, optimizer: Optimizer) -> Checkpoints | None:
    group: Any = dist.new_group(backend="gloo") if dist.is_initialized() and dist.get_world_size() > 1 else None
    return Checkpoints(folder, optimizer.held, group=group) if folder else None


def _errors(part: RankPart, want: dict[str, Tensor]) -> list[tuple[float, str]]:
    found: list[tuple[float, str]] = []
    for store in part.models.units.values():
        for one in store.held("params"):
            whole: Any = want[one.piece.name]
            error = relative_error(one.of(store.kept), whole[one.box.slices], whole)
            found.append((error if error == error else float("inf"), f"weight {one.piece.name} {one.box}"))
    return found
