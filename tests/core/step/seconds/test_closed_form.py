"""The closed form of a step: its pipelines against the schedules themselves, sums, and what must
never be slower."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.base.env import specs_folder
from plait.core.cluster.hardware import Cluster
from plait.core.model.spec import ModelSpec
from plait.core.step.clock.pipeline_clock import PipelineCosts, dry_run
from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, SCHEDULES, SHARD_OVERLAPS, StrategyTable
from plait.core.step.columns.shapes import Shapes
from plait.core.step.schedules import Shape, generate
from plait.core.step.seconds.closed_form import CHUNK, Options, Seconds, step_seconds, total_seconds
from plait.core.step.seconds.pipeline_time import Stages, pipeline

A100 = Cluster.preset("a100-80")
GPT = ModelSpec.preset("gpt3-13b", specs_folder() / "models")
LLAMA = ModelSpec.preset("llama3-8b", specs_folder() / "models")
MIXTRAL = ModelSpec.preset("mixtral-8x7b", specs_folder() / "models")


def simulated(
    name: str, pp: int, micro_batches: int, stages: list[float], transfer: float = 0, chunks: int = 1
) -> float:
    costs = PipelineCosts(
        forward=tuple(stages),
        input_gradient=tuple(stages),
        weight_gradient=tuple(stages),
        edges={(i, i + 1): transfer for i in range(len(stages) - 1)},
    )
    return dry_run(generate(name, Shape(ranks=pp, micro_batches=micro_batches, chunks=chunks)), costs).makespan


def point(name: str, pp: int, micro_batches: int, chunks: int) -> StrategyTable:
    return StrategyTable.of(
        [{"schedule": SCHEDULES.index(name), "pp": pp, "num_micro": micro_batches, "virtual": chunks}]
    )


def formula(name: str, pp: int, micro_batches: int, ends: tuple[float, float, float], transfer: float = 0,
            chunks: int = 1) -> float:  # fmt: skip
    first, inner, last = (np.array([3.0 * end]) for end in ends)
    third = np.array([1 / 3])
    run = pipeline(
        Stages(first=first, inner=inner, last=last, forward=third, weight_gradient=third),
        point(name, pp, micro_batches, chunks),
        transfer=transfer,
        hidden=False,
    )
    return float((run.work + run.bubble + run.transfers)[0])


@given(pp=st.integers(1, 9), extra=st.integers(0, 20), first=st.integers(1, 6), inner=st.integers(1, 6),
       last=st.integers(1, 6), name=st.sampled_from(["1f1b", "eager-1f1b", "gpipe"]))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_one_backward_one_forward_is_exact_if_the_last_pp_rank_is_slowest_and_near_else(
    pp: int, extra: int, first: int, inner: int, last: int, name: str
) -> None:
    ranks = [first, *[inner] * (pp - 2), last] if pp > 1 else [last]
    told = formula(name, pp, pp + extra, (first, inner, last))
    near = 0.1 if name == "eager-1f1b" else 1e-9 if name == "gpipe" or last == max(ranks) else 0.05
    assert told == pytest.approx(simulated(name, pp, pp + extra, [float(place) for place in ranks]), rel=near)


@given(pp=st.integers(2, 8), count=st.integers(1, 20), inputs=st.floats(1, 1.4), weights=st.floats(0.7, 1),
       name=st.sampled_from(["interleaved", "zb-h1", "zb-h2", "zb-v"]), chunks=st.integers(2, 4))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_equal_places_with_few_micro_batches_or_many(
    pp: int, count: int, inputs: float, weights: float, name: str, chunks: int
) -> None:
    chunks = {"interleaved": chunks, "zb-v": 2}.get(name, 1)
    ways = [(way / chunks,) * (pp * chunks) for way in (1, inputs, weights)]
    shape = Shape(ranks=pp, micro_batches=count, chunks=chunks)
    costs = PipelineCosts(forward=ways[0], input_gradient=ways[1], weight_gradient=ways[2])
    exact = dry_run(generate(name, shape), costs).makespan
    whole = np.array([1 + inputs + weights])
    run = pipeline(
        Stages(first=whole, inner=whole, last=whole, forward=1 / whole, weight_gradient=weights / whole),
        point(name, pp, count, chunks), transfer=0.0, hidden=False,
    )  # fmt: skip
    told = float((run.work + run.bubble + run.transfers)[0])
    assert told == pytest.approx(exact, rel=0.03 if name == "zb-v" and pp < count < 2 * pp else 1e-9)


POINT = {"tp": 4, "pp": 4, "dp": 4, "micro": 2, "num_micro": 16, "optim": 4, "sequence_parallel": 1}


def total(
    model: ModelSpec | Shapes = GPT, options: Options | None = None, sequence: int = 2048, **changed: int
) -> float:
    points = StrategyTable.of([{**POINT, **changed}])
    return float(step_seconds(model, points, A100, sequence=sequence, options=options).total[0])


points_of_all_kinds = st.builds(
    lambda tp, pp, dp, cp, micro, m, schedule, recompute, sp, shard, overlap, hides: {
        "tp": tp, "pp": pp, "dp": dp, "cp": cp, "ring": cp, "micro": micro, "num_micro": m * pp,
        "schedule": SCHEDULES.index(schedule), "recompute": recompute, "sequence_parallel": int(sp and tp > 1),
        "virtual": 2 if schedule == "interleaved" else 1,
        "params": dp * cp if shard == 3 else 1, "grads": dp * cp if shard >= 2 else 1,
        "optim": dp * cp if shard else 1, "overlap": overlap, "shard_overlap": hides,
    },
    *[st.sampled_from([1, 2, 4, 8])] * 3, st.sampled_from([1, 2]), st.integers(1, 4), st.integers(1, 8),
    st.sampled_from(["1f1b", "eager-1f1b", "interleaved", "zb-h1", "zb-h2"]), st.integers(0, len(RECOMPUTES) - 1),
    st.booleans(), st.integers(0, 3), st.integers(0, len(OVERLAPS) - 2), st.integers(0, len(SHARD_OVERLAPS) - 1),
)  # fmt: skip


@given(point=points_of_all_kinds)
@settings(max_examples=25, deadline=None)
def test_parts_are_not_negative_and_make_the_whole(point: dict[str, int]) -> None:
    seconds = step_seconds(LLAMA, StrategyTable.of([point]), A100, sequence=4096)
    parts = {field.name: float(getattr(seconds, field.name)[0]) for field in fields(Seconds)}
    assert min(parts.values()) > -1e-12, parts
    assert seconds.total[0] == pytest.approx(sum(parts.values()))
    flops = 3 * LLAMA.step_flops(4096, point["micro"] * point["num_micro"] * point["dp"]) / 3
    ranks = point["tp"] * point["pp"] * point["dp"] * point["cp"]
    assert seconds.total[0] > 0.9 * flops / ranks / 312e12  # step_flops counts the masked half of attention


@given(point=points_of_all_kinds, tier=st.integers(0, 1), factor=st.floats(1, 10))
@settings(max_examples=25, deadline=None)
def test_faster_links_are_never_slower(point: dict[str, int], tier: int, factor: float) -> None:
    tiers = list(A100.tiers)
    rate = tiers[tier].rate
    tiers[tier] = tiers[tier].model_copy(update={"rate": rate.model_copy(update={"value": rate.value * factor})})
    better = A100.model_copy(update={"tiers": tuple(tiers)})
    points = StrategyTable.of([point])
    before = step_seconds(LLAMA, points, A100, sequence=4096).total
    assert step_seconds(LLAMA, points, better, sequence=4096).total <= before * (1 + 1e-9)


def test_many_points_are_computed_in_parts() -> None:
    points = StrategyTable.of([{**POINT, "micro": 1 + at % 4} for at in range(CHUNK + 10)])
    seconds = step_seconds(GPT, points, A100, sequence=2048)
    alone = step_seconds(GPT, points.take(np.arange(CHUNK, CHUNK + 10)), A100, sequence=2048)
    assert np.array_equal(seconds.total[CHUNK:], alone.total)


@given(st.lists(points_of_all_kinds, min_size=2, max_size=20), st.sampled_from([LLAMA, MIXTRAL]))
@settings(max_examples=10, deadline=None)
def test_points_that_share_parts_take_what_each_takes_alone(rows: list[dict[str, int]], model: ModelSpec) -> None:
    points = StrategyTable.of([*rows, *rows[:1]])
    together = step_seconds(model, points, A100, sequence=4096)
    for at in range(len(points)):
        alone = step_seconds(model, points.take(slice(at, at + 1)), A100, sequence=4096)
        assert all(getattr(alone, part.name)[0] == getattr(together, part.name)[at] for part in fields(Seconds))
    whole = total_seconds(model, points, A100, sequence=4096, precision="bf16-mixed")
    assert np.array_equal(whole, together.total)


def test_columns_of_models_are_models() -> None:
    shapes = Shapes.stack([Shapes.of(GPT), Shapes.of(LLAMA)])
    points = StrategyTable.of([POINT, POINT])
    both = step_seconds(
        shapes, points, A100, sequence=np.array([2048, 4096]), options=Options(fused_attention=np.array([True, False]))
    )
    assert both.total[0] == pytest.approx(total())
    assert both.total[1] == pytest.approx(total(LLAMA, sequence=4096, options=Options(fused_attention=False)))
