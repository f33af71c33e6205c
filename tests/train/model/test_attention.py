"""Attention kernels of several kinds of device, tried without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from plait.train.comm.wire import NullWire
from plait.train.model import sequence
from plait.train.model.sequence import plain_attention, plain_attention_backward


@pytest.mark.parametrize("causal", [True, False])
def test_attention_with_all_scores_in_memory_is_the_fused_kernel_s(causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, gradient = (torch.randn(2, 3, 8, 4, generator=generator, dtype=torch.float64) for _ in range(4))
    out, lse = sequence._attend(q, k, v, causal=causal)
    found = plain_attention(q, k, v, causal=causal)
    torch.testing.assert_close(found, (out, lse))
    torch.testing.assert_close(
        plain_attention_backward(gradient, q, k, v, out, lse, causal=causal),
        tuple(sequence._attend_backward(gradient, q, k, v, out, lse, causal=causal)),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_s_kernels_are_called_as_they_are_declared(dtype: torch.dtype) -> None:
    """By their shape functions: nothing is computed. bf16 shares key/value heads, fp32 repeats them."""
    with FakeTensorMode():
        q, k, v = (torch.empty(2, heads, 8, 16, dtype=dtype, device="cuda") for heads in (4, 2, 2))
        out, lse = sequence._attend(q, k, v, causal=True)
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, dtype, (2, 4, 8), torch.float32)
        found = sequence._attend_backward(out, q, k, v, out, lse, causal=True)
        assert [each.shape for each in found] == [q.shape, k.shape, v.shape]


class Mirror(NullWire):
    """Both ranks of a ring are this one."""

    def __init__(self) -> None:
        super().__init__(2, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_ring_adds_up_in_fp32_what_comes_in_bf16(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []
    merge = sequence._merge

    def merged(out: torch.Tensor, *rest: Any) -> None:
        seen.append(out.dtype)
        merge(out, *rest)

    monkeypatch.setattr(sequence, "_merge", merged)
    q, k, v = (torch.randn(1, 2, 8, 4).to(dtype).requires_grad_() for _ in range(3))
    out = sequence.ring_attention(q, k, v, Mirror())
    out.sum().backward()
    assert seen == [torch.float32]
    assert out.dtype == dtype and all(each.grad is not None and each.grad.dtype == dtype for each in (q, k, v))


def test_which_heads_go_to_whom_is_made_once() -> None:
    device = torch.device("cpu")
    found = sequence._chosen_heads(4, 8, 2, device)
    assert found.tolist() == [0, 0, 1, 1]
    assert sequence._chosen_heads(4, 8, 2, device) is found
    assert sequence._chosen_heads(2, 8, 4, device).tolist() == [0, 1, 2, 3]
