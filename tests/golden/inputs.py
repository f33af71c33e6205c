"""Inputs of the golden files: drawn once, kept in ``inputs.json.xz``, so that no later draw changes them."""

from __future__ import annotations

import random
from typing import Any

from tests.support.drawn import Chance, drawn_plan
from tests.support.recordings.planted import PLANTERS

Values = dict[str, Any]
DRAWN_JOBS, POINTS, PROBLEMS = 30, 2000, 20
MODELS = ("llama2-7b", "gpt3-13b", "llama3-70b", "mixtral-8x7b")
"""Presets that points are drawn for."""
CLUSTERS = ("a100-80", "h100")
QUESTIONS: tuple[Values, ...] = (
    {"model": "llama2-7b", "cluster": "h100", "ranks": 64, "sequence": 4096, "batch": 512},
    {"model": "llama3-8b", "cluster": "a100-80", "ranks": 16, "sequence": 8192, "batch": 64},
    {"model": "llama3-70b", "cluster": "h100", "ranks": 256, "sequence": 4096, "batch": 512},
    {"model": "gpt3-175b", "cluster": "a100-80", "ranks": 512, "sequence": 2048, "batch": 1536},
    {"model": "mixtral-8x7b", "cluster": "h100", "ranks": 64, "sequence": 4096, "batch": 256},
    {"model": "gpt3-1.3b", "cluster": "v100", "ranks": 8, "sequence": 2048, "batch": 64},
)
"""What the planner is asked."""
STANDSTILLS = tuple(PLANTERS)
"""Kinds of runs that stand still."""
SLOW = ("clean", "processor", "link", "late", "noisy", "host", "path", "drift", "uneven", "trace")
"""Kinds of recorded runs (``tests.golden.adapter``)."""


def drawn() -> Values:
    """All inputs, from fixed seeds."""
    return {
        "jobs": [*_drawn_jobs(), *_large_jobs()],
        "points": {f"{model} on {cluster}": _points(model, cluster) for model in MODELS for cluster in CLUSTERS},
        "questions": [dict(one) for one in QUESTIONS],
        "problems": _problems(),
        "recordings": {"standstills": list(STANDSTILLS), "slow": list(SLOW)},
    }


def _drawn_jobs() -> list[Values]:
    """Small jobs of every family, schedule, sharding and kind of context parallelism."""
    found = list[Values]()
    for seed in range(DRAWN_JOBS):
        values, _ = drawn_plan(Chance(f"golden {seed}"), 8, 24)
        found.append(values)
    return found


def _large_jobs() -> list[Values]:
    """Jobs of the sizes that people run, on a described cluster."""
    strategies: tuple[Values, ...] = (
        {"tp": 8, "slices": {"p1": 2, "p2": 2}},
        {"tp": 4, "dp": 2, "shard": "zero1", "sequence_parallel": True, "slices": {"p1": 2, "p2": 1}},
        {"tp": 2, "pp": 2, "dp": 2, "schedule": "interleaved", "virtual_stages": 2, "shard": "zero2"},
        {"tp": 1, "dp": 8, "shard": "fsdp", "recompute": "full"},
        {"tp": 2, "cp": 4, "cp_kind": "ulysses", "shard": "fsdp", "recompute": "selective"},
        {"tp": 2, "cp": 4, "cp_kind": "ring", "shard": {"params": 2, "grads": 4, "optim": 4}},
        {"tp": 1, "pp": 4, "dp": 2, "schedule": "zb-h1", "recompute": {"kind": "full", "layers": 2}},
        {"tp": 1, "pp": 4, "dp": 2, "schedule": "eager-1f1b", "stage_layers": [7, 9, 9, 7]},
        {"tp": [4, 2], "dp": [1, 2], "pp": 2, "schedule": "1f1b"},
        {"tp": 2, "pp": 2, "cp": 2, "cp_kind": "ring", "schedule": "zb-v", "shard": "zero1"},
    )
    return [
        {
            "model": {"preset": "llama2-7b"},
            "data": {"sequence_length": 4096},
            "train": {"global_batch_size": 32, "micro_batch_size": 2, "precision": "bf16-mixed"},
            "cluster": {"preset": "a100-80", "ranks": 8},
            "strategy": {"slices": {"p1": 1, "p2": 1}} | strategy,
        }
        for strategy in strategies
    ]


def _points(model: str, cluster: str) -> list[Values]:
    """Strategies as rows of numbers; rules may forbid some."""
    chance = random.Random(f"golden points {model} {cluster}")
    return [_point(chance, model) for _ in range(POINTS // (len(MODELS) * len(CLUSTERS)))]


def _point(chance: random.Random, model: str) -> Values:
    dp, cp = chance.choice((1, 2, 4, 8)), chance.choice((1, 1, 2, 4))
    replicas = dp * cp
    params = chance.choice([n for n in (1, 1, 2, 4, 8, 16) if replicas % n == 0])
    grads = chance.choice([n for n in (1, 2, 4, 8, 16, 32) if replicas % n == 0 and n % params == 0])
    optim = chance.choice([n for n in (1, 2, 4, 8, 16, 32) if replicas % n == 0 and n % grads == 0])
    pp, tp, micro = chance.choice((1, 1, 2, 4, 8)), chance.choice((1, 2, 4, 8)), chance.choice((1, 1, 2, 4))
    schedule = chance.choice(("1f1b", "gpipe", "eager-1f1b", "interleaved", "zb-h1"))
    return {
        "pp": pp, "dp": dp, "cp": cp, "tp": tp, "ring": chance.choice([n for n in (1, 2, 4) if cp % n == 0]),
        "ep": chance.choice([n for n in (1, 2, 4, 8) if replicas % n == 0]) if model.startswith("mixtral") else 1,
        "micro": micro, "num_micro": pp * chance.choice((1, 2, 4)),
        "schedule": schedule, "virtual": chance.choice((2, 4)) if schedule == "interleaved" else 1,
        "recompute": chance.choice(("none", "selective", "full")),
        "recompute_layers": chance.choice((-1, -1, 0, 1, 2)), "sequence_parallel": chance.choice((0, 1)) * (tp > 1),
        "params": params, "grads": grads, "optim": optim,
        "secondary": 2 if params > 2 and chance.random() < 0.2 else 0,
        "overlap": chance.choice(("sync", "async", "domino")), "shard_overlap": chance.choice(("none", "both")),
        "p1": chance.choice((1, 1, 2)) if micro > 1 else 1, "p2": chance.choice((1, 1, 2)),
    }  # fmt: skip


def _problems() -> list[Values]:
    """Placements: rows and columns of nodes, and what every minipod has free."""
    chance, found = random.Random("golden problems"), list[Values]()
    while len(found) < PROBLEMS:
        rows, columns, pods = chance.randint(2, 12), chance.randint(2, 8), chance.randint(2, 8)
        free = [chance.randint(1, max(2, 3 * rows * columns // pods)) for _ in range(pods)]
        if sum(free) >= rows * columns:
            found.append({"rows": rows, "columns": columns, "free": free, "alpha": chance.choice((0.0, 0.1, 0.3, 0.7))})
    return found
