from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import ScheduleError
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Overlap, Strategy
from plait.core.record.records import EXCHANGED
from plait.core.step.attention_ops import SharedAttention
from plait.core.step.ops import SENDS, send_of
from plait.core.step.orders.overlap import domino_order, segment_order
from plait.core.step.orders.segment_lists import async_order, check, insert_waits, parse, sync_order
from plait.core.step.seconds.segment_costs import SegmentCosts
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


@pytest.mark.parametrize("p2", [1, 2])
def test_a_layer_that_keeps_one_stream_repeats_one_reduction(p2: int) -> None:
    """Attention's; not where attention and MLP have one."""
    for sequence_parallel, reduction in ((False, "all_reduce"), (True, "reduce_scatter")):
        told = {"num_layers": 3, "sequence_parallel": sequence_parallel, "p2": p2}
        for recomputed, block, repeated in ((None, False, 3 * p2), (1, False, p2), (None, True, 0)):
            sent = [
                [graph.collective(op) for op in graph.ops()].count(reduction)
                for kind in ("full", "layer")
                for graph in [SegmentGraph(**told, recompute=kind, recomputed=recomputed, parallel_block=block)]  # type: ignore[arg-type]
            ]
            assert sent[1] - sent[0] == repeated


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


@pytest.mark.parametrize(
    ("recomputed", "again"),
    [(None, ["MA", "MA", "MA"]), (3, ["MA", "MA", "MA"]), (1, ["MA", "", ""]), (0, ["", "", ""])],
)
def test_so_many_first_layers_of_a_stage_are_computed_again(recomputed: int | None, again: list[str]) -> None:
    graph = SegmentGraph(num_layers=3, first_layer=4, recompute="full", recomputed=recomputed)
    assert graph.last_layer == 6
    assert ["".join(graph.again("mlp", layer)) for layer in (4, 5, 6)] == again
    assert graph.again("head", 0) == ()
    assert replace(graph, backward=False).again("mlp", 4) == ()


def test_what_goes_over_the_ranks_that_share_a_sequence_is_recorded_as_theirs() -> None:
    kinds = [kind for send in SENDS if send.axis in ("ulysses", "ring") for kind in send.kinds]
    assert sorted(kinds) == sorted(EXCHANGED)
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
    with pytest.raises(ScheduleError, match=f"<{last} stands before its start"):
        check(graph, [action for action in actions if action.op != last or action.verb != "start"])
    with pytest.raises(ScheduleError, match=f">{last} stands before the op"):
        check(graph, [Action("start", last), *actions])


def told(graph: SegmentGraph) -> str:
    """Every op, what it sends, and what it needs: ``*`` with its collective."""
    return "\n".join(
        f"{op}{{{(graph.collective(op) or '')}}} " + " ".join(f"{need.op}{'*' * need.collective}" for need in needs)
        for op, needs in needs_table(graph).items()
    )


def test_the_graph_of_a_layer_that_is_computed_again_with_its_sequence_cut() -> None:
    graph = SegmentGraph(num_layers=1, sequence_parallel=True, recompute="full")
    assert [line.rstrip() for line in told(graph).splitlines()] == [
        "embed.R0{all_gather}", "attn0.N0{all_gather} embed.R0*", "attn0.F0{} attn0.N0*",
        "attn0.R0{reduce_scatter} attn0.F0", "mlp0.N0{all_gather} attn0.R0*", "mlp0.F0{} mlp0.N0*",
        "mlp0.R0{reduce_scatter} mlp0.F0", "head.N0{all_gather} mlp0.R0*", "head.F0{all_gather} head.N0* embed.R0",
        "head.L0{} head.F0*", "head.C0{reduce_scatter} head.L0", "head.W0{} head.L0", "head.J0{all_gather} head.C0*",
        "mlp0.M0{all_gather} head.L0", "mlp0.A0{} mlp0.M0* head.L0", "mlp0.D0{} mlp0.M0* mlp0.A0 head.J0*",
        "mlp0.C0{reduce_scatter} mlp0.D0", "mlp0.W0{} mlp0.D0", "mlp0.W0.1{} mlp0.D0", "mlp0.J0{all_gather} mlp0.C0*",
        "attn0.M0{all_gather} mlp0.D0", "attn0.A0{} attn0.M0* mlp0.D0", "attn0.D0{} attn0.M0* attn0.A0 mlp0.J0*",
        "attn0.C0{reduce_scatter} attn0.D0", "attn0.W0{} attn0.D0", "attn0.W0.1{} attn0.D0",
        "attn0.J0{all_gather} attn0.C0*", "embed.W0{} attn0.J0* head.W0",
    ]  # fmt: skip


def test_the_graph_of_a_parallel_block_in_the_middle_of_a_pipeline() -> None:
    graph = SegmentGraph(num_layers=1, first_layer=3, p2=2, parallel_block=True, embeds=False, heads=False)
    assert [line.rstrip() for line in told(graph).splitlines()] == [
        "block3.N0{}", "block3.F0{} block3.N0", "block3.R0{all_reduce} block3.F0",
        "block3.R0.1{all_reduce} block3.F0 block3.R0",
        "leave.N0{} block3.R0* block3.R0.1*", "leave.J0{}", "block3.D0{} leave.J0", "block3.C0{all_reduce} block3.D0",
        "block3.C0.1{all_reduce} block3.D0 block3.C0", "block3.W0{} block3.D0", "block3.W0.1{} block3.D0",
        "block3.W0.2{} block3.D0", "block3.W0.3{} block3.D0", "block3.J0{} block3.C0* block3.C0.1*",
    ]  # fmt: skip


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


def test_what_an_overlap_is_asked_for_is_made() -> None:
    graph = SegmentGraph(num_layers=2, p1=2)
    assert segment_order(graph, "sync", EVEN, 8) == sync_order(graph)
    assert segment_order(graph, "async", EVEN, 8) == async_order(graph)
    assert segment_order(graph, "domino", EVEN, 8) == domino_order(graph, EVEN, 8)
    assert len({tuple(segment_order(graph, kind, EVEN, 8)) for kind in ("sync", "async", "domino")}) == 3
    silent = replace(graph, communicates=False)
    for kind in ("sync", "async", "domino"):
        assert segment_order(silent, kind, EVEN, 8) == sync_order(silent)


def test_a_last_stage_has_no_embedding_to_wait_for() -> None:
    first = {need.op for need in needs_table(SegmentGraph(num_layers=1, p1=2))[SegmentOp("head", 0, Kind.FIRST, 0, 0)]}
    last = needs_table(SegmentGraph(num_layers=1, p1=2, embeds=False))
    assert SegmentOp("embed", 0, Kind.SECOND, 1, 0) in first
    assert {need.op for need in last[SegmentOp("head", 0, Kind.FIRST, 0, 0)]} == {SegmentOp("head", 0, Kind.NORM, 0, 0)}
    assert all(need.op in last for needs in last.values() for need in needs)
