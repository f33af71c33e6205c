"""The formulas that are compiled give what torch gives op by op, forward and backward; masks to the
bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.core.model import dropout
from plait.train.model import formulas
from plait.train.model.compiled import Compiled
from plait.train.model.dropout import DropoutKey, Mask
from plait.train.model.dropped_attention import attend
from plait.train.model.formulas import Rope
from plait.train.model.kernels import EAGER, Scale, Summands
from tests.support.models import llama

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
    assert_close(found, want)


def assert_close(found: list[Tensor], want: list[Tensor]) -> None:
    narrow = want[0].dtype == torch.bfloat16  # where roundings cancel each other out, they differ
    atol, rtol = (0.03, 0.02) if narrow else (None, None)
    torch.testing.assert_close(found, want, atol=atol, rtol=rtol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("goes_past", [True, False])
def test_norms(dtype: torch.dtype, bias: bool, goes_past: bool) -> None:
    weight, shift = (made(H, dtype=dtype, seed=seed).requires_grad_() for seed in (0, 5))
    scale = Scale(weight, shift if bias else None, 1e-5)
    gradient, past = made(S, B, H, dtype=dtype, seed=7), made(S, B, H, dtype=dtype, seed=8) if goes_past else None
    for h in (made(S, B, H, dtype=dtype) * 3 + 1, made(S, 2 * B, H, dtype=dtype)[:, B:]):
        found = []
        for kernels in (EAGER, PLAIN):
            leaf = h.detach().requires_grad_()
            n, statistics = kernels.norm(leaf, scale)
            gradients = kernels.norm_gradient(n, leaf, scale, statistics, gradient, past)
            found.append([n.detach(), *gradients])
        assert_close(found[1], found[0])


@pytest.mark.parametrize("bias", [True, False])
def test_a_norm_behind_a_join(bias: bool) -> None:
    mask = Mask(KEY, 0.1, 2, "mlp", torch.arange(B) + 11, torch.arange(S) + 4)
    sum_ = Summands(made(S, B, H), made(2, S, B, H // 2), made(H) if bias else None, mask)
    scale = Scale(made(H, seed=3), made(H, seed=4) if bias else None, 1e-5)
    h, n, statistics = PLAIN.join_norm(sum_, scale)
    want = EAGER.join_norm(sum_, scale)
    torch.testing.assert_close((h, n), want[:2])
    again, same = PLAIN.norm(h, scale)
    assert torch.equal(again, n) and all(map(torch.equal, same, statistics))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
def test_activations(dtype: torch.dtype, gated: bool) -> None:
    assert_alike(lambda kernels, z: kernels.activate(z, gated=gated), [made(S, B, H, dtype=dtype) * 3])


def test_rotary_positions() -> None:
    spec = llama()
    q, k = made(S, B, 4, spec.head_size), made(S, B, 2, spec.head_size)
    assert_alike(lambda kernels, *both: kernels.rotate(*both, *Rope(spec, q.dtype, q.device).first(S)), [q, k])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", [1 << 17, 64])
def test_attention_with_dropout(dtype: torch.dtype, weights: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one block, and in many."""
    monkeypatch.setattr(dropout, "ON_CPU", weights)
    monkeypatch.setattr(dropout, "LEAST", 2)
    mask = Mask(KEY, 0.3, 1, "core", torch.tensor([3, 9]), torch.arange(2, 6))
    heads = [made(2, 4 if at == 0 else 2, S, 8, dtype=dtype, seed=at) for at in range(3)]
    assert_alike(lambda kernels, q, k, v: attend(q, k, v, mask, kernels), heads)


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5])
def test_joins_to_the_bit(parts: int, bias: bool, probability: float) -> None:
    """Also in fp32: each element is made by the same operations in the same order."""
    mask = Mask(KEY, probability, 2, "mlp", torch.arange(B) + 11, torch.arange(S) + 4) if probability else None
    for dtype in (torch.float64, torch.float32):
        h, y, shift = made(S, B, H, dtype=dtype), made(parts, S, B, H // parts, dtype=dtype), made(H, dtype=dtype)
        want, found = (kernels.join(Summands(h, y, shift if bias else None, mask)) for kernels in (EAGER, PLAIN))
        assert torch.equal(want, found)
        if mask is not None:
            assert torch.equal(EAGER.drop(h, mask), PLAIN.drop(h, mask))


@pytest.mark.parametrize("beyond", [37, 30, 0])
def test_the_loss(beyond: int) -> None:
    """beyond: as many columns of this share are no padding."""
    rows = torch.randint(0, 37, (11,), generator=torch.Generator().manual_seed(0))
    here = (torch.arange(11) % 3 > 0) & (rows < beyond)
    found = []
    for kernels in (EAGER, PLAIN):
        logits = made(11, 37)
        exponentials, statistics = kernels.local_loss(logits, rows, here, beyond)
        assert exponentials is logits  # consumed
        found.append((exponentials, statistics))
    torch.testing.assert_close(found[1], found[0])
