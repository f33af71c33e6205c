"""Expert layers, as ops of an instruction list: their router, the exchange of tokens with the ranks
that hold the experts, and the experts' products.

The communication after an op stands behind ``>``:

    P  scores of all experts, choice of experts for each token   > gather choices over the ranks of a sequence
    B  drop tokens beyond the capacity; count tokens per expert  > gather counts, the exchange's sizes
    V  rows of tokens, sorted by expert                          > to the ranks of their experts (dispatch)
    Q  the experts' products                                     > back to the ranks of their tokens (combine)
    R  sum of a token's rows, and the shared experts
    I  as V, and A as the first part of Q, if the forward did not keep its results
    D  gradients of rows, sorted by expert                       > to the ranks of their experts
    U  backward of the experts, without gradients of weights     > back to the ranks of their tokens
    O  backward of the router, with its weight's gradient
    C  gradient of the segment's input

F, and parts 2 and 3 of W, are the shared experts' as in an MLP; parts 0 and 1 of W are the routed
experts' second and first weights. The choice of experts is kept for the backward, so that
recomputation cannot choose others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plait.core.step.ops import Kind

NEEDS: dict[Kind, tuple[Kind, ...]] = {
    Kind.ROUTER: (Kind.NORM,),
    Kind.ROUTE_COUNTS: (Kind.ROUTER,),
    Kind.DISPATCH: (Kind.ROUTE_COUNTS,),
    Kind.EXPERTS: (Kind.DISPATCH,),
    Kind.ROW_FORWARD: (Kind.EXPERTS,),
    Kind.DISPATCH_RECOMPUTE: (Kind.NORM_RECOMPUTE,),
    Kind.COLUMN_RECOMPUTE: (Kind.DISPATCH_RECOMPUTE,),
    Kind.EXPERTS_BACKWARD: (Kind.COLUMN_RECOMPUTE, Kind.ROW_DGRAD),
    Kind.ROUTER_BACKWARD: (Kind.EXPERTS_BACKWARD,),
    Kind.COLUMN_DGRAD: (Kind.ROUTER_BACKWARD,),
}
"""Ops of the same segment and slice that an op needs, besides those of any sublayer."""
EXCHANGED = frozenset((Kind.DISPATCH, Kind.EXPERTS, Kind.DISPATCH_RECOMPUTE, Kind.ROW_DGRAD, Kind.EXPERTS_BACKWARD))
"""Op kinds whose rows travel between the ranks that share out the experts."""


@dataclass(frozen=True)
class ExpertOps:
    """The expert layers of a stage. layers: their numbers. ep: ranks that share out the experts.
    counted: True if ranks gather each other's counts of tokens. split: True if several ranks hold a
    sequence's tokens and must know each other's choices. shared: True if there are shared experts.
    waits: True if the router's gradient needs the choices of all slices. awaited: True if exchanges
    overlap nothing."""

    layers: tuple[int, ...]
    ep: int = 1
    counted: bool = False
    split: bool = False
    shared: bool = False
    waits: bool = False
    awaited: bool = False

    @property
    def forward(self) -> tuple[Kind, ...]:
        """Op kinds of the forward, in an order in which one slice could run them."""
        first = (Kind.NORM, Kind.ROUTER, Kind.ROUTE_COUNTS, Kind.DISPATCH)
        return (*first, *((Kind.COLUMN_FORWARD,) if self.shared else ()), Kind.EXPERTS, Kind.ROW_FORWARD)

    @property
    def backward(self) -> tuple[Kind, ...]:
        """Op kinds of the backward."""
        first = (Kind.ROW_DGRAD, Kind.EXPERTS_BACKWARD, Kind.ROUTER_BACKWARD)
        return (*first, Kind.COLUMN_DGRAD, Kind.WGRAD, Kind.NORM_BACKWARD)

    @property
    def weights(self) -> int:
        """Parts of W: matrices of the routed experts, and of shared ones."""
        return 4 if self.shared else 2

    def collective(self, kind: Kind) -> Literal["all_gather", "all_to_all"] | None:
        """Return the collective after an op, or None."""
        if kind in EXCHANGED and self.ep > 1:
            return "all_to_all"
        gathers = {Kind.ROUTER: self.split, Kind.ROUTE_COUNTS: self.counted}.get(kind, False)
        return "all_gather" if gathers else None
