"""Which layers a pipeline stage holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

from plait.core.base.errors import JobError
from plait.core.model.spec import ModelSpec
from plait.core.model.weights import Site, Weight, weights_of
from plait.core.parallel.strategy import slice_sizes

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


def stage_weights(model: ModelSpec, stage: Stage) -> Iterator[tuple[str, Weight]]:
    """(name, row) of every logical tensor that a stage has, in the order in which ranks hold them. The head
    has a weight of its own where it has none of an embedding in the same stage."""
    letters = replace(model.letters, tied=int(bool(model.tied_embeddings) and stage.embeds))

    def named(prefix: str, site: Site) -> Iterator[tuple[str, Weight]]:
        return ((prefix + weight.name, weight) for weight in weights_of(site) if letters.has(weight.when))

    if stage.embeds:
        yield from named("", "embed")
    for layer in stage.layers:
        for before, site, level in model.resampling:
            if before == layer:
                yield from named(f"{site}.{level}.", site)
        yield from named(f"layers.{layer}.attn.", "attn")
        yield from named(f"layers.{layer}.mlp.", "mlp")
    if stage.heads:
        yield from named("", "head")


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
