"""Seconds of a pipeline's micro-batches in closed form: stages of unequal length, transfers, eight
schedules.

1F1B and GPipe: see ``waiting_seconds``; transfers: see ``pipeline``. Interleaved and zero-bubble
schedules (arXiv 2104.04473, 2401.10241) take as long as their longest chain of ops. In a chain each
op waits for the one before it, on its pp rank or for its data; every chain is a lower bound. For p
pp ranks and m micro-batches only few chains can be the longest, whatever the ops cost. These chains
and their op counts were found from dry runs with all kinds of costs; tests compare all with dry
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.core.base.errors import ScheduleError
from plait.core.step.columns.points import (
    NAMES,
    Ints,
    StrategyTable,
    column,
    distinct,
    groups,
    num_stages,
    schedule_properties,
    written,
)
from plait.core.step.schedule import Op, Schedule, Transfer
from plait.core.step.schedules import generate, planned_shape
from plait.core.step.seconds.rates import Seconds


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Seconds of one micro-batch, by strategy, on a rank of the first, an inner and the last pp
    rank; a pipeline of one pp rank has only a last.

    forward, weight_gradient: fractions of a stage's seconds. head_weight: weight gradients'
    fraction of the head's pp rank's seconds outside layers. first_sums, other_sums: in zb-v, extra
    seconds of the last micro-batch's weight gradients at the first pp rank and at another; the
    first pp rank's ``first_sums`` are no part of the pipeline's seconds.
    """

    first: Seconds
    inner: Seconds
    last: Seconds
    forward: Seconds
    weight_gradient: Seconds
    head_weight: Any = 1 / 3
    first_sums: Any = 0.0
    other_sums: Any = 0.0

    def longest(self, pp: Any) -> Seconds:
        """Return the seconds of the slowest pp rank."""
        outer = np.where(pp > 1, np.maximum(self.first, self.last), self.last)
        return np.where(pp > 2, np.maximum(outer, self.inner), outer)

    def all(self, pp: Any) -> Seconds:
        """Return the seconds of one micro-batch through the whole pipeline and back."""
        return np.where(pp > 1, self.first + self.last + np.maximum(pp - 2, 0) * self.inner, self.last)

    def take(self, which: Ints, count: int) -> Stages:
        """Return the seconds of the strategies at indices ``which``, out of ``count``; a plain
        number holds for every strategy."""
        columns = {one.name: np.broadcast_to(getattr(self, one.name), (count,)) for one in fields(self)}
        return Stages(**{name: column[which] for name, column in columns.items()})

    def layers(self, pp: Any) -> Seconds:
        """Return the seconds of a pp rank that holds layers only."""
        return np.where(pp > 2, self.inner, np.minimum(self.inner, np.minimum(self.first, self.last)))

    def parts(self, own: Any, layers: Any, weight: Any) -> tuple[Seconds, Seconds, Seconds]:
        """Return the seconds of a pp rank's forward, input gradient and weight gradient. weight:
        weight gradients' fraction of the seconds outside layers; forward and input gradient have
        half of the remainder each."""
        more, share = (own - layers) * (1 - weight) / 2, self.weight_gradient
        back = layers * (1 - share - self.forward) + more
        return layers * self.forward + more, back, layers * share + (own - layers) * weight

    def by_pp_rank(self, pp: Any) -> Any:
        """Return the seconds of forward, input gradient and weight gradient on the first, an inner
        and the last pp rank: [9, points]."""
        layers = self.layers(pp)
        each = ((self.first, 1 / 3), (layers, 0.0), (self.last, self.head_weight))
        return np.stack(np.broadcast_arrays(*(part for own, share in each for part in self.parts(own, layers, share))))


def where(condition: Any, yes: Any, no: Any) -> Seconds:
    """Return ``np.where`` with a type: type checkers do not infer one."""
    found: Any = np.where(np.asarray(condition), np.asarray(yes), np.asarray(no))
    return found


def _longest(chains: Sequence[Any]) -> Seconds:
    found: Seconds = np.maximum.reduce(np.broadcast_arrays(*chains))
    return found


def rounds_seconds(stages: Stages, points: StrategyTable) -> Seconds:
    """Return the seconds of a step of interleaved stages on several pp ranks. If the first pp rank
    takes longer than others, each micro-batch of the first round waits for it, or every micro-batch
    does."""
    p, m, v, inner = points.pp, points.num_micro, points.virtual, stages.layers(points.pp)
    first, last = (np.maximum(0, own - inner) for own in (stages.first, stages.last))
    # Fewer micro-batches than pp ranks: each of the first v - 1 rounds of chunks waits until they come round.
    ops = (v * m + p - 1 + (v - 1) * np.maximum(0, p - m)) * inner / v
    group, two = where(m < p, (m + 1) / 2, m / np.maximum(1, m // p)), np.minimum(m, 2 * p)
    forwards = (2 * inner / v + first) * (p - 1) * stages.forward
    return _longest([
        ops + m * last + group * first,
        where(m > p, ops + last + m * first - forwards, 0),
        where(m > p, ops - inner / v + two * last + (m + p - two) * first, 0),
        m * (inner + first),
    ])  # fmt: skip


def split_seconds(stages: Stages, points: StrategyTable) -> Seconds:
    """Return the seconds of a step of zb-h1 or zb-h2 on several pp ranks: the longest chain through
    the first, the second, the last but one or the last pp rank.

    For each pp rank after it, a pp rank runs ``apart`` forwards ahead of its input gradients. For
    each pp rank before it, it runs ``apart`` weight gradients behind them.
    """
    p, m, layers = points.pp, points.num_micro, stages.layers(points.pp)
    apart = column("apart", points.schedule)
    first, inner, last = (
        stages.parts(own, layers, weight)
        for own, weight in ((stages.first, 1 / 3), (layers, 0.0), (stages.last, stages.head_weight))
    )
    chains = list[Any]()
    for at, (forward, back, weight) in ((0, first), (1, inner), (p - 2, inner), (p - 1, last)):
        begins, ends = np.asarray(at) == 0, at == p - 1
        # Forwards, and input gradients, of earlier pp ranks; then both of later pp ranks.
        ahead, home = (where(begins, 0, first[part] + np.maximum(0, at - 1) * inner[part]) for part in (0, 1))
        behind = where(ends, 0, last[0] + last[1] + np.maximum(0, p - 2 - at) * (inner[0] + inner[1]))
        forwards = np.maximum(1, m - apart * (p - 1 - at)) * forward
        weights = np.maximum(0, m - apart * at - 1 * ~begins) * weight + where(begins, 0, first[2])
        own = [m * (forward + back + weight), behind + forwards + m * (back + weight),
               behind + forwards + m * back + home + weights]  # fmt: skip
        chains += [where(begins | ends | (p > 2), ahead + one, 0) for one in own]
    return _longest(chains)


def v_seconds(stages: Stages, points: StrategyTable) -> Seconds:
    """Return the seconds of a step of zb-v on several pp ranks. A pp rank's two stages count as
    equal; what the first pp rank computes outside its layers counts at the head."""
    p, m, layers, share = points.pp, points.num_micro, stages.layers(points.pp), stages.weight_gradient
    parts = stages.forward, 1 - share - stages.forward, share
    head, weight = stages.first - layers, stages.head_weight
    shorter = (layers - np.minimum(layers, stages.last)) / 2 * (1 - share)  # if layers do not divide
    return _longest([
        layers / 2 * sum(count * part for count, part in zip(one.ops, parts, strict=True))
        + head * ((1 - weight) * one.head[0] + weight * one.head[1])
        + (one.sums[0] / 2 - 1) * stages.first_sums + one.sums[1] / 2 * stages.other_sums
        - one.through * shorter
        for one in _v_chains(p, m)
    ])  # fmt: skip


class _Chain(NamedTuple):
    """Op counts of a chain.

    ops: forwards, input gradients and weight gradients of a stage. head: (forwards with input
    gradients, weight gradients) of the head. sums: last weight gradients of a stage, (at the first
    pp rank, at others). through: number of stages, over all pp ranks, that the chain crosses
    forward and back.
    """

    ops: tuple[Any, Any, Any]
    head: tuple[Any, Any]
    sums: tuple[Any, Any]
    through: Any = 0


def _v_chains(p: Any, m: Any) -> list[_Chain]:
    """Return the chains of zb-v's order on p pp ranks, found as the longest ones of dry runs. For p
    < m < 2 p some chains are missing, which are up to 3 % longer."""
    many, more = 1 * (m >= 2 * p - 1), 1 * (m > p)
    fills, few, behind = np.maximum(0, 2 * p - 1 - m), more * np.maximum(1, 2 * p - m), np.clip(m - p, 1, p - 1)
    late = where(many, p - 2, np.maximum(0, m - p - 1))
    back, f = np.maximum(p - 1, 2 * p - 1 - m), np.maximum(2 * m, 2 * p)
    rest = np.maximum(np.minimum(2 * m, 2 * p), 2 * m - 2 * p + 2)
    ahead, full = many * (2 * p - 3), (1 - more) * (2 * p + m - 1)
    return [
        _Chain((f, 2 * m + 2 * p - 2, rest), (1, 0), (1, 1 - many), 2 * p),
        _Chain((2 * m + fills, 2 * m, 2 * m), (m, m), (2, 0)),
        _Chain((2 * m, 2 * m, 2 * m + many * (p - 2)), (m, m - 1), (0, 2)),
        _Chain((2 * m + fills, 2 * m + back, np.maximum(2 * m - p, m + 1)), (m, m - 1), (1, 1 - many)),
        _Chain((full, full, (1 - more) * 2 * m), (0, 0), (1, 1)),
        _Chain((2 * m, 2 * m + p - 1, 2 * m), (1, 0), (0, 2)),
        _Chain((2 * m, 2 * m + few, 2 * m + late), (behind, behind - 1), (0, 2)),
        _Chain((more * (2 * m - np.minimum(p - 1, m - p - 1)), more * (2 * m + 2 * p - 2), more * (2 * m - 2 * p + 1)),
               (more * (m - p + 1), more * (m - p - 1)), (1, 0)),
        _Chain((2 * m, 2 * m + more * (2 * p - 3), 2 * m - more * (2 * p - 4)), (1, 0), (0, 2)),
        _Chain((2 * m, 2 * m + more * (p - 1), 2 * m - more * (p - 1)), (2, 1), (2, 0)),
        _Chain((2 * m + ahead, 2 * m - p + 2, 2 * m), (0, 0), (0, 2)),
        _Chain((2 * m + ahead, 2 * m + 1, 2 * m - 2 * p + 2), (0, 0), (1, 0)),
        _Chain((2 * m + many, 2 * m, 2 * m + many * (p - 2)), (0, 0), (0, 2)),
    ]  # fmt: skip


@dataclass(frozen=True)
class Pipeline:
    """Seconds of a step's micro-batches. work: the slowest pp rank's own ops. bubble: waiting for
    the pipeline to fill and drain, and for slower pp ranks. transfers: waiting for transfers."""

    work: Seconds
    bubble: Seconds
    transfers: Seconds


def pipeline(
    stages: Stages, points: StrategyTable, *, transfer: Any, hidden: Any, steps_overlap: Any = False
) -> Pipeline:
    """Return the seconds of all micro-batches for each strategy. transfer: seconds of one transfer,
    one way. hidden: transfers overlap with computation, so that only those that fill and drain the
    pipeline count.

    In 1F1B nothing hides a transfer of c seconds. Stages i to j hold one micro-batch each while one
    micro-batch travels there and back. So a micro-batch takes at least (sum w + 2 c (j - i)) / (j -
    i + 1) seconds in the steady state, where w is a stage's forward and backward
    (``core.step.schedules``). If all w but one are equal, the range that takes longest is a single
    stage or the whole pipeline.
    """
    schedule, pp, m = points.schedule, points.pp, points.num_micro
    longest = stages.longest(pp)
    circles, turns, splits = (column(fact, schedule) for fact in ("circles", "turns", "splits"))
    v = where(circles | turns, np.maximum(points.virtual, 1), 1)
    form_of = _forms(len(NAMES))[schedule]
    found = waiting_seconds(stages, points)
    for number, form in enumerate(FORMS.values()):
        at = np.flatnonzero((form_of == number) & (pp > 1))
        if len(at) and form.seconds is not waiting_seconds:
            found[at] = form.seconds(stages.take(at, len(pp)), points.take(at))
    staggered = np.asarray(steps_overlap) & splits
    hops = 2 * transfer * (pp - 1)
    beside = np.asarray(hidden) | np.array([form.overlaps_transfers for form in FORMS.values()] + [False])[form_of]
    mean = stages.all(pp) / pp
    several = where(pp > 1, 1, 0)
    waits = np.maximum(0, mean + hops / pp - longest) * several
    # If transfers are hidden, all hops of one micro-batch are still exposed.
    chunks = where(circles, 2 * transfer * (pp * v - 1) * several, hops)
    chunks = where(turns & (m < 2 * pp), 2 * hops, chunks)
    once = where(beside, chunks, hops - np.minimum(2 * transfer / pp, waits))
    every = where(v > 1, 2 * transfer * v * several, waits)
    transfers = once + where(beside, 0, every) * (m - 1)
    at = np.flatnonzero((form_of == len(FORMS)) & (pp > 1))
    if len(at):
        some, sent = points.take(at), np.broadcast_to(np.asarray(transfer, np.float64), pp.shape)[at]
        parts = stages.take(at, len(pp)).by_pp_rank(some.pp)
        found[at] = chain_seconds(some, parts, 0.0)
        transfers[at] = chain_seconds(some, parts, sent) - found[at]
    bubble = where(staggered, _staggered(stages, points), found - m * longest)
    return Pipeline(m * longest, bubble, transfers)


def _staggered(stages: Stages, points: StrategyTable) -> Seconds:
    """Return the seconds a pp rank waits between its own first and last op if pp ranks begin and
    end a step one after another. This is the wait that delayed weight gradients, as many as the
    schedule holds back, do not fill (arXiv 2401.10241)."""
    schedule, pp = points.schedule, points.pp
    rest = np.maximum(0, 1 - (1 + column("apart", schedule)) * stages.weight_gradient)
    return where(column("turns", schedule), 0, rest * (stages.all(pp) - stages.longest(pp)))


def waiting_seconds(stages: Stages, points: StrategyTable) -> Seconds:
    """Return the seconds of a step of 1F1B or GPipe without transfers: those of the stage that
    takes longest.

    w_i = f_i + b_i: forward and backward of stage i for one micro-batch; m micro-batches. Stage i
    of 1F1B computes m w_i and waits for the stages before it, sum w_j (j < i). It waits twice for
    the stages behind it, D = sum w_j (j > i). Before its first backward it has k = pp - 1 - i more
    forwards to compute; before its last backward, k backwards. Both waits add max(0, D - k f_i) +
    max(0, D - k b_i). If the last stage takes longest, e.g. with a head, the step is exactly m
    max(w) + sum of the other w. Otherwise this is a bound, at most 5 % off if stages differ by a
    factor of six.
    """
    pp, m, whole = points.pp, points.num_micro, stages.all(points.pp)
    decided = m * stages.last + whole - stages.last
    apart = column("apart", points.schedule)
    inner = where(pp > 2, stages.inner, 0)
    for at, own, ahead in ((0, stages.first, 0.0), (1, inner, stages.first),
                           (pp - 2, inner, stages.first + np.maximum(pp - 3, 0) * inner)):  # fmt: skip
        after, more = whole - ahead - own, np.minimum(apart * (pp - 1 - at), m - 1)
        forwards, backwards = more * own * stages.forward, more * own * (1 - stages.forward)
        waits = np.maximum(0, after - forwards) + np.maximum(0, after - backwards)
        alone = where(apart > 0, np.minimum(waits, after), after)
        decided = np.maximum(decided, where(own > 0, m * own + ahead + alone, 0) * where(pp > 1, 1, 0))
    return decided


class Form(NamedTuple):
    """Closed form of a schedule's seconds. seconds: of a step's micro-batches without transfers.
    overlaps_transfers: True if transfers overlap with computation."""

    seconds: Callable[[Stages, StrategyTable], Seconds]
    overlaps_transfers: bool = False


FORMS = {
    "gpipe": Form(waiting_seconds, overlaps_transfers=True),
    "1f1b": Form(waiting_seconds),
    "eager-1f1b": Form(waiting_seconds, overlaps_transfers=True),
    "slack-1f1b": Form(waiting_seconds, overlaps_transfers=True),
    "interleaved": Form(rounds_seconds),
    "zb-h1": Form(split_seconds),
    "zb-h2": Form(split_seconds, overlaps_transfers=True),
    "zb-v": Form(v_seconds),
}
"""Schedules with a closed form, by name."""


@cache
def _forms(count: int) -> Ints:
    """Return each schedule's index in ``FORMS``; ``len(FORMS)`` for a schedule without a closed
    form."""
    names = list(FORMS)
    return np.array([names.index(name) if name in FORMS else len(FORMS) for name in NAMES[:count]])


# ---- schedules without a closed form ----


Counts = NDArray[np.float64]
ROUNDS = 4
"""Largest number of rounds that are run, each of as many micro-batches as pp ranks."""
PROBE_PARTS = ((1.0, 1.0, 1.0), (1.0, 2.0, 0.0), (1.0, 1.2, 0.8), (1.0, 1.5, 0.5), (2.0, 1.0, 1.0))
"""Probe costs: seconds of a forward, an input gradient and a weight gradient."""
PROBE_FACTORS = ((1.0, 1.0, 1.0), (1.4, 1.0, 1.0), (1.0, 1.0, 1.4), (1.2, 1.0, 1.6))
"""Probe costs: factors for the first, an inner and the last pp rank."""
PROBE_TRANSFERS = (0.0, 0.05, 0.5)
"""Probe costs: seconds of a transfer."""
PROBES = [
    np.array([*np.outer(some, parts).ravel(), hop])
    for some, parts, hop in product(PROBE_FACTORS, PROBE_PARTS, PROBE_TRANSFERS)
]
"""Combinations of probe costs: seconds of a forward, an input gradient and a weight gradient on the
first, an inner and the last pp rank; then of a transfer."""


def chain_seconds(points: StrategyTable, parts: Counts, transfer: Any) -> Seconds:
    """Return the seconds of all micro-batches of schedules without a closed form, from their
    longest chains of ops. parts: [9, points], seconds of the ops in the order of ``PROBES``.

    The longest chains are found for several costs of ops, by running short pipelines; each is a
    lower bound for any other costs. For more rounds of micro-batches than are run, each further
    round adds as many ops to a chain as the last one did.
    """
    found = np.zeros(len(points))
    hop = np.broadcast_to(np.asarray(transfer, np.float64), found.shape)
    _, kind_of = distinct([points.schedule, points.pp, points.virtual, points.num_micro])
    for which in groups(kind_of):
        counts, seconds = _counts(points, which), [*parts[:, which], hop[which]]
        chains = np.zeros((len(counts), len(which)))
        for ops, each in zip(counts.T, seconds, strict=True):  # in one order for any number of points, unlike BLAS
            chains += np.multiply.outer(ops, each)
        found[which] = chains.max(axis=0)
    return found


def _counts(points: StrategyTable, which: Ints) -> Counts:
    """Return [chains, 10]: how many ops of each kind (first, inner, last pp rank x forward, input
    gradient, weight gradient) a longest chain has, and how many transfers. which: strategies of one
    pipeline."""
    at = points.row(int(which[0]))
    name, pp, count = NAMES[at["schedule"]], at["pp"], at["num_micro"]
    chunks = num_stages(name, pp, at["virtual"]) // pp
    share = np.array([1 / chunks] * 9 + [1.0])
    most = ROUNDS * pp + (0 if schedule_properties(name).uneven else count % pp)
    if written(name) or count <= most:
        return share * _chains(name, pp, chunks, count)
    return share * (_chains(name, pp, chunks, most) + (count - most) / pp * _rounds(name, pp, chunks, most))


@cache
def _rounds(name: str, pp: int, chunks: int, most: int) -> Counts:
    """Return for each of ``PROBES`` the op counts that a further round adds to the longest chain.

    Where chains tie, the longest ones of two runs may be of two forms, and their difference is no
    round. A true round takes no longer than the runs differ, at any probe.
    """
    far, near = (_chains(name, pp, chunks, some) for some in (most, most - pp))
    costs = np.stack(PROBES)
    further = ((far - near) * costs).sum(axis=1)
    rounds = np.unique((far[:, None] - near[None]).reshape(-1, far.shape[1]), axis=0)
    seconds = rounds @ costs.T
    possible = (rounds >= 0).all(axis=1) & (seconds <= further * (1 + 1e-9)).all(axis=1)
    return rounds[possible][seconds[possible].argmax(axis=0)]


@cache
def _chains(name: str, pp: int, chunks: int, count: int) -> Counts:
    """Return the op counts of the longest chain for each of ``PROBES``."""
    file = written(name)
    shape = planned_shape(name, pp, count, chunks)
    ops = list(_in_order(file if file else generate(name, shape)))
    return np.stack([_longest_chain(ops, seconds) for seconds in PROBES])


class _Timed(NamedTuple):
    """A computation of a schedule, by numbers. parts: its indices in a row of ``PROBES``. before:
    the previous op on its pp rank, or -1. awaits: ops of other pp ranks that it waits for."""

    parts: tuple[int, ...]
    before: int
    awaits: tuple[int, ...]


def _in_order(schedule: Schedule) -> Iterator[_Timed]:
    """Yield the computations, each after all that it waits for. Raises ScheduleError if pp ranks
    wait for each other in a cycle."""
    computed = replace(schedule, ranks=tuple(tuple(op for op in ops if op.computes) for ops in schedule.ranks))
    number, last, left = dict[Op, int](), [-1] * len(computed.ranks), [list(reversed(ops)) for ops in computed.ranks]
    while any(left):
        before = len(number)
        for rank, ops in enumerate(left):
            first = 3 * (0 if rank == 0 else 2 if rank == len(left) - 1 else 1)
            while ops:
                awaits = [_awaited(computed, each) for each in computed.arrivals(ops[-1])]
                if not all(need in number for need in awaits):
                    break
                op = ops.pop()
                kinds = op.work.forward, op.work.input_gradient, op.work.weight_gradient
                parts = tuple(first + part for part, has in enumerate(kinds) if has)
                yield _Timed(parts, last[rank], tuple(number[need] for need in awaits))
                last[rank] = number[op] = len(number)
        if len(number) == before:
            raise ScheduleError(f"{computed.name}: pp ranks wait for each other in a cycle (deadlock)")


def _awaited(schedule: Schedule, transfer: Transfer) -> Op:
    """Return the op that sends the transfer."""
    return (
        Op(transfer.source, "F", transfer.micro_batch)
        if transfer.direction == "F"
        else schedule.backward(transfer.source, transfer.micro_batch)
    )


def _longest_chain(ops: list[_Timed], seconds: NDArray[np.float64]) -> Counts:
    """Return the op counts of the longest chain, by pp rank and kind, and its number of
    transfers."""
    taken, hop = seconds.tolist(), float(seconds[-1])
    ends, came = list[float](), list[tuple[int, bool]]()
    for parts, before, awaits in ops:
        start, source = (ends[before], (before, False)) if before >= 0 else (0.0, (-1, False))
        for each in awaits:
            if ends[each] + hop > start:
                start, source = ends[each] + hop, (each, True)
        ends.append(start + sum(taken[part] for part in parts))
        came.append(source)
    found, at = np.zeros(len(seconds)), max(range(len(ops)), key=ends.__getitem__)
    while at >= 0:
        found[list(ops[at].parts)] += 1
        at, sent = came[at]
        found[-1] += sent
    return found
