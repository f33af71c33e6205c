"""What each rank runs in ``test_pipeline``: a planned pipeline on this rank, everything compared with the unsharded reference."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from plait.core.dry_run import peak_activations
from plait.core.errors import ScheduleError
from plait.core.model import ModelSpec
from plait.core.pipeline_plan import PipelinePlan
from plait.core.schedule import Transfer
from plait.core.schedules import Shape, generate
from plait.core.strategy import Strategy
from plait.plan.pipeline import plan_pipeline
from plait.plan.reshard_cost import Fabric
from plait.train.assembly import Part, assemble
from plait.train.courier import LaneCourier
from plait.train.optimizer import Optimizer
from plait.train.pipeline import Courier, Delivery
from plait.train.recorder import Recorder
from plait.train.steps import micro_batches, train_step
from plait.train.tune_pipeline import choose_slack
from tests.dist.equality import CLIP, DEVICE, RATE, SEED, SEQUENCE, STEPS, batch_of, expected, relative_error

BATCH, MICRO = 8, 2
CHUNKS = {"interleaved": 2, "zb-v": 2}


class LateCourier:
    """A courier whose transfers start late by a random time, differently on every rank; what has not arrived is poison."""

    def __init__(self, courier: Courier, seed: int) -> None:
        self.courier, self._chance = courier, random.Random(seed)

    def send(self, transfer: Transfer, tensors: Mapping[str, Tensor]) -> Delivery:
        self._pause()
        return self.courier.send(transfer, tensors)

    def receive(self, transfer: Transfer) -> tuple[Mapping[str, Tensor], Delivery]:
        self._pause()
        return self.courier.receive(transfer)

    def _pause(self) -> None:
        time.sleep(self._chance.choice((0.0, 0.0, 0.002, 0.006)))


def plan(spec: ModelSpec, degrees: Sequence[tuple[int, int]], name: str, sequence_parallel: bool, layers: Sequence[int]) -> PipelinePlan:
    """Equal on every rank."""
    chunks = CHUNKS.get(name, 1)
    slack = (2,) * (len(degrees) - 1) if name == "slack-1f1b" else ()
    schedule = generate(name, Shape(ranks=len(degrees), micro_batches=BATCH // MICRO, chunks=chunks, slack=slack))
    fabric = Fabric(hosts=tuple(range(sum(dp * tp for dp, tp in degrees))), rate=1e9)
    return plan_pipeline(
        spec,
        schedule,
        degrees,
        fabric,
        micro_batch=MICRO,
        num_micro_batches=BATCH // MICRO,
        sequence=SEQUENCE,
        itemsize=8,
        sequence_parallel=sequence_parallel,
        stage_layers=layers,
    )


def worst_error(
    rank: int,
    spec: ModelSpec,
    degrees: Sequence[tuple[int, int]],
    name: str,
    p1: int = 1,
    sequence_parallel: bool = False,
    delay: int | None = None,
    layers: Sequence[int] = (),
) -> tuple[float, str]:
    """The largest relative error of anything against the reference, and what it was; infinite if memory is not as predicted."""
    want = expected(spec, BATCH)
    strategy = Strategy(p1=p1, sequence_parallel=sequence_parallel)
    planned = plan(spec, degrees, name, sequence_parallel, layers)
    part = assemble(spec, strategy, planned, rank, DEVICE, micro_batch=MICRO, sequence=SEQUENCE, dtype=torch.float64, seed=SEED)
    try:
        if delay is not None:
            part.pipeline.courier = LateCourier(part.courier, delay * 100 + rank)
        return _errors(spec, part, want)
    finally:
        part.courier.close()


def _errors(spec: ModelSpec, part: Part, want: dict[str, Any]) -> tuple[float, str]:
    errors: dict[str, float] = {}
    held, gradients = part.models, part.gradients
    with torch.no_grad():
        for piece in held.pieces:
            piece.view(held.named[piece.parameter]).copy_(piece.cut(want["start"][piece.name]))
    optimizer = Optimizer(held, gradients, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(STEPS):
        tokens, targets, samples = batch_of(spec, step, BATCH)
        batches = part.own(micro_batches(tokens, targets, samples, MICRO, step))
        if step == 0:  # by hand, because clipping changes the gradients
            gradients.zero()
            mine = part.pipeline.run(batches)
            part.groups.complete(gradients, sequence_parallel=part.strategy.sequence_parallel)
            loss, square, _ = part.groups.totals(gradients, mine, False)
            errors |= {"loss": abs(loss / want["loss"] - 1), "norm": abs(square**0.5 / want["norm"] - 1)}
            for piece in held.pieces:
                found = piece.view(gradients.named[piece.parameter])
                errors[f"gradient of {piece.name}"] = relative_error(found, piece.cut(want["gradients"][piece.name]))
            predicted = peak_activations(part.plan.schedule)
            for stage, peak in part.pipeline.peak.items():
                errors[f"{peak} micro-batches alive on stage {stage}"] = 0.0 if peak == predicted[stage] else float("inf")
            optimizer.step(RATE, norm=square**0.5, clip=CLIP)
            continue
        train_step(
            part.pipeline.run,
            optimizer,
            part.groups,
            batches,
            sequence_parallel=part.strategy.sequence_parallel,
            learning_rate=RATE,
            clip=CLIP,
        )
    for piece in held.pieces:
        errors[f"weight {piece.name}"] = relative_error(piece.view(held.named[piece.parameter]), piece.cut(want["weights"][piece.name]))
    name = max(errors, key=lambda key: errors[key] if errors[key] == errors[key] else float("inf"))
    return errors[name], name


class SlowBoundary:
    """A courier that takes ``seconds`` longer over the boundary behind ``stage``."""

    def __init__(self, courier: LaneCourier, stage: int, seconds: float) -> None:
        self.courier, self.stage, self.seconds, self.tiles = courier, stage, seconds, courier.tiles

    def send(self, transfer: Transfer, tensors: Mapping[str, Tensor]) -> Delivery:
        if min(transfer.source, transfer.target) == self.stage:
            time.sleep(self.seconds)
        return self.courier.send(transfer, tensors)

    def receive(self, transfer: Transfer) -> tuple[Mapping[str, Tensor], Delivery]:
        return self.courier.receive(transfer)


def measured_slack(rank: int, spec: ModelSpec, places: int, slow: int) -> list[int]:
    """Micro-batches alive by stage under the schedule that is chosen where one boundary takes far longer than all computation."""
    recorder = Recorder(DEVICE)
    planned = plan(spec, [(1, 1)] * places, "slack-1f1b", False, ())
    part = assemble(spec, Strategy(), planned, rank, DEVICE, micro_batch=MICRO, sequence=SEQUENCE, dtype=torch.float64, recorder=recorder)
    try:
        part = replace(part, courier=cast("LaneCourier", SlowBoundary(part.courier, slow, 0.1)))
        tokens, targets, samples = batch_of(spec, 0, BATCH)
        schedule = choose_slack(part, part.own(micro_batches(tokens, targets, samples, MICRO, 0)), recorder)
        return list(peak_activations(schedule).values())
    finally:
        getattr(part.courier, "courier", part.courier).close()


def disagreement(rank: int, spec: ModelSpec) -> str:
    """What a rank says whose plan is another than the others'."""
    planned = plan(spec, [(1, 1)] * 2, "1f1b" if rank == 0 else "gpipe", False, ())
    try:
        assemble(spec, Strategy(), planned, rank, DEVICE, micro_batch=MICRO, sequence=SEQUENCE)
    except ScheduleError as error:
        return str(error)
    return "nothing"
