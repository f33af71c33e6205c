"""What lies between matrix products, compiled: each function one pass over memory, by torch.compile.

Compiled are functions of plain tensors, forward and backward apart, never a graph of autograd's: rows are
flattened to [M, ...], so that a slice of another size is another M, which is no constant of the code. Each
has a bounded number of variants (whether there is a bias, several column parts, a dim of size 1); one more is
an error, never a silent fall back to op by op. ``warm_up`` compiles what a model needs before it is needed.
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
"""By the names of ``formulas.ALL``."""
MOST_VARIANTS = 16
"""Of one function in one process."""


class Compiled:
    """``plait.train.model.kernels.Kernels`` by ``functions``, the formulas, compiled."""

    fuses = True

    def __init__(self, functions: Table) -> None:
        self.functions = functions
        self._constants: dict[tuple[float, torch.device], tuple[Tensor, Tensor]] = {}

    @torch.no_grad()  # whether autograd is on would be another variant
    def norm(self, h: Tensor, scale: Scale) -> tuple[Tensor, Statistics]:
        """The norm, and what its rows have in common."""
        n, *statistics = self.functions[_kind(scale)](_flat(h), *_plain(scale))
        return n.view(h.shape), tuple(statistics)

    def norm_gradient(
        self, n: Tensor, h: Tensor, scale: Scale, statistics: Statistics, gradient: Tensor, past: Tensor | None
    ) -> list[Tensor]:
        """What goes past is added in the same pass."""
        function = self.functions[f"{_kind(scale)}_gradient"]
        rest = None if past is None else _flat(past)
        found, *parameters = function(_flat(gradient), rest, _flat(h), scale.weight.detach(), *statistics)
        return [found.view(h.shape), *parameters]

    def join(self, sum_: Summands) -> Tensor:
        """The sum in one pass, its mask included."""
        return self.functions["join"](*self._summands(sum_)).view(sum_.h.shape)

    def join_norm(self, sum_: Summands, scale: Scale) -> tuple[Tensor, Tensor, Statistics]:
        """The sum and its norm in one pass."""
        function, shape = self.functions[f"join_{_kind(scale)}"], sum_.h.shape
        h, n, *statistics = function(*self._summands(sum_), *_plain(scale))
        return h.view(shape), n.view(shape), tuple(statistics)

    def activate(self, z: Tensor, *, gated: bool) -> Tensor:
        """One pass forward, one backward, which starts from ``z``."""
        return _Activation.apply(z, "swiglu" if gated else "gelu", self.functions)  # type: ignore[no-any-return]

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys in one call."""
        return _Rotation.apply(q, k, cos, sin, self.functions)  # type: ignore[no-any-return]

    def weights(self, scores: Scores) -> tuple[Tensor, Tensor]:
        """Softmax and mask in one pass."""
        return self.functions["weights"](*self._scores(scores), *self._thresholds(scores.mask))

    def weights_gradient(self, scores: Scores, lse: Tensor, gradient: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Both in one pass, the mask drawn again."""
        products, root, queries, heads = self._scores(scores)
        return self.functions["weights_gradient"](
            gradient, products, root, lse, own, queries, heads, *self._thresholds(scores.mask)
        )

    def drop(self, x: Tensor, mask: Mask) -> Tensor:
        """The mask is drawn where it is used."""
        return self.functions["drop"](_flat(x), *self._dropout(mask)).view(x.shape)

    def local_loss(self, logits: Tensor, rows: Tensor, here: Tensor, beyond: int) -> tuple[Tensor, Tensor]:
        """Three passes."""
        beyond_here = beyond if beyond < logits.shape[1] else None
        statistics = self.functions["local_loss"](logits, rows, here, beyond_here)
        self.functions["exponentials"](logits, statistics[0, 0], beyond_here)
        return logits, statistics

    def _scores(self, scores: Scores) -> tuple[Tensor, float, Tensor, Tensor]:
        return scores.products, scores.root, scores.queries, scores.heads

    def _summands(self, sum_: Summands) -> tuple[Any, ...]:
        h, y, bias, mask = sum_
        flat, parts = _flat(h), y.reshape(y.shape[0], -1, y.shape[3])
        # Whether autograd knows of a tensor would be another variant.
        return flat, parts, None if bias is None else bias.detach(), None if mask is None else self._dropout(mask)

    def _dropout(self, mask: Mask) -> formulas.Dropout:
        return self._rows(mask, mask.samples[None, :], mask.others[:, None]), *self._thresholds(mask)

    @torch.no_grad()
    def _rows(self, mask: Mask, first: Tensor, second: Tensor) -> Tensor:
        """The part of the hash that all elements of a row share, [M]."""
        key = mask.dropout.site(mask.layer, mask.site)
        if isinstance(key, int):
            key = torch.full((), key, dtype=torch.int64, device=first.device)
        return self.functions["rows"](key, first, second).view(-1)

    def _thresholds(self, mask: Mask) -> tuple[Tensor, Tensor]:
        """As tensors: a number would be a constant of the code."""
        at = mask.probability, mask.samples.device
        if at not in self._constants:
            least = torch.tensor(int(mask.probability * 2**32), device=at[1])
            self._constants[at] = least, torch.tensor(1.0 / (1.0 - mask.probability), device=at[1], dtype=torch.float64)
        return self._constants[at]


class Compiler:
    """Makes the functions. through: makes a function of a graph and examples of what it will be called with.
    variants: compiled so far, of all of them."""

    def __init__(self, through: Callable[[Any, Any], Any]) -> None:
        self.variants, self._through = 0, through

    def table(self) -> Table:
        """Of all formulas; each is compiled when it is first called."""
        return {name: self._compiled(function) for name, function in formulas.ALL.items()}

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        compile_: Any = torch.compile  # whose overloads do not know the limit
        return compile_(function, fullgraph=True, backend=self._backend, **variants())

    def _backend(self, graph: Any, inputs: Any) -> Any:
        self.variants += 1
        return self._through(graph, inputs)


def variants() -> dict[str, Any]:
    """What ``torch.compile`` is told of ``MOST_VARIANTS``. torch before 2.13 has no limit of one function's
    own: there it is the process's."""
    if "recompile_limit" in signature(torch.compile).parameters:
        return {"recompile_limit": MOST_VARIANTS, "isolate_recompiles": True}
    settings: Any = importlib.import_module("torch._dynamo.config")
    settings.recompile_limit = max(MOST_VARIANTS, settings.recompile_limit)
    return {}


@lru_cache(maxsize=1)
def compiler() -> Compiler:
    """This process's."""
    # No worker processes: they would be children of every rank. A setting of this thread's would not hold in
    # autograd's own, where backwards run on a GPU.
    single_threaded_compiler()
    from torch._inductor.compile_fx import compile_fx

    return Compiler(compile_fx)


@lru_cache(maxsize=1)
def compiled() -> Compiled:
    """This process's."""
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
        cos, sin = ctx.saved_tensors  # both halves of the table are the same, so its transpose turns back
        return *ctx.of["rotate_back"](*gradients, cos, sin), None, None, None


def _kind(scale: Scale) -> str:
    return "rms_norm" if scale.bias is None else "layer_norm"


def _plain(scale: Scale) -> tuple[Any, ...]:
    weight, bias, eps = scale
    return (weight.detach(), eps) if bias is None else (weight.detach(), bias.detach(), eps)


def _flat(x: Tensor) -> Tensor:
    """[..., H] -> [M, H], contiguous, and unknown to autograd."""
    return x.detach().reshape(-1, x.shape[-1])
