"""Words are found where they stand; moved words are legal orders, no longer, and hold back no
more."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.step.orders import climb as module
from plait.core.step.orders.climb import TIMES, OrderEvaluator, Run, improve_words, runs
from plait.core.step.orders.overlap import check, insert_waits
from plait.core.step.orders.segment_costs import NumberedOps
from plait.core.step.orders.streams import POLICIES, ListClock, ListScheduler, Policy
from plait.core.step.segments import SegmentGraph
from tests.core.step.orders.test_climb import costs

deep = st.builds(
    SegmentGraph,
    num_layers=st.integers(8, 20),
    p1=st.integers(1, 4),
    p2=st.integers(1, 2),
    sequence_parallel=st.booleans(),
    first_layer=st.integers(0, 2),
    embeds=st.booleans(),
    heads=st.booleans(),
    phase=st.sampled_from(("step", "F", "B", "I", "W")),
    resampling=st.sampled_from(((), ((4, "down", 0), (8, "up", 0)))),
    recompute=st.sampled_from(("none", "selective", "full")),
    recomputed=st.sampled_from((None, 0, 5)),
    parallel_block=st.booleans(),
)


@given(
    st.lists(st.integers(0, 3), max_size=9), st.lists(st.integers(4, 9), min_size=1, max_size=12, unique=True),
    st.integers(TIMES, 30), st.lists(st.integers(0, 3), max_size=9),
)  # fmt: skip
def test_a_word_is_found_between_what_is_not_repeated(
    head: list[int], word: list[int], times: int, tail: list[int]
) -> None:
    found = runs(head + word * times + tail)
    assert Run(len(head), len(word), times) in found
    ends = [(run.start, run.start + run.period * run.times) for run in found]
    assert all(a[1] <= b[0] for a, b in pairwise(ends))


def test_what_is_hardly_repeated_is_no_word() -> None:
    assert runs([1, 2, 3] * (TIMES - 1)) == []


@settings(max_examples=40)
@given(deep, st.floats(0.2, 2), st.sampled_from(POLICIES))
def test_moved_words_are_legal_no_longer_and_hold_back_no_more(
    graph: SegmentGraph, ratio: float, policy: Policy
) -> None:
    numbered, cost = NumberedOps(graph), costs(ratio)
    judge = OrderEvaluator(numbered, [cost], 8, held_back=8)
    order = ListScheduler(numbered, ListClock(numbered, *numbered.seconds(cost, 8)), 8).order(policy)
    moved = improve_words(judge, order)
    check(graph, insert_waits(graph, [numbered.ops[i] for i in moved]))
    assert judge.seconds(moved) <= judge.seconds(order)
    assert judge.most_outstanding(moved) <= max(8, judge.most_outstanding(order))
    assert improve_words(judge, order) == moved


def test_no_word_is_moved_where_nothing_may_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = SegmentGraph(num_layers=12, p1=3)
    numbered, cost = NumberedOps(graph), costs(0.8)
    judge = OrderEvaluator(numbered, [cost], 8, held_back=8)
    order = ListScheduler(numbered, ListClock(numbered, *numbered.seconds(cost, 8)), 8).order(POLICIES[8])
    assert judge.seconds(improve_words(judge, order)) < judge.seconds(order)
    monkeypatch.setattr(module, "ALL_VISITS", 0)
    assert improve_words(judge, order) == order
