"""Jobs for other frameworks: only what they have is searched, with their memory and their time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plait.core.base.errors import InfeasiblePlan, JobError
from plait.core.cluster.hardware import Cluster
from plait.core.job.settings import PLANNABLE
from plait.core.job.spec import Job
from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, SCHEDULES, StrategyTable
from plait.core.step.memory.closed_memory import step_memory
from plait.formats.base.frameworks import FRAMEWORKS, MEMORY_OPTIONS
from plait.plan.answer import Planner
from plait.plan.emit import emit
from plait.plan.search.needs import P90, memory_deviation
from plait.plan.search.request import search_request
from plait.plan.search.space import enumerate_space

H100 = Cluster.preset("h100")
NAMES = sorted(FRAMEWORKS)
GIB = 1 << 30


def job(framework: str, model: str = "llama3-8b", ranks: int = 16, **strategy: Any) -> Job:
    """Searched whole, unless a strategy is given."""
    values: dict[str, Any] = {
        "model": {"preset": model},
        "data": {"sequence_length": 4096},
        "train": {"global_batch_size": 64, "micro_batch_size": "auto", "precision": "bf16-mixed"},
        "cluster": {"preset": "h100", "ranks": ranks},
        "plan": {"framework": framework, "top": 3, "points": 5000},
    }
    if strategy:
        values |= {"strategy": strategy, "train": values["train"] | {"micro_batch_size": 1}}
    return Job.from_dict(values)


def planner(one: Job) -> Planner:
    return Planner(one, H100, 128256)


@pytest.mark.parametrize("name", NAMES)
def test_a_space_has_what_the_framework_has(name: str) -> None:
    framework, one = FRAMEWORKS[name], job(name, ranks=64)
    space = enumerate_space(planner(one).request, most=50_000)
    assert len(space) > 100 and framework.feasible(space).all()
    for column, values in framework.values.items():
        assert set(getattr(space, column).tolist()) <= set(values), column
    everything = enumerate_space(search_request(one, one.model_spec(128256), H100), most=50_000)
    assert not framework.feasible(everything).all() or set(everything.overlap.tolist()) - set(
        framework.values["overlap"]
    )


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_is_predicted_with_the_framework_s_memory_and_time(name: str) -> None:
    one = planner(job(name))
    found = one.answer()
    assert found.framework == FRAMEWORKS[name].version
    best = found.best
    memory = step_memory(
        one.model,
        StrategyTable.of([best.point]),
        sequence=4096,
        options=FRAMEWORKS[name].options,
        overhead=H100.overhead,
    )
    assert best.most_memory == pytest.approx(memory.total[0], abs=8)
    assert best.seconds == best.closed_form
    assert sum(best.parts.values()) == pytest.approx(best.seconds)
    assert [each.seconds for each in found.candidates] == sorted(each.seconds for each in found.candidates)


def test_what_plait_s_defaults_are_the_framework_runs_otherwise_and_says_so() -> None:
    one = job("megatron", dp=8, tp=2, shard="zero1")
    found = planner(one).evaluate()
    point = found.best.point
    assert OVERLAPS[point["overlap"]] == "async" and SCHEDULES[point["schedule"]] == "1f1b"
    assert found.why[:2] == [
        "eager-1f1b is Plait's alone: 1f1b stands for it.", "domino is Plait's alone: async stands for it."
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "strategy", "key"),
    [
        ("megatron", {"dp": 16, "schedule": "zb-v"}, "strategy.schedule"),
        ("megatron", {"dp": 16, "overlap": "sync"}, "strategy.overlap"),
        ("megatron", {"dp": 16, "shard": {"params": 1, "grads": 4, "optim": 16}}, "strategy.shard"),
        ("megatron", {"dp": 8, "tp": 2, "slices": {"batch": 1, "columns": 2}}, "strategy.slices"),
        ("torchtitan", {"dp": 16, "shard": "zero1"}, "strategy.shard"),
        ("torchtitan", {"dp": 8, "cp": 2, "shard": "fsdp"}, "strategy.cp_comm_type"),
        ("torchtitan", {"dp": 16, "recompute": "selective"}, "strategy.recompute"),
        *((name, {"dp": 16, "cuda_graphs": True}, "strategy.cuda_graphs") for name in NAMES if name != "torchtitan"),
        ("torchtitan", {"dp": 8, "pp": 2, "cuda_graphs": True, "schedule": "1f1b"}, "strategy.cuda_graphs"),
        ("deepspeed", {"dp": 8, "pp": 2, "shard": "zero3"}, "strategy.pp"),
        ("deepspeed", {"dp": 16, "shard": {"params": 1, "grads": 1, "optim": 8}}, "strategy.shard"),
    ],
)
def test_what_a_framework_has_not_is_refused_by_its_key(name: str, strategy: dict[str, Any], key: str) -> None:
    with pytest.raises(JobError) as error:
        planner(job(name, **strategy)).evaluate()
    assert error.value.key == key


@pytest.mark.parametrize("name", NAMES)
def test_graphs_are_planned_where_the_framework_can_be_told_so(name: str) -> None:
    """Of torchtitan, whose emitter says them without a pipeline."""
    open_: dict[str, Any] = dict.fromkeys(PLANNABLE, "auto")
    one = planner(job(name, cuda_graphs=True, **open_))
    if name != "torchtitan":
        with pytest.raises(JobError, match=r"does not support true. Use false, or leave it out"):
            one.answer()
        return
    best = one.answer().best
    assert best.point["graphs"] == best.point["pp"] == 1
    assert not any("cuda_graphs" in told for told in emit(best.job, name, 8).unsupported)
    two: dict[str, Any] = open_ | {"pp": 2}
    with pytest.raises(JobError, match=r"cuda_graphs=true leaves no strategy .*cuda_graphs=false or auto would do"):
        planner(job(name, cuda_graphs=True, **two)).answer()
    assert planner(job(name, **two)).answer().best.point["pp"] == 2


def pipelined(name: str, schedule: str, micros: int, pp: int) -> StrategyTable:
    virtual = 2 if schedule in ("interleaved", "zb-v") else 1
    return StrategyTable.of([{
        "pp": pp, "num_micro": micros, "schedule": SCHEDULES.index(schedule), "virtual": virtual,
        "overlap": OVERLAPS.index("async"),
    }])  # fmt: skip


def test_micro_batches_make_groups_as_each_framework_forms_them() -> None:
    """Megatron-LM's own two conditions, for groups of pp, and torch's, over many numbers."""
    for pp in (2, 3, 4, 8):
        for micros in range(1, 40):
            group, rounds = pp, max(1, micros // pp)
            left_over = micros % group
            interleaved = {"megatron": group <= micros and not 0 < left_over < pp, "torchtitan": micros % rounds == 0}
            plain = {"megatron": True, "torchtitan": micros >= pp, "deepspeed": True, "llama3": True}
            for name, runs in interleaved.items():
                points = pipelined(name, "interleaved", micros, pp)
                assert FRAMEWORKS[name].feasible(points).all() == runs, (name, pp, micros)
            for name, runs in plain.items():
                points = pipelined(name, "1f1b", micros, pp)
                assert FRAMEWORKS[name].feasible(points).all() == runs, (name, pp, micros)
    assert FRAMEWORKS["torchtitan"].feasible(pipelined("torchtitan", "gpipe", 2, 4)).all()


@pytest.mark.parametrize(
    ("name", "schedule", "batch", "says"),
    [
        (
            "megatron",
            "interleaved",
            4,
            "strategy.virtual_stages: Its interleaved schedule takes micro-batches in",
        ),
        (
            "megatron",
            "interleaved",
            12,
            "strategy.virtual_stages: Its interleaved schedule takes micro-batches in",
        ),
        ("torchtitan", "interleaved", 17, "strategy.schedule: Its interleaved schedule takes micro-batches in equal"),
        ("torchtitan", "1f1b", 4, "strategy.schedule: Its 1F1B needs at least pp micro-batches"),
    ],
)
def test_too_few_micro_batches_are_refused_by_name(name: str, schedule: str, batch: int, says: str) -> None:
    virtual = 2 if schedule == "interleaved" else 1
    ok = job(name, ranks=8, pp=8, schedule=schedule, shard="zero1", virtual_stages=virtual)
    assert planner(ok).predict(ok).seconds > 0
    one = ok.changed([f"train.global_batch_size={batch}"])
    with pytest.raises(JobError) as error:
        planner(one).evaluate()
    assert str(error.value).startswith(says)


@pytest.mark.parametrize(
    ("name", "schedule", "batch", "stands"),
    [("megatron", "interleaved", 12, "1f1b"), ("megatron", "zb-v", 12, "1f1b"), ("megatron", "interleaved", 16, ""),
     ("torchtitan", "interleaved", 17, "1f1b"), ("torchtitan", "interleaved", 12, ""),
     ("torchtitan", "1f1b", 4, "gpipe")],
)  # fmt: skip
def test_no_settings_are_printed_that_the_framework_refuses(name: str, schedule: str, batch: int, stands: str) -> None:
    """Of a plan of Plait's own, whose schedules take any number of micro-batches."""
    virtual = 2 if schedule == "interleaved" else 1
    one = job("plait", ranks=8, pp=8, schedule=schedule, shard="zero1", virtual_stages=virtual)
    found = emit(one.changed([f"train.global_batch_size={batch}"]), name, 8)
    said = [line for line in found.unsupported if line.startswith("schedule = ")]
    assert [f"({stands} stands for it)" in line for line in said] == [True] * bool(stands)
    assert ("num-virtual-stages-per-pipeline-rank" in found.text) == (name == "megatron" and not stands)


def test_a_search_respects_what_the_job_says() -> None:
    found = planner(job("megatron", tp=2, dp="auto", pp="auto", shard="auto", schedule="auto", virtual_stages="auto"))
    for one in found.answer().candidates:
        assert one.point["tp"] == 2 and SCHEDULES[one.point["schedule"]] in ("1f1b", "interleaved")
    with pytest.raises(JobError, match=r"strategy\.schedule: Megatron-LM .* does not support zb-h1"):
        planner(job("megatron", schedule="zb-h1", dp="auto", pp="auto")).answer()


def test_plait_does_not_run_what_is_another_s() -> None:
    one = planner(job("megatron", dp=16))
    for obeyed in (lambda: one.plan(one.job), lambda: one.refuse_framework("drawn")):
        with pytest.raises(JobError, match=r"plan\.framework"):
            obeyed()


def test_plait_train_refuses_what_another_is_to_run() -> None:
    one = job("megatron", dp=16)
    with pytest.raises(JobError, match="is planned for megatron") as error:
        one.check_trains(one.model_spec(257))
    assert error.value.key == "plan.framework"
    job("plait", dp=16).check_trains(one.model_spec(257))


def test_what_does_not_fit_names_a_change_that_fits() -> None:
    one = job("torchtitan", model="llama3-70b", dp=16)
    with pytest.raises(InfeasiblePlan, match="It would fit with") as error:
        planner(one).evaluate()
    changes = str(error.value).partition("It would fit with ")[2].rstrip(".").split()
    assert planner(one.changed([*changes, "plan.framework=torchtitan"])).evaluate().best.memory.fits


def test_embedding_and_head_take_stages_where_that_makes_them_equal() -> None:
    """126 layers over 128 stages of 16 places: the first and the last stage have none."""
    kept = MEMORY_OPTIONS["megatron"]
    sizes = [stage.num_layers for stage in kept.stages(126, 128)]
    assert sizes == [0, *[1] * 126, 0]
    assert [stage.num_layers for stage in kept.stages(32, 8)] == [4] * 8
    assert [stage.num_layers for stage in kept.stages(30, 8)] == [3, 4, 4, 4, 4, 4, 4, 3]
    assert [stage.num_layers for stage in MEMORY_OPTIONS["plait"].stages(30, 8)] == [4, 4, 4, 4, 4, 4, 3, 3]
    one = job("megatron", "llama3-405b", 128, tp=8, pp=16, schedule="interleaved", virtual_stages=8, shard="zero1")
    asked = planner(one).request
    assert {8} == set(enumerate_space(asked, most=1000).virtual.tolist())
    with pytest.raises(JobError, match="126 layers cannot fill 128 stages"):
        job("plait", "llama3-405b", 128, tp=8, pp=16, schedule="interleaved", virtual_stages=8, shard="zero1")


@pytest.mark.parametrize("framework", ["megatron", "torchtitan", "deepspeed", "llama3"])
@pytest.mark.parametrize("layers", [2, 3, 6])
def test_a_model_of_about_as_many_layers_as_ranks_has_an_answer(framework: str, layers: int) -> None:
    """Stages with nothing are no strategies: 3 layers fill no 4 stages, embedding and head or
    not."""
    values = {
        "model": {
            "family": "llama", "num_layers": layers, "hidden": 256, "num_heads": 4, "ffn_hidden": 512,
            "max_sequence": 256, "vocab": 512,
        },
        "data": {"sequence_length": 256}, "train": {"global_batch_size": 8, "precision": "bf16-mixed"},
        "cluster": {"preset": "h100", "ranks": 4}, "plan": {"framework": framework},
    }  # fmt: skip
    one = Job.from_dict(values)
    found = Planner(one, Cluster.preset("h100"), 512).answer().candidates
    for each in (candidate.point for candidate in found):
        stages = each["pp"] * each["virtual"]
        assert stages <= layers or (layers + 2) % stages == 0


def test_torchtitan_s_states_with_and_without_a_pipeline() -> None:
    """FSDP2: fp32 parameters, gradients and two moments of a shard; under a pipeline 2 bytes of
    every gathered parameter and 4 of its gradient besides."""
    model = job("torchtitan").model_spec(128256)
    free = {"sequence": 4096, "options": MEMORY_OPTIONS["torchtitan"]}
    alone = step_memory(model, StrategyTable.of([{"dp": 8, "params": 8, "grads": 8, "optim": 8}]), **free)
    states = alone.parameters + alone.gradients + alone.optimizer
    assert states[0] == pytest.approx(16 * model.num_parameters / 8, rel=1e-3)
    row = {"dp": 8, "pp": 2, "num_micro": 4, "optim": 8}
    piped = step_memory(model, StrategyTable.of([row]), **free)
    whole = model.num_parameters / 2
    expected = whole * (2 + 4) + whole / 8 * (4 + 8)
    assert (piped.parameters + piped.gradients + piped.optimizer)[0] == pytest.approx(expected, rel=1e-2)


PIPELINES = (
    (82.5, 8192, {"dp": 8, "micro": 4}), (72.7, 8192, {"dp": 8, "micro": 2, "virtual": 2}),
    (75.3, 32768, {"dp": 8}), (75.9, 65536, {"dp": 4, "cp": 2}), (77.1, 131072, {"dp": 2, "cp": 4}),
    (84.9, 262144, {"cp": 8}),
)  # fmt: skip
"""Llama 3.1 405B on 512 H100s (benchmarks/llama3_h100_202412_torchtitan.md): GiB, tokens, and what
a run has beside eight places and tensor-parallel ranks."""


def test_torchtitan_s_published_pipelines_are_no_surprise() -> None:
    """Memory of one run in five is to be outside of a band from p10 to p90; and none is far
    outside."""
    model, overhead, off = job("torchtitan", "llama3-405b").model_spec(128256), H100.overhead, list[float]()
    for measured, sequence, row in PIPELINES:
        stages = 8 * row.get("virtual", 1)
        row = {"pp": 8, "tp": 8, "optim": 8, "sequence_parallel": 1, "recompute": RECOMPUTES.index("full"),
               "ring": row.get("cp", 1), "num_micro": stages, **row}  # fmt: skip
        row["schedule"] = SCHEDULES.index("interleaved" if stages > 8 else "1f1b")
        found = step_memory(
            model, StrategyTable.of([row]), sequence=sequence, options=MEMORY_OPTIONS["torchtitan"], overhead=overhead
        )
        deviation = memory_deviation(overhead, found.lasting, found.moving, found.overhead, found.doubted)
        off.append(float((measured * GIB - found.allocated[0]) / deviation[0]))
    assert sum(abs(each) > P90 for each in off) <= 1 and max(map(abs, off)) < 1.5
    assert 0.75 < np.std([*off, *(-each for each in off)]) < 1.1, "it is no wider than they are"


def test_deepspeed_s_states() -> None:
    """ZeRO (arXiv 1910.02054, section 3.1): 2 bytes of a parameter, 2 of a gradient, 12 of the
    optimizer."""
    model = job("deepspeed").model_spec(128256)
    for stage, each in ((1, 2 + 2 + 12 / 8), (3, 16 / 8)):
        row = {"dp": 8, "optim": 8} | ({"params": 8, "grads": 8} if stage == 3 else {})
        found = step_memory(model, StrategyTable.of([row]), sequence=4096, options=MEMORY_OPTIONS["deepspeed"])
        states = found.parameters + found.gradients + found.optimizer
        assert states[0] == pytest.approx(each * model.num_parameters, rel=1e-3)


def test_transfers_of_interleaved_stages_are_hidden_and_others_are_not() -> None:
    one = planner(job("megatron", pp=4, dp=4, shard="zero1", schedule="interleaved", virtual_stages=4))
    other = replace(FRAMEWORKS["megatron"], options=replace(MEMORY_OPTIONS["megatron"], rounds_hide_transfers=False))
    hidden, seen = (one.predict(one.job), replace(one, configured_framework=other).predict(one.job))
    assert hidden.parts["pp"] < seen.parts["pp"] and np.isclose(hidden.parts["compute"], seen.parts["compute"])
    flat = planner(job("megatron", pp=4, dp=4, shard="zero1", schedule="1f1b"))
    assert flat.predict(flat.job).seconds == replace(flat, configured_framework=other).predict(flat.job).seconds


def of_overlap(kind: str, **strategy: Any) -> float:
    """Seconds of a step."""
    one = planner(job("deepspeed", **strategy, overlap={"tp": "sync", "shard": kind}))
    return one.predict(one.job).seconds


@pytest.mark.parametrize(
    ("strategy", "hidden"),
    [
        ({"shard": "ddp", "dp": 16}, False),
        ({"shard": "zero1", "dp": 16}, True),
        ({"shard": "zero2", "dp": 16}, True),
        ({"shard": "fsdp", "dp": 16}, True),
        ({"shard": "zero1", "dp": 8, "pp": 2}, False),
    ],
)
def test_what_deepspeed_s_overlap_comm_hides(strategy: dict[str, Any], hidden: bool) -> None:
    """Nothing without ZeRO, and nothing within a pipeline."""
    seconds = [of_overlap(kind, **strategy) for kind in ("both", "none")]
    assert (seconds[0] < seconds[1]) == hidden and seconds[0] <= seconds[1]


def test_deepspeed_s_new_parameters_are_gathered_beside_nothing_unless_they_are_shared_out() -> None:
    for shard, beside in (("zero1", False), ("zero2", False), ("fsdp", True)):
        both, backward = (of_overlap(kind, dp=16, shard=shard) for kind in ("both", "backward"))
        assert (both < backward) == beside, shard


def test_torchtitan_s_loss_is_computed_in_parts() -> None:
    """Of 8 parts one has logits; the stream's gradient is collected in fp32 meanwhile."""
    model = job("torchtitan").model_spec(128256)
    points = StrategyTable.of([{"dp": 8, "params": 8, "grads": 8, "optim": 8, "recompute": 2, "recompute_layers": -1}])
    told = {"sequence": 8192, "overhead": H100.overhead}
    whole = step_memory(model, points, options=MEMORY_OPTIONS["torchtitan"], **told)
    parts = step_memory(model, points, options=FRAMEWORKS["torchtitan"].options, **told)
    assert whole.logits[0] == 8 * parts.logits[0] == 8192 * 128256 * 4
    assert whole.activations[0] - parts.activations[0] > 0.5 * (whole.logits[0] - parts.logits[0])
