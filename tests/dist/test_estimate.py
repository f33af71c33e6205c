"""What ``plait train --dry-run`` says is what a run's ranks allocate and send."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from plait.core.job.spec import Job
from plait.core.step.memory.estimate import estimate
from plait.plan.make import job_step
from tests.dist import allocating
from tests.support.ranks import Ranks

Pool = Callable[[int], Ranks]

GPT = {"family": "gpt", "num_layers": 4, "hidden": 128, "num_heads": 8}
LLAMA = GPT | {"family": "llama", "num_kv_heads": 4, "ffn_hidden": 352}
U = GPT | {"family": "utransformer", "num_layers": 5, "levels": 2}
BLOCK = GPT | {"parallel_block": True}
TOLERANCE = 0.03
ROUTED_TOLERANCE = 0.05
"""With ranks that share out experts: a router spreads tokens unevenly."""
DROPS = {"dropout": 0.1, "attention_dropout": 0.1}


def job(
    model: dict[str, Any],
    strategy: dict[str, Any],
    batch: int = 8,
    micro: int = 2,
    precision: str = "fp32",
    sequence: int = 256,
) -> dict[str, Any]:
    """Nothing is timed, so that the strategy is the one that the estimate knows."""
    return {
        "model": {"vocab": 96} | model | {"max_sequence": sequence},
        "data": {"sequence_length": sequence},
        "train": {"global_batch_size": batch, "micro_batch_size": micro, "precision": precision},
        "strategy": {"slices": {}, "schedule": "1f1b"} | strategy,
    }


def bf16(model: dict[str, Any], strategy: dict[str, Any], batch: int = 8, micro: int = 2) -> dict[str, Any]:
    """As ``job``, on longer sequences."""
    return job(model, strategy, batch, micro, "bf16-mixed", 384)


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    """With moments in bf16 as well."""
    return values | {"train": values["train"] | {"optimizer_dtype": "bf16"}}


def again(kind: str, layers: int) -> dict[str, Any]:
    """Recomputation of some layers of a stage."""
    return {"recompute": {"kind": kind, "layers": layers}}


JOBS = {
    "tp and slices": job(LLAMA, {"tp": 2, "slices": {"batch": 2, "columns": 2}}, batch=4),
    "sequence parallel": job(GPT, {"tp": 2, "sequence_parallel": True, "slices": {"batch": 2}}, micro=4),
    "1f1b": job(GPT, {"pp": 2}),
    "fsdp": job(GPT, {"dp": 2, "shard": "fsdp"}, micro=1),
    "utransformer": job(U, {"pp": 2}),
    "zb-v": job(LLAMA, {"pp": 2, "schedule": "zb-v"}, batch=12),
    "tied, tp": job(GPT, {"pp": 2, "tp": 2}),
}
MORE = {
    "u on one rank": job(U, {"tp": 2}),
    "replicated heads": job(LLAMA | {"num_kv_heads": 2}, {"tp": 4, "slices": {"batch": 2}}, batch=4),
    "eager on three": job(LLAMA, {"pp": 3, "schedule": "eager-1f1b"}, batch=12),
    "gpipe": job(LLAMA, {"pp": 2, "schedule": "gpipe"}),
    "interleaved": job(LLAMA, {"pp": 2, "virtual_stages": 2, "schedule": "interleaved"}),
    "zb-h1": job(GPT, {"pp": 2, "schedule": "zb-h1"}),
    "zb-h2": job(GPT, {"pp": 2, "schedule": "zb-h2"}),
    **{
        f"{kind}, rounded": rounded(job(GPT, {"dp": 4 // tp, "tp": tp, "shard": kind, "reduce_dtype": "bf16"}))
        for kind, tp in (("ddp", 1), ("zero1", 2), ("zero2", 1), ("zero3", 2))
    },
    "levels, rounded": rounded(job(GPT, {"dp": 4, "shard": {"optim": 4, "grads": 2}, "reduce_dtype": "bf16"})),
    "rounded in bf16": rounded(bf16(LLAMA, {"dp": 2, "shard": "zero1", "reduce_dtype": "bf16"})),
    "zero1": job(LLAMA, {"dp": 2, "shard": "zero1"}),
    "zero2 of a parallel block": job(BLOCK, {"dp": 2, "tp": 2, "shard": "zero2"}),
    "secondary": job(LLAMA, {"dp": 4, "shard": {"params": 4, "grads": 4, "optim": 4, "secondary": 2}}, micro=1),
    "uneven shares": job(GPT, {"dp": 3, "shard": "zero1"}, batch=7, micro=0),
    "ulysses": job(LLAMA, {"cp": 2, "dp": 2, "shard": "fsdp"}, micro=1),
    "ring": job(LLAMA, {"cp": 2, "cp_comm_type": "ring", "tp": 2, "shard": "zero1"}, micro=1),
    "both": job(LLAMA, {"cp": 4, "cp_comm_type": {"ulysses": 2, "ring": 2}}, batch=2, micro=1),
    "full recomputation": job(GPT, {"pp": 2, "recompute": "full"}),
    "one stream a layer": job(GPT, {"pp": 2, "recompute": "layer"}),
    "one stream, sliced": job(
        LLAMA, {"tp": 2, "slices": {"batch": 2, "columns": 2}, "sequence_parallel": True, "recompute": "layer"}, batch=4
    ),
    "selective recomputation": job(BLOCK, {"pp": 2, "recompute": "selective"}),
    "sequence parallel stages": job(GPT, {"pp": 2, "tp": 2, "sequence_parallel": True}),
    "tied, sharded": job(GPT, {"pp": 2, "dp": 2, "shard": "zero1"}, micro=2),
    "tied, unequal places": job(GPT, {"pp": 2, "dp": [2, 1], "tp": [1, 2]}, micro=2),
    "unequal places": job(LLAMA, {"pp": 2, "dp": [2, 1], "tp": [1, 2]}, micro=1),
}


WIDE = {"vocab": 9000}
JOBS |= {
    "dropped": job(GPT | DROPS, {"tp": 2}, batch=4),
    "domino, dropped, in bf16": bf16(
        LLAMA | {"dropout": 0.1}, {"tp": 2, "slices": {"batch": 2, "columns": 2}}, batch=2
    ),
    "zero3 of a large vocabulary": bf16(LLAMA | WIDE, {"dp": 2, "shard": "zero3"}, batch=4),
    "no layer again": job(GPT, {"pp": 2} | again("full", 0), batch=4),
    "sliced, sequence parallel": bf16(
        GPT | {"dropout": 0.2}, {"tp": 2, "sequence_parallel": True, "slices": {"batch": 2}}, batch=4, micro=4
    ),
}
MORE |= {
    "attention dropout of a long sequence": job(
        GPT | {"num_layers": 3, "attention_dropout": 0.1}, {}, batch=3, micro=3, sequence=512
    ),
    "dropped llama, recomputed": bf16(LLAMA | DROPS, {"recompute": "full"}, batch=6, micro=3),
    "dropped block": job(BLOCK | DROPS, {"tp": 2, "slices": {"batch": 2}, "recompute": "selective"}, batch=4),
    "dropped utransformer": bf16(U | DROPS, {"tp": 2}),
    "dropped ulysses": bf16(LLAMA | DROPS, {"cp": 2, "dp": 2, "shard": "zero2"}, batch=4),
    "dropped ulysses, recomputed": job(GPT | DROPS, {"cp": 2, "recompute": "full"}, batch=4),
    "dropped pipeline": bf16(GPT | DROPS, {"pp": 2, "schedule": "zb-h1"}, batch=12),
    "dropped zb-v": job(LLAMA | DROPS, {"pp": 2, "schedule": "zb-v"}, batch=12),
    "dropped zb-h2": job(GPT | {"dropout": 0.1}, {"pp": 2, "schedule": "zb-h2"}, batch=12),
    "ring in bf16": bf16(LLAMA | {"dropout": 0.1}, {"cp": 2, "cp_comm_type": "ring", "recompute": "full"}, batch=4),
    "sliced ring": job(GPT, {"cp": 2, "cp_comm_type": "ring", "slices": {"batch": 2}, "recompute": "full"}),
    "llama in bf16": bf16(LLAMA | {"num_kv_heads": 2, "num_layers": 3}, {}, batch=3, micro=3),
    "gpt of a large vocabulary": bf16(GPT | WIDE, {"tp": 2, "sequence_parallel": True}),
    "tied in bf16": bf16(GPT | WIDE | {"tied_embeddings": True}, {"dp": 2, "shard": "zero1"}, batch=4),
    "domino, sharded": bf16(
        LLAMA | WIDE, {"tp": 2, "dp": 2, "shard": "zero3", "slices": {"batch": 2, "columns": 2}}, batch=8, micro=4
    ),
    "domino, recomputed": job(
        LLAMA, {"tp": 2, "slices": {"batch": 2, "columns": 4}, "recompute": "full"}, batch=4, micro=4
    ),
    "domino of a block": job(BLOCK, {"tp": 2, "slices": {"batch": 2, "columns": 2}, "recompute": "full"}, batch=4),
    "async": bf16(GPT, {"tp": 2, "overlap": "async"}, batch=4),
    "fixed": job(GPT, {"tp": 2, "overlap": "fixed", "slices": {"batch": 4}, "recompute": "full"}, batch=4, micro=4),
    "sync": bf16(LLAMA, {"tp": 2, "overlap": "sync", "sequence_parallel": True}, batch=4),
    "four slices": job(GPT | {"dropout": 0.1}, {"tp": 2, "slices": {"batch": 4}}, batch=4, micro=4),
    "uneven slices": job(LLAMA, {"tp": 2, "slices": {"batch": 2}}, batch=3, micro=3),
    "one layer again": bf16(GPT | {"dropout": 0.1}, {"pp": 2} | again("full", 1), batch=4),
    "all layers again": job(LLAMA, {"pp": 2} | again("full", 2), batch=4),
    "one layer again, selectively": job(BLOCK, {"tp": 2} | again("selective", 1), batch=4),
    "sequence parallel stages, dropped": bf16(
        GPT | DROPS, {"pp": 2, "tp": 2, "sequence_parallel": True, "slices": {"batch": 2}}, batch=8
    ),
    "fp64": job(LLAMA | DROPS, {"tp": 2}, batch=4, precision="fp64"),
}


QWEN3 = LLAMA | {"qk_norm": True, "head_size": 24}
JOBS |= {"norms of heads": bf16(QWEN3, {"tp": 2, "slices": {"batch": 2}}, batch=4)}
MORE |= {
    "norms of heads in fp32": job(QWEN3, {"pp": 2}, batch=4),
    "norms of heads, recomputed": job(QWEN3, {"recompute": "full"}, batch=4),
    "norms of heads, ring": job(QWEN3, {"cp": 2, "cp_comm_type": "ring"}, micro=1),
    "norms of heads, ulysses": bf16(QWEN3, {"cp": 2}),
    "window": job(LLAMA | {"window": 64}, {"tp": 2}, batch=4),
    "window, ring": job(LLAMA | {"window": 64}, {"cp": 2, "cp_comm_type": "ring"}, micro=1),
    "norms of heads, ring, recomputed": job(QWEN3, {"cp": 2, "cp_comm_type": "ring", "recompute": "full"}, micro=1),
}


EQUAL = {"ffn_hidden": 256}  # attention and MLP have as many numbers
JOBS |= {"zero3 of a block of equal branches": job(BLOCK | EQUAL, {"dp": 2, "shard": "zero3"}, batch=4)}
MORE |= {
    "zero2 of a block of equal branches": job(BLOCK | EQUAL, {"dp": 2, "shard": "zero2"}, batch=4),
    "zero3 of equal modules": job(GPT | EQUAL, {"dp": 2, "shard": "zero3"}, batch=4),
    "zero2 of equal modules": job(GPT | EQUAL, {"dp": 2, "shard": "zero2"}, batch=4),
    "zero3 of equal modules, not hidden": job(
        GPT | EQUAL, {"dp": 2, "shard": "zero3", "overlap": {"shard": "none"}}, batch=4
    ),
}


def masked(values: dict[str, Any]) -> dict[str, Any]:
    """With attention that stops at documents' ends."""
    return values | {"data": values["data"] | {"documents": "mask"}}


JOBS |= {"documents": masked(job(LLAMA, {"tp": 2}, batch=4))}
MORE |= {
    "documents of one sequence": masked(job(GPT, {}, batch=4, micro=1)),
    "documents in bf16": masked(bf16(LLAMA | {"num_kv_heads": 2}, {"pp": 2}, batch=4)),
    "documents, sliced": masked(job(LLAMA, {"tp": 2, "slices": {"batch": 2, "columns": 2}}, batch=4, micro=4)),
    "documents, recomputed": masked(job(GPT, {"recompute": "full"}, batch=4)),
    "documents, selective recomputation": masked(job(BLOCK, {"pp": 2, "recompute": "selective"})),
    "documents, ulysses": masked(job(LLAMA, {"cp": 2}, batch=4)),
    "documents, ring": masked(job(LLAMA, {"cp": 2, "cp_comm_type": "ring"}, micro=1)),
    "documents and windows": masked(job(LLAMA | {"window": 64}, {"tp": 2}, batch=4)),
    "dropped documents": masked(job(GPT | DROPS, {"tp": 2}, batch=4)),
}


MIXTURE = LLAMA | {"experts": {"count": 8, "per_token": 2, "ffn_hidden": 160, "shared": 1, "balance_loss": 0.01}}
ROUTED = LLAMA | {"experts": {"count": 4, "per_token": 2, "ffn_hidden": 352}}
JOBS |= {"experts on one rank": job(MIXTURE, {"slices": {"batch": 2}}, batch=4)}
MORE |= {
    "experts in bf16": bf16(ROUTED, {}, batch=4),
    "experts, recomputed": job(MIXTURE, {"recompute": "full"}, batch=4),
    "experts, selective recomputation": bf16(MIXTURE, {"recompute": "selective"}, batch=4),
    "experts, one stream a layer": job(ROUTED, {"recompute": "layer"}, batch=4),
    "experts cut by tp": job(MIXTURE, {"tp": 2, "slices": {"batch": 2}}, batch=4),
    "experts, sequence parallel": bf16(MIXTURE, {"tp": 2, "sequence_parallel": True}, batch=4),
    "experts in a pipeline": job(ROUTED, {"pp": 2, "schedule": "zb-h1"}),
    "experts in some layers": job(
        LLAMA | {"num_layers": 6, "experts": {"count": 4, "per_token": 2, "first_dense": 1, "every": 2}}, {"pp": 2}
    ),
    "experts, sharded": job(MIXTURE, {"dp": 2, "shard": "zero3"}),
    "experts that ranks share out": job(MIXTURE, {"dp": 2, "ep": 2, "shard": "zero1"}, micro=4),
    "experts shared out and sharded": job(MIXTURE, {"dp": 4, "ep": 2, "shard": "zero3"}, micro=2),
    "whole experts": bf16(MIXTURE, {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}, batch=4),
}


def fullest(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ranks of a place differ where dp does not divide a micro-batch: the estimate is of the
    largest."""
    return max(ranks, key=lambda each: sum(each["memory"].values()))


@pytest.mark.parametrize(
    "name", [*JOBS, *(pytest.param(name, marks=pytest.mark.contract) for name in MORE)]
)  # fmt: skip
def test_memory_and_bytes_are_what_a_run_allocates_and_sends(pool: Pool, name: str) -> None:
    values = (JOBS | MORE)[name]
    asked = Job.from_dict(values)
    estimates = estimate(job_step(asked, vocab=1)).places
    within = ROUTED_TOLERANCE if asked.strategy.ep > 1 else TOLERANCE
    for last_try in (False, True):  # collectives that end late, on a busy machine, keep longer what they send
        found = pool(asked.world_size).run(allocating.measured, values)
        reals = [fullest(found[each.ranks[0] : each.ranks[1] + 1]) for each in estimates]
        told = [each.memory.activations for each in estimates]
        if last_try or told == pytest.approx([one["memory"]["activations"] for one in reals], rel=within, abs=0):
            break
    for each, real in zip(estimates, reals, strict=True):
        for kind, size in real["memory"].items():
            tolerance = within if kind == "activations" else 0
            assert getattr(each.memory, kind) == pytest.approx(size, rel=tolerance, abs=0), kind
        rows = real["sent"].pop("rows")  # depend on the tokens
        assert rows <= each.sent.get("rows", 0)
        assert {axis: each.sent.get(axis, 0) for axis in real["sent"]} == real["sent"]
