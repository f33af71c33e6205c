"""The weights of a model: one row for every logical tensor, from which parameters are counted, sharded units
sized, and what each rank holds of which tensor is told.

Shapes are arithmetic over ``Letters``, without conditions, so that a row works on numbers and on columns of
many models alike: whether a model has a tensor is 0 or 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

Number = Any
"""A number, or a column of one for each model."""
Site = Literal["embed", "attn", "mlp", "down", "up", "head"]
Cut = Literal["", "heads", "kv", "words"]
Sums = Literal["never", "sp"]


@dataclass(frozen=True, kw_only=True)
class Letters:
    """Sizes of a model. H: hidden. Q: all queries; K: all keys, and all values. F: of the MLP. V:
    vocabulary. P: learned positions. The others are 0 or 1: biases; a gate beside the MLP's first weight;
    positions are learned; the head has the embedding's weight; attention and MLP share one norm."""

    H: Number
    Q: Number
    K: Number
    F: Number
    V: Number
    P: Number
    biased: Number
    gated: Number
    learned: Number
    tied: Number
    block: Number


Size = Callable[[Letters], Number]


class Weight(NamedTuple):
    """A logical tensor, as nobody has cut it.

    site: the segment it is of. name: within it; in ``layers.0.attn`` and the like for those of a layer. cut:
    which dimension tensor parallelism divides, and by what: ``heads`` or any even division; ``kv``, key/value
    heads, of which several ranks may hold the same; ``words``, padded; empty: whole on every rank. dim: the
    dimension. held: the module's parameter that holds it, with others in the order of the rows. sums: whether
    ranks of a tensor-parallel group add their gradients where the sequence is cut. when: whether the model
    has it.
    """

    site: Site
    name: str
    shape: tuple[Size, ...]
    cut: Cut = ""
    dim: int = 0
    held: str = ""
    sums: Sums = "never"
    when: Size = lambda x: 1

    @property
    def is_matrix(self) -> bool:
        """Whether it is of a unit of its own; vectors share one."""
        return len(self.shape) > 1

    def numbers(self, letters: Letters) -> Number:
        """How many it has; 0 if the model has no such tensor."""
        return self.when(letters) * prod(size(letters) for size in self.shape)


def _h(x: Letters) -> Number:
    return x.H


def _q(x: Letters) -> Number:
    return x.Q


def _k(x: Letters) -> Number:
    return x.K


def _f(x: Letters) -> Number:
    return x.F


def _biased(x: Letters) -> Number:
    return x.biased


def _own_norm(x: Letters) -> Number:
    return 1 - x.block


def _gated(x: Letters) -> Number:
    return x.gated


WEIGHTS: tuple[Weight, ...] = (
    Weight("embed", "embedding.weight", (lambda x: x.V, _h), "words"),
    Weight("embed", "positions.weight", (lambda x: x.P, _h), sums="sp", when=lambda x: x.learned),
    Weight("down", "weight", (_h, lambda x: 2 * x.H)),
    Weight("down", "bias", (_h,)),
    Weight("up", "weight", (_h, _h)),
    Weight("up", "bias", (_h,)),
    Weight("attn", "norm.weight", (_h,), sums="sp"),
    Weight("attn", "norm.bias", (_h,), sums="sp", when=_biased),
    Weight("attn", "q.weight", (_q, _h), "heads", held="column.weight"),
    Weight("attn", "k.weight", (_k, _h), "kv", held="column.weight"),
    Weight("attn", "v.weight", (_k, _h), "kv", held="column.weight"),
    Weight("attn", "q.bias", (_q,), "heads", held="column.bias", when=_biased),
    Weight("attn", "k.bias", (_k,), "kv", held="column.bias", when=_biased),
    Weight("attn", "v.bias", (_k,), "kv", held="column.bias", when=_biased),
    Weight("attn", "o.weight", (_h, _q), "heads", dim=1, held="row.weight"),
    # In a parallel block both outputs are added at once, and the MLP's bias serves both.
    Weight("attn", "o.bias", (_h,), held="row.bias", sums="sp", when=lambda x: x.biased * (1 - x.block)),
    Weight("mlp", "norm.weight", (_h,), sums="sp", when=_own_norm),
    Weight("mlp", "norm.bias", (_h,), sums="sp", when=lambda x: x.biased * (1 - x.block)),
    Weight("mlp", "gate.weight", (_f, _h), "heads", held="column.weight", when=_gated),
    Weight("mlp", "up.weight", (_f, _h), "heads", held="column.weight"),
    Weight("mlp", "up.bias", (_f,), "heads", held="column.bias", when=_biased),
    Weight("mlp", "down.weight", (_h, _f), "heads", dim=1, held="row.weight"),
    Weight("mlp", "down.bias", (_h,), held="row.bias", sums="sp", when=_biased),
    Weight("head", "norm.weight", (_h,), sums="sp"),
    Weight("head", "norm.bias", (_h,), sums="sp", when=_biased),
    Weight("head", "head.weight", (lambda x: x.V, _h), "words", when=lambda x: 1 - x.tied),
)


MLP = tuple(weight for weight in WEIGHTS if weight.site == "mlp" and not weight.name.startswith("norm"))
"""Of an MLP without its norm, as experts are."""


def weights_of(*sites: Site) -> Iterator[Weight]:
    """Rows of these sites."""
    return (weight for weight in WEIGHTS if weight.site in sites)


def count(weights: Iterable[Weight], letters: Letters) -> Number:
    """Numbers of these tensors together."""
    return sum(weight.numbers(letters) for weight in weights)
