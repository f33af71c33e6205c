"""Exposed and hidden communication: the one definition that every command, log and metric uses.

    processor   | compute |  compute |         | wait A || compute |idle|
    network         |--- A ---------------------|
    exposed A                        [ E E E E E E E E ]
    hidden A        [ H H H H H H H ]

Communication of an axis in a step lasts while a collective of it is under way, or the rank waits for one.
It counts from the beginning of the step, which is that of its data: what of a gather lies before is of no
step, so that a step has no more communication than time. It is
*exposed* while the rank does nothing else: no computation, no waiting for another stage, no optimizer. It is
*hidden* for the rest. So total = exposed + hidden, and collectives or waits that overlap count once.

A rank stands still for one axis at a time: for the axis that it waits for; where no wait is recorded, for the
first axis under way, in the order of ``AXES``. So the exposed seconds of axes add up to those of all
communication. A host that hands a collective over, and is kept from anything else by it, waits too.
Transfers between stages are not in here: the stage that receives them is idle, and ``plait diagnose`` tells
which part of that is the transfer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

AXES = ("tp", "cp", "dp", "pp", "other")
"""Axes along which ranks wait for communication. other: of imported recordings that do not say."""
UNDER_WAY, WAIT, BUSY, NEITHER, BEGINS = 0, 1, 2, 3, 4
"""What a span means here. BEGINS: the rank is busy, and its step has not begun before."""
ROLES = {"comm": UNDER_WAY, "wait": WAIT, "transfer": NEITHER, "data": BEGINS}
"""Meaning of a span by its kind; all other kinds are ``BUSY``."""


class Exposure(NamedTuple):
    """Seconds of communication. total: under way or waited for. exposed: of these, while the rank did nothing
    else."""

    total: float
    exposed: float

    @property
    def hidden(self) -> float:
        """Seconds in which the rank did something else meanwhile."""
        return max(0.0, self.total - self.exposed)

    @property
    def fraction(self) -> float | None:
        """Share of the communication that is hidden; None without communication."""
        return self.hidden / self.total if self.total > 0 else None


def exposures(
    lanes: np.ndarray, roles: np.ndarray, axes: np.ndarray | None, starts: np.ndarray, ends: np.ndarray
) -> np.ndarray:
    """[lanes, axes, 2]: total and exposed, in the unit of the times, as float64.

    All arguments are columns of the same spans, in any order. lanes: number from 0 of a rank's step; times of
    two lanes are never compared. roles: as in ``ROLES``. axes: index in ``AXES``, used where a span is
    ``UNDER_WAY`` or a ``WAIT``; None: all communication as one axis.
    """
    import numpy as np

    count, used = int(lanes.max()) + 1 if len(lanes) else 0, roles != NEITHER
    lanes, roles, starts, ends = lanes[used], roles[used], starts[used], np.maximum(starts, ends)[used]
    starts, ends = _within(lanes, roles, starts, ends, count)
    axes = np.zeros(len(lanes), np.int64) if axes is None else axes[used]
    number = int(axes.max()) + 1 if len(axes) else 1
    # Every span begins and ends: between two such moments of a lane nothing changes.
    lane, moments = np.concatenate([lanes, lanes]), np.concatenate([starts, ends])
    order = np.lexsort((moments, lane))
    lane, length = lane[order], np.diff(moments[order], append=moments[order][-1:])
    change = np.concatenate([np.ones(len(lanes), np.int32), np.full(len(lanes), -1, np.int32)])[order]
    role, axis = np.concatenate([roles, roles])[order], np.concatenate([axes, axes])[order]

    def any_of(which: np.ndarray) -> np.ndarray:
        """Whether such a span goes on after each moment."""
        return np.cumsum(np.where(which, change, 0)) > 0

    free, waits = (
        ~any_of((role == BUSY) | (role == BEGINS)),
        [any_of((role == WAIT) & (axis == one)) for one in range(number)],
    )
    unclaimed = free & ~np.logical_or.reduce(waits)
    found = np.zeros((count, number, 2))
    for one in range(number):
        moving = any_of((role == UNDER_WAY) & (axis == one))
        still = waits[one] & free | unclaimed & moving
        free, unclaimed = free & ~still, unclaimed & ~moving
        for column, when in enumerate((moving | waits[one], still)):
            found[:, one, column] = np.bincount(lane[when], length[when], count)
    return found


def _within(
    lanes: np.ndarray, roles: np.ndarray, starts: np.ndarray, ends: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends of spans, those of communication cut off at the beginning of their step."""
    import numpy as np

    if not len(lanes) or not (begins := roles == BEGINS).any():
        return starts, ends
    begun, first = np.zeros(count, bool), np.full(count, starts.max())
    begun[lanes[begins]] = True
    np.minimum.at(first, lanes[begins], starts[begins])
    cut = begun[lanes] & ((roles == UNDER_WAY) | (roles == WAIT))
    starts = np.where(cut, np.maximum(starts, first[lanes]), starts)
    return starts, np.maximum(starts, ends)


def gaps(
    lanes: np.ndarray, starts: np.ndarray, ends: np.ndarray, ops: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Time between the ops of each lane, from the first to the last: how many gaps, and their sum.

    Arguments and units as in ``exposures``, of what a rank's own thread does and waits for. ops: which of
    them are ops, all if None; the rest fills gaps and makes none.

    >>> import numpy as np
    >>> gaps(np.array([0, 0, 0]), np.array([0, 5, 6]), np.array([3, 9, 7]))
    (array([1]), array([2]))
    """
    import numpy as np

    count = int(lanes.max()) + 1 if len(lanes) else 0
    if ops is not None:
        last = np.full(count, starts.min(initial=0), starts.dtype)
        np.maximum.at(last, lanes[ops], starts[ops])
        first = np.full(count, starts.max(initial=0), starts.dtype)
        np.minimum.at(first, lanes[ops], starts[ops])
        within = ops | (starts >= first[lanes]) & (starts < last[lanes])
        lanes, starts, ends = lanes[within], starts[within], ends[within]
    order = np.lexsort((starts, lanes))
    lanes, starts, ends = lanes[order], starts[order], np.maximum(starts, ends)[order]
    latest = np.argsort(ends, kind="stable")
    place = np.empty(len(latest), np.int64)
    place[latest] = np.arange(len(latest))
    apart = lanes * len(lanes)  # a running maximum that begins anew with every lane
    reached = ends[latest][np.maximum.accumulate(place + apart) - apart]
    gap = np.where(lanes[1:] == lanes[:-1], np.maximum(starts[1:] - reached[:-1], 0), 0)
    sums = np.zeros(count, starts.dtype)
    np.add.at(sums, lanes[1:], gap)
    return np.bincount(lanes[1:][gap > 0], minlength=count), sums
