"""Jobs drawn from the whole space of strategies, models and batches; the planner's own rules say which are
valid."""

from __future__ import annotations

import random
from typing import Any, get_args

from plait.core.cluster import Cluster
from plait.core.job import Job
from plait.core.model import ModelSpec
from plait.core.plan import Plan
from plait.core.schedules import GENERATORS
from plait.core.segment_costs import SegmentCosts, segment_costs
from plait.core.strategy import Overlap, Recompute, ShardOverlap
from plait.plan.make import make_plan

Values = dict[str, Any]
HEADS = {2: (8, 16), 3: (12, 24), 4: (8, 16, 24), 5: (10, 20), 6: (12, 24), 10: (20,), 12: (24,), 15: (15, 30)}
"""Numbers of heads, and hidden sizes that go with them."""
FEW = (1, 1, 1, 2, 2, 3)


def draw(chance: random.Random) -> Values:
    """Any job, valid or not; in fp64."""
    pp, name = chance.choice(FEW), chance.choice(list(GENERATORS))
    chunks = chance.choice((1, 2, 3)) if name == "interleaved" else 2 if name == "zb-v" else 1
    strategy = _degrees(chance, pp) | _manner(chance)
    strategy |= {"pp": pp, "schedule": name, "virtual_stages": chunks}
    if name == "slack-1f1b":
        strategy["slack"] = [chance.choice((1, 2, 3)) for _ in range(pp - 1)]
    layers = [chance.choice((1, 1, 2)) for _ in range(pp * chunks)]
    uneven = chance.random() < 0.5
    if uneven:
        strategy["stage_layers"] = layers
    sequence = chance.choice((8, 8, 12, 15, 16, 24, 30))
    return {
        "model": _model(chance, sum(layers), sequence),
        "data": {"sequence_length": sequence},
        "train": _batches(chance, strategy["dp"]) | {"precision": "fp64", "lr_wsd_decay_steps": 0},
        "strategy": strategy,
    }


def _model(chance: random.Random, layers: int, sequence: int) -> Values:
    family, heads = chance.choice(("gpt", "gpt", "llama", "llama", "utransformer")), chance.choice(list(HEADS))
    hidden = chance.choice(HEADS[heads])
    model: Values = {"family": family, "hidden": hidden, "num_heads": heads, "max_sequence": sequence}
    model |= {"vocab": chance.choice((31, 37, 40)), "ffn_hidden": chance.choice((2, 2, 3, 4)) * hidden}
    model |= {"dropout": chance.choice((0.0, 0.1)), "attention_dropout": chance.choice((0.0, 0.0, 0.2))}
    model |= {"tied_embeddings": chance.random() < 0.5, "parallel_block": chance.random() < 0.25}
    if family == "llama":
        divisors = [number for number in range(1, heads + 1) if heads % number == 0]
        model |= {"num_kv_heads": chance.choice(divisors), "head_size": chance.choice((2, 4))}
    if family == "utransformer":
        model["levels"] = chance.choice((1, 1, 2))
        parts = 2 * model["levels"] + 1
        layers = -(-layers // parts) * parts
    return model | {"num_layers": layers}


def _degrees(chance: random.Random, pp: int) -> Values:
    def degree(*several: int) -> int | list[int]:
        each = [chance.choice(several) for _ in range(pp)]
        return each if chance.random() < 0.4 else each[0]

    cp = chance.choice((1, 1, 1, 2, 4))
    found: Values = {"dp": degree(1, 2, 2, 3, 4), "tp": degree(1, 2, 2, 3, 4, 5), "cp": cp}
    if cp > 1:
        ring = chance.choice((1, 2, 4))
        found["cp_kind"] = chance.choice(("ulysses", "ring", {"ulysses": max(1, cp // ring), "ring": ring}))
    if chance.random() < 0.5:
        found["shard"] = chance.choice(("ddp", "zero1", "zero2", "zero3", "fsdp"))
    else:
        params, grads, optim = sorted(chance.choice((1, 2, 2, 3, 4, 6, 8)) for _ in range(3))
        secondary = chance.choice((0, 0, 2))
        found["shard"] = {"params": params, "grads": grads, "optim": optim, "secondary": secondary}
    return found


def _manner(chance: random.Random) -> Values:
    """How communication is hidden and memory saved."""
    given = tuple(kind for kind in get_args(Overlap) if kind != "none")  # which computes wrong numbers
    kind = chance.choice(("domino", *given))
    shard = chance.choice(("both", *get_args(ShardOverlap)))
    again = chance.choice(get_args(Recompute))
    return {
        "overlap": chance.choice((kind, {"tp": kind, "shard": shard})),
        "slices": {"p1": chance.choice((1, 2, 2, 3, 3, 4)), "p2": chance.choice((1, 1, 2, 3))},
        "sequence_parallel": chance.random() < 0.4,
        "recompute": chance.choice((again, {"kind": again, "layers": chance.choice((0, 1, 2))})),
    }


def _batches(chance: random.Random, dp: int | list[int]) -> Values:
    """Micro-batches of 1 to 9 sequences, a few of them; mostly no multiple of dp."""
    micro, count = chance.randint(1, 9), chance.choice((1, 2, 3, 4, 5))
    each = -(-micro // (dp if isinstance(dp, int) else dp[0]))
    return {"global_batch_size": micro * count, "micro_batch_size": chance.choice((each, each, 0))}


def plan_of(job: Job) -> Plan:
    """As ``plait train`` plans it, every rank on a host of its own. Raises JobError or ScheduleError."""
    return make_plan(job, Cluster(ranks_per_host=1, rate=1e9), vocab=1)


def measured(chance: random.Random, job: Job, spec: ModelSpec) -> SegmentCosts:
    """Costs as a noisy machine would measure them, with communication about as long as computation."""
    shapes = segment_costs(spec, job.base_strategy, batch=job.micro_batch, sequence=job.data.sequence_length)

    def noisy(table: dict[str, float], total: float) -> dict[str, float]:
        found = {key: seconds * chance.lognormvariate(0.0, 0.7) for key, seconds in table.items()}
        scale = total / (sum(found.values()) or 1.0)
        return {key: seconds * scale for key, seconds in found.items()}

    return SegmentCosts(noisy(shapes.compute, 1e-3), noisy(shapes.collective, 1e-3 * chance.uniform(0.3, 2.0)), 1e-7)
