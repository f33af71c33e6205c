"""The formulas that are compiled: functions of plain tensors, [M, ...], forward and backward.

Sums are wide (fp32 for bf16 tensors), results have the type of what came in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.train.model.dropout import fold, of_weights
from plait.train.model.rope import rotate as turned

Dropout = tuple[Tensor, Tensor, Tensor]
"""rows, least and scale, as ``drop`` has them."""
TWICE = 2 * math.sqrt(2 / math.pi)
CUBIC = 0.044715 * TWICE

# ---- norms ----


def layer_norm(h: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Result [M, H]; mean and reciprocal deviation of every row, [M, 1]."""
    x = _wide(h)
    mean = x.mean(-1, keepdim=True)
    centred = x - mean
    scale = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (centred * scale * weight + bias).to(h.dtype), mean, scale


def layer_norm_gradient(
    gradient: Tensor, past: Tensor | None, h: Tensor, weight: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of h, plus ``past``, of weight and bias."""
    g, normal = _wide(gradient), (_wide(h) - mean) * scale
    inner = g * weight
    least = inner.mean(-1, keepdim=True) + normal * (inner * normal).mean(-1, keepdim=True)
    found = (inner - least) * scale
    found = (found if past is None else found + past).to(h.dtype)
    return found, (g * normal).sum(0).to(weight.dtype), g.sum(0).to(weight.dtype)


def rms_norm(h: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Result [M, H]; reciprocal root of the mean square of every row, [M, 1]."""
    x = _wide(h)
    scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (x * scale * weight).to(h.dtype), scale


def rms_norm_gradient(
    gradient: Tensor, past: Tensor | None, h: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Of h, plus ``past``, and of weight."""
    g, normal = _wide(gradient), _wide(h) * scale
    inner = g * weight
    found = (inner - normal * (inner * normal).mean(-1, keepdim=True)) * scale
    found = (found if past is None else found + past).to(h.dtype)
    return found, (g * normal).sum(0).to(weight.dtype)


# ---- activations ----


def gelu(z: Tensor) -> Tensor:
    """tanh form, z (1 + tanh(u)) / 2 = z sigmoid(2 u), u = sqrt(2 / pi) (z + 0.044715 z^3): on a CPU an
    exponential takes less than half of a hyperbolic tangent."""
    x = _wide(z)
    return (x * torch.sigmoid(x * (TWICE + CUBIC * x.square()))).to(z.dtype)


def gelu_gradient(gradient: Tensor, z: Tensor) -> Tensor:
    """Of z."""
    x = _wide(z)
    square = x.square()
    part = torch.sigmoid(x * (TWICE + CUBIC * square))
    return (_wide(gradient) * (part + x * part * (1 - part) * (TWICE + 3 * CUBIC * square))).to(z.dtype)


def swiglu(z: Tensor) -> Tensor:
    """[M, 2 F] -> [M, F]; the gate comes first."""
    gate, up = z.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_gradient(gradient: Tensor, z: Tensor) -> Tensor:
    """Of z."""
    g, (gate, up) = _wide(gradient), (_wide(half) for half in z.chunk(2, dim=-1))
    open_ = gate.sigmoid()
    both = g * up * open_ * (1 + gate * (1 - open_)), g * gate * open_
    return torch.cat([half.to(z.dtype) for half in both], dim=-1)


# ---- attention ----


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """[S, B, N, D] by tables of [S, 1, 1, D]."""
    return turned(q, cos, sin), turned(k, cos, sin)


def rotate_back(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse, hence the gradient."""
    return turned(q, cos, -sin), turned(k, cos, -sin)


def weights(
    products: Tensor, root: float, queries: Tensor, heads: Tensor, least: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Causal softmax with dropout of products / root, [M, queries, keys], and its log-sum-exp."""
    seen = _seen(products, root, queries)
    lse = seen.logsumexp(dim=-1)
    found = (seen - lse[..., None]).exp()
    return (found * _mask_of_weights(heads, queries, least, scale, found)).to(products.dtype), lse


def weights_gradient(
    gradient: Tensor, products: Tensor, root: float, lse: Tensor, own: Tensor, queries: Tensor, heads: Tensor,
    least: Tensor, scale: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The weights again, and the gradient of products from that of the weights."""
    found = (_seen(products, root, queries) - lse[..., None]).exp()
    kept = _mask_of_weights(heads, queries, least, scale, found)
    through = found * (_wide(gradient) * kept - own[..., None]) / root
    return (found * kept).to(products.dtype), through.to(products.dtype)


# ---- the residual stream ----


def rows(key: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The hash of key, first and second, which broadcast (``DropoutKey``)."""
    return _tensor(fold(_tensor(fold(key, first)), second))


def drop(x: Tensor, rows: Tensor, least: Tensor, scale: Tensor) -> Tensor:
    """Dropout of [M, H]. rows: [M], hashes. least: of the hashes that are kept, by ``scale``."""
    columns = torch.arange(x.shape[-1], device=x.device)
    return x * _kept(fold(rows[:, None], columns), least, scale, x)


def join(h: Tensor, y: Tensor, bias: Tensor | None, dropout: Dropout | None) -> Tensor:
    """h + dropout(y + bias), [M, H]; ``y`` comes as [parts, M, H / parts]."""
    whole = y[0] if y.shape[0] == 1 else y.transpose(0, 1).flatten(1)
    whole = whole if bias is None else whole + bias
    return h + (whole if dropout is None else drop(whole, *dropout))


def join_layer_norm(
    h: Tensor, y: Tensor, added: Tensor | None, dropout: Dropout | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum, and what ``layer_norm`` makes of it."""
    found = join(h, y, added, dropout)
    return found, *layer_norm(found, weight, bias, eps)


def join_rms_norm(
    h: Tensor, y: Tensor, added: Tensor | None, dropout: Dropout | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, and what ``rms_norm`` makes of it."""
    found = join(h, y, added, dropout)
    return found, *rms_norm(found, weight, eps)


# ---- the loss ----


def local_loss(logits: Tensor, rows: Tensor, here: Tensor, beyond: int | None) -> Tensor:
    """The statistics of ``Kernels.local_loss``. beyond: None without padding."""
    counted = _counted(logits, beyond)
    maximum = counted.amax(dim=1).clamp_min(torch.finfo(logits.dtype).min)  # a share may be all padding
    target = torch.where(here, logits.gather(1, rows[:, None])[:, 0], 0.0)
    return torch.stack((maximum, (counted - maximum[:, None]).exp().sum(dim=1), target))[None]


def exponentials(logits: Tensor, maximum: Tensor, beyond: int | None) -> None:
    """Its exponentials, in the place of the logits. Apart from their sum: kernels of one function would keep
    them beside the logits meanwhile, which take more memory than anything else of a model."""
    logits.copy_((_counted(logits, beyond) - maximum[:, None]).exp())


def _counted(logits: Tensor, beyond: int | None) -> Tensor:
    """Logits, -inf where they are padding."""
    if beyond is None:
        return logits
    return torch.where(torch.arange(logits.shape[1], device=logits.device) < beyond, logits, -math.inf)


ALL: Mapping[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        layer_norm, layer_norm_gradient, rms_norm, rms_norm_gradient, gelu, gelu_gradient, swiglu, swiglu_gradient,
        rotate, rotate_back, weights, weights_gradient, rows, drop, join, join_layer_norm, join_rms_norm, local_loss,
        exponentials,
    )
}  # fmt: skip


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _kept(bits: Tensor | int, least: Tensor, scale: Tensor, like: Tensor) -> Tensor:
    return (_tensor(bits) >= least).to(like.dtype) * scale.to(like.dtype)


def _seen(products: Tensor, root: float, queries: Tensor) -> Tensor:
    keys = torch.arange(products.shape[-1], device=products.device)
    return torch.where(keys[None, :] <= queries[:, None], _wide(products) / root, -math.inf)


def _mask_of_weights(heads: Tensor, queries: Tensor, least: Tensor, scale: Tensor, like: Tensor) -> Tensor:
    return _kept(of_weights(heads, queries, torch.arange(like.shape[-1], device=like.device)), least, scale, like)


def _tensor(found: Tensor | int) -> Tensor:
    assert isinstance(found, Tensor)
    return found
