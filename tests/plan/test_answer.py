"""What a planner says of a job: its ranks, its own strategy, what is too large, and why the best is
it."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from plait.core.base.errors import InfeasiblePlan, JobError, PlaitError
from plait.core.cluster.hardware import Cluster, Hosts
from plait.core.job.spec import Job
from plait.plan.answer import Planner
from plait.plan.explain.job_cluster import emulated

A100 = Cluster.preset("a100-80")
SMALL = {"family": "gpt", "num_layers": 4, "hidden": 64, "num_heads": 4, "max_sequence": 64, "vocab": 256}
LARGE = SMALL | {"hidden": 8192, "num_heads": 64, "num_layers": 32}
HUGE = SMALL | {"hidden": 65536, "num_heads": 512, "num_layers": 512}
ON = {"preset": "a100-80"}


def job(model: dict[str, Any] = SMALL, **sections: Any) -> Job:
    given = {"model": model, "data": {"sequence_length": 64}, "train": {"global_batch_size": 4}}
    return Job.from_dict(given | sections)


@pytest.mark.parametrize(
    ("sections", "ranks"),
    [
        ({}, 6),
        ({"cluster": {"ranks": 7}}, 7),
        ({"cluster": {"preset": "lab", "ranks": 3}}, 3),
        ({"strategy": {"tp": 2}}, 2),
        ({"strategy": {"tp": "auto"}}, 4),
    ],
)
def test_cores_that_cannot_share_the_batch_are_left_out(sections: dict[str, Any], ranks: int) -> None:
    """Of seven on this machine; not where the job says how many ranks there are."""
    one = job(**sections)
    found = Planner(one, emulated(one, Hosts(ranks_per_host=7), 1), 256).request
    assert (found.ranks, found.domain) == (ranks, ranks)


@pytest.mark.parametrize(
    ("one", "error", "says"),
    [
        (job(strategy={"tp": "auto"}, train={"global_batch_size": 4, "micro_batch_size": 1}, cluster=ON), JobError,
         r"strategy\.tp: is left to the planner, and so are slices\. Set it"),
        (job(strategy={"tp": 2}, cluster={**ON, "ranks": 4}), JobError,
         r"cluster\.ranks: 4 are not the 2 ranks of the strategy\. Use 2, or leave it out"),
        (job(SMALL | {"num_layers": 1_001}, strategy={"tp": 2}, cluster=ON), JobError,
         r"model\.num_layers: 1001 layers are more than 1000"),
        (job(LARGE, strategy={"tp": 2}, cluster=ON), InfeasiblePlan,
         r"The strategy does not fit: a rank with pp rank 0 needs [\d.]+ GiB \(optimizer [\d.]+ GiB, .* "
         r"beside tensors [\d.]+ GiB\), [\d.]+ GiB more than the 78\.8 GiB of A100-SXM4-80GB that a plan may fill\. "
         r"What would free memory: .*\. It would fit with strategy\.tp=8\."),
        (job(LARGE, strategy={"dp": 4}, cluster={**ON, "ranks": 4}), InfeasiblePlan,
         r"It would fit with strategy\.shard=fsdp strategy\.recompute=full strategy\.tp=2 cluster\.ranks=8\."),
        (job(HUGE, strategy={"tp": 2}, cluster=ON), InfeasiblePlan,
         r"None of the usual changes is enough, nor are 64 times as many ranks: use a smaller model"),
        (job(LARGE, strategy={"dp": 4}), InfeasiblePlan,
         r"The plan is for this machine: cluster\.preset=NAME plans for another cluster .* It would fit with"),
    ],
)  # fmt: skip
def test_a_strategy_that_cannot_be_is_refused(one: Job, error: type[PlaitError], says: str) -> None:
    with pytest.raises(error, match=says):
        Planner(one, A100.model_copy(update={"name": "here"} if one.cluster.preset == "here" else {}), 256).evaluate()


def test_a_strategy_that_fits_is_told_with_its_reasons() -> None:
    found = Planner(job(strategy={"tp": 2}, cluster=ON), A100, 256).evaluate()
    assert (found.searched, found.ranks, len(found.candidates)) == (1, 2, 1)
    best = found.best
    assert best.low < best.seconds < best.high
    assert best.closed_form == pytest.approx(best.seconds, rel=0.05)
    assert sum(best.parts.values()) == pytest.approx(best.seconds)
    assert best.tokens_per_second == pytest.approx(4 * 64 / best.seconds)
    assert best.mfu and best.mfu_full and 0 < best.mfu < best.mfu_full < 1
    assert best.most_memory == best.memory.fullest.total
    assert found.to_dict()["candidates"][0]["usable_memory"] == best.memory.usable
    assert found.why[0].startswith("A step is ")
    assert found.why[1].startswith("Without overlap of tensor-parallel communication, a step takes ")
    assert len(found.why) == 2


def test_utilisation_of_long_sequences_stays_below_one() -> None:
    """With all scores counted it would not: 7B with sequences of four million tokens."""
    long = Job.from_dict({
        "model": {"preset": "llama2-7b", "max_sequence": 1 << 22}, "data": {"sequence_length": 1 << 22},
        "train": {"global_batch_size": 4, "precision": "bf16-mixed"}, "cluster": {"preset": "a100-80"},
        "strategy": {"dp": 4, "cp": 64, "tp": 2, "cp_comm_type": {"ulysses": 16, "ring": 4}},
    })  # fmt: skip
    best = Planner(long, A100, 32_000).predict(long)
    assert best.mfu and best.mfu_full and 0.4 < best.mfu < 0.6
    assert best.mfu_full > 0.9
    assert best.mfu_full / best.mfu == pytest.approx(2, rel=0.02)


def test_what_overlaps_gain_is_not_simulated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strategies without an overlap were finalists: a planner that does not know that says the
    same."""
    one = job(
        SMALL | {"hidden": 4096, "num_heads": 32},
        cluster={**ON, "ranks": 8},
        strategy={"tp": "auto", "overlap": "auto"},
    )
    first = Planner(one, A100, 256)
    answer = first.answer()
    simulated = list[Job]()
    real = Planner.simulated
    monkeypatch.setattr(Planner, "simulated", lambda self, it: simulated.append(it) or real(self, it))
    assert first.why(answer.candidates) and not simulated
    assert Planner(one, A100, 256).why(answer.candidates) == first.why(answer.candidates) and simulated


@pytest.mark.parametrize("framework", [None, "megatron"])
def test_planning_leaves_no_circles_of_what_it_walked_and_simulated(framework: str | None) -> None:
    """The collector does not run while plans are made (``uncollected``), and hardly looks at what
    is old."""
    plan = {"framework": framework} if framework else {}
    train = {"global_batch_size": 64, "precision": "bf16-mixed"}
    one = job(SMALL | {"num_layers": 8}, train=train, cluster={**ON, "ranks": 8}, plan=plan)
    planner = Planner(one, A100, 256)
    gc.collect()
    gc.disable()
    try:
        assert len(planner.answer().candidates) > 1
        assert gc.collect() < 2_000, "objects; of a simulation alone there are some 10,000"
    finally:
        gc.enable()
