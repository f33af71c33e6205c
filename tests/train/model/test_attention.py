"""Attention kernels of several kinds of device, tried without them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from plait.core.model import dropout
from plait.core.model.dropout import Blocks
from plait.train.model import sequence
from plait.train.model.documents import Documents, bounds_of, ends_of
from plait.train.model.dropout import DropoutKey, Mask
from plait.train.model.dropped_attention import attend
from plait.train.model.kernels import EAGER
from plait.train.model.sequence import attention_weights, plain_attention, plain_attention_backward


@pytest.mark.parametrize("causal", [True, False])
def test_attention_with_all_scores_in_memory_is_the_fused_kernel_s(causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, gradient = (torch.randn(2, 3, 8, 4, generator=generator, dtype=torch.float64) for _ in range(4))
    out, lse = sequence._attend(q, k, v, causal=causal)
    found = plain_attention(q, k, v, causal=causal)
    torch.testing.assert_close(found, (out, lse))
    torch.testing.assert_close(
        plain_attention_backward(gradient, q, k, v, out, attention_weights(q, k, lse, causal=causal)),
        tuple(sequence._attend_backward(gradient, q, k, v, out, lse, causal=causal)),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_s_kernels_are_called_as_they_are_declared(dtype: torch.dtype) -> None:
    """By their shape functions: nothing is computed. bf16 shares key/value heads, fp32 repeats
    them."""
    with FakeTensorMode():
        q, k, v = (torch.empty(2, heads, 8, 16, dtype=dtype, device="cuda") for heads in (4, 2, 2))
        out, lse = sequence._attend(q, k, v, causal=True)
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, dtype, (2, 4, 8), torch.float32)
        found = sequence._attend_backward(out, q, k, v, out, lse, causal=True)
        assert [each.shape for each in found] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_ring_adds_up_in_fp32_what_comes_in_bf16(dtype: torch.dtype) -> None:
    """Both ranks of a ring are this one."""
    q, k, v = (torch.randn(1, 2, 8, 4).to(dtype) for _ in range(3))
    block, found = torch.stack((k, v)), list[torch.Tensor]()
    for owner in (1, 0):
        sequence.attend_block(found, q, block, sequence.RingStep(owner, 1, 2))
        assert found[0].dtype == torch.float32
    found[0], into = found[0].to(dtype), (torch.zeros(1, 2, 8, 4), torch.zeros(2, 1, 2, 8, 4))
    sequence.block_gradient(q, q, block, found, into, sequence.RingStep(0, 1, 2))
    assert all(each.dtype == torch.float32 and each.any() for each in into)


def test_which_heads_go_to_whom_is_made_once() -> None:
    device = torch.device("cpu")
    found = sequence.chosen_heads(4, 8, 2, device)
    assert found.tolist() == [0, 0, 1, 1]
    assert sequence.chosen_heads(4, 8, 2, device) is found
    assert sequence.chosen_heads(2, 8, 4, device).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("weights", [1 << 17, 600])
@pytest.mark.parametrize(("samples", "heads", "kv_heads", "tokens"), [(2, 4, 2, 8), (3, 4, 4, 37), (2, 6, 1, 50)])
@pytest.mark.parametrize("cut", [False, True])
def test_dropped_attention_in_blocks_is_that_with_all_weights_in_memory(
    samples: int, heads: int, kv_heads: int, tokens: int, weights: int, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dropout, "ON_CPU", weights)
    key, numbers, own = DropoutKey(3, 5), torch.arange(samples) + 7, torch.arange(heads) + 2
    generator = torch.Generator().manual_seed(0)
    shapes = [(tokens, samples, n, 8) for n in (heads, kv_heads, kv_heads, heads)]
    *qkv, gradient = (
        torch.randn(shape, generator=generator, dtype=torch.float64).permute(1, 2, 0, 3) for shape in shapes
    )
    leaves = [one.requires_grad_() for one in qkv]
    starts = (torch.arange(tokens) * (torch.rand(samples, tokens, generator=generator) < 0.3)).cummax(dim=1).values

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        if cut:
            later = later | (starts[:, None, :, None] != starts[:, None, None, :])
        found = (q @ k.transpose(2, 3) / math.sqrt(8)).masked_fill(later, -math.inf).softmax(-1)
        return (found * key.attention(0.3, 1, numbers, own, found)) @ v

    mask = Mask(key, 0.3, 1, "core", numbers, own)
    results = [whole(*leaves), attend(leaves[0], leaves[1], leaves[2], mask, EAGER, starts if cut else None)]
    want, found = ([one, *torch.autograd.grad(one, leaves, gradient)] for one in results)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize(("rows", "group", "tokens"), [(1, 1, 1), (40, 1, 1024), (7, 8, 300), (2, 4, 100_000)])
def test_blocks_hold_every_query_once(rows: int, group: int, tokens: int, gpu: bool) -> None:
    blocks = Blocks(rows, group, tokens, gpu)
    found = [((b - a) * group, d - c, d) for (a, b), (c, d) in blocks]
    assert sum(heads * queries for heads, queries, _ in found) == rows * group * tokens
    assert max(heads * queries * keys for heads, queries, keys in found) == blocks.weights
    least = group * min(tokens, dropout.LEAST) * tokens
    assert blocks.weights <= max(least, dropout.ON_GPU if gpu else dropout.ON_CPU)


@pytest.mark.parametrize("window", [1, 2, 3, 5, 8, 40])
@pytest.mark.parametrize("size", [2, 4])
def test_turns_of_a_ring_show_every_query_its_window_once(size: int, window: int) -> None:
    half = 3
    places = [[*range(r * half, (r + 1) * half), *range((2 * size - 1 - r) * half, (2 * size - r) * half)]
              for r in range(size)]  # fmt: skip
    for rank, owner in itertools.product(range(size), range(size)):
        seen = torch.zeros(2 * half, 2 * half)
        for sight in sequence.RingStep(owner, rank, size, window).tiles(2 * half):
            part = seen[sight.rows, sight.columns]
            part += shown(sight, part)
        back = torch.tensor(places[rank])[:, None] - torch.tensor(places[owner])
        assert torch.equal(seen, ((back >= 0) & (back < window)).float())


def shown(sight: sequence.MaskTile, part: Tensor) -> Tensor:
    """Which of a sight's keys each of its queries sees: one at least, since a softmax of nothing
    would be NaN."""
    seen = torch.ones_like(part, dtype=torch.bool)
    if sight.near is not None:
        seen = sight.near.mask(part[None, None], part.t()[None, None]) == 0
    elif sight.causal:
        seen = seen.tril()
    assert seen.any(dim=1).all() and seen.any(dim=0).all()
    return seen


@pytest.mark.parametrize("window", [0, 1, 2, 3, 5, 40])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_turns_of_a_ring_show_every_query_its_document_once(size: int, window: int) -> None:
    half = 3
    tokens, generator = 2 * size * half, torch.Generator().manual_seed(size)
    begins = torch.rand(3, tokens, generator=generator) < torch.tensor([0.1, 0.4, 1.0])[:, None]
    starts = (torch.arange(tokens) * begins).cummax(dim=1).values
    documents = Documents(ends_of(starts), starts, starts.t(), bounds_of(ends_of(starts)))
    places = [[*range(r * half, (r + 1) * half), *range((2 * size - 1 - r) * half, (2 * size - r) * half)]
              for r in range(size)]  # fmt: skip
    for rank, owner in itertools.product(range(size), range(size)):
        seen = torch.zeros(3, 2 * half, 2 * half)
        for sight in sequence.RingStep(owner, rank, size, window, documents).tiles(2 * half):
            part = seen[sight.samples, sight.rows, sight.columns]
            part += shown(sight, part[0])
        at, there = torch.tensor(places[rank]), torch.tensor(places[owner])
        back = at[:, None] - there
        same = starts[:, at][:, :, None] == starts[:, there][:, None]
        assert torch.equal(seen, (same & (back >= 0) & (back < (window or tokens))).float())


def test_a_window_on_a_gpu_is_flash_attention_s() -> None:
    """By its shape function: nothing is computed. Key/value heads are shared."""
    with FakeTensorMode():
        q, k, v = (torch.empty(2, heads, 8, 16, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2))
        assert sequence.attend_near(q, k, v, 3).shape == q.shape


@pytest.mark.parametrize("window", [0, 2])
def test_documents_on_a_gpu_are_one_call_of_flash_attention(window: int) -> None:
    """As above."""
    ends = ((3, 8), (8,))
    with FakeTensorMode():
        q, k, v = (torch.empty(2, heads, 8, 16, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2))
        starts = torch.empty(2, 8, dtype=torch.int64, device="cuda")
        documents = Documents(ends, starts, starts.t(), torch.empty(4, dtype=torch.int32, device="cuda"))
        assert sequence.attend_documents(q, k, v, documents, window).shape == q.shape
