"""Which pairs of ranks send each other anything in a step, and how much: a job as the network sees it
(figure 1 of Arnold, arXiv 2509.15940).

Collectives are rings over their groups in the order of ranks, so that a rank has two neighbours along
each axis; stages hand on to the counterparts of other stages; matrices for Muon go from all ranks that share
them to all. Bytes are those that the planner counts of a rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from plait.core.parallel.layout import MeshAxis
from plait.core.parallel.matrices import sharing
from plait.core.step.memory.estimate import MemoryOfPlace
from plait.core.step.step import Step

ALONG: dict[MeshAxis, tuple[str, ...]] = {
    "tp": ("tp", "copies"),
    "cp": ("cp",),
    "replicas": ("params", "grads", "optim", "replicas", "secondary"),
}
"""What is sent along the groups of each axis, by the planner's names."""


@dataclass(frozen=True, kw_only=True)
class RankPairs:
    """sent: bytes of a step between two ranks, the lower first. ranks: how many there are."""

    sent: dict[tuple[int, int], float]
    ranks: int

    @property
    def silent(self) -> float:
        """The share of all pairs that send each other nothing."""
        return 1 - len(self.sent) / max(1, self.ranks * (self.ranks - 1) // 2)


def pairs_of(step: Step) -> RankPairs:
    """Of a step that lists of ops have; models with experts are refused by what counts their bytes."""
    sent = Counter[tuple[int, int]]()
    for place, mesh in enumerate(step.layout.meshes):
        known = MemoryOfPlace(step, place).sent()
        for axis, names in ALONG.items():
            bytes_each = sum(known.get(name, 0) for name in names)
            groups = {mesh.group_of(rank, axis) for rank in mesh.ranks} if bytes_each else set[tuple[int, ...]]()
            for group in groups:
                for pair in _ring(group):
                    sent[pair] += bytes_each
        for group, each in _matrices(step, place, known.get("matrices", 0)):
            for pair in combinations(group, 2):
                sent[pair] += each
    for one, two, count in _handed(step):
        a, b = step.layout.meshes[one].ranks, step.layout.meshes[two].ranks
        most = max(len(a), len(b))
        for at in range(most):
            sent[a[at * len(a) // most], b[at * len(b) // most]] += count
    return RankPairs(sent={pair: float(count) for pair, count in sent.items() if count}, ranks=step.layout.world_size)


def _ring(group: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbours of a ring; of two ranks one pair."""
    for at, rank in enumerate(group[: len(group) - (len(group) == 2)]):
        other = group[(at + 1) % len(group)]
        if rank != other:
            yield min(rank, other), max(rank, other)


def _matrices(step: Step, place: int, bytes_each: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Groups that share matrices, and bytes between two of their ranks, both ways."""
    mesh, sharding = step.layout.meshes[place], step.shardings[place]
    if bytes_each:
        for group in {sharing(mesh, sharding, rank) for rank in mesh.ranks}:
            yield group, 2 * bytes_each // (len(group) - 1)


def _handed(step: Step) -> Iterator[tuple[int, int, int]]:
    """Places that hand on to each other, the lower first, and bytes that a rank sends and gets in a step."""
    found = Counter[tuple[int, int]]()
    for place, ops in enumerate(step.listed.ranks):
        for op in ops:
            if op.sends:
                edge = (op.stage, op.peer)
                other = step.schedule.rank_of[op.peer]
                share = step.largest_share(place)
                found[min(place, other), max(place, other)] += step.crossing_bytes(place, edge, share)
    for (one, two), count in found.items():
        if one != two:
            yield one, two, count
