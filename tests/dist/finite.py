"""What each rank runs in ``test_finite``: a NaN planted into one rank's gradient, and who finds
it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from plait.core.base.errors import NotFinite
from plait.core.cluster.hardware import HERE
from plait.core.job.settings import OnNan
from plait.core.job.spec import Job
from plait.plan.make import make_plan
from plait.train.engine.assembly import RankPart, assemble
from plait.train.engine.feed import micro_batches
from plait.train.engine.finite import check_state
from plait.train.engine.optimizer import Optimizer
from plait.train.engine.steps import StepResult, train_step
from plait.train.machine.device import RankDevice

MODEL: dict[str, Any] = {"family": "gpt", "num_layers": 2, "hidden": 16, "num_heads": 4, "vocab": 37, "max_sequence": 8}
BATCH, SEQUENCE = 8, 8

Strategy = dict[str, Any]
"""The job's section."""


def _part(rank: int, strategy: Strategy) -> tuple[RankPart, Optimizer]:
    job = Job.from_dict(
        {
            "model": MODEL,
            "data": {"sequence_length": SEQUENCE},
            "train": {"global_batch_size": BATCH, "micro_batch_size": 4 // strategy.get("dp", 1), "precision": "fp64"},
            "strategy": {"slices": {"batch": 1, "columns": 1}, "schedule": "1f1b", **strategy},
        }
    )
    part = assemble(make_plan(job, HERE, vocab=37), rank, RankDevice(torch.device("cpu")))
    return part, Optimizer(part.models, part.gradients)


def _step(part: RankPart, optimizer: Optimizer, step: int, on_nan: OnNan = "stop") -> StepResult:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, MODEL["vocab"], (BATCH, SEQUENCE + 1), generator=generator)
    samples = torch.arange(BATCH) + step * BATCH
    batches = part.own(micro_batches(tokens[:, :-1], tokens[:, 1:], samples, 4, step))
    return train_step(replace(part.step, on_nan=on_nan), optimizer, batches, learning_rate=1e-2, clip=1.0)


def _plant(part: RankPart, tensor: str, times: int) -> None:
    """Put a NaN into this rank's gradient of a tensor whenever something is added to it, so many
    times."""
    gradients, left = part.gradients, [times]
    piece = next(piece for piece in part.models.pieces if piece.name == tensor)
    target = part.models.named[piece.parameter]

    def planted(add: Any) -> Any:
        def call(parameter: nn.Parameter, *tensors: Tensor) -> None:
            add(parameter, *tensors)
            if parameter is target and left[0]:
                left[0] -= 1
                piece.view(gradients._of[parameter]).view(-1)[0] = float("nan")

        return call

    for name in ("add", "add_rows", "add_product"):
        setattr(gradients, name, planted(getattr(gradients, name)))


def _everything(optimizer: Optimizer) -> list[Tensor]:
    state = [tensor.clone() for tensors in optimizer.state().values() for tensor in tensors.values()]
    return [*state, *(run.updates.clone() for runs in optimizer.runs.values() for run in runs)]


def _close(part: RankPart) -> None:
    part.lanes.close()
    if part.shards:
        part.shards.stop()


def stopped(rank: int, strategy: Strategy, culprits: Mapping[int, Sequence[str]], times: int) -> tuple[str, bool]:
    """After a good step, one with NaNs in tensors of some ranks: what this rank says, and whether
    its weights are those before."""
    part, optimizer = _part(rank, strategy)
    try:
        _step(part, optimizer, 0)
        before = _everything(optimizer)
        for tensor in culprits.get(rank, ()):
            _plant(part, tensor, times)
        try:
            _step(part, optimizer, 1)
        except NotFinite as error:
            same = all(torch.equal(a, b) for a, b in zip(before, _everything(optimizer), strict=True))
            return str(error), same
        return "nothing", False
    finally:
        _close(part)


def skipped(rank: int, strategy: Strategy, culprit: int, tensor: str) -> tuple[list[int], bool]:
    """Steps 0, 1 (with a NaN) and 2: updates left out so far after each, and whether the weights in
    the end are those of a run that has never seen step 1."""
    ends: list[list[Tensor]] = []
    counts: list[int] = []
    for steps in ((0, 1, 2), (0, 2)):
        part, optimizer = _part(rank, strategy)
        try:
            for step in steps:
                if step == 1 and rank == culprit:
                    _plant(part, tensor, 1)
                result = _step(part, optimizer, step, on_nan="skip")
                counts += [result.skipped] * (len(steps) == 3)
            ends.append(_everything(optimizer))
        finally:
            _close(part)
    return counts, all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def for_ever(rank: int, strategy: Strategy) -> tuple[int, str]:
    """A NaN in every step, left out: how many steps, and what ended them."""
    part, optimizer = _part(rank, strategy)
    _plant(part, "norm.weight", -1)
    try:
        for step in range(100):
            _step(part, optimizer, step, on_nan="skip")
    except NotFinite as error:
        return optimizer.skipped, str(error)
    finally:
        _close(part)
    return 100, "nothing"


def bad_state(rank: int, strategy: Strategy, culprit: int, kind: str) -> str:
    """One rank's weights, or averages, have an infinity: what every rank says before they are
    saved."""
    part, optimizer = _part(rank, strategy)
    try:
        _step(part, optimizer, 0)
        check_state(optimizer, part.groups, 1)
        if rank == culprit:
            list(optimizer.state()[kind].values())[-1].view(-1)[0] = float("inf")
        try:
            check_state(optimizer, part.groups, 1)
        except NotFinite as error:
            return str(error)
        return "nothing"
    finally:
        _close(part)


def summed(rank: int, found: Sequence[float]) -> bool:
    """Whether numbers are taken for finite that only their sum is not."""
    from plait.train.engine.finite import _is_finite

    return _is_finite(torch.tensor(found))
