"""What the runtime asks of a GPU's kernels and copies, compared with the CPU. Skips where there is
no GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from plait.core.parallel.strategy import Strategy
from plait.train.comm.background import Background
from plait.train.engine.gradients import Gradients
from plait.train.machine.gpu import device_of
from plait.train.model import documents, formulas, sequence
from plait.train.model.compiled import compiler
from plait.train.model.transformer import Transformer
from tests.support.models import llama

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_what_is_uploaded_arrives() -> None:
    tensors = [torch.arange(1000), torch.tensor([True]), torch.randn(3, 5), torch.empty(0, dtype=torch.int64)]
    for found, tensor in zip(device_of(0).upload(tensors), tensors, strict=True):
        assert found.is_cuda and torch.equal(found.cpu(), tensor)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_attention_by_blocks_is_the_cpu_s(dtype: torch.dtype, kv_heads: int, causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(2, n, 40, 16, generator=generator).to(dtype) for n in (4, kv_heads, kv_heads, 4))
    exact = [t.double() for t in (q, k, v)]
    out, lse = sequence._attend(exact[0], exact[1], exact[2], causal=causal)
    want = [out, lse, *sequence._attend_backward(g.double(), exact[0], exact[1], exact[2], out, lse, causal=causal)]
    q, k, v, g = (t.cuda() for t in (q, k, v, g))
    out, lse = sequence._attend(q, k, v, causal=causal)
    found = [out, lse, *sequence._attend_backward(g, q, k, v, out, lse, causal=causal)]
    tolerance = {torch.bfloat16: 5e-2, torch.float32: 1e-4, torch.float64: 1e-10}[dtype]
    for ours, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_within_documents_is_the_cpu_s(dtype: torch.dtype, kv_heads: int, window: int) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, n, 40, 16, generator=generator).to(dtype) for n in (4, kv_heads, kv_heads)]
    ahead = torch.randn(2, 4, 40, 16, generator=generator).to(dtype)
    starts = torch.tensor([[0] * 7 + [7] * 20 + [27] * 13, [0] * 40])
    found = [
        _within(starts.to(device), inputs, ahead, kind, window)
        for device, kind in (("cuda", dtype), ("cpu", torch.float64))
    ]
    tolerance = {torch.bfloat16: 5e-2, torch.float32: 1e-4}[dtype]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=tolerance, atol=tolerance)


def _within(
    starts: torch.Tensor, inputs: Sequence[torch.Tensor], ahead: torch.Tensor, dtype: torch.dtype, window: int
) -> list[torch.Tensor]:
    """Attention within documents and its gradients, where ``starts`` is and in this precision."""
    ends = documents.ends_of(starts.cpu())
    places = (torch.arange(starts.shape[1], device=starts.device) - starts).t()
    those = documents.Documents(ends, starts, places, documents.bounds_of(ends).to(starts.device))
    q, k, v = (t.to(starts.device, dtype).requires_grad_() for t in inputs)
    out = sequence.attend_documents(q, k, v, those, window)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), ahead.to(starts.device, dtype))]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own use, in its compiler
@pytest.mark.parametrize("width", [16, 5000])
def test_compiled_masks_are_the_cpu_s(width: int) -> None:
    """To the bit, also where a column's number times a constant exceeds 32 bits."""
    generator = torch.Generator().manual_seed(0)
    x = torch.ones(40, width, dtype=torch.float64)
    hashes = torch.randint(0, 1 << 32, (40,), generator=generator)
    inputs = (x, hashes, torch.tensor(1 << 29), torch.tensor(1.125, dtype=torch.float64))
    found = compiler().table()["drop"](*(one.cuda() for one in inputs))
    want = formulas.drop(*inputs)
    assert torch.equal(found.cpu(), want)
    assert 0 < int((want == 0).sum()) < want.numel() // 2


def test_gradients_are_added_in_fp32_and_in_one_order() -> None:
    model = Transformer(llama(), Strategy(), dtype=torch.bfloat16, device=torch.device("cuda", 0))
    gradients = Gradients(model)
    weight, words = (model.named[name] for name in ("layers.0.mlp.row.weight", "embedding.weight"))
    out, inputs = (torch.randn(4096, size, device="cuda").bfloat16() for size in weight.shape)
    gradients.add_product(weight, out, inputs)
    exact = out.double().t() @ inputs.double()
    torch.testing.assert_close(gradients._of[weight].double(), exact, rtol=1e-4, atol=1e-2)
    rows = torch.randint(0, words.shape[0], (4096,), device="cuda")
    found = torch.randn(4096, words.shape[1], device="cuda").bfloat16()
    sums = []
    for _ in range(5):
        gradients.zero()
        gradients.add_rows(words, rows, found)
        sums.append(gradients._of[words].clone())
    assert all(torch.equal(sums[0], one) for one in sums)
    one_by_one = torch.stack([view.double().square().sum() for _, view in gradients.held]).sum()
    torch.testing.assert_close(gradients.norm_square(), one_by_one, rtol=1e-5, atol=1e-8)


def test_a_thread_s_work_is_done_when_the_device_says_so() -> None:
    device = device_of(0)
    background, tensor = Background(device, "test"), torch.zeros(1 << 24, device=device.torch_device)
    handle = background.start(lambda: [tensor.add_(1) for _ in range(200)])
    handle.wait()
    assert bool((tensor == 200).all())
    assert handle.done()
    start, end = (device.nanoseconds(mark) for mark in handle.span)
    assert 0 < end - start < 60e9
    background.close()
