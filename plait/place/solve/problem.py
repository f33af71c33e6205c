"""Problem: a placement problem as plain values, and the score of its answers.

The communication matrix has a row for each PP group and a column for each DP group. A cell of it
takes one or more nodes of one minipod. ``Cells`` is an answer: the pool of every cell, by number.
Methods know pools by number only; ``plait.place.placing`` turns them into hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

from plait.core.base.errors import PlacementError
from plait.core.base.text import counted
from plait.core.cluster.network import Network
from plait.core.job.communication import CommunicationMatrix, Volume, columns_of, rows_of

KeptGroups = Literal["both", "pp", "dp"]
By = Literal["spread", "seconds"]
Cells = tuple[int, ...]
"""The number of the pool in which each cell lies, by cell: column by column, as node ranks are."""


class Assignment(NamedTuple):
    """Answer of a placement method. cells: the pool of every cell. bound: lower bound on the score,
    if the method has proven a better one than the closed form; else 0. row_spares: pools of the PP
    groups' spare nodes. note: a remark for the user."""

    cells: Cells
    bound: float = 0.0
    row_spares: tuple[int, ...] = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Interchangeable nodes of one minipod. leaves: names of free nodes, by leaf switch, in order.
    held: nodes of other jobs that could be preempted. gpu: GPU type, if the problem depends on
    it."""

    minipod: str
    leaves: tuple[tuple[str, ...], ...]
    held: tuple[str, ...] = ()
    gpu: str = ""

    @staticmethod
    def plain(minipod: str, free: int, *, leaf: int = 32) -> Pool:
        """Return a pool with generated names: ``free`` nodes on leaves of ``leaf`` nodes."""
        names = [f"{minipod}-{at:04}" for at in range(free)]
        return Pool(minipod=minipod, leaves=tuple(tuple(names[at : at + leaf]) for at in range(0, free, leaf)))

    @cached_property
    def free(self) -> int:
        """Number of free nodes."""
        return sum(map(len, self.leaves))


@dataclass(frozen=True, kw_only=True)
class Spares:
    """Nodes kept in addition to the job's, for failures. per_minipod: in each minipod that is used.
    per_row: for every PP group, in one of its minipods. total: anywhere, in the job's minipods if
    possible."""

    per_minipod: int = 0
    per_row: int = 0
    total: int = 0


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A placement problem. heights: cells of every column (DP group). alpha: weight of the DP
    groups' spread; that of the PP groups (rows) is 1 - alpha. keep_together: the groups that a
    method keeps together first. edges: pairs of columns that exchange activations.

    price: of each node that another job gives up, in units of the score; None: no preemption.
    forbidden: (column, minipod) pairs that are not allowed. gpus: GPU type of every column; "":
    any."""

    heights: tuple[int, ...]
    pools: tuple[Pool, ...]
    alpha: float = 0.3
    by: By = "spread"
    """Objective to minimise: ``spread``, the weighted number of minipods of the most spread groups
    (eq. 2 of Arnold); or ``seconds``, predicted communication of a step."""
    keep_together: KeptGroups = "both"
    nodes_per_cell: int = 1
    expert_cells: int = 1
    """Number of neighbouring cells of a column that exchange tokens for their experts."""
    edges: tuple[tuple[int, int], ...] = ()
    spares: Spares = field(default_factory=Spares)
    price: float | None = None
    forbidden: frozenset[tuple[int, str]] = frozenset()
    gpus: tuple[str, ...] = ()
    limit: float = 10.0
    """Time limit of a solver in seconds."""
    volumes: tuple[Volume, ...] = ()
    """Bytes that a rank sends in a step along DP and PP and between experts, for each column; for
    predictions in seconds."""
    network: Network | None = None
    ranks_per_node: int = 8
    plan: str = ""
    topology: str = ""
    """Hashes of the plan and the topology behind the problem."""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise PlacementError(f"alpha = {self.alpha} is no weight. Use a number from 0 to 1.")
        if self.keep_together not in ("both", "pp", "dp"):
            raise PlacementError(f"place.unit: '{self.keep_together}' is no scheduling unit. Use pp, dp or both.")
        if self.by not in ("spread", "seconds"):
            raise PlacementError(f"place.by: '{self.by}' is nothing to score by. Use spread or seconds.")
        if self.by == "seconds" and not (self.volumes and self.network):
            raise PlacementError("Seconds cannot be predicted: what the job sends is not counted. Score by spread.")

    @staticmethod
    def plain(rows: int, columns: int, free: Sequence[int], **more: object) -> Problem:
        """Return a problem of equal columns, with generated names. rows, columns: PP groups and DP
        groups. free: number of free nodes of each minipod. more: further fields."""
        pools = tuple(Pool.plain(f"m{at:03}", count) for at, count in enumerate(free))
        return Problem(heights=(rows,) * columns, pools=pools, **more)  # type: ignore[arg-type]

    @staticmethod
    def of(matrix: CommunicationMatrix, pools: Sequence[Pool], **more: object) -> Problem:
        """Return the problem of placing a job. matrix: its groups and traffic. pools: usable nodes.
        more: further fields of ``Problem``."""
        return Problem(
            heights=matrix.heights, pools=tuple(pools), nodes_per_cell=matrix.nodes_per_cell, edges=matrix.edges,
            expert_cells=matrix.expert_cells, volumes=matrix.volumes, ranks_per_node=matrix.ranks_per_node, **more,  # type: ignore[arg-type]
        )  # fmt: skip

    @cached_property
    def num_cells(self) -> int:
        """Number of cells in all columns."""
        return sum(self.heights)

    @property
    def shape(self) -> tuple[int, int] | None:
        """(rows, columns) if all columns have the same height; else None."""
        return (self.heights[0], len(self.heights)) if len(set(self.heights)) == 1 else None

    @cached_property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the cells of every column (DP group)."""
        return columns_of(self.heights)

    @cached_property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the cells of every row (PP group)."""
        return rows_of(self.heights)

    @cached_property
    def minipods(self) -> tuple[str, ...]:
        """Names of the minipods, in order of appearance."""
        return tuple(dict.fromkeys(pool.minipod for pool in self.pools))

    @cached_property
    def minipod_of(self) -> tuple[int, ...]:
        """Index into ``minipods`` for every pool."""
        known = {name: at for at, name in enumerate(self.minipods)}
        return tuple(known[pool.minipod] for pool in self.pools)

    @cached_property
    def capacity(self) -> tuple[int, ...]:
        """Number of cells that each pool has room for, without spares of minipods and nodes of
        other jobs."""
        each, kept = self.nodes_per_cell, self.spares.per_minipod
        return tuple(max(0, pool.free - kept) // each for pool in self.pools)

    @property
    def is_plain(self) -> bool:
        """True if all columns are equal and nothing limits the choice of nodes: no preemption,
        forbidden pairs or GPU types, and one pool in each minipod."""
        special = self.price is not None or self.forbidden or any(self.gpus)
        return self.shape is not None and not special and len(self.minipods) == len(self.pools)

    @property
    def together(self) -> Problem | None:
        """The same problem with the nodes of each expert group in one minipod. None if there are no
        such groups, or if they do not divide each column's cells."""
        many = self.expert_cells
        if many == 1 or any(height % many for height in self.heights):
            return None
        return replace(
            self, heights=tuple(height // many for height in self.heights), nodes_per_cell=self.nodes_per_cell * many,
            expert_cells=1,
        )  # fmt: skip

    def score(self, rows: int, columns: int) -> float:
        """Return the score of a placement: a weighted number of minipods, or seconds of a step.
        rows, columns: minipods of the most spread PP group and DP group; the score grows with both.
        """
        return self.row_score(rows) + self.column_score(columns)

    def row_score(self, spread: int) -> float:
        """Return the PP groups' part of the score. spread: minipods of the most spread PP group."""
        if self.by == "seconds":
            assert self.network
            return self.network.p2p(max(one.pp for one in self.volumes), spread)
        return (1 - self.alpha) * spread

    def column_score(self, spread: int) -> float:
        """Return the DP groups' part of the score; in seconds with the traffic between experts,
        which spread over no more minipods. spread: minipods of the most spread DP group."""
        if self.by == "seconds":
            assert self.network
            among = self.network.collective(max(one.ep for one in self.volumes), min(spread, self.expert_cells))
            return self.network.collective(max(one.dp for one in self.volumes), spread) + among
        return self.alpha * spread

    def check_room(self) -> None:
        """Raise PlacementError if there are too few nodes, saying how many are missing; or if a
        node is listed twice."""
        names = [name for pool in self.pools for leaf in (*pool.leaves, pool.held) for name in leaf]
        if len(set(names)) < len(names):
            twice = sorted(name for name, count in Counter(names).items() if count > 1)
            raise PlacementError(f"{', '.join(twice[:5])}: a node can be bound once, and is listed more often.")
        each, capacity = self.nodes_per_cell, sum(self.capacity)
        held = 0 if self.price is None else sum(len(pool.held) for pool in self.pools)
        need = self.num_cells * each
        extra = self.spares.total + self.spares.per_row * len(self.rows)
        free = sum(pool.free for pool in self.pools)
        if free + held < need + extra:
            beside = f" and {extra} spare" if extra else ""
            raise PlacementError(
                f"The job needs {counted(need, 'node')}{beside}; {_number(free + held)} free: "
                f"{_number(need + extra - free - held)} missing. Free some, give back or put right nodes that are "
                f"down, or plan the job for fewer ranks{', or keep fewer spares' if extra else ''}{_or_take(self)}."
            )
        if capacity * each + held < need:
            blocks = f" as {self.num_cells} blocks of {each} of one minipod" if each > 1 else ""
            kept = f", with {self.spares.per_minipod} spare in each minipod" if self.spares.per_minipod else ""
            raise PlacementError(
                f"The job needs {counted(need, 'node')}{blocks}{kept}; {_number(free)} free, but only "
                f"{capacity * each} of them in that form: {_number(need - capacity * each)} missing. "
                + ("Keep fewer spares." if kept else "Plan with a smaller tp x cp, or free whole minipods.")
            )


def _number(nodes: int) -> str:
    return f"{nodes:,} {'is' if nodes == 1 else 'are'}"


def _or_take(problem: Problem) -> str:
    held = sum(len(pool.held) for pool in problem.pools)
    return f", or allow preempting some of the {held} nodes that other jobs hold" if held else ""


@dataclass(frozen=True, kw_only=True)
class MinipodSpread:
    """Spread of a placement over minipods. rows, columns: minipods of the most spread PP group and
    DP group. used: minipods in use. crossings: pairs of neighbouring cells of a PP or DP group in
    different minipods."""

    rows: int
    columns: int
    used: int
    crossings: int


def spread_of(problem: Problem, cells: Cells) -> MinipodSpread:
    """Return the spread of a placement over minipods. cells: the pool of every cell."""
    pod = [problem.minipod_of[pool] for pool in cells]
    rows = max(len({pod[cell] for cell in row}) for row in problem.rows)
    columns = max(len(set(pod[column[0] : column[-1] + 1])) for column in problem.columns)
    down = sum(pod[cell] != pod[cell + 1] for column in problem.columns for cell in column[:-1])
    across = sum(pod[row[a]] != pod[row[b]] for row in problem.rows for a, b in problem.edges)
    return MinipodSpread(rows=rows, columns=columns, used=len(set(pod)), crossings=down + across)


def seconds_of(problem: Problem, pods: Sequence[int], rows: int) -> tuple[float, float, float] | None:
    """Return predicted seconds (along DP, along PP, between experts), of the slowest group of each
    kind; None if traffic is unknown. pods: the minipod of every cell. rows: spread of the most
    spread row."""
    network = problem.network
    if not problem.volumes or not network:
        return None
    dp = ep = 0.0
    for volume, column in zip(problem.volumes, problem.columns, strict=True):
        own = [pods[cell] for cell in column]
        dp = max(dp, network.collective(volume.dp, len(set(own))))
        groups = [own[at : at + problem.expert_cells] for at in range(0, len(own), problem.expert_cells)]
        ep = max(ep, network.collective(volume.ep, max(len(set(group)) for group in groups)))
    return dp, max(network.p2p(one.pp, rows) for one in problem.volumes), ep


def check_legal(problem: Problem, cells: Cells) -> None:
    """Assert that an answer is valid, for every method: each cell in one pool, and no pool over its
    capacity."""
    assert len(cells) == problem.num_cells, "every cell once"
    counts = [0] * len(problem.pools)
    for pool in cells:
        counts[pool] += 1
    each, kept = problem.nodes_per_cell, problem.spares.per_minipod
    for count, pool in zip(counts, problem.pools, strict=True):
        room = pool.free + (0 if problem.price is None else len(pool.held))
        assert count == 0 or count * each + kept <= room, f"{count} cells in {pool.minipod}, which has {room} nodes"
    for column, own in enumerate(problem.columns):
        for cell in own:
            pool = problem.pools[cells[cell]]
            assert (column, pool.minipod) not in problem.forbidden, f"stage {column} in {pool.minipod}"
            assert not problem.gpus or problem.gpus[column] in ("", pool.gpu), f"stage {column} on {pool.gpu}"
