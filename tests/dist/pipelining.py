"""What each rank runs in ``test_pipeline``: a planned pipeline on this rank, everything compared with the
unsharded reference."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast
from unittest import mock

from torch import Tensor

from plait.core.base.errors import ScheduleError
from plait.core.cluster.hardware import Hosts
from plait.core.job.plan import Choices, Plan
from plait.core.job.refine import refine
from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import Layout, SequenceCut
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Strategy
from plait.core.record.timeline import OpSpan
from plait.core.step.clock.dry_run import peak_activations
from plait.core.step.memory.states import states
from plait.core.step.schedule import Transfer
from plait.core.step.schedules import Shape, generate
from plait.core.step.seconds.segment_costs import SegmentCosts
from plait.core.step.step import Step, Workload
from plait.plan.make import assemble_plan
from plait.train.comm.wire import Wire
from plait.train.data.stream import Stream
from plait.train.engine.agreement import agree, statement
from plait.train.engine.assembly import RankPart, assemble
from plait.train.engine.courier import LaneCourier
from plait.train.engine.feed import Feed, micro_batches
from plait.train.engine.grad_sync import Wishes, complete, totals
from plait.train.engine.inflight import MicroBatch
from plait.train.engine.optimizer import Optimizer
from plait.train.engine.pipeline import Courier, Delivery
from plait.train.engine.steps import evaluate, train_step
from plait.train.record.recorder import Recorder
from plait.train.tune.measure import measure
from tests.dist.counting import CountedWire, counted, planned_bytes, traffic
from tests.dist.equality import (
    CLIP,
    DEVICE,
    RATE,
    SEED,
    SEQUENCE,
    STEPS,
    DelayedWire,
    batch_of,
    details_of,
    evaluation_of,
    expected,
    relative_error,
)

BATCH, MICRO = 16, 4
CHUNKS = {"interleaved": 2, "zb-v": 2}
WHOLE_SEQUENCE = SequenceCut()
SYNC = Strategy()


@dataclass(frozen=True)
class Sizes:
    """Sequences of a step and of a micro-batch, tokens of a sequence. detailed: with loss weights and
    documents."""

    batch: int = BATCH
    micro: int = MICRO
    sequence: int = SEQUENCE
    detailed: bool = False

    @property
    def count(self) -> int:
        """Micro-batches of a step."""
        return self.batch // self.micro

    def step(self, part: RankPart, number: int) -> list[MicroBatch]:
        """What ``part`` computes in a step."""
        return self.cut(part, batch_of(part.models.spec, number, self.batch, self.sequence), number)

    def cut(self, part: RankPart, batch: tuple[Tensor, Tensor, Tensor], number: int) -> list[MicroBatch]:
        """A rank's part of a whole batch."""
        details = details_of(number, len(batch[0]), self.sequence) if self.detailed else {}
        return part.own(micro_batches(*batch, self.micro, number, **details))


@dataclass(frozen=True)
class FedSizes(Sizes):
    """Sequences of a feed."""

    feed: Feed | None = None

    def step(self, part: RankPart, number: int) -> list[MicroBatch]:
        """As a run reads it."""
        assert self.feed is not None
        return part.cut(self.feed.step(number, part.rows))


class LateCourier:
    """A courier whose transfers start late by a random time, differently on every rank; what has not arrived
    is poison."""

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


def plan(
    spec: ModelSpec,
    degrees: Sequence[tuple[int, int]],
    name: str,
    strategy: Strategy = SYNC,
    layers: Sequence[int] = (),
    shardings: Sequence[Sharding] = (),
) -> Plan:
    """Equal on every rank, each of which is a host of its own."""
    slack = (2,) * (len(degrees) - 1) if name == "slack-1f1b" else ()
    count = BATCH // MICRO
    shape = Shape(ranks=len(degrees), micro_batches=count, chunks=CHUNKS.get(name, 1), slack=slack)
    workload = Workload(micro_batch=MICRO, num_micro_batches=count, sequence=SEQUENCE, precision="fp64")
    layout = Layout(tuple(degrees), strategy.cp)
    choices = Choices(slack=name == "slack-1f1b")
    step = Step.of(spec, workload, strategy, layout, generate(name, shape), stage_layers=layers, shardings=shardings)
    return replace(assemble_plan(step, Hosts(ranks_per_host=1, rate=1e9), choices=choices), seed=SEED)


def worst_error(
    rank: int,
    spec: ModelSpec,
    degrees: Sequence[tuple[int, int]],
    name: str,
    p1: int = 1,
    sequence_parallel: bool = False,
    delay: int | None = None,
    layers: Sequence[int] = (),
    shardings: Sequence[Sharding] = (),
    cut: SequenceCut = WHOLE_SEQUENCE,
    more: Mapping[str, Any] = MappingProxyType({}),
    detailed: bool = False,
) -> tuple[float, str]:
    """The largest relative error of anything against the reference, and what it was; infinite if memory or
    bytes are not as predicted.

    more: other fields of the strategy.
    """
    strategy = Strategy(p1=p1, sequence_parallel=sequence_parallel, cp=cut.cp, ring=cut.ring, **more)
    with _part(rank, plan(spec, degrees, name, strategy, layers, shardings)) as part:
        return _worst(part, Sizes(detailed=detailed), expected(spec, BATCH, detailed=detailed), delay)


def job_error(
    rank: int, planned: Plan, costs: SegmentCosts | None = None, delay: int | None = None, detailed: bool = False
) -> tuple[float, str]:
    """``worst_error`` of a job's plan, and of an evaluation after its steps. costs: as if measured."""
    sizes = replace(sizes_of(planned), detailed=detailed)
    want = expected(planned.model, sizes.batch, sizes.sequence, sizes.micro, detailed)
    with _part(rank, replace(planned, costs=costs, seed=SEED), eval_batches=2) as part:
        return _worst(part, sizes, want, delay)


def feed_error(rank: int, planned: Plan, folder: Path, want: dict[str, Any]) -> tuple[float, str]:
    """``worst_error`` of a job's plan on its own data, whose corpus is in ``folder``."""
    assert planned.job is not None
    sizes, feed = sizes_of(planned), Feed(planned.job, Stream.open(planned.job, folder))
    with _part(rank, replace(planned, seed=SEED)) as part:
        return _worst(part, FedSizes(sizes.batch, sizes.micro, sizes.sequence, feed=feed), want, None)


def lists(rank: int, planned: Plan, costs: SegmentCosts | None = None) -> tuple[int, list[str]]:
    """A rank's place, and what it runs in which order: every stage's list of every phase, to train and to
    evaluate."""
    found = list[str]()
    with _part(rank, replace(planned, costs=costs), eval_batches=1) as part:
        for pipeline in (part.pipeline, part.evaluator):
            assert pipeline is not None
            for stage, executor in pipeline.executors.items():
                for phase, programme in executor.programmes.items():
                    found.append(f"{stage}{phase}: " + " ".join(f"{one.verb}:{one.op}" for one, _ in programme))
        if part.shards:
            part.shards.stop()
        return part.groups.place, found


def sizes_of(planned: Plan) -> Sizes:
    """What a plan says of batches."""
    work = planned.workload
    return Sizes(work.micro_batch * work.num_micro_batches, work.micro_batch, work.sequence)


@contextmanager
def _part(rank: int, planned: Plan, **more: Any) -> Iterator[RankPart]:
    """This rank's, closed in the end."""
    part = assemble(planned, rank, DEVICE, **more)
    try:
        yield part
    finally:
        part.lanes.close()


def _worst(alone: RankPart, sizes: Sizes, want: dict[str, Any], delay: int | None) -> tuple[float, str]:
    part, wires = counted(alone)
    if delay is not None:
        part.pipeline.courier = LateCourier(part.courier, delay * 100 + part.rank)
        if part.shards:
            for number, (axis, wire) in enumerate(part.shards.wires.items()):
                if wire.size > 1:
                    part.shards.wires[axis] = cast("Wire", DelayedWire(wire, delay * 10 + number))
    return _errors(part, wires, want, sizes)


def _errors(part: RankPart, wires: dict[str, CountedWire], want: dict[str, Any], sizes: Sizes) -> tuple[float, str]:
    errors: dict[str, float] = {}
    held, gradients = part.models, part.gradients
    for store in held.units.values():
        store.fill(lambda piece: piece.cut(want["start"][piece.name]))
    pool = 0
    optimizer = Optimizer(held, gradients)
    for step in range(STEPS):
        batches = sizes.step(part, step)
        if step == 0:  # by hand, because clipping changes the gradients
            gradients.zero()
            mine = part.pipeline.run(batches)
            errors |= traffic(part, wires, micro=sizes.micro, count=sizes.count)
            sharded = part.plan.strategy.sequence_parallel
            complete(gradients, part.groups, part.shards, sequence_parallel=sharded)
            loss, square, _ = totals(gradients, part.groups, mine, Wishes())
            errors |= {"loss": abs(loss / want["loss"] - 1), "norm": abs(square**0.5 / want["norm"] - 1)}
            for one, found in gradients.held:
                name, whole = one.piece.name, want["gradients"][one.piece.name]
                errors[f"gradient of {name} {one.box}"] = relative_error(found, whole[one.box.slices], whole)
            predicted = peak_activations(part.plan.schedule)
            for stage, peak in part.pipeline.peak.items():
                errors[f"{peak} micro-batches alive on stage {stage}"] = (
                    0.0 if peak == predicted[stage] else float("inf")
                )
            optimizer.step(RATE, norm=square**0.5, clip=CLIP)
            if part.shards:
                part.shards.publish()
                pool = part.shards.pool
            continue
        train_step(part.step, optimizer, batches, learning_rate=RATE, clip=CLIP)
    evaluated = _evaluated(part, want["evaluation"], sizes, errors) if part.evaluator else Counter[str]()
    if part.shards:
        part.shards.stop()
        units = {unit: store.numel for unit, store in held.units.items()}
        planned = states(units, part.groups.sharding, itemsize=8).buffers
        # An order of several slices may put weight gradients off, and then more than two of a size are open.
        fits = pool >= planned if part.plan.strategy_of(part.groups.place).p1 > 1 else pool == planned
        errors[f"buffers of {pool} bytes, {planned} by the formula"] = 0.0 if fits else float("inf")
        errors["buffers allocated after the first step"] = 0.0 if part.shards.pool == pool else float("inf")
        for axis, count in planned_bytes(part, count=sizes.count).items():
            sent = part.shards.sent[axis] - evaluated[axis]
            errors[f"{axis}: {sent} bytes sent, {count} by the formula"] = 0.0 if sent == count else float("inf")
    for store in held.units.values():
        for one in store.held("params"):
            whole = want["weights"][one.piece.name]
            errors[f"weight {one.piece.name} {one.box}"] = relative_error(
                one.of(store.kept), whole[one.box.slices], whole
            )
    name = max(errors, key=lambda key: errors[key] if errors[key] == errors[key] else float("inf"))
    return errors[name], name


def _evaluated(part: RankPart, want: float, sizes: Sizes, errors: dict[str, float]) -> Counter[str]:
    """Compare two evaluations with the reference's; the bytes that sharding has sent for them."""
    assert part.evaluator is not None
    given = evaluation_of(part.models.spec, sizes.micro, sizes.sequence)
    batches = sizes.cut(part, given, STEPS)
    sent = Counter[str]()
    for _ in range(2):  # the first begins while parameters are still being published
        before = Counter(part.shards.sent) if part.shards else Counter[str]()
        loss = evaluate(part.evaluator, part.groups, batches)
        assert loss is not None
        errors[f"evaluation {loss}"] = abs(loss / want - 1)
        sent = (Counter(part.shards.sent) if part.shards else Counter[str]()) - before
    return sent + sent


def measured_slack(rank: int, spec: ModelSpec, places: int, slow: int) -> list[int]:
    """Micro-batches alive by stage under the schedule that is chosen where one boundary takes far longer than
    all computation."""
    send = LaneCourier.send

    def slowly(courier: LaneCourier, transfer: Transfer, tensors: Mapping[str, Tensor]) -> Delivery:
        if min(transfer.source, transfer.target) == slow:
            time.sleep(0.1)
        return send(courier, transfer, tensors)

    planned = plan(spec, [(1, 1)] * places, "slack-1f1b")
    with _part(rank, planned, recorder=Recorder(DEVICE)) as part, mock.patch.object(LaneCourier, "send", slowly):
        refined = refine(planned, measure(part, Sizes().step(part, 0), 1))
        return list(peak_activations(refined.schedule).values())


def timed(
    rank: int, spec: ModelSpec, degrees: tuple[int, int], choices: Choices, steps_left: int
) -> tuple[int, Strategy, dict[str, str], bool]:
    """How many candidates a rank has timed, what was chosen, what it says of it, and whether gradients are as
    before; rank 0 alone sees communication."""
    shardings = [Sharding.named("zero3", degrees[0])]
    planned = replace(plan(spec, [degrees], "1f1b", Strategy(tp=degrees[1]), shardings=shardings), choices=choices)
    take = Recorder.take

    def blind(recorder: Recorder) -> list[OpSpan]:
        return [span for span in take(recorder) if rank == 0 or span.kind != "comm"]

    with _part(rank, planned, recorder=Recorder(DEVICE)) as part, mock.patch.object(Recorder, "take", blind):
        found = measure(part, Sizes().step(part, 0), steps_left)
        zero = not any(gradient.any() for gradient in part.gradients.final.values())
        if part.shards:
            part.shards.stop()
        chosen = refine(planned, found).strategy
        return len(found.strategies) + len(found.overlaps), chosen, dict(found.notes), zero


def disagreement(rank: int, spec: ModelSpec) -> str:
    """What a rank says whose plan is another than the others'."""
    planned = plan(spec, [(1, 1)] * 2, "1f1b" if rank == 0 else "gpipe")
    with _part(rank, planned) as part:
        return _said(part)


def other_order(rank: int, spec: ModelSpec, odd: int, seed: int) -> str:
    """What a rank says where all have the same plan, and rank ``odd`` gets another order from it: one of its
    costs differs in the last digit. seed: of costs with which that decides between two orders."""
    chance = random.Random(seed)
    keys = [f"{site}.{kind}" for site in ("embed", "attn", "mlp", "head") for kind in "NFRLDCWJ"]
    compute, collective = ({key: chance.choice((1.0, 2.0, 3.0)) for key in keys} for _ in range(2))
    planned = replace(plan(spec, [(1, 2)] * 2, "1f1b", Strategy(p1=2)), costs=SegmentCosts(compute, collective))
    with _part(rank, planned) as part:
        if rank == odd:
            own = statement(part).lists
            for key in keys:
                nudged = {**compute, key: math.nextafter(compute[key], math.inf)}
                part = part.under(replace(planned, costs=SegmentCosts(nudged, collective)))
                if statement(part).lists != own:
                    break
            assert statement(part).lists != own, "no last digit changes this order"
            part.plan.__dict__["hash"] = planned.hash  # as if the plan itself were the same
        return _said(part)


def _said(part: RankPart) -> str:
    try:
        agree(part)
    except ScheduleError as error:
        return str(error)
    return "nothing"
