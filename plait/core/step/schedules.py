"""The pipeline schedules Plait knows: which computation each rank runs next. P ranks, S stages, M
micro-batches.

    gpipe           all forwards, then all backwards (Huang 2019)
    1f1b            rank i runs S-i forwards, then one backward, one forward, ... (Narayanan 2019,
                    PipeDream-Flush)
    eager-1f1b      2(S-i)-1 forwards first, so that every transfer has half a period to hide in
                    (arXiv 2211.05322)
    slack-1f1b      only as many forwards first as each boundary's transfer needs: ``slack`` of
                    ``enough_slack``
    interleaved     several stages a rank, 2(P-i-1) + (v-1)P forwards first (arXiv 2104.04473); sends and
                    receives decoupled (MegaScale)
    zb-h1           1f1b with its backwards split, weight gradients fill the end; memory of 1f1b
                    (arXiv 2401.10241)
    zb-h2           eager-1f1b with its backwards split: no bubble, memory of eager-1f1b (same)
    zb-v            two stages a rank, down and up again, no bubble with the memory of 1f1b where F, I and W
                    take equally long (same)

The theorem behind eager and slack: with asynchronous links, one a direction, the seconds per micro-batch are
the longest mean circuit. Between stages i and j a micro-batch goes there and back, sum(compute) + 2
sum(transfer), while 1 + sum(slack) micro-batches are in between.

A schedule's text form is what ``str(schedule)`` writes. Known: ``# name`` on the first line, ``forward
only:``, ``edges: 0>1 ...``, ``rank N: ops`` in the order of ranks; other comments and empty lines say
nothing. Refused, as ScheduleError: any other line, a word that is no op, an edge that stands twice, and what
``core.step.schedule.check`` refuses.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from plait.core.base.errors import ScheduleError, nearest
from plait.core.base.files import contents_within, reason_of
from plait.core.parallel.strategy import slice_sizes
from plait.core.step.schedule import Edge, Op, OpKind, Schedule, check, parse_op, with_transfers

LARGEST_FILE = 4 << 20
"""Bytes of a schedule that is written in a file: several hundred thousand ops."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a generator needs. chunks: stages a rank holds (interleaved: any; zb-v: 2). slack: of every
    boundary, for slack-1f1b."""

    ranks: int
    micro_batches: int
    chunks: int = 1
    slack: tuple[int, ...] = ()

    @property
    def num_stages(self) -> int:
        """Over all ranks."""
        return self.ranks * self.chunks


def generate(name: str, shape: Shape) -> Schedule:
    """The named schedule, computation only. Raises ScheduleError for an unknown name or a shape that it does
    not fit."""
    if name not in GENERATORS:
        raise ScheduleError(
            f"no schedule is called '{name}'{nearest(name, GENERATORS)}; there are {', '.join(GENERATORS)}"
        )
    if shape.ranks < 1 or shape.micro_batches < 1 or shape.chunks < 1:
        raise ScheduleError(f"{name} needs at least one rank, one micro-batch and one chunk")
    if problem := chunks_problem(name, shape.chunks):
        raise ScheduleError(f"{problem}; chunks are for interleaved")
    if shape.slack and name != "slack-1f1b":
        raise ScheduleError(f"slack is for slack-1f1b, not for {name}")
    return Schedule(name, shape.num_stages, tuple(map(tuple, GENERATORS[name](shape, range(shape.ranks)))))


def own_chunks(name: str) -> int:
    """Stages a rank that the named schedule has of itself; interleaved takes any number."""
    return 2 if name == "zb-v" else 1


def chunks_problem(name: str, chunks: int) -> str:
    """Why the named schedule cannot have so many stages a rank; nothing if it can.

    >>> chunks_problem("zb-v", 3), chunks_problem("interleaved", 3)
    ('zb-v has 2 stages a rank, not 3', '')
    """
    own = own_chunks(name)
    if name == "interleaved" or chunks == own:
        return ""
    return f"{name} has {own} stage{'s' * (own > 1)} a rank, not {chunks}"


def rank_ops(name: str, shape: Shape, rank: int) -> list[Op]:
    """What ``generate`` gives one rank, without the others."""
    return next(iter(GENERATORS[name](shape, (rank,))))


def find_schedule(name: str, shape: Shape) -> tuple[Schedule, Shape | None]:
    """The schedule of that name, its shape with at least the chunks it needs; or the one written in the file
    ``name``, without a shape.

    Raises ScheduleError as ``generate`` and ``parse_schedule`` do, also for a file that cannot be read.
    """
    if name not in GENERATORS and (written := _written(name)):
        return written, None
    shape = replace(shape, chunks=max(shape.chunks, own_chunks(name)))
    return generate(name, shape), shape


def _written(name: str) -> Schedule | None:
    """The schedule in a file; None if there is no such file."""
    try:
        return parse_schedule(contents_within(name, LARGEST_FILE).decode())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ScheduleError(f"{name}: cannot be read as a schedule: {reason_of(error)}") from None
    except ScheduleError as error:
        raise ScheduleError(f"{name}: {error}") from None


def forward_only(schedule: Schedule, micro_batches: int) -> Schedule:
    """For evaluation on the same ranks: every micro-batch through one stage after the other, with
    transfers."""
    ranks = [
        tuple(Op(stage, "F", at) for stage in schedule.stages_of(rank) for at in range(micro_batches))
        for rank in range(len(schedule.ranks))
    ]
    return with_transfers(
        Schedule(f"{schedule.name}, forward only", schedule.num_stages, tuple(ranks), schedule.edges, trains=False)
    )


def whole_steps(micro_batches: int) -> Schedule:
    """Of a model that is not cut: one stage, whose segment lists reach from a micro-batch's forward into its
    backward, so that communication of the one hides behind computation of the other."""
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
            f"one for every boundary; got {shape.slack}"
        )
    return _one_backward_one_forward(warm_up(shape.slack), shape.micro_batches, ranks)


def warm_up(slack: Sequence[int]) -> list[int]:
    """Forwards that each stage runs before its first backward: 1 for the last, each boundary's slack more
    towards the first.

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
    """One input gradient, one forward; weight gradients follow ``lag`` micro-batches behind, which keeps
    every stage's memory equal."""
    for stage in ranks:
        first, behind = min(warm[stage], micro_batches), lag[stage]
        ops = [Op(stage, "F", at) for at in range(first)]
        done = 0
        for at in range(micro_batches):
            ops.append(Op(stage, "I", at))
            forward = first + at < micro_batches
            if (
                at >= behind or not forward
            ):  # once there are no forwards left, weight gradients fill the waits between input gradients
                ops.append(Op(stage, "W", done))
                done += 1
            if forward:
                ops.append(Op(stage, "F", first + at))
        ops += [Op(stage, "W", at) for at in range(done, micro_batches)]
        yield ops


def _interleaved(shape: Shape, wanted: Iterable[int]) -> Iterable[list[Op]]:
    """Micro-batches go through a rank's stages in groups of P, or a little more: with less, ranks would wait
    for each other in a circle."""
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
    """Rank i holds stages i and 2P-1-i. The order is made for at least as many micro-batches as fill the
    pipeline; the rest is left out."""
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
    """The next op of each kind of two stages of one rank: F I W of the one nearer the input, f i w of the
    other."""

    def __init__(self, near: int, far: int) -> None:
        self.stage = {**dict.fromkeys("FIW", near), **dict.fromkeys("fiw", far)}
        self.done = dict.fromkeys("FIWfiw", 0)
        self.ops: list[Op] = []

    def run(self, times: int, *kinds: str) -> None:
        """Every kind in turn, so many times."""
        for _ in range(times):
            for kind in kinds:
                self.ops.append(Op(self.stage[kind], _UPPER[kind], self.done[kind]))
                self.done[kind] += 1


_UPPER: dict[str, OpKind] = {"F": "F", "I": "I", "W": "W", "f": "F", "i": "I", "w": "W"}

GENERATORS: dict[str, Callable[[Shape, Iterable[int]], Iterable[list[Op]]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "eager-1f1b": _eager,
    "slack-1f1b": _slack,
    "interleaved": _interleaved,
    "zb-h1": _zero_bubble_h1,
    "zb-h2": _zero_bubble_h2,
    "zb-v": _zero_bubble_v,
}
SPLIT = ("zb-h1", "zb-h2", "zb-v")
"""Schedules whose backward is in two parts."""


@dataclass(frozen=True)
class Known:
    """What theory says of a schedule whose transfers take no time. bubble: as ``DryRun.bubble``; peak: by
    rank, as ``rank_peaks``."""

    bubble: float
    peak: tuple[int, ...]


def closed_form(
    name: str, shape: Shape, forward: float = 1.0, input_gradient: float = 1.0, weight_gradient: float = 1.0
) -> Known | None:
    """Bubble and memory of equal stages, seconds as given for one stage; None where no formula holds.

    Source: the schedule's paper. interleaved needs M to be a multiple of P and more than P; zb-* need M >=
    2P-1, zb-v equal parts.
    """
    ranks, count, chunks = shape.ranks, shape.micro_batches, shape.chunks
    backward, steps = input_gradient + weight_gradient, ranks - 1
    whole = steps * (forward + backward)

    def capped(peaks: Iterable[int]) -> tuple[int, ...]:
        return tuple(min(peak, count * chunks) for peak in peaks)

    own, eager = [ranks - i for i in range(ranks)], [2 * (ranks - i) - 1 for i in range(ranks)]
    match name:
        case "gpipe":
            return Known(whole, (count,) * ranks)
        case "1f1b":
            return Known(whole, capped(own)) if count >= ranks else None
        case "eager-1f1b":
            return Known(whole, capped(eager)) if count >= ranks else None
        case "slack-1f1b":
            return Known(whole, capped(warm_up(shape.slack))) if count >= ranks else None
        case "interleaved" if count % ranks == 0 and (chunks == 1 or count > ranks):
            return Known(whole, capped((chunks + 1) * ranks - 1 - 2 * i for i in range(ranks)))
        case "zb-h1" if count >= 2 * ranks - 1 and weight_gradient <= input_gradient:
            return Known(steps * (forward + input_gradient - weight_gradient), (ranks,) * ranks)
        case "zb-h2" if count >= 2 * ranks - 1 and weight_gradient <= input_gradient:
            return Known(max(0.0, steps * (forward + input_gradient - 2 * weight_gradient)), (2 * ranks - 1,) * ranks)
        case "zb-v" if count >= 2 * ranks - 1 and forward == input_gradient == weight_gradient:
            return Known(0.0, (2 * ranks,) * ranks)
        case _:
            return None


def enough_slack(compute: Sequence[float], transfer: Sequence[float], tolerance: float = 0.0) -> tuple[int, ...]:
    """The least slack with which transfers cost no more than ``tolerance`` of the period: fewest live
    activations over all stages.

    Every range of stages asks for a sum of slacks (longest mean circuit <= (1 + tolerance) max(compute,
    transfer)). Slack at a boundary is paid by all stages before it, so ranges are served from the last to
    begin to the first, each at its first boundary: no other choice needs fewer, or less far back.

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
    """A schedule from its text form, checked (``check``). Raises ScheduleError naming the line or the op."""
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
        raise ScheduleError(f"edge {twice[0][0]}>{twice[0][1]} stands twice")
    stages = {op.stage for ops in ranks for op in ops}
    if not stages:
        raise ScheduleError("the schedule has no op")
    most = sum(map(len, ranks))
    # Before anything is made for every stage and micro-batch up to the largest number.
    if beyond := [op for ops in ranks for op in ops if max(op.stage, op.micro_batch) >= most]:
        raise ScheduleError(f"{beyond[0]} numbers a stage or micro-batch beyond the {most} ops of the schedule")
    schedule = Schedule(name, 1 + max(stages), tuple(ranks), tuple(edges), trains)
    check(schedule)
    return schedule


def _parse_edge(word: str) -> Edge:
    match = re.fullmatch(r"(\d+)>(\d+)", word)
    if not match:
        raise ScheduleError(f"'{word}' is no edge between stages; one looks like 0>3")
    return int(match[1]), int(match[2])
