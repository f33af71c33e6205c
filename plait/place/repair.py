"""Repair of a placement: replace each failed node, and move nothing else.

Solving again and moving a whole job costs more than it gains (the paper does not treat it further).
Here only the cells of failed nodes move. Candidate nodes that spread no group further come first;
among these the job's own spares, then free nodes of the same leaf, of the same minipod, of any
other. If a price per move is set and a new placement is better by more than its moves cost, the new
placement is used.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from plait.core.base.errors import PlacementError
from plait.core.topology.placement import Placement
from plait.core.topology.rank_table import RankTable
from plait.place.placing import Spot, leaf_spread, place
from plait.place.solve.bounds import lower_bound
from plait.place.solve.problem import Pool, Problem, Spares, seconds_of, spread_of


@dataclass(frozen=True, kw_only=True)
class Move:
    """A node rank of the job that changes its host. old: the host so far. new: the host now."""

    node_rank: int
    old: str
    new: str


@dataclass(frozen=True, kw_only=True)
class Repair:
    """Result of a repair. placement: the repaired placement. moves: the node ranks that changed
    their host, in order."""

    placement: Placement
    moves: tuple[Move, ...]


def repair(
    problem: Problem,
    old: Placement,
    *,
    down: Collection[str],
    where: Mapping[str, Spot],
    move_price: float | None = None,
) -> Repair:
    """Return the repaired placement, without the hosts in ``down``. problem: the job, with the
    nodes that are free now. old: the placement to repair. where: minipod and leaf of all nodes.
    move_price: price of each additional move, in units of the score; None: only failed nodes move.
    Raises PlacementError if nodes are missing."""
    _check(problem, old, down, where)
    fixed = _Repairing(problem, old, set(down), where)
    for cell in fixed.failed:
        fixed.mend(cell)
    whole = _with_own(problem, old, set(down), where)
    least = _result(whole, old, fixed, "repaired")
    if move_price is None:
        return least
    better = _anew(whole, old, fixed)
    more = len(better.moves) - len(least.moves)
    return better if least.placement.score - better.placement.score > move_price * max(0, more) + 1e-9 else least


def from_table(problem: Problem, table: RankTable, where: Mapping[str, Spot]) -> Placement:
    """Return the placement that a rank table describes, without spares. Raises PlacementError if
    the table belongs to another job."""
    if len(table.hosts) != problem.num_cells * problem.nodes_per_cell:
        raise PlacementError(
            f"The rank table has {len(table.hosts)} hosts, the job {problem.num_cells * problem.nodes_per_cell}. "
            "Place the job anew."
        )
    minipods = tuple(where[host].minipod if host in where else "" for host in table.hosts)
    return Placement(
        hosts=table.hosts, minipods=minipods, heights=problem.heights, nodes_per_cell=problem.nodes_per_cell,
        ranks_per_node=table.ranks_per_node, row_spread=0, column_spread=0, used=0, crossings=0,
        alpha=problem.alpha, score=0.0, bound=0.0, method="rank table", plan=table.plan,
    )  # fmt: skip


def _check(problem: Problem, old: Placement, down: Iterable[str], where: Mapping[str, Spot]) -> None:
    if old.heights != problem.heights or old.nodes_per_cell != problem.nodes_per_cell:
        raise PlacementError("The placement to repair belongs to a job of another shape. Place the job anew.")
    lost = [host for host in (*old.hosts, *old.spares) if host not in where and host not in down]
    if lost:
        raise PlacementError(
            f"{', '.join(lost[:5])} of the placement to repair {'is' if len(lost) == 1 else 'are'} not in the "
            "topology. Name them with --down, or use the topology that the job was placed on."
        )


class _Repairing:
    """State of a repair: hosts by node rank, and the nodes that are left."""

    def __init__(self, problem: Problem, old: Placement, down: set[str], where: Mapping[str, Spot]) -> None:
        self.problem, self.where, self.down = problem, where, down
        self.hosts = list(old.hosts)
        self.minipods = list(old.minipods)
        taken = {*old.hosts, *old.spares, *down}
        self.spares = [host for host in old.spares if host not in down]
        self.left: dict[str, list[str]] = defaultdict(list)
        for host in self.spares:
            self.left[where[host].minipod].append(host)
        for pool in problem.pools:
            self.left[pool.minipod] += [name for leaf in pool.leaves for name in leaf if name not in taken]
        self.each = problem.nodes_per_cell
        self.failed = sorted({rank // self.each for rank, host in enumerate(self.hosts) if host in down})
        self.pods = [self.minipods[cell * self.each] for cell in range(problem.num_cells)]
        self.rows_of: dict[int, list[int]] = defaultdict(list)
        for number, row in enumerate(problem.rows):
            for cell in set(row):
                self.rows_of[cell].append(number)
        self.columns_of = {cell: at for at, column in enumerate(problem.columns) for cell in column}
        self.row_pods = [Counter(self.pods[cell] for cell in row) for row in problem.rows]
        self.column_pods = [Counter(self.pods[cell] for cell in column) for column in problem.columns]

    def mend(self, cell: int) -> None:
        """Replace the failed hosts of a cell (the nodes that must share a minipod) where that costs
        the least. Raises PlacementError if no minipod has enough nodes."""
        ranks = range(cell * self.each, (cell + 1) * self.each)
        broken = [rank for rank in ranks if self.hosts[rank] in self.down]
        options = [pod for pod, names in self.left.items() if len(names) >= self._need(cell, pod, broken)]
        if not options:
            free = sum(map(len, self.left.values()))
            blocks = f" in one minipod (blocks of {self.each} nodes stay together)" if self.each > 1 else ""
            raise PlacementError(
                f"No node is left for {self.hosts[broken[0]]}: {free} are free or spare{blocks}, and "
                f"{len(self.failed)} parts of the job need one. Free nodes, or plan the job for fewer."
            )
        before = [self.where[self.hosts[rank]] for rank in ranks if self.hosts[rank] in self.where]
        leaves = Counter(spot.leaf for spot in before)
        pod = min(options, key=lambda at: self._cost(cell, at, broken, leaves))
        moving = broken if pod == self.pods[cell] else list(ranks)
        names = sorted(self.left[pod], key=lambda host: (host not in self.spares, -leaves[self.where[host].leaf]))
        for rank, host in zip(moving, names, strict=False):
            self.hosts[rank] = host
            self.left[pod].remove(host)
        self.moved(cell, pod)

    def _need(self, cell: int, pod: str, broken: Sequence[int]) -> int:
        return len(broken) if pod == self.pods[cell] else self.each

    def _cost(self, cell: int, pod: str, broken: Sequence[int], leaves: Mapping[str, int]) -> tuple[float, ...]:
        spare = any(host in self.spares for host in self.left[pod])
        near = any(leaves.get(self.where[host].leaf) for host in self.left[pod])
        away = pod != self.pods[cell]
        return self._score(cell, pod), self._need(cell, pod, broken), not spare, not near, away, -len(self.left[pod])

    def _score(self, cell: int, pod: str) -> float:
        """Return the score of the whole job with ``cell`` in minipod ``pod``."""
        old, rows, column = self.pods[cell], set(self.rows_of[cell]), self.columns_of[cell]
        wide = max((len(pods) for at, pods in enumerate(self.row_pods) if at not in rows), default=1)
        high = max((len(pods) for at, pods in enumerate(self.column_pods) if at != column), default=1)
        wide = max(wide, *(_with(self.row_pods[at], old, pod) for at in rows))
        return self.problem.score(wide, max(high, _with(self.column_pods[column], old, pod)))

    def moved(self, cell: int, pod: str) -> None:
        """Record that a cell is now in the minipod ``pod``."""
        old = self.pods[cell]
        for pods in (*(self.row_pods[at] for at in self.rows_of[cell]), self.column_pods[self.columns_of[cell]]):
            pods[old] -= 1
            if not pods[old]:
                del pods[old]
            pods[pod] += 1
        self.pods[cell] = pod
        for rank in range(cell * self.each, (cell + 1) * self.each):
            self.minipods[rank] = pod


def _with(pods: Counter[str], old: str, new: str) -> int:
    """Return the number of minipods of a group after one of its cells has moved from ``old`` to
    ``new``."""
    gone = pods[old] == 1 and old != new
    return len(pods) - gone + (new not in pods)


def _with_own(problem: Problem, old: Placement, down: set[str], where: Mapping[str, Spot]) -> Problem:
    """Return the problem as if the job were not placed yet: its own nodes are free."""
    leaves: dict[str, dict[str, dict[str, None]]] = {pool.minipod: {} for pool in problem.pools}
    free = [name for pool in problem.pools for leaf in pool.leaves for name in leaf]
    for name in (*old.hosts, *old.spares, *free):
        if name not in down:
            spot = where[name]
            leaves.setdefault(spot.minipod, {}).setdefault(spot.leaf, {})[name] = None
    pools = tuple(
        Pool(minipod=pod, leaves=tuple(tuple(names) for names in own.values())) for pod, own in leaves.items()
    )
    return replace(problem, pools=pools, spares=Spares())


def _anew(problem: Problem, old: Placement, fixed: _Repairing) -> Repair:
    """Return a repair that places the whole job anew, with rows renumbered and hosts kept so that
    few nodes move."""
    placed, each = place(problem), problem.nodes_per_cell
    pods = [placed.minipods[cell * each] for cell in range(problem.num_cells)]
    if problem.shape:
        pods = _rows_matched(pods, [old.minipods[cell * each] for cell in range(len(pods))], problem.shape[0])
    anew = _Repairing(problem, old, fixed.down, fixed.where)
    left = {pool.minipod: {name: None for leaf in pool.leaves for name in leaf} for pool in problem.pools}
    moving: list[int] = []
    for cell, pod in enumerate(pods):
        own = anew.hosts[cell * each : (cell + 1) * each]
        if pod == anew.pods[cell] and not fixed.down.intersection(own):
            for host in own:
                del left[pod][host]
        else:
            moving.append(cell)
    for cell in moving:
        names = sorted(left[pods[cell]], key=lambda host: host not in anew.spares)
        for rank, host in zip(range(cell * each, (cell + 1) * each), names, strict=False):
            anew.hosts[rank] = host
            del left[pods[cell]][host]
        anew.moved(cell, pods[cell])
    return _result(problem, old, anew, "placed anew")


def _rows_matched(new: Sequence[str], old: Sequence[str], rows: int) -> list[str]:
    """Return ``new``, the minipod of every cell, with its PP groups (rows) in an order in which
    many cells keep their minipod of ``old``; PP groups are interchangeable. rows: their number."""
    waiting = {row: new[row::rows] for row in range(rows)}
    found = [""] * len(new)
    agree = sorted(
        ((-sum(a == b for a, b in zip(old[at::rows], one, strict=True)), at, row) for at in range(rows)
         for row, one in waiting.items()),
    )  # fmt: skip
    done = set[int]()
    for _, at, row in agree:
        if at not in done and row in waiting:
            found[at::rows] = waiting.pop(row)
            done.add(at)
    return found


def _result(problem: Problem, old: Placement, fixed: _Repairing, note: str) -> Repair:
    """Return the repair with the placement's spreads, score and ``note``, as every placement has
    them."""
    names = list(dict.fromkeys(fixed.pods))
    known = {name: at for at, name in enumerate(names)}
    plain = replace(
        problem, pools=tuple(Pool(minipod=name, leaves=()) for name in names), forbidden=frozenset(), gpus=()
    )
    cells = tuple(known[pod] for pod in fixed.pods)
    spread = spread_of(plain, cells)
    dp, pp, ep = seconds_of(problem, cells, spread.rows) or (old.dp_seconds, old.pp_seconds, old.ep_seconds)
    leaves = leaf_spread(problem, fixed.hosts, {host: fixed.where[host].leaf for host in fixed.hosts})
    placement = replace(
        old, hosts=tuple(fixed.hosts), minipods=tuple(fixed.minipods),
        spares=tuple(host for host in fixed.spares if host not in set(fixed.hosts)),
        preempted=(), row_spread=spread.rows, column_spread=spread.columns, used=spread.used,
        crossings=spread.crossings, row_leaves=leaves[0], column_leaves=leaves[1],
        score=problem.score(spread.rows, spread.columns), bound=lower_bound(problem),
        alpha=problem.alpha, note=note, dp_seconds=dp, pp_seconds=pp, ep_seconds=ep,
        topology=problem.topology, solved_in=0.0,
    )  # fmt: skip
    return Repair(placement=placement, moves=_moves(old.hosts, placement.hosts))


def _moves(old: Sequence[str], new: Sequence[str]) -> tuple[Move, ...]:
    pairs = enumerate(zip(old, new, strict=True))
    return tuple(Move(node_rank=rank, old=a, new=b) for rank, (a, b) in pairs if a != b)
