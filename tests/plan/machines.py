"""Clusters, plans and prices that tests of predictions are made of."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from plait.core.cluster.hardware import HERE, Cluster
from plait.core.job.plan import Plan
from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import Layout
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Strategy
from plait.core.step.orders.segment_costs import SegmentCosts
from plait.core.step.schedule import Schedule
from plait.core.step.schedules import Shape, find_schedule
from plait.core.step.segments import Collective
from plait.core.step.step import Step, Workload
from plait.plan.make import assemble_plan
from plait.plan.search.simulate import PlanPrices

SPEC = ModelSpec(family="gpt", num_layers=4, hidden=64, num_heads=4, vocab=100, max_sequence=32)


def cluster(preset: str = "a100-80", /, *, rates: float = 1.0, **efficiency: float) -> Cluster:
    """A preset with links that are so many times faster, and other constants; ``latency`` is that
    of all tiers."""
    found = Cluster.preset(preset)
    latency = efficiency.pop("latency", None)

    def constant(old: Any, value: float) -> Any:
        return old.model_copy(update={"value": value})

    tiers = tuple(
        tier.model_copy(
            update={
                "rate": constant(tier.rate, tier.rate.value * rates),
                "latency": tier.latency if latency is None else constant(tier.latency, latency),
            }
        )
        for tier in found.tiers
    )
    reached = found.efficiency.model_copy(
        update={name: constant(getattr(found.efficiency, name), value) for name, value in efficiency.items()}
    )
    return found.model_copy(update={"tiers": tiers, "efficiency": reached})


def plan_of(
    schedule: Schedule,
    layout: Layout,
    model: ModelSpec = SPEC,
    *,
    micro: int = 4,
    shardings: tuple[Sharding, ...] = (),
    **strategy: Any,
) -> Plan:
    """From parts."""
    precision = strategy.pop("precision", "fp32")
    workload = Workload(
        micro_batch=micro, num_micro_batches=schedule.num_micro_batches, sequence=model.max_sequence,
        precision=precision,
    )  # fmt: skip
    made = Strategy(cp=layout.cp, **strategy)
    return assemble_plan(Step.of(model, workload, made, layout, schedule, shardings=shardings), HERE)


def pipelined(name: str, ranks: int, micro_batches: int, model: ModelSpec | None = None, **more: Any) -> Plan:
    """Of equal pp ranks, a layer a stage."""
    chunks = 2 if name in ("interleaved", "zb-v") else 1
    schedule = find_schedule(name, Shape(ranks=ranks, micro_batches=micro_batches, chunks=chunks))[0]
    layout = Layout.of(pp=ranks, tp=more.get("tp", 1), dp=more.pop("dp", 1))
    return plan_of(schedule, layout, model or replace(SPEC, num_layers=ranks * chunks), **more)


@dataclass(frozen=True)
class Given(PlanPrices):
    """Stages of one layer that take given seconds: forward, input gradient, weight gradient, by
    pp rank; a transfer; a second of each collective of tensor parallelism, of each of a unit."""

    forward: tuple[float, ...] = ()
    input_gradient: tuple[float, ...] = ()
    weight_gradient: tuple[float, ...] = ()
    hop: float = 0.0
    wire: dict[str, float] = field(default_factory=dict[str, float])
    unit: float = 0.0

    def costs(self, pp_rank: int) -> SegmentCosts:
        compute = {
            "attn.F": self.forward[pp_rank],
            "attn.D": self.input_gradient[pp_rank],
            "attn.W": self.weight_gradient[pp_rank],
        }
        return SegmentCosts(compute, self.wire)

    def cost_class(self, pp_rank: int) -> object:
        return self.forward[pp_rank], self.input_gradient[pp_rank], self.weight_gradient[pp_rank]

    def collective(self, kind: Collective, nbytes: float, ranks: int, stride: int, pp_rank: int | None = None) -> float:
        return self.unit

    def update(self, numbers: int) -> float:
        return 0.0

    def travel(self, source: int, target: int) -> float:
        return self.hop
