"""Functions between matrix products, compiled: each is one pass over memory, by torch.compile.

Functions of plain tensors are compiled, forward and backward separately, never an autograd graph.
Rows are flattened to [M, ...]; M is dynamic, so that slices of other sizes need no recompilation.
Each function has a bounded number of variants (with or without bias, several column parts, a dim of
size 1). One more is an error, never a silent fallback to op by op. ``warm_up`` compiles a model's
functions ahead of use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from plait.core.base.env import single_threaded_compiler
from plait.train.model import formulas
from plait.train.model.dropout import Mask
from plait.train.model.kernels import Scale, Scores, Statistics, Summands

Table = Mapping[str, Callable[..., Any]]
"""Functions by the names of ``formulas.ALL``."""
MOST_VARIANTS = 16
"""Variants of one function in one process, at most."""


class Compiled:
    """The kernels (``plait.train.model.kernels.Kernels``) by ``functions``, the compiled
    formulas."""

    fuses = True

    def __init__(self, functions: Table) -> None:
        self.functions = functions
        self._constants: dict[tuple[float, torch.device], tuple[Tensor, Tensor]] = {}

    @torch.no_grad()  # autograd on and off would be two variants
    def norm(self, h: Tensor, scale: Scale) -> tuple[Tensor, Statistics]:
        """Return the norm of [S, B, H] and the row statistics that its gradient needs, in one
        compiled pass."""
        n, *statistics = self.functions[_kind(scale)](_flat(h), *_plain(scale))
        return n.view(h.shape), tuple(statistics)

    def norm_gradient(
        self, n: Tensor, h: Tensor, scale: Scale, statistics: Statistics, gradient: Tensor, past: Tensor | None
    ) -> list[Tensor]:
        """Return the gradients of h and of the norm's parameters; ``past`` is added to the former
        in the same pass."""
        function = self.functions[f"{_kind(scale)}_gradient"]
        rest = None if past is None else _flat(past)
        found, *parameters = function(_flat(gradient), rest, _flat(h), scale.weight.detach(), *statistics)
        return [found.view(h.shape), *parameters]

    def join(self, sum_: Summands) -> Tensor:
        """Return h + dropout(y + bias), computed in one pass including the mask."""
        return self.functions["join"](*self._summands(sum_)).view(sum_.h.shape)

    def join_norm(self, sum_: Summands, scale: Scale) -> tuple[Tensor, Tensor, Statistics]:
        """Return h + dropout(y + bias), its norm and the norm's statistics, computed in one
        pass."""
        function, shape = self.functions[f"join_{_kind(scale)}"], sum_.h.shape
        h, n, *statistics = function(*self._summands(sum_), *_plain(scale))
        return h.view(shape), n.view(shape), tuple(statistics)

    def activate(self, z: Tensor, *, gated: bool) -> Tensor:
        """Apply the activation: one pass forward, one backward, which starts from ``z``."""
        return _Activation.apply(z, "swiglu" if gated else "gelu", self.functions)  # type: ignore[no-any-return]

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys rotated by their positions, in one call."""
        return _Rotation.apply(q, k, cos, sin, self.functions)  # type: ignore[no-any-return]

    def weights(self, scores: Scores) -> tuple[Tensor, Tensor]:
        """Return (attention weights after softmax and dropout mask, log-sum-exp), in one pass."""
        return self.functions["weights"](*self._scores(scores), *self._thresholds(scores.mask))

    def weights_gradient(self, scores: Scores, lse: Tensor, gradient: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Return (attention weights, gradient of the scores' products) in one pass, with the mask
        recomputed."""
        products, root, queries, heads = self._scores(scores)
        return self.functions["weights_gradient"](
            gradient, products, root, lse, own, queries, heads, *self._thresholds(scores.mask)
        )

    def drop(self, x: Tensor, mask: Mask) -> Tensor:
        """Apply dropout; the mask is computed where it is used."""
        return self.functions["drop"](_flat(x), *self._dropout(mask)).view(x.shape)

    def local_loss(self, logits: Tensor, rows: Tensor, here: Tensor, beyond: int) -> tuple[Tensor, Tensor]:
        """Return (exponentials of the logits, loss statistics), in three passes."""
        beyond_here = beyond if beyond < logits.shape[1] else None
        statistics = self.functions["local_loss"](logits, rows, here, beyond_here)
        self.functions["exponentials"](logits, statistics[0, 0], beyond_here)
        return logits, statistics

    def _scores(self, scores: Scores) -> tuple[Tensor, float, Tensor, Tensor]:
        return scores.products, scores.root, scores.queries, scores.heads

    def _summands(self, sum_: Summands) -> tuple[Any, ...]:
        h, y, bias, mask = sum_
        flat, parts = _flat(h), y.reshape(y.shape[0], -1, y.shape[3])
        # A bias that requires a gradient would be another variant.
        return flat, parts, None if bias is None else bias.detach(), None if mask is None else self._dropout(mask)

    def _dropout(self, mask: Mask) -> formulas.Dropout:
        return self._rows(mask, mask.samples[None, :], mask.positions_or_heads[:, None]), *self._thresholds(mask)

    @torch.no_grad()
    def _rows(self, mask: Mask, first: Tensor, second: Tensor) -> Tensor:
        """Return the part of the hash that all elements of a row share, [M]."""
        key = mask.dropout.site(mask.layer, mask.site)
        if isinstance(key, int):
            key = torch.full((), key, dtype=torch.int64, device=first.device)
        return self.functions["rows"](key, first, second).view(-1)

    def _thresholds(self, mask: Mask) -> tuple[Tensor, Tensor]:
        """Return threshold and scale as tensors, because a Python number would be a constant of the
        compiled code."""
        at = mask.probability, mask.samples.device
        if at not in self._constants:
            least = torch.tensor(int(mask.probability * 2**32), device=at[1])
            self._constants[at] = least, torch.tensor(1.0 / (1.0 - mask.probability), device=at[1], dtype=torch.float64)
        return self._constants[at]


class Compiler:
    """Compiles the functions. through: the backend: makes a function of a graph and example inputs.
    variants: the number compiled so far, over all functions."""

    def __init__(self, through: Callable[[Any, Any], Any]) -> None:
        self.variants, self._through = 0, through

    def table(self) -> Table:
        """Return all formulas by name; each is compiled at its first call."""
        return {name: self._compiled(function) for name, function in formulas.ALL.items()}

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        compile_: Any = torch.compile  # its type overloads lack the limit
        return compile_(function, fullgraph=True, backend=self._backend, **variants())

    def _backend(self, graph: Any, inputs: Any) -> Any:
        self.variants += 1
        return self._through(graph, inputs)


def variants() -> dict[str, Any]:
    """Return the arguments of ``torch.compile`` that set ``MOST_VARIANTS``. torch before 2.13 has
    no limit per function; the process's limit is set instead."""
    if "recompile_limit" in signature(torch.compile).parameters:
        return {"recompile_limit": MOST_VARIANTS, "isolate_recompiles": True}
    settings: Any = importlib.import_module("torch._dynamo.config")
    settings.recompile_limit = max(MOST_VARIANTS, settings.recompile_limit)
    return {}


@lru_cache(maxsize=1)
def compiler() -> Compiler:
    """Return this process's compiler."""
    # No worker processes: every rank would have them as children. A thread-local setting would not reach
    # autograd's threads, which run backward passes on a GPU.
    single_threaded_compiler()
    from torch._inductor.compile_fx import compile_fx

    return Compiler(compile_fx)


@lru_cache(maxsize=1)
def compiled() -> Compiled:
    """Return this process's compiled kernels."""
    return Compiled(compiler().table())


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, name: str, of: Table) -> Tensor:
        ctx.of, ctx.name = of, name
        ctx.save_for_backward(z)
        o = of[name](_flat(z))
        return o.view(*z.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (z,) = ctx.saved_tensors
        return ctx.of[f"{ctx.name}_gradient"](_flat(gradients[0]), _flat(z)).view(z.shape), None, None


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, of: Table) -> tuple[Tensor, Tensor]:
        ctx.of = of
        ctx.save_for_backward(cos, sin)
        return of["rotate"](q.detach(), k.detach(), cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors  # both halves of the table are equal, so the transpose is the inverse rotation
        return *ctx.of["rotate_back"](*gradients, cos, sin), None, None, None


def _kind(scale: Scale) -> str:
    return "rms_norm" if scale.bias is None else "layer_norm"


def _plain(scale: Scale) -> tuple[Any, ...]:
    weight, bias, eps = scale
    return (weight.detach(), eps) if bias is None else (weight.detach(), bias.detach(), eps)


def _flat(x: Tensor) -> Tensor:
    """Return [..., H] as [M, H], contiguous and detached."""
    return x.detach().reshape(-1, x.shape[-1])
