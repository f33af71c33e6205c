"""A sequence that several ranks share, by Ulysses, ring attention or both, is the unsharded computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import SequenceCut
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Recompute, Strategy
from plait.core.step.segments import SegmentGraph
from plait.core.step.stages import Stage
from plait.train.comm.wire import NullWire, Wire, open_wire
from plait.train.engine.attention import SharedCore
from plait.train.model.basics import SliceContext
from plait.train.model.sequence import SequenceGroup
from plait.train.model.sublayers import Attention
from tests.dist import pipelining
from tests.dist.test_pipeline import GPT, LLAMA, TOLERANCE
from tests.support.models import mistral, qwen3
from tests.support.ranks import Ranks

Pool = Callable[[int], Ranks]

SMALL_GPT = replace(GPT, num_layers=2)
SMALL_LLAMA = replace(LLAMA, num_layers=2)
NO_CORE_DROPOUT = replace(SMALL_GPT, attention_dropout=0.0)


def attention_error(_rank: int, cut: SequenceCut, kv_heads: int) -> float:
    """Largest difference, output and gradients, between shared attention, op by op, and plain attention over
    the whole sequence."""
    generator = torch.Generator().manual_seed(0)
    tokens, heads, size = 16, 4, 8
    q, k, v, g = (
        torch.randn(tokens, 2, n, size, generator=generator, dtype=torch.float64)
        for n in (heads, kv_heads, kv_heads, heads)
    )
    for tensor in (q, k, v):
        tensor.requires_grad_()
    wire = open_wire("gloo")
    own = torch.cat([torch.arange(run.start, run.stop) for run in cut.tokens(tokens, wire.rank)])
    strategy = Strategy(cp=cut.cp, ring=cut.ring)
    spec = replace(
        LLAMA, num_heads=heads, num_kv_heads=kv_heads, hidden=heads * size, head_size=size, max_sequence=tokens
    )
    group = SequenceGroup(wire, NullWire()) if cut.ring == 1 else SequenceGroup(NullWire(), wire)
    attention = Attention(spec, 0, strategy, 0, group)
    attention.row.weight = torch.nn.Parameter(torch.eye(heads * size, dtype=torch.float64))
    z = torch.cat([tensor[own].detach() for tensor in (q, k, v)], dim=2).flatten(2)
    out, g_z = run_shared(attention, strategy, wire, z, g[own])
    x, y, t = (part.permute(1, 2, 0, 3).repeat_interleave(heads // part.shape[2], dim=1) for part in (q, k, v))
    whole = F.scaled_dot_product_attention(x, y, t, is_causal=True).permute(2, 0, 1, 3)
    whole.backward(g)
    wanted = torch.cat([_present(tensor.grad)[own] for tensor in (q, k, v)], dim=2)
    pairs = [(out, whole[own]), (g_z, wanted)]
    return max(float((found - want.reshape(found.shape)).abs().max()) for found, want in pairs)


def run_shared(
    attention: Attention, strategy: Strategy, wire: Wire, z: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention of z and the gradient of z, by the ops of a list in their plain order."""
    graph = SegmentGraph.of(replace(attention.spec, num_layers=1), strategy, Stage(0, 1, 0, 1))
    context = SliceContext(torch.arange(z.shape[1]), torch.arange(z.shape[0]), None)
    core, out = SharedCore(attention, False, context, True), torch.empty(0)
    core.z = z
    in_parts = {"T": core.turn, "K": core.attend, "S": core.turn_back, "G": core.block_gradient, "H": core.hand_on}
    with torch.no_grad():
        for op in graph.ops():
            match op.site, op.kind:
                case "attn", "F":
                    core.activate(context, train=True)
                case "attn", "R":
                    core.arrive()
                    out = core.o
                case "attn", "D":
                    core.back(gradient.flatten(2).flatten(0, 1))
                case "attn", "E":
                    core.send_gradients()
                case "attn", "Z":
                    core.finish()
                case "attn", kind if kind in in_parts:
                    in_parts[kind](op.part)
            if kind := graph.collective(op):
                rotates = core.rotate_gradient() if op.kind == "H" else None
                rotates = core.rotate_block(op.part) if op.kind in "TS" else rotates
                wire.start(kind, *(rotates or core.exchange())).wait()
    return out, core.g_z


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
@pytest.mark.parametrize(
    "spec", [SMALL_GPT, SMALL_LLAMA, qwen3(window=2, full_first=1), mistral()], ids=["gpt", "llama", "qwen3", "mistral"]
)
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
