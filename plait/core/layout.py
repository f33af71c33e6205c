"""Layout: the one place where rank order exists.

Axes from outermost to innermost: ``pp, dp, cp, tp``; tp is innermost so that it stays inside a node. A rank's
number is the mixed-radix number of its coordinates. Placement permutes nodes, never the layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Literal, get_args

Axis = Literal["pp", "dp", "cp", "tp"]
AXES: tuple[Axis, ...] = get_args(Axis)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of the four axes.

    >>> Layout(dp=2, tp=2).groups("tp")
    ((0, 1), (2, 3))
    >>> Layout(dp=2, tp=2).coordinates(3)
    {'pp': 0, 'dp': 1, 'cp': 0, 'tp': 1}
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        assert all(d >= 1 for d in self.degrees), f"degrees must be positive, got {self.degrees}"

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degrees in the order of ``AXES``."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return prod(self.degrees)

    def rank(self, **coordinates: int) -> int:
        """The rank at these coordinates; axes left out are 0."""
        number = 0
        for axis in AXES:
            degree, at = getattr(self, axis), coordinates.get(axis, 0)
            if not 0 <= at < degree:
                raise ValueError(f"coordinate {axis}={at} outside 0..{degree - 1}")
            number = number * degree + at
        return number

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where ``rank`` stands on every axis."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} outside 0..{self.world_size - 1}")
        result: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, result[axis] = divmod(rank, getattr(self, axis))
        return {axis: result[axis] for axis in AXES}

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """The ranks of every group along ``axis``, groups in order of their lowest rank."""
        others = [a for a in AXES if a != axis]
        spans = [range(getattr(self, a)) for a in others]
        first_ranks = (self.rank(**dict(zip(others, at, strict=True))) for at in product(*spans))
        return tuple(self.group_of(rank, axis) for rank in sorted(first_ranks))

    def group_of(self, rank: int, axis: Axis) -> tuple[int, ...]:
        """The group along ``axis`` that holds ``rank``."""
        at = self.coordinates(rank)
        return tuple(self.rank(**{**at, axis: i}) for i in range(getattr(self, axis)))


MeshAxis = Literal["dp", "cp", "tp", "replicas"]


@dataclass(frozen=True)
class Mesh:
    """The ranks of one place in a pipeline, whose degrees may differ from the next one's: ``first`` and those
    after it, tp innermost.

    >>> Mesh(4, dp=2, tp=2).group_of(5, "dp")
    (5, 7)
    """

    first: int
    dp: int = 1
    tp: int = 1
    cp: int = 1

    @property
    def ranks(self) -> range:
        """All its ranks."""
        return range(self.first, self.first + self.replicas * self.tp)

    @property
    def replicas(self) -> int:
        """How many ranks hold the same weights."""
        return self.dp * self.cp

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Where a rank stands on dp, cp and tp."""
        rest, tp = divmod(rank - self.first, self.tp)
        dp, cp = divmod(rest, self.cp)
        return {"dp": dp, "cp": cp, "tp": tp}

    def replica(self, rank: int) -> int:
        """Which of the ``replicas`` a rank is: cp neighbours stand side by side."""
        return (rank - self.first) // self.tp

    def group_of(self, rank: int, axis: MeshAxis) -> tuple[int, ...]:
        """The group along ``axis`` that holds ``rank``; ``replicas``: dp and cp together."""
        at = rank - self.first
        strides = {
            "tp": (1, self.tp),
            "cp": (self.tp, self.cp),
            "dp": (self.cp * self.tp, self.dp),
            "replicas": (self.tp, self.replicas),
        }
        stride, size = strides[axis]
        start = rank - at // stride % size * stride
        return tuple(range(start, start + size * stride, stride))


def meshes(degrees: Iterable[tuple[int, int]], cp: int = 1) -> tuple[Mesh, ...]:
    """The meshes of a pipeline from (dp, tp) of each of its places; equal degrees give the rank order of
    ``Layout``.

    >>> [list(mesh.ranks) for mesh in meshes([(1, 2), (2, 1), (1, 1)])]
    [[0, 1], [2, 3], [4]]
    """
    made: list[Mesh] = []
    for dp, tp in degrees:
        made.append(Mesh(made[-1].ranks.stop if made else 0, dp, tp, cp))
    return tuple(made)


@dataclass(frozen=True, kw_only=True)
class SequenceCut:
    """How ``cp`` ranks share a sequence: rings of ``ring`` ranks (SP-3), each made of groups of cp / ring
    neighbours (SP-2, Ulysses).

    >>> SequenceCut(cp=2, ring=2).tokens(8, 0)
    [range(0, 2), range(6, 8)]
    """

    cp: int = 1
    ring: int = 1

    @property
    def ulysses(self) -> int:
        """Ranks that exchange heads."""
        return self.cp // self.ring

    def tokens(self, sequence: int, cp_rank: int) -> list[range]:
        """Which positions a rank has, in order. A ring's rank has a chunk from the front and its mirror image
        from the end, so that causal attention costs all the same; its Ulysses group shares these out in
        order."""
        at, inner = divmod(cp_rank, self.ulysses)
        if self.ring == 1:
            held = [range(sequence)]
        else:
            chunk = sequence // (2 * self.ring)
            held = [range(i * chunk, (i + 1) * chunk) for i in (at, 2 * self.ring - 1 - at)]
        start, stop = inner * (sequence // self.cp), (inner + 1) * (sequence // self.cp)
        found, before = list[range](), 0
        for run in held:
            low, high = max(start - before, 0), min(stop - before, len(run))
            if low < high:
                found.append(run[low:high])
            before += len(run)
        return found

    def ulysses_group(self, cp_rank: int) -> tuple[int, ...]:
        """The cp ranks that ``cp_rank`` exchanges heads with."""
        first = cp_rank // self.ulysses * self.ulysses
        return tuple(range(first, first + self.ulysses))

    def ring_group(self, cp_rank: int) -> tuple[int, ...]:
        """The cp ranks along whose ring keys and values come to ``cp_rank``."""
        return tuple(range(cp_rank % self.ulysses, self.cp, self.ulysses))
