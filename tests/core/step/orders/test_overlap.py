"""Orders of many layers: legal, the same each time, as good as a search of the whole graph; of few
layers, those that have always been found."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.step.attention_ops import SharedAttention
from plait.core.step.orders import overlap
from plait.core.step.orders.climb import OrderEvaluator
from plait.core.step.orders.overlap import HELD_BACK, HELD_BACK_AGAIN, JUDGED, check, domino_order
from plait.core.step.orders.segment_costs import NumberedOps, SegmentCosts
from plait.core.step.segments import Action, Need, Phase, SegmentGraph, needs_table
from tests.core.step.orders.test_climb import costs
from tests.core.step.orders.test_repeats import deep
from tests.core.step.test_segments import graphs
from tests.support.lists import makespan, timed


@given(graphs | deep)
def test_what_ops_need_is_the_same_found_for_all_layers_at_once(graph: SegmentGraph) -> None:
    table = needs_table(graph)
    assert list(table) == graph.ops()
    for op, needs in table.items():
        assert needs == tuple(graph.needs(op))
        assert all(isinstance(need, Need) for need in needs)


@settings(max_examples=10)
@given(deep, st.floats(0.2, 2), st.sampled_from((0.0, 0.1)))
def test_orders_of_many_layers_are_legal_and_the_same_each_time(
    graph: SegmentGraph, ratio: float, latency: float
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "SEARCHED", 0)  # so that few layers will do
        cost = replace(costs(ratio), latency=latency)
        actions = domino_order(graph, cost, 8)
        check(graph, actions)
        assert domino_order(graph, cost, 8) == actions


@settings(max_examples=10)
@given(deep)
def test_many_layers_that_cost_nothing_have_an_order(graph: SegmentGraph) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "SEARCHED", 0)
        check(graph, domino_order(graph, SegmentCosts({}, {}), 8))


@settings(max_examples=12)
@given(graphs, st.floats(0.05, 2))
def test_an_order_that_none_is_shorter_than_needs_no_other_beside_it(graph: SegmentGraph, ratio: float) -> None:
    found = domino_order(graph, costs(ratio), 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OrderEvaluator, "as_good_as_any", lambda *_: False)  # all lists are made, the best improved
        assert domino_order(graph, costs(ratio), 8) == found


QUALITY = [
    (SegmentGraph(num_layers=layers, p1=p1, p2=p2, phase=phase, recompute=recompute), ratio)  # type: ignore[arg-type]
    for layers, p1, p2, phase, recompute, ratio in (
        (32, 2, 1, "step", "full", 1.0),
        (32, 2, 2, "B", "none", 0.9),
        (16, 4, 2, "step", "selective", 0.8),
        (24, 4, 2, "F", "none", 1.2),
        (24, 4, 2, "I", "none", 0.7),
    )
]


@pytest.mark.parametrize(("graph", "ratio"), QUALITY)
def test_few_tries_are_as_good_as_a_search_of_the_whole(
    graph: SegmentGraph, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = costs(ratio)
    assert len(graph.ops()) > overlap.SEARCHED
    few = domino_order(graph, cost, 8)
    monkeypatch.setattr(overlap, "SEARCHED", 1 << 30)
    whole = domino_order(graph, cost, 8)
    judged = [sum(makespan(timed(graph, each, cost.late(f), 8)) for f in JUDGED) for each in (few, whole)]
    assert judged[0] <= judged[1] * 1.01
    assert outstanding(graph, few) <= max(outstanding(graph, whole), held_back(graph))


def outstanding(graph: SegmentGraph, actions: list[Action]) -> int:
    """Weight gradients whose operands are there, at most."""
    numbered = NumberedOps(graph)
    number = {op: i for i, op in enumerate(numbered.ops)}
    return OrderEvaluator(numbered, [], 8, 0).most_outstanding([number[op] for verb, op in actions if verb == "run"])


def held_back(graph: SegmentGraph) -> int:
    """How many there should be at most."""
    return (HELD_BACK if graph.recompute == "none" else HELD_BACK_AGAIN) * graph.p1


def few_layers() -> list[tuple[SegmentGraph, float]]:
    """Graphs that are searched whole."""
    chance, drawn = random.Random(3), list[tuple[SegmentGraph, float]]()
    for _ in range(12):
        graph = SegmentGraph(
            num_layers=chance.randint(1, 5),
            p1=chance.randint(1, 4),
            p2=chance.randint(1, 2),
            sequence_parallel=chance.random() < 0.3,
            embeds=chance.random() < 0.7,
            heads=chance.random() < 0.7,
            phase=chance.choice(("step", "F", "B", "I")),
            recompute=chance.choice(("none", "selective", "full")),
            parallel_block=chance.random() < 0.3,
        )
        drawn.append((graph, chance.choice((0.3, 0.8, 1.0, 1.5))))
    return drawn


# Of the lists that version 7f92059 made, which tried every policy on every graph.
FOUND = (
    "3669817e16cd", "9c0f522fb20d", "5b404035326f", "ab2ee9e625a2", "e161d4411aeb", "ad9453e1ce12",
    "9267f339cf0d", "18d45567c0ee", "a2181b5fe27a", "07c8a24a19a3", "735ff7f6125a", "9eb506cafa1b",
)  # fmt: skip


@pytest.mark.parametrize(("case", "found"), list(zip(few_layers(), FOUND, strict=True)))
def test_few_layers_have_the_lists_they_have_always_had(case: tuple[SegmentGraph, float], found: str) -> None:
    graph, ratio = case
    assert len(graph.ops()) <= overlap.SEARCHED
    text = " ".join(map(str, domino_order(graph, costs(ratio), 8)))
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == found


@pytest.mark.parametrize("phase", ["F", "I", "W"])
@pytest.mark.parametrize(("p1", "layers"), [(1, 3), (2, 3), (3, 1)])
def test_tries_that_are_left_out_would_come_out_twice(
    phase: Phase, p1: int, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = SegmentGraph(num_layers=layers, p1=p1, phase=phase, sequence_parallel=True, recompute="full")
    found = domino_order(graph, costs(0.9), 6)
    few = len(overlap._tries(graph))
    every = [each for each in overlap._TRIES if p1 > 1 or not each[1].patience]
    assert few < len(every)
    monkeypatch.setattr(overlap, "_tries", lambda _: every)
    assert domino_order(graph, costs(0.9), 6) == found


@pytest.mark.parametrize("again", [0, 1, 16, 31, 32, None])
def test_fewer_layers_are_of_the_kinds_that_there_are(again: int | None) -> None:
    """Some recomputed and some not, if it is so in the whole: either kind is extrapolated."""
    graph = SegmentGraph(num_layers=32, recompute="full", recomputed=again)
    few = overlap._fewer(graph, 4)
    kinds = [
        {"A" in found.recomputed_kinds("mlp", layer) for layer in range(found.num_layers)} for found in (graph, few)
    ]
    assert few.num_layers == 4
    assert kinds[0] == kinds[1]


def many_layers() -> list[tuple[SegmentGraph, SegmentCosts]]:
    """Graphs of which a few lists are made, and words are moved; any costs."""
    chance, drawn = random.Random(7), list[tuple[SegmentGraph, SegmentCosts]]()

    def seconds(kinds: str) -> dict[str, float]:
        return {f"{site}.{kind}": chance.choice((0.5, 1.0, 2.0, 3.5, 6.0)) for site in ("attn", "mlp", "block")
                for kind in kinds}  # fmt: skip

    for _ in range(9):
        graph = SegmentGraph(
            num_layers=chance.randint(7, 14),
            p1=chance.choice((1, 2, 2, 3, 4)),
            p2=chance.randint(1, 2),
            sequence_parallel=chance.random() < 0.3,
            embeds=chance.random() < 0.7,
            heads=chance.random() < 0.7,
            phase=chance.choice(("step", "step", "B", "I", "F")),
            recompute=chance.choice(("none", "selective", "full")),
            recomputed=chance.choice((None, 3)),
            parallel_block=chance.random() < 0.3,
            attention=chance.choice((None, None, SharedAttention(2, 1), SharedAttention(1, 2))),
        )
        drawn.append((graph, SegmentCosts(seconds("NFRMADCWJKG"), seconds("FKRDGCTSH"), 0.1)))
    return drawn


MANY = (
    "73caf4854d9a", "0b91e96c5191", "4bf5d520fb9a", "16f6f082b0b5", "cd49301b5f01", "43cbdeca7a7e",
    "adcdd1c5f1e4", "1f15df8e15d3", "ab8ae5952b19",
)  # fmt: skip


@pytest.mark.parametrize(("case", "found"), list(zip(many_layers(), MANY, strict=True)))
def test_many_layers_have_the_lists_they_have_always_had(
    case: tuple[SegmentGraph, SegmentCosts], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many of them may be made, of models of however few layers."""
    monkeypatch.setattr(overlap, "SEARCHED", 0)
    graph, cost = case
    made = list[str]()
    for visited, sampled in ((50_000, 240), (3_000, 240), (1_200, 900), (8_000, 60)):
        monkeypatch.setattr(overlap, "VISITED", visited)
        monkeypatch.setattr(overlap, "SAMPLED", sampled)
        made.append(" ".join(map(str, domino_order(graph, cost, 8))))
    assert hashlib.sha256("\n".join(made).encode()).hexdigest()[:12] == found
