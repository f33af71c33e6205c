"""Measure plain operations on all ranks at once: matrix products, attention cores, memory
passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.core.cluster.profile import AttentionCore, MemoryPass, Product
from plait.core.model.precision import Precision
from plait.core.model.spec import ModelSpec
from plait.core.model.weights import Sublayer, widths
from plait.train.machine.device import RankDevice, torch_dtype
from plait.train.tune.timing import Clock

Say = Callable[[str], object]
TOKENS = {"cpu": (32, 128, 512), "cuda": (512, 2048, 8192)}
"""Rows of a product: tokens of a micro-batch, or of a slice of it."""
WEIGHTS = {
    "cpu": ((256, 256), (256, 1024), (768, 768), (768, 3072), (3072, 768)),
    "cuda": ((1024, 1024), (2048, 8192), (4096, 4096), (4096, 16384), (16384, 4096)),
}
"""Input and output columns of a product's weight."""
CORES = {
    "cpu": ((4, 64, 64), (4, 128, 64), (4, 256, 64), (12, 512, 64), (4, 1024, 64)),
    "cuda": ((16, 512, 64), (32, 1024, 128), (32, 2048, 128), (32, 4096, 128), (8, 16384, 128)),
}
"""Heads, tokens, head size of an attention core."""
PASSES = {"cpu": (1 << 20, 1 << 23, 1 << 26), "cuda": (1 << 24, 1 << 27, 1 << 30)}
"""Bytes of each of the three tensors of an addition."""


def measure_products(
    device: RankDevice, precision: Precision, model: ModelSpec | None, clock: Clock, say: Say
) -> list[Product]:
    """Measure products of common shapes, and of the model's own shapes."""
    kind = device.torch_device.type
    shapes = [(m, k, n) for m in TOKENS[kind] for k, n in WEIGHTS[kind]]
    if model is not None:
        shapes += [(m, k, n) for m in TOKENS[kind][1:] for k, n in layer_weights(model)]
    shapes = sorted(dict.fromkeys(shapes), key=_flops)
    left = sum(map(_flops, shapes))
    found: list[Product] = []
    for m, k, n in shapes:
        say(f"product {m} x {k} x {n}")
        a, b, out = (_random(device, precision, *shape) for shape in ((m, k), (k, n), (m, n)))
        budget = max(clock.left() * _flops((m, k, n)) / left, 0.05)
        left -= _flops((m, k, n))
        timed = clock.sample(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), budget, together=False)
        found.append(Product(m=m, k=k, n=n, precision=precision, seconds=timed.seconds, spread=timed.spread))
    return found


def layer_weights(model: ModelSpec) -> list[tuple[int, int]]:
    """Return [k, n] of a layer's products, unsharded.

    >>> layer_weights(ModelSpec(family="gpt", num_layers=1, hidden=8, num_heads=2, vocab=9, max_sequence=4))
    [(8, 24), (8, 8), (8, 32), (32, 8)]
    """
    sites: tuple[Sublayer, ...] = ("attn", "mlp")
    pairs = [widths(site, model.letters) for site in sites]
    return [shape for first, second in pairs for shape in ((model.hidden, int(first)), (int(second), model.hidden))]


def measure_attention(device: RankDevice, precision: Precision, clock: Clock, say: Say) -> list[AttentionCore]:
    """Measure attention cores of common shapes, forward and backward, in the model's memory
    layout."""
    found: list[AttentionCore] = []
    shapes = CORES[device.torch_device.type]
    for (heads, tokens, size), budget in clock.shares(shapes):
        say(f"attention, {heads} heads, {tokens} tokens")
        q, k, v, gradient = (
            _random(device, precision, tokens, 1, heads, size).permute(1, 2, 0, 3) for _ in range(4)
        )  # [B, N, S, D]
        shape = {"batch": 1, "heads": heads, "queries": tokens, "keys": tokens, "head_size": size}
        for backward in (False, True):
            run = _backward(q, k, v, gradient) if backward else _forward(q, k, v)
            timed = clock.sample(run, budget / 2, together=False)
            found.append(AttentionCore(**shape, precision=precision, backward=backward, **timed._asdict()))
    return found


def _forward(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
    """Return the forward pass of an attention core; it saves tensors for the backward pass, as in
    training."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _backward(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> Callable[[], object]:
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)


def measure_passes(device: RankDevice, clock: Clock, say: Say) -> list[MemoryPass]:
    """Measure additions of two tensors into a third."""
    found: list[MemoryPass] = []
    sizes: Sequence[int] = PASSES[device.torch_device.type]
    for size, budget in clock.shares(sizes):
        say(f"memory, {3 * size >> 20} MiB")
        a, b, c = (torch.ones(size // 4, device=device.torch_device) for _ in range(3))
        timed = clock.sample(lambda a=a, b=b, c=c: torch.add(a, b, out=c), budget, together=False)
        found.append(MemoryPass(bytes=3 * size, seconds=timed.seconds, spread=timed.spread))
    return found


def _flops(shape: tuple[int, int, int]) -> int:
    m, k, n = shape
    return 2 * m * k * n


def _random(device: RankDevice, precision: Precision, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device.torch_device).to(torch_dtype(precision))
