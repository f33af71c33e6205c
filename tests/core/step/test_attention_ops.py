"""Attention that is shared by ranks, in ops: parts, needs, what travels, what is hidden."""

from __future__ import annotations

import pytest

from plait.core.step.attention_ops import SharedAttention
from plait.core.step.orders.overlap import async_order, check, domino_order, sync_order
from plait.core.step.orders.segment_costs import SegmentCosts
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
