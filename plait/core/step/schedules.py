"""The pipeline schedules Plait knows: the computations of each pp rank, in order. P ranks, S
stages, M micro-batches.

    gpipe           all forwards, then all backwards (Huang 2019)
    1f1b            rank i runs S-i forwards, then one backward, one forward, ... (Narayanan 2019,
                    PipeDream-Flush)
    eager-1f1b      2(S-i)-1 forwards first, so that every transfer can overlap half a period of computation
                    (arXiv 2211.05322)
    slack-1f1b      only as many forwards first as each boundary's transfer needs: ``slack`` of
                    ``enough_slack``
    interleaved     v stages per rank, 2(P-i-1) + (v-1)P forwards first (arXiv 2104.04473); sends and
                    receives decoupled (MegaScale)
    zb-h1           1f1b with its backwards split, weight gradients fill the end; memory of 1f1b
                    (arXiv 2401.10241)
    zb-h2           eager-1f1b with its backwards split: no bubble, memory of eager-1f1b (same)
    zb-v            two stages per rank, down and up again; no bubble with the memory of 1f1b if F, I and W
                    take equally long (same)

The theorem behind eager and slack: with asynchronous links, one per direction, the seconds per
micro-batch are the longest mean circuit. Between stages i and j a micro-batch goes there and back
in sum(compute) + 2 sum(transfer) seconds. Meanwhile 1 + sum(slack) micro-batches are in flight
between them.

A schedule's text form is the output of ``str(schedule)``. Accepted: ``# name`` on the first line,
``forward only:``, ``edges: 0>1 ...``, ``rank N: ops`` in the order of ranks; other comments and
empty lines are ignored. Rejected with ScheduleError: any other line, a word that is not an op, a
repeated edge, and schedules that ``core.step.schedule.check`` rejects.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from plait.core.base.errors import ScheduleError, nearest
from plait.core.base.files import contents_within, reason_of
from plait.core.parallel.strategy import slice_sizes
from plait.core.step.schedule import Edge, Op, OpKind, Schedule, check, parse_op, with_transfers

LARGEST_FILE = 4 << 20
"""Largest size of a schedule file in bytes: several hundred thousand ops."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Arguments of a schedule generator. chunks: stages per rank (interleaved: any; zb-v: 2).
    slack: for slack-1f1b, the extra forwards before the first backward that each stage boundary
    adds."""

    ranks: int
    micro_batches: int
    chunks: int = 1
    slack: tuple[int, ...] = ()

    @property
    def num_stages(self) -> int:
        """Number of stages over all ranks."""
        return self.ranks * self.chunks


def generate(name: str, shape: Shape) -> Schedule:
    """Return the named schedule, computation only. Raises ScheduleError for an unknown name or an
    unsuitable shape."""
    if name not in GENERATORS:
        raise ScheduleError(
            f"unknown schedule '{name}'{nearest(name, GENERATORS)}; known schedules: {', '.join(GENERATORS)}"
        )
    if shape.ranks < 1 or shape.micro_batches < 1 or shape.chunks < 1:
        raise ScheduleError(f"{name} needs at least one rank, one micro-batch and one chunk")
    if problem := chunks_problem(name, shape.chunks):
        raise ScheduleError(f"{problem}; only interleaved takes a number of chunks")
    if shape.slack and name != "slack-1f1b":
        raise ScheduleError(f"{name} takes no slack; only slack-1f1b does")
    return Schedule(name, shape.num_stages, tuple(map(tuple, GENERATORS[name].lists(shape, range(shape.ranks)))))


def own_chunks(name: str) -> int:
    """Return the number of stages per rank that the named schedule prescribes, 1 if it accepts any
    number."""
    return max(1, GENERATORS[name].chunks) if name in GENERATORS else 1


def takes_chunks(name: str) -> bool:
    """True if the named schedule accepts any number of stages per rank."""
    return name in GENERATORS and not GENERATORS[name].chunks


def chunks_problem(name: str, chunks: int) -> str:
    """Return why the named schedule cannot have ``chunks`` stages per rank; empty if it can.

    >>> chunks_problem("zb-v", 3), chunks_problem("interleaved", 3)
    ('zb-v has 2 stages per rank, not 3', '')
    """
    own = own_chunks(name)
    if takes_chunks(name) or chunks == own:
        return ""
    return f"{name} has {own} stage{'s' * (own > 1)} per rank, not {chunks}"


def planned_shape(name: str, ranks: int, micro_batches: int, virtual: int = 1) -> Shape:
    """Return the shape with which the planner searches a schedule; for slack-1f1b, slack 2 at every
    boundary hides any transfer."""
    chunks = virtual if takes_chunks(name) else own_chunks(name)
    slack = (2,) * (ranks - 1) if name == "slack-1f1b" else ()
    return Shape(ranks=ranks, micro_batches=micro_batches, chunks=chunks, slack=slack)


def find_schedule(name: str, shape: Shape) -> tuple[Schedule, Shape | None]:
    """Return the schedule of that name, and its shape with at least the chunks it needs; or the
    schedule in the file ``name``, and None.

    Raises ScheduleError as ``generate`` and ``parse_schedule`` do, also for a file that cannot be
    read.
    """
    if name not in GENERATORS and (written := _written(name)):
        return written, None
    shape = replace(shape, chunks=max(shape.chunks, own_chunks(name)))
    return generate(name, shape), shape


def _written(name: str) -> Schedule | None:
    """Return the schedule in a file; None if there is no such file."""
    try:
        return parse_schedule(contents_within(name, LARGEST_FILE).decode())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ScheduleError(f"{name}: cannot be read as a schedule: {reason_of(error)}") from None
    except ScheduleError as error:
        raise ScheduleError(f"{name}: {error}") from None


def forward_only(schedule: Schedule, micro_batches: int) -> Schedule:
    """Return a schedule for evaluation on the same ranks: every micro-batch passes through one
    stage after the other, with transfers."""
    ranks = [
        tuple(Op(stage, "F", at) for stage in schedule.stages_of(rank) for at in range(micro_batches))
        for rank in range(len(schedule.ranks))
    ]
    return with_transfers(
        Schedule(f"{schedule.name}, forward only", schedule.num_stages, tuple(ranks), schedule.edges, trains=False)
    )


def whole_steps(micro_batches: int) -> Schedule:
    """Return the schedule of an unpartitioned model: one stage, whose instruction lists span a
    micro-batch's forward and backward, so that communication of one overlaps computation of the
    other."""
    return Schedule("whole", 1, (tuple(Op(0, "S", at) for at in range(micro_batches)),))


def _gpipe(shape: Shape, ranks: Iterable[int]) -> Iterable[list[Op]]:
    return _one_backward_one_forward([shape.micro_batches] * shape.ranks, shape.micro_batches, ranks)


def _one_f_one_b(shape: Shape, ranks: Iterable[int]) -> Iterable[list[Op]]:
    return _one_backward_one_forward(warm_up([1] * (shape.ranks - 1)), shape.micro_batches, ranks)


def _eager(shape: Shape, ranks: Iterable[int]) -> Iterable[list[Op]]:
    return _one_backward_one_forward(warm_up([2] * (shape.ranks - 1)), shape.micro_batches, ranks)


def _slack(shape: Shape, ranks: Iterable[int]) -> Iterable[list[Op]]:
    if len(shape.slack) != shape.ranks - 1 or min(shape.slack, default=1) < 1:
        raise ScheduleError(
            f"slack-1f1b of {shape.ranks} ranks needs {shape.ranks - 1} slacks of at least 1, "
            f"one for every boundary between stages; got {shape.slack}"
        )
    return _one_backward_one_forward(warm_up(shape.slack), shape.micro_batches, ranks)


def warm_up(slack: Sequence[int]) -> list[int]:
    """Return the forwards that each stage runs before its first backward: 1 on the last stage; each
    boundary towards the first adds its slack.

    >>> warm_up([2, 2, 2])
    [7, 5, 3, 1]
    """
    return list(accumulate(reversed(slack), initial=1))[::-1]


def _one_backward_one_forward(warm: Sequence[int], micro_batches: int, ranks: Iterable[int]) -> Iterable[list[Op]]:
    for stage in ranks:
        first = min(warm[stage], micro_batches)
        ops = [Op(stage, "F", at) for at in range(first)]
        for at in range(micro_batches):
            ops.append(Op(stage, "B", at))
            if first + at < micro_batches:
                ops.append(Op(stage, "F", first + at))
        yield ops


def _zero_bubble_h1(shape: Shape, ranks: Iterable[int]) -> Iterable[list[Op]]:
    return _split(warm_up([1] * (shape.ranks - 1)), range(shape.ranks), shape.micro_batches, ranks)


def _zero_bubble_h2(shape: Shape, ranks: Iterable[int]) -> Iterable[list[Op]]:
    return _split(warm_up([2] * (shape.ranks - 1)), range(0, 2 * shape.ranks, 2), shape.micro_batches, ranks)


def _split(warm: Sequence[int], lag: Sequence[int], micro_batches: int, ranks: Iterable[int]) -> Iterable[list[Op]]:
    """Yield lists of one input gradient, one forward; weight gradients follow ``lag`` micro-batches
    behind, which keeps every stage's memory equal."""
    for stage in ranks:
        first, behind = min(warm[stage], micro_batches), lag[stage]
        ops = [Op(stage, "F", at) for at in range(first)]
        done = 0
        for at in range(micro_batches):
            ops.append(Op(stage, "I", at))
            forward = first + at < micro_batches
            if (
                at >= behind or not forward
            ):  # after the last forward, weight gradients fill the waits between input gradients
                ops.append(Op(stage, "W", done))
                done += 1
            if forward:
                ops.append(Op(stage, "F", first + at))
        ops += [Op(stage, "W", at) for at in range(done, micro_batches)]
        yield ops


def _interleaved(shape: Shape, wanted: Iterable[int]) -> Iterable[list[Op]]:
    """Yield lists in which micro-batches pass through a rank's stages in groups of P, or a little
    more: smaller groups would deadlock."""
    ranks, chunks, count = shape.ranks, shape.chunks, shape.micro_batches
    ends = list(accumulate(slice_sizes(count, max(1, count // ranks)), initial=0))
    groups = [range(*pair) for pair in pairwise(ends)]
    for rank in wanted:
        forward = [Op(chunk * ranks + rank, "F", at) for group in groups for chunk in range(chunks) for at in group]
        backward = [
            Op(chunk * ranks + rank, "B", at) for group in groups for chunk in reversed(range(chunks)) for at in group
        ]
        first = min(len(forward), 2 * (ranks - rank - 1) + (chunks - 1) * len(groups[0]) + 1)
        ops = forward[:first]
        for number, op in enumerate(backward):
            ops.append(op)
            ops += forward[first + number : first + number + 1]
        yield ops


def _zero_bubble_v(shape: Shape, wanted: Iterable[int]) -> Iterable[list[Op]]:
    """Yield lists where rank i holds stages i and 2P-1-i. The order is made for at least as many
    micro-batches as fill the pipeline; surplus micro-batches are left out."""
    ranks, count = shape.ranks, shape.micro_batches
    for rank in wanted:
        turn = _Turns(rank, 2 * ranks - 1 - rank)
        turn.run(2 * (ranks - rank) - 1, "F")
        turn.run(rank, "f", "F")
        turn.run(ranks - rank, "f", "i", "w")
        while turn.done["f"] < max(count, 2 * ranks - 1):
            turn.run(1, *(("F",) if turn.done["F"] < max(count, 2 * ranks - 1) else ()), "I", "W", "f", "i", "w")
        turn.run(rank, "I", "i")
        turn.run(ranks - rank, "I", "W")
        turn.run(turn.done["i"] - turn.done["w"], "w")
        turn.run(turn.done["I"] - turn.done["W"], "W")
        yield [op for op in turn.ops if op.micro_batch < count]


class _Turns:
    """The next op of each kind for the two stages of a rank: F I W of the stage nearer the input, f
    i w of the other stage."""

    def __init__(self, near: int, far: int) -> None:
        self.stage = {**dict.fromkeys("FIW", near), **dict.fromkeys("fiw", far)}
        self.done = dict.fromkeys("FIWfiw", 0)
        self.ops: list[Op] = []

    def run(self, times: int, *kinds: str) -> None:
        """Append the ops of all kinds in turn, ``times`` times."""
        for _ in range(times):
            for kind in kinds:
                self.ops.append(Op(self.stage[kind], _UPPER[kind], self.done[kind]))
                self.done[kind] += 1


_UPPER: dict[str, OpKind] = {"F": "F", "I": "I", "W": "W", "f": "F", "i": "I", "w": "W"}


class Generator(NamedTuple):
    """A schedule generator. lists: yields the op lists of some ranks. chunks: stages per rank that
    it prescribes; 0: any number. tried: True if a search tries it by default."""

    lists: Callable[[Shape, Iterable[int]], Iterable[list[Op]]]
    chunks: int = 1
    tried: bool = True


GENERATORS: dict[str, Generator] = {
    "gpipe": Generator(_gpipe, tried=False),  # never better than 1f1b
    "1f1b": Generator(_one_f_one_b),
    "eager-1f1b": Generator(_eager),
    "slack-1f1b": Generator(_slack, tried=False),  # slack follows from measurements
    "interleaved": Generator(_interleaved, chunks=0),
    "zb-h1": Generator(_zero_bubble_h1),
    "zb-h2": Generator(_zero_bubble_h2),
    "zb-v": Generator(_zero_bubble_v, chunks=2),
}


@dataclass(frozen=True)
class ClosedFormResult:
    """Theoretical bubble and memory of a schedule whose transfers take no time. bubble: as
    ``DryRun.bubble``; peak: by rank, as ``rank_peaks``."""

    bubble: float
    peak: tuple[int, ...]


def closed_form(
    name: str, shape: Shape, forward: float = 1.0, input_gradient: float = 1.0, weight_gradient: float = 1.0
) -> ClosedFormResult | None:
    """Return bubble and memory for equal stages, in the unit of the given times of one stage; None
    if no formula applies.

    Source: the schedule's paper. interleaved needs M to be a multiple of P and more than P; zb-*
    need M >= 2P-1; zb-v needs equal times of F, I and W.
    """
    ranks, count, chunks = shape.ranks, shape.micro_batches, shape.chunks
    backward, steps = input_gradient + weight_gradient, ranks - 1
    whole = steps * (forward + backward)

    def capped(peaks: Iterable[int]) -> tuple[int, ...]:
        return tuple(min(peak, count * chunks) for peak in peaks)

    own, eager = [ranks - i for i in range(ranks)], [2 * (ranks - i) - 1 for i in range(ranks)]
    match name:
        case "gpipe":
            return ClosedFormResult(whole, (count,) * ranks)
        case "1f1b":
            return ClosedFormResult(whole, capped(own)) if count >= ranks else None
        case "eager-1f1b":
            return ClosedFormResult(whole, capped(eager)) if count >= ranks else None
        case "slack-1f1b":
            return ClosedFormResult(whole, capped(warm_up(shape.slack))) if count >= ranks else None
        case "interleaved" if count % ranks == 0 and (chunks == 1 or count > ranks):
            return ClosedFormResult(whole, capped((chunks + 1) * ranks - 1 - 2 * i for i in range(ranks)))
        case "zb-h1" if count >= 2 * ranks - 1 and weight_gradient <= input_gradient:
            return ClosedFormResult(steps * (forward + input_gradient - weight_gradient), (ranks,) * ranks)
        case "zb-h2" if count >= 2 * ranks - 1 and weight_gradient <= input_gradient:
            return ClosedFormResult(
                max(0.0, steps * (forward + input_gradient - 2 * weight_gradient)), (2 * ranks - 1,) * ranks
            )
        case "zb-v" if count >= 2 * ranks - 1 and forward == input_gradient == weight_gradient:
            return ClosedFormResult(0.0, (2 * ranks,) * ranks)
        case _:
            return None


def enough_slack(compute: Sequence[float], transfer: Sequence[float], tolerance: float = 0.0) -> tuple[int, ...]:
    """Return the least slack with which transfers cost no more than ``tolerance`` of the period:
    fewest live activations over all stages.

    Every range of stages requires a sum of slacks (longest mean circuit <= (1 + tolerance)
    max(compute, transfer)). All stages before a boundary pay for its slack in memory. So ranges are
    served from the last to begin to the first, each at its first boundary: no other choice needs
    fewer, or less far back.

    >>> enough_slack([3.0] * 8, [0, 0, 0, 1.2, 0, 0, 0])
    (1, 1, 1, 2, 1, 1, 1)
    """
    allowed = (1 + tolerance) * max(*compute, *transfer, 0.0)
    slack = [1] * len(transfer)
    for i in reversed(range(len(transfer))):
        work, short = compute[i], 0
        for j in range(i + 1, len(compute)):
            work += compute[j] + 2 * transfer[j - 1]
            needed = 0 if work <= 0 else -int(-(work / allowed - 1e-9) // 1) - 1  # rounded up, exact multiples kept
            short = max(short, needed - sum(slack[i:j]))
        slack[i] += short
    return tuple(slack)


def parse_schedule(text: str) -> Schedule:
    """Return the checked (``check``) schedule of a text form. Raises ScheduleError naming the line
    or the op."""
    name, edges, ranks, trains = "by hand", list[Edge](), list[tuple[Op, ...]](), True
    for number, line in enumerate(text.splitlines(), 1):
        key, _, rest = line.strip().partition(":")
        if key.startswith("#"):
            name = line.strip().lstrip("# ") if number == 1 else name
        elif key == "forward only":
            trains = False
        elif key == "edges":
            edges += [_parse_edge(word) for word in rest.split()]
        elif key == f"rank {len(ranks)}":
            ranks.append(tuple(parse_op(word) for word in rest.split()))
        elif line.strip():
            raise ScheduleError(
                f"line {number} of the schedule is neither a comment nor 'edges: 0>1 ...' "
                f"nor 'rank {len(ranks)}: 0F0 ...'"
            )
    if twice := [edge for edge, times in Counter(edges).items() if times > 1]:
        raise ScheduleError(f"edge {twice[0][0]}>{twice[0][1]} is listed twice")
    stages = {op.stage for ops in ranks for op in ops}
    if not stages:
        raise ScheduleError("the schedule has no ops")
    most = sum(map(len, ranks))
    # Before anything is made for every stage and micro-batch up to the largest number.
    if beyond := [op for ops in ranks for op in ops if max(op.stage, op.micro_batch) >= most]:
        raise ScheduleError(
            f"{beyond[0]} has a stage or micro-batch number of {most} or more, but the schedule has only {most} ops"
        )
    schedule = Schedule(name, 1 + max(stages), tuple(ranks), tuple(edges), trains)
    check(schedule)
    return schedule


def _parse_edge(word: str) -> Edge:
    match = re.fullmatch(r"(\d+)>(\d+)", word)
    if not match:
        raise ScheduleError(f"'{word}' is not an edge between stages; an example is 0>3")
    return int(match[1]), int(match[2])
