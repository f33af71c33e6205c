"""A sequence that several ranks share, by Ulysses, ring attention or both, is the unsharded computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.core.layout import SequenceCut
from plait.core.model import ModelSpec
from plait.core.sharding import Sharding
from plait.core.strategy import Recompute
from plait.train.comm.wire import open_wire
from plait.train.model.sequence import ring_attention, to_heads, to_tokens
from tests.dist import pipelining
from tests.dist.test_pipeline import GPT, LLAMA, TOLERANCE
from tests.ranks import Ranks

Pool = Callable[[int], Ranks]

SMALL_GPT = replace(GPT, num_layers=2)
SMALL_LLAMA = replace(LLAMA, num_layers=2)
NO_CORE_DROPOUT = replace(SMALL_GPT, attention_dropout=0.0)


def attention_error(_rank: int, cut: SequenceCut, kv_heads: int) -> float:
    """Largest difference, output and gradients, between shared attention and plain attention over the whole
    sequence."""
    generator = torch.Generator().manual_seed(0)
    tokens, heads = 16, 4
    q, k, v, g = (
        torch.randn(tokens, 2, n, 8, generator=generator, dtype=torch.float64)
        for n in (heads, kv_heads, kv_heads, heads)
    )
    for tensor in (q, k, v):
        tensor.requires_grad_()
    wire = open_wire("gloo")
    own = torch.cat([torch.arange(run.start, run.stop) for run in cut.tokens(tokens, wire.rank)])
    mine = [tensor[own].detach().requires_grad_() for tensor in (q, k, v)]
    if cut.ring == 1:
        parts = [part.permute(1, 2, 0, 3) for part in to_heads(mine[0], mine[1], mine[2], wire)]
        group = parts[0].shape[1] // parts[1].shape[1]
        parts[1:] = [part.repeat_interleave(group, dim=1) for part in parts[1:]]
        a, b, c = parts
        out = to_tokens(F.scaled_dot_product_attention(a, b, c, is_causal=True).permute(2, 0, 1, 3), wire)
    else:
        a, b, c = (part.permute(1, 2, 0, 3) for part in mine)
        out = ring_attention(a, b, c, wire).permute(2, 0, 1, 3)
    out.backward(g[own])
    x, y, z = (part.permute(1, 2, 0, 3).repeat_interleave(heads // part.shape[2], dim=1) for part in (q, k, v))
    whole = F.scaled_dot_product_attention(x, y, z, is_causal=True).permute(2, 0, 1, 3)
    whole.backward(g)
    pairs = [(out, whole), *((a.grad, b.grad) for a, b in zip(mine, (q, k, v), strict=True))]
    return max(float((found - _present(want)[own]).abs().max()) for found, want in pairs if found is not None)


def _present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("ring", [1, 2, 4])
@pytest.mark.parametrize("cp", [2, 4])
def test_shared_attention_is_attention(pool: Pool, cp: int, ring: int, kv_heads: int) -> None:
    if ring not in (1, cp):
        pytest.skip("the contract below has both at once")
    assert max(pool(cp).run(attention_error, SequenceCut(cp=cp, ring=ring), kv_heads)) < 1e-12


def assert_equal(
    pool: Pool, spec: ModelSpec, degrees: Sequence[tuple[int, int]], name: str, cut: SequenceCut, *, p1: int = 1,
    sequence_parallel: bool = False, shardings: Sequence[Sharding] = (), again: Recompute = "none",
) -> None:  # fmt: skip
    size = cut.cp * sum(dp * tp for dp, tp in degrees)
    args = (spec, degrees, name, p1, sequence_parallel, None, (), shardings, cut, {"recompute": again})
    for error, what in pool(size).run(pipelining.worst_error, *args):
        assert error < TOLERANCE, f"{name} on {degrees}, {cut}: {what} is off by {error:.1e}"


@pytest.mark.parametrize(
    "cut",
    [
        SequenceCut(cp=2),
        SequenceCut(cp=2, ring=2),
        SequenceCut(cp=4),
        SequenceCut(cp=4, ring=4),
        SequenceCut(cp=4, ring=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("spec", [SMALL_GPT, SMALL_LLAMA], ids=["gpt", "llama"])
def test_every_kind_equals_the_reference(pool: Pool, spec: ModelSpec, cut: SequenceCut) -> None:
    spec = replace(spec, attention_dropout=0.0) if cut.ring > 1 else spec
    for p1, again in ((1, "none"), (2, "full"), (1, "selective")):
        assert_equal(pool, spec, [(1, 1)], "1f1b", cut, p1=p1, again=again)  # type: ignore[arg-type]


def test_sequences_shared_by_more_ranks_than_there_are_heads(pool: Pool) -> None:
    assert_equal(
        pool,
        replace(SMALL_LLAMA, num_heads=2, num_kv_heads=1, head_size=8),
        [(1, 1)],
        "gpipe",
        SequenceCut(cp=4, ring=4),
    )


@pytest.mark.parametrize(
    ("degrees", "cut", "shardings"),
    [
        ([(1, 2)], SequenceCut(cp=2), [Sharding(params=2, grads=2, optim=2)]),
        ([(1, 2)], SequenceCut(cp=2, ring=2), [Sharding(optim=2)]),
        ([(2, 1)], SequenceCut(cp=2, ring=2), [Sharding(params=2, grads=4, optim=4)]),
        ([(1, 1), (1, 1)], SequenceCut(cp=2), []),
        pytest.param(
            [(1, 2), (1, 1)],
            SequenceCut(cp=2, ring=2),
            [Sharding(), Sharding(grads=2, optim=2)],
            marks=pytest.mark.contract,
        ),
    ],
    ids=str,
)
def test_it_goes_with_everything_else(
    pool: Pool, degrees: list[tuple[int, int]], cut: SequenceCut, shardings: list[Sharding]
) -> None:
    assert_equal(pool, SMALL_LLAMA, degrees, "1f1b", cut, p1=2, shardings=shardings)
    assert_equal(pool, NO_CORE_DROPOUT, degrees, "1f1b", cut, sequence_parallel=True, shardings=shardings)
