"""Topology-aware placement by recursive bipartition: a baseline after Amaral et al. (SC 2017).

Minipods are halved again and again into sets of near-equal room; the job's graph is cut into parts that fit
them, each cut improved by Fiduccia-Mattheyses passes. Its edges: neighbours along rows weigh what a GPU sends
along pp, neighbours along columns (rings) what it sends along dp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

from benchmarks.baselines.fits import cell_order
from plait.place.solve.problem import Assignment, Problem

PASSES = 4
Edges = Mapping[int, Mapping[int, float]]


def topology_aware(problem: Problem, *, by_column: bool = True, fewest: bool = False) -> Assignment:
    """On all minipods with free nodes, as published. fewest: on as few as have room, which is stronger. The
    first cut goes column by column, or row by row."""
    free = problem.capacity
    chosen: list[int] = []
    for pod in sorted((at for at in range(len(free)) if free[at]), key=lambda at: -free[at]):
        if not fewest or sum(free[at] for at in chosen) < problem.num_cells:
            chosen.append(pod)
    found: dict[int, int] = {}
    _divide(cell_order(problem, by_column), chosen, free, _edges(problem), found)
    return Assignment(tuple(found[cell] for cell in range(problem.num_cells)), note="Fiduccia-Mattheyses")


def _edges(problem: Problem) -> Edges:
    volumes = problem.volumes
    along_dp = max((one.dp for one in volumes), default=1.0) or 1.0
    along_pp = max((one.pp for one in volumes), default=1.0) or 1.0
    edges: dict[int, dict[int, float]] = {cell: {} for cell in range(problem.num_cells)}

    def join(a: int, b: int, weight: float) -> None:
        if a != b:
            edges[a][b] = edges[b][a] = edges[a].get(b, 0.0) + weight

    for column in problem.columns:
        for a, b in zip(column, column[1:] + column[:1], strict=True):
            join(a, b, along_dp)
    pairs = problem.edges or tuple((at, at + 1) for at in range(len(problem.heights) - 1))
    for row in problem.rows:
        for a, b in pairs:
            join(row[a], row[b], along_pp)
    return edges


def _divide(cells: list[int], pods: list[int], free: Sequence[int], edges: Edges, found: dict[int, int]) -> None:
    if len(pods) == 1:
        found.update(dict.fromkeys(cells, pods[0]))
        return
    one: list[int] = []
    other: list[int] = []
    for pod in pods:  # largest first into the emptier half
        smaller = one if sum(free[at] for at in one) <= sum(free[at] for at in other) else other
        smaller.append(pod)
    room_one, room_other = sum(free[at] for at in one), sum(free[at] for at in other)
    least, most = max(0, len(cells) - room_other), min(len(cells), room_one)
    start = round(len(cells) * room_one / (room_one + room_other))
    inside = _cut(cells, start, least, most, edges)
    _divide([cell for cell in cells if cell in inside], one, free, edges, found)
    _divide([cell for cell in cells if cell not in inside], other, free, edges, found)


def _cut(cells: Sequence[int], start: int, least: int, most: int, edges: Edges) -> set[int]:
    """A part of ``least`` to ``most`` cells, with little weight across."""
    part, here = set(cells[:start]), set(cells)
    for _ in range(PASSES):
        moves, gain = _one_pass(part, here, least, most, edges)
        if gain <= 1e-9:
            break
        for cell in moves:
            part ^= {cell}
    return part


def _one_pass(part: set[int], here: set[int], least: int, most: int, edges: Edges) -> tuple[list[int], float]:
    """Every cell moved once, best first; the moves up to the best moment that fits, and what they gain. Sizes
    may be off by one on the way, so that cells can be exchanged where there is no room to spare."""
    inside = set(part)
    gains = {cell: _gain(cell, inside, here, edges) for cell in sorted(here)}
    heap = [(-gain, cell) for cell, gain in gains.items()]
    heapify(heap)
    moved: list[int] = []
    total, best, best_at, waiting = 0.0, 0.0, 0, list[tuple[float, int]]()
    while heap:
        key, cell = heappop(heap)
        if cell not in gains or -key != gains[cell]:
            continue
        size = len(inside) + (-1 if cell in inside else 1)
        if not least - 1 <= size <= most + 1:
            waiting.append((key, cell))
            continue
        total += gains.pop(cell)
        inside ^= {cell}
        moved.append(cell)
        for other in edges[cell]:
            if other in gains:
                gains[other] = _gain(other, inside, here, edges)
                heappush(heap, (-gains[other], other))
        for item in waiting:
            heappush(heap, item)
        waiting = []
        if total > best + 1e-9 and least <= len(inside) <= most:
            best, best_at = total, len(moved)
    return moved[:best_at], best


def _gain(cell: int, inside: set[int], here: set[int], edges: Edges) -> float:
    """What moving a cell to the other part takes off the weight across."""
    side = cell in inside
    return sum(
        weight if (other in inside) != side else -weight for other, weight in edges[cell].items() if other in here
    )
