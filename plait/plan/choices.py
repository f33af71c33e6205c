"""What an arrangement of ranks leaves to choose: micro-batches and their slices, schedules with their stages
and what is computed again, sharding. Each is a list of tuples of columns that go together. The points of a
cell are the product of its lists (``plait.plan.space``).
"""

from __future__ import annotations

import math
from functools import cache, partial
from itertools import product
from typing import TYPE_CHECKING

from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import SLICED
from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, SCHEDULES, SHARD_OVERLAPS

if TYPE_CHECKING:
    from plait.plan.space import Cell, Coarseness, SearchRequest

TRIED = ("1f1b", "eager-1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")
"""Schedules that are tried unasked: gpipe is never better than 1f1b, slack-1f1b follows from measurements."""
PARTS = (1, 2, 3)
"""Quarters of a stage's layers that are computed again."""
Choice = tuple[int, ...]
LARGEST_MICRO = 64
MOST_MICRO = 4096
"""Micro-batches of a step that are tried unasked: schedules are walked op by op."""
LAST_RESORT = "layer"
"""Recomputation that is tried where it is named, and where nothing fits without: it keeps one stream a layer
less than ``full``, and repeats a reduction for it."""


class CellChoices:
    """What cells leave to choose, found once for those that are alike."""

    def __init__(self, asked: SearchRequest) -> None:
        self.batches = cache(partial(_batches, asked))
        self.stages = cache(partial(_stages, asked))
        self.shardings = cache(partial(_shardings, asked))
        self.graphs = [(one,) for one in asked.among("graphs", [0])]
        self.overlaps = [(one,) for one in asked.among("shard_overlap", [SHARD_OVERLAPS.index("both")])]

    def choices(self, cell: Cell, coarse: Coarseness) -> dict[tuple[str, ...], list[Choice]]:
        """Columns that go together, and their values."""
        return {
            ("micro", "num_micro", "overlap", "p1", "p2"): self.batches(cell.dp, cell.tp, cell.cp, coarse),
            ("schedule", "virtual", "recompute", "recompute_layers"): self.stages(cell.pp, coarse.deep, coarse.parts),
            ("params", "grads", "optim", "secondary"): self.shardings(cell.replicas, cell.tp, coarse),
            ("shard_overlap",): self.overlaps,
            ("graphs",): self.graphs,
        }


def _batches(asked: SearchRequest, dp: int, tp: int, cp: int, coarse: Coarseness) -> list[Choice]:
    """Micro-batches, and their slices."""
    each, evenly = asked.global_batch // dp, asked.evenly // dp
    micro = [
        m for m in divisors_of(evenly)
        if m <= LARGEST_MICRO and (coarse.odd or (m <= 16 and (m & (m - 1) == 0 or m == evenly)))
        and each // m <= MOST_MICRO
    ]  # fmt: skip
    found = list[Choice]()
    for size in asked.among("micro", micro):
        if evenly % size == 0 and asked.allows("num_micro", each // size):
            found += [(size, each // size, *slices) for slices in _slices(asked, tp, cp, coarse) if slices[1] <= size]
    return found


def _stages(asked: SearchRequest, pp: int, deep: bool, parts: bool) -> list[Choice]:
    """Schedules with their stages, and what is computed again of each stage's layers."""
    return [one + again for one in _schedules(asked, pp, deep) for again in _recomputes(asked, pp * one[1], parts)]


def _schedules(asked: SearchRequest, pp: int, deep: bool) -> list[Choice]:
    if pp == 1:
        return [(SCHEDULES.index("1f1b"), virtual) for virtual in asked.among("virtual", [1])]
    found = list[Choice]()
    for schedule in asked.among("schedule", [SCHEDULES.index(name) for name in TRIED]):
        name, layers = SCHEDULES[schedule], asked.model.num_layers // pp
        virtual = [2] if name == "zb-v" else [1]
        if name == "interleaved":
            most, ended = min(layers, 16 if deep else 4), asked.model.num_layers + asked.ends
            virtual = [v for v in range(2, most + 2) if (v <= most and layers % v == 0)
                       or (asked.ends and v <= ended // pp and ended % (pp * v) == 0)]  # fmt: skip
        allowed = [v for v in asked.among("virtual", virtual) if v in virtual or name == "interleaved"]
        found += [(schedule, v) for v in allowed if _filled(asked, pp * v)]
    return found


def _filled(asked: SearchRequest, stages: int) -> bool:
    """Whether every stage has a layer, or the embedding or the head where these make stages equal."""
    layers = asked.model.num_layers
    return stages <= layers or (asked.ends > 0 and (layers + asked.ends) % stages == 0)


def _recomputes(asked: SearchRequest, num_stages: int, parts: bool) -> list[Choice]:
    layers, found = -(-asked.model.num_layers // num_stages), list[Choice]()
    named = any(one.quantity == "recompute" for one in asked.constraints)
    usual = [kind for kind, name in enumerate(RECOMPUTES) if named or name != LAST_RESORT]
    for kind in asked.among("recompute", usual):
        some = (
            sorted({layers * part // 4 for part in PARTS} - {0, layers}) if parts and RECOMPUTES[kind] == "full" else []
        )
        found += [(kind, count) for count in asked.among("recompute_layers", [-1, *some])]
    return found


def _shardings(asked: SearchRequest, replicas: int, tp: int, coarse: Coarseness) -> list[Choice]:
    if asked.shard:
        one = Sharding.named(asked.shard, replicas)
        return [(one.params, one.grads, one.optim, one.secondary)]
    local, found = max(1, asked.domain // tp), list[Choice]()
    values = factors(replicas, local, few=not coarse.factors) if coarse.between else sorted({1, replicas})
    for params in asked.among("params", values):
        for grads in [one for one in asked.among("grads", values) if one % params == 0]:
            for optim in [one for one in asked.among("optim", values) if one % grads == replicas % one == 0]:
                copies = [0, local] if params > local > 1 and params % local == 0 else [0]
                found += [(params, grads, optim, copy) for copy in asked.among("secondary", copies)]
    return found


@cache
def factors(replicas: int, local: int, *, few: bool = False) -> tuple[int, ...]:
    """Shard factors to try: within the innermost links every divisor, beyond them some on the way to all
    (AMSP, arXiv 2311.00257, cuts nodes and what is in them apart). few: both ends and one between.

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


def _slices(asked: SearchRequest, tp: int, cp: int, coarse: Coarseness) -> list[Choice]:
    """Overlap, p1 and p2: where nothing is sent there is nothing to hide; only Domino has slices. Routed
    tokens are not sliced."""
    overlaps, tp = asked.among("overlap", [OVERLAPS.index("domino")]), 1 if asked.model.experts else tp
    sends = (tp > 1 or cp > 1) and not asked.model.experts
    slices = (1, 2, 4, 8) if coarse.slices else (1, 2, 4) if coarse.between else (1, 2)
    p1 = asked.among("p1", slices if sends else (1,))
    p2 = asked.among("p2", (1, 2) if tp > 1 and coarse.slices else (1,))
    found = [one for one in product(overlaps, p1, p2) if asked.model.hidden % one[2] == 0]
    return [one for one in found if OVERLAPS[one[0]] in SLICED or one[1:] == (1, 1)] or found


@cache
def divisors_of(number: int) -> tuple[int, ...]:
    """In order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))
