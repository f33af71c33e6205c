"""A schedule from its text form, which ``str(schedule)`` writes: of a plan, or by hand.

Known: ``# name`` on the first line, ``forward only:``, ``edges: 0>1 ...``, ``rank N: ops`` in the order of
ranks; other comments and empty lines say nothing. Refused, as ScheduleError: any other line, a word that is
no op, an edge that stands twice, and what ``core.step.schedule.check`` refuses.
"""

from __future__ import annotations

import re
from collections import Counter

from plait.core.base.errors import ScheduleError
from plait.core.step.schedule import Edge, Op, Schedule, check, parse_op


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
