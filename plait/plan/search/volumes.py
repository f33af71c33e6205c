"""Bytes that a rank holds and sends in a step, along dp, along pp and between experts; and bytes
between pairs of ranks, as the network sees a job (figure 1 of Arnold, arXiv 2509.15940).

Muon's traffic for whole matrices counts along dp, even between tensor-parallel ranks. All but
experts counts as a dense model as wide as what every rank holds. If only some layers have experts,
every layer counts its share of that (docs/adr/0017); experts count in their own layers. Collectives
are rings over their groups in rank order, so a rank has two neighbours along each axis. Stages send
to their counterparts in other stages. Matrices for Muon travel between all ranks that share them.
Bytes are the planner's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from plait.core.job.communication import Volume
from plait.core.model.experts import refuse_experts
from plait.core.parallel.layout import MeshAxis
from plait.core.parallel.sharding import Sharding, Unit, sharing
from plait.core.step.memory.estimate import PipelineRankMemory
from plait.core.step.memory.states import without_routed_experts
from plait.core.step.seconds.shard_traffic import expert_factor
from plait.core.step.step import Step
from plait.core.step.traffic import step_bytes, unit_traffic


def pp_rank_volume(step: Step, index: int) -> Volume:
    """Return the bytes that a rank of a pp rank holds, and those that it sends in a step along dp
    and pp. Raises JobError for a model with experts, whose volumes are not counted."""
    refuse_experts(step.model, "counted")
    one = PipelineRankMemory(step, index)
    sent = one.sent()
    return Volume(
        weights=sum(one.pipeline_rank.unit_sizes.values()) * step.workload.itemsize,
        dp=sum(sent.get(axis, 0) for axis in ("params", "grads", "optim", "replicas", "secondary", "matrices")),
        pp=sent.get("pp", 0),
    )


def expert_volume(step: Step, index: int, ep: int) -> Volume:
    """Return the volume of a rank of a pp rank, like ``pp_rank_volume``, for a model that may have
    experts. ep: ranks over which a layer's experts are divided.

    Tokens travel to their experts and back in forward and backward, and once more in a recomputed
    layer. A fraction (ep - 1) / ep of them leaves the rank: tokens are spread evenly over experts.
    """
    experts = step.model.experts
    dense = pp_rank_volume(replace(step, model=without_routed_experts(step.model)), index)
    if experts is None:
        return dense
    mesh, loads, strategy = step.layout.meshes[index], step.workload, step.strategy
    layers = [layer for stage in step.stages_of(index) for layer in stage.layers if experts.at(layer)]
    own = _of_experts(step.shardings[index], ep)
    numel = own.padded(step.model.routed_parameters // (ep * mesh.tp))
    units: dict[Unit, int] = {("mlp", layer): numel for layer in layers}
    shared = unit_traffic(units, own, mesh.replicas // ep, itemsize=loads.itemsize, gradient_itemsize=loads.reduced)
    sent = step_bytes(shared, micro_batches=loads.num_micro_batches)
    tokens = step.largest_share(index) * loads.sequence // mesh.cp // (mesh.tp if strategy.sequence_parallel else 1)
    rows = round(tokens * experts.load) * step.model.hidden * loads.itemsize
    again = 0
    if strategy.recompute in ("full", "layer"):
        again = len(layers) if strategy.recompute_layers is None else min(len(layers), strategy.recompute_layers)
    times = 2 * (2 * len(layers) + again) * loads.num_micro_batches
    return replace(
        dense,
        weights=dense.weights + numel * len(layers) * loads.itemsize,
        dp=dense.dp + sum(sent.values()),
        ep=float(times * (rows * (ep - 1) // ep)),
    )


def _of_experts(sharding: Sharding, ep: int) -> Sharding:
    """Return the sharding factors of expert weights, over the replicas that hold the same
    experts."""
    cut = {name: int(expert_factor(getattr(sharding, name), ep)) for name in ("params", "grads", "optim")}
    secondary = int(expert_factor(sharding.secondary, ep)) if sharding.secondary else 0
    return Sharding(**cut, secondary=secondary if 1 < secondary < cut["params"] else 0)


ALONG: dict[MeshAxis, tuple[str, ...]] = {
    "tp": ("tp", "copies"),
    "cp": ("cp",),
    "replicas": ("params", "grads", "optim", "replicas", "secondary"),
}
"""Traffic along the groups of each mesh axis, by the planner's names."""


@dataclass(frozen=True, kw_only=True)
class RankPairs:
    """Traffic between pairs of ranks. sent: bytes of a step between two ranks, the lower rank
    first. ranks: number of ranks."""

    sent: dict[tuple[int, int], float]
    ranks: int

    @property
    def silent(self) -> float:
        """Fraction of all pairs without any traffic."""
        return 1 - len(self.sent) / max(1, self.ranks * (self.ranks - 1) // 2)


def pairs_of(step: Step) -> RankPairs:
    """Return the traffic between all pairs of ranks in a step. Raises JobError for a model with
    experts."""
    sent = Counter[tuple[int, int]]()
    for pp_rank, mesh in enumerate(step.layout.meshes):
        known = PipelineRankMemory(step, pp_rank).sent()
        for axis, names in ALONG.items():
            bytes_each = sum(known.get(name, 0) for name in names)
            groups = {mesh.group_of(rank, axis) for rank in mesh.ranks} if bytes_each else set[tuple[int, ...]]()
            for group in groups:
                for pair in _ring(group):
                    sent[pair] += bytes_each
        for group, each in _matrices(step, pp_rank, known.get("matrices", 0)):
            for pair in combinations(group, 2):
                sent[pair] += each
    for one, two, count in _handed(step):
        a, b = step.layout.meshes[one].ranks, step.layout.meshes[two].ranks
        most = max(len(a), len(b))
        for at in range(most):
            sent[a[at * len(a) // most], b[at * len(b) // most]] += count
    return RankPairs(sent={pair: float(count) for pair, count in sent.items() if count}, ranks=step.layout.world_size)


def _ring(group: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of neighbouring ranks in a ring over ``group``, which is in order; one pair
    for two ranks."""
    for at, rank in enumerate(group[: len(group) - (len(group) == 2)]):
        other = group[(at + 1) % len(group)]
        if rank != other:
            yield min(rank, other), max(rank, other)


def _matrices(step: Step, pp_rank: int, bytes_each: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the groups that share matrices, with the bytes between two of their ranks, both
    directions together."""
    mesh, sharding = step.layout.meshes[pp_rank], step.shardings[pp_rank]
    if bytes_each:
        for group in {sharing(mesh, sharding, rank) for rank in mesh.ranks}:
            yield group, 2 * bytes_each // (len(group) - 1)


def _handed(step: Step) -> Iterator[tuple[int, int, int]]:
    """Yield (pp rank, pp rank, bytes): pairs of pp ranks that send to each other, the lower first,
    with the bytes that a rank sends and receives in a step."""
    found = Counter[tuple[int, int]]()
    for pp_rank, ops in enumerate(step.schedule_with_transfers.ranks):
        for op in ops:
            if op.sends:
                edge = (op.stage, op.peer)
                other = step.schedule.rank_of[op.peer]
                share = step.largest_share(pp_rank)
                found[min(pp_rank, other), max(pp_rank, other)] += step.crossing_bytes(pp_rank, edge, share)
    for (one, two), count in found.items():
        if one != two:
            yield one, two, count
