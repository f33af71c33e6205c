from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.attention_ops import SharedAttention
from plait.core.errors import ScheduleError
from plait.core.overlap import domino_order, segment_order
from plait.core.segment_costs import SegmentCosts, makespan, simulate
from plait.core.segment_lists import async_order, check, format_actions, insert_waits, parse, sync_order
from plait.core.segments import Action, SegmentGraph, needs_table

graphs = st.builds(
    SegmentGraph,
    num_layers=st.integers(1, 3),
    p1=st.integers(1, 3),
    p2=st.integers(1, 3),
    sequence_parallel=st.booleans(),
    communicates=st.booleans(),
    backward=st.booleans(),
    first_layer=st.integers(0, 2),
    embeds=st.booleans(),
    heads=st.booleans(),
    phase=st.sampled_from(("step", "F", "B", "I", "W")),
    resampling=st.sampled_from(((), ((1, "down", 0), (2, "up", 0)))),
    recompute=st.sampled_from(("none", "selective", "full")),
    recomputed=st.sampled_from((None, 0, 1)),
    parallel_block=st.booleans(),
    attention=st.sampled_from((None, *(SharedAttention(*each) for each in ((2, 1), (1, 2), (2, 2), (1, 4))))),
)
seconds = st.floats(0, 1)
costs = st.builds(
    lambda *c: SegmentCosts(
        {f"{site}.{kind}": c[0] for site in ("attn", "mlp") for kind in "FKRDGCW"},
        {f"{site}.{kind}": c[1] for site in ("attn", "mlp") for kind in "FTKRDSGHEC"},
        c[2],
    ),
    seconds, seconds, seconds,
)  # fmt: skip
EVEN = SegmentCosts(
    {f"{site}.{kind}": 1.0 for site in ("attn", "mlp") for kind in "FRDCW"},
    {f"{site}.{kind}": 1.0 for site in ("attn", "mlp") for kind in "RC"},
)


@given(graphs, costs)
def test_every_order_is_legal_and_round_trips_as_text(graph: SegmentGraph, cost: SegmentCosts) -> None:
    for overlap in ("sync", "async", "domino", "none"):
        actions = segment_order(graph, overlap, cost, batch=6)
        check(graph, actions)
        assert parse(format_actions(actions)) == actions


@given(graphs, st.randoms(use_true_random=False))
def test_any_order_that_respects_the_needs_becomes_legal_actions(graph: SegmentGraph, chance: random.Random) -> None:
    table = needs_table(graph)
    order, left = [], list(table)
    while left:
        ready = [op for op in left if all(need.op in order for need in table[op])]
        order.append(chance.choice(ready))
        left.remove(order[-1])
    check(graph, insert_waits(graph, order))


@given(graphs, costs)
def test_the_simulator_never_overlaps_one_resource_with_itself(graph: SegmentGraph, cost: SegmentCosts) -> None:
    placed = simulate(graph, domino_order(graph, cost, 6), cost, 6)
    for verbs in (("run", "wait"), ("start",)):
        lane = [p for p in placed if p.action.verb in verbs]
        assert all(a.end <= b.start for a, b in pairwise(lane))
    assert makespan(placed) >= sum(p.end - p.start for p in placed if p.action.verb == "run") - 1e-9


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_repeats_no_reduction(recompute: str) -> None:
    for sequence_parallel in (False, True):
        kept, again = (
            SegmentGraph(num_layers=3, sequence_parallel=sequence_parallel, recompute=kind)  # type: ignore[arg-type]
            for kind in ("none", recompute)
        )
        sent = [[graph.collective(op) for op in graph.ops() if graph.collective(op)] for graph in (kept, again)]
        regathered = (
            6 if sequence_parallel and recompute == "full" else 0
        )  # the normalised input of every attention and MLP
        assert sent[1].count("all_gather") == sent[0].count("all_gather") + regathered
        assert [kind for kind in sent[1] if kind != "all_gather"] == [kind for kind in sent[0] if kind != "all_gather"]


def test_recomputation_hides_the_collective_of_the_segment_behind() -> None:
    graph = SegmentGraph(num_layers=4, recompute="full")
    costs = SegmentCosts(EVEN.compute | {"attn.A": 1.0, "mlp.A": 1.0}, EVEN.collective)
    sync, hidden = (simulate(graph, order, costs, 8) for order in (sync_order(graph), domino_order(graph, costs, 8)))
    # Of the 16 collectives of one slice, the eight of the backward have the segment before them to compute
    # again meanwhile.
    assert makespan(hidden) <= makespan(sync) - 7


def test_slices_hide_what_one_slice_cannot() -> None:
    one, two = (SegmentGraph(num_layers=4, p1=p1) for p1 in (1, 2))
    times = {
        "sync": makespan(simulate(one, sync_order(one), EVEN, 8)),
        "async": makespan(simulate(one, async_order(one), EVEN, 8)),
        "domino": makespan(simulate(two, domino_order(two, EVEN, 8), EVEN, 8)),
    }
    assert times["domino"] < times["async"] < times["sync"]


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda a: a[1:], "embed.R0 before|runs before embed.R0|stands before the op"),
        (lambda a: [*a, a[0]], "stands twice"),
        (lambda a: [x for x in a if x.verb != "wait"], "before its collective is awaited"),
        (lambda a: a[:-1], "never"),
        (lambda a: [Action("run", a[0].op._replace(slice=7)), *a], "does not exist"),
        (lambda a: [Action("start", next(x.op for x in a if x.op.kind == "W")), *a], "has no collective"),
    ],
)
def test_a_broken_list_is_refused(break_it, words: str) -> None:
    graph = SegmentGraph(num_layers=1, p1=2)
    with pytest.raises(ScheduleError, match=words):
        check(graph, break_it(sync_order(graph)))


@pytest.mark.parametrize("word", ["attn.F0", "embed3.R0", "attn3.Q0", "=attn3.F0", "attn3.F", "attn3.F0."])
def test_what_is_no_action_is_refused(word: str) -> None:
    with pytest.raises(ScheduleError, match="is not a segment action"):
        parse(f"embed.R0 {word}")


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 1), (1, 2), (2, 2), (1, 4)])
def test_attention_that_is_shared_hides_its_collectives_behind_other_slices(ulysses: int, ring: int) -> None:
    shared = SharedAttention(ulysses, ring)
    one, two = (SegmentGraph(num_layers=4, p1=p1, communicates=False, attention=shared) for p1 in (1, 2))
    compute = {f"{site}.{kind}": 1.0 for site in ("attn", "mlp") for kind in "FKRDGCW"}
    costs = SegmentCosts(compute, {f"attn.{kind}": 0.5 for kind in "FTKDSGHE"})
    exposed = [
        sum(placed.end - placed.start for placed in simulate(graph, order, costs, 8) if placed.action.verb == "wait")
        for graph, order in ((one, sync_order(one)), (two, domino_order(two, costs, 8)))
    ]
    assert exposed[1] < 0.25 * exposed[0]


def test_no_more_than_two_blocks_of_a_ring_are_there_beside_the_own() -> None:
    graph = SegmentGraph(num_layers=1, p1=2, communicates=False, attention=SharedAttention(1, 8))
    costs = SegmentCosts({"attn.K": 1.0, "attn.G": 2.0, "mlp.W": 5.0}, {"attn.T": 0.1, "attn.S": 0.1, "attn.H": 0.1})
    for rotation, kernel, most in (("T", "K", 1), ("S", "G", 2)):  # the own block is done first; last
        for number in range(2):
            sent = done = 0
            for verb, op in domino_order(graph, costs, 8):
                if op.slice != number or op.site != "attn" or verb == "wait":
                    continue
                sent += op.kind == rotation and verb == "start"
                done += op.kind == kernel and verb == "run"
                assert sent - done <= most
            assert sent == 7 and done == 8
