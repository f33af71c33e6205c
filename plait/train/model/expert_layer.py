"""An expert layer's modules and process groups: a router, the experts that this rank holds, and
shared experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plait.core.model.experts import Experts
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.traffic import EXTRA_BYTES
from plait.train.comm.wire import Exchanger, NullWire, Wire
from plait.train.model import router
from plait.train.model.basics import SliceContext, WeightModule
from plait.train.model.kernels import EAGER, wide
from plait.train.model.sublayers import Sublayer


@dataclass(frozen=True)
class ExpertGroup:
    """One rank's process groups for experts.

    ep: ranks that share out the experts. counted: ranks whose counts of tokens are gathered; those
    of ``ep`` are neighbours there, from index ``first``. sequence: ranks that route tokens of the
    same sequences. held: the experts of this rank; None: all.
    """

    ep: Exchanger
    counted: Wire
    sequence: Wire
    first: int = 0
    held: range | None = None


ALL_EXPERTS = ExpertGroup(NullWire(), NullWire(), NullWire())


class RouterCounts:
    """Counts of a layer's router over the slices of a step, of the ranks that share out its experts.

    choices: [2, experts] on the host: rows of each expert, and choices of it, dropped ones included.
    entropy: of the scores of this rank's tokens, added up, in nats. tokens: their number.
    """

    def __init__(self, experts: int) -> None:
        self.choices = torch.zeros((2, experts), dtype=torch.int64)
        self.entropy, self.tokens = torch.zeros(()), 0

    def add_scores(self, scores: Tensor) -> None:
        """Count the entropy of some tokens' scores, [T, experts]."""
        even = scores / scores.sum(-1, keepdim=True)
        self.entropy, self.tokens = self.entropy + torch.special.entr(even).sum(), self.tokens + len(scores)

    @property
    def imbalance(self) -> float:
        """Rows of the expert that has most, over the mean."""
        rows = self.choices[0].double()
        return float(rows.max() / rows.mean()) if rows.any() else 1.0


def router_metrics(layers: Sequence[ExpertLayer]) -> dict[str, float]:
    """Return the metrics of some layers' routers over a step, and begin new counts. expert_load:
    rows of a layer's fullest expert over the mean, the largest of any layer. expert_dropped: share
    of choices that were dropped. router_entropy: mean over tokens and layers, in nats."""
    taken = [layer.counts for layer in layers]
    for layer in layers:
        layer.counts = RouterCounts(layer.settings.count)
    rows, choices = (sum(int(one.choices[at].sum()) for one in taken) for at in (0, 1))
    tokens = sum(one.tokens for one in taken)
    return {
        "expert_load": max(one.imbalance for one in taken),
        "expert_dropped": 1 - rows / choices if choices else 0.0,
        "router_entropy": float(sum(one.entropy for one in taken)) / max(1, tokens),
    }


class HeldExperts(nn.Module):
    """Weights of the routed experts that a rank holds. column: [experts * 2 I, H], of each expert
    its gate, then its up projection. row: [experts * H, I]."""

    def __init__(self) -> None:
        super().__init__()
        self.column, self.row = WeightModule(), WeightModule()


class ExpertLayer(Sublayer):
    """A router and experts in place of an MLP; ``column`` and ``row`` are the shared experts'."""

    site = "mlp"
    cheap = True

    def __init__(
        self, spec: ModelSpec, layer: int, strategy: Strategy, tp_rank: int, group: ExpertGroup = ALL_EXPERTS
    ) -> None:
        super().__init__(spec, layer)
        assert spec.experts is not None
        self.settings: Experts = spec.experts
        self.group, self.tp_rank, self.strategy = group, tp_rank, strategy
        self.held = group.held or range(self.settings.count)
        self.router, self.experts = WeightModule(), HeldExperts()
        self.counts = RouterCounts(self.settings.count)

    @property
    def branches(self) -> list[Sublayer]:
        """The shared experts, as one MLP; empty without shared experts."""
        return [self] if self.settings.shared else []

    def core(self, z: Tensor, context: SliceContext) -> Tensor:
        """Apply the shared experts' activation. The last column of ``z`` is the logit of their gate, if
        they have one."""
        if not self.settings.shared_gate:
            return context.kernels.activate(z, gated=True)
        return EAGER.activate(z[..., :-1], gated=True) * z[..., -1:].sigmoid()

    def routed(self, n: Tensor) -> Tensor:
        """Return the routed experts' output of the tokens [S, B, H], expert by expert; all experts are
        here, and no token is dropped."""
        rows, (first, second) = n.flatten(0, 1), self.matrices()
        scores = router.scores_of(rows.to(wide(n.dtype)) @ self.router.weight.to(wide(n.dtype)).t(), self.settings)
        chosen = router.chosen_experts(scores, self.settings)
        weights, found = router.expert_weights(scores, chosen, self.settings), torch.zeros_like(rows)
        for expert in range(self.settings.count):
            tokens, numbers = (chosen == expert).nonzero(as_tuple=True)
            inner = EAGER.activate(rows[tokens] @ first[expert].t(), gated=True)
            inner = inner * weights[tokens, numbers, None].to(inner.dtype)
            found.index_add_(0, tokens, inner @ second[expert].t())
        return found.view_as(n)

    def own_tokens(self, sequence: int) -> range:
        """Return the tokens of each sequence, of ``sequence`` on this tensor-parallel group, that
        this rank routes: all, or its share if its experts are whole."""
        if not self.strategy.whole_experts:
            return range(sequence)
        each = sequence // self.strategy.tp
        return range(self.tp_rank * each, (self.tp_rank + 1) * each)

    @property
    def balances(self) -> bool:
        """True if this rank counts the balancing losses of the tokens it routes; of ranks that
        route the same tokens one does."""
        return self.strategy.whole_experts or self.tp_rank == 0

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Return the experts' first weights, [experts, 2 I, H], and second, [experts, H, I]."""
        held = len(self.held)
        column, row = self.experts.column.weight, self.experts.row.weight
        return column.view(held, -1, column.shape[1]), row.view(held, -1, row.shape[1])


def extra_columns(dtype: torch.dtype) -> int:
    """Return the columns that a row of numbers of ``dtype`` has for its expert's weight: 16 bytes,
    so that rows stay aligned."""
    return EXTRA_BYTES // dtype.itemsize


def packed(rows: Tensor, numbers: Tensor) -> Tensor:
    """Return rows, [M, H], with a number of fp32 or fp64 behind each, [M, H + extra]."""
    width = rows.shape[1]
    found = rows.new_zeros((rows.shape[0], width + extra_columns(rows.dtype)))
    found[:, :width] = rows
    words = numbers.contiguous()[:, None].view(rows.dtype)
    found[:, width : width + words.shape[1]] = words
    return found


def numbers_of(buffer: Tensor, wide: torch.dtype) -> Tensor:
    """Return the numbers behind the rows of ``packed``, [M]."""
    first = buffer.shape[1] - extra_columns(buffer.dtype)
    words = wide.itemsize // buffer.dtype.itemsize
    return buffer[:, first : first + words].contiguous().view(wide)[:, 0]
