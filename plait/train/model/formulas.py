"""Formulas to be compiled: functions of plain tensors, [M, ...], forward and backward; tables of
rotary positions.

Sums are computed in fp32 for bf16 tensors; results have the dtype of the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.core.model.spec import ModelSpec
from plait.train.model.dropout import fold, of_weights

RotaryTables: TypeAlias = tuple[Tensor, Tensor]
"""Rotary tables: cos and sin of the angles by which queries and keys are rotated, [S, 1, 1, D]; [S,
B, 1, D] if sequences differ."""


class Rope:
    """Rotary position tables (Su 2021, arXiv 2104.09864), half-split as in Hugging Face's Llama,
    computed once.

    A micro-batch takes its tables when it begins, on the thread's stream. Slices on pool streams
    read them; a table made on a pool stream would not be ready for the other streams.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        self._cache: dict[int, RotaryTables] = {}

    def first(self, sequence: int) -> RotaryTables:
        """Return the rotary tables (cos, sin) of positions 0 to ``sequence`` - 1, [S, 1, 1, D]
        each."""
        if sequence not in self._cache:
            angles = torch.arange(sequence, dtype=torch.float64)[:, None] * self._frequencies()[None, :]
            both = torch.cat((angles, angles), dim=1)[:, None, None, :]
            self._cache[sequence] = both.cos().to(self.device, self.dtype), both.sin().to(self.device, self.dtype)
        return self._cache[sequence]

    def at(self, positions: Tensor) -> RotaryTables:
        """Return the rotary tables (cos, sin) of positions [S] or [S, B]: [S, 1, 1, D] or [S, B, 1,
        D] each."""
        shape = *positions.shape, *(1,) * (3 - positions.dim()), -1
        cos, sin = (table[positions].view(shape) for table in self.first(self.spec.max_sequence))
        return cos, sin

    def _frequencies(self) -> Tensor:
        spec, size = self.spec, self.spec.letters.D
        frequencies = spec.rope_theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        if (scaling := spec.rope_scaling) is None:
            return frequencies
        wavelengths = 2 * math.pi / frequencies
        turns = scaling.original_max_positions / wavelengths
        blend = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
        return frequencies * (blend + (1 - blend) / scaling.factor)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return [S, B, N, D] with each pair (i, i + D/2) of the last dim rotated by the angles in
    ``cos`` and ``sin``."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


Dropout = tuple[Tensor, Tensor, Tensor]
"""Arguments of ``drop``: (hashes of rows, smallest hash that is kept, factor of kept elements)."""
TWICE = 2 * math.sqrt(2 / math.pi)
CUBIC = 0.044715 * TWICE

# ---- norms ----


def layer_norm(h: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the layer norm of ``h``, [M, H], and mean and reciprocal standard deviation of every
    row, [M, 1] each."""
    x = _wide(h)
    mean = x.mean(-1, keepdim=True)
    centred = x - mean
    scale = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (centred * scale * weight + bias).to(h.dtype), mean, scale


def layer_norm_gradient(
    gradient: Tensor, past: Tensor | None, h: Tensor, weight: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a layer norm's input ``h`` (plus ``past``, if given), weight and
    bias."""
    g, normal = _wide(gradient), (_wide(h) - mean) * scale
    inner = g * weight
    least = inner.mean(-1, keepdim=True) + normal * (inner * normal).mean(-1, keepdim=True)
    found = (inner - least) * scale
    found = (found if past is None else found + past).to(h.dtype)
    return found, (g * normal).sum(0).to(weight.dtype), g.sum(0).to(weight.dtype)


def rms_norm(h: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of ``h``, [M, H], and the reciprocal root mean square of every row, [M,
    1]."""
    x = _wide(h)
    scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (x * scale * weight).to(h.dtype), scale


def rms_norm_gradient(
    gradient: Tensor, past: Tensor | None, h: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of an RMS norm's input ``h`` (plus ``past``, if given) and weight."""
    g, normal = _wide(gradient), _wide(h) * scale
    inner = g * weight
    found = (inner - normal * (inner * normal).mean(-1, keepdim=True)) * scale
    found = (found if past is None else found + past).to(h.dtype)
    return found, (g * normal).sum(0).to(weight.dtype)


# ---- activations ----


def gelu(z: Tensor) -> Tensor:
    """Return GELU in tanh form: z (1 + tanh(u)) / 2 = z sigmoid(2 u), u = sqrt(2 / pi) (z +
    0.044715 z^3). On a CPU an exponential takes less than half the time of a hyperbolic tangent."""
    x = _wide(z)
    return (x * torch.sigmoid(x * (TWICE + CUBIC * x.square()))).to(z.dtype)


def gelu_gradient(gradient: Tensor, z: Tensor) -> Tensor:
    """Return the gradient of GELU's input ``z`` from that of its output."""
    x = _wide(z)
    square = x.square()
    part = torch.sigmoid(x * (TWICE + CUBIC * square))
    return (_wide(gradient) * (part + x * part * (1 - part) * (TWICE + 3 * CUBIC * square))).to(z.dtype)


def swiglu(z: Tensor) -> Tensor:
    """Return SwiGLU of [M, 2 F], [M, F]; the gate comes first."""
    gate, up = z.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_gradient(gradient: Tensor, z: Tensor) -> Tensor:
    """Return the gradient of SwiGLU's input ``z`` from that of its output."""
    g, (gate, up) = _wide(gradient), (_wide(half) for half in z.chunk(2, dim=-1))
    open_ = gate.sigmoid()
    both = g * up * open_ * (1 + gate * (1 - open_)), g * gate * open_
    return torch.cat([half.to(z.dtype) for half in both], dim=-1)


# ---- attention ----


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys [S, B, N, D] rotated by tables [S, 1, 1, D]."""
    return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)


def rotate_back(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys [S, B, N, D] rotated back; this is the gradient of ``rotate``."""
    return apply_rotary(q, cos, -sin), apply_rotary(k, cos, -sin)


def weights(
    products: Tensor, root: float, queries: Tensor, heads: Tensor, least: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the causal softmax with dropout of products / root, [M, queries, keys], and its
    log-sum-exp."""
    seen = _masked_scores(products, root, queries)
    lse = seen.logsumexp(dim=-1)
    found = (seen - lse[..., None]).exp()
    return (found * _mask_of_weights(heads, queries, least, scale, found)).to(products.dtype), lse


def weights_gradient(
    gradient: Tensor, products: Tensor, root: float, lse: Tensor, own: Tensor, queries: Tensor, heads: Tensor,
    least: Tensor, scale: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the weights again, and the gradient of products from the gradient of the weights."""
    found = (_masked_scores(products, root, queries) - lse[..., None]).exp()
    kept = _mask_of_weights(heads, queries, least, scale, found)
    through = found * (_wide(gradient) * kept - own[..., None]) / root
    return (found * kept).to(products.dtype), through.to(products.dtype)


# ---- the residual stream ----


def rows(key: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return the hash of key, first and second, which broadcast (``DropoutKey``)."""
    return _tensor(fold(_tensor(fold(key, first)), second))


def drop(x: Tensor, rows: Tensor, least: Tensor, scale: Tensor) -> Tensor:
    """Apply dropout to [M, H]. rows: [M], hashes. least: smallest hash that is kept. scale: factor
    of kept elements."""
    columns = torch.arange(x.shape[-1], device=x.device)
    return x * _kept(fold(rows[:, None], columns), least, scale, x)


def join(h: Tensor, y: Tensor, bias: Tensor | None, dropout: Dropout | None) -> Tensor:
    """Return h + dropout(y + bias), [M, H]; ``y`` is [parts, M, H / parts]."""
    whole = y[0] if y.shape[0] == 1 else y.transpose(0, 1).flatten(1)
    whole = whole if bias is None else whole + bias
    return h + (whole if dropout is None else drop(whole, *dropout))


def join_layer_norm(
    h: Tensor, y: Tensor, added: Tensor | None, dropout: Dropout | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the sum h + dropout(y + added), [M, H], and what ``layer_norm`` returns for it: its
    norm, and mean and reciprocal standard deviation of every row."""
    found = join(h, y, added, dropout)
    return found, *layer_norm(found, weight, bias, eps)


def join_rms_norm(
    h: Tensor, y: Tensor, added: Tensor | None, dropout: Dropout | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum h + dropout(y + added), [M, H], and what ``rms_norm`` returns for it: its
    norm, and the reciprocal root mean square of every row."""
    found = join(h, y, added, dropout)
    return found, *rms_norm(found, weight, eps)


# ---- the loss ----


def local_loss(logits: Tensor, rows: Tensor, here: Tensor, beyond: int | None) -> Tensor:
    """Return three statistics of each row of a rank's logits, as ``Kernels.local_loss`` does.
    beyond: first column of vocabulary padding, None without."""
    counted = _counted(logits, beyond)
    maximum = counted.amax(dim=1).clamp_min(torch.finfo(logits.dtype).min)  # a share may be all padding
    target = torch.where(here, logits.gather(1, rows[:, None])[:, 0], 0.0)
    return torch.stack((maximum, (counted - maximum[:, None]).exp().sum(dim=1), target))[None]


def exponentials(logits: Tensor, maximum: Tensor, beyond: int | None) -> None:
    """Overwrite a rank's logits by their exponentials against each row's maximum.

    This is separate from the sum of exponentials: compiled into one function, it would keep a
    second tensor of the logits' size, the largest of a model.
    """
    logits.copy_((_counted(logits, beyond) - maximum[:, None]).exp())


def _counted(logits: Tensor, beyond: int | None) -> Tensor:
    """Return the logits with minus infinity in the columns of vocabulary padding. beyond: the first
    of these columns, None without."""
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


def _masked_scores(products: Tensor, root: float, queries: Tensor) -> Tensor:
    keys = torch.arange(products.shape[-1], device=products.device)
    return torch.where(keys[None, :] <= queries[:, None], _wide(products) / root, -math.inf)


def _mask_of_weights(heads: Tensor, queries: Tensor, least: Tensor, scale: Tensor, like: Tensor) -> Tensor:
    return _kept(of_weights(heads, queries, torch.arange(like.shape[-1], device=like.device)), least, scale, like)


def _tensor(value: Tensor | int) -> Tensor:
    assert isinstance(value, Tensor)
    return value
