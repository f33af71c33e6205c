"""The default placement method: closed forms and bands, scored by eq. 2 of Arnold (arXiv
2509.15940). A small matrix that stays open goes to a solver (``small``), a large one to split bands
(``TargetedBands``).

Milliseconds for ten thousand nodes, since constructions whose bounds cannot beat the best answer
are skipped; up to a second if there is hardly more room than needed. Some tenths of a second, at
most ``small.LIMIT``, for a small open matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from plait.core.base.errors import PlacementError
from plait.place.solve.bands import Banding, Offer, TargetedBands, offers
from plait.place.solve.bounds import EPSILON, Relaxation, frontier
from plait.place.solve.problem import Assignment, Problem
from plait.place.solve.small import MOST_CELLS, solve_small


def exact(problem: Problem) -> Assignment:
    """Return the best assignment found. Raises PlacementError if only a solver supports the
    problem, or if there are too few nodes."""
    if not problem.is_plain or problem.shape is None:
        raise PlacementError(f"{_special(problem)} is beyond the closed form: set place.method=cpsat.")
    if problem.spares.per_row:
        return _with_row_spares(problem)
    rows, columns = problem.shape
    free, known = problem.capacity, frontier(problem)
    best, value = _best_banding(problem, rows, columns, known)
    if best is None:
        raise PlacementError(
            f"The job has {problem.num_cells} cells, and minipods have room for {sum(free)} (a cell: nodes that must "
            "share one minipod). Free more nodes."
        )
    cells, note = tuple(best.cells()), _named(len(best.widths), exchanged=best.exchanged)
    if problem.keep_together != "both":
        return Assignment(cells, note=note)
    best_known = Assignment(cells, bound=value, note=note)
    targets = _below(problem, value, known)
    if not targets:
        return best_known
    relaxed = Relaxation(problem)
    targets = [one for one in targets if not relaxed.excludes(*one)]
    if problem.num_cells > MOST_CELLS:
        return _aimed(problem, targets, best_known)
    if targets and problem.limit:
        return solve_small(problem, targets, best_known)
    return best_known._replace(bound=problem.score(*targets[0])) if targets else best_known


def _special(problem: Problem) -> str:
    """Return a phrase on the part of the problem that only a solver supports."""
    if problem.shape is None:
        return "A job whose stages have unequally many nodes"
    asked = {"place.forbid": problem.forbidden, "place.preempt": problem.price is not None,
             "place.gpu of single stages": any(problem.gpus)}  # fmt: skip
    return next((key for key, given in asked.items() if given), "A minipod with several types of GPU")


def _aimed(problem: Problem, targets: Sequence[tuple[int, int]], known: Assignment) -> Assignment:
    """Return the first of ``targets`` (pairs of spreads, best first) that targeted bands reach,
    else the known assignment. The first target's score is the bound.

    For each spread of rows, the largest useful spread of columns is tried first: if that fails,
    smaller ones fail, too. Then a bisection follows down to the smallest."""
    assert problem.shape is not None
    if not targets:
        return known
    best, value = known._replace(bound=problem.score(*targets[0])), inf
    aims = TargetedBands(problem.capacity, *problem.shape)
    for row_spread in dict.fromkeys(rows for rows, _ in targets):
        left = [c for r, c in targets if r == row_spread and problem.score(r, c) < value - EPSILON]
        at = len(left) - 1
        while left:
            made = aims.at(row_spread, left[at])
            if made:
                value = problem.score(row_spread, left[at])
                note = _named(made.bands, exchanged=made.exchanged)
                best = best._replace(cells=made.cells, note=note)
            left = left[:at] if made else left[at + 1 :]
            at = len(left) // 2
    return best


def _with_row_spares(problem: Problem) -> Assignment:
    """Return an assignment with the PP groups' spares as additional columns, so that spares lie
    where the nodes of their PP group lie."""
    assert problem.shape is not None
    rows, columns = problem.shape
    wide = replace(
        problem,
        heights=(rows,) * (columns + problem.spares.per_row),
        spares=replace(problem.spares, per_row=0),
        volumes=(),
    )
    wide.check_room()
    found = exact(wide)
    return Assignment(found.cells[: rows * columns], row_spares=found.cells[rows * columns :], note=found.note)


def _best_banding(
    problem: Problem, rows: int, columns: int, known: Sequence[tuple[int, int]]
) -> tuple[Banding | None, float]:
    """Return the best construction in bands and its score; (None, inf) if none fits. Constructions
    with the lowest bound are built first. known: pairs of spreads as from ``frontier``."""
    free, pods = problem.capacity, len(problem.pools)

    def least(offer: Offer) -> float:
        return min((problem.score(max(r, offer.rows), max(c, offer.columns)) for r, c in known), default=inf)

    wanted = offers(
        pods, rows, columns, by_rows=problem.keep_together != "dp", by_columns=problem.keep_together != "pp"
    )
    best, key = None, (inf, inf)
    for hope, offer in sorted((least(offer), offer) for offer in wanted):
        if hope > key[0] - EPSILON:
            break
        made = offer.made(free, rows, columns)
        if made is None:
            continue
        spreads = made.spreads()
        mine = (problem.score(*spreads), float(sum(spreads)))
        if mine < key:
            best, key = made, mine
    return best, key[0]


def _below(problem: Problem, value: float, known: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return pairs of spreads of rows and columns with a better score than ``value``, best first,
    without pairs that ``known`` excludes."""
    rows, columns, pods = len(problem.rows), len(problem.heights), len(problem.pools)
    found: list[tuple[float, int, int]] = []
    for row_spread in range(1, min(columns, pods) + 1):
        least = min((c for r, c in known if r <= row_spread), default=rows + 1)
        for column_spread in range(least, min(rows, pods) + 1):
            score = problem.score(row_spread, column_spread)
            if score < value - EPSILON:
                found.append((score, row_spread, column_spread))
    return [(r, c) for _, r, c in sorted(found)]


def _named(count: int, *, exchanged: bool) -> str:
    return f"{count} band{'s' * (count > 1)} of {'rows' if exchanged else 'columns'}"
