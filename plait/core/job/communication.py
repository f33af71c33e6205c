"""CommunicationMatrix: a job as a cluster's network sees it, with a cell for each node.

A column is a DP group (the nodes of one pipeline stage), a row is a PP group (nodes that send
activations to each other). Every cell has the bytes that each of its GPUs holds and sends. Cells
are numbered in the order of node ranks: column by column, since pp is the layout's outermost axis.
After Arnold (arXiv 2509.15940, eq. 1), whose matrix is the special case of at most one
tensor-parallel group on a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from math import gcd

from plait.core.base.errors import PlacementError
from plait.core.job.plan import Plan
from plait.core.parallel.layout import Layout, Mesh


@dataclass(frozen=True, kw_only=True)
class Volume:
    """Bytes that one GPU holds and sends in a step. weights: held for its parameters. dp: gradients
    and parameters, sent to ranks with the same weights. pp: activations and their gradients, sent
    to other stages. ep: token rows, sent to the ranks of the same stage that have their experts,
    and back."""

    weights: float = 0.0
    dp: float = 0.0
    pp: float = 0.0
    ep: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CommunicationMatrix:
    """The nodes of a job, arranged by DP and PP groups. heights: cells of every column.
    nodes_per_cell: neighbouring nodes that share tensor- or context-parallel groups, and stay in
    one minipod. edges: pairs of columns that send activations to each other, in ascending order.
    volumes: by column; empty if they were not computed. micro_batch: sequences of a replica's
    micro-batch. expert_cells: neighbouring cells of a column that share out experts, and exchange
    tokens all to all.

    >>> matrix = CommunicationMatrix.of_layout(Layout.of(pp=2, dp=6, tp=8), ranks_per_node=8)
    >>> matrix.heights, matrix.rows[1]
    ((6, 6), (1, 7))
    """

    heights: tuple[int, ...]
    ranks_per_node: int
    nodes_per_cell: int = 1
    edges: tuple[tuple[int, int], ...] = ()
    volumes: tuple[Volume, ...] = ()
    micro_batch: int = 1
    expert_cells: int = 1

    @staticmethod
    def of(plan: Plan, *, ranks_per_node: int, volumes: Sequence[Volume] = ()) -> CommunicationMatrix:
        """Return the matrix of a plan. volumes: of every pipeline stage. Raises PlacementError as
        ``of_layout`` does."""
        rank_of = plan.schedule.rank_of
        edges = {(rank_of[a], rank_of[b]) for a, b in plan.names if rank_of[a] != rank_of[b]}
        return CommunicationMatrix.of_layout(
            plan.layout,
            ranks_per_node=ranks_per_node,
            edges=tuple(sorted({(min(edge), max(edge)) for edge in edges})),
            volumes=volumes,
            micro_batch=plan.largest_share(0),
            ep=plan.job.strategy.ep if plan.job else 1,
        )

    @staticmethod
    def of_layout(
        layout: Layout,
        *,
        ranks_per_node: int,
        edges: Sequence[tuple[int, int]] | None = None,
        volumes: Sequence[Volume] = (),
        micro_batch: int = 1,
        ep: int = 1,
    ) -> CommunicationMatrix:
        """Return the matrix of a layout. edges: pairs of pipeline stages that communicate; by
        default each stage and the next. ep: neighbours of dp x cp that share out experts. Raises
        PlacementError unless a stage fills whole nodes, or a node holds whole stages."""
        each = min(ranks_per_node, layout.world_size)
        edges = [(at, at + 1) for at in range(len(layout.degrees) - 1)] if edges is None else edges
        shared = _stages_per_node(layout, each)
        if shared > 1:
            edges = sorted({(a // shared, b // shared) for a, b in edges if a // shared != b // shared})
            volumes = [_sum(volumes[at : at + shared]) for at in range(0, len(volumes), shared)]
            heights, block, experts = (1,) * (len(layout.degrees) // shared), 1, 1
        else:
            nodes = [len(mesh.ranks) // each for mesh in layout.meshes]
            block = max(_block(mesh, each) for mesh in layout.meshes)
            if any(count % block for count in nodes):
                raise PlacementError(
                    f"Tensor- and context-parallel groups span up to {block} nodes, and a stage has {min(nodes)}: "
                    "these are no equal blocks of nodes. Use the same cp x tp in all stages."
                )
            heights = tuple(count // block for count in nodes)
            experts = max(-(-ep * mesh.tp // (block * each)) for mesh in layout.meshes)
        return CommunicationMatrix(
            heights=heights, ranks_per_node=each, nodes_per_cell=block, edges=tuple(edges),
            volumes=tuple(volumes), micro_batch=micro_batch, expert_cells=min(experts, *heights),
        )  # fmt: skip

    @property
    def cells(self) -> int:
        """Number of cells in all columns."""
        return sum(self.heights)

    @property
    def nodes(self) -> int:
        """Number of nodes that the job takes."""
        return self.cells * self.nodes_per_cell

    @property
    def shape(self) -> tuple[int, int] | None:
        """(rows, columns), or None if columns differ in height."""
        return (self.heights[0], len(self.heights)) if len(set(self.heights)) == 1 else None

    @property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """Cells of every DP group."""
        return columns_of(self.heights)

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """Cells of every PP group, in order of the columns."""
        return rows_of(self.heights)

    @cached_property
    def mean(self) -> Volume:
        """Mean volume of all GPUs; all zero if volumes were not computed."""
        return _mean(self.volumes, self.heights)

    @cached_property
    def ratios(self) -> tuple[float, float] | None:
        """r1 = micro-batch x v_w / (v_d + v_p) and r2 = v_d / v_p of the mean GPU (Arnold, section
        5.2): computation per byte sent, and DP traffic per PP traffic. None if nothing is sent
        along one of the axes, or volumes were not computed."""
        mean = self.mean
        down = mean.dp + mean.ep
        if not down or not mean.pp:
            return None
        return self.micro_batch * mean.weights / (down + mean.pp), down / mean.pp


def columns_of(heights: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the cells of every column, numbered column by column."""
    ends = list(accumulate(heights))
    return tuple(tuple(range(end - height, end)) for end, height in zip(ends, heights, strict=True))


def rows_of(heights: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the cells of every row: cells with the same share of a batch, one in each column. If
    columns differ in height, a cell of a low column is in several rows.

    >>> rows_of((2, 3))
    ((0, 2), (0, 3), (1, 3), (1, 4))
    """
    columns = columns_of(heights)
    if len(set(heights)) == 1:
        return tuple(zip(*columns, strict=True))
    cuts = sorted({Fraction(at, height) for height in set(heights) for at in range(height)})
    return tuple(tuple(column[int(cut * len(column))] for column in columns) for cut in cuts)


def _stages_per_node(layout: Layout, each: int) -> int:
    """Return the number of neighbouring pipeline stages that share a node; 1 if stages have nodes
    of their own. Raises PlacementError if some node would hold a part of two stages."""
    sizes = [len(mesh.ranks) for mesh in layout.meshes]
    for stage, size in enumerate(sizes):
        if size % each and (each % size or len(set(sizes)) > 1 or len(sizes) % (each // size)):
            raise PlacementError(
                f"Stage {stage} has {size} ranks (dp x cp x tp) and a node {each}: some node would hold only a part "
                f"of two stages, which is no matrix of nodes. Use a multiple of {each} ranks a stage, or, for all "
                f"stages alike, a divisor of {each} with a whole number of nodes in all."
            )
    return max(1, each // sizes[0])


def _block(mesh: Mesh, each: int) -> int:
    """Return the fewest nodes that hold whole cp x tp groups."""
    group = mesh.cp * mesh.tp
    return group // gcd(group, each)


def _sum(volumes: Sequence[Volume]) -> Volume:
    """Return the volume of a node that holds several pipeline stages: the largest of each field,
    since a GPU has one stage."""
    return Volume(
        weights=max(one.weights for one in volumes),
        dp=max(one.dp for one in volumes),
        pp=max(one.pp for one in volumes),
        ep=max(one.ep for one in volumes),
    )


def _mean(volumes: Sequence[Volume], heights: Sequence[int]) -> Volume:
    if not volumes:
        return Volume()
    pairs, cells = list(zip(volumes, heights, strict=True)), sum(heights)
    return Volume(
        weights=sum(one.weights * height for one, height in pairs) / cells,
        dp=sum(one.dp * height for one, height in pairs) / cells,
        pp=sum(one.pp * height for one, height in pairs) / cells,
        ep=sum(one.ep * height for one, height in pairs) / cells,
    )
