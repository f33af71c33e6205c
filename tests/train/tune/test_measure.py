"""What timed steps say of what a plan leaves open; ranks as threads. More in ``tests/dist``."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.core.cluster.hardware import Hosts
from plait.core.job.plan import Choices
from plait.core.job.refine import Measurements, refine
from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import Layout
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Strategy
from plait.core.step.schedules import Shape, generate, whole_steps
from plait.core.step.step import Step, Workload
from plait.plan.make import assemble_plan
from plait.train.engine.assembly import assemble
from plait.train.record.recorder import Recorder
from plait.train.tune.measure import measure
from tests.dist.equality import DEVICE, SEQUENCE
from tests.dist.pipelining import Sizes
from tests.support.models import gpt
from tests.support.threads import threads

GPT = gpt()
SLICES = Choices(
    strategies=tuple(Strategy(tp=2, p1=p1, sequence_parallel=cut) for cut in (False, True) for p1 in (1, 2, 4))
)
LONG, SHORT = 10**7, 3


def measured(
    spec: ModelSpec,
    degrees: list[tuple[int, int]],
    choices: Choices,
    steps: int,
    shard: str = "ddp",
    *,
    whole: bool = False,
    strategy: Strategy | None = None,
) -> list[tuple[Measurements, Strategy]]:
    """Of every rank: what was found, and which strategy follows. whole: micro-batches follow one
    another."""

    def work(rank: int) -> tuple[Measurements, Strategy]:
        shape = Shape(ranks=len(degrees), micro_batches=4, slack=(2,) * (len(degrees) - 1) if choices.slack else ())
        workload = Workload(micro_batch=4, num_micro_batches=4, sequence=SEQUENCE, precision="fp64")
        shardings = tuple(Sharding.named(shard, dp) for dp, _ in degrees)  # type: ignore[arg-type]
        layout = Layout(tuple(degrees))
        schedule = whole_steps(4) if whole else generate("slack-1f1b" if choices.slack else "1f1b", shape)
        step = Step.of(spec, workload, strategy or Strategy(), layout, schedule, shardings=shardings)
        planned = replace(assemble_plan(step, Hosts(ranks_per_host=1, rate=1e9), choices=choices), seed=7)
        part = assemble(planned, rank, DEVICE, recorder=Recorder(DEVICE))
        try:
            found = measure(part, Sizes().step(part, 0), steps)
            assert not any(gradient.any() for gradient in part.gradients.final.values())
            assert part.recorder is not None and part.recorder.take() == [], "what was timed belongs to no step"
            return found, refine(planned, found).strategy
        finally:
            part.lanes.close()
            if part.shards:
                part.shards.stop()

    return threads(sum(dp * tp for dp, tp in degrees)).run(work)


def test_slices_are_timed_where_that_can_pay_and_all_ranks_choose_the_same() -> None:
    for steps in (LONG, SHORT):
        (one, chosen), (other, same) = measured(GPT, [(1, 2)], SLICES, steps)
        assert (one.strategies, chosen) == (other.strategies, same)
        if steps == SHORT:
            assert one.strategies == () and chosen == Strategy(tp=2)
            assert "nothing is timed before training" in one.notes["slices"]
            assert set(one.costs) == {False}
            continue
        assert {timed.strategy for timed in one.strategies} == set(SLICES.strategies)
        assert chosen == min(one.strategies, key=lambda timed: timed.seconds).strategy
        assert one.notes["slices"] == "fastest of 6 timed candidates"
        assert set(one.costs) == {False, True}
        assert all(costs.compute["mlp.F"] > 0 and costs.collective for costs in one.costs.values())


def test_what_hides_of_sharding_is_timed() -> None:
    (found, chosen), (other, same) = measured(GPT, [(2, 1)], Choices(shard_overlap=True), LONG, "zero3")
    assert (found.overlaps, chosen) == (other.overlaps, same)
    assert len({timed.strategy.shard_overlap for timed in found.overlaps}) == len(found.overlaps) == 4
    assert chosen == min(found.overlaps, key=lambda timed: timed.seconds).strategy
    ((found, chosen), _) = measured(GPT, [(2, 1)], Choices(shard_overlap=True), SHORT, "zero3")
    assert found.overlaps == () and "nothing is timed before training" in found.notes["sharding"]


def test_graphs_are_not_tried_where_a_device_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    ((found, chosen),) = measured(GPT, [(1, 1)], Choices(cuda_graphs=True), LONG)
    assert found.graphed == () and not chosen.cuda_graphs
    assert found.notes["cuda_graphs"] == f"not possible on {DEVICE.description}"
    monkeypatch.setattr(type(DEVICE), "captures", True)
    (found, _), _ = measured(GPT, [(2, 1)], Choices(cuda_graphs=True), LONG, "zero3")
    assert found.graphed == () and "have no fixed place" in found.notes["cuda_graphs"]


def test_times_of_stages_and_between_them_are_the_same_on_all_ranks() -> None:
    found = [one.times for one, _ in measured(replace(GPT, num_layers=3), [(1, 1)] * 3, Choices(slack=True), LONG)]
    times = found[0]
    assert times is not None and found == [times] * 3
    assert len(times.compute) == 3 and min(times.compute) > 0
    assert len(times.transfer) == 2 and min(times.transfer) > 0
