"""Layouts, tiles and unit tasks against brute force over single elements."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import ReshardError
from plait.core.reshard.layouts import Box, TensorLayout, boxes_of_range, local_copies, unit_tasks


@st.composite
def layouts(draw: st.DrawFn, dims: int, ranks: range = range(12)) -> TensorLayout:
    """A layout of ``dims`` dimensions over some of ``ranks``, in any order."""
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda m: prod(m) <= len(ranks))))
    chosen = tuple(draw(st.permutations(ranks))[: prod(mesh)])
    spec: list[list[int]] = [[] for _ in range(dims)]
    for axis in draw(st.permutations(range(len(mesh)))):
        at = draw(st.integers(-1, dims - 1))
        if at >= 0:
            spec[at].append(axis)
    return TensorLayout(mesh, chosen, tuple(map(tuple, spec)))


shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@pytest.mark.parametrize(
    "text",
    [
        "(2,4) S0 R R",
        "(2,4) S01 R",
        "(2,4)@8 S10 R",
        "(3) R",
        "(2,2)@0,1,4,5 S0 S1",
        "(2,2,2) S02 S1",
        "(1)@5 S0",
        "(4)",
    ],
)
def test_the_text_form_is_read_back(text: str) -> None:
    assert str(TensorLayout.parse(text)) == text


@given(st.integers(0, 3).flatmap(layouts))
def test_every_layout_has_a_text_form(layout: TensorLayout) -> None:
    assert TensorLayout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("2,4 S0 R", "is not a layout"),
        ("(2,4) S0 X", "'X' in"),
        ("(2,4) S R", "neither R"),
        ("(2,4) S2 R", "does not have"),
        ("(2,4) S0 S0", "used 2 times"),
        ("(2,4)@1,2 S0 R", "needs 8 different ranks"),
        ("(2,1)@3,3 S0 R", "needs 2 different ranks"),
        ("(0,4) R", "no mesh"),
    ],
)
def test_a_bad_layout_is_refused_in_words(text: str, says: str) -> None:
    with pytest.raises(ReshardError, match=says):
        TensorLayout.parse(text)


def test_dimensions_must_agree() -> None:
    with pytest.raises(ReshardError, match="has 1 dimensions, the shape 4,4 has 2"):
        TensorLayout.parse("(2) S0").cuts((4, 4))
    with pytest.raises(ReshardError, match="has 1 dimensions, the shape of a scalar has 0"):
        TensorLayout.parse("(2) S0").cuts(())
    with pytest.raises(ReshardError, match=r"Rank 7 is not in the mesh of '\(2\)@3,5 S0', whose ranks are 3,5\."):
        TensorLayout.parse("(2)@3,5 S0").tile(7, (4,))


def test_a_layout_says_which_axes_a_mesh_has_and_how_often_one_is_used() -> None:
    with pytest.raises(ReshardError, match=r"S2 names a mesh axis that \(2,4\) does not have. Its axes are 0 to 1\."):
        TensorLayout.parse("(2,4) S2 R")
    with pytest.raises(ReshardError, match="Mesh axis 0 is used 3 times"):
        TensorLayout.parse("(2,4) S00 S0")
    with pytest.raises(ReshardError, match="Give 1 to 10 axes of at least one rank each"):
        TensorLayout.parse("(" + ",".join("1" * 11) + ") R")
    assert TensorLayout.parse("(" + ",".join("1" * 10) + ") S9 R").spec == ((9,), ())


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("(2) S0", (8, 9)), ("(2)@3 S0", (3, 4)), ("(2)@3,1 S0", (3, 1)), (" (2, 1,)  S0 ", (8, 9)), ("(1)", (8,))],
)
def test_ranks_begin_where_the_text_says_or_else_where_one_is_told(text: str, ranks: tuple[int, ...]) -> None:
    layout = TensorLayout.parse(text, first_rank=8)
    assert layout.ranks == ranks
    assert layout.shifted(4).ranks == tuple(rank + 4 for rank in ranks)
    assert (layout.shifted(4).mesh, layout.shifted(4).spec) == (layout.mesh, layout.spec)


def test_slices_are_as_equal_as_can_be_and_the_first_axis_is_the_slowest() -> None:
    layout = TensorLayout.parse("(2,2) S01")
    assert [layout.tile(rank, (7,)) for rank in range(4)] == [
        Box((a,), (b,)) for a, b in ((0, 2), (2, 4), (4, 6), (6, 7))
    ]
    swapped = TensorLayout.parse("(2,2) S10")
    assert [swapped.tile(rank, (7,)).start for rank in range(4)] == [(0,), (4,), (2,), (6,)]


@given(st.data(), shapes)
def test_tasks_and_copies_bring_every_element_that_is_needed_once(data: st.DataObject, shape: tuple[int, ...]) -> None:
    source, destination = data.draw(layouts(len(shape))), data.draw(layouts(len(shape)))
    came = {rank: np.zeros(shape, int) for rank in destination.ranks}
    holds = {rank: np.zeros(shape, bool) for rank in source.ranks}
    for rank in source.ranks:
        holds[rank][source.tile(rank, shape).slices] = True
    for task in unit_tasks(source, destination, shape):
        assert task.box.elements
        assert task.receivers
        for rank in task.receivers:
            came[rank][task.box.slices] += 1
        for rank in source.ranks:
            assert holds[rank][task.box.slices].all() == (rank in task.holders)
    for box, rank in local_copies(source, destination, shape):
        assert holds[rank][box.slices].all()
        came[rank][box.slices] += 1
    for rank in destination.ranks:
        wanted = np.zeros(shape, int)
        wanted[destination.tile(rank, shape).slices] = 1
        assert np.array_equal(came[rank], wanted)


@given(shapes, st.data())
def test_a_range_of_a_packed_array_is_a_few_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    array = np.arange(prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    boxes = list(boxes_of_range(shape, start, stop))
    found = [array[box.slices].reshape(-1) for box in boxes]
    assert np.array_equal(np.concatenate([*found, np.zeros(0, int)]), np.arange(start, stop))
    assert len(boxes) <= 2 * len(shape) + 1
    assert all(box.elements for box in boxes)


def test_a_thousand_ranks_are_cut_in_no_time() -> None:
    source, destination = TensorLayout.parse("(32,32) S01 R"), TensorLayout.parse("(32,32) S0 S1", first_rank=1024)
    tasks = unit_tasks(source, destination, (4096, 4096))
    assert len(tasks) == 32 * 1024
    assert sum(task.box.elements for task in tasks) == 4096 * 4096


def test_boxes_count_from_the_corner_of_another() -> None:
    outer, inner = Box((2, 3), (8, 9)), Box((4, 3), (6, 5))
    assert inner.within(outer) == Box((2, 0), (4, 2))
    assert [inner.meet(outer), str(inner)] == [inner, "[4:6, 3:5]"]
    assert not any(Box((0,), (2,)).meet(Box((a,), (a + 1,))).elements for a in (2, 5))


def test_empty_tiles_stand_among_others() -> None:
    """Of a dimension of one over two ranks every second tile is empty."""
    source, destination = TensorLayout.parse("(1)@9 R R"), TensorLayout.parse("(2,2) S0 S1")
    tasks = unit_tasks(source, destination, (4, 1))
    assert [(str(task.box), task.receivers) for task in tasks] == [("[0:2, 0:1]", (0,)), ("[2:4, 0:1]", (2,))]
    assert [rank for _, rank in local_copies(TensorLayout.parse("(4) R R"), destination, (4, 1))] == [0, 2]


@pytest.mark.parametrize("ranks", [(-1, 3), (3, -1), (1, 1), (1,), (1, 2, 3)])
def test_ranks_of_a_mesh_are_different_and_from_zero_up(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ReshardError, match="needs 2 different ranks from 0 up"):
        TensorLayout((2,), ranks, ((0,),))


@pytest.mark.parametrize("mesh", [(), (0,), (2, 0), (1,) * 30])
def test_a_mesh_has_a_few_axes_of_some_ranks(mesh: tuple[int, ...]) -> None:
    with pytest.raises(ReshardError, match="is no mesh"):
        TensorLayout(mesh, tuple(range(prod(mesh))), ((),))
