"""Attention over a sequence that several ranks share, as ops of a segment list.

Where ``cp`` ranks share a sequence, groups of ``ulysses`` exchange heads (all-to-all), and keys and values
travel along rings of ``ring`` of them. What is one op elsewhere is then several, so that what travels can
hide behind anything else:

    F  first weight, rotary positions         > heads go where they are attended to (ulysses)
    T  keys and values that are here go on    > to the next rank of the ring; part j: block j
    K  the core; part j: block j of keys and values. After the last > what it gives goes back (ulysses)
    X  the core again, after A; a ring keeps what it gives
    D  input gradient of the second weight    > its heads (ulysses)
    S  as T, for the backward
    G  gradient of the core; part j: block j + 1, the last its own. ring = 1 > queries, keys, values (ulysses)
    H  gradient of block j + 1 goes on        > in the end to where its keys and values came from
    E  gradients of queries, keys and values, if they come from a ring > where their tokens are (ulysses)
    Z  gradient of what the first weight gives

A block is received while the one before is attended to, so two of them are there at most beside the own one:
T and S wait for the block before to be done with. The own block comes last in the backward, so that the last
gradients on their way home hide behind it; first in the forward, beside the first rotation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plait.core.step.ops import ROTATES, Kind

KEEPS_GOING = frozenset((Kind.ROTATE, Kind.ROTATE_AGAIN))
"""Kinds whose collectives even plain ring attention hides behind its own blocks."""


@dataclass(frozen=True)
class SharedAttention:
    """ulysses, ring: ranks that exchange heads, and that pass keys and values round."""

    ulysses: int
    ring: int

    @property
    def forward(self) -> tuple[Kind, ...]:
        """Kinds between the norm and the second weight."""
        return Kind.FIRST, *((Kind.ROTATE,) if self.ring > 1 else ()), Kind.CORE

    @property
    def backward(self) -> tuple[Kind, ...]:
        """Kinds before the input gradient of the first weight."""
        found = [Kind.SECOND_GRAD, Kind.CORE_GRAD]
        if self.ring > 1:
            found = [Kind.SECOND_GRAD, Kind.ROTATE_AGAIN, Kind.CORE_GRAD, Kind.ROTATE_GRAD]
            found += [Kind.HEADS_GRAD] * (self.ulysses > 1)
        return *found, Kind.PROJECTED_GRAD

    def sends(self, kind: Kind) -> int:
        """How many of an op's parts have a collective, if any has."""
        return max(1, self.ring - 1) if kind in ROTATES else 1

    def collective(self, kind: Kind, part: int, *, again: bool) -> Literal["all_to_all", "rotate"] | None:
        """What travels after an op. again: whether attention runs again."""
        if kind in ROTATES:
            return "rotate"
        travels = {
            Kind.FIRST: True, Kind.FIRST_AGAIN: again, Kind.CORE: part == self.ring - 1, Kind.CORE_AGAIN: True,
            Kind.SECOND_GRAD: True, Kind.CORE_GRAD: self.ring == 1, Kind.HEADS_GRAD: True,
        }.get(kind, False)  # fmt: skip
        return "all_to_all" if self.ulysses > 1 and travels else None

    def needs(self, kind: Kind, part: int, *, again: bool) -> list[tuple[Kind, int, bool]]:
        """What an op needs of its own segment and slice: (kind, part, whether its collective too). again:
        whether attention runs again."""
        last = self.ring - 1
        match kind:
            case Kind.ROTATE | Kind.CORE if part:
                return [(Kind.ROTATE, part - 1, True), (Kind.CORE, part - 1, False)]
            case Kind.ROTATE:
                return [(Kind.FIRST, 0, True)]
            case Kind.CORE:
                return [(Kind.ROTATE, 0, False)] if last else [(Kind.FIRST, 0, True)]
            case Kind.SECOND:
                return [(Kind.CORE, last, True)]
            case Kind.CORE_AGAIN:
                return [(Kind.FIRST_AGAIN, 0, True)]
            case Kind.SECOND_AGAIN:
                return [(Kind.CORE_AGAIN, 0, True)]
            case Kind.SECOND_GRAD if again:
                return [(Kind.CORE_AGAIN, 0, True)]
            case Kind.ROTATE_AGAIN if part:
                return [(Kind.ROTATE_AGAIN, part - 1, True), *([(Kind.CORE_GRAD, part - 2, False)] if part > 1 else [])]
            case Kind.ROTATE_AGAIN if again:
                return [(Kind.CORE_AGAIN, 0, False)]
            case Kind.CORE_GRAD:
                before = [(Kind.CORE_GRAD, part - 1, False), (Kind.ROTATE_GRAD, part - 1, False)] if part else []
                return [
                    (Kind.SECOND_GRAD, 0, True),
                    *([(Kind.ROTATE_AGAIN, part, True)] if part < last else []),
                    *before,
                ]
            case Kind.ROTATE_GRAD:
                return [(Kind.CORE_GRAD, part, False), *([(Kind.ROTATE_GRAD, part - 1, True)] if part else [])]
            case Kind.PROJECTED_GRAD if self.ulysses > 1:
                return [(Kind.HEADS_GRAD, 0, True)] if last else [(Kind.CORE_GRAD, 0, True)]
            case Kind.HEADS_GRAD | Kind.PROJECTED_GRAD:
                return [(Kind.CORE_GRAD, last, False), (Kind.ROTATE_GRAD, last - 1, True)]
            case Kind.FIRST_GRAD:
                return [(Kind.PROJECTED_GRAD, 0, False)]
            case Kind.WEIGHT_GRAD:
                return [(Kind.PROJECTED_GRAD if part == 1 else Kind.SECOND_GRAD, 0, False)]
            case _:
                return []

    def sorted(self, chain: list[tuple[Kind, int]]) -> list[tuple[Kind, int]]:
        """Ops in an order in which they may run: rotations before what may run beside them."""
        if self.ring == 1:
            return chain
        return sorted(chain, key=self._place)

    def _place(self, op: tuple[Kind, int]) -> tuple[int, int, int]:
        kind, part = op
        group = next(number for number, kinds in enumerate(_ORDER) if kind in kinds)
        if op == (Kind.ROTATE_AGAIN, 0):  # before the second weight's input gradient
            group = 4
        inside = {
            Kind.ROTATE: (part, 0), Kind.CORE: (part, 1),
            Kind.ROTATE_AGAIN: (part - 1, 0), Kind.CORE_GRAD: (part, 1), Kind.ROTATE_GRAD: (part, 2),
        }  # fmt: skip
        return (group, *inside.get(kind, (0, 0)))


_ORDER = ("NF", "TK", "R", "MAXY", "", "D", "SGH", "EZCWJ")
