"""Moved orders: legal, never longer, no more held back, and near the shortest that an exact solver
finds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from plait.core.step.orders.climb import MOVES, VISITS, OrderEvaluator, climb
from plait.core.step.orders.overlap import check, domino_order, insert_waits
from plait.core.step.orders.segment_costs import Durations, NumberedOps, SegmentCosts
from plait.core.step.segments import SegmentGraph, needs_table
from tests.support.lists import makespan, timed

graphs = st.builds(
    SegmentGraph,
    num_layers=st.integers(1, 3),
    p1=st.integers(1, 3),
    sequence_parallel=st.booleans(),
    heads=st.booleans(),
    phase=st.sampled_from(("step", "F", "B", "I", "W")),
    recompute=st.sampled_from(("none", "full")),
)


def costs(ratio: float) -> SegmentCosts:
    """What a layer of a GPT computes, in proportion, and collectives of ``ratio`` times all
    that."""
    mlp, attention = {"F": 4, "R": 4, "D": 4, "C": 4, "W": 8}, {"F": 4, "R": 1, "D": 3, "C": 3, "W": 4}
    compute = {
        f"{site}.{kind}": float(each)
        for site, kinds in (("mlp", mlp), ("attn", attention))
        for kind, each in kinds.items()
    }
    each = ratio * sum(compute.values()) / 4
    return SegmentCosts(compute, {f"{site}.{kind}": each for site in ("attn", "mlp") for kind in "RC"})


def any_order(graph: SegmentGraph, chance: random.Random) -> list[int]:
    """Numbers of all ops, drawn among those that could be next."""
    ops, table = graph.ops(), needs_table(graph)
    order, left = [], list(range(len(ops)))
    while left:
        done = {ops[i] for i in order}
        order.append(chance.choice([i for i in left if all(need.op in done for need in table[ops[i]])]))
        left.remove(order[-1])
    return order


def held_back(graph: SegmentGraph, order: list[int]) -> int:
    """Weight gradients whose operands are there, at most."""
    ops, table, done, most = graph.ops(), needs_table(graph), set(), 0
    for i in order:
        done.add(ops[i])
        waiting = [op for op in ops if op.kind == "W" and op not in done]
        ready = [
            op
            for op in waiting
            if (sources := [n.op for n in table[op] if n.op.kind != "W"]) and all(s in done for s in sources)
        ]
        most = max(most, len(ready))
    return most


@given(graphs, st.floats(0.2, 2), st.randoms(use_true_random=False))
def test_moves_keep_an_order_legal_and_make_it_no_longer(
    graph: SegmentGraph, ratio: float, chance: random.Random
) -> None:
    cost, start = costs(ratio), any_order(graph, chance)
    judge = OrderEvaluator(NumberedOps(graph), [cost], 6, held_back=2)
    moved = judge.improve(start)
    actions, before = (insert_waits(graph, [judge.numbered.ops[i] for i in order]) for order in (moved, start))
    check(graph, actions)
    assert judge.seconds(moved) == pytest.approx(makespan(timed(graph, actions, cost, 6)))
    assert makespan(timed(graph, actions, cost, 6)) <= makespan(timed(graph, before, cost, 6)) + 1e-9
    assert held_back(graph, moved) <= max(2, held_back(graph, start))
    assert judge.improve(start) == moved


def moved_with_all_timed(judge: OrderEvaluator, order: Sequence[int]) -> list[int]:
    """As ``improve``, with every moved order timed from its beginning to its end."""
    most = max(judge.held_back, judge.most_outstanding(order))

    def worth(moved: Sequence[int], limit: float, _: range) -> float:
        seconds = judge.seconds(moved)
        return seconds if seconds <= limit and judge.most_outstanding(moved) <= most else inf

    before = [frozenset(source for source, _ in needs) for needs in judge.numbered.needs]
    return climb(order, before, worth, min(MOVES, VISITS // max(1, len(order))), judge.enough)


many = st.builds(
    SegmentGraph,
    num_layers=st.integers(2, 8),
    p1=st.integers(1, 4),
    p2=st.integers(1, 2),
    sequence_parallel=st.booleans(),
    phase=st.sampled_from(("step", "F", "B", "I")),
    recompute=st.sampled_from(("none", "selective", "full")),
)


@settings(max_examples=25)
@given(many, st.floats(0.2, 2), st.booleans(), st.randoms(use_true_random=False))
def test_what_a_move_changes_is_enough_to_be_timed(
    graph: SegmentGraph, ratio: float, drawn: bool, chance: random.Random
) -> None:
    judge = OrderEvaluator(NumberedOps(graph), [costs(ratio), costs(ratio).late(1.1)], 8, held_back=4)
    start = any_order(graph, chance) if drawn else list(range(len(judge.numbered.ops)))
    assert judge.improve(start) == moved_with_all_timed(judge, start)


@given(many, st.floats(0.2, 2), st.randoms(use_true_random=False))
def test_no_order_is_worth_less_than_the_least(graph: SegmentGraph, ratio: float, chance: random.Random) -> None:
    judge = OrderEvaluator(NumberedOps(graph), [costs(ratio), costs(ratio).late(1.1)], 8, held_back=4)
    assert judge.least >= judge.bound * (1 - 1e-12)
    for order in (any_order(graph, chance), list(range(len(judge.numbered.ops)))):
        assert judge.seconds(order) >= judge.least * (1 - 1e-12)
        assert judge.seconds(judge.improve(order)) >= judge.least * (1 - 1e-12)


def shortest(graph: SegmentGraph, cost: SegmentCosts) -> float:
    """Seconds of the shortest order, by CP-SAT."""
    durations, table, model = Durations(graph, cost, 2), needs_table(graph), cp_model.CpModel()
    scale, horizon = 100, 100_000
    lanes: tuple[list, list] = [], []
    starts, ends, arrivals = {}, {}, {}
    for op in graph.ops():
        for lane, seconds, stored in ((0, durations.compute(op), ends), (1, durations.collective(op), arrivals)):
            if lane and not graph.collective(op):
                continue
            start, length = model.new_int_var(0, horizon, ""), round(seconds * scale)
            lanes[lane].append(model.new_fixed_size_interval_var(start, length, ""))
            stored[op] = start + length
            if lane:
                model.add(start >= ends[op])
            else:
                starts[op] = start
    for op, needs in table.items():
        for need in needs:
            model.add(starts[op] >= (arrivals if need.collective else ends)[need.op])
    end = model.new_int_var(0, horizon, "")
    for lane in lanes:
        model.add_no_overlap(lane)
    for each in [*ends.values(), *arrivals.values()]:
        model.add(end >= each)
    model.minimize(end)
    solver = cp_model.CpSolver()
    assert solver.solve(model) == cp_model.OPTIMAL
    return solver.objective_value / scale


@pytest.mark.parametrize("ratio", [0.5, 0.8, 0.9, 1.0, 1.1, 1.3])
def test_slices_come_near_the_shortest_order(ratio: float) -> None:
    graph, cost = SegmentGraph(num_layers=2, p1=2), costs(ratio)
    found = makespan(timed(graph, domino_order(graph, cost, 2), cost, 2))
    assert found <= shortest(graph, cost) * 1.06  # 1.08 without moves


@pytest.mark.parametrize("ratio", [0.2, 1.0, 3.0])
def test_of_a_lone_slice_going_forward_the_least_is_what_it_takes(ratio: float) -> None:
    """There is one order, and nothing to hide behind."""
    for layers in (1, 3):
        graph = SegmentGraph(num_layers=layers, phase="F")
        judge = OrderEvaluator(NumberedOps(graph), [costs(ratio), costs(ratio).late(1.1)], 6, held_back=2)
        order = list(range(len(judge.numbered.ops)))
        assert judge.least == pytest.approx(judge.seconds(order))
        assert judge.as_good_as_any(order)
        assert judge.bound < judge.least


def test_backward_the_last_weight_gradient_comes_after_all_that_it_needs() -> None:
    graph = SegmentGraph(num_layers=1, phase="B", heads=False)
    cost = SegmentCosts({"mlp.D": 1.0, "mlp.C": 2.0, "mlp.W": 4.0, "attn.D": 8.0, "attn.C": 16.0, "attn.W": 32.0},
                        {"mlp.C": 64.0, "attn.C": 128.0})  # fmt: skip
    judge = OrderEvaluator(NumberedOps(graph), [cost], 1, held_back=9)
    assert judge.least == 1 + 2 + 64 + 8 + 16 + 128  # the last collective; weight gradients run beside
    quick = OrderEvaluator(NumberedOps(graph), [replace(cost, collective={"mlp.C": 64.0})], 1, held_back=9)
    assert quick.least == 1 + 2 + 64 + 8 + 16 + 32  # the last weight gradient
