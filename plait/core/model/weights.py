"""The weights of a model: one row for every logical tensor. Parameters are counted, sharded units sized, and
what a rank holds of which tensor told, from these rows alone.

Shapes are letters of ``Letters``, which may be numbers or columns of many models; whether a model has a
tensor is a letter too, 0 or 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Literal, NamedTuple, TypeAlias

Number: TypeAlias = Any
"""A number, or a column of one for each model."""
Site = Literal["embed", "attn", "mlp", "down", "up", "head"]
Cut = Literal["", "even", "kv", "words"]
Letter = Literal["H", "2H", "Q", "2Q", "K", "F", "V", "P", "D", "A", "B", "B+R", "Q+R"]
Sums = Literal["never", "cut", "always"]
Condition = Literal["", "biased", "gated", "learned", "untied", "own norm", "own bias", "qk_norm", "direct", "latent"]


@dataclass(frozen=True, kw_only=True)
class Letters:
    """Sizes of a model. H: hidden. Q: all queries; K: all keys, and all values. F: of the MLP. V:
    vocabulary. P: learned positions. D: of a head. A, B: of latent queries, and of latent keys and values; R:
    numbers of a head that are rotated beside its others then. The others are 0 or 1: linear layers and norms
    have biases; a gate stands beside the MLP's first weight; positions are learned; the head has the
    embedding's weight; attention and MLP share one norm; queries and keys are normalised head by head;
    attention is latent."""

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
    D: Number = 0
    qk_norm: Number = 0
    A: Number = 0
    B: Number = 0
    R: Number = 0
    latent: Number = 0

    def size(self, letter: Letter) -> Number:
        """Numbers along a dimension."""
        match letter:
            case "2H" | "2Q":
                return 2 * getattr(self, letter[1])
            case "B+R":
                return self.B + self.R
            case "Q+R":  # of every head
                plain = isinstance(self.latent, int) and not self.latent
                return self.Q if plain else self.Q + self.Q // self.D * self.R
            case _:
                return getattr(self, letter)

    def has(self, condition: Condition) -> Number:
        """0 or 1."""
        match condition:
            case "":
                return 1
            case "untied":
                return 1 - self.tied
            case "direct":
                return 1 - self.latent
            case "own norm":
                return 1 - self.block
            case "own bias":  # in a parallel block both outputs are added at once: one bias serves both
                return self.biased * (1 - self.block)
            case _:
                return getattr(self, condition)


class Weight(NamedTuple):
    """A logical tensor, as nobody has cut it.

    site: the segment it is of. name: within ``layers.0.attn`` and the like. cut: what tensor parallelism
    divides the dimension ``dim`` by: ``even``, the ranks; ``kv``, key/value heads, of which several ranks may
    hold the same; ``words``, the ranks after padding; empty: whole on every rank. held: the module's
    parameter that holds it, with others in the order of the rows; its own name if empty. sums: whether
    ranks of a tensor-parallel group that hold the same add their gradients: where the sequence is cut, or
    always, as each sees other heads. over: of a norm within a core, the tensor whose result it normalises,
    in groups as long as itself. when: whether the model has it.
    """

    site: Site
    name: str
    shape: tuple[Letter, ...]
    cut: Cut = ""
    dim: int = 0
    held: str = ""
    sums: Sums = "never"
    over: str = ""
    when: Condition = ""

    def numbers(self, letters: Letters) -> Number:
        """How many it has; 0 if the model has no such tensor."""
        return letters.has(self.when) * prod(letters.size(letter) for letter in self.shape)


WEIGHTS: tuple[Weight, ...] = (
    Weight("embed", "embedding.weight", ("V", "H"), "words"),
    Weight("embed", "positions.weight", ("P", "H"), sums="cut", when="learned"),
    Weight("down", "weight", ("H", "2H")),
    Weight("down", "bias", ("H",)),
    Weight("up", "weight", ("H", "H")),
    Weight("up", "bias", ("H",)),
    Weight("attn", "norm.weight", ("H",), sums="cut"),
    Weight("attn", "norm.bias", ("H",), sums="cut", when="biased"),
    Weight("attn", "q.weight", ("Q", "H"), "even", held="column.weight", when="direct"),
    Weight("attn", "k.weight", ("K", "H"), "kv", sums="always", held="column.weight", when="direct"),
    Weight("attn", "v.weight", ("K", "H"), "kv", sums="always", held="column.weight", when="direct"),
    Weight("attn", "q_down.weight", ("A", "H"), sums="cut", when="latent"),
    Weight("attn", "q_down.norm", ("A",), sums="cut", when="latent"),
    Weight("attn", "q_up.weight", ("Q+R", "A"), "even", when="latent"),
    Weight("attn", "kv_down.weight", ("B+R", "H"), sums="cut", when="latent"),
    Weight("attn", "kv_down.norm", ("B",), sums="cut", when="latent"),
    Weight("attn", "kv_up.weight", ("2Q", "B"), "even", when="latent"),
    Weight("attn", "q.bias", ("Q",), "even", held="column.bias", when="biased"),
    Weight("attn", "k.bias", ("K",), "kv", sums="always", held="column.bias", when="biased"),
    Weight("attn", "v.bias", ("K",), "kv", sums="always", held="column.bias", when="biased"),
    Weight("attn", "q_norm.weight", ("D",), sums="always", over="q.weight", when="qk_norm"),
    Weight("attn", "k_norm.weight", ("D",), sums="always", over="k.weight", when="qk_norm"),
    Weight("attn", "o.weight", ("H", "Q"), "even", dim=1, held="row.weight"),
    Weight("attn", "o.bias", ("H",), held="row.bias", sums="cut", when="own bias"),
    Weight("mlp", "norm.weight", ("H",), sums="cut", when="own norm"),
    Weight("mlp", "norm.bias", ("H",), sums="cut", when="own bias"),
    Weight("mlp", "gate.weight", ("F", "H"), "even", held="column.weight", when="gated"),
    Weight("mlp", "up.weight", ("F", "H"), "even", held="column.weight"),
    Weight("mlp", "up.bias", ("F",), "even", held="column.bias", when="biased"),
    Weight("mlp", "down.weight", ("H", "F"), "even", dim=1, held="row.weight"),
    Weight("mlp", "down.bias", ("H",), held="row.bias", sums="cut", when="biased"),
    Weight("head", "norm.weight", ("H",), sums="cut"),
    Weight("head", "norm.bias", ("H",), sums="cut", when="biased"),
    Weight("head", "head.weight", ("V", "H"), "words", when="untied"),
)
MLP = tuple(weight for weight in WEIGHTS if weight.site == "mlp" and not weight.name.startswith("norm"))
"""An MLP without its norm, as experts are."""


@cache
def weights_of(*sites: Site) -> tuple[Weight, ...]:
    """Rows of these sites."""
    return tuple(weight for weight in WEIGHTS if weight.site in sites)


def matrices_of(*sites: Site) -> Iterator[Weight]:
    """Rows of these sites that are matrices: their numbers are the multiply-adds of a token."""
    return (weight for weight in weights_of(*sites) if len(weight.shape) > 1)


def widths(site: Site, letters: Letters, tp: Number = 1, kv: Number = 1) -> tuple[Number, Number]:
    """Numbers of a token on one rank: after a segment's first weight, and before its second. tp: ranks that
    divide a layer; kv: of them, those that divide key/value heads.

    >>> letters = Letters(H=8, Q=8, K=4, F=32, V=9, P=4, biased=0, gated=1, learned=0, tied=0, block=0)
    >>> widths("attn", letters), widths("mlp", letters, 2)
    ((16.0, 8.0), (32.0, 16.0))
    """
    cuts: dict[Cut, Number] = {"even": tp, "kv": kv}
    found = {"column.weight": 0, "row.weight": 0}
    for weight in weights_of(site):
        if weight.held in found:
            found[weight.held] += letters.has(weight.when) * letters.size(weight.shape[weight.dim]) / cuts[weight.cut]
    return found["column.weight"], found["row.weight"]


_WITHIN = [(norm, source) for norm in weights_of("attn") for source in weights_of("attn") if norm.over == source.name]


def normed(letters: Letters, tp: Number = 1, kv: Number = 1) -> tuple[Number, Number]:
    """Of norms within attention's core: the numbers of a token that they normalise on one rank, and the
    groups. tp, kv: as for ``widths``."""
    cuts, numbers, groups = {"even": tp, "kv": kv}, 0, 0
    for weight, source in _WITHIN:
        each = letters.has(weight.when) * letters.size(source.shape[0]) / cuts[source.cut]
        numbers, groups = numbers + each, groups + each / letters.size(weight.shape[0])
    return numbers, groups


def count(weights: Iterable[Weight], letters: Letters) -> Number:
    """Numbers of these tensors together."""
    return sum(weight.numbers(letters) for weight in weights)
