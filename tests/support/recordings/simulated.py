"""Simulated steps as recordings have them; ranks record the same keys
(``tests/dist/test_recording.py``)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import polars as pl

from plait.core.cluster.hardware import Cluster, Hosts
from plait.core.job.plan import Plan
from plait.core.job.spec import Job
from plait.diagnose.measured.compare import table_of
from plait.diagnose.measured.recording import grid_of, with_axes
from plait.diagnose.measured.tables import SPAN_COLUMNS
from plait.plan.make import make_plan
from plait.plan.search.simulate import simulate_plan
from tests.support.drawn import Chance, drawn_plan

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"dp": 2, "shard": "ddp"},
    "zero1": {"dp": 2, "shard": "zero1"},
    "zero2": {"dp": 2, "shard": "zero2"},
    "zero3": {"dp": 2, "shard": "zero3"},
    "hierarchical": {"dp": 4, "shard": {"params": 2, "grads": 2, "optim": 4}},
    "secondary": {"dp": 4, "shard": {"params": 4, "grads": 4, "optim": 4, "secondary": 2}},
    "nothing hidden": {"dp": 2, "shard": "fsdp", "overlap": {"tp": "sync", "shard": "none"}},
    "tp": {"tp": 2, "slices": {"batch": 2, "columns": 2}},
    "sequence parallel": {"tp": 2, "sequence_parallel": True},
    "ulysses": {"cp": 2, "dp": 2, "shard": "fsdp"},
    "ring": {"cp": 2, "cp_comm_type": "ring", "tp": 2, "shard": "zero1"},
    "pipeline, tied, zero1": {"pp": 2, "dp": 2, "shard": "zero1"},
    "zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "interleaved": {"pp": 2, "virtual_stages": 2, "schedule": "interleaved"},
    "unequal places": {"pp": 2, "dp": [2, 1], "tp": [1, 2]},
    "recomputation": {"pp": 2, "tp": 2, "recompute": "full"},
    "three axes": {"pp": 2, "tp": 2, "dp": 2, "shard": "zero1"},
}
"""Of GPT, whose head is tied to its embedding."""
DRAWN = 12
NAMES = [*STRATEGIES, *(f"drawn {number}" for number in range(DRAWN))]


@cache
def simulated(name: str) -> tuple[Plan, pl.DataFrame]:
    """A plan, and the spans of its first two steps."""
    if name in STRATEGIES:
        model = {"family": "gpt", "num_layers": 4, "hidden": 128, "num_heads": 8, "vocab": 96, "max_sequence": 256}
        values = {
            "model": model, "data": {"sequence_length": 256},
            "train": {"global_batch_size": 8, "micro_batch_size": 2},
            "strategy": {"slices": {}, "schedule": "1f1b"} | STRATEGIES[name],
        }  # fmt: skip
        job = Job.from_dict(values)
        plan = make_plan(job, Hosts(ranks_per_host=job.world_size, rate=1e9), vocab=96)
    else:
        plan = drawn_plan(Chance(int(name.split()[1])), 4, 4)[1]
    timeline = simulate_plan(plan, Cluster.preset("a100-80")).timeline((0, 1))
    pp_rank_of = {op.stage: pp_rank for pp_rank, ops in enumerate(plan.schedule.ranks) for op in ops}
    return plan, with_axes(table_of(timeline), grid_of(plan.layout), plan.shardings, pp_rank_of)


def write_simulated(folder: Path, name: str) -> Path:
    """A run's folder with the plan and the spans."""
    made, spans = simulated(name)
    made.write(folder / "plan.json")
    plan = Plan.read(folder / "plan.json")
    (folder / "timeline").mkdir(parents=True)
    for (rank,), own in spans.select(SPAN_COLUMNS).cast({"rank": pl.Int64}).group_by("rank"):
        own.write_parquet(
            folder / "timeline" / f"rank-{int(str(rank)):05d}-step-00000002.parquet",
            metadata={"plait.timeline.version": "1", "plait.plan": plan.key},
        )
    return folder
