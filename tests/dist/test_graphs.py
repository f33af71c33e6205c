"""Computation that is captured and replayed is the unsharded computation still, on a device that
captures and is no GPU (``capturing``); what that cannot show is in ``tests/gpu``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from plait.core.base.errors import JobError
from plait.core.cluster.hardware import HERE
from plait.core.job.refine import refine
from plait.core.job.spec import Job
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Strategy
from plait.core.step.orders.overlap import Load
from plait.plan.make import make_plan
from plait.train.comm.wire import NullWire
from plait.train.engine.assembly import assemble
from plait.train.engine.executor import RankContext, make_executor
from plait.train.engine.feed import micro_batches
from plait.train.engine.gradients import Gradients
from plait.train.engine.graphs import GraphedExecutor, GraphSlot
from plait.train.engine.inflight import InFlight
from plait.train.machine.gpu import device_of
from plait.train.model.transformer import Transformer
from plait.train.record.recorder import Recorder
from plait.train.tune.measure import measure
from tests.dist import capturing
from tests.dist.equality import TOLERANCE, Case, Pool, TensorParallel, batch_of, run
from tests.dist.pipelining import Pipeline, Planned
from tests.dist.test_equality import GPT, MODELS
from tests.dist.test_pipeline import GPT as SHORT
from tests.dist.test_pipeline import LLAMA, U
from tests.support import drawn
from tests.support.capturing import CapturingDevice
from tests.support.cases import each_other, first
from tests.support.threads import threads

LONE = [
    Strategy(cuda_graphs=True),
    Strategy(p1=3, recompute="full", cuda_graphs=True),
    Strategy(p1=2, recompute="selective", compile=True, cuda_graphs=True),
]
TWO = [
    Strategy(tp=2, p1=2, p2=2, cuda_graphs=True),
    Strategy(tp=2, p1=3, sequence_parallel=True, recompute="full", cuda_graphs=True),
    Strategy(tp=2, overlap="async", recompute="selective", cuda_graphs=True),
    Strategy(tp=2, overlap="sync", cuda_graphs=True),
]


def assert_equal(pool: Pool, case: Case) -> None:
    for (error, where), captured, replayed in run(pool, case, capturing.observed):
        assert error < TOLERANCE, f"{where} is off by {error:.1e} in {case}"
        assert replayed > captured > 0


@pytest.mark.unit
@pytest.mark.parametrize("name", ["gpt", "llama", "u"])
@pytest.mark.parametrize("strategy", LONE, ids=["plain", "full", "compiled"])
def test_one_rank_equals_the_reference(name: str, strategy: Strategy) -> None:
    assert_equal(threads, TensorParallel(MODELS[name], strategy))


@pytest.mark.parametrize(("name", "strategy"), each_other(["gpt", "llama"], TWO))
def test_two_ranks_equal_the_reference(pool: Pool, name: str, strategy: Strategy) -> None:
    assert_equal(pool, TensorParallel(MODELS[name], strategy))


GRAPHED, SLICED = Strategy(cuda_graphs=True), Strategy(p1=2, cuda_graphs=True)
PIPELINES = {
    "1f1b": Pipeline(SHORT, [(1, 1)] * 2, "1f1b", SLICED),
    "zb-h1": Pipeline(LLAMA, [(1, 1)] * 2, "zb-h1", GRAPHED),
    "levels": Pipeline(U, [(1, 1)] * 2, "eager-1f1b", SLICED),
    "interleaved": Pipeline(SHORT, [(1, 2)] * 2, "interleaved", SLICED),
    "unequal": Pipeline(LLAMA, [(1, 2), (2, 1)], "gpipe", GRAPHED),
    "zero1": Pipeline(SHORT, [(2, 1)] * 2, "1f1b", SLICED, [Sharding(optim=2)] * 2),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_equal_the_reference(pool: Pool, name: str) -> None:
    """Several micro-batches in flight, each in a slot of its own; transfers late."""
    assert_equal(pool, replace(PIPELINES[name], delay=3))


@pytest.mark.unit
def test_keys_of_masks_that_were_captured_would_be_noticed() -> None:
    """The double does what a GPU would: a number of the host is what it was when it was
    captured."""
    case = TensorParallel(GPT, Strategy(cuda_graphs=True))
    (error, _), _, _ = capturing.with_keys_of_the_capture(0, case, case.want())
    assert error > 1e-6


@pytest.mark.parametrize("number", first(3, of=60))
def test_a_drawn_job_equals_the_reference(pool: Pool, number: int) -> None:
    plan = drawn.planned(drawn.Chance(f"graphs/{number}"), 4, strategy={"cuda_graphs": True})
    for (error, what), _, _ in run(pool, case := Planned(plan), capturing.observed):
        assert error < TOLERANCE, f"{what} is off by {error:.1e} in\n{case}"


def job(**strategy: Any) -> Job:
    shape = {"family": "gpt", "num_layers": 2, "hidden": 16, "num_heads": 4, "vocab": 37, "max_sequence": 8}
    train = {"global_batch_size": 2, "micro_batch_size": 0}
    return Job.from_dict({"model": shape, "data": {"sequence_length": 8}, "train": train, "strategy": strategy})


@pytest.mark.unit
@pytest.mark.parametrize("shard", ["zero2", "fsdp"])
def test_what_does_not_stay_in_its_place_is_refused(shard: str) -> None:
    with pytest.raises(JobError, match="fixed addresses") as refused:
        job(dp=2, shard=shard, cuda_graphs=True)
    assert refused.value.key == "strategy.cuda_graphs"
    assert job(dp=2, shard=shard, cuda_graphs="auto").base_strategy.cuda_graphs is False


@pytest.mark.unit
@pytest.mark.parametrize("captures", [True, False])
def test_auto_times_steps_where_the_device_captures(captures: bool) -> None:
    device = CapturingDevice() if captures else device_of(None)
    part = assemble(make_plan(job(cuda_graphs="auto"), HERE, vocab=37), 0, device, recorder=Recorder(device))
    assert part.plan.choices.cuda_graphs and not part.plan.strategy.cuda_graphs
    tokens = torch.zeros((2, 8), dtype=torch.int64)
    found = measure(part, part.own(micro_batches(tokens, tokens, torch.arange(2), 2, 0)), 100)
    plan = refine(part.plan, found)
    assert not plan.choices.any
    if not captures:
        assert found.graphed == () and found.notes["cuda_graphs"] == "not possible on cpu"
        return
    assert {one.strategy.cuda_graphs for one in found.graphed} == {False, True}
    assert plan.strategy == min(found.graphed, key=lambda one: one.seconds).strategy
    assert "with CUDA graphs" in found.notes["cuda_graphs"]


@pytest.mark.unit
def test_slots_are_as_many_as_micro_batches_are_alive() -> None:
    """Three at once, then one after the other: memory of three, captured once each."""
    device, spec, strategy = CapturingDevice(), GPT, Strategy(cuda_graphs=True)
    model = Transformer(spec, strategy)
    lists: dict[str, Any] = {"gradients": Gradients(model), "phases": ("F", "B")}
    executor = make_executor(model, strategy, NullWire(), Load(4, 8), RankContext(device), **lists)
    assert isinstance(executor, GraphedExecutor)

    def run(count: int) -> list[InFlight]:
        batches = [micro_batches(*batch_of(spec, step), 4, step)[0] for step in range(count)]
        states = [executor.begin(batch) for batch in batches]
        for phase in ("F", "B"):
            for state in states:
                executor.phase(phase, state)
        return states

    assert not any(isinstance(state, GraphSlot) for state in run(1))  # op by op, to warm up
    executor.step_ended()
    first = run(3)
    captured = device.captured
    assert len({id(state) for state in first}) == 3 and captured > 0
    for count in (1, 3, 2):
        assert {id(state) for state in run(count)} <= {id(state) for state in first}
    assert device.captured == captured


@pytest.mark.unit
def test_nothing_is_captured_before_a_step_has_ended() -> None:
    """On a GPU autograd would give the graph a gradient of the stream on which these ran, and the
    device cannot give back memory while messages are waited for."""
    device = CapturingDevice()
    model = Transformer(GPT, Strategy(cuda_graphs=True))
    lists: dict[str, Any] = {"gradients": Gradients(model), "phases": ("F", "B")}
    executor = make_executor(model, Strategy(cuda_graphs=True), NullWire(), Load(4, 8), RankContext(device), **lists)

    def begun() -> InFlight:
        state = executor.begin(micro_batches(*batch_of(GPT, 0), 4, 0)[0])
        executor.phase("F", state)
        return state

    for _ in range(3):
        state = begun()
        executor.phase("B", state)
        assert not isinstance(state, GraphSlot) and not device.released
    for _ in range(2):
        executor.step_ended()
        state = begun()
        executor.phase("B", state)
        assert isinstance(state, GraphSlot) and device.released == 1


@pytest.mark.unit
def test_a_schedule_that_mixes_backwards_runs_op_by_op() -> None:
    model = Transformer(GPT, Strategy(cuda_graphs=True))
    lists: dict[str, Any] = {"gradients": Gradients(model), "phases": ("F", "B", "I", "W")}
    here = RankContext(CapturingDevice())
    executor = make_executor(model, Strategy(cuda_graphs=True), NullWire(), Load(4, 8), here, **lists)
    assert not isinstance(executor, GraphedExecutor)
