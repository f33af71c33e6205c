"""The segment of an expert layer: the ops of ``core.step.expert_ops`` on one slice, and the buffers
of their collectives.

T is the number of tokens that this rank routes, K of experts a token, M of rows that its experts
compute. Rows to be sent lie in the order of experts, and so of ranks; rows received lie by rank,
then by expert, and are sorted by expert for the products. An expert's weight of a token travels
behind the token's row and multiplies the activation, so that no rank keeps outputs of experts for
the weights' gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from plait.core.step.segments import Kind
from plait.train.comm.wire import Splits
from plait.train.engine.inflight import InFlight
from plait.train.engine.segment import Buffers, NormSegment, RunParts, Runs, SendParts, Sends, row_block
from plait.train.engine.sublayers import SublayerSegment
from plait.train.model import grouped, router
from plait.train.model.expert_layer import ExpertLayer, extra_columns, numbers_of, packed
from plait.train.model.grouped import RowGroups
from plait.train.model.kernels import EAGER, gradients_of, wide


@dataclass(frozen=True)
class Exchange:
    """Rows that this rank exchanges with the ranks that share out the experts.

    sent, received: numbers of rows to and from every rank. total: rows of all these ranks. order:
    [M], of received rows, by expert. groups: received rows of each expert.
    """

    sent: list[int]
    received: list[int]
    total: int
    order: Tensor
    groups: RowGroups

    @staticmethod
    def of(counts: Tensor, rank: int, device: torch.device) -> Exchange:
        """Return the exchange of a rank. counts: [ranks, experts] on the host."""
        ranks = counts.shape[0]
        by_rank = counts.view(ranks, ranks, -1)  # [source, target, expert of the target]
        own = by_rank[:, rank]  # [source, expert]
        chunks = torch.arange(own.numel()).view_as(own) % own.shape[1]
        order = chunks.flatten().repeat_interleave(own.flatten()).argsort(stable=True)
        return Exchange(
            by_rank[rank].sum(-1).tolist(),
            own.sum(-1).tolist(),
            int(counts.sum()),
            order.to(device),
            RowGroups.of(own.sum(0).tolist(), device),
        )

    def splits(self, width: int, *, back: bool = False) -> Splits:
        """Return the sizes of an all-to-all of rows of ``width`` numbers. back: to the ranks of the
        tokens."""
        into, out = (self.sent, self.received) if back else (self.received, self.sent)
        return Splits([rows * width for rows in into], [rows * width for rows in out], self.total * width)


@dataclass(kw_only=True, eq=False, repr=False)
class ExpertSegment(SublayerSegment):
    """The segment of an expert layer. token_share: the part of the step's tokens that one token
    is."""

    state: InFlight
    layer: int
    token_share: float
    logits: Tensor = field(init=False)  # [T, experts]
    chosen: Tensor = field(init=False)  # [T, K] experts, best first
    weights: Tensor = field(init=False)  # [T, K]
    choices: Tensor = field(init=False)  # [S, b, K + 1] of own tokens: experts, position
    routes: Tensor = field(init=False)  # the same of all ranks that route the sequences
    counts: Tensor = field(init=False)  # [1, 2, experts] of own tokens: rows, choices
    all_counts: Tensor = field(init=False)  # [ranks, 2, experts]
    load: Tensor = field(init=False)  # [b, experts] of whole sequences
    exchange: Exchange = field(init=False)
    groups: RowGroups = field(init=False)  # of ``exchange``, for gradients of weights
    order: Tensor = field(init=False)  # of own rows, the choice (token * K + number) that each is of
    places: Tensor = field(init=False)  # [T * K], of every choice its row; the row after the last if dropped
    going: Tensor = field(init=False)  # rows being sent
    come: Tensor = field(init=False)  # rows received; to tokens: and one of zeros behind them
    x: Tensor = field(init=False)  # [M, H] inputs of experts
    z: Tensor = field(init=False)  # [M, 2 I], an autograd leaf
    activated: Tensor = field(init=False)  # [M, I], with its autograd graph
    row_weights: Tensor = field(init=False)  # [M]
    g_logits: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.cores = []  # of shared experts

    @property
    def _layer(self) -> ExpertLayer:
        return cast("ExpertLayer", self.module)

    @property
    def _again(self) -> bool:
        return Kind.COLUMN_RECOMPUTE in self.recomputed_kinds

    def _own(self, full: Tensor) -> Tensor:
        """Return the tokens of [S, b, ...] that this rank routes, [T, ...]."""
        tokens = self._layer.own_tokens(full.shape[0])
        return full[tokens.start : tokens.stop].flatten(0, 1)

    # ---- forward ----

    def router(self) -> None:
        """Run op P: choose experts for the tokens that this rank routes."""
        layer, settings = self._layer, self._layer.settings
        rows = self._own(self.full)
        to = wide(rows.dtype)
        self.logits = rows.to(to) @ layer.router.weight.to(to).t()
        scores = router.scores_of(self.logits, settings)
        if self.shared.graph.backward:
            layer.counts.add_scores(scores)
        self.chosen = router.chosen_experts(scores, settings)
        self.weights = router.expert_weights(scores, self.chosen, settings)
        tokens, (_, b) = layer.own_tokens(self.shape[0]), self.shape
        positions = self.context.sequence_positions
        if positions is None:
            positions = torch.arange(self.shape[0], device=rows.device)
        here = positions[tokens.start : tokens.stop, None, None].expand(len(tokens), b, 1)
        self.choices = torch.cat((self.chosen.view(len(tokens), b, -1), here), dim=-1).int()
        self.routes = self.choices

    def router_buffers(self) -> Buffers:
        """Return (result, source) of the gather of choices over the ranks that route the same
        sequences, after op P."""
        size = self._layer.group.sequence.size
        self.routes = self.choices.new_empty((size * self.choices.shape[0], *self.choices.shape[1:]))
        return self.routes, self.choices

    def route_counts(self) -> None:
        """Run op B: drop choices beyond the capacity, and count those of each expert."""
        settings, count = self._layer.settings, self._layer.settings.count
        chosen, kept = self.routes[..., :-1].long(), torch.ones_like(self.chosen, dtype=torch.bool)
        self.load = router.load_of(chosen, settings)
        if settings.capacity:
            every = router.kept_choices(chosen, self.routes[:, 0, -1], settings)
            own, at = self.choices.shape[0], self._layer.group.sequence.rank
            kept = every[at * own : (at + 1) * own].reshape(self.chosen.shape)
        experts = self.chosen.masked_fill(~kept, count).flatten()
        self.order = experts.argsort(stable=True)
        every = torch.zeros((2, count + 1), dtype=torch.int64, device=experts.device)
        ones = torch.ones_like(experts)
        every[0].scatter_add_(0, experts, ones)
        every[1].scatter_add_(0, self.chosen.flatten(), ones)
        self.counts = self.all_counts = every[None, :, :count].contiguous()
        del self.routes, self.choices

    def route_counts_buffers(self) -> Buffers:
        """Return (result, source) of the gather of counts, after op B."""
        self.all_counts = self.counts.new_empty((self._layer.group.counted.size, *self.counts.shape[1:]))
        return self.all_counts, self.counts

    def dispatch(self) -> None:
        """Run op V: the host reads the counts; rows are sorted by expert."""
        group = self._layer.group
        here = self.all_counts[group.first : group.first + group.ep.size].cpu()
        if self.shared.graph.backward:
            self._layer.counts.choices += here.sum(0)
        self.exchange = Exchange.of(here[:, 0], group.ep.rank, self.order.device)
        choices, rows = self.order, sum(self.exchange.sent)
        self.order = choices[:rows]
        self.places = torch.full_like(choices, rows)
        self.places[self.order] = torch.arange(rows, device=choices.device)
        self._send_rows()
        if Kind.DISPATCH_RECOMPUTE not in self.recomputed_kinds:
            del self.weights

    def dispatch_recompute(self) -> None:
        """Run op I: send the same rows again, for the backward pass."""
        self._send_rows()
        del self.weights

    def _send_rows(self) -> None:
        rows, each = self._own(self.full), self.chosen.shape[1]
        numbers = self.weights.flatten()[self.order]
        self.going = self.come = packed(rows[self.order // each], numbers)

    def dispatch_buffers(self) -> Buffers:
        """Return (result, source) of the all-to-all of rows to their experts, after op V, I
        or D."""
        self.come = self.going.new_empty((sum(self.exchange.received), self.going.shape[1]))
        return self.come.view(-1), self.going.view(-1)

    def dispatch_splits(self) -> Splits:
        """Return the sizes of that all-to-all."""
        return self.exchange.splits(self.going.shape[1])

    def combine_splits(self) -> Splits:
        """Return the sizes of the all-to-all back to tokens."""
        return self.exchange.splits(self.going.shape[1], back=True)

    def _take_rows(self) -> None:
        """Sort the rows received by expert."""
        hidden = self.come.shape[1] - extra_columns(self.come.dtype)
        order = self.exchange.order
        self.x = self.come[:, :hidden].index_select(0, order)
        self.row_weights = numbers_of(self.come, wide(self.come.dtype))[order]
        self.z = grouped.product(self.x, self._layer.matrices()[0].transpose(1, 2), self.exchange.groups)
        del self.come, self.going

    def _activate(self, *, train: bool) -> Tensor:
        with torch.set_grad_enabled(train):
            found = EAGER.activate(self.z.requires_grad_(train), gated=True)
        if train:
            self.activated = found
        return found.detach()

    def _weighted(self, activated: Tensor) -> Tensor:
        """Return the experts' activations times the weights of their rows, [M, I]."""
        return activated * self.row_weights[:, None].to(activated.dtype)

    def experts(self) -> None:
        """Run op Q: the products of the experts."""
        graph, layer = self.shared.graph, self._layer
        self._take_rows()
        inner = self._weighted(self._activate(train=graph.backward and not self._again))
        found = grouped.product(inner, layer.matrices()[1].transpose(1, 2), self.exchange.groups)
        if not graph.backward or (self._again and graph.recompute != "selective"):
            del self.x, self.z, self.row_weights
        self._send_back(found)

    def _send_back(self, rows: Tensor) -> None:
        """Sort rows of experts by the rank of their tokens."""
        count, width = rows.shape
        alone = self._layer.group.ep.size == 1  # then these are the rows that come
        self.going = rows.new_empty((count + alone, width))
        self.going[:count].index_copy_(0, self.exchange.order, rows)
        if alone:
            self.going[count] = 0
            self.come = self.going

    def combine_buffers(self) -> Buffers:
        """Return (result, source) of the all-to-all of rows back to their tokens, after op Q
        or U."""
        rows = sum(self.exchange.sent)
        self.come = self.going.new_empty((rows + 1, self.going.shape[1]))
        self.come[rows] = 0
        return self.come[:rows].view(-1), self.going.view(-1)

    def row_forward(self, part: int) -> None:
        """Run one column part of op R: the sum of each token's rows, and the shared experts."""
        parts, (sequence, b) = self.shared.graph.p2, self.shape
        width = self.come.shape[1] // parts
        columns = slice(part * width, (part + 1) * width)
        tokens = self._layer.own_tokens(sequence)
        if part == 0:
            new = self.come.new_zeros if len(tokens) < sequence else self.come.new_empty
            self.y_partial = self.y = new((parts, sequence, b, width))
        own = self.y_partial[part][tokens.start : tokens.stop].view(-1, width)
        torch.sum(self._rows_of_tokens(self.come[:, columns]), dim=1, out=own)
        for core in self.cores:
            weight = core.module.row.weight[columns]
            self.y_partial[part].view(-1, width).addmm_(core.o, weight.t())
        if part == parts - 1:
            self._forget_forward()

    def _rows_of_tokens(self, rows: Tensor) -> Tensor:
        """Return the rows of every token, [T, K, ...]."""
        return rows.index_select(0, self.places).view(*self.chosen.shape, -1)

    def _forget_forward(self) -> None:
        """Free what is computed again, or was needed only by the forward."""
        backward = self.shared.graph.backward
        del self.come, self.going
        for core in self.cores:
            if core.repeats or not backward:
                del core.o
        if not backward or Kind.NORM_RECOMPUTE in self.recomputed_kinds:
            del self.n, self.full, self.statistics
        if not backward:
            del self.logits, self.chosen, self.order, self.places, self.exchange
            del self.counts, self.all_counts, self.load

    def column_forward(self) -> None:
        """Run op F: the shared experts' first weight and activation."""
        graph = self.shared.graph
        again, full = self._again, graph.recompute != "selective"
        self.cores = [self._make_core(branch, repeats=again) for branch in self.module.branches]
        for core in self.cores:
            core.project(self.full)
            core.activate(self.context, train=graph.backward and not core.repeats)
            if not graph.backward or (core.repeats and full):
                core.forget_first()

    def column_recompute(self) -> None:
        """Run op A: the first weights (unless recomputation is selective) and activations again."""
        super().column_recompute()
        if self.shared.graph.recompute != "selective":
            self._take_rows()
        self._activate(train=True)

    # ---- backward ----

    def row_dgrad(self) -> None:
        """Run op D: the gradients of rows, sorted by expert; the shared experts' backward."""
        gradient, self.operands = self._output_gradient(), {}
        for core in self.cores:
            self.operands[2] = gradient, core.backward(gradient)
            self.operands[3] = core.g_z, self.full.flatten(0, 1)
        own = self._own(gradient.view(*self.shape, -1))
        self.going = self.come = own[self.order // self.chosen.shape[1]]

    def experts_backward(self) -> None:
        """Run op U: the backward of the experts, but for gradients of their weights."""
        first, second = self._layer.matrices()
        groups = self.exchange.groups
        self.groups = groups
        gradient = self.come.index_select(0, self.exchange.order)
        del self.come, self.going
        through = grouped.product(gradient, second, groups)
        inner = self.activated.detach()
        of_weights = (through * inner).sum(-1, dtype=self.row_weights.dtype)
        (g_z,) = gradients_of(self.activated, [self.z], self._weighted(through))
        self.operands |= {0: (gradient, self._weighted(inner)), 1: (g_z, self.x)}
        del self.activated, self.z, self.row_weights, self.x
        self._send_back(packed(grouped.product(g_z, first, groups), of_weights))

    def router_backward(self) -> None:
        """Run op O: the gradients of the router's logits and of its weight."""
        layer = self._layer
        of_weights = self._rows_of_tokens(numbers_of(self.come, self.logits.dtype)[:, None])[..., 0]
        self.g_logits = router.logits_gradient(self.logits, self.chosen, of_weights, layer.settings, self._balance())
        self.shared.gradients.add_product(
            layer.router.weight, self.g_logits, self._own(self.full).to(self.g_logits.dtype)
        )
        del self.logits, self.full

    def _balance(self) -> router.BalanceShare:
        """Return what the balancing losses need of other tokens."""
        settings, layer = self._layer.settings, self._layer
        share = self.token_share * layer.balances
        load = None
        if settings.balance_loss:
            load = self.load
            if settings.balance != "sequence":
                load = self._common_load()[None].expand(self.shape[1], -1)
            load = load.to(self.logits.dtype).repeat(self.logits.shape[0] // self.shape[1], 1)
        return router.BalanceShare(load, share * settings.balance_loss, share * settings.z_loss)

    def _common_load(self) -> Tensor:
        """Return the load of the whole micro-batch, [experts]: of this replica, or of all."""
        slices = range(self.shared.graph.p1)
        every = [cast("ExpertSegment", self.state.segments["moe", self.layer, at]) for at in slices]
        if self._layer.settings.balance == "dp":
            total = torch.stack([one.all_counts[:, 1].sum(0) for one in every]).sum(0).double()
            return total / total.sum()
        return torch.cat([one.load for one in every]).mean(0)

    def column_dgrad(self, part: int) -> None:
        """Run one part of op C: the gradient of the layer's input."""
        parts = self.shared.parts
        if part == 0:
            tokens, (sequence, b) = self._layer.own_tokens(self.shape[0]), self.shape
            hidden = self.come.shape[1] - extra_columns(self.come.dtype)
            new = self.come.new_zeros if len(tokens) < sequence else self.come.new_empty
            self.g_full = self.g_n = new((sequence, b, hidden))
            own = self.g_full[tokens.start : tokens.stop].view(-1, hidden)
            torch.sum(self._rows_of_tokens(self.come[:, :hidden]), dim=1, out=own)
            own += (self.g_logits @ self._layer.router.weight.to(self.g_logits.dtype)).to(own.dtype)
            del self.come, self.going, self.g_logits, self.chosen, self.order, self.places
        for core in self.cores:
            rows = row_block(self.g_full.flatten(0, 1), part, parts)
            rows.addmm_(row_block(core.g_z, part, parts), core.module.column.weight)
        if part == parts - 1:
            del self.cores

    def wgrad(self, part: int) -> None:
        """Run one part of op W: the gradient of the experts' second or first weights, or of the
        shared experts'."""
        gradients, layer = self.shared.gradients, self._layer
        gradient, inputs = self.operands.pop(part)
        if part >= 2:
            weight = layer.column if part % 2 else layer.row
            gradients.add_product(weight.weight, gradient, inputs)
            return
        weight = layer.experts.column if part else layer.experts.row
        into = gradients.of(weight.weight).view(len(layer.held), -1, inputs.shape[1])
        grouped.add_weight_gradient(into, gradient, inputs, self.groups)

    def _forget(self) -> None:
        super()._forget()
        del self.exchange
        if not (self.shared.graph.experts and self.shared.graph.experts.waits):  # else other slices read them
            del self.counts, self.all_counts, self.load

    runs: ClassVar[Runs] = {
        **SublayerSegment.runs,
        Kind.COLUMN_FORWARD: column_forward,
        Kind.ROUTER: router,
        Kind.ROUTE_COUNTS: route_counts,
        Kind.DISPATCH: dispatch,
        Kind.EXPERTS: experts,
        Kind.DISPATCH_RECOMPUTE: dispatch_recompute,
        Kind.COLUMN_RECOMPUTE: column_recompute,
        Kind.ROW_DGRAD: row_dgrad,
        Kind.EXPERTS_BACKWARD: experts_backward,
        Kind.ROUTER_BACKWARD: router_backward,
    }
    run_parts: ClassVar[RunParts] = {
        Kind.ROW_FORWARD: row_forward, Kind.COLUMN_DGRAD: column_dgrad, Kind.WGRAD: wgrad
    }  # fmt: skip
    sends: ClassVar[Sends] = {
        Kind.NORM: NormSegment.norm_buffers, Kind.NORM_RECOMPUTE: NormSegment.norm_buffers,
        Kind.NORM_BACKWARD: SublayerSegment.norm_backward_buffers,
        Kind.ROUTER: router_buffers, Kind.ROUTE_COUNTS: route_counts_buffers,
        Kind.DISPATCH: dispatch_buffers, Kind.DISPATCH_RECOMPUTE: dispatch_buffers, Kind.ROW_DGRAD: dispatch_buffers,
        Kind.EXPERTS: combine_buffers, Kind.EXPERTS_BACKWARD: combine_buffers,
    }  # fmt: skip
    send_parts: ClassVar[SendParts] = {
        Kind.ROW_FORWARD: SublayerSegment.row_forward_buffers, Kind.COLUMN_DGRAD: NormSegment.column_dgrad_buffers
    }  # fmt: skip
    splits: ClassVar[Mapping[Kind, Callable[[Any], Splits]]] = {
        **dict.fromkeys((Kind.DISPATCH, Kind.DISPATCH_RECOMPUTE, Kind.ROW_DGRAD), dispatch_splits),
        **dict.fromkeys((Kind.EXPERTS, Kind.EXPERTS_BACKWARD), combine_splits),
    }
