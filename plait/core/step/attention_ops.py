"""Context-parallel attention, as ops of an instruction list.

``cp`` ranks share a sequence. Groups of ``ulysses`` ranks exchange heads (all-to-all); keys and
values circulate along rings of ``ring`` ranks. One attention op becomes several, so that this
communication can overlap any other computation. The communication after an op stands behind ``>``:

    F  first weight, rotary positions         > exchange heads (ulysses)
    T  pass on a block of keys and values     > to the next rank of the ring; part j: block j
    K  attention core; part j: block j        > after the last part, exchange its output back (ulysses)
    X  core recomputed, after A; a ring keeps the core's output instead
    D  input gradient of the second weight    > exchange its heads (ulysses)
    S  as T, for the backward
    G  gradient of the core; part j: block    > if ring = 1, exchange the gradients of queries, keys and
       j + 1, the last part: the own block      values (ulysses)
    H  pass on the gradient of block j + 1    > finally to the rank that its keys and values came from
    E  gradients of queries, keys and values  > exchange them back to the ranks of their tokens (ulysses)
       after a ring
    Z  gradient of the first weight's output

A block is received while the previous block is computed, so at most two received blocks exist
besides the own block: T and S wait until the previous block is finished. In the forward the own
block comes first, concurrent with the first rotation. In the backward it comes last, so that the
last gradients in transit overlap it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plait.core.step.ops import ROTATES, Kind

OVERLAPS_OWN_BLOCK = frozenset((Kind.RING_SEND, Kind.RING_SEND_BACKWARD))
"""Op kinds whose collectives overlap attention to the rank's own blocks even without Domino-style
overlap (plain ring attention)."""


@dataclass(frozen=True)
class SharedAttention:
    """Context-parallel attention. ulysses: ranks that exchange heads. ring: ranks that circulate
    keys and values."""

    ulysses: int
    ring: int

    @property
    def forward(self) -> tuple[Kind, ...]:
        """Op kinds between the norm and the second weight."""
        return Kind.COLUMN_FORWARD, *((Kind.RING_SEND,) if self.ring > 1 else ()), Kind.ATTENTION_CORE

    @property
    def backward(self) -> tuple[Kind, ...]:
        """Op kinds before the input gradient of the first weight."""
        found = [Kind.ROW_DGRAD, Kind.CORE_BACKWARD]
        if self.ring > 1:
            found = [Kind.ROW_DGRAD, Kind.RING_SEND_BACKWARD, Kind.CORE_BACKWARD, Kind.RING_SEND_GRAD]
            found += [Kind.HEADS_EXCHANGE_GRAD] * (self.ulysses > 1)
        return *found, Kind.COLUMN_OUTPUT_GRAD

    def sends(self, kind: Kind) -> int:
        """Return how many parts of an op have a collective, if any part has one."""
        return max(1, self.ring - 1) if kind in ROTATES else 1

    def collective(self, kind: Kind, part: int, *, again: bool) -> Literal["all_to_all", "rotate"] | None:
        """Return the collective after an op, or None. again: True if attention is recomputed."""
        if kind in ROTATES:
            return "rotate"
        travels = {
            Kind.COLUMN_FORWARD: True, Kind.COLUMN_RECOMPUTE: again, Kind.ATTENTION_CORE: part == self.ring - 1,
            Kind.CORE_RECOMPUTE: True,
            Kind.ROW_DGRAD: True, Kind.CORE_BACKWARD: self.ring == 1, Kind.HEADS_EXCHANGE_GRAD: True,
        }.get(kind, False)  # fmt: skip
        return "all_to_all" if self.ulysses > 1 and travels else None

    def needs(self, kind: Kind, part: int, *, again: bool) -> list[tuple[Kind, int, bool]]:
        """Return the ops that an op needs in its own segment and slice, as (kind, part, True if its
        collective must have ended too). again: True if attention is recomputed."""
        last = self.ring - 1
        match kind:
            case Kind.RING_SEND | Kind.ATTENTION_CORE if part:
                return [(Kind.RING_SEND, part - 1, True), (Kind.ATTENTION_CORE, part - 1, False)]
            case Kind.RING_SEND:
                return [(Kind.COLUMN_FORWARD, 0, True)]
            case Kind.ATTENTION_CORE:
                return [(Kind.RING_SEND, 0, False)] if last else [(Kind.COLUMN_FORWARD, 0, True)]
            case Kind.ROW_FORWARD:
                return [(Kind.ATTENTION_CORE, last, True)]
            case Kind.CORE_RECOMPUTE:
                return [(Kind.COLUMN_RECOMPUTE, 0, True)]
            case Kind.ROW_RECOMPUTE:
                return [(Kind.CORE_RECOMPUTE, 0, True)]
            case Kind.ROW_DGRAD if again:
                return [(Kind.CORE_RECOMPUTE, 0, True)]
            case Kind.RING_SEND_BACKWARD if part:
                return [
                    (Kind.RING_SEND_BACKWARD, part - 1, True),
                    *([(Kind.CORE_BACKWARD, part - 2, False)] if part > 1 else []),
                ]
            case Kind.RING_SEND_BACKWARD if again:
                return [(Kind.CORE_RECOMPUTE, 0, False)]
            case Kind.CORE_BACKWARD:
                before = [(Kind.CORE_BACKWARD, part - 1, False), (Kind.RING_SEND_GRAD, part - 1, False)] if part else []
                return [
                    (Kind.ROW_DGRAD, 0, True),
                    *([(Kind.RING_SEND_BACKWARD, part, True)] if part < last else []),
                    *before,
                ]
            case Kind.RING_SEND_GRAD:
                return [(Kind.CORE_BACKWARD, part, False), *([(Kind.RING_SEND_GRAD, part - 1, True)] if part else [])]
            case Kind.COLUMN_OUTPUT_GRAD if self.ulysses > 1:
                return [(Kind.HEADS_EXCHANGE_GRAD, 0, True)] if last else [(Kind.CORE_BACKWARD, 0, True)]
            case Kind.HEADS_EXCHANGE_GRAD | Kind.COLUMN_OUTPUT_GRAD:
                return [(Kind.CORE_BACKWARD, last, False), (Kind.RING_SEND_GRAD, last - 1, True)]
            case Kind.COLUMN_DGRAD:
                return [(Kind.COLUMN_OUTPUT_GRAD, 0, False)]
            case Kind.WGRAD:
                return [(Kind.COLUMN_OUTPUT_GRAD if part == 1 else Kind.ROW_DGRAD, 0, False)]
            case _:
                return []

    def sorted(self, chain: list[tuple[Kind, int]]) -> list[tuple[Kind, int]]:
        """Return the ops, as (kind, part), in a legal order: ring transfers before the computation
        that may overlap them."""
        if self.ring == 1:
            return chain
        return sorted(chain, key=self._sort_key)

    def _sort_key(self, op: tuple[Kind, int]) -> tuple[int, int, int]:
        kind, part = op
        group = next(number for number, kinds in enumerate(_ORDER) if kind in kinds)
        if op == (Kind.RING_SEND_BACKWARD, 0):  # before the second weight's input gradient
            group = 4
        inside = {
            Kind.RING_SEND: (part, 0), Kind.ATTENTION_CORE: (part, 1),
            Kind.RING_SEND_BACKWARD: (part - 1, 0), Kind.CORE_BACKWARD: (part, 1), Kind.RING_SEND_GRAD: (part, 2),
        }  # fmt: skip
        return (group, *inside.get(kind, (0, 0)))


_ORDER = ("NF", "TK", "R", "MAXY", "", "D", "SGH", "EZCWJ")
