"""Muon and SGD under drawn strategies are the single process; what they keep goes on under
others."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from plait.core.job.plan import Plan
from plait.core.job.settings import TrainSection
from plait.core.job.spec import Job
from plait.train.checkpoint.checkpoints import Checkpoints
from plait.train.engine.optimizer import Optimizer
from plait.train.engine.steps import train_step
from plait.train.model.dropout import DropoutKey
from tests.dist import equality
from tests.dist.equality import CLIP, RATE, SEED, STEPS, Answer, Pool, adamw, batch_of, reference_of, relative_error
from tests.dist.pipelining import opened, sizes_of
from tests.support import drawn
from tests.support.cases import first

SEED_OF_JOBS, IN_SUITE, MOST, MOST_IN_SUITE = 20261126, 4, 8, 4
TOLERANCE, ROUNDED = 1e-9, 1e-5
"""Moments in bf16: a sum in another order may be rounded to the neighbour, once in a long while: a
number of a weight is then off by some 2^-8 of an update; most are equal to 1e-12."""
KEPT = 2
"""The step after which states are saved."""
TABLES: dict[str, Any] = {"optimizer": "muon", "muon": {"precision": "master"}}


def expected(plan: Plan) -> Answer:
    """Of a single process."""
    assert plan.job is not None
    reference, sizes = reference_of(plan.model), sizes_of(plan)

    def loss(step: int) -> Tensor:
        tokens, targets, samples = batch_of(plan.model, step, sizes.batch, sizes.sequence)
        return reference.loss(tokens, targets, dropout=DropoutKey(SEED, step), samples=samples)

    return equality.trained(reference, loss, partial(update, plan.job.train))


@torch.no_grad()
def update(
    train: TrainSection, name: str, weight: Tensor, gradient: Tensor, states: tuple[Tensor, Tensor], count: int
) -> None:
    """One weight's, as the optimizers' papers have it."""
    _update(train, name, weight, gradient, states, count)
    for state in states if train.optimizer_dtype == "bf16" else ():
        state.copy_(state.bfloat16())


def _update(
    train: TrainSection, name: str, weight: Tensor, gradient: Tensor, states: tuple[Tensor, Tensor], count: int
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
    rank: int, planned: Plan, want: Answer, folder: Path | None = None, goes_on: bool = False
) -> tuple[float, str, dict[str, int]]:
    """Train from the start, and save into ``folder`` on the way; or go on from what it holds. The
    largest error of a weight in the end, and which; numbers that states hold, by kind."""
    assert planned.job is not None
    with opened(rank, replace(planned, seed=SEED)) as part:
        for store in part.models.units.values():
            store.fill(lambda piece: piece.cut(want["start"][piece.name]))
        optimizer = Optimizer(part.models, part.gradients, planned.job.train, part.matrices)
        group: Any = dist.new_group(backend="gloo") if dist.is_initialized() and dist.get_world_size() > 1 else None
        checkpoints = Checkpoints(folder, optimizer.held, group=group) if folder else None
        if checkpoints and goes_on:
            assert checkpoints.restore(optimizer.state()) is not None
            optimizer.loaded(KEPT)
            if part.shards:
                part.shards.publish()
        for step in range(KEPT if goes_on else 0, STEPS):
            batches = sizes_of(planned).step(part, step)
            train_step(part.step, optimizer, batches, learning_rate=RATE, clip=CLIP)
            if checkpoints and step + 1 == KEPT:
                if part.shards:
                    part.shards.settle()
                checkpoints.save(KEPT, optimizer.state(), {}, wait=True)
        if part.shards:
            part.shards.settle()
        errors = list[tuple[float, str]]()
        for store in part.models.units.values():
            for one in store.held("params"):
                whole = want["weights"][one.piece.name]
                error = relative_error(one.of(store.kept), whole[one.box.slices], whole)
                errors.append((error if error == error else float("inf"), f"weight {one.piece.name} {one.box}"))
        optimizer.close()
        kept = {kind: sum(t.numel() for t in by.values()) for kind, by in optimizer.states.items()}
        return *max(errors), kept


def assert_equal(pool: Pool, plan: Plan, *args: Any, tolerance: float = TOLERANCE) -> list[dict[str, int]]:
    found = pool(plan.layout.world_size).run(trained, plan, expected(plan), *args)
    for error, what, _ in found:
        assert plan.job and error < tolerance, f"{what} is off by {error:.1e} in\n{plan.job and plan.job.to_toml()}"
    return [kept for *_, kept in found]


@pytest.mark.parametrize("number", first(IN_SUITE, of=30))
def test_muon_is_the_single_process_and_goes_on_under_another_strategy(pool: Pool, tmp_path: Path, number: int) -> None:
    chance, most = drawn.Chance(f"{SEED_OF_JOBS}/{number}"), MOST_IN_SUITE if number < IN_SUITE else MOST
    plan = drawn.planned(chance, most, train=TABLES)
    assert_equal(pool, plan, tmp_path)
    assert_equal(pool, drawn.planned(chance, most, like=plan.job, train=TABLES), tmp_path, True)


@pytest.mark.parametrize("number", range(3))
def test_sgd_is_the_single_process(pool: Pool, number: int) -> None:
    plan = drawn.planned(drawn.Chance(f"{SEED_OF_JOBS}/sgd/{number}"), MOST_IN_SUITE, train={"optimizer": "sgd"})
    assert all(set(kept) == {"momentum"} for kept in assert_equal(pool, plan))


SHARDS = ("ddp", "zero1", "zero2", "zero3", {"params": 1, "grads": 2, "optim": 4})
SMALL: dict[str, Any] = {
    "model": {"family": "gpt", "num_layers": 2, "hidden": 32, "num_heads": 4, "vocab": 64, "max_sequence": 16},
    "data": {"sequence_length": 16},
    "train": {"global_batch_size": 8, "micro_batch_size": 1, "precision": "fp64", "optimizer": "sgd"},
}


def small(strategy: dict[str, Any], **train: Any) -> Plan:
    return drawn.plan_of(
        Job.from_dict(SMALL | {"train": SMALL["train"] | train, "strategy": {"slices": {}} | strategy})
    )


@pytest.mark.parametrize("shard", SHARDS, ids=str)
def test_gradients_are_summed_over_ranks_in_bf16(pool: Pool, shard: Any) -> None:
    """Each rank's gradient is rounded once a reduction, to 8 bits: so far may a weight be off."""
    dp, tp = (4, 1) if isinstance(shard, dict) else (2, 2)
    plain = small({"dp": dp, "tp": tp, "shard": shard})
    assert_equal(pool, plain)
    rounded = small({"dp": dp, "tp": tp, "shard": shard, "reduce_dtype": "bf16"})
    worst = max(error for error, *_ in pool(4).run(trained, rounded, expected(plain)))
    assert 1e-7 < worst < 2e-2


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_moments_in_bf16_are_those_rounded_after_every_step(pool: Pool, tmp_path: Path, optimizer: str) -> None:
    how: dict[str, Any] = {"optimizer": optimizer, "optimizer_dtype": "bf16", "muon": {"precision": "master"}}
    assert_equal(pool, small({"dp": 2, "tp": 2, "shard": "zero1"}, **how), tmp_path, tolerance=ROUNDED)
    assert_equal(pool, small({"dp": 2, "shard": "zero3"}, **how), tmp_path, True, tolerance=ROUNDED)
