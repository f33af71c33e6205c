"""``place``: the interface of all placement methods. It adds hosts, spreads, bound and seconds to
every answer. Also pools of a topology's nodes, and the check that chosen nodes are still
available."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from plait.core.base.errors import PlacementError, nearest
from plait.core.base.ignored_input import IgnoredInput
from plait.core.base.text import counted
from plait.core.topology.placement import Placement
from plait.core.topology.switches import Level, Node, Topology
from plait.place.solve.bounds import lower_bound
from plait.place.solve.exact import exact
from plait.place.solve.problem import Assignment, Cells, Pool, Problem, check_legal, seconds_of, spread_of
from plait.place.solve.program import cpsat, mip


class Spot(NamedTuple):
    """Location of a node: names of its minipod and of its leaf."""

    minipod: str
    leaf: str


@dataclass(frozen=True, kw_only=True)
class NodeFilter:
    """Nodes that a job may use. avoid: nodes and switches that it must not use. gpu: only nodes
    with this GPU type. mixed: put each GPU type of a minipod into its own pool. preempt: include
    nodes that other jobs hold. gpus: minimum number of GPUs on a node; nodes whose number is
    unknown count as having enough."""

    avoid: frozenset[str] = frozenset()
    gpu: str = ""
    mixed: bool = False
    preempt: bool = False
    level: Level | None = None
    gpus: int = 0


def pools_of(topology: Topology, wanted: NodeFilter) -> tuple[Pool, ...]:
    """Return the usable nodes of each minipod as pools of interchangeable nodes. Raises
    PlacementError if the topology lacks a name in ``avoid``."""
    switches = [switch.name for switch in topology.switches]
    if unknown := sorted(wanted.avoid - set(switches) - topology.node_index.keys()):
        raise PlacementError(f"The topology has neither a node nor a switch called {', '.join(unknown[:5])}.")
    shunned = _below(topology, wanted.avoid)
    pools: list[Pool] = []
    for minipod, nodes in topology.minipods(wanted.level).items():
        usable = [node for node in nodes if node.leaf not in shunned and node.name not in wanted.avoid]
        usable = [node for node in usable if has_enough_gpus(node, wanted.gpus)]
        if wanted.gpu:
            usable = [node for node in usable if node.hardware.device.lower() == wanted.gpu.lower()]
        types = sorted({node.hardware.device for node in usable}) if wanted.mixed else [wanted.gpu]
        for gpu in types:
            own = [node for node in usable if not wanted.mixed or node.hardware.device == gpu]
            pools.append(_pool(minipod, gpu, own, preempt=wanted.preempt))
    return tuple(pools)


def has_enough_gpus(node: Node, gpus: int) -> bool:
    """True if a node has at least ``gpus`` GPUs, or an unknown number."""
    return node.hardware.gpus is None or node.hardware.gpus >= gpus


def _pool(minipod: str, gpu: str, nodes: Iterable[Node], *, preempt: bool) -> Pool:
    leaves: dict[int, list[str]] = {}
    held: list[str] = []
    for node in nodes:
        if node.state.status == "free":
            leaves.setdefault(node.leaf, []).append(node.name)
        elif node.state.status == "busy" and preempt:
            held.append(node.name)
    return Pool(minipod=minipod, leaves=tuple(map(tuple, leaves.values())), held=tuple(held), gpu=gpu)


def _below(topology: Topology, names: Collection[str]) -> set[int]:
    """Return the indices of switches with these names, and of all switches under them."""
    found = set[int]()
    for place, switch in enumerate(topology.switches):  # parents come first
        if switch.name in names or switch.parent in found:
            found.add(place)
    return found


def spots_of(topology: Topology, level: Level | None = None) -> dict[str, Spot]:
    """Return the minipod and leaf of every node, by the node's name."""
    above = topology.ancestors_at(level)
    names = [switch.name for switch in topology.switches]
    return {node.name: Spot(names[above[node.leaf]], names[node.leaf]) for node in topology.nodes}


def types_of(topology: Topology) -> tuple[str, ...]:
    """Return the GPU types of free nodes, without duplicates."""
    return tuple(sorted({node.hardware.device for node in topology.nodes if node.state.status == "free"}))


def gpus_per_node(topology: Topology, gpu: str = "") -> int | None:
    """Return the number of GPUs per node, among nodes that are not down; None if nodes differ or
    the number is unknown."""
    counts = {
        node.hardware.gpus
        for node in topology.nodes
        if node.state.status != "down" and gpu.lower() in ("", node.hardware.device.lower())
    } - {None, 0}
    return counts.pop() if len(counts) == 1 else None


def remarks_on(topology: Topology, gpus: int) -> IgnoredInput:
    """Return remarks on free nodes with too few GPUs, which are not used, and on nodes with an
    unknown number of GPUs."""
    over = IgnoredInput()
    free = [node for node in topology.nodes if node.state.status == "free"]
    for node in free:
        if not has_enough_gpus(node, gpus):
            over.note(f"free nodes with fewer than {counted(gpus, 'GPU')}, a rank each", node.name)
    if any(node.hardware.gpus is not None for node in free):
        for node in free:
            if node.hardware.gpus is None:
                over.note(f"missing numbers of GPUs: such nodes count as having {gpus}", node.name)
    return over


def check_available(placement: Placement, topology: Topology, own: Collection[str] = ()) -> None:
    """Raise PlacementError naming hosts that were taken, went down or lost GPUs since the placement
    was made. own: hosts that the job itself holds."""
    allowed = {*placement.preempted, *own}
    states: Mapping[str, str] = {
        node.name: node.state.status for node in topology.nodes if has_enough_gpus(node, placement.ranks_per_node)
    }
    gone = [
        host
        for host in (*placement.hosts, *placement.spares)
        if states.get(host) != "free" and not (host in allowed and states.get(host) == "busy")
    ]
    if gone:
        many = f"{', '.join(gone[:5])}{' and others' if len(gone) > 5 else ''}"
        raise PlacementError(
            f"{many} {'is' if len(gone) == 1 else 'are'} no longer free: the cluster has changed since the job was "
            "placed. Nothing was written. Place it again."
        )


def ranges(numbers: Sequence[int]) -> str:
    """Return numbers as a list of ranges.

    >>> ranges([0, 1, 2, 5])
    '0-2,5'
    """
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


Method = Callable[[Problem], Assignment]
METHODS: Mapping[str, Method] = {"exact": exact, "cpsat": cpsat, "program": mip}


def place(problem: Problem, method: str = "exact") -> Placement:
    """Return the problem's placement by one of ``METHODS``, with hosts, spreads and a lower bound
    on the score. Raises PlacementError if there are too few nodes, for an unknown method, or if the
    method does not support the problem."""
    if method not in METHODS:
        raise PlacementError(f"No method '{method}'{nearest(method, METHODS)}. Use one of {', '.join(METHODS)}.")
    return placed_by(problem, METHODS[method], method)


def placed_by(problem: Problem, method: Method, name: str) -> Placement:
    """Return the checked placement that ``method`` (called ``name``) finds. Raises as ``place``."""
    problem.check_room()
    begun = time.perf_counter()
    answer = method(problem)
    cells = arranged(problem, answer.cells)
    check_legal(problem, cells)
    bound = max(lower_bound(problem), answer.bound)
    hosts = hosts_of(problem, cells, answer.row_spares)
    spread = spread_of(problem, cells)
    took = time.perf_counter() - begun
    pods = [problem.minipod_of[pool] for pool in cells]
    dp, pp, ep = seconds_of(problem, pods, spread.rows) or (None, None, None)
    return Placement(
        hosts=hosts.nodes,
        minipods=tuple(problem.minipods[pod] for pod in pods for _ in range(problem.nodes_per_cell)),
        heights=problem.heights,
        nodes_per_cell=problem.nodes_per_cell,
        ranks_per_node=problem.ranks_per_node,
        spares=hosts.spares,
        preempted=hosts.preempted,
        row_spread=spread.rows,
        column_spread=spread.columns,
        row_leaves=hosts.row_leaves,
        column_leaves=hosts.column_leaves,
        used=spread.used,
        crossings=spread.crossings,
        alpha=problem.alpha,
        by=problem.by,
        score=problem.score(spread.rows, spread.columns) + (problem.price or 0.0) * len(hosts.preempted),
        bound=bound,
        method=name,
        note=answer.note,
        dp_seconds=dp,
        pp_seconds=pp,
        ep_seconds=ep,
        plan=problem.plan,
        topology=problem.topology,
        solved_in=took,
    )


class PlacedHosts(NamedTuple):
    """Hosts of a placement. nodes: by node rank. spares: spare hosts in addition. preempted: those
    of ``nodes`` that other jobs hold. row_leaves, column_leaves: number of leaf switches that the
    most spread PP group and DP group touch."""

    nodes: tuple[str, ...]
    spares: tuple[str, ...]
    preempted: tuple[str, ...]
    row_leaves: int
    column_leaves: int


def hosts_of(problem: Problem, cells: Cells, row_spares: Sequence[int] = ()) -> PlacedHosts:
    """Return the hosts for the cells of an assignment. cells: the pool of each cell. row_spares:
    pools of the PP groups' spare nodes. Raises PlacementError if the spares cannot be kept."""
    columns = len(problem.heights)
    widths = [columns]
    if any(len(pool.leaves) > 1 for pool in problem.pools):
        widths += [1 << at for at in range((columns - 1).bit_length())]
    leaf_of = {
        name: (pod, at)
        for pod, pool in enumerate(problem.pools)
        for at, leaf in enumerate(pool.leaves)
        for name in leaf
    }
    return min(
        (_filled(problem, cells, row_spares, width, leaf_of) for width in widths),
        key=lambda found: problem.alpha * found.column_leaves + (1 - problem.alpha) * found.row_leaves,
    )


def leaf_spread(problem: Problem, nodes: Sequence[str], leaf_of: Mapping[str, object]) -> tuple[int, int]:
    """Return the number of leaf switches that the most spread PP group and DP group touch. nodes:
    hosts by node rank. A host whose leaf is unknown, since another job holds it, counts as a leaf
    of its own."""
    each = problem.nodes_per_cell
    leaves = [{leaf_of.get(host, host) for host in nodes[at : at + each]} for at in range(0, len(nodes), each)]
    rows, columns = (
        max(len(set[object]().union(*(leaves[cell] for cell in group))) for group in groups)
        for groups in (problem.rows, problem.columns)
    )
    return rows, columns


def _filled(
    problem: Problem, cells: Cells, row_spares: Sequence[int], width: int, leaf_of: Mapping[str, object]
) -> PlacedHosts:
    """Return the hosts for the cells of an assignment, with leaf switches filled in bands of
    ``width`` columns (DP groups)."""
    places = {
        cell: (at / len(own), column) for column, own in enumerate(problem.columns) for at, cell in enumerate(own)
    }

    def in_bands(cell: int) -> tuple[int, float, int]:
        row, column = places[cell]
        return column // width, row, column

    order = sorted(range(len(cells)), key=in_bands)
    own: dict[int, list[int]] = {}
    for cell in order:
        own.setdefault(cells[cell], []).append(cell)
    each = problem.nodes_per_cell
    nodes = [""] * (len(cells) * each)
    preempted: list[str] = []
    left: dict[int, list[str]] = {}
    for at, pool in enumerate(problem.pools):
        count, kept = len(own.get(at, ())) * each, problem.spares.per_minipod + row_spares.count(at)
        free = min(count, max(0, pool.free - kept))
        chosen, left[at] = _chosen(pool, free, each)
        chosen += pool.held[: count - free]
        preempted += chosen[free:]
        for number, cell in enumerate(own.get(at, ())):
            nodes[cell * each : (cell + 1) * each] = chosen[number * each : (number + 1) * each]
    spares = tuple(_spares(problem, cells, left, row_spares))
    return PlacedHosts(tuple(nodes), spares, tuple(preempted), *leaf_spread(problem, nodes, leaf_of))


def arranged(problem: Problem, cells: Cells) -> Cells:
    """Return the same cells with PP groups (rows) in another order: the one in which the fewest
    neighbours are in different minipods. PP groups are interchangeable, so spreads stay."""
    if problem.shape is None:
        return cells
    rows, columns = problem.shape
    patterns = [cells[row::rows] for row in range(rows)]
    ordered = sorted(patterns)

    def crossings(ordered_rows: Sequence[Cells]) -> int:
        return sum(a != b for one, two in itertools.pairwise(ordered_rows) for a, b in zip(one, two, strict=True))

    best = ordered if crossings(ordered) < crossings(patterns) else patterns
    return tuple(best[row][column] for column in range(columns) for row in range(rows))


def _chosen(pool: Pool, count: int, each: int) -> tuple[list[str], list[str]]:
    """Return (``count`` free hosts of a pool in the order of its leaf switches, the remaining
    hosts). each: nodes of a cell, kept on one leaf if possible."""
    rest, taken = count, [0] * len(pool.leaves)
    open_leaves = sorted(range(len(pool.leaves)), key=lambda leaf: -len(pool.leaves[leaf]))
    while rest:
        fits = [leaf for leaf in open_leaves if len(pool.leaves[leaf]) >= rest]
        leaf = fits[-1] if fits else open_leaves[0]
        size = len(pool.leaves[leaf])
        whole = min(rest, size // each * each)
        taken[leaf] = whole or min(rest, size)  # split a block that no leaf can hold whole
        open_leaves.remove(leaf)
        rest -= taken[leaf]
        if not open_leaves:  # use nodes that blocks left over
            for at, names in enumerate(pool.leaves):
                more = min(rest, len(names) - taken[at])
                taken[at] += more
                rest -= more
    chosen = [name for leaf, number in zip(pool.leaves, taken, strict=True) for name in leaf[:number]]
    left = [name for leaf, number in zip(pool.leaves, taken, strict=True) if number for name in leaf[number:]]
    left += [name for leaf, number in zip(pool.leaves, taken, strict=True) if not number for name in leaf]
    return chosen, left


def _spares(problem: Problem, cells: Cells, left: dict[int, list[str]], row_spares: Sequence[int]) -> list[str]:
    """Return the spare hosts, from the job's own minipods first. left: free hosts that remain in
    each pool. row_spares: pools of the PP groups' spares. Raises PlacementError if a pool has too
    few nodes."""
    found: list[str] = []
    used = Counter(cells)

    wanted = [pool for pool in sorted(used) for _ in range(problem.spares.per_minipod)] + list(row_spares)
    for pool in wanted:
        if not left[pool]:
            raise PlacementError(
                f"{problem.pools[pool].minipod} has no node left to be a spare. Keep fewer spares, or use "
                "place.method=cpsat."
            )
        found.append(left[pool].pop(0))
    for _ in range(problem.spares.total):
        pool = max(left, key=lambda at: (used[at] > 0 and bool(left[at]), len(left[at])))
        if not left[pool]:
            raise PlacementError("No node is left to be a spare. Keep fewer spares (place.spares).")
        found.append(left[pool].pop(0))
    return found
