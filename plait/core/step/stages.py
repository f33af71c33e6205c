"""Layers of pipeline stages, tensors that cross from one to another, and the gradient of tied embeddings.

The first and the last stage each hold a tied embedding and see a part of its gradient. When each has summed
its own part over its replicas, every rank has the range that its optimizer updates. Only that range is summed
with the other stage, by the ranks there that hold a part of it. A range is contiguous in the embedding
[vocabulary, hidden], flattened: tensor-parallel ranks share the vocabulary out in runs of rows, and sharding
cuts a run further. Equal places have equal ranges, so two ranks sum each. Places of unequal tp sum the union
of overlapping ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple, get_args

from plait.core.base.errors import JobError
from plait.core.model.spec import ModelSpec
from plait.core.model.weights import Site, Weight, weights_of
from plait.core.parallel.layout import Layout, Mesh
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import slice_sizes
from plait.core.step.schedule import Schedule

Number = Any
"""An int or a column [points] of ints."""


@dataclass(frozen=True)
class Stage:
    """``num_layers`` layers from ``first_layer``; the first stage also embeds, the last has the final norm,
    the head and the loss.

    >>> [stage.num_layers for stage in split_layers(7, 3)]
    [3, 2, 2]
    """

    index: int
    num_stages: int
    first_layer: int
    num_layers: int

    @property
    def embeds(self) -> bool:
        """Whether tokens enter here."""
        return self.index == 0

    @property
    def heads(self) -> bool:
        """Whether the loss is computed here."""
        return self.index == self.num_stages - 1

    @property
    def layers(self) -> range:
        """Its layers, counted from the model's first."""
        return range(self.first_layer, self.first_layer + self.num_layers)


class Placed(NamedTuple):
    """One site of a stage. number: of its layer, or of its level."""

    site: Site
    number: int = 0

    @property
    def prefix(self) -> str:
        """Of its tensors' names."""
        match self.site:
            case "attn" | "mlp":
                return f"layers.{self.number}.{self.site}."
            case "down" | "up":
                return f"{self.site}.{self.number}."
            case _:
                return ""


def placed_sites(model: ModelSpec, stage: Stage) -> Iterator[Placed]:
    """The sites that a stage has, in the order in which ranks hold their weights."""
    resampling = model.resampling
    if stage.embeds:
        yield Placed("embed")
    for layer in stage.layers:
        for before, site, level in resampling:
            if before == layer:
                yield Placed(site, level)
        yield Placed("attn", layer)
        yield Placed("mlp", layer)
    if stage.heads:
        yield Placed("head")


@cache
def rows_of(model: ModelSpec, *, embeds: bool) -> Mapping[Site, Sequence[Weight]]:
    """The tensors of each site: wherever a stage has it, it has these. embeds: whether the stage has the
    embedding; else the head has a weight of its own."""
    letters = replace(model.letters, tied=int(bool(model.tied_embeddings) and embeds))
    return {site: [weight for weight in weights_of(site) if letters.has(weight.when)] for site in get_args(Site)}


def stage_weights(model: ModelSpec, stage: Stage) -> Iterator[tuple[str, Weight]]:
    """(name, row) of every logical tensor that a stage has, in the order in which ranks hold them."""
    rows = rows_of(model, embeds=stage.embeds)
    return ((at.prefix + weight.name, weight) for at in placed_sites(model, stage) for weight in rows[at.site])


class Crossing(NamedTuple):
    """A tensor that one stage hands to another. level: how often its sequence has been halved."""

    name: str
    level: int


def crossings(model: ModelSpec, stages: Sequence[Stage]) -> dict[tuple[int, int], tuple[Crossing, ...]]:
    """By (producer, consumer): the residual stream ``h`` to the next stage, and skip connections (``skip0``)
    whose ends lie apart."""
    found = {(one.index, one.index + 1): [Crossing("h", model.level(one.layers[-1]))] for one in stages[:-1]}
    ends = {(direction, level): _stage_of(layer, stages) for layer, direction, level in model.resampling}
    for level in range(model.levels):
        edge = ends["down", level], ends["up", level]
        if edge[0] != edge[1]:
            found.setdefault(edge, []).append(Crossing(f"skip{level}", level))
    return {edge: tuple(tensors) for edge, tensors in sorted(found.items())}


def crossing_bytes(
    sequence: Number, samples: Number, hidden: Number, *, cut: Number, itemsize: Number, levels: Sequence[int] = (0,)
) -> Number:
    """Bytes that a rank has of what one micro-batch hands to another stage: a tensor [sequence / 2^level,
    samples, hidden] for each of ``levels``. cut: ranks that share the sequence: cp, times tp where the
    sequence is parallel. All but ``levels`` may be columns of strategies."""
    return sum((sequence // (1 << level) // cut * samples * hidden * itemsize for level in levels), start=0)


def _stage_of(layer: int, stages: Sequence[Stage]) -> int:
    return next(stage.index for stage in stages if layer in stage.layers)


def split_layers(num_layers: int, num_stages: int, given: Sequence[int] = ()) -> tuple[Stage, ...]:
    """The stages of a model; ``given``: layers of each, otherwise as equal as can be, earlier stages with
    more."""
    sizes = tuple(given) or slice_sizes(num_layers, num_stages)
    key, fix = "strategy.stage_layers", f"Give {num_stages} numbers whose sum is {num_layers}, or leave it out"
    if len(sizes) != num_stages or sum(sizes) != num_layers:
        raise JobError(f"{list(sizes)} does not divide {num_layers} layers over {num_stages} stages", key=key, fix=fix)
    if min(sizes) < 1:
        raise JobError(
            f"{num_layers} layers leave one of {num_stages} stages without a layer",
            key=key if given else "strategy.pp",
            fix=fix if given else "Use fewer stages",
        )
    return tuple(
        Stage(i, num_stages, first, size)
        for i, (first, size) in enumerate(zip(accumulate(sizes, initial=0), sizes, strict=False))
    )


class Tie(NamedTuple):
    """ranks: who sums, in ascending order. start, stop: the numbers of the flattened embedding that they sum.
    counts: whether this rank's part does; else another holds the same."""

    ranks: tuple[int, ...]
    start: int
    stop: int
    counts: bool

    @property
    def numbers(self) -> int:
        """How many are summed."""
        return self.stop - self.start


class _End(NamedTuple):
    """A place that holds the embedding."""

    mesh: Mesh
    sharding: Sharding
    model: ModelSpec

    @property
    def copies(self) -> int:
        """How many ranks hold the same range."""
        return self.mesh.replicas // self.sharding.optim

    def held(self, number: int, of: int) -> Iterator[tuple[int, int, int]]:
        """(first, last + 1, rank) of those whose copy has this number modulo ``of``."""
        mesh, sharding, vocab, hidden = self.mesh, self.sharding, self.model.vocab, self.model.hidden
        size = -(-vocab // mesh.tp) * hidden  # of a tensor-parallel rank's rows, padding included
        for copy in range(number, self.copies, of):
            for replica in range(copy * sharding.optim, (copy + 1) * sharding.optim):
                low, high = sharding.shard(replica, "optim", sharding.padded(size))
                for tp in range(mesh.tp):
                    first, last = (min(tp * size + min(at, size), vocab * hidden) for at in (low, high))
                    yield first, last, mesh.first + replica * mesh.tp + tp


def tie_of(rank: int, *, model: ModelSpec, layout: Layout, shardings: Sequence[Sharding], schedule: Schedule) -> Tie:
    """A rank's. Alone, with nothing to sum, where the embedding is not tied or its place does not hold it."""
    places = {schedule.rank_of[0], schedule.rank_of[schedule.num_stages - 1]}
    ends = [_End(layout.meshes[place], shardings[place], model) for place in sorted(places)]
    own = next((end for end in ends if rank in end.mesh.ranks), None)
    if own is None or not model.tied_embeddings or schedule.num_stages == 1:
        return Tie((rank,), 0, 0, True)
    classes, copy = min(end.copies for end in ends), own.mesh.replica(rank) // own.sharding.optim
    held = sorted(found for end in ends for found in end.held(copy % classes, classes))
    start, stop = next((first, last) for first, last, one in held if one == rank)
    if start == stop:  # padding only
        return Tie((rank,), start, stop, True)
    members, reach = list[int](), -1
    for first, last, one in held:
        if first == last:
            continue
        if first >= reach:  # nothing before it goes on to here
            if rank in members:
                break
            members, start = [], first
        members, reach = [*members, one], max(reach, last)
    return Tie(tuple(sorted(members)), start, reach, copy < classes)
