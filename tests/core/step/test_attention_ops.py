"""Attention that is shared by ranks, in ops: parts, needs, what travels, what is hidden."""

from __future__ import annotations

import pytest

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.attention_ops import SharedAttention
from plait.core.step.ops import exchanged, parts_of
from plait.core.step.orders.overlap import domino_order
from plait.core.step.orders.segment_lists import async_order, check, sync_order
from plait.core.step.seconds.segment_costs import SegmentCosts
from plait.core.step.segments import Action, Kind, SegmentGraph
from tests.support.lists import timed


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 1), (1, 2), (2, 2), (1, 4)])
def test_attention_that_is_shared_hides_its_collectives_behind_other_slices(ulysses: int, ring: int) -> None:
    shared = SharedAttention(ulysses, ring)
    one, two = (SegmentGraph(num_layers=4, p1=p1, communicates=False, attention=shared) for p1 in (1, 2))
    compute = {f"{site}.{kind}": 1.0 for site in ("attn", "mlp") for kind in "FKRDGCW"}
    costs = SegmentCosts(compute, {f"attn.{kind}": 0.5 for kind in "FTKDSGHE"})
    exposed = [
        sum(placed.end - placed.start for placed in timed(graph, order, costs, 8) if placed.action.verb == "wait")
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


@pytest.mark.parametrize(
    ("ulysses", "ring", "forward", "backward", "parts", "sends"),
    [
        (2, 1, "FK", "DGZ", {"K": 1, "G": 1, "D": 1}, {"K": 1, "G": 1, "D": 1}),
        (1, 3, "FTK", "DSGHZ", {"K": 3, "G": 3, "T": 2, "S": 2, "H": 2, "D": 1}, {"K": 1, "G": 1, "T": 2, "H": 2}),
        (2, 3, "FTK", "DSGHEZ", {"K": 3, "T": 2, "E": 1}, {"K": 1, "S": 2, "E": 1}),
    ],
)
def test_attention_that_is_shared_in_ops(
    ulysses: int, ring: int, forward: str, backward: str, parts: dict[str, int], sends: dict[str, int]
) -> None:
    shared = SharedAttention(ulysses, ring)
    assert ("".join(shared.forward), "".join(shared.backward)) == (forward, backward)
    assert {kind: parts_of("attn", Kind(kind), p2=2, flat=0, ring=ring) for kind in parts} == parts
    graph = SegmentGraph(num_layers=1, p2=2, attention=shared)
    assert {kind: graph.parts("attn", Kind(kind)) for kind in parts} == parts
    assert {kind: graph.parts("mlp", Kind(kind)) for kind in "KGD"} == {"K": 1, "G": 1, "D": 1}
    assert {kind: shared.sends(Kind(kind)) for kind in sends} == sends


@pytest.mark.parametrize(
    ("kind", "part", "again", "several", "alone"),
    [
        ("F", 0, False, "all_to_all", "all_to_all"),
        ("A", 0, False, None, None),
        ("A", 0, True, "all_to_all", "all_to_all"),
        ("K", 0, False, None, "all_to_all"),
        ("K", 2, False, "all_to_all", None),
        ("G", 0, False, None, "all_to_all"),
        ("D", 0, False, "all_to_all", "all_to_all"),
        ("W", 0, False, None, None),
        ("T", 0, False, "rotate", "rotate"),
    ],
)
def test_what_travels_after_an_op_of_attention(
    kind: str, part: int, again: bool, several: str | None, alone: str | None
) -> None:
    """several: in rings of three, each of two ranks that exchange heads; alone: without a ring."""
    assert SharedAttention(2, 3).collective(Kind(kind), part, again=again) == several
    assert SharedAttention(2, 1).collective(Kind(kind), part, again=again) == alone
    assert SharedAttention(1, 3).collective(Kind(kind), part, again=again) == ("rotate" if kind in "TSH" else None)


def test_bytes_that_attention_exchanges() -> None:
    model = ModelSpec(
        family="llama", num_layers=1, hidden=32, num_heads=8, num_kv_heads=2, ffn_hidden=8, vocab=8, max_sequence=8
    )
    for strategy, kept in (
        (Strategy(tp=2, cp=2), 2), (Strategy(tp=1, cp=2), 2), (Strategy(tp=1, cp=8, ring=4), 2), (Strategy(tp=4), 1),
    ):  # fmt: skip
        heads, size = 8 // strategy.tp, 10 * model.head_size
        assert exchanged(model.letters, 10, tp=strategy.tp, ulysses=strategy.cp // strategy.ring) == (
            size * (heads + 2 * kept),
            size * heads,
            2 * size * kept,
        )


@pytest.mark.parametrize(
    ("op", "needs"),
    [
        (("T", 0), [("F", 0, True)]), (("T", 1), [("T", 0, True), ("K", 0, False)]),
        (("K", 0), [("T", 0, False)]), (("K", 2), [("T", 1, True), ("K", 1, False)]),
        (("R", 0), [("K", 2, True)]), (("X", 0), [("A", 0, True)]), (("D", 0), [("X", 0, True)]),
        (("S", 0), [("X", 0, False)]), (("S", 1), [("S", 0, True)]), (("S", 2), [("S", 1, True), ("G", 0, False)]),
        (("G", 0), [("D", 0, True), ("S", 0, True)]),
        (("G", 1), [("D", 0, True), ("S", 1, True), ("G", 0, False), ("H", 0, False)]),
        (("G", 2), [("D", 0, True), ("G", 1, False), ("H", 1, False)]),
        (("H", 0), [("G", 0, False)]), (("H", 1), [("G", 1, False), ("H", 0, True)]),
        (("E", 0), [("G", 2, False), ("H", 1, True)]), (("Z", 0), [("E", 0, True)]),
        (("C", 0), [("Z", 0, False)]), (("W", 0), [("D", 0, False)]), (("W", 1), [("Z", 0, False)]),
        (("F", 0), []), (("A", 0), []),
    ],
)  # fmt: skip
def test_what_an_op_of_shared_attention_needs(op: tuple[str, int], needs: list[tuple[str, int, bool]]) -> None:
    """In rings of three, each of two that exchange heads, computed again."""
    assert SharedAttention(2, 3).needs(Kind(op[0]), op[1], again=True) == needs


def test_what_it_needs_without_a_ring_without_exchange_and_computed_once() -> None:
    assert SharedAttention(2, 1).needs(Kind("K"), 0, again=True) == [("F", 0, True)]
    assert SharedAttention(2, 1).needs(Kind("G"), 0, again=True) == [("D", 0, True)]
    assert SharedAttention(2, 1).needs(Kind("Z"), 0, again=True) == [("G", 0, True)]
    assert SharedAttention(1, 3).needs(Kind("Z"), 0, again=True) == [("G", 2, False), ("H", 1, True)]
    assert SharedAttention(2, 3).needs(Kind("D"), 0, again=False) == []
    assert SharedAttention(2, 3).needs(Kind("S"), 0, again=False) == []


def test_ops_of_a_ring_stand_where_they_may_run() -> None:
    shared = SharedAttention(2, 2)
    assert "".join(f"{kind}{part}" for kind, part in shared.sorted(
        [(kind, part) for kind in map(Kind, "NFTKRMAXDSGHEZCWJ") for part in range(2 if kind in "KG" else 1)]
    )) == "N0F0T0K0K1R0M0A0X0S0D0G0H0G1E0Z0C0W0J0"  # fmt: skip
    alone = SharedAttention(2, 1)
    chain = [(Kind(kind), 0) for kind in "WFK"]
    assert alone.sorted(chain) == chain


def test_even_a_plain_ring_hides_its_next_keys_and_values_behind_its_own() -> None:
    graph = SegmentGraph(num_layers=1, attention=SharedAttention(2, 2))
    actions = async_order(graph)
    waits = {op.kind: actions.index(Action("wait", op)) - actions.index(Action("start", op))
             for verb, op in actions if verb == "start" and op.site == "attn"}  # fmt: skip
    assert {kind for kind, apart in waits.items() if apart > 1} == {"T", "S", "C"}
    check(graph, actions)
