"""Sharded data parallelism as data: factors, groups of ranks, sharded units, and the optimizers
that update them, with the states that each optimizer keeps of a parameter.

A model's weights are replicated over R = dp x cp ranks. Parameters, gradients and optimizer states
are each sharded by a factor of their own: 1 <= params <= grads <= optim <= R, each dividing the
next (InternEvo, arXiv
2401.09149; AMSP, arXiv 2311.00257). A factor's group is made of neighbouring ranks. Shards are
nested: a rank's optimizer shard is a part of its gradient shard, which is a part of its parameter
shard. Named shardings:

    ddp          (1, 1, 1)      hsdp, mics         (k, k, k)
    zero1        (1, 1, R)      hierarchical FSDP  (k, k, R)
    zero2        (1, R, R)      hpz                (R, R, R) with ``secondary`` = k (ZeRO++, arXiv 2306.10209)
    zero3, fsdp  (R, R, R)

A *unit* is the matrices of one segment. They are gathered together, and their gradients are reduced
together. Vectors (norms, biases) form a unit too, of which only the optimizer states are sharded:
vectors are small, and every segment reads some. The same holds for the few matrices with which a
U-Transformer changes the sequence's length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Literal, TypeVar

from plait.core.base.errors import JobError
from plait.core.base.numbers import divisors
from plait.core.parallel.layout import Mesh

Level = Literal["params", "grads", "optim", "replicas"]
LEVELS: tuple[Level, ...] = ("params", "grads", "optim", "replicas")
Unit = tuple[str, int]
VECTORS: Unit = ("vectors", 0)
EXPERTS = "experts"
"""Kind of a unit that holds a layer's routed experts, which has fewer replicas than others."""
WHOLE = ("vectors", "down", "up")
"""Kinds of sharded units whose parameters and gradients stay whole on every rank: only their
optimizer states are sharded."""
_Size = TypeVar("_Size")


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Factors of parameters, gradients and optimizer states.

    secondary: neighbouring ranks that keep a second copy of the parameters between forward and
    backward, sharded among them, so that the backward's gathers stay within these ranks. 0: there
    is no second copy.

    >>> Sharding(params=2, grads=2, optim=4).shard(3, "optim", 80)
    (60, 80)
    """

    params: int = 1
    grads: int = 1
    optim: int = 1
    secondary: int = 0

    @staticmethod
    def named(point: str, ranks: int) -> Sharding:
        """Return the named sharding ``point`` for R = ``ranks``. Raises JobError for an unknown
        name."""
        factors = {
            "ddp": (1, 1, 1),
            "zero1": (1, 1, ranks),
            "zero2": (1, ranks, ranks),
            "zero3": (ranks,) * 3,
            "fsdp": (ranks,) * 3,
        }
        if point not in factors:
            raise JobError(f"'{point}' is no named sharding", key="strategy.shard",
                           changes=[{"strategy.shard": one} for one in factors])  # fmt: skip
        params, grads, optim = factors[point]
        return Sharding(params=params, grads=grads, optim=optim)

    def check(self, ranks: int) -> None:
        """Raise JobError, naming the key, if these factors cannot divide R = ``ranks``."""
        chain = [("params", self.params), ("grads", self.grads), ("optim", self.optim), ("", ranks)]
        for (name, factor), (wider, limit) in pairwise(chain):
            if factor < 1 or limit % factor:
                what = f"shard.{wider} = {limit}" if wider else f"the {ranks} ranks that hold the same weights"
                key = f"strategy.shard.{name}"
                raise JobError(
                    f"{factor} does not divide {what}",
                    key=key,
                    changes=[{key: one} for one in divisors(limit, factor)],
                )
        if self.secondary and (self.secondary < 2 or self.secondary >= self.params or self.params % self.secondary):
            raise JobError(
                f"{self.secondary} is no proper divisor above 1 of shard.params = {self.params}",
                key="strategy.shard.secondary",
                changes=[
                    *({"strategy.shard.secondary": one} for one in divisors(self.params, 2) if 1 < one < self.params),
                    {"strategy.shard.secondary": 0},
                ],
            )

    @property
    def keeps_buffers(self) -> bool:
        """True if weights and gradients are whole on every rank, each always at the same place in
        memory."""
        return self.params == self.grads == 1

    def of_experts(self, ep: int, tp: int = 1) -> Sharding:
        """Return the sharding of experts that ``ep`` ranks share out: a factor f above 1 becomes f tp /
        gcd(f tp, ep). tp: tensor-parallel ranks among which whole experts are shared out.

        >>> Sharding(params=2, grads=4, optim=8).of_experts(4)
        Sharding(params=1, grads=1, optim=2, secondary=0)
        """
        ranks = [factor * (tp if factor > 1 else 1) for factor in (self.params, self.grads, self.optim)]
        params, grads, optim = (factor // gcd(factor, ep) for factor in ranks)
        kept = self.secondary if self.secondary and params % self.secondary == 0 and self.secondary < params else 0
        return Sharding(params=params, grads=grads, optim=optim, secondary=kept)

    def factors(self, ranks: int) -> tuple[int, int, int, int]:
        """Return the factors of params, grads and optim, and R = ``ranks``."""
        return self.params, self.grads, self.optim, ranks

    def group(self, rank: int, level: Level, ranks: int) -> tuple[int, ...]:
        """Return ``rank``'s group of a level: the ranks, of 0 .. R-1, over which a unit is sharded
        further than at the level before. Only ``rank`` if it is not sharded further.

        >>> Sharding(params=2, grads=2, optim=4).group(5, "optim", 8)
        (5, 7)
        """
        factors = (1, *self.factors(ranks))
        inner, outer = factors[LEVELS.index(level)], factors[LEVELS.index(level) + 1]
        first = rank // outer * outer + rank % inner
        return tuple(range(first, first + outer, inner))

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that share one sharded secondary copy of the parameters with ``rank``,
        ``rank`` included."""
        k = max(1, self.secondary)
        return tuple(range(rank // k * k, rank // k * k + k))

    def shard(self, rank: int, level: Level, numel: int) -> tuple[int, int]:
        """Return (first, last + 1) of the elements that ``rank`` holds of a unit of ``numel``
        elements, a multiple of ``optim``."""
        start, inner = 0, 1
        for at, factor in zip(LEVELS, (self.params, self.grads, self.optim), strict=False):
            start += rank % factor // inner * (numel // factor)
            inner = factor
            if at == level:
                break
        return start, start + numel // inner

    def padded(self, numel: int) -> int:
        """Return ``numel`` rounded up so that every factor divides it."""
        step = self.optim * max(1, self.secondary)
        return -(-numel // step) * step


def unit_of(parameter: str, ndim: int) -> Unit:
    """Return the unit of a parameter, by its name (``layers.3.attn.column.weight``). Routers are
    small and whole on every rank, as vectors are."""
    words = parameter.split(".")
    if ndim == 1 or "router" in words:
        return VECTORS
    if "experts" in words:
        return EXPERTS, int(words[1])
    if words[0] == "layers":
        return words[2], int(words[1])
    return (words[0], int(words[1])) if words[0] in ("down", "up") else (words[0], 0)


def buffer_counts(units: Iterable[tuple[str, _Size]]) -> Counter[_Size]:
    """Return the number of buffers of each size, for units as (kind, size).

    Units of one kind and size need two buffers, of which one is filled while the other is used; a
    single unit needs one. Units of several kinds are in use at once (a layer's attention and MLP),
    even if they have one size.

    >>> dict(buffer_counts([("attn", 8), ("attn", 8), ("attn", 8), ("mlp", 8), ("head", 4)]))
    {8: 3, 4: 1}
    """
    found = Counter[_Size]()
    for (_, size), count in Counter(units).items():
        found[size] += min(2, count)
    return found


# ---- optimizers ----


OptimizerName = Literal["adamw", "muon", "sgd"]
Rule = OptimizerName
"""Update rule of a parameter. ``muon`` itself updates only the matrices of layers."""
STATES: Mapping[Rule, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum",), "sgd": ("momentum",),
}  # fmt: skip
"""Optimizer states that each update rule keeps of a parameter, besides its master weight."""
MUON_KINDS = ("attn", "mlp", "moe", "experts", "down", "up")
"""Kinds of units whose matrices Muon orthogonalises; AdamW updates embedding, positions and head
(Jordan 2024, https://kellerjordan.github.io/posts/muon/)."""


def rules_of(optimizer: OptimizerName) -> tuple[Rule, ...]:
    """Return all update rules that an optimizer uses."""
    return ("adamw", "muon") if optimizer == "muon" else (optimizer,)


def rule_of(optimizer: OptimizerName, unit: Unit) -> Rule:
    """Return the update rule of a unit.

    >>> rule_of("muon", ("attn", 3)), rule_of("muon", ("head", 0))
    ('muon', 'adamw')
    """
    return "adamw" if optimizer == "muon" and unit[0] not in MUON_KINDS else optimizer


# ---- matrices that are orthogonalised ----


MOST_SHARING = 8
"""Most replicas of an optimizer shard that share the work: with more, a replica would send its
matrices to more ranks than orthogonalising them itself costs."""


def flops(shape: tuple[int, int], iterations: int = 5) -> int:
    """Return the FLOPs of orthogonalising a matrix by Newton-Schulz iterations: three products
    each, on its shorter side.

    >>> flops((8, 4), 1)
    640
    """
    short, long = sorted(shape)
    return iterations * (4 * short * short * long + 2 * short**3)


def rounds(shapes: Mapping[str, tuple[int, int]], ranks: int) -> list[dict[int, str]]:
    """Return the rounds of orthogonalisation: in each, the matrix of every rank of the group. Each
    matrix is in one round, on one rank. Every other round assigns ranks in reverse order, which
    evens out their work.

    >>> rounds({"a": (2, 2), "b": (4, 4), "c": (2, 4)}, 2)
    [{0: 'b', 1: 'c'}, {1: 'a'}]
    """
    order = sorted(shapes, key=lambda name: (-flops(shapes[name]), name))
    found: list[dict[int, str]] = []
    for at in range(0, len(order), ranks):
        owners = range(ranks) if len(found) % 2 == 0 else range(ranks - 1, -1, -1)
        found.append(dict(zip(owners, order[at : at + ranks], strict=False)))
    return found


def shared_blocks(blocks: int) -> int:
    """Return how many of ``blocks`` replicas of an optimizer shard share the work.

    >>> [shared_blocks(blocks) for blocks in (1, 6, 12, 11)]
    [1, 6, 6, 1]
    """
    return next(some for some in range(min(blocks, MOST_SHARING), 0, -1) if blocks % some == 0)


def sharing(mesh: Mesh, sharding: Sharding, rank: int) -> tuple[int, ...]:
    """Return the ranks with which ``rank`` shares the matrices of its stages, in order.

    >>> sharing(Mesh(0, dp=4, tp=2), Sharding(optim=2), 5)
    (0, 1, 2, 3, 4, 5, 6, 7)
    """
    size = sharding.optim * shared_blocks(mesh.replicas // sharding.optim)
    own = mesh.replica(rank) // size
    return tuple(other for other in mesh.ranks if mesh.replica(other) // size == own)


def buffer_numel(largest: int, blocks: int = 1) -> int:
    """Return the number of elements of the buffers in which matrices travel. There are two of each
    of four kinds, as large as a rank's share of a round: parts sent and received, and results sent
    to ``blocks`` replicas of an optimizer shard, and received. largest: elements of the largest
    matrix."""
    return 4 * largest * (1 + min(blocks, MOST_SHARING))
