"""Choices that a cell (one arrangement of ranks) leaves open: micro-batches and their slices,
schedules with their stages and recomputation, sharding. Each is a list of tuples of columns that
belong together. The strategies of a cell are the product of its lists
(``plait.plan.search.space``)."""

from __future__ import annotations

import math
from functools import cache, partial
from itertools import product
from typing import TYPE_CHECKING

from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import SLICED
from plait.core.step.columns.points import NAMES, OVERLAPS, RECOMPUTES, SCHEDULES, SHARD_OVERLAPS, schedule_properties
from plait.core.step.schedules import GENERATORS

if TYPE_CHECKING:
    from plait.plan.search.space import Cell, Coarseness, SearchRequest

PARTS = (1, 2, 3)
"""Shares of a stage's layers that are recomputed in full, in quarters, besides none and all."""
Choice = tuple[int, ...]
LARGEST_MICRO = 64
MOST_MICRO = 4096
"""Largest number of micro-batches per step that is tried if the job file fixes none: schedules are
traced op by op."""
LAST_RESORT = "layer"
"""Recomputation that is tried only if the job file names it, or if nothing fits without it. It
keeps one stream per layer less than ``full``, but repeats a reduction."""


class CellChoices:
    """Values that the search tries for each arrangement of ranks (``Cell``), cached for
    arrangements with the same."""

    def __init__(self, request: SearchRequest) -> None:
        self.batches = cache(partial(_batches, request))
        self.stages = cache(partial(_stages, request))
        self.shardings = cache(partial(_shardings, request))
        self.graphs = [(one,) for one in request.values_to_try("graphs", [0])]
        self.overlaps = [(one,) for one in request.values_to_try("shard_overlap", [SHARD_OVERLAPS.index("both")])]

    def choices(self, cell: Cell, coarse: Coarseness) -> dict[tuple[str, ...], list[Choice]]:
        """Return the values to try in a cell: for each tuple of columns of ``StrategyTable``, the
        tuples of their values. The cell's strategies are the product of all lists."""
        return {
            ("micro", "num_micro", "overlap", "p1", "p2"): self.batches(cell.dp, cell.tp, cell.cp, coarse),
            ("schedule", "virtual", "recompute", "recompute_layers"): self.stages(cell.pp, coarse.deep, coarse.parts),
            ("params", "grads", "optim", "secondary"): self.shardings(cell.replicas, cell.tp, coarse),
            ("shard_overlap",): self.overlaps,
            ("graphs",): self.graphs,
        }


def _batches(request: SearchRequest, dp: int, tp: int, cp: int, coarse: Coarseness) -> list[Choice]:
    """Return tuples (micro, num_micro, overlap, p1, p2) to try: sequences of a replica's
    micro-batch, number of micro-batches, and the slices."""
    each, evenly = request.global_batch // dp, request.divisible_batch // dp
    micro = [
        m for m in divisors_of(evenly)
        if m <= LARGEST_MICRO and (coarse.odd or (m <= 16 and (m & (m - 1) == 0 or m == evenly)))
        and each // m <= MOST_MICRO
    ]  # fmt: skip
    found = list[Choice]()
    for size in request.values_to_try("micro", micro):
        if evenly % size == 0 and request.allows("num_micro", each // size):
            found += [(size, each // size, *slices) for slices in _slices(request, tp, cp, coarse) if slices[1] <= size]
    return found


def _stages(request: SearchRequest, pp: int, deep: bool, parts: bool) -> list[Choice]:
    """Return tuples (schedule, virtual, recompute, recompute_layers) to try. deep: all numbers of
    virtual stages. parts: recompute some of a stage's layers, too."""
    return [one + again for one in _schedules(request, pp, deep) for again in _recomputes(request, pp * one[1], parts)]


def _schedules(request: SearchRequest, pp: int, deep: bool) -> list[Choice]:
    if pp == 1:
        return [(SCHEDULES.index("1f1b"), virtual) for virtual in request.values_to_try("virtual", [1])]
    found = list[Choice]()
    for schedule in request.values_to_try(
        "schedule", [SCHEDULES.index(name) for name, one in GENERATORS.items() if one.tried]
    ):
        name, layers = NAMES[schedule], request.model.num_layers // pp
        virtual, any_number = [schedule_properties(name).chunks], not schedule_properties(name).chunks
        if any_number:
            most, ended = min(layers, 16 if deep else 4), request.model.num_layers + request.ends
            virtual = [v for v in range(2, most + 2) if (v <= most and layers % v == 0)
                       or (request.ends and v <= ended // pp and ended % (pp * v) == 0)]  # fmt: skip
        allowed = [v for v in request.values_to_try("virtual", virtual) if v in virtual or any_number]
        found += [(schedule, v) for v in allowed if _filled(request, pp * v)]
    return found


def _filled(request: SearchRequest, stages: int) -> bool:
    """Return True if every one of ``stages`` stages has a layer; or also if embedding or head may
    fill a stage of their own."""
    layers = request.model.num_layers
    return stages <= layers or (request.ends > 0 and (layers + request.ends) % stages == 0)


def _recomputes(request: SearchRequest, num_stages: int, parts: bool) -> list[Choice]:
    layers, found = -(-request.model.num_layers // num_stages), list[Choice]()
    named = any(one.quantity == "recompute" for one in request.constraints)
    usual = [kind for kind, name in enumerate(RECOMPUTES) if named or name != LAST_RESORT]
    for kind in request.values_to_try("recompute", usual):
        some = (
            sorted({layers * part // 4 for part in PARTS} - {0, layers}) if parts and RECOMPUTES[kind] == "full" else []
        )
        found += [(kind, count) for count in request.values_to_try("recompute_layers", [-1, *some])]
    return found


def _shardings(request: SearchRequest, replicas: int, tp: int, coarse: Coarseness) -> list[Choice]:
    if request.shard:
        one = Sharding.named(request.shard, replicas)
        return [(one.params, one.grads, one.optim, one.secondary)]
    local, found = max(1, request.domain // tp), list[Choice]()
    values = factors(replicas, local, few=not coarse.factors) if coarse.between else sorted({1, replicas})
    for params in request.values_to_try("params", values):
        for grads in [one for one in request.values_to_try("grads", values) if one % params == 0]:
            for optim in [one for one in request.values_to_try("optim", values) if one % grads == replicas % one == 0]:
                copies = [0, local] if params > local > 1 and params % local == 0 else [0]
                found += [(params, grads, optim, copy) for copy in request.values_to_try("secondary", copies)]
    return found


@cache
def factors(replicas: int, local: int, *, few: bool = False) -> tuple[int, ...]:
    """Return the sharding factors to try: every divisor within the innermost links; beyond them
    some, up to all replicas. AMSP (arXiv 2311.00257) treats nodes and their insides separately in
    the same way. replicas: ranks with the same weights. local: how many of them the innermost links
    join. few: both ends and one between.

    >>> factors(1024, 8)
    (1, 2, 4, 8, 32, 128, 1024)
    """
    divisors = divisors_of(replicas)
    inside = [one for one in divisors if local % one == 0]
    if few:
        inside = sorted({1, inside[-1]})
    beyond = [one for one in divisors if one > local and one % inside[-1] == 0][:-1]
    between = beyond[len(beyond) // 2 :][:1] if few else beyond[1::2][:2]
    return tuple(sorted({*inside, *between, replicas}))


def _slices(request: SearchRequest, tp: int, cp: int, coarse: Coarseness) -> list[Choice]:
    """Return tuples (overlap, p1, p2) to try. Without collectives there is nothing to hide. Only
    Domino has slices. Models with experts are not sliced."""
    overlaps, tp = request.values_to_try("overlap", [OVERLAPS.index("domino")]), 1 if request.model.experts else tp
    sends = (tp > 1 or cp > 1) and not request.model.experts
    slices = (1, 2, 4, 8) if coarse.slices else (1, 2, 4) if coarse.between else (1, 2)
    p1 = request.values_to_try("p1", slices if sends else (1,))
    p2 = request.values_to_try("p2", (1, 2) if tp > 1 and coarse.slices else (1,))
    found = [one for one in product(overlaps, p1, p2) if request.model.hidden % one[2] == 0]
    return [one for one in found if OVERLAPS[one[0]] in SLICED or one[1:] == (1, 1)] or found


@cache
def divisors_of(number: int) -> tuple[int, ...]:
    """Return the divisors in ascending order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))
