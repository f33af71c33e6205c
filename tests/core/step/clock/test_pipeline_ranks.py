"""Pp ranks as a simulation sees them: what their ranks hold, and what their collectives
take."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from plait.core.job.plan import Plan
from plait.core.parallel.layout import Layout
from plait.core.parallel.sharding import Sharding
from plait.core.step.clock.phase import Programme, UnitStep
from plait.core.step.clock.pipeline_ranks import PipelineRankLists
from plait.core.step.schedules import Shape, find_schedule
from plait.core.step.segments import Collective
from plait.core.step.step import PipelineRank
from plait.plan.search.simulate import PlanPrices
from tests.plan.machines import SPEC, pipelined, plan_of


@dataclass(frozen=True)
class Links(PlanPrices):
    """A collective takes a second for every rank and a thousandth for each step between them; links
    have the number of how far they reach."""

    slow: tuple[float, float] = (1.5, 1.25)
    asked: list[tuple[str, float, int, int]] = field(default_factory=list[tuple[str, float, int, int]])

    def collective(self, kind: Collective, nbytes: float, ranks: int, stride: int, pp_rank: int | None = None) -> float:
        self.asked.append((kind, nbytes, ranks, stride))
        return ranks + stride * 1e-3

    def tier(self, ranks: int, stride: int) -> int:
        return ranks * stride


def plan_at(pipeline_rank: PipelineRank) -> Plan:
    assert isinstance(pipeline_rank.step, Plan)
    return pipeline_rank.step


def pipeline_ranks(plan: Plan) -> list[PipelineRank]:
    return [PipelineRank(plan, index) for index in range(len(plan.layout.degrees))]


def test_places_that_differ_in_their_layers_alone_are_of_a_kind() -> None:
    first, second, third, last = pipeline_ranks(pipelined("1f1b", 4, 8))
    assert second.kind == third.kind != first.kind
    assert last.kind not in (first.kind, second.kind)
    unequal = find_schedule("1f1b", Shape(ranks=4, micro_batches=4))[0]
    _, two, three, _ = pipeline_ranks(plan_of(unequal, Layout(((1, 2), (2, 1), (1, 2), (1, 2))), SPEC))
    assert two.kind != three.kind
    sharded = pipelined("1f1b", 4, 8, dp=2, shardings=(Sharding(), Sharding(optim=2), Sharding(), Sharding()))
    assert pipeline_ranks(sharded)[1].kind != pipeline_ranks(sharded)[2].kind
    v = pipeline_ranks(pipelined("zb-v", 3, 6))[1]
    assert v.stage_index == {1: 0, 4: 1}
    assert set(v.phases) == {(at, phase) for at in (0, 1) for phase in ("F", "I", "W")}
    assert [stage.index for stage in v.stages] == [1, 4]


def test_lists_of_another_place_of_the_kind_are_those_of_its_layers() -> None:
    _, second, third, _ = pipeline_ranks(pipelined("1f1b", 4, 8))
    lists = PipelineRankLists(second, Links(plan_at(second)))
    own, other = lists.of(second, 0, "F"), lists.of(third, 0, "F")
    assert own == lists.listed(0, "F")
    assert [str(action).replace("attn1", "attn2").replace("mlp1", "mlp2") for action in own] == list(map(str, other))


SHARDED = Sharding(params=2, grads=2, optim=2)


@pytest.mark.parametrize(
    ("name", "strategy", "kinds"),
    [
        ("interleaved", {}, 3), ("interleaved", {"recompute": "full", "recompute_layers": 1}, 3), ("zb-v", {}, 3),
        ("1f1b", {"sequence_parallel": True, "overlap": "domino", "p1": 2}, 3),
    ],
)  # fmt: skip
def test_stages_with_equal_layers_are_listed_once_and_do_the_same(
    name: str, strategy: dict[str, Any], kinds: int
) -> None:
    """As if each was listed on its own, with the numbers of its own units."""
    plan = pipelined(name, 4, 8, dp=2, tp=2, micro=4, model=replace(SPEC, num_layers=16),
                     shardings=(SHARDED,) * 4, **strategy)  # fmt: skip
    known = dict[object, Programme]()
    for pipeline_rank in pipeline_ranks(plan):
        found = PipelineRankLists(pipeline_rank, Links(plan), known).inside
        for at, phase in pipeline_rank.phases:
            alone = PipelineRankLists(pipeline_rank, Links(plan))._programme(at, phase)  # pyright: ignore[reportPrivateUsage]
            assert found.programmes[at, phase] == alone
            of = {
                pipeline_rank.units[step.unit].unit for step in alone if isinstance(step, UnitStep) and step.unit >= 0
            }
            assert of <= {*pipeline_rank.held[at]} and len(of) > 1
    assert len(known) == kinds * len({phase for _, phase in pipeline_ranks(plan)[0].phases})
