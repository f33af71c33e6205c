"""Gradients of one rank in one flat buffer: weight gradients are added in place, slice after slice."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from plait.train.model import Share
from plait.train.parameters import Piece
from plait.train.wire import Wire, sum_over


class Gradients:
    """fp32 (fp64 for fp64 models) accumulators, a view per parameter."""

    def __init__(self, model: Share) -> None:
        first = next(iter(model.named.values()))
        self.dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        self.model = model
        self.flat = torch.zeros(sum(p.numel() for p in model.named.values()), dtype=self.dtype, device=first.device)
        self.named: dict[str, Tensor] = {}
        self._of: dict[nn.Parameter, Tensor] = {}
        offset = 0
        for name, parameter in model.named.items():
            self.named[name] = self._of[parameter] = self.flat[offset : offset + parameter.numel()].view(parameter.shape)
            offset += parameter.numel()

    def zero(self) -> None:
        """Forget everything, before the first micro-batch of a step."""
        self.flat.zero_()

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient of the parameter's own shape."""
        self._of[parameter].add_(gradient)

    def add_rows(self, parameter: nn.Parameter, rows: Tensor, gradient: Tensor) -> None:
        """Add ``gradient`` [M, H] into rows [M] of the parameter (an embedding's gradient)."""
        self._of[parameter].index_add_(0, rows, gradient.to(self.dtype))

    def add_product(self, parameter: nn.Parameter, output_gradient: Tensor, inputs: Tensor) -> None:
        """Add output_gradient^T @ inputs, [M, out] and [M, in], in one pass over the accumulator where the dtype allows."""
        accumulator = self._of[parameter]
        if inputs.dtype == self.dtype:
            accumulator.addmm_(output_gradient.t(), inputs)
        else:
            accumulator.add_(output_gradient.t() @ inputs)

    def finish(self, wire: Wire, *, sequence_parallel: bool) -> None:
        """Complete what several ranks hold: sum over the group what each rank has seen only a part of.

        Key/value heads held by several ranks: each copy has seen its own rank's query heads only. Sequence-parallel:
        replicated parameters have seen their own shard of the sequence only. One all-reduce, none if nothing is partial.
        """
        partial = [piece for piece in self.model.pieces if piece.dim is not None and piece.replicas > 1]
        if sequence_parallel:
            partial += [piece for piece in self.model.pieces if piece.dim is None]
        if not partial or wire.size == 1:
            return
        # Every piece at its place in the whole tensor, zeros elsewhere: one sum over the whole group serves all kinds.
        whole = [torch.zeros(piece.shape, dtype=self.dtype, device=self.flat.device) for piece in partial]
        for piece, tensor in zip(partial, whole, strict=True):
            piece.cut(tensor).copy_(self._view(piece))
        packed = sum_over(wire, torch.cat([tensor.reshape(-1) for tensor in whole]))
        for piece, tensor in zip(partial, packed.split([tensor.numel() for tensor in whole]), strict=True):
            self._view(piece).copy_(piece.cut(tensor.view(piece.shape)))

    def norm_square(self) -> Tensor:
        """This rank's share of the squared Euclidean norm, every logical number counted once over the tensor-parallel groups of all stages;
        fp64, 0-d."""
        square = torch.zeros((), dtype=torch.float64, device=self.flat.device)
        for piece in (piece for piece in self.model.pieces if not piece.copy):
            view = self._view(piece)
            # A blocked sum is exact enough for clipping in fp32, and does not copy the gradients to fp64.
            square += torch.linalg.vector_norm(view, dtype=view.dtype).double().square() / piece.replicas
        return square

    def norm(self, wire: Wire) -> Tensor:
        """Euclidean norm over the whole model; equal on all ranks."""
        return sum_over(wire, self.norm_square()).sqrt()

    def _view(self, piece: Piece) -> Tensor:
        return piece.view(self.named[piece.parameter])
