"""The list scheduler chooses what a plain one does, which looks at all that is ready every time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.step.orders.segment_costs import NumberedOps, SegmentCosts
from plait.core.step.orders.streams import POLICIES, ListClock, ListScheduler, Policy
from plait.core.step.segments import Phase, SegmentGraph
from tests.core.step.test_segments import graphs

SITES = ("embed", "attn", "mlp", "block", "head")


@st.composite
def any_costs(draw: st.DrawFn) -> SegmentCosts:
    """Each kind of op its own; often equal, or nothing."""
    seconds = st.sampled_from((0.0, 1.0, 2.0)) | st.floats(0, 3)
    compute = {f"{site}.{kind}": draw(seconds) for site in SITES for kind in "NFRLMADCWJ"}
    return SegmentCosts(
        compute, {f"{site}.{kind}": draw(seconds) for site in SITES for kind in "NFRCMJ"}, draw(st.floats(0, 1))
    )


@settings(max_examples=40)
@given(graphs, any_costs(), st.sampled_from(POLICIES), st.integers(1, 9))
def test_it_chooses_as_a_plain_one_does(graph: SegmentGraph, costs: SegmentCosts, policy: Policy, held: int) -> None:
    numbered = NumberedOps(graph)
    seconds, wire = numbered.seconds(costs, 6)
    found = ListScheduler(numbered, ListClock(numbered, seconds, wire), held).order(policy)
    assert found == plain_order(numbered, seconds, wire, policy, held)


def plain_order(numbered: NumberedOps, seconds: list[float], wire: list[float], policy: Policy, held: int) -> list[int]:
    """What ``ListScheduler.order`` makes."""
    ops, needs = numbered.ops, numbered.needs
    until = until_wire(numbered, seconds)
    place = {op: i for i, op in enumerate(op for op in ops if op.slice == 0)}
    done, arrived, at = dict[int, float](), dict[int, float](), dict[int, float]()
    order, ready, now, link = list[int](), list[int](), 0.0, 0.0

    def preference(i: int) -> tuple[float, int, int]:
        along = place[ops[i]._replace(slice=0)]
        return max(0.0, at[i] - now), -along if policy.ahead else along, ops[i].slice

    def blocks(i: int) -> bool:
        if not (policy.patience and numbered.travels[i]):
            return False
        end = max(link, max(now, at[i]) + seconds[i]) + wire[i]
        wanted = [max(at[j], now) + until[j] for j in chain if ops[j].slice < ops[i].slice]
        return any(end > moment + (1 - policy.patience) * wire[i] for moment in wanted)

    while len(order) < len(ops):
        for i in range(len(ops)):
            if i not in at and all(source in done for source, _ in needs[i]):
                at[i] = max(((arrived if collective else done)[j] for j, collective in needs[i]), default=0.0)
                ready.append(i)
        chain = [i for i in ready if not numbered.weight[i]]
        weights = [i for i in ready if numbered.weight[i] and at[i] <= now]
        free = [i for i in chain if not blocks(i)] or chain
        first, oldest = min(free, key=preference, default=None), min(weights, key=lambda i: at[i], default=None)
        if first is None or oldest is None:
            chosen = first if first is not None else oldest
        elif at[first] > now or len(weights) > held:
            chosen = oldest
        else:
            chosen = oldest if policy.fill and link - now > seconds[oldest] + seconds[first] else first
        if chosen is None:
            chosen = min(ready, key=lambda i: at[i])
        ready.remove(chosen)
        order.append(chosen)
        now = done[chosen] = arrived[chosen] = max(now, at[chosen]) + seconds[chosen]
        if numbered.travels[chosen]:
            link = arrived[chosen] = max(now, link) + wire[chosen]
    return order


def until_wire(numbered: NumberedOps, seconds: list[float]) -> list[float]:
    """Processor seconds from the start of an op until its slice next has something for the link."""
    until, ops = list(seconds), numbered.ops
    for i in reversed(range(len(ops))):
        fed = [j for j, sources in enumerate(numbered.needs) if i in (source for source, _ in sources)]
        same = [until[j] for j in fed if ops[j].kind != "W" and ops[j].slice == ops[i].slice]
        until[i] += 0.0 if numbered.travels[i] else max(same, default=0.0)
    return until


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("held", [1, 8])
@pytest.mark.parametrize("phase", ["step", "B", "W"])
def test_it_waits_for_the_first_to_come_where_nothing_else_is_left(policy: Policy, held: int, phase: Phase) -> None:
    """Weight gradients of an embedding whose gradients are on their way, one after the other."""
    for p1, late in ((2, 5.0), (3, 5.0), (3, 0.5), (4, 40.0)):
        graph = SegmentGraph(num_layers=1, p1=p1, sequence_parallel=True, phase=phase)
        numbered = NumberedOps(graph)
        compute = {f"{site}.{kind}": 0.25 for site in SITES for kind in "NFRLMADCWJ"}
        seconds, wire = numbered.seconds(SegmentCosts(compute, {f"{site}.J": late for site in SITES}), 12)
        found = ListScheduler(numbered, ListClock(numbered, seconds, wire), held).order(policy)
        assert found == plain_order(numbered, seconds, wire, policy, held)
