"""How many activations of each size are alive at one place of a pipeline, at every moment that can be the
fullest: the walk of ``plait.core.step.memory.pipeline_memory`` on unit vectors instead of bytes.

A moment is then a row of counts, and the most bytes of a step are the largest product of a row with the
sizes, whatever these are. Rows that others exceed in every count are left out; a handful remains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from plait.core.step.memory.activations import Activations
from plait.core.step.memory.pipeline_memory import PlaceWalk
from plait.core.step.schedule import Op, Schedule, Transfer, ends
from plait.core.step.schedules import SPLIT, Shape, rank_ops

Counts = NDArray[np.int64]

TYPES = ("whole", "embeds", "middle", "heads")
"""Of stages, by which ends of the model they have."""

# Where a size stands in a row: four types each, then what a layer adds (again: one that is recomputed, or any
# if none is; plain: one that is not, beside others that are), then a stream between stages.
KEPT, HELD, FORWARD, BACKWARD, WEIGHT = 0, 4, 8, 12, 16
KEPT_LAYER, HELD_LAYER = 20, 21
PLAIN_FORWARD, PLAIN_BACKWARD, PLAIN_KEPT_LAYER, PLAIN_HELD_LAYER = 22, 26, 30, 31
PLAIN_PEAKS = PLAIN_FORWARD, PLAIN_BACKWARD
STREAM = 32
WIDTH = 33

_OF_STAGE = 5  # kept, forward peak, backward peak, held, weight peak


def enough(name: str, pp: int, num_micro: int) -> int:
    """So many micro-batches already fill a place as ``num_micro`` do."""
    if name == "gpipe":
        return num_micro
    if name == "interleaved":
        return min(num_micro, 3 * pp) if num_micro % pp == 0 else num_micro
    return min(num_micro, 4 * pp if name == "zb-v" else 2 * pp + 8)


def num_stages(name: str, pp: int, virtual: int) -> int:
    """Of a schedule of a place each, or ``virtual`` stages a place."""
    return pp * {"interleaved": virtual, "zb-v": 2}.get(name, 1)


def stages_of(name: str, pp: int, virtual: int, place: int) -> tuple[int, ...]:
    """The stages of a place, ascending."""
    if name == "zb-v":
        return place, 2 * pp - 1 - place
    return tuple(range(place, num_stages(name, pp, virtual), pp))


def fullest_places(name: str, pp: int) -> tuple[int, ...]:
    """Where a step can take the most. Both ends have more than layers. Of those between, layers and live
    micro-batches never grow along the pipeline, so the second exceeds the others; but what waits for weight
    gradients grows."""
    return tuple(sorted({0, min(1, pp - 1), pp - 1, *([max(0, pp - 2)] if name in SPLIT else [])}))


@dataclass(frozen=True)
class Pipe:
    """What decides which activations live at a place together: a schedule of so many ranks, with ``virtual``
    stages a rank, for so many micro-batches."""

    name: str
    pp: int
    virtual: int
    num_micro: int
    place: int


Layers = tuple[tuple[int, int], ...]
"""Of every stage of a place, (recomputed, others)."""


def moments(asked: Sequence[tuple[Pipe, Layers]]) -> list[Counts]:
    """Of each, rows of counts, [moments, WIDTH]. What was asked before is remembered."""
    for pipe, layers in dict.fromkeys(asked):
        if layers not in _known(pipe):
            _known(pipe)[layers] = _moments(pipe, layers)
    return [_known(pipe)[layers] for pipe, layers in asked]


@cache
def _known(_pipe: Pipe) -> dict[Layers, Counts]:
    return {}


def _moments(pipe: Pipe, layers: Layers) -> Counts:
    name, pp, virtual, _, place = astuple(pipe)
    stages, count = stages_of(name, pp, virtual, place), num_stages(name, pp, virtual)
    split, found = name in SPLIT, _walked(pipe)
    rows = [found @ _sizes(stages, count, layers, split, turn) for turn in range(3 if split else 2)]
    return _largest(np.concatenate(rows))


@cache
def _walked(pipe: Pipe) -> Counts:
    """Rows of counts of every stage's sizes on its own, then of streams."""
    name, pp, virtual, num_micro, place = astuple(pipe)
    if name == "gpipe" and num_micro > 3:  # one more that stays, for each micro-batch more
        rows = _walked(replace(pipe, num_micro=3)).copy()
        rows[:, 0] += num_micro - 3
        return rows
    stages = stages_of(name, pp, virtual, place)
    chunks = num_stages(name, pp, virtual) // pp
    slack = (2,) * (pp - 1) if name == "slack-1f1b" else ()
    ops = rank_ops(name, Shape(ranks=pp, micro_batches=num_micro, chunks=chunks, slack=slack), place)
    here = set(stages)
    walk = _Counting(_chain(num_stages(name, pp, virtual)), stages)
    walk.run(_lowered(ops, here, num_stages(name, pp, virtual)))
    return _largest(np.stack(list(walk.rows.values())).astype(np.int64))


@cache
def _chain(count: int) -> Schedule:
    return Schedule("chain", count, ())


def _lowered(ops: Sequence[Op], here: set[int], count: int, ahead: int = 2) -> list[Op]:
    """With transfers, as ``core.step.schedule.with_transfers`` has them for a chain, at one place."""
    posted: list[list[Op]] = [[] for _ in ops]
    sent: list[list[Op]] = [[] for _ in ops]
    for at, op in enumerate(ops):
        if not (op.work.forward or op.work.input_gradient):
            continue
        way = 1 if op.forward else -1
        before, after = op.stage - way, op.stage + way
        if 0 <= before < count and before not in here:
            posted[max(0, at - ahead)].append(ends(Transfer(before, op.stage, op.direction, op.micro_batch))[1])
        if 0 <= after < count and after not in here:
            sent[at].append(ends(Transfer(op.stage, after, op.direction, op.micro_batch))[0])
    return [one for at, op in enumerate(ops) for one in (*posted[at], op, *sent[at])]


class _Counting(PlaceWalk):
    """Keeps every moment instead of the fullest."""

    def __init__(self, schedule: Schedule, stages: Sequence[int]) -> None:
        unit = np.eye(_OF_STAGE * len(stages) + 1, dtype=np.int32)
        sizes = {
            stage: Activations(*cast("Any", unit[_OF_STAGE * at : _OF_STAGE * (at + 1)]))
            for at, stage in enumerate(stages)
        }
        super().__init__(schedule, sizes, {})
        self.rows: dict[bytes, Any] = {}
        self.live = cast("int", np.zeros(len(unit), np.int32))
        self._stream = cast("int", unit[-1])

    def _tile(self, a: int, b: int) -> int:
        return self._stream

    def _mark(self, size: int, when: str) -> None:
        row = np.array(size)
        self.rows[row.tobytes()] = row


def _sizes(stages: Sequence[int], count: int, layers: Sequence[tuple[int, int]], split: bool, turn: int) -> Counts:
    """Parts of a stage's own sizes, [sizes of all stages and a stream, WIDTH]. A backward goes from the last
    layer to the first and turns kept bytes into held ones. turn: the moment at which it holds most: 0 its
    begin, 1 the end of the layers that are not recomputed, 2 its end."""
    made = np.zeros((_OF_STAGE * len(stages) + 1, WIDTH), np.int64)
    for at, (stage, (again, plain)) in enumerate(zip(stages, layers, strict=True)):
        kind = {(True, True): 0, (True, False): 1, (False, False): 2, (False, True): 3}[stage == 0, stage == count - 1]
        kept, forward, backward, held, weight = made[_OF_STAGE * at : _OF_STAGE * (at + 1)]
        kept[KEPT + kind] = held[HELD + kind] = weight[WEIGHT + kind] = 1
        forward[(PLAIN_FORWARD if plain else FORWARD) + kind] = 1
        for row in (kept, forward):
            row[KEPT_LAYER], row[PLAIN_KEPT_LAYER] = again, plain
        for row in (held, weight):
            row[HELD_LAYER], row[PLAIN_HELD_LAYER] = again, plain
        in_plain = plain and (turn == 0 or not again)
        backward[(PLAIN_BACKWARD if in_plain else BACKWARD) + kind] = 1
        backward[KEPT_LAYER if turn < 2 else HELD_LAYER] = again
        if in_plain:
            backward[PLAIN_KEPT_LAYER] = plain
        elif split:
            backward[PLAIN_HELD_LAYER] = plain
    made[-1, STREAM] = 1
    return made


def _largest(rows: Counts) -> Counts:
    """Without rows that another exceeds or equals in every count."""
    rows = rows[np.argsort(-rows.sum(axis=1), kind="stable")]
    small = rows.astype(np.int16) if rows.max(initial=0) < 1 << 15 else rows  # is compared four times as fast
    kept, left = list[int](), np.arange(len(rows))
    while len(left):
        kept.append(int(left[0]))  # nothing after it exceeds it, for its sum is the largest
        left = left[(small[left] > small[left[0]]).any(axis=1)]
    return rows[kept]
