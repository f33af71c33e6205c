"""The formulas that are compiled give what torch gives op by op, forward and backward; masks to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.train.model import formulas
from plait.train.model.compiled import Compiled
from plait.train.model.dropout import DropoutKey, Mask
from plait.train.model.kernels import EAGER
from plait.train.model.rope import Rope
from tests.models import llama

PLAIN = Compiled(formulas.ALL)
KEY = DropoutKey(1 << 40 | 12345, 77)
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
S, B, H = 5, 3, 24


def made(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def both(function: Callable[..., Any], inputs: list[Tensor], *rest: Any) -> list[list[Tensor]]:
    """Results and gradients of ``inputs``, op by op and by the formulas."""
    found = list[list[Tensor]]()
    for kernels in (EAGER, PLAIN):
        leaves = [one.clone().requires_grad_() for one in inputs]
        results = function(kernels, *leaves, *rest)
        results = list(results) if isinstance(results, tuple) else [results]
        gradients = [made(*one.shape, dtype=one.dtype, seed=9) for one in results]
        found.append([*(one.detach() for one in results), *torch.autograd.grad(results, leaves, gradients)])
    return found


def assert_alike(function: Callable[..., Any], inputs: list[Tensor], *rest: Any) -> None:
    want, found = both(function, inputs, *rest)
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_norms(dtype: torch.dtype, bias: bool) -> None:
    inputs = [
        made(S, B, H, dtype=dtype) * 3 + 1,
        made(H, dtype=dtype),
        *([made(H, dtype=dtype, seed=5)] if bias else []),
    ]

    def norm(kernels: Any, h: Tensor, weight: Tensor, shift: Tensor | None = None) -> Tensor:
        return kernels.norm(h, weight, shift, 1e-5)

    assert_alike(norm, inputs)
    strided = [made(S, 2 * B, H, dtype=dtype)[:, B:], *inputs[1:]]
    assert_alike(norm, strided)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
def test_activations(dtype: torch.dtype, gated: bool) -> None:
    assert_alike(lambda kernels, z: kernels.activate(z, gated=gated), [made(S, B, H, dtype=dtype) * 3])


def test_rotary_positions() -> None:
    spec = llama()
    q, k = made(S, B, 4, spec.head_size), made(S, B, 2, spec.head_size)
    assert_alike(lambda kernels, *both: kernels.rotate(*both, *Rope(spec).tables(S, q)), [q, k])


def test_attention_weights() -> None:
    mask = Mask(KEY, 0.3, 1, "core", torch.tensor([3, 9]), torch.arange(2, 6))
    assert_alike(lambda kernels, products: kernels.weights(products, 2.0, mask), [made(2, 4, S, S)])


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5])
def test_joins_to_the_bit(parts: int, bias: bool, probability: float) -> None:
    """Also in fp32: each element is made by the same operations in the same order."""
    mask = Mask(KEY, probability, 2, "mlp", torch.arange(B) + 11, torch.arange(S) + 4) if probability else None
    for dtype in (torch.float64, torch.float32):
        h, y, shift = made(S, B, H, dtype=dtype), made(parts, S, B, H // parts, dtype=dtype), made(H, dtype=dtype)
        want, found = (kernels.join(h, y, shift if bias else None, mask) for kernels in (EAGER, PLAIN))
        assert torch.equal(want, found)
        if mask is not None:
            assert torch.equal(EAGER.drop(h, mask), PLAIN.drop(h, mask))


@pytest.mark.parametrize("beyond", [37, 30, 0])
def test_the_loss(beyond: int) -> None:
    """beyond: as many columns of this share are no padding."""
    rows, here = torch.randint(0, 37, (11,)), torch.arange(11) % 3 > 0
    here &= rows < beyond
    valid = here | (torch.arange(11) % 5 > 0)
    found = []
    for kernels in (EAGER, PLAIN):
        logits = made(11, 37)
        exponentials, statistics = kernels.local_loss(logits, rows, here, beyond)
        assert exponentials is logits
        other = statistics + 0.5
        gathered = torch.cat((statistics, other))
        total, gradient = kernels.finish_loss(exponentials, statistics[0], gathered, valid, rows, here, 0.25)
        assert gradient is logits
        found.append((statistics, total, gradient))
    torch.testing.assert_close(found[1], found[0])
