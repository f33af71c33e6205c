"""Cross-mesh resharding: which pieces of a tensor must go from where to where when its layout changes meshes.

A `TensorLayout` says how a tensor lies on a mesh of ranks. Between a source and a destination layout every
distinct destination tile is put together from the source tiles that it intersects; each such intersection is
a *unit task*: one box of the tensor, the ranks that hold it and the ranks that need it (Zhuang et al., "On
Optimizing the Communication of Model Parallelism", arXiv 2211.05322, section 3). Sizes need not divide: boxes
are intersected, whatever their bounds.

Text form of a layout: the mesh, then one word for each dimension of the tensor, ``R`` (replicated) or ``S``
and the mesh axes that split it, the first the slowest: ``(2,4) S0 R S1``, ``(2,4) S01 R R``. A mesh axis that
no word names holds replicas. The ranks are 0, 1, 2, ... unless told: ``(2,4)@8 ...`` starts at 8,
``(2,2)@0,1,4,5 ...`` lists them.

>>> source, destination = TensorLayout.parse("(2,2) S0 R"), TensorLayout.parse("(2,2) R S0", first_rank=4)
>>> for task in unit_tasks(source, destination, (4, 6)):
...     print(task.box, task.holders, task.receivers)
[0:2, 0:3] (0, 1) (4, 5)
[2:4, 0:3] (2, 3) (4, 5)
[0:2, 3:6] (0, 1) (6, 7)
[2:4, 3:6] (2, 3) (6, 7)
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from math import prod
from typing import NamedTuple

from plait.core.base.codec.data import Natural
from plait.core.base.errors import ReshardError
from plait.core.parallel.strategy import slice_sizes

MAX_AXES = 10  # the text form writes an axis as one digit


class Box(NamedTuple):
    """A contiguous part of a tensor: elements ``start[d] <= index < stop[d]`` along every dimension d."""

    start: tuple[Natural, ...]
    stop: tuple[Natural, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent along every dimension."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def elements(self) -> int:
        """How many elements lie in it."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index expression that cuts it out of the whole tensor."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def within(self, outer: Box) -> Box:
        """The same box counted from the corner of ``outer``, which holds it."""
        return Box(*(tuple(x - o for x, o in zip(side, outer.start, strict=True)) for side in self))

    def meet(self, other: Box) -> Box:
        """What both have in common; its ``elements`` are 0 where that is nothing."""
        start = tuple(map(max, self.start, other.start))
        return Box(start, tuple(map(max, start, map(min, self.stop, other.stop))))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


class UnitTask(NamedTuple):
    """One box that must reach ``receivers``.

    holders: every source rank that has it, any of which may send. receivers: the destination ranks that lack
    it (those that hold it already copy it locally, see `local_copies`). Both ascending.
    """

    box: Box
    holders: tuple[int, ...]
    receivers: tuple[int, ...]


@dataclass(frozen=True)
class TensorLayout:
    """How a tensor lies on a mesh.

    mesh: extent of every mesh axis. ranks: the global rank at every mesh position, last axis fastest. spec:
    for every dimension of the tensor the mesh axes that split it, slowest first, none for a replicated one;
    an axis is used at most once. Slices are contiguous and as equal as can be, larger ones first; they may be
    empty.
    """

    mesh: tuple[int, ...]
    ranks: tuple[int, ...]
    spec: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        used = [axis for axes in self.spec for axis in axes]
        if not 0 < len(self.mesh) <= MAX_AXES or min(self.mesh) < 1:
            raise ReshardError(
                f"{self.mesh} is no mesh. Give 1 to {MAX_AXES} axes of at least one rank each, such as (2,4)."
            )
        if len(self.ranks) != prod(self.mesh) or len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise ReshardError(
                f"The mesh {_mesh(self.mesh)} needs {prod(self.mesh)} different ranks from 0 up, "
                f"got {_list(self.ranks)}."
            )
        for axis in used:
            if axis >= len(self.mesh):
                last = len(self.mesh) - 1
                raise ReshardError(
                    f"S{axis} names a mesh axis that {_mesh(self.mesh)} does not have. Its axes are 0 to {last}."
                )
            if used.count(axis) > 1:
                raise ReshardError(
                    f"Mesh axis {axis} is used {used.count(axis)} times. Each axis may split one dimension, once."
                )

    @staticmethod
    def parse(text: str, first_rank: int = 0) -> TensorLayout:
        """The layout of a text form; ``first_rank`` is where ranks begin if the text does not say. Raises
        ReshardError."""
        match = _TEXT.fullmatch(text.strip())
        if not match:
            raise ReshardError(
                f"'{text}' is not a layout. Write the mesh, then for every dimension of the tensor R, "
                "or S with mesh axes: '(2,4) S0 R S1'."
            )
        mesh = tuple(int(number) for number in match["mesh"].split(",") if number.strip())
        listed = [int(number) for number in match["ranks"].split(",")] if match["ranks"] else [first_rank]
        if len(listed) == 1:
            listed = list(range(listed[0], listed[0] + prod(mesh)))
        for word in match["spec"].split():
            if not _WORD.fullmatch(word):
                raise ReshardError(
                    f"'{word}' in '{text}' is neither R (replicated) nor S and the mesh axes that split, "
                    "such as S0 or S01."
                )
        return TensorLayout(mesh, tuple(listed), tuple(tuple(map(int, word[1:])) for word in match["spec"].split()))

    def __str__(self) -> str:
        first, expected = self.ranks[0], tuple(range(self.ranks[0], self.ranks[0] + len(self.ranks)))
        at = _list(self.ranks) if self.ranks != expected else str(first) if first else ""
        words = ("S" + "".join(map(str, axes)) if axes else "R" for axes in self.spec)
        return " ".join((_mesh(self.mesh) + (f"@{at}" if at else ""), *words))

    @cached_property
    def _position(self) -> dict[int, tuple[int, ...]]:
        """Where every rank stands in the mesh."""
        return dict(zip(self.ranks, product(*map(range, self.mesh)), strict=True))

    def moved(self, ranks: int) -> TensorLayout:
        """The same on a mesh whose ranks are so much higher."""
        return TensorLayout(self.mesh, tuple(rank + ranks for rank in self.ranks), self.spec)

    def slice_of(self, rank: int) -> tuple[int, ...]:
        """Which slice of every dimension ``rank`` holds, counted from 0."""
        at, found = self._position[rank], list[int]()
        for axes in self.spec:
            number = 0
            for axis in axes:
                number = number * self.mesh[axis] + at[axis]
            found.append(number)
        return tuple(found)

    def cuts(self, shape: tuple[int, ...]) -> list[list[int]]:
        """The bounds of the slices of every dimension, from 0 to its size. Raises ReshardError unless
        dimensions agree."""
        if len(shape) != len(self.spec):
            sizes = _list(shape) or "of a scalar"
            raise ReshardError(
                f"The layout '{self}' has {len(self.spec)} dimensions, the shape {sizes} has {len(shape)}. "
                "Give one word for each."
            )
        parts = [prod(self.mesh[axis] for axis in axes) for axes in self.spec]
        return [list(accumulate(slice_sizes(size, count), initial=0)) for size, count in zip(shape, parts, strict=True)]

    def tile(self, rank: int, shape: tuple[int, ...]) -> Box:
        """The part of a tensor of ``shape`` that ``rank`` holds; it may be empty."""
        if rank not in self._position:
            raise ReshardError(f"Rank {rank} is not in the mesh of '{self}', whose ranks are {_list(self.ranks)}.")
        return _box(self.cuts(shape), self.slice_of(rank))

    def holders(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """The ranks that hold each distinct slice, by ``slice_of``; slices in order, ranks ascending."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in sorted(self.ranks):
            found.setdefault(self.slice_of(rank), []).append(rank)
        return {at: tuple(found[at]) for at in sorted(found)}


class Reshard(NamedTuple):
    """A tensor of ``shape``, with ``itemsize`` bytes an element, that moves from one layout to another."""

    source: TensorLayout
    destination: TensorLayout
    shape: tuple[int, ...]
    itemsize: int


def unit_tasks(source: TensorLayout, destination: TensorLayout, shape: tuple[int, ...]) -> tuple[UnitTask, ...]:
    """Every box that has to move, destination tile by destination tile, and in it source tile by source
    tile."""
    tasks = (
        UnitTask(box, holders, tuple(r for r in needing if r not in holders))
        for box, holders, needing in _meetings(source, destination, shape)
    )
    return tuple(task for task in tasks if task.receivers)


def local_copies(
    source: TensorLayout, destination: TensorLayout, shape: tuple[int, ...]
) -> tuple[tuple[Box, int], ...]:
    """(box, rank) of everything that a destination rank holds already, as a source rank."""
    met = _meetings(source, destination, shape)
    return tuple((box, rank) for box, holders, needing in met for rank in needing if rank in holders)


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The boxes that elements ``start <= i < stop`` of a row-major array form, in order; at most two a
    dimension and one more.

    >>> print(*boxes_of_range((4, 3), 2, 10))
    [0:1, 2:3] [1:3, 0:3] [3:4, 0:1]
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    inner = prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # the rows that lie in it whole

    def part(row: int, begin: int, end: int) -> Iterator[Box]:
        for box in boxes_of_range(shape[1:], begin, end):
            yield Box((row, *box.start), (row + 1, *box.stop))

    if first > last:  # inside one row
        yield from part(last, start - last * inner, stop - last * inner)
        return
    yield from part(first - 1, start - (first - 1) * inner, inner if first * inner > start else 0)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last, *shape[1:]))
    yield from part(last, 0, stop - last * inner)


def _meetings(
    source: TensorLayout, destination: TensorLayout, shape: tuple[int, ...]
) -> Iterator[tuple[Box, tuple[int, ...], tuple[int, ...]]]:
    """(box, source ranks, destination ranks) of every two tiles that intersect.

    A destination slice meets a run of neighbouring source slices along every dimension: found by bisection,
    so that the effort grows with what is found and not with the product of the meshes.
    """
    theirs, ours = source.cuts(shape), destination.cuts(shape)
    holders = source.holders()
    for at, needing in destination.holders().items():
        box = _box(ours, at)
        if not box.elements:
            continue
        runs = (
            range(bisect_right(c, a) - 1, bisect_left(c, b))
            for c, a, b in zip(theirs, box.start, box.stop, strict=True)
        )
        for from_ in product(*runs):
            common = box.meet(_box(theirs, from_))
            if common.elements:
                yield common, holders[from_], needing


def _box(cuts: list[list[int]], at: tuple[int, ...]) -> Box:
    return Box(
        tuple(c[i] for c, i in zip(cuts, at, strict=True)), tuple(c[i + 1] for c, i in zip(cuts, at, strict=True))
    )


def _mesh(mesh: tuple[int, ...]) -> str:
    return f"({_list(mesh)})"


def _list(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


_TEXT = re.compile(r"\((?P<mesh>\s*\d+\s*(?:,\s*\d+\s*)*,?\s*)\)(?:@(?P<ranks>\d+(?:,\d+)*))?(?P<spec>(?:\s+\S+)*)")
_WORD = re.compile(r"R|S\d+")
