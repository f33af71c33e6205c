"""Costs of a stage's segment ops and collectives on a described cluster.

Compute and network seconds come from the prices of ``op_seconds``; ``Launches`` holds the host's
launch overhead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from plait.core.cluster.hardware import Cluster
from plait.core.model.precision import ITEMSIZE, Precision
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, StrategyTable
from plait.core.step.columns.shapes import Options, Shapes
from plait.core.step.ops import LAYERS, Dims, Kind, steps_of
from plait.core.step.orders.overlap import Load
from plait.core.step.orders.segment_costs import SegmentCosts
from plait.core.step.seconds import rates
from plait.core.step.seconds.layer_sums import launch_seconds
from plait.core.step.seconds.layer_time import Layer
from plait.core.step.seconds.op_seconds import OpSeconds
from plait.core.step.segments import SegmentOp, Site


def cluster_costs(
    model: ModelSpec, strategy: Strategy, load: Load, cluster: Cluster, *, precision: Precision
) -> SegmentCosts:
    """Return the costs of one micro-batch of ``load`` on ranks of ``cluster``. strategy: the pp
    rank's.

    A layer of a U-Transformer costs the mean over the sequence lengths of all layers. Raises
    JobError if the device has no peak for ``precision``.
    """
    return _known_costs(model, strategy, load, _Itself(cluster), precision).costs


def cluster_launches(
    model: ModelSpec, strategy: Strategy, load: Load, cluster: Cluster, *, precision: Precision
) -> Launches:
    """Return the seconds the host needs to launch the ops of one micro-batch. Raises JobError like
    ``cluster_costs``."""
    return _known_costs(model, strategy, load, _Itself(cluster), precision).launches


@dataclass(frozen=True)
class Launches:
    """Launch overhead of the host in seconds. ops: of one op of one slice and part, by
    ``site.kind``; collective: of starting one collective."""

    ops: Mapping[str, float] = field(default_factory=dict[str, float])
    collective: float = 0.0

    def of(self, op: SegmentOp) -> float:
        """Return the launch seconds of an op; 0 if the op is unknown."""
        return self.ops.get(f"{op.site}.{op.kind}", 0.0)


@dataclass(frozen=True)
class _Costs:
    model: ModelSpec
    strategy: Strategy
    load: Load
    cluster: Cluster
    precision: Precision

    @cached_property
    def layer(self) -> Layer:
        """One layer under the strategy, as the closed form prices it."""
        own = self.strategy
        point = StrategyTable.of([{
            "tp": own.tp, "cp": own.cp, "ring": own.ring, "sequence_parallel": int(own.sequence_parallel),
            "micro": self.load.batch, "p1": own.p1, "p2": own.p2, "overlap": OVERLAPS.index(own.overlap),
            "recompute": RECOMPUTES.index(own.recompute), "graphs": int(own.cuda_graphs is True),
        }])  # fmt: skip
        return Layer(Shapes.of(_flat(self.model)), point, self.cluster, self.load.sequence, self.precision, Options())

    @cached_property
    def ops(self) -> OpSeconds:
        ((_, found),) = self.layer.structures()
        return found

    @cached_property
    def depth(self) -> float:
        """Mean sequence length of a layer, as a fraction of the full length."""
        layers = self.model.num_layers
        return sum(0.5 ** self.model.level(layer) for layer in range(layers)) / layers

    @cached_property
    def costs(self) -> SegmentCosts:
        compute, wire = dict[str, float](), dict[str, float]()
        sites: tuple[Site, ...] = ("embed", *(site for site, _ in self.ops.graph.segments if site in LAYERS), "head")
        for site in sites:
            times = self.depth if site in LAYERS else 1.0
            for kind in self.ops.graph.kinds(site, 0):
                key = f"{site}.{kind}"
                compute[key] = times * _number(self.ops.compute(site, kind).seconds)
                if sent := _number(self.ops.sent(site, kind)):
                    wire[key] = times * sent
        for kind in (Kind.NORM, Kind.NORM_BACKWARD):
            compute[f"leave.{kind}"] = _number(self.ops.compute("leave", kind).seconds)
        if "head.J" in wire:
            wire["leave.J"] = wire["head.J"]
        return SegmentCosts(compute | self._resampling(), wire)

    @cached_property
    def launches(self) -> Launches:
        """Launch overhead of the host; like the closed form, only for ops of layers."""
        found = dict[str, float]()
        for site, _ in self.ops.graph.segments:
            for kind in self.ops.graph.kinds(site, 0) if site in LAYERS else ():
                work = self.ops.compute(site, kind)
                count = self.strategy.p1 * _number(self.ops.parts(site, kind))
                found[f"{site}.{kind}"] = _number(launch_seconds(self.layer, kind)) * _number(work.launches) / count
        return Launches(found, self.cluster.efficiency.host_collective.value)

    def _resampling(self) -> dict[str, float]:
        """Return the seconds of a U-Transformer's down and up ops, at their mean length, by
        ``site.kind``."""
        levels, hidden = self.model.levels, float(self.model.hidden)
        if not levels:
            return {}
        tokens = self.load.batch * self.load.sequence / self.strategy.cp
        mean = sum(0.5**level for level in range(levels)) / levels * tokens  # before a down, after an up
        dims = Dims(T=mean / 2, H=hidden)
        down, up = (
            sum(
                float(rates.matmul(self.cluster, self.precision, *dims.product(step)))
                for step in steps_of(branch, Kind.NORM)
            )
            for branch in ("down", "up")
        )
        factor = self.cluster.efficiency.elementwise.value * ITEMSIZE[self.precision]
        moved = float(rates.memory_bound(self.cluster, mean * hidden * 2 * factor))
        return {"down.N": down + moved, "down.J": 2 * down + moved, "up.N": up + moved, "up.J": 2 * up + moved}


class _Itself:
    """A cluster wrapper that compares and hashes by identity, so that caching does not compare a
    file's worth of numbers."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def __hash__(self) -> int:
        return id(self.cluster)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.cluster is other.cluster


@lru_cache(maxsize=64)
def _known_costs(model: ModelSpec, strategy: Strategy, load: Load, cluster: _Itself, precision: Precision) -> _Costs:
    """Return cached costs: pp ranks of a pipeline, and many finalists, share the same arguments."""
    return _Costs(model, strategy, load, cluster.cluster, precision)


def _number(column: Any) -> float:
    """Return the number in an array that holds one strategy."""
    return float(np.sum(column))


def _flat(model: ModelSpec) -> ModelSpec:
    """Return the model with all layers at full sequence length (no down or up of a
    U-Transformer)."""
    if not model.levels:
        return model
    return replace(model, family="gpt", levels=0)
