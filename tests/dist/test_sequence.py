"""A sequence that several ranks share, by Ulysses, ring attention or both, and one that documents
share, or that has weights, is the unsharded computation: the plain reference's, or
transformers'."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.core.parallel.layout import ContextSplit
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Strategy
from plait.core.step.segments import SegmentGraph
from plait.core.step.stages import Stage
from plait.train.comm.wire import NullWire, Wire, open_wire
from plait.train.engine.attention import SharedCore
from plait.train.model.basics import SliceContext
from plait.train.model.sequence import SequenceGroup
from plait.train.model.sublayers import Attention
from tests.dist.equality import Pool, assert_equal, batch_of, details_of
from tests.dist.pipelining import Pipeline
from tests.dist.test_pipeline import GPT, LLAMA, P2
from tests.dist.test_sharding import SHARDED
from tests.support.cases import each_other, pairwise
from tests.support.models import mistral, qwen3
from tests.support.peers import Peer
from tests.support.reference import Reference, mean_loss

MODELS = {"gpt": replace(GPT, num_layers=2), "llama": replace(LLAMA, num_layers=2)}
MODELS |= {"qwen3": qwen3(window=2, full_first=1), "mistral": mistral()}
FLAT = {name: replace(spec, attention_dropout=0.0) for name, spec in MODELS.items()}
"""With a ring no attention drops."""

CUTS: list[dict[str, Any]] = [{"cp": 2}, {"cp": 2, "ring": 2}, {"cp": 4}, {"cp": 4, "ring": 4}, {"cp": 4, "ring": 2}]


def attention_error(_rank: int, cut: ContextSplit, kv_heads: int) -> float:
    """Largest difference, output and gradients, between shared attention, op by op, and plain
    attention over the whole sequence."""
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
    in_parts = {
        "T": core.ring_send,
        "K": core.attention_core,
        "S": core.ring_send_backward,
        "G": core.core_backward,
        "H": core.ring_send_grad,
    }
    with torch.no_grad():
        for op in graph.ops():
            match op.site, op.kind:
                case "attn", "F":
                    core.activate(context, train=True)
                case "attn", "R":
                    core.unpack_output()
                    out = core.o
                case "attn", "D":
                    core.backward(gradient.flatten(2).flatten(0, 1))
                case "attn", "E":
                    core.heads_exchange_grad()
                case "attn", "Z":
                    core.column_output_grad()
                case "attn", kind if kind in in_parts:
                    in_parts[kind](op.part)
            if kind := graph.collective(op):
                rotates = core.ring_send_grad_buffers() if op.kind == "H" else None
                rotates = core.ring_send_buffers(op.part) if op.kind in "TS" else rotates
                wire.start(kind, *(rotates or core.heads_exchange_buffers())).wait()
    return out, core.g_z


def _present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("cp", "ring"), [(2, 1), (2, 2), (4, 1), (4, 4)])
def test_shared_attention_is_attention(pool: Pool, cp: int, ring: int, kv_heads: int) -> None:
    assert max(pool(cp).run(attention_error, ContextSplit(cp=cp, ring=ring), kv_heads)) < 1e-12


@pytest.mark.parametrize(
    ("cut", "name", "again", "p1", "detailed"),
    pairwise(CUTS, list(MODELS), ("none", "full", "selective"), (1, 2), (False, True)),
)
def test_every_cut_equals_the_reference(
    pool: Pool, cut: dict[str, Any], name: str, again: Any, p1: int, detailed: bool
) -> None:
    spec = (FLAT if "ring" in cut else MODELS)[name]
    assert_equal(pool, Pipeline(spec, strategy=Strategy(p1=p1, recompute=again, **cut), detailed=detailed))


LLAMA2, FLAT_GPT = MODELS["llama"], FLAT["gpt"]
FULL, STATES = Sharding(params=2, grads=2, optim=2), Sharding(optim=2)
BETWEEN = Sharding(params=2, grads=4, optim=4)
CASES = {
    "more ranks than heads": Pipeline(
        replace(LLAMA2, num_heads=2, num_kv_heads=1, head_size=8), schedule="gpipe", strategy=Strategy(cp=4, ring=4)
    ),
    "ulysses, tp": Pipeline(LLAMA2, [(1, 2)], "1f1b", Strategy(p1=2, cp=2), [FULL]),
    "ring, sequence parallel": Pipeline(
        FLAT_GPT, [(1, 2)], "1f1b", Strategy(sequence_parallel=True, cp=2, ring=2), [STATES]
    ),
    "ring, dp": Pipeline(LLAMA2, [(2, 1)], "1f1b", Strategy(p1=2, cp=2, ring=2), [BETWEEN]),
    "ulysses, pp": Pipeline(FLAT_GPT, [(1, 1), (1, 1)], "1f1b", Strategy(p1=2, cp=2)),
    "documents, everything": Pipeline(
        LLAMA2, [(1, 2)], "1f1b", Strategy(p1=2, sequence_parallel=True, recompute="full", cp=2, ring=2), [STATES],
        detailed=True,
    ),
    "documents, ring, pp": Pipeline(FLAT_GPT, [(1, 1), (1, 1)], "1f1b", Strategy(p1=2, cp=2, ring=2), detailed=True),
}  # fmt: skip
UNEQUAL = Pipeline(
    LLAMA2, [(1, 2), (1, 1)], "1f1b", Strategy(p1=2, cp=2, ring=2), [Sharding(), Sharding(grads=2, optim=2)]
)


@pytest.mark.parametrize("name", CASES)
def test_it_goes_with_everything_else(pool: Pool, name: str) -> None:
    assert_equal(pool, CASES[name])


@pytest.mark.contract
def test_it_goes_with_unequal_stages(pool: Pool) -> None:
    assert_equal(pool, UNEQUAL)


AXES = {
    "tp": Pipeline(LLAMA2, [(1, 2)], "1f1b", Strategy(p1=2, p2=2, recompute="full"), detailed=True),
    "sequence parallel": Pipeline(LLAMA2, [(1, 2)], "1f1b", SHARDED, detailed=True),
    "pp": Pipeline(LLAMA2, [(1, 1), (1, 1)], "1f1b", P2, detailed=True),
    "dp": Pipeline(LLAMA2, [(3, 1)], shardings=[Sharding(params=3, grads=3, optim=3)], detailed=True),
}


@pytest.mark.parametrize(("name", "axis"), each_other(list(MODELS), list(AXES)))
def test_documents_on_every_axis(pool: Pool, name: str, axis: str) -> None:
    assert_equal(pool, replace(AXES[axis], spec=MODELS[name]))


@pytest.mark.unit
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_the_reference_with_masks_is_documents_apart(name: str) -> None:
    spec = replace(FLAT[name], dropout=0.0)
    reference, (tokens, targets, _), details = Reference(spec), batch_of(spec, 0), details_of(0)
    reference.perturb()
    rows = []
    for row, starts in zip(tokens, details["starts"], strict=True):
        _, lengths = starts.unique_consecutive(return_counts=True)
        rows.append(torch.cat([reference.logits(each[None])[0] for each in row.split(lengths.tolist())]))
    apart = mean_loss(torch.stack(rows), targets, details["weights"])
    torch.testing.assert_close(reference.loss(tokens, targets, **details), apart, rtol=1e-12, atol=0)


@pytest.mark.unit
def test_the_reference_is_transformers() -> None:
    spec, (tokens, targets, _), details = replace(LLAMA2, dropout=0.0), batch_of(LLAMA2, 0), details_of(0)
    ours, theirs = (one.loss(tokens, targets, **details) for one in (Reference(spec), Peer(spec)))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=0)
