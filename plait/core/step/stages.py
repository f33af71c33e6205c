"""Layers of pipeline stages, tensors that cross from one stage to another, and the gradient of tied
embeddings.

The first and the last stage each hold a copy of a tied embedding and compute a part of its
gradient. Each first sums its own part over its replicas; then every rank holds the range that its
optimizer updates. Only that range is summed with the other stage, by the ranks there that hold a
part of it. A range is contiguous in the flattened embedding [vocabulary, hidden]: tensor-parallel
ranks divide the vocabulary into runs of rows, and sharding cuts a run further. If both stages have
the same degrees, their ranges are equal and two ranks sum each. If their tp differs, they sum the
union of overlapping ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple, get_args

from plait.core.base.errors import JobError
from plait.core.model.spec import ModelSpec
from plait.core.model.weights import Sublayer, Weight, weights_of
from plait.core.parallel.layout import Layout, Mesh
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import slice_sizes
from plait.core.step.schedule import Schedule

Number = Any
"""An int, or an array [strategies] of ints."""


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: ``num_layers`` layers from ``first_layer``. The first stage also embeds;
    the last has the final norm, the head and the loss.

    >>> [stage.num_layers for stage in split_layers(7, 3)]
    [3, 2, 2]
    """

    index: int
    num_stages: int
    first_layer: int
    num_layers: int

    @property
    def embeds(self) -> bool:
        """True if the stage holds the embedding, where tokens enter."""
        return self.index == 0

    @property
    def heads(self) -> bool:
        """True if the stage computes the loss."""
        return self.index == self.num_stages - 1

    @property
    def layers(self) -> range:
        """The stage's layers, counted from the model's first."""
        return range(self.first_layer, self.first_layer + self.num_layers)


class PlacedSublayer(NamedTuple):
    """One sublayer of a stage. number: its layer, or its level for down and up."""

    site: Sublayer
    number: int = 0

    @property
    def prefix(self) -> str:
        """The prefix of the sublayer's tensor names."""
        match self.site:
            case "attn" | "mlp" | "moe":
                return f"layers.{self.number}.{self.site}."
            case "down" | "up":
                return f"{self.site}.{self.number}."
            case _:
                return ""


def placed_sites(model: ModelSpec, stage: Stage) -> Iterator[PlacedSublayer]:
    """Yield the sublayers of a stage, in the order in which ranks hold their weights."""
    resampling = model.resampling
    if stage.embeds:
        yield PlacedSublayer("embed")
    for layer in stage.layers:
        for before, site, level in resampling:
            if before == layer:
                yield PlacedSublayer(site, level)
        yield PlacedSublayer("attn", layer)
        yield PlacedSublayer("moe" if model.experts and model.experts.at(layer) else "mlp", layer)
    if stage.heads:
        yield PlacedSublayer("head")


@cache
def rows_of(model: ModelSpec, *, embeds: bool) -> Mapping[Sublayer, Sequence[Weight]]:
    """Return the weights of each kind of sublayer, the same in every stage that has one. embeds:
    True if the stage has the embedding; otherwise the head has a weight of its own."""
    letters = replace(model.letters, tied=int(bool(model.tied_embeddings) and embeds))
    return {site: [weight for weight in weights_of(site) if letters.has(weight.when)] for site in get_args(Sublayer)}


def stage_weights(model: ModelSpec, stage: Stage, experts: range | None = None) -> Iterator[tuple[str, Weight]]:
    """Yield (name, row) of every logical tensor of a stage, in the order in which ranks hold them.
    experts: the routed experts to include; None: all."""
    rows = rows_of(model, embeds=stage.embeds)
    for at in placed_sites(model, stage):
        yield from ((at.prefix + weight.name, weight) for weight in rows[at.site])
        if at.site == "moe" and model.experts:
            each = range(model.experts.count) if experts is None else experts
            yield from ((f"{at.prefix}experts.{one}.{row.name}", row) for one in each for row in rows["experts"])


class Crossing(NamedTuple):
    """A tensor that one stage sends to another. level: how often its sequence has been halved."""

    name: str
    level: int


def crossings(model: ModelSpec, stages: Sequence[Stage]) -> dict[tuple[int, int], tuple[Crossing, ...]]:
    """Return, by (producer, consumer), the tensors that cross stages: the residual stream ``h`` to
    the next stage, and skip connections (``skip0``) whose ends lie on different stages."""
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
    """Return the bytes that a rank holds of one micro-batch's tensors for another stage: one tensor
    [sequence / 2^level, samples, hidden] for each of ``levels``. cut: ranks that share the
    sequence: cp, times tp with sequence parallelism. All arguments but ``levels`` may be arrays
    over strategies."""
    return sum((sequence // (1 << level) // cut * samples * hidden * itemsize for level in levels), start=0)


def _stage_of(layer: int, stages: Sequence[Stage]) -> int:
    return next(stage.index for stage in stages if layer in stage.layers)


def split_layers(num_layers: int, num_stages: int, stage_layers: Sequence[int] = ()) -> tuple[Stage, ...]:
    """Return the stages of a model. stage_layers: layers of each stage; if empty, layers are
    divided as evenly as possible, with more in earlier stages. Raises JobError if the numbers do
    not fit."""
    sizes = tuple(stage_layers) or slice_sizes(num_layers, num_stages)
    key, fix = "strategy.stage_layers", f"Give {num_stages} numbers whose sum is {num_layers}, or leave it out"
    if len(sizes) != num_stages or sum(sizes) != num_layers:
        raise JobError(
            f"{list(sizes)} is not a division of {num_layers} layers over {num_stages} stages", key=key, fix=fix
        )
    if min(sizes) < 1:
        if stage_layers:
            raise JobError(f"{list(sizes)} leaves a stage without a layer", key=key, fix=fix)
        problem = f"{num_layers} layers cannot fill {num_stages} stages"
        raise JobError(problem, key="strategy.pp", fix="Use fewer stages")
    return tuple(
        Stage(i, num_stages, first, size)
        for i, (first, size) in enumerate(zip(accumulate(sizes, initial=0), sizes, strict=False))
    )


class TiedGradient(NamedTuple):
    """A rank's part in summing a tied embedding's gradient. ranks: the ranks that sum, ascending.
    start, stop: their range of the flattened embedding. counts: True if this rank contributes its
    values; otherwise another rank with the same values does."""

    ranks: tuple[int, ...]
    start: int
    stop: int
    counts: bool

    @property
    def numbers(self) -> int:
        """How many numbers are summed."""
        return self.stop - self.start


class _End(NamedTuple):
    """One end of the pipeline: a pp rank that holds a copy of the tied embedding."""

    mesh: Mesh
    sharding: Sharding
    model: ModelSpec

    @property
    def copies(self) -> int:
        """Number of ranks of the pp rank that hold the same range of the embedding."""
        return self.mesh.replicas // self.sharding.optim

    def held(self, number: int, of: int) -> Iterator[tuple[int, int, int]]:
        """Yield (start, stop, rank) of the ranges in copies whose index modulo ``of`` is
        ``number``."""
        mesh, sharding, vocab, hidden = self.mesh, self.sharding, self.model.vocab, self.model.hidden
        size = -(-vocab // mesh.tp) * hidden  # numbers in a tensor-parallel rank's rows, padding included
        for copy in range(number, self.copies, of):
            for replica in range(copy * sharding.optim, (copy + 1) * sharding.optim):
                low, high = sharding.shard(replica, "optim", sharding.padded(size))
                for tp in range(mesh.tp):
                    first, last = (min(tp * size + min(at, size), vocab * hidden) for at in (low, high))
                    yield first, last, mesh.first + replica * mesh.tp + tp


def tie_of(
    rank: int, *, model: ModelSpec, layout: Layout, shardings: Sequence[Sharding], schedule: Schedule
) -> TiedGradient:
    """Return a rank's part in the sum. The rank is alone, with an empty range, if the embedding is
    not tied or is not on its pp rank."""
    pp_ranks = {schedule.rank_of[0], schedule.rank_of[schedule.num_stages - 1]}
    ends = [_End(layout.meshes[pp_rank], shardings[pp_rank], model) for pp_rank in sorted(pp_ranks)]
    own = next((end for end in ends if rank in end.mesh.ranks), None)
    if own is None or not model.tied_embeddings or schedule.num_stages == 1:
        return TiedGradient((rank,), 0, 0, True)
    classes, copy = min(end.copies for end in ends), own.mesh.replica(rank) // own.sharding.optim
    held = sorted(found for end in ends for found in end.held(copy % classes, classes))
    start, stop = next((first, last) for first, last, one in held if one == rank)
    if start == stop:  # padding only
        return TiedGradient((rank,), start, stop, True)
    members, reach = list[int](), -1
    for first, last, one in held:
        if first == last:
            continue
        if first >= reach:  # no earlier range overlaps this one
            if rank in members:
                break
            members, start = [], first
        members, reach = [*members, one], max(reach, last)
    return TiedGradient(tuple(sorted(members)), start, reach, copy < classes)
