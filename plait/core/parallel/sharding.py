"""Sharded data parallelism as data: factors, groups of ranks, and the units that are sharded.

A model's weights are replicated over R = dp x cp ranks. Parameters, gradients and optimizer states are each
sharded by a factor of their own: 1 <= params <= grads <= optim <= R, each dividing the next (InternEvo, arXiv
2401.09149; AMSP, arXiv 2311.00257). A factor's group is made of neighbouring ranks. Shards are nested: what a
rank's optimizer updates is a part of the gradient it accumulates, which is a part of the parameters it keeps.
Named points:

    ddp          (1, 1, 1)      hsdp, mics         (k, k, k)
    zero1        (1, 1, R)      hierarchical FSDP  (k, k, R)
    zero2        (1, R, R)      hpz                (R, R, R) with ``secondary`` = k (ZeRO++, arXiv 2306.10209)
    zero3, fsdp  (R, R, R)

A *unit* is the matrices of one segment. They are gathered together, and their gradients are reduced together.
Vectors (norms, biases) are a unit too, of which only the optimizer states are sharded: they are small, and
every segment reads some. So are the few matrices with which a U-Transformer changes the sequence's length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeVar

from plait.core.base.errors import JobError
from plait.core.base.numbers import divisors

Level = Literal["params", "grads", "optim", "replicas"]
LEVELS: tuple[Level, ...] = ("params", "grads", "optim", "replicas")
Unit = tuple[str, int]
VECTORS: Unit = ("vectors", 0)
WHOLE = ("vectors", "down", "up")
"""Kinds of units that are cut for the optimizer only."""
_Size = TypeVar("_Size")


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Factors of parameters, gradients and optimizer states.

    secondary: so many neighbours keep a second copy of the parameters between forward and backward, sharded
    among them, so that backward gathers stay within these ranks. 0: there is no second copy.

    >>> Sharding(params=2, grads=2, optim=4).shard(3, "optim", 80)
    (60, 80)
    """

    params: int = 1
    grads: int = 1
    optim: int = 1
    secondary: int = 0

    @staticmethod
    def named(point: str, ranks: int) -> Sharding:
        """A named point for R = ``ranks``. Raises JobError for an unknown name."""
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
        """Raise JobError, naming the key, if R = ``ranks`` cannot be cut like this."""
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
    def stays(self) -> bool:
        """Whether weights and gradients are whole on every rank, each always in one place in memory."""
        return self.params == self.grads == 1

    def factors(self, ranks: int) -> tuple[int, int, int, int]:
        """params, grads, optim and R, level by level."""
        return self.params, self.grads, self.optim, ranks

    def group(self, rank: int, level: Level, ranks: int) -> tuple[int, ...]:
        """``rank``'s group of a level: the ranks, of 0 .. R-1, over which it is sharded further than the
        level before. Only ``rank`` where it is not sharded further.

        >>> Sharding(params=2, grads=2, optim=4).group(5, "optim", 8)
        (5, 7)
        """
        factors = (1, *self.factors(ranks))
        inner, outer = factors[LEVELS.index(level)], factors[LEVELS.index(level) + 1]
        first = rank // outer * outer + rank % inner
        return tuple(range(first, first + outer, inner))

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Who keeps the other parts of ``rank``'s secondary copy."""
        k = max(1, self.secondary)
        return tuple(range(rank // k * k, rank // k * k + k))

    def shard(self, rank: int, level: Level, numel: int) -> tuple[int, int]:
        """(first, last + 1) of what ``rank`` holds of a unit of ``numel`` numbers, a multiple of
        ``optim``."""
        start, inner = 0, 1
        for at, factor in zip(LEVELS, (self.params, self.grads, self.optim), strict=False):
            start += rank % factor // inner * (numel // factor)
            inner = factor
            if at == level:
                break
        return start, start + numel // inner

    def padded(self, numel: int) -> int:
        """``numel`` rounded up so that every factor divides it."""
        step = self.optim * max(1, self.secondary)
        return -(-numel // step) * step


def unit_of(parameter: str, ndim: int) -> Unit:
    """The unit of a parameter, by its name (``layers.3.attn.column.weight``)."""
    if ndim == 1:
        return VECTORS
    words = parameter.split(".")
    if words[0] == "layers":
        return words[2], int(words[1])
    return (words[0], int(words[1])) if words[0] in ("down", "up") else (words[0], 0)


def buffer_counts(units: Iterable[tuple[str, _Size]]) -> Counter[_Size]:
    """How many buffers there are of each size, for units of kinds and sizes.

    Two of a kind and size, of which one is filled while the other is used; one where there is one such unit.
    Units of several kinds are there at once (a layer's attention and MLP), also where they have one size.

    >>> dict(buffer_counts([("attn", 8), ("attn", 8), ("attn", 8), ("mlp", 8), ("head", 4)]))
    {8: 3, 4: 1}
    """
    found = Counter[_Size]()
    for (_, size), count in Counter(units).items():
        found[size] += min(2, count)
    return found
