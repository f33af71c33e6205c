"""Who sums the gradient of tied embeddings: every number once from either end, and no more than
needed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import Layout
from plait.core.parallel.sharding import Sharding
from plait.core.step.schedules import Shape, generate
from plait.core.step.stages import TiedGradient, tie_of


def spec(vocab: int, *, tied: bool = True) -> ModelSpec:
    return ModelSpec(
        family="gpt", num_layers=4, hidden=6, num_heads=1, vocab=vocab, max_sequence=8, tied_embeddings=tied
    )


def ties(vocab: int, degrees: list[tuple[int, int]], optim: list[int], name: str = "1f1b") -> list[TiedGradient]:
    layout = Layout(tuple(degrees))
    chunks = 2 if name == "zb-v" else 1
    schedule = generate(name, Shape(ranks=len(degrees), micro_batches=4, chunks=chunks))
    shardings = [Sharding(optim=factor) for factor in optim]
    return [
        tie_of(rank, model=spec(vocab), layout=layout, shardings=shardings, schedule=schedule)
        for rank in range(layout.world_size)
    ]


def own_range(vocab: int, tp: int, optim: int, tp_rank: int, replica: int) -> set[int]:
    """By hand: rows are shared out over tp, and each rank's, padded, over the optimizer's ranks."""
    rows, hidden = -(-vocab // tp), 6
    padded = -(-rows * hidden // optim) * optim
    part = range(replica % optim * (padded // optim), (replica % optim + 1) * (padded // optim))
    return {tp_rank * rows * hidden + at for at in part if at < rows * hidden and tp_rank * rows + at // hidden < vocab}


@given(st.data())
def test_every_rank_gets_what_it_holds_once_from_either_end(data: Any) -> None:
    vocab = data.draw(st.integers(5, 40))
    degrees = [(data.draw(st.sampled_from([1, 2, 3, 4])), data.draw(st.sampled_from([1, 2, 3]))) for _ in range(2)]
    optim = [data.draw(st.sampled_from([d for d in range(1, dp + 1) if dp % d == 0])) for dp, _ in degrees]
    found, layout = ties(vocab, degrees, optim), Layout(tuple(degrees))
    for rank, tie in enumerate(found):
        mesh = layout.mesh_of(rank)
        pp_rank = layout.pp_rank_of(rank)
        mine = own_range(vocab, mesh.tp, optim[pp_rank], mesh.coordinates(rank)["tp"], mesh.replica(rank))
        assert rank in tie.ranks
        assert mine <= set(range(tie.start, tie.stop))
        if not mine:
            assert tie.ranks == (rank,)
            continue
        for other in tie.ranks:  # all of them see the same group
            assert found[other][:3] == tie[:3]
        for end in (0, 1):
            counted: list[int] = []
            for other in tie.ranks:
                if layout.pp_rank_of(other) == end and found[other].counts:
                    at = layout.meshes[end]
                    counted += own_range(vocab, at.tp, optim[end], at.coordinates(other)["tp"], at.replica(other))
            assert sorted(counted) == list(range(tie.start, tie.stop))


def test_equal_places_sum_in_pairs_what_each_rank_holds() -> None:
    for tie, rank in zip(ties(48, [(4, 2)] * 3, [2] * 3), range(24), strict=True):
        if 8 <= rank < 16:
            assert tie == TiedGradient((rank,), 0, 0, True)
        else:
            assert tie.ranks == (rank % 8, 16 + rank % 8)
            assert tie.numbers == 48 * 6 // 2 // 2


def test_one_place_that_holds_both_ends_sums_alone() -> None:
    for rank, tie in enumerate(ties(48, [(1, 2), (1, 2)], [1, 1], "zb-v")):
        assert tie.ranks == (rank,)
        assert tie.numbers == (48 * 6 // 2 if rank < 2 else 0)


def test_a_vocabulary_in_four_meets_one_in_two() -> None:
    found = ties(40, [(1, 2), (1, 4)], [1, 1])
    assert [tie.ranks for tie in found] == [(0, 2, 3), (1, 4, 5), (0, 2, 3), (0, 2, 3), (1, 4, 5), (1, 4, 5)]


@pytest.mark.parametrize("stages", [1, 2])
def test_nobody_sums_where_nothing_is_tied(stages: int) -> None:
    layout = Layout(((1, 1),) * stages)
    schedule = generate("1f1b", Shape(ranks=stages, micro_batches=4))
    model = spec(40, tied=stages == 1)
    tie = tie_of(0, model=model, layout=layout, shardings=[Sharding()] * stages, schedule=schedule)
    assert tie == TiedGradient((0,), 0, 0, True)


def test_padding_between_ranks_of_a_place_parts_nobody() -> None:
    """A row of six is cut in four for the optimizer, so that the last part of the first rank is
    empty."""
    for rank, tie in enumerate(ties(2, [(4, 2), (4, 2)], [4, 4])):
        mine = own_range(2, 2, 4, rank % 2, rank // 2 % 4)
        assert tie.ranks == ((rank % 8, 8 + rank % 8) if mine else (rank,))
        assert set(range(tie.start, tie.stop)) == mine
