from __future__ import annotations

import hashlib
import random
from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import ScheduleError
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Overlap, Strategy
from plait.core.record.records import CP_KINDS
from plait.core.step.attention_ops import SharedAttention
from plait.core.step.ops import SENDS, send_of
from plait.core.step.orders.overlap import (
    async_order,
    check,
    domino_order,
    insert_waits,
    parse,
    segment_order,
    sync_order,
)
from plait.core.step.orders.segment_costs import SegmentCosts
from plait.core.step.segments import Action, Kind, Phase, SegmentGraph, SegmentOp, needs_table
from plait.core.step.stages import Stage
from tests.support.lists import makespan, timed

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
    recompute=st.sampled_from(("none", "selective", "full", "layer")),
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
    orders: tuple[Overlap, ...] = ("sync", "async", "domino", "no-communication")
    for overlap in orders:
        actions = segment_order(graph, overlap, cost, batch=6)
        check(graph, actions)
        assert parse(" ".join(map(str, actions))) == actions


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
    placed = timed(graph, domino_order(graph, cost, 6), cost, 6)
    for verbs in (("run", "wait"), ("start",)):
        lane = [p for p in placed if p.action.verb in verbs]
        assert all(a.end <= b.start for a, b in pairwise(lane))
    assert makespan(placed) >= sum(p.end - p.start for p in placed if p.action.verb == "run") - 1e-9


def test_recomputation_hides_the_collective_of_the_segment_behind() -> None:
    graph = SegmentGraph(num_layers=4, recompute="full")
    costs = SegmentCosts(EVEN.compute | {"attn.A": 1.0, "mlp.A": 1.0}, EVEN.collective)
    sync, hidden = (timed(graph, order, costs, 8) for order in (sync_order(graph), domino_order(graph, costs, 8)))
    # Of the 16 collectives of one slice, the eight of the backward have the segment before them to compute
    # again meanwhile.
    assert makespan(hidden) <= makespan(sync) - 7


def test_slices_hide_what_one_slice_cannot() -> None:
    one, two = (SegmentGraph(num_layers=4, p1=p1) for p1 in (1, 2))
    times = {
        "sync": makespan(timed(one, sync_order(one), EVEN, 8)),
        "async": makespan(timed(one, async_order(one), EVEN, 8)),
        "domino": makespan(timed(two, domino_order(two, EVEN, 8), EVEN, 8)),
    }
    assert times["domino"] < times["async"] < times["sync"]


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda a: a[1:], "embed.R0 before|runs before embed.R0|is listed before its op"),
        (lambda a: [*a, a[0]], "occurs twice"),
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


@pytest.mark.parametrize("word", ["attn.F0", "embed3.R0", "attn3.b0", "=attn3.F0", "attn3.F", "attn3.F0."])
def test_what_is_no_action_is_refused(word: str) -> None:
    with pytest.raises(ScheduleError, match="is not a segment action"):
        parse(f"embed.R0 {word}")


def test_what_goes_over_the_ranks_that_share_a_sequence_is_recorded_as_theirs() -> None:
    kinds = [kind for send in SENDS if send.axis in ("ulysses", "ring") for kind in send.kinds]
    assert sorted(kinds) == sorted(CP_KINDS)
    assert (
        send_of("embed", Kind("R")).axis == "rows"
        and send_of("attn", Kind("R")).axis == send_of("head", Kind("F")).axis == "tp"
    )
    with pytest.raises(KeyError, match=r"attn\.W sends nothing"):
        send_of("attn", Kind("W"))
    with pytest.raises(KeyError, match=r"mlp\.F sends nothing"):
        send_of("mlp", Kind("F"))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("cp", [1, 4])
def test_what_crosses_the_network_inside_a_stage(tp: int, cp: int) -> None:
    model = ModelSpec(family="gpt", num_layers=2, hidden=32, num_heads=8, vocab=8, max_sequence=8)
    graph = SegmentGraph.of(model, Strategy(tp=tp, cp=cp, ring=1), Stage(0, 1, 0, 2))
    assert (graph.communicates, graph.sends) == (tp > 1, tp > 1 or cp > 1)
    assert graph.attention == (SharedAttention(4, 1) if cp > 1 else None)
    assert graph.shared("mlp") is None
    assert graph.shared("attn") == graph.shared("block") == graph.attention


def test_an_op_that_runs_before_what_it_needs_is_named() -> None:
    graph = SegmentGraph(num_layers=1, communicates=False, phase="F")
    first, second, *others = sync_order(graph)
    with pytest.raises(ScheduleError, match=f"{second.op} runs before {first.op}, which it needs"):
        check(graph, [second, first, *others])


@pytest.mark.parametrize(("left", "says"), [(("run", "start"), "awaited"), (("run",), "started")])
def test_a_collective_that_is_not_awaited_is_named(left: tuple[str, ...], says: str) -> None:
    graph = SegmentGraph(num_layers=1, phase="I", sequence_parallel=True)  # whose last result phase W reads
    actions = sync_order(graph)
    last = next(op for verb, op in reversed(actions) if verb == "wait")
    with pytest.raises(ScheduleError, match=f"the collective of {last} is never {says}"):
        check(graph, [action for action in actions if action.op != last or action.verb in left])
    with pytest.raises(ScheduleError, match=f"<{last} is listed before its start"):
        check(graph, [action for action in actions if action.op != last or action.verb != "start"])
    with pytest.raises(ScheduleError, match=f">{last} is listed before its op"):
        check(graph, [Action("start", last), *actions])


def told(graph: SegmentGraph) -> str:
    """Every op, what it sends, and what it needs: ``*`` with its collective."""
    return "\n".join(
        f"{op}{{{(graph.collective(op) or '')}}} " + " ".join(f"{need.op}{'*' * need.collective}" for need in needs)
        for op, needs in needs_table(graph).items()
    )


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence": {"sequence_parallel": True},
    "full": {"recompute": "full", "recomputed": 1},
    "layer": {"recompute": "layer", "recomputed": 2},
    "flat layer": {"recompute": "layer", "sequence_parallel": True},
    "selective": {"recompute": "selective", "sequence_parallel": True},
    "selective too": {"recompute": "selective"},
    "columns": {"p2": 2},
    "alone": {"communicates": False},
    "forward": {"backward": False, "phase": "F"},
    "middle": {"embeds": False, "heads": False, "first_layer": 2, "sequence_parallel": True},
    "block": {"parallel_block": True, "recompute": "full", "sequence_parallel": True},
    "u": {"resampling": ((1, "down", 0), (2, "up", 0)), "recompute": "selective"},
    "u too": {"resampling": ((1, "down", 0), (2, "up", 0)), "recompute": "full"},
    "ulysses": {"attention": SharedAttention(2, 1), "recompute": "full"},
    "ulysses, one stream": {"attention": SharedAttention(2, 1), "recompute": "layer"},
    "both, one stream": {"attention": SharedAttention(2, 2), "recompute": "layer"},
    "ring": {"attention": SharedAttention(1, 3), "recompute": "selective"},
    "both": {"attention": SharedAttention(2, 2), "recompute": "full", "parallel_block": True},
    "both again": {"attention": SharedAttention(2, 2), "recompute": "full", "recomputed": 1, "communicates": False},
}
GRAPHS = {
    "plain": "a5134e917ae1", "sequence": "be6bee6d6cc0", "full": "19621c3372d8",
    "selective": "583e393fac78", "selective too": "c1c580eda0fa", "columns": "b64651d2e1e0",
    "alone": "f61dd027f2aa", "forward": "5a52a887f5ac", "middle": "cff5f7fb3f29",
    "block": "427d12a025e6", "u": "daddf7e6ace9", "u too": "5a416b2b8715",
    "ulysses": "df9e4703553c", "ring": "12fef3221741", "both": "14cbfdc2fcfb",
    "both again": "2f6ffed56a71", "layer": "a5ee0f05bfe0", "flat layer": "3384445fa688",
    "ulysses, one stream": "5066ac796eb8", "both, one stream": "a24dd2125a41",
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_graphs_are_what_they_have_always_been(name: str) -> None:
    """In every phase."""
    graphs = [SegmentGraph(**{"num_layers": 2, "phase": phase, "p1": 2} | KINDS[name]) for phase in get_args(Phase)]
    text = "\n\n".join(map(told, graphs))
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == GRAPHS[name]


def test_a_last_stage_has_no_embedding_to_wait_for() -> None:
    first = {
        need.op
        for need in needs_table(SegmentGraph(num_layers=1, p1=2))[SegmentOp("head", 0, Kind.COLUMN_FORWARD, 0, 0)]
    }
    last = needs_table(SegmentGraph(num_layers=1, p1=2, embeds=False))
    assert SegmentOp("embed", 0, Kind.ROW_FORWARD, 1, 0) in first
    assert {need.op for need in last[SegmentOp("head", 0, Kind.COLUMN_FORWARD, 0, 0)]} == {
        SegmentOp("head", 0, Kind.NORM, 0, 0)
    }
    assert all(need.op in last for needs in last.values() for need in needs)
