"""A simulated step has the spans that real steps record: the same keys, and the same bytes."""

from __future__ import annotations

from typing import Any

import pytest

from plait.core.cluster.hardware import Cluster
from plait.core.job.spec import Job
from plait.core.record.timeline import Span
from plait.plan.search.simulate import simulate_plan
from tests.dist import recording
from tests.dist.equality import Pool
from tests.dist.test_estimate import GPT, JOBS, LLAMA, MORE, job
from tests.support.drawn import Chance, drawn_plan
from tests.support.exposure import exposure_of
from tests.support.threads import threads

HERE = {
    "one rank": job(GPT, {}),
    "domino": job(LLAMA, {"tp": 2, "slices": {"batch": 2, "columns": 2}}, batch=4),
    "fixed": job(LLAMA, {"tp": 2, "overlap": "fixed", "slices": {"batch": 2}, "recompute": "full"}, batch=4),
    "async and tied": job(GPT, {"pp": 2, "tp": 2, "overlap": "async"}),
    "zb-h1": job(GPT, {"pp": 2, "schedule": "zb-h1"}),
    "fsdp": job(GPT, {"dp": 2, "shard": "fsdp"}, micro=1),
    "fsdp, nothing hidden": job(LLAMA, {"dp": 2, "shard": "fsdp", "overlap": {"tp": "sync", "shard": "none"}}, micro=1),
    "zero1 in a pipeline": job(LLAMA, {"pp": 2, "dp": 2, "shard": "zero1"}, micro=1),
    "secondary": job(LLAMA, {"dp": 4, "shard": {"params": 4, "grads": 4, "optim": 4, "secondary": 2}}, micro=1),
    "ulysses": job(LLAMA, {"cp": 2, "dp": 2, "shard": "fsdp"}, micro=1),
    "ring": job(LLAMA, {"cp": 2, "cp_comm_type": "ring", "tp": 2, "shard": "zero1"}, micro=1),
    "left out": job(GPT, {"tp": 2, "overlap": "no-communication"}),
}
IN_THREADS = {
    "one rank", "domino", "async and tied", "zb-h1", "fsdp", "fsdp, nothing hidden", "zero1 in a pipeline",
}  # fmt: skip
"""Whose ranks are threads of the test's own process."""
DRAWN = 40


def facts(span: Span) -> tuple[Any, ...]:
    """All but times and bytes."""
    return (*span.key, span.site, span.layer, span.slice, span.direction)


def compare(pool: Any, values: dict[str, Any]) -> None:
    asked = Job.from_dict(values)
    found = pool(asked.world_size).run(recording.spans, values)
    plan = found[0][0]
    for cluster in (None, Cluster.preset("a100-80")):
        timeline = simulate_plan(plan, cluster).timeline(range(recording.STEPS))
        assert timeline.plan_hash == plan.key
        predicted = {facts(span): span.bytes for span in timeline.spans}
        measured = {facts(span): span.bytes for _, spans in found for span in spans}
        assert len(predicted) == len(timeline.spans)
        assert set(predicted) == set(measured)
        rows = {facts(span) for span in timeline.spans if span.kind == "comm" and span.site == "embed"}
        for key, sent in measured.items():
            assert sent <= predicted[key] if key in rows else sent == predicted[key], key


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.unit if name in IN_THREADS else ()) for name in HERE]
)
def test_every_recorded_key_is_predicted_and_every_predicted_key_recorded(pool: Pool, name: str) -> None:
    compare(threads if name in IN_THREADS else pool, HERE[name])


@pytest.mark.parametrize("shard", ["ddp", "zero1"])
def test_what_an_optimizer_waits_for_is_recorded(pool: Pool, shard: str) -> None:
    """Until the last reduction is over: else communication at a step's end would count as
    hidden."""
    for _, spans in pool(2).run(recording.spans, job(GPT, {"dp": 2, "shard": shard}, micro=1)):
        for step in range(recording.STEPS):
            own = [span for span in spans if span.step == step]
            (wait,) = (span for span in own if span.kind == "wait" and span.name.startswith("settle"))
            reduced = [span.end for span in own if span.kind == "comm" and span.name.startswith("reduce")]
            assert reduced and max(reduced) <= wait.end
            assert exposure_of(own).exposed > 0


@pytest.mark.contract
@pytest.mark.parametrize("name", JOBS | MORE)
def test_so_it_is_for_more(pool: Pool, name: str) -> None:
    compare(pool, (JOBS | MORE)[name])


@pytest.mark.contract
@pytest.mark.parametrize("seed", range(DRAWN))
def test_so_it_is_for_jobs_drawn_from_the_whole_space(pool: Pool, seed: int) -> None:
    values, _ = drawn_plan(Chance(seed), 4, 4)
    compare(pool, values)
