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
from typing import Literal, TypeVar

K = TypeVar("K", bound=str)
KEEPS_GOING: frozenset[str] = frozenset("TS")
"""Kinds whose collectives even plain ring attention hides behind its own blocks."""


@dataclass(frozen=True)
class SharedAttention:
    """ulysses, ring: ranks that exchange heads, and that pass keys and values round."""

    ulysses: int
    ring: int

    @property
    def forward(self) -> str:
        """Kinds between N and R."""
        return "F" + "T" * (self.ring > 1) + "K"

    @property
    def backward(self) -> str:
        """Kinds before C."""
        several, both = self.ring > 1, self.ring > 1 and self.ulysses > 1
        return "D" + "S" * several + "G" + "H" * several + "E" * both + "Z"

    def parts(self, kind: str) -> int:
        """How many parts an op has."""
        return {"K": self.ring, "G": self.ring, "T": self.ring - 1, "S": self.ring - 1, "H": self.ring - 1}.get(kind, 1)

    def sends(self, kind: str) -> int:
        """How many of these have a collective, if any has."""
        return 1 if kind in "KG" else max(1, self.parts(kind))

    def collective(self, kind: str, part: int, *, again: bool) -> Literal["all_to_all", "rotate"] | None:
        """What travels after an op. again: whether attention runs again."""
        if kind in "TSH":
            return "rotate"
        travels = {"F": True, "A": again, "K": part == self.ring - 1, "G": self.ring == 1}.get(kind, kind in "XDE")
        return "all_to_all" if self.ulysses > 1 and travels else None

    def needs(self, kind: str, part: int, *, again: bool) -> list[tuple[str, int, bool]]:
        """What an op needs of its own segment and slice: (kind, part, whether its collective too). again:
        whether attention runs again."""
        last = self.ring - 1
        match kind:
            case "T" | "K" if part:
                return [("T", part - 1, True), ("K", part - 1, False)]
            case "T":
                return [("F", 0, True)]
            case "K":
                return [("T", 0, False)] if last else [("F", 0, True)]
            case "R":
                return [("K", last, True)]
            case "X":
                return [("A", 0, True)]
            case "D" if again:
                return [("X", 0, True)]
            case "S" if part:
                return [("S", part - 1, True), *([("G", part - 2, False)] if part > 1 else [])]
            case "S" if again:
                return [("X", 0, False)]
            case "G":
                before = [("G", part - 1, False), ("H", part - 1, False)] if part else []
                return [("D", 0, True), *([("S", part, True)] if part < last else []), *before]
            case "H":
                return [("G", part, False), *([("H", part - 1, True)] if part else [])]
            case "Z" if self.ulysses > 1:
                return [("E", 0, True)] if last else [("G", 0, True)]
            case "E" | "Z":
                return [("G", last, False), ("H", last - 1, True)]
            case "C":
                return [("Z", 0, False)]
            case "W":
                return [("Z" if part == 1 else "D", 0, False)]
            case _:
                return []

    def sorted(self, chain: list[tuple[K, int]]) -> list[tuple[K, int]]:
        """Ops in an order in which they may run: rotations before what may run beside them."""
        if self.ring == 1:
            return chain
        return sorted(chain, key=self._place)

    def _place(self, op: tuple[str, int]) -> tuple[int, int, int]:
        kind, part = op
        group = _ORDER.index("first S" if op == ("S", 0) else _GROUPS[kind])
        inside = {"T": (part, 0), "K": (part, 1), "S": (part - 1, 0), "G": (part, 1), "H": (part, 2)}
        return (group, *inside.get(kind, (0, 0)))


_ORDER = ("NF", "TK", "R", "MAX", "first S", "D", "SGH", "EZCWJ")
_GROUPS = {kind: group for group in _ORDER if group != "first S" for kind in group}
