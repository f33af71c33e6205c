"""Interleaved and zero-bubble pipelines: the longest chain of ops against dry runs of the
schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.step.clock.pipeline_clock import PipelineCosts, dry_run
from plait.core.step.columns.points import SCHEDULES, StrategyTable
from plait.core.step.schedule import Op
from plait.core.step.schedules import Shape, generate
from plait.core.step.seconds.pipeline_time import Stages, pipeline
from plait.core.step.stages import split_layers

Parts = tuple[float, float, float]
"""Seconds of a forward, an input gradient and a weight gradient."""


def run_dry(name: str, pp: int, count: int, stages: Sequence[Parts]) -> float:
    shape = Shape(ranks=pp, micro_batches=count, chunks=len(stages) // pp)
    forward, back, weight = (tuple(parts) for parts in zip(*stages, strict=True))
    return dry_run(generate(name, shape), PipelineCosts(forward, back, weight)).makespan


def told(name: str, pp: int, count: int, stages: Stages, chunks: int = 1) -> float:
    row = {"schedule": SCHEDULES.index(name), "pp": pp, "num_micro": count, "virtual": chunks}
    found = pipeline(stages, StrategyTable.of([row]), transfer=0.0, hidden=False)
    return float((found.work + found.bubble + found.transfers)[0])


def column(value: float) -> np.ndarray:
    return np.array([value])


PP, COUNTS = st.integers(2, 8), st.integers(1, 24)
SHARES = st.tuples(st.floats(0.1, 0.45), st.floats(0.05, 0.45))
"""Of a stage, a forward's and a weight gradient's."""


@given(name=st.sampled_from(["zb-h1", "zb-h2", "zb-v"]), pp=PP, count=COUNTS, shares=SHARES,
       head=st.floats(0, 0.5), late=st.floats(0.1, 0.9))  # fmt: skip
@settings(max_examples=50, deadline=None)
def test_a_split_backward_with_a_head_of_any_size(
    name: str, pp: int, count: int, shares: tuple[float, float], head: float, late: float
) -> None:
    """late: the share of weight gradients in what the head takes."""
    chunks = 2 if name == "zb-v" else 1
    forward, weight = shares
    whole = [(forward / chunks, (1 - forward - weight) / chunks, weight / chunks)] * (pp * chunks)
    both = head * (1 - late) / 2
    more = tuple(one + other for one, other in zip(whole[-1], (both, both, head * late), strict=True))
    exact = run_dry(name, pp, count, [*whole[:-1], (more[0], more[1], more[2])])
    longer, one = column(1 + head), column(1.0)
    first, last = (longer, one) if chunks > 1 else (one, longer)
    stages = Stages(first=first, inner=one, last=last, forward=column(forward), weight_gradient=column(weight),
                    head_weight=column(late))  # fmt: skip
    found = told(name, pp, count, stages, chunks)
    assert found == pytest.approx(exact, rel=0.03 if name == "zb-v" and pp < count < 2 * pp else 0.015)
    assert found <= exact * (1 + 1e-9)  # every chain is a part of the step


@given(pp=PP, count=COUNTS, chunks=st.integers(2, 4), forward=st.floats(0.1, 0.5), head=st.floats(0, 0.8),
       embedding=st.floats(0, 0.3))  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_rounds_whose_first_and_last_stages_take_longer(
    pp: int, count: int, chunks: int, forward: float, head: float, embedding: float
) -> None:
    stages = [[forward / chunks, (1 - forward) / chunks, 0.0] for _ in range(pp * chunks)]
    for at, more in ((0, embedding), (-1, head)):
        stages[at][0] += more * forward
        stages[at][1] += more * (1 - forward)
    exact = run_dry("interleaved", pp, count, [(one[0], one[1], one[2]) for one in stages])
    by_stage = Stages(first=column(1 + embedding), inner=column(1.0), last=column(1 + head), forward=column(forward),
                      weight_gradient=column(0.0))  # fmt: skip
    assert told("interleaved", pp, count, by_stage, chunks) == pytest.approx(exact, rel=0.06)


@pytest.mark.parametrize("ways", [(1.1, 1.2, 1.0), (0.8, 1.5, 0.7), (1.0, 2.0, 0.5)], ids=str)
@pytest.mark.parametrize(
    ("layers", "pp", "count"), [(36, 8, 8), (36, 8, 32), (30, 4, 8), (28, 8, 16), (26, 4, 16), (62, 8, 16)]
)
def test_zb_v_of_layers_that_do_not_divide(layers: int, pp: int, count: int, ways: Parts) -> None:
    """Earlier stages have more of them; a pp rank is as long as the one that has most, or as the
    mean."""
    counts = [one.num_layers for one in split_layers(layers, 2 * pp)]
    exact = run_dry("zb-v", pp, count, [(ways[0] * many, ways[1] * many, ways[2] * many) for many in counts])
    whole = sum(ways)
    mean, most = column(layers / pp * whole), column(-(-layers // pp) * whole)
    stages = Stages(first=mean, inner=most, last=mean, forward=column(ways[0] / whole),
                    weight_gradient=column(ways[2] / whole))  # fmt: skip
    assert told("zb-v", pp, count, stages, 2) == pytest.approx(exact, rel=0.08)


@dataclass(frozen=True)
class Summed:
    """Equal stages, and what the last micro-batch's weight gradients take longer: at the first
    pp rank, and at the others."""

    parts: Parts
    first: float
    others: float
    count: int
    num_stages: int

    edges: ClassVar = dict[tuple[int, int], float]()

    def seconds(self, op: Op) -> float:
        """Of a computation."""
        forward, back, weight = self.parts
        taken = forward * op.work.forward + back * op.work.input_gradient + weight * op.work.weight_gradient
        if op.work.weight_gradient and op.micro_batch == self.count - 1:
            taken += self.first if op.stage in (0, self.num_stages - 1) else self.others
        return taken

    def travel(self, transfer: object) -> float:
        """Nothing."""
        return 0.0


@pytest.mark.parametrize("sums", [(0.2, 0.15), (2.0, 1.5), (3.0, 3.0)], ids=str)
@pytest.mark.parametrize("parts", [(0.15, 0.25, 0.1), (0.2, 0.2, 0.1), (0.1, 0.15, 0.25)], ids=str)
@pytest.mark.parametrize(("pp", "count"), [(2, 2), (2, 4), (4, 4), (4, 8), (4, 16), (8, 16)])
def test_sums_of_zb_v_run_while_others_are_waited_for(
    pp: int, count: int, parts: Parts, sums: tuple[float, float]
) -> None:
    """What the first pp rank's sums take is no part of a pipeline's seconds, but what they hide in
    is."""
    shape = Shape(ranks=pp, micro_batches=count, chunks=2)
    costs = Summed(parts, *sums, count, 2 * pp)
    exact = dry_run(generate("zb-v", shape), costs).makespan  # type: ignore[arg-type]
    one = column(2 * sum(parts))
    stages = Stages(first=one, inner=one, last=one, forward=column(parts[0] / sum(parts)),
                    weight_gradient=column(parts[2] / sum(parts)), first_sums=column(2 * sums[0]),
                    other_sums=column(2 * sums[1]))  # fmt: skip
    assert told("zb-v", pp, count, stages, 2) + 2 * sums[0] == pytest.approx(exact, rel=0.02)
