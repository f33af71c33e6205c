"""What a rank of a test sends, counted, against what the formulas say of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from torch import Tensor

from plait.core.parallel.sharding import EXPERTS
from plait.core.step.segments import Collective
from plait.core.step.step import PipelineRank
from plait.core.step.traffic import UnitTraffic, micro_batch_bytes, step_bytes, unit_traffic
from plait.train.comm.wire import Wire, wire_bytes
from plait.train.engine.assembly import RankPart
from plait.train.model.sequence import SequenceGroup
from tests.dist.equality import STEPS


class CountedWire:
    """A wire that counts what it sends."""

    def __init__(self, wire: Wire) -> None:
        self.wire, self.size, self.rank, self.sent = wire, wire.size, wire.rank, 0

    def start(self, kind: Collective, result: Tensor, source: Tensor) -> Any:
        self.sent += wire_bytes(kind, result, source, self.size) if self.size > 1 else 0
        return self.wire.start(kind, result, source)


def count_sequence(part: RankPart) -> dict[str, CountedWire]:
    """Counters on the wires of sequence parallelism, from here on."""
    sequence = part.groups.sequence
    wires = {"ulysses": CountedWire(sequence.ulysses), "ring": CountedWire(sequence.ring)}
    for stage in part.models.stages:
        for attention in stage.attn.values():
            attention.sequence = SequenceGroup(wires["ulysses"], wires["ring"])  # type: ignore[arg-type]
    return wires


def counted(part: RankPart) -> tuple[RankPart, dict[str, CountedWire]]:
    """The same part with counters on the wires of tensor and sequence parallelism."""
    wires = {"tp": CountedWire(part.groups.tp)} | count_sequence(part)
    return replace(part, groups=replace(part.groups, tp=wires["tp"])), wires


def traffic(part: RankPart, wires: dict[str, CountedWire], *, micro: int, count: int) -> dict[str, float]:
    """How far what the micro-batches of one step have sent is off the formula: nothing or
    everything. micro: sequences of a micro-batch, count: of micro-batches."""
    want: Counter[str] = Counter()
    own = part.plan.rows_of(part.rank, micro)
    pipeline_rank = PipelineRank(part.plan, part.groups.pp_rank)
    for stage in part.models.stages:
        want.update(
            micro_batch_bytes(pipeline_rank.traffic(pipeline_rank.stage_index[stage.stage.index], own.stop - own.start))
        )
    errors: dict[str, float] = {}
    for axis, wire in wires.items():
        planned = count * want[axis]
        rows = count * want["rows"] if axis == "tp" else 0  # they depend on the tokens
        fits = planned <= wire.sent <= planned + rows if rows else wire.sent == planned
        errors[f"{axis}: {wire.sent} bytes sent, {planned} by the formula and at most {rows} of rows"] = (
            0.0 if fits else float("inf")
        )
    return errors


def planned_bytes(part: RankPart, *, count: int) -> dict[str, int]:
    """What the formula says that ``STEPS`` steps of ``count`` micro-batches send."""
    units = {unit: store.numel for unit, store in part.models.units.items()}
    one_stage = any(stage.stage.embeds and stage.stage.heads for stage in part.models.stages)
    groups, shared = part.groups, list[UnitTraffic]()
    for routed, sharding, ranks in (
        (False, groups.sharding, groups.mesh.replicas),
        (True, groups.expert_sharding, groups.expert_mesh.replicas),
    ):
        own = {unit: numel for unit, numel in units.items() if (unit[0] == EXPERTS) == routed}
        shared += unit_traffic(own, sharding, ranks, itemsize=8, gradient_itemsize=8)
    step = step_bytes(shared, micro_batches=count, tied=bool(part.models.spec.tied_embeddings) and one_stage)
    return {axis: STEPS * sent for axis, sent in step.items()}
