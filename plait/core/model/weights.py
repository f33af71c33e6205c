"""Weights of a model: one row for every logical tensor. Parameter counts, sizes of sharded units
and the tensors of a rank all follow from these rows.

Shapes are letters of ``Dimensions``, which may be numbers or arrays over many models. Letters of 0
or 1 say if a model has a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Literal, NamedTuple, TypeAlias

Number: TypeAlias = Any
"""A number, or an array with one number for each model."""
Sublayer = Literal["embed", "attn", "mlp", "moe", "experts", "down", "up", "head"]
Cut = Literal["", "even", "expert", "kv", "words"]
Letter = Literal["H", "2H", "Q", "2Q", "K", "F", "V", "P", "D", "A", "B", "B+R", "Q+R", "E", "G", "I", "1"]
Sums = Literal["never", "cut", "always"]
Condition = Literal[
    "", "biased", "gated", "learned", "untied", "own norm", "own bias", "qk_norm", "qkv bias", "direct", "latent",
    "shared", "shared_gate",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """Sizes of a model. H: hidden. Q: all queries. K: all keys, and all values. F: MLP. V:
    vocabulary. P: learned positions. D: a head. A, B: latent of queries, and of keys and values. R:
    rotated dimensions of a head in latent attention, in addition to its others. Further fields are
    0 or 1. biased: linear layers and norms have biases. gated: a gate stands next to the MLP's
    first weight. learned: positions are learned. tied: the head has the embedding's weight. block:
    attention and MLP share one norm. qk_norm: queries and keys are normalised head by head. qkv_bias:
    queries, keys and values have biases even if nothing else has. latent: attention is latent. E:
    routed experts. I: width of one; G: width of all shared experts together. shared_gate: a token
    scales their output."""

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
    qkv_bias: Number = 0
    A: Number = 0
    B: Number = 0
    R: Number = 0
    latent: Number = 0
    E: Number = 0
    I: Number = 0  # noqa: E741
    G: Number = 0
    shared_gate: Number = 0

    def size(self, letter: Letter) -> Number:
        """Return the size of a dimension."""
        match letter:
            case "2H" | "2Q":
                return 2 * getattr(self, letter[1])
            case "1":
                return 1
            case "B+R":
                return self.B + self.R
            case "Q+R":  # R for every head
                plain = isinstance(self.latent, int) and not self.latent
                return self.Q if plain else self.Q + self.Q // self.D * self.R
            case _:
                return getattr(self, letter)

    def has(self, condition: Condition) -> Number:
        """Return 1 if the model meets a condition of a weight's row (biased, gated, tied, ...),
        else 0."""
        match condition:
            case "":
                return 1
            case "untied":
                return 1 - self.tied
            case "direct":
                return 1 - self.latent
            case "qkv bias":
                return self.biased + self.qkv_bias
            case "shared":
                return int(self.G > 0)
            case "own norm":
                return 1 - self.block
            case "own bias":  # in a parallel block both outputs are added at once: one bias serves both
                return self.biased * (1 - self.block)
            case _:
                return getattr(self, condition)


class Weight(NamedTuple):
    """A logical tensor, before it is cut.

    sublayer: its sublayer. name: within ``layers.0.attn`` and the like. cut: division of dimension
    ``dim`` by tensor parallelism. ``even``: over the ranks; ``expert``: over those
    that cut an expert; ``kv``: over key/value heads, of which
    several ranks may hold the same; ``words``: over the ranks after padding; empty: whole on every
    rank. fused_into: the module's parameter that holds the tensor, together with others in the
    order of the rows; its own name if empty. grad_reduction: whether ranks of a tensor-parallel
    group that hold the same elements add their gradients: if the sequence is cut, or always, since
    each sees other heads. over: for a norm within attention's core, the tensor whose result it
    normalises, in groups of the norm's length. when: condition under which the model has the
    tensor.
    """

    sublayer: Sublayer
    name: str
    shape: tuple[Letter, ...]
    cut: Cut = ""
    dim: int = 0
    fused_into: str = ""
    grad_reduction: Sums = "never"
    over: str = ""
    when: Condition = ""

    def numel(self, letters: Dimensions) -> Number:
        """Return the number of elements; 0 if the model has no such tensor."""
        return letters.has(self.when) * prod(letters.size(letter) for letter in self.shape)


WEIGHTS: tuple[Weight, ...] = (
    Weight("embed", "embedding.weight", ("V", "H"), "words"),
    Weight("embed", "positions.weight", ("P", "H"), grad_reduction="cut", when="learned"),
    Weight("down", "weight", ("H", "2H")),
    Weight("down", "bias", ("H",)),
    Weight("up", "weight", ("H", "H")),
    Weight("up", "bias", ("H",)),
    Weight("attn", "norm.weight", ("H",), grad_reduction="cut"),
    Weight("attn", "norm.bias", ("H",), grad_reduction="cut", when="biased"),
    Weight("attn", "q.weight", ("Q", "H"), "even", fused_into="column.weight", when="direct"),
    Weight("attn", "k.weight", ("K", "H"), "kv", grad_reduction="always", fused_into="column.weight", when="direct"),
    Weight("attn", "v.weight", ("K", "H"), "kv", grad_reduction="always", fused_into="column.weight", when="direct"),
    Weight("attn", "q_down.weight", ("A", "H"), grad_reduction="cut", when="latent"),
    Weight("attn", "q_down.norm", ("A",), grad_reduction="cut", when="latent"),
    Weight("attn", "q_up.weight", ("Q+R", "A"), "even", when="latent"),
    Weight("attn", "kv_down.weight", ("B+R", "H"), grad_reduction="cut", when="latent"),
    Weight("attn", "kv_down.norm", ("B",), grad_reduction="cut", when="latent"),
    Weight("attn", "kv_up.weight", ("2Q", "B"), "even", when="latent"),
    Weight("attn", "q.bias", ("Q",), "even", fused_into="column.bias", when="qkv bias"),
    Weight("attn", "k.bias", ("K",), "kv", grad_reduction="always", fused_into="column.bias", when="qkv bias"),
    Weight("attn", "v.bias", ("K",), "kv", grad_reduction="always", fused_into="column.bias", when="qkv bias"),
    Weight("attn", "q_norm.weight", ("D",), grad_reduction="always", over="q.weight", when="qk_norm"),
    Weight("attn", "k_norm.weight", ("D",), grad_reduction="always", over="k.weight", when="qk_norm"),
    Weight("attn", "o.weight", ("H", "Q"), "even", dim=1, fused_into="row.weight"),
    Weight("attn", "o.bias", ("H",), fused_into="row.bias", grad_reduction="cut", when="own bias"),
    Weight("mlp", "norm.weight", ("H",), grad_reduction="cut", when="own norm"),
    Weight("mlp", "norm.bias", ("H",), grad_reduction="cut", when="own bias"),
    Weight("mlp", "gate.weight", ("F", "H"), "even", fused_into="column.weight", when="gated"),
    Weight("mlp", "up.weight", ("F", "H"), "even", fused_into="column.weight"),
    Weight("mlp", "up.bias", ("F",), "even", fused_into="column.bias", when="biased"),
    Weight("mlp", "down.weight", ("H", "F"), "even", dim=1, fused_into="row.weight"),
    Weight("mlp", "down.bias", ("H",), fused_into="row.bias", grad_reduction="cut", when="biased"),
    Weight("moe", "norm.weight", ("H",), grad_reduction="cut"),
    Weight("moe", "router.weight", ("E", "H"), grad_reduction="always"),
    Weight("moe", "shared.gate.weight", ("G", "H"), "even", fused_into="column.weight", when="shared"),
    Weight("moe", "shared.up.weight", ("G", "H"), "even", fused_into="column.weight", when="shared"),
    Weight(
        "moe", "shared_gate.weight", ("1", "H"), grad_reduction="always", fused_into="column.weight", when="shared_gate"
    ),
    Weight("moe", "shared.down.weight", ("H", "G"), "even", dim=1, fused_into="row.weight", when="shared"),
    Weight("experts", "gate.weight", ("I", "H"), "expert", fused_into="column.weight"),
    Weight("experts", "up.weight", ("I", "H"), "expert", fused_into="column.weight"),
    Weight("experts", "down.weight", ("H", "I"), "expert", dim=1, fused_into="row.weight"),
    Weight("head", "norm.weight", ("H",), grad_reduction="cut"),
    Weight("head", "norm.bias", ("H",), grad_reduction="cut", when="biased"),
    Weight("head", "head.weight", ("V", "H"), "words", when="untied"),
)
MLP = tuple(weight for weight in WEIGHTS if weight.sublayer == "mlp" and not weight.name.startswith("norm"))
"""Weights of an MLP without its norm, which are the weights of an expert."""


@cache
def weights_of(*sites: Sublayer) -> tuple[Weight, ...]:
    """Return the rows of these sublayers."""
    return tuple(weight for weight in WEIGHTS if weight.sublayer in sites)


def matrices_of(*sites: Sublayer) -> Iterator[Weight]:
    """Return the rows of these sublayers that are matrices: their elements are the multiply-adds of
    a token."""
    return (weight for weight in weights_of(*sites) if len(weight.shape) > 1)


def widths(site: Sublayer, letters: Dimensions, tp: Number = 1, kv: Number = 1) -> tuple[Number, Number]:
    """Return the elements of a token on one rank: after a sublayer's first weight, and before its
    second. tp: ranks that divide a layer. kv: how many of these divide key/value heads.

    >>> letters = Dimensions(H=8, Q=8, K=4, F=32, V=9, P=4, biased=0, gated=1, learned=0, tied=0, block=0)
    >>> widths("attn", letters), widths("mlp", letters, 2)
    ((16.0, 8.0), (32.0, 16.0))
    """
    cuts: dict[Cut, Number] = {"even": tp, "kv": kv}
    found = {"column.weight": 0, "row.weight": 0}
    for weight in weights_of(site):
        if weight.fused_into in found:
            found[weight.fused_into] += (
                letters.has(weight.when) * letters.size(weight.shape[weight.dim]) / cuts.get(weight.cut, 1)
            )
    return found["column.weight"], found["row.weight"]


_WITHIN = [(norm, source) for norm in weights_of("attn") for source in weights_of("attn") if norm.over == source.name]


def normed(letters: Dimensions, tp: Number = 1, kv: Number = 1) -> tuple[Number, Number]:
    """Return the elements of a token that norms within attention's core normalise on one rank, and
    the number of groups. tp, kv: as for ``widths``."""
    cuts, numbers, groups = {"even": tp, "kv": kv}, 0, 0
    for weight, source in _WITHIN:
        each = letters.has(weight.when) * letters.size(source.shape[0]) / cuts[source.cut]
        numbers, groups = numbers + each, groups + each / letters.size(weight.shape[0])
    return numbers, groups


def count(weights: Iterable[Weight], letters: Dimensions) -> Number:
    """Return the number of elements of these tensors together."""
    return sum(weight.numel(letters) for weight in weights)
