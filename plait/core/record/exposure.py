"""Exposed and hidden communication: the one definition that every command, log and metric uses.

    processor   | compute |  compute |         | wait A || compute |idle|
    network         |--- A ---------------------|
    exposed A                        [ E E E E E E E E ]
    hidden A        [ H H H H H H H ]

Communication of an axis in a step lasts while one of its collectives is in flight, or the rank
waits for one. It counts from the start of the step, which is the start of its data loading. The
part of a gather before that belongs to no step, so a step's communication is never longer than the
step. Communication is *exposed* while the rank does nothing else: no computation, no waiting for
another stage, no optimizer. All other communication is *hidden*. So total = exposed + hidden, and
overlapping collectives or waits count once.

A rank stalls for one axis at a time: the axis that it waits for, or, without a recorded wait, the
first axis in flight in the order of ``AXES``. So the exposed seconds of all axes add up to those of
all communication. A host that is blocked while it enqueues a collective counts as waiting.
Transfers between stages are excluded: the receiving stage is idle, and ``plait diagnose`` computes
the transfer's part of that idle time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

AXES = ("tp", "cp", "ep", "dp", "pp", "other")
"""The parallel axes along which ranks wait for communication. other: imported recordings without an
axis."""
UNDER_WAY, WAIT, BUSY, NEITHER, BEGINS = 0, 1, 2, 3, 4
"""The role of a span in the computation of exposure. BEGINS: the rank is busy, and its step starts
with this span."""
ROLES = {"comm": UNDER_WAY, "wait": WAIT, "transfer": NEITHER, "data": BEGINS}
"""Role of each kind of span in the count of exposed communication; kinds that are not listed are
``BUSY``."""


class Exposure(NamedTuple):
    """The seconds of communication. total: in flight or waited for. exposed: the part in which the
    rank did nothing else."""

    total: float
    exposed: float

    @property
    def hidden(self) -> float:
        """The seconds of communication in which the rank did other work."""
        return max(0.0, self.total - self.exposed)

    @property
    def fraction(self) -> float | None:
        """The hidden share of the communication; None without communication."""
        return self.hidden / self.total if self.total > 0 else None


def exposures(
    lanes: np.ndarray, roles: np.ndarray, axes: np.ndarray | None, starts: np.ndarray, ends: np.ndarray
) -> np.ndarray:
    """Return [lanes, axes, 2]: total and exposed time, in the unit of the times, as float64. All
    arguments are columns of the same spans, in any order. lanes: index from 0 of a rank's step;
    times of different lanes are never compared. roles: values as in ``ROLES``. axes: index in
    ``AXES``, used for spans that are ``UNDER_WAY`` or a ``WAIT``; None: all communication as one
    axis."""
    import numpy as np

    count, used = int(lanes.max()) + 1 if len(lanes) else 0, roles != NEITHER
    lanes, roles, starts, ends = lanes[used], roles[used], starts[used], np.maximum(starts, ends)[used]
    starts, ends = _within(lanes, roles, starts, ends, count)
    axes = np.zeros(len(lanes), np.int64) if axes is None else axes[used]
    number = int(axes.max()) + 1 if len(axes) else 1
    # The state of a lane is constant between two successive starts or ends of its spans.
    lane, moments = np.concatenate([lanes, lanes]), np.concatenate([starts, ends])
    order = np.lexsort((moments, lane))
    lane, length = lane[order], np.diff(moments[order], append=moments[order][-1:])
    change = np.concatenate([np.ones(len(lanes), np.int32), np.full(len(lanes), -1, np.int32)])[order]
    role, axis = np.concatenate([roles, roles])[order], np.concatenate([axes, axes])[order]

    def any_of(which: np.ndarray) -> np.ndarray:
        """Return, for each moment, True if a span of the mask ``which`` continues after it."""
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
    """Return starts and ends of spans, with communication cut off before the start of its step."""
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
    """Return the number and the sum of the gaps between the ops of each lane, from the first op to
    the last.

    Arguments and units as in ``exposures``, for the work and waits of a rank's own thread. ops:
    mask of the spans that are ops, by default all; other spans fill gaps and make none.

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
    position = np.empty(len(latest), np.int64)
    position[latest] = np.arange(len(latest))
    apart = lanes * len(lanes)  # a running maximum that restarts with every lane
    reached = ends[latest][np.maximum.accumulate(position + apart) - apart]
    gap = np.where(lanes[1:] == lanes[:-1], np.maximum(starts[1:] - reached[:-1], 0), 0)
    sums = np.zeros(count, starts.dtype)
    np.add.at(sums, lanes[1:], gap)
    return np.bincount(lanes[1:][gap > 0], minlength=count), sums
