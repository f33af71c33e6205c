"""Cross-mesh resharding: the parts of a tensor that each rank must send when the tensor's layout
changes meshes.

A `TensorLayout` describes the distribution of a tensor over a mesh of ranks. Every distinct
destination tile is assembled from the source tiles that it intersects. Each intersection is a *unit
task*: one box of the tensor, the ranks that hold it and the ranks that need it. The terms are those
of Zhuang et al., "On Optimizing the Communication of Model Parallelism", arXiv 2211.05322, section
3. Sizes need not be divisible: boxes are intersected, whatever their bounds.

Text form of a layout: the mesh, then one word for each dimension of the tensor, ``R`` (replicated)
or ``S`` and the mesh axes that split it, slowest axis first: ``(2,4) S0 R S1``, ``(2,4) S01 R R``.
A mesh axis that no word names holds replicas. By default, the ranks are 0, 1, 2, ...; ``(2,4)@8
...`` starts at 8, ``(2,2)@0,1,4,5 ...`` lists them.

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
    """A contiguous part of a tensor: elements ``start[d] <= index < stop[d]`` along every dimension
    d."""

    start: tuple[Natural, ...]
    stop: tuple[Natural, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The extent along every dimension."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def elements(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index expression that cuts the box out of the whole tensor."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def within(self, outer: Box) -> Box:
        """Return the same box relative to the corner of ``outer``, which contains it."""
        return Box(*(tuple(x - o for x, o in zip(side, outer.start, strict=True)) for side in self))

    def meet(self, other: Box) -> Box:
        """Return the intersection of two boxes; its ``elements`` are 0 if they are disjoint."""
        start = tuple(map(max, self.start, other.start))
        return Box(start, tuple(map(max, start, map(min, self.stop, other.stop))))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


class UnitTask(NamedTuple):
    """A box that must reach ``receivers``.

    holders: all source ranks that have the box; any of them may send it. receivers: the destination
    ranks that lack it; ranks that hold it already copy it locally (`local_copies`). Both are
    ascending.
    """

    box: Box
    holders: tuple[int, ...]
    receivers: tuple[int, ...]


@dataclass(frozen=True)
class TensorLayout:
    """The distribution of a tensor over a mesh.

    mesh: extent of every mesh axis. ranks: the global rank at every mesh position, last axis
    fastest. spec: for every dimension of the tensor the mesh axes that split it, slowest first;
    empty for a replicated dimension. An axis is used at most once. Slices are contiguous and as
    equal as possible, larger ones first; they may be empty.
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
        """Return the layout of a text form. first_rank: the first rank if the text does not name
        one. Raises ReshardError."""
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
        """The position of every rank in the mesh."""
        return dict(zip(self.ranks, product(*map(range, self.mesh)), strict=True))

    def shifted(self, ranks: int) -> TensorLayout:
        """Return the same layout with all ranks increased by ``ranks``."""
        return TensorLayout(self.mesh, tuple(rank + ranks for rank in self.ranks), self.spec)

    def slice_of(self, rank: int) -> tuple[int, ...]:
        """Return for every dimension the index, from 0 on, of the slice that ``rank`` holds."""
        at, found = self._position[rank], list[int]()
        for axes in self.spec:
            number = 0
            for axis in axes:
                number = number * self.mesh[axis] + at[axis]
            found.append(number)
        return tuple(found)

    def cuts(self, shape: tuple[int, ...]) -> list[list[int]]:
        """Return the bounds of the slices of every dimension, from 0 to its size. Raises
        ReshardError if the number of dimensions differs."""
        if len(shape) != len(self.spec):
            sizes = _list(shape) or "of a scalar"
            raise ReshardError(
                f"The layout '{self}' has {len(self.spec)} dimensions, the shape {sizes} has {len(shape)}. "
                "Give one word for each."
            )
        parts = [prod(self.mesh[axis] for axis in axes) for axes in self.spec]
        return [list(accumulate(slice_sizes(size, count), initial=0)) for size, count in zip(shape, parts, strict=True)]

    def tile(self, rank: int, shape: tuple[int, ...]) -> Box:
        """Return the box of a tensor of ``shape`` that ``rank`` holds; it may be empty. Raises
        ReshardError if the rank is not in the mesh."""
        if rank not in self._position:
            raise ReshardError(f"Rank {rank} is not in the mesh of '{self}', whose ranks are {_list(self.ranks)}.")
        return _box(self.cuts(shape), self.slice_of(rank))

    def holders(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Return the ranks that hold each distinct slice, by ``slice_of``; slices in order, ranks
        ascending."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in sorted(self.ranks):
            found.setdefault(self.slice_of(rank), []).append(rank)
        return {at: tuple(found[at]) for at in sorted(found)}


class Reshard(NamedTuple):
    """The transfer of a tensor of ``shape``, with ``itemsize`` bytes per element, from one layout
    to another."""

    source: TensorLayout
    destination: TensorLayout
    shape: tuple[int, ...]
    itemsize: int


def unit_tasks(source: TensorLayout, destination: TensorLayout, shape: tuple[int, ...]) -> tuple[UnitTask, ...]:
    """Return all boxes that must be sent, ordered by destination tile and then by source tile."""
    tasks = (
        UnitTask(box, holders, tuple(r for r in needing if r not in holders))
        for box, holders, needing in _meetings(source, destination, shape)
    )
    return tuple(task for task in tasks if task.receivers)


def local_copies(
    source: TensorLayout, destination: TensorLayout, shape: tuple[int, ...]
) -> tuple[tuple[Box, int], ...]:
    """Return (box, rank) of all boxes that a destination rank already holds as a source rank."""
    met = _meetings(source, destination, shape)
    return tuple((box, rank) for box, holders, needing in met for rank in needing if rank in holders)


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that elements ``start <= i < stop`` of a row-major array form, in order; at
    most two per dimension plus one.

    >>> print(*boxes_of_range((4, 3), 2, 10))
    [0:1, 2:3] [1:3, 0:3] [3:4, 0:1]
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    inner = prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # the rows that are completely inside the range

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
    """Yield (box, source ranks, destination ranks) for every pair of tiles that intersect.

    A destination slice intersects a run of neighbouring source slices along every dimension.
    Bisection finds the run, so the cost grows with the number of intersections, not with the
    product of the mesh sizes.
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
