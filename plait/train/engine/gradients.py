"""Gradient accumulators: flat, allocated once, in fp32 or fp64. Weight gradients are added in
place, slice after slice.

A unit whose gradient is sharded has no accumulator for the whole of it. It is *opened* on a buffer
before the first op that adds to it. Afterwards the buffer is reduced and added to this rank's shard
(``plait.train.engine.shards``).
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn

from plait.train.comm.wire import Wire, sum_over
from plait.train.model.pieces import Piece
from plait.train.model.transformer import Share
from plait.train.model.units import ShardBox, UnitStore


class Gradients:
    """fp32 (fp64 for fp64 models) accumulators of this rank's shards, with a view for each
    parameter that gradients can be added to.

    shards: by unit, the accumulated part. final: by unit, the part of it that this rank's optimizer
    uses. named: views for the parameters of units that are whole on this rank, by name.
    """

    def __init__(self, model: Share) -> None:
        first = next(iter(model.units.values())).kept
        self.dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        self.model = model
        self.expert_factor = 1.0
        """Factor of routed experts in ``norm_square``: they have other numbers of copies on ranks."""
        sizes = [store.numel // store.grads for store in model.units.values()]
        self.flat = torch.zeros(sum(sizes), dtype=self.dtype, device=first.device)
        self.shards = dict(zip(model.units, self.flat.split(sizes), strict=True))
        self.final = {unit: self.shards[unit][store.part("optim", "grads")] for unit, store in model.units.items()}
        self.named: dict[str, Tensor] = {}
        self._of: dict[nn.Parameter, Tensor] = {}
        self._shares: Tensor | None = None
        for unit, store in model.units.items():
            if store.grads == 1:
                self.open(store, self.shards[unit])

    def open(self, store: UnitStore, whole: Tensor) -> None:
        """Set ``whole`` as the accumulator of the unit's parameters."""
        for name, parameter in store.parameters.items():
            self.named[name] = self._of[parameter] = store.view(name, whole)

    def zero(self) -> None:
        """Set all accumulators to zero, before the first micro-batch of a step."""
        self.flat.zero_()

    def of(self, parameter: nn.Parameter) -> Tensor:
        """Return the accumulator of a parameter."""
        return self._of[parameter]

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient of the parameter's own shape."""
        self._of[parameter].add_(gradient)

    def add_rows(self, parameter: nn.Parameter, rows: Tensor, gradient: Tensor) -> None:
        """Add ``gradient`` [M, H] into rows [M] of the parameter (an embedding's gradient)."""
        accumulator, gradient = self._of[parameter], gradient.to(self.dtype)
        if accumulator.is_cuda:
            # index_put sorts the rows, so that a row's sum has a fixed order; index_add_ does not. The
            # private form skips the range check, for which some versions of torch make the host wait.
            torch.ops.aten._index_put_impl_(accumulator, [rows], gradient, True, True)
        else:
            accumulator.index_add_(0, rows, gradient)

    def add_product(self, parameter: nn.Parameter, output_gradient: Tensor, inputs: Tensor) -> None:
        """Add output_gradient^T @ inputs, [M, out] and [M, in], in one pass over the accumulator
        where the dtype allows."""
        accumulator = self._of[parameter]
        if inputs.dtype == self.dtype:
            accumulator.addmm_(output_gradient.t(), inputs)
        elif accumulator.is_cuda:  # products of bf16 are summed in fp32 there, and need not be rounded in between
            accumulator.add_(torch.mm(output_gradient.t(), inputs, out_dtype=self.dtype))
        else:
            accumulator.add_(output_gradient.t() @ inputs)

    def finish(self, wire: Wire, *, sequence_parallel: bool) -> None:
        """Complete the gradients that several tensor-parallel ranks hold in part, by a sum over the
        group.

        Always partial: key/value heads held by several ranks, and norms of heads. Each copy has
        only its own rank's query heads, or heads. Sequence-parallel: replicated parameters have
        only their own shard of the sequence. All ranks of the group have the same shards, so one
        all-reduce serves all: every set of replicas has its own row. There is none if nothing is
        partial.
        """
        shared = [(held.piece, view) for held, view in self.held if held.piece.replicas > 1]
        partial = [(piece, view) for piece, view in shared if sequence_parallel or piece.sums == "always"]
        if not partial or wire.size == 1:
            return
        rows = [view.new_zeros((wire.size // piece.replicas, view.numel())) for piece, view in partial]
        for row, (piece, view) in zip(rows, partial, strict=True):
            row[wire.rank // piece.replicas] = view.reshape(-1)
        packed = sum_over(wire, torch.cat([row.view(-1) for row in rows]))
        for row, found, (piece, view) in zip(rows, packed.split([row.numel() for row in rows]), partial, strict=True):
            view.copy_(found.view(row.shape)[wire.rank // piece.replicas].view(view.shape))

    @cached_property
    def held(self) -> list[tuple[ShardBox, Tensor]]:
        """The pieces that this rank's optimizer updates: ranges of logical tensors, and their
        gradients."""
        return [
            (held, held.of(self.final[unit]))
            for unit, store in self.model.units.items()
            for held in store.held("optim")
        ]

    def norm_square(self) -> Tensor:
        """Return this rank's share of the squared Euclidean norm of the gradient; fp64, 0-d. Every
        logical number counts once over the tensor-parallel groups of all stages and the shards of
        their optimizers."""
        if self.flat.is_cuda:
            return self._norm_square_at_once()
        square = torch.zeros((), dtype=torch.float64, device=self.flat.device)
        for held, view in self.held:
            if not held.piece.copy:
                # A blocked sum is exact enough for clipping in fp32, and does not copy the gradients to fp64.
                square += torch.linalg.vector_norm(view, dtype=view.dtype).double().square() / self._copies(held.piece)
        return square

    def _copies(self, piece: Piece) -> float:
        return piece.replicas / (self.expert_factor if piece.routed else 1.0)

    def _norm_square_at_once(self) -> Tensor:
        """Return the same in a few kernels, however many pieces there are; summed in another
        order."""
        counted = [(self._copies(held.piece), view) for held, view in self.held if not held.piece.copy]
        if not counted:
            return torch.zeros((), dtype=torch.float64, device=self.flat.device)
        norms = torch.stack(torch._foreach_norm([view for _, view in counted])).double()  # type: ignore[attr-defined]
        if self._shares is None:
            self._shares = norms.new_tensor([1 / replicas for replicas, _ in counted])
        return norms.square() @ self._shares

    def norm(self, wire: Wire) -> Tensor:
        """Return the Euclidean norm of the whole model's gradient; equal on all ranks."""
        return sum_over(wire, self.norm_square()).sqrt()
