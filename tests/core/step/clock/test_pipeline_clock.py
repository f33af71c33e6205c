"""The walk of a pipeline's ranks against equations that are solved without one."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import ScheduleError
from plait.core.step.clock.pipeline_clock import PipelineCosts, Transfers, dry_run
from plait.core.step.schedule import Op, Schedule, ends, with_edges, with_transfers
from plait.core.step.schedules import GENERATORS, generate, planned_shape

SECONDS = st.sampled_from((0.0, 0.25, 1.0, 1.5))
Moments = dict[Op, tuple[float, float]]


def solved(schedule: Schedule, costs: PipelineCosts, transfers: Transfers) -> Moments | None:
    """When every op begins and ends, transfers under both ends: the least times that no rule
    forbids. None where ops wait for each other."""
    found: Moments = {}
    ops = [op for ops in schedule.ranks for op in ops]
    before = {op: other for ops in schedule.ranks for other, op in zip((None, *ops), ops, strict=False)}
    channels: dict[tuple[int, int], list[Op]] = defaultdict(list)
    for op in ops:
        if not op.computes and op.sends:
            channels[schedule.rank_of[op.stage], schedule.rank_of[op.peer]].append(op)
    ahead = {op: other for sent in channels.values() for other, op in zip((None, *sent), sent, strict=False)}

    def leaves(op: Op | None) -> float | None:
        """When a rank goes on after an op."""
        while op is not None and not op.computes:
            if transfers == "blocking":
                return found[op][1] if op in found else None
            op = before[op]
        return 0.0 if op is None else found[op][1] if op in found else None

    def begins(op: Op) -> list[float | None]:
        if op.computes:
            return [leaves(before[op]), *((found.get(ends(one)[0]) or (0, None))[1] for one in schedule.arrivals(op))]
        send, receive = ends(op.transfer)
        first = ahead[send]
        free = 0.0 if first is None else found[first][1] if first in found else None
        return [free, leaves(before[send]), *([] if transfers == "buffered" else [leaves(before[receive])])]

    while len(found) < len(ops):
        count = len(found)
        for op in ops:
            if op not in found and None not in (moments := begins(op)):
                start = max(one for one in moments if one is not None)
                for each in (op,) if op.computes else ends(op.transfer):
                    found[each] = start, start + (costs.seconds(op) if op.computes else costs.travel(op.transfer))
        if len(found) == count:
            return None
    return found


@given(st.data())
def test_every_op_runs_at_the_first_moment_that_no_rule_forbids(data: st.DataObject) -> None:
    name, ranks = data.draw(st.sampled_from(sorted(GENERATORS))), data.draw(st.integers(1, 4))
    schedule = generate(name, planned_shape(name, ranks, data.draw(st.integers(1, 6)), 2))
    skips = [(0, stage) for stage in range(2, schedule.num_stages) if data.draw(st.booleans())]
    schedule = with_transfers(with_edges(schedule, [*schedule.edges, *skips]), data.draw(st.integers(0, 4)))
    forward, inputs, weights = (tuple(data.draw(SECONDS) for _ in range(schedule.num_stages)) for _ in range(3))
    costs = PipelineCosts(forward, inputs, weights, {edge: data.draw(SECONDS) for edge in schedule.edges})
    transfers: Transfers = data.draw(st.sampled_from(("buffered", "rendezvous", "blocking")))
    wanted = solved(schedule, costs, transfers)
    if wanted is None:
        with pytest.raises(ScheduleError, match="deadlock: rank "):
            dry_run(schedule, costs, transfers)
        return
    placed = {one.op: (one.start, one.end) for one in dry_run(schedule, costs, transfers).placed}
    assert placed == {op: moment for op, moment in wanted.items() if op.computes or op.sends}
