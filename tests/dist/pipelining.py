"""Cases that have a plan: a pipeline's, a job's, and a job's on its own data, everything compared
with the unsharded reference."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

from torch import Tensor

from plait.core.base.errors import ScheduleError
from plait.core.cluster.hardware import Hosts
from plait.core.job.plan import Choices, Plan, RunSettings
from plait.core.job.refine import refine
from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import Layout
from plait.core.parallel.sharding import EXPERTS, Sharding
from plait.core.parallel.strategy import Strategy
from plait.core.record.timeline import OpSpan
from plait.core.step.clock.pipeline_clock import peak_activations
from plait.core.step.orders.segment_costs import SegmentCosts
from plait.core.step.schedule import Transfer
from plait.core.step.schedules import generate, planned_shape
from plait.core.step.step import Step, Workload
from plait.plan.make import assemble_plan
from plait.train.data.stream import Stream
from plait.train.engine.agreement import agree, statement
from plait.train.engine.assembly import RankPart, assemble
from plait.train.engine.courier import LaneCourier
from plait.train.engine.feed import Feed, micro_batches
from plait.train.engine.inflight import MicroBatch
from plait.train.engine.optimizer import Optimizer
from plait.train.engine.pipeline import Courier, Delivery
from plait.train.engine.steps import Requests, complete, evaluate, totals, train_step
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
    Answer,
    DelayedWire,
    batch_of,
    details_of,
    evaluation_of,
    expected,
    relative_error,
    worst,
)
from tests.support.held import states_held

BATCH, MICRO = 16, 4
PLAIN = Strategy()


@dataclass(frozen=True)
class Sizes:
    """Sequences of a step and of a micro-batch, tokens of a sequence. detailed: with loss weights
    and documents."""

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
    """A courier whose transfers start late by a random time, differently on every rank; what has
    not arrived is poison."""

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


@dataclass(frozen=True)
class Pipeline:
    """A case of a named schedule. degrees: (dp, tp) of its pp ranks. delay: a seed, where what is
    sent is late. layers: of each stage. detailed: with the documents and weights of
    ``details_of``."""

    spec: ModelSpec
    degrees: Sequence[tuple[int, int]] = ((1, 1),)
    schedule: str = "1f1b"
    strategy: Strategy = PLAIN
    shardings: Sequence[Sharding] = ()
    delay: int | None = None
    layers: Sequence[int] = ()
    detailed: bool = False

    @property
    def size(self) -> int:
        """Ranks of all pp ranks."""
        return self.strategy.cp * sum(dp * tp for dp, tp in self.degrees)

    @property
    def compiles(self) -> bool:
        """Whether the strategy does."""
        return self.strategy.compile

    @property
    def plan(self) -> Plan:
        """Equal on every rank, each of which is a host of its own."""
        name, pp, count = self.schedule, len(self.degrees), BATCH // MICRO
        shape = planned_shape(name, pp, count, 2)
        workload = Workload(micro_batch=MICRO, num_micro_batches=count, sequence=SEQUENCE, precision="fp64")
        step = Step.of(
            self.spec, workload, self.strategy, Layout(tuple(self.degrees), self.strategy.cp), generate(name, shape),
            stage_layers=self.layers, shardings=self.shardings,
        )  # fmt: skip
        choices = Choices(slack=name == "slack-1f1b")
        return replace(assemble_plan(step, Hosts(ranks_per_host=1, rate=1e9), choices=choices), seed=SEED)

    def want(self) -> Answer:
        """The reference's answer."""
        return expected(self.spec, BATCH, detailed=self.detailed)

    def error(self, rank: int, want: Answer) -> tuple[float, str]:
        """Loss, gradients, norm and weights; infinite if memory or bytes are not as predicted."""
        with opened(rank, self.plan) as part:
            return _worst(part, Sizes(detailed=self.detailed), want, self.delay)


@dataclass(frozen=True)
class Planned:
    """A job's plan, and an evaluation after its steps. costs: as if measured. folder: of its own
    data's corpus, whose answer is ``given``."""

    plan: Plan
    costs: SegmentCosts | None = None
    delay: int | None = None
    detailed: bool = False
    folder: Path | None = None
    given: Answer | None = None

    def __str__(self) -> str:
        return self.plan.job.to_toml() if self.plan.job else repr(self.plan)

    @property
    def size(self) -> int:
        """Ranks of the layout."""
        return self.plan.layout.world_size

    @property
    def compiles(self) -> bool:
        """Whether its strategy does."""
        return self.plan.strategy.compile

    def want(self) -> Answer:
        """The reference's answer."""
        sizes = sizes_of(self.plan)
        return self.given or expected(self.plan.model, sizes.batch, sizes.sequence, sizes.micro, self.detailed)

    def error(self, rank: int, want: Answer) -> tuple[float, str]:
        """As ``Pipeline``'s, and the evaluation's loss."""
        sizes: Sizes = replace(sizes_of(self.plan), detailed=self.detailed)
        if self.folder and self.plan.job:
            settings = RunSettings.of(self.plan.job)
            feed = Feed(settings, Stream.open(settings, self.folder))
            sizes = FedSizes(sizes.batch, sizes.micro, sizes.sequence, feed=feed)
        evaluated = 0 if self.folder else 2
        with opened(rank, replace(self.plan, costs=self.costs, seed=SEED), eval_batches=evaluated) as part:
            return _worst(part, sizes, want, self.delay)


def lists(rank: int, planned: Plan, costs: SegmentCosts | None = None) -> tuple[int, list[str]]:
    """A rank's pp rank, and what it runs in which order: every stage's list of every phase, to train
    and to evaluate."""
    found = list[str]()
    with opened(rank, replace(planned, costs=costs), eval_batches=1) as part:
        for pipeline in (part.pipeline, part.evaluator):
            assert pipeline is not None
            for stage, executor in pipeline.executors.items():
                for phase, programme in executor.programmes.items():
                    found.append(f"{stage}{phase}: " + " ".join(f"{one.verb}:{one.op}" for one, _ in programme))
        return part.groups.pp_rank, found


def sizes_of(planned: Plan) -> Sizes:
    """What a plan says of batches."""
    work = planned.workload
    return Sizes(work.micro_batch * work.num_micro_batches, work.micro_batch, work.sequence)


@contextmanager
def opened(rank: int, planned: Plan, **more: Any) -> Iterator[RankPart]:
    """A rank's part of a plan, closed in the end."""
    part = assemble(planned, rank, DEVICE, **more)
    try:
        yield part
    finally:
        if part.shards:
            part.shards.stop()
        part.lanes.close()


def _worst(alone: RankPart, sizes: Sizes, want: Answer, delay: int | None) -> tuple[float, str]:
    part, wires = counted(alone)
    if delay is not None:
        part.pipeline.courier = LateCourier(part.courier, delay * 100 + part.rank)
        if part.shards:
            every = [(cast("dict[Any, Any]", wires), axis) for wires in part.shards.wires.values() for axis in wires]
            for number, (wires_of_kind, axis) in enumerate(every):
                if wires_of_kind[axis].size > 1:
                    wires_of_kind[axis] = DelayedWire(wires_of_kind[axis], delay * 10 + number)
    return _errors(part, wires, want, sizes)


def _errors(part: RankPart, wires: dict[str, CountedWire], want: Answer, sizes: Sizes) -> tuple[float, str]:
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
            loss, square, _ = totals(gradients, part.groups, mine, Requests())
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
        part.shards.settle()
        units = {unit: store.numel for unit, store in held.units.items()}
        routed = {unit: numel for unit, numel in units.items() if unit[0] == EXPERTS}
        rest = {unit: numel for unit, numel in units.items() if unit not in routed}
        planned = states_held(rest, part.groups.sharding, itemsize=8).buffers
        planned += states_held(routed, part.groups.expert_sharding, itemsize=8).buffers if routed else 0
        # An order of several slices may put weight gradients off, and then more than two of a size are open.
        fits = pool >= planned if part.plan.strategy_of(part.groups.pp_rank).p1 > 1 else pool == planned
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
    return worst(errors)


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


def measured_slack(rank: int, spec: ModelSpec, pp: int, slow: int) -> list[int]:
    """Micro-batches alive by stage under the schedule that is chosen where one boundary takes far
    longer than all computation."""
    send = LaneCourier.send

    def slowly(courier: LaneCourier, transfer: Transfer, tensors: Mapping[str, Tensor]) -> Delivery:
        if min(transfer.source, transfer.target) == slow:
            time.sleep(0.1)
        return send(courier, transfer, tensors)

    planned = Pipeline(spec, [(1, 1)] * pp, "slack-1f1b").plan
    with opened(rank, planned, recorder=Recorder(DEVICE)) as part, mock.patch.object(LaneCourier, "send", slowly):
        refined = refine(planned, measure(part, Sizes().step(part, 0), 1))
        return list(peak_activations(refined.schedule).values())


def timed(
    rank: int, spec: ModelSpec, degrees: tuple[int, int], choices: Choices, steps_left: int
) -> tuple[int, Strategy, dict[str, str], bool]:
    """How many candidates a rank has timed, what was chosen, what it says of it, and whether
    gradients are as before; rank 0 alone sees communication."""
    shardings = [Sharding.named("zero3", degrees[0])]
    planned = replace(
        Pipeline(spec, [degrees], strategy=Strategy(tp=degrees[1]), shardings=shardings).plan, choices=choices
    )
    take = Recorder.take

    def blind(recorder: Recorder) -> list[OpSpan]:
        return [span for span in take(recorder) if rank == 0 or span.kind != "comm"]

    with opened(rank, planned, recorder=Recorder(DEVICE)) as part, mock.patch.object(Recorder, "take", blind):
        found = measure(part, Sizes().step(part, 0), steps_left)
        zero = not any(gradient.any() for gradient in part.gradients.final.values())
        chosen = refine(planned, found).strategy
        return len(found.strategies) + len(found.overlaps), chosen, dict(found.notes), zero


def disagreement(rank: int, spec: ModelSpec) -> str:
    """What a rank says whose plan is another than the others'."""
    planned = Pipeline(spec, [(1, 1)] * 2, "1f1b" if rank == 0 else "gpipe").plan
    with opened(rank, planned) as part:
        return _said(part)


def other_order(rank: int, spec: ModelSpec, odd: int, seed: int) -> str:
    """What a rank says where all have the same plan, and rank ``odd`` gets another order from it:
    one of its costs differs in the last digit. seed: of costs with which that decides between two
    orders."""
    chance = random.Random(seed)
    keys = [f"{site}.{kind}" for site in ("embed", "attn", "mlp", "head") for kind in "NFRLDCWJ"]
    compute, collective = ({key: chance.choice((1.0, 2.0, 3.0)) for key in keys} for _ in range(2))
    plain = Pipeline(spec, [(1, 2)] * 2, strategy=Strategy(p1=2)).plan
    planned = replace(plain, costs=SegmentCosts(compute, collective))
    with opened(rank, planned) as part:
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
