"""Layout: the one place that defines rank order.

Axes from outermost to innermost: ``pp, dp, cp, tp``; tp is innermost so that it stays inside a
node. A rank's number is the mixed-radix number of its coordinates. Placement permutes nodes, never
the layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal, get_args

from annotated_types import MinLen

from plait.core.base.codec.data import Count

Axis = Literal["pp", "dp", "cp", "tp"]
AXES: tuple[Axis, ...] = get_args(Axis)
MeshAxis = Literal["dp", "cp", "tp", "replicas"]


@dataclass(frozen=True)
class Mesh:
    """Global ranks of one pipeline rank: ``first`` and the ranks after it, tp innermost.

    >>> Mesh(4, dp=2, tp=2).group_of(5, "dp")
    (5, 7)
    """

    first: int
    dp: int = 1
    tp: int = 1
    cp: int = 1

    @property
    def ranks(self) -> range:
        """All global ranks of the mesh."""
        return range(self.first, self.first + self.replicas * self.tp)

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same weights."""
        return self.dp * self.cp

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Return a rank's coordinates on dp, cp and tp."""
        rest, tp = divmod(rank - self.first, self.tp)
        dp, cp = divmod(rest, self.cp)
        return {"dp": dp, "cp": cp, "tp": tp}

    def rank(self, *, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Return the rank at these coordinates."""
        return self.first + (dp * self.cp + cp) * self.tp + tp

    def replica(self, rank: int) -> int:
        """Return the number of a rank's replica, below ``replicas``: cp neighbours are next to each
        other."""
        return (rank - self.first) // self.tp

    def group_of(self, rank: int, axis: MeshAxis) -> tuple[int, ...]:
        """Return the group along ``axis`` that holds ``rank``; ``replicas``: dp and cp together."""
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


@dataclass(frozen=True)
class ExpertMesh:
    """The ranks of a mesh as their experts see them: neighbours share out the experts of a layer,
    ``ep`` of them. whole: tensor-parallel ranks share out experts, too, instead of cutting each.

    >>> ExpertMesh(Mesh(0, dp=4, tp=2), ep=2).group_of(5)
    (5, 7)
    >>> ExpertMesh(Mesh(0, dp=4, tp=2), ep=2).replicas_of(5)
    (1, 5)
    """

    mesh: Mesh
    ep: int = 1
    whole: bool = False

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same experts."""
        return self._size // self.ep

    @property
    def _size(self) -> int:
        return self.mesh.replicas * (self.mesh.tp if self.whole else 1)

    def position(self, rank: int) -> int:
        """Return the index of a rank among those that share out experts."""
        return rank - self.mesh.first if self.whole else self.mesh.replica(rank)

    def _ranks(self, rank: int, positions: Iterable[int]) -> tuple[int, ...]:
        stride = 1 if self.whole else self.mesh.tp
        return tuple(rank + (at - self.position(rank)) * stride for at in positions)

    def group_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that share out experts with ``rank``."""
        first = self.position(rank) // self.ep * self.ep
        return self._ranks(rank, range(first, first + self.ep))

    def replicas_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the same experts as ``rank``."""
        return self._ranks(rank, range(self.position(rank) % self.ep, self._size, self.ep))

    def everyone(self, rank: int) -> tuple[int, ...]:
        """Return the ranks whose tokens are routed among the same experts as those of ``rank``."""
        return self._ranks(rank, range(self._size))

    def sequence_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that route tokens of the same sequences as ``rank``."""
        each = self.mesh.cp * (self.mesh.tp if self.whole else 1)
        first = self.position(rank) // each * each
        return self._ranks(rank, range(first, first + each))

    def replica(self, rank: int) -> int:
        """Return the index of a rank among its replicas."""
        return self.position(rank) // self.ep

    def experts(self, rank: int, count: int) -> range:
        """Return the experts, of ``count``, that a rank holds."""
        each, at = count // self.ep, self.position(rank) % self.ep
        return range(at * each, (at + 1) * each)


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism, which fix the order of ranks. degrees: (dp, tp) of every pipeline
    rank, which may differ. cp: the same for all pipeline ranks.

    >>> layout = Layout.of(pp=2, dp=2, tp=2)
    >>> layout.groups("tp")
    ((0, 1), (2, 3), (4, 5), (6, 7))
    >>> layout.coordinates(3)
    {'pp': 0, 'dp': 1, 'cp': 0, 'tp': 1}
    >>> [list(mesh.ranks) for mesh in Layout(((1, 2), (2, 1), (1, 1))).meshes]
    [[0, 1], [2, 3], [4]]
    """

    degrees: Annotated[tuple[tuple[Count, Count], ...], MinLen(1)] = ((1, 1),)
    cp: Count = 1

    def __post_init__(self) -> None:
        assert self.degrees and min(self.cp, *(d for pair in self.degrees for d in pair)) >= 1, f"{self} cannot be"

    @staticmethod
    def of(*, pp: int = 1, dp: int = 1, cp: int = 1, tp: int = 1) -> Layout:
        """Return a layout whose pipeline ranks have equal degrees."""
        return Layout(((dp, tp),) * pp, cp)

    @cached_property
    def meshes(self) -> tuple[Mesh, ...]:
        """The mesh of every pipeline rank."""
        made: list[Mesh] = []
        for dp, tp in self.degrees:
            made.append(Mesh(made[-1].ranks.stop if made else 0, dp, tp, self.cp))
        return tuple(made)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.meshes[-1].ranks.stop

    @property
    def uniform(self) -> bool:
        """True if all pipeline ranks have equal degrees, so that there are groups along pp."""
        return len(set(self.degrees)) == 1

    def pp_rank_of(self, rank: int) -> int:
        """Return the pipeline rank that a global rank belongs to. Raises ValueError for a rank
        outside of the layout."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} outside 0..{self.world_size - 1}")
        return next(pp_rank for pp_rank, mesh in enumerate(self.meshes) if rank in mesh.ranks)

    def mesh_of(self, rank: int) -> Mesh:
        """Return the mesh that a rank belongs to."""
        return self.meshes[self.pp_rank_of(rank)]

    def rank(self, *, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Return the rank at these coordinates. Raises ValueError for coordinates outside of the
        layout."""
        for axis, at, degree in (("pp", pp, len(self.degrees)), ("cp", cp, self.cp)):
            if not 0 <= at < degree:
                raise ValueError(f"coordinate {axis}={at} outside 0..{degree - 1}")
        for axis, at, degree in zip(("dp", "tp"), (dp, tp), self.degrees[pp], strict=True):
            if not 0 <= at < degree:
                raise ValueError(f"coordinate {axis}={at} outside 0..{degree - 1}")
        return self.meshes[pp].rank(dp=dp, cp=cp, tp=tp)

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Return the coordinates of ``rank`` on every axis."""
        pp_rank = self.pp_rank_of(rank)
        return {"pp": pp_rank, **self.meshes[pp_rank].coordinates(rank)}

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of every group along ``axis``, groups in order of their lowest rank."""
        return tuple(sorted({self.group_of(rank, axis) for rank in range(self.world_size)}))

    def group_of(self, rank: int, axis: Axis) -> tuple[int, ...]:
        """Return the group along ``axis`` that holds ``rank``; along pp only if the layout is
        uniform."""
        if axis != "pp":
            return self.mesh_of(rank).group_of(rank, axis)
        assert self.uniform, "pp ranks of different sizes have no groups along pp"
        each = len(self.meshes[0].ranks)
        return tuple(range(rank % each, self.world_size, each))


@dataclass(frozen=True, kw_only=True)
class ContextSplit:
    """Division of a sequence over ``cp`` ranks: rings of ``ring`` ranks (SP-3), each made of groups
    of cp / ring neighbours (SP-2, Ulysses).

    >>> ContextSplit(cp=2, ring=2).tokens(8, 0)
    [range(0, 2), range(6, 8)]
    """

    cp: int = 1
    ring: int = 1

    @property
    def ulysses(self) -> int:
        """Ranks of a Ulysses group, which exchange heads."""
        return self.cp // self.ring

    def tokens(self, sequence: int, cp_rank: int) -> list[range]:
        """Return the positions of a rank, in order. A ring's rank has a chunk from the front and
        its mirror image from the end, so that causal attention costs every rank the same; its
        Ulysses group divides these chunks in order."""
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
        """Return the cp ranks with which ``cp_rank`` exchanges heads."""
        first = cp_rank // self.ulysses * self.ulysses
        return tuple(range(first, first + self.ulysses))

    def ring_group(self, cp_rank: int) -> tuple[int, ...]:
        """Return the cp ranks of the ring along which keys and values reach ``cp_rank``."""
        return tuple(range(cp_rank % self.ulysses, self.cp, self.ulysses))
