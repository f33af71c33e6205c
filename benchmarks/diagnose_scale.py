"""How long ``plait diagnose`` takes over a recording of 12,288 ranks, and how much memory; prints JSON.

    python benchmarks/diagnose_scale.py [--json] [--steps 100] [--replicas 192] [--slow 0.1] [--save FILE]

The run is made up, with the shape of the largest one in MegaScale's table (tp 8, pp 8, dp 192; arXiv
2402.15627): for each host a roll-up of all its ranks' steps, and the spans of sharding's collectives, in
blocks of 50 steps, as Parquet files in a run's folder. Work varies by 1 % from step to step and by 0.3 % from
rank to rank; one rank is slower from step 40 on. Its pipeline's ranks arrive late at their collectives, as
they would. The diagnosis is a process of its own, from its start to its end; its memory is the largest that
the kernel saw.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from keeping import finish, keep, make_parser
from rich.console import Console
from rich.table import Table

from plait.core.cluster import Hosts
from plait.core.layout import Layout
from plait.core.model import ModelSpec
from plait.core.plan import Plan, Workload
from plait.core.schedules import Shape, generate
from plait.core.strategy import Strategy
from plait.plan.make import Design, assemble_plan

TP, PP, HOST = 8, 8, 8
BLOCK = 50
"""Steps in a file."""
FROM = 40
"""The step from which on a rank is slow."""
OPS = (("attn", "forward", 0.55), ("mlp", "forward", 0.62), ("attn", "backward", 1.1), ("mlp", "backward", 1.25))
"""Seconds of a step that are computed, by op."""
WAITS = (("wait", "tp", "attn", 0.4), ("idle", "pp", "transfer", 0.6), ("wait", "dp", "mlp", 0.3))
GATHER, REDUCE = 0.05, 0.08


def planned(replicas: int) -> Plan:
    """A plan for all ranks."""
    model = ModelSpec(family="gpt", num_layers=96, hidden=12288, num_heads=96, vocab=51200, max_sequence=2048)
    micro_batches = 16
    workload = Workload(micro_batch=replicas, num_micro_batches=micro_batches, sequence=2048, precision="bf16-mixed")
    layout = Layout.of(pp=PP, dp=replicas, tp=TP)
    schedule = generate("1f1b", Shape(ranks=PP, micro_batches=micro_batches))
    return assemble_plan(
        Design(model, workload, Strategy(tp=TP), layout), schedule, Hosts(ranks_per_host=HOST, rate=25e9)
    )


def write_run(folder: Path, replicas: int, steps: int, slow: float) -> tuple[int, int]:
    """A run's folder; the slow rank, and bytes written."""
    plan = planned(replicas)
    plan.write(folder / "plan.json")
    world = plan.layout.world_size
    culprit = world // 3
    rng = np.random.default_rng(7)
    ranks = np.arange(world)
    healthy = 1 + 0.003 * rng.standard_normal(world)
    metadata = {"plait.timeline.version": "1", "plait.plan": plan.hash}
    replica = ranks % (replicas * TP) // TP
    for first in range(0, steps, BLOCK):
        numbers = np.arange(first, min(first + BLOCK, steps))
        pace = healthy[:, None] * (1 + 0.01 * rng.standard_normal((world, len(numbers))))
        pace[culprit, numbers >= FROM] *= 1 + slow
        late = np.clip((pace[culprit] - 1) * sum(one[2] for one in OPS), 0, None)
        arrival = np.where((replica == replica[culprit])[:, None], late[None, :], 0.0)
        for host in range(world // HOST):
            own = slice(host * HOST, (host + 1) * HOST)
            where = folder / "timeline" / f"host-{host:05d}-step-{numbers[-1] + 1:08d}"
            _rollup(ranks[own], numbers, pace[own]).write_parquet(f"{where}.rollup.parquet", metadata=metadata)
            _collectives(ranks[own], numbers, pace[own], arrival[own], late).write_parquet(
                f"{where}.parquet", metadata=metadata
            )
    return culprit, sum(file.stat().st_size for file in (folder / "timeline").iterdir())


def _rollup(ranks: np.ndarray, steps: np.ndarray, pace: np.ndarray) -> pl.DataFrame:
    grid = {"step": np.tile(steps, len(ranks)), "rank": np.repeat(ranks, len(steps))}
    parts = [
        pl.DataFrame(grid).with_columns(
            kind=pl.lit("compute"), site=pl.lit(site), direction=pl.lit(direction), n=pl.lit(192),
            sum=pl.Series(seconds * pace.ravel()), axis=pl.lit(""),
        )
        for site, direction, seconds in OPS
    ]  # fmt: skip
    parts += [
        pl.DataFrame(grid).with_columns(
            kind=pl.lit(kind), site=pl.lit(site), direction=pl.lit("forward"), n=pl.lit(192),
            sum=pl.Series(seconds * (2 - pace.ravel())), axis=pl.lit(axis),
        )
        for kind, axis, site, seconds in WAITS
    ]  # fmt: skip
    whole = pl.concat(parts).with_columns(min=pl.col("sum") / 250, max=pl.col("sum") / 150)
    return whole.cast({"rank": pl.Int32, "n": pl.Int64})


def _collectives(
    ranks: np.ndarray, steps: np.ndarray, pace: np.ndarray, arrival: np.ndarray, late: np.ndarray
) -> pl.DataFrame:
    """One gather and one reduction a step, whose members end together."""
    begin = np.tile(steps * 6.34, (len(ranks), 1))
    reach = begin + 5.0 + 0.02 * (pace - 1) + arrival
    parts: list[pl.DataFrame] = []
    for name, direction, start, end in (
        ("gather mlp0", "forward", begin + 0.001 * (pace - 1), begin + GATHER),
        ("reduce mlp0", "backward", reach, begin + 5.0 + late[None, :] + REDUCE),
    ):
        parts.append(
            pl.DataFrame({"step": np.tile(steps, len(ranks)), "rank": np.repeat(ranks, len(steps)).astype(np.int32)})
            .with_columns(
                kind=pl.lit("comm"), name=pl.lit(name), seq=pl.lit(0, pl.Int64), site=pl.lit("mlp"),
                layer=pl.lit(0, pl.Int64), slice=pl.lit(0, pl.Int64), direction=pl.lit(direction),
                start=pl.Series(start.ravel()), end=pl.Series(np.maximum(end, start).ravel()),
                bytes=pl.lit(1 << 28, pl.Int64),
            )
        )  # fmt: skip
    return pl.concat(parts)


def measured(folder: Path) -> dict[str, Any]:
    """What the diagnosis found, its seconds, and its memory in GiB."""
    argv = [sys.executable, "-m", "plait.cli.main", "diagnose", str(folder), "--json"]
    start = time.perf_counter()
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(argv, stdout=out)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - start
        out.seek(0)
        report = json.loads(out.read())
    return {
        "seconds": round(seconds, 1),
        "processor_seconds": round(used.ru_utime + used.ru_stime, 1),
        "memory_gib": round(used.ru_maxrss / 2**20, 2),
        "exit": process.returncode,
        "named": [one["ranks"] for one in report["stragglers"]],
        "since": [one["since"] for one in report["stragglers"]],
        "next_z": round(report["healthiest"]["z"], 2),
        "ranks": report["ranks"],
    }


def main() -> int:
    """Make the run, diagnose it, say what it took."""
    parser = make_parser(__doc__, rounds=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--replicas", type=int, default=192, help="ranks = 64 x this")
    parser.add_argument("--slow", type=float, default=0.1, help="share by which one rank is slower; 0: none is")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "timeline").mkdir()
        start = time.perf_counter()
        culprit, size = write_run(folder, args.replicas, args.steps, args.slow)
        made = {"made_in": round(time.perf_counter() - start, 1), "mib": round(size / 2**20), "slow_rank": culprit}
        found = made | {"steps": args.steps, "slow": args.slow} | measured(folder)
    table = Table("what", "found")
    for key, value in found.items():
        table.add_row(key, str(value))
    if not args.json:
        Console().print(table)
    keep(found, args)
    right = found["named"] == ([[culprit]] if args.slow else [])
    return 0 if right else 1


if __name__ == "__main__":
    finish(main)
