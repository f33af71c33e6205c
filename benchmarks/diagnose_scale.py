"""How long ``plait diagnose`` takes over a recording of 12,288 ranks, and how much memory; prints JSON.

    python benchmarks/diagnose_scale.py [--json] [--steps 100] [--replicas 192] [--slow 0.1] [--save FILE]

The run is made up, with the shape of the largest one in MegaScale's table (tp 8, pp 8, dp 192; arXiv
2402.15627): for each host a roll-up of all steps of its ranks, with its totals, and for each rank the spans
of sharding's collectives, in parts of 50 steps, as Parquet files in a run's folder (27,648 of them). Work
varies by 1 % from step to step and by 0.3 % from rank to rank; one rank is slower from step 40 on, or in the
last 20 steps of shorter runs. Its pipeline's ranks arrive late at their collectives, as they would. The
diagnosis is a process of its own, from its start to its end; its memory is the largest that the kernel saw.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from keeping import finish, make_parser, tell

from plait.core.cluster.hardware import Hosts
from plait.core.job.plan import Plan
from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import Layout
from plait.core.parallel.strategy import Strategy
from plait.core.record.columns import Coded
from plait.core.record.rollup import COLUMNS, FOLDER, RollupSource, rollup_file, write_rollup
from plait.core.step.schedules import Shape, generate
from plait.core.step.step import Step, Workload
from plait.plan.make import assemble_plan

TP, PP, HOST = 8, 8, 8
BLOCK = 50
"""Steps in a file."""
FROM, SOON = 40, 20
"""The step from which on a rank is slow, and in how many steps at most it is to be found."""
OPS = (("attn", "forward", 0.55), ("mlp", "forward", 0.62), ("attn", "backward", 1.1), ("mlp", "backward", 1.25))
"""Seconds of a step that are computed, by op."""
WAITS = (("wait", "attn", 0.4), ("idle", "transfer", 0.6), ("wait", "mlp", 0.3))
"""Seconds of a step in which a rank waits, by kind and site."""
GATHER, REDUCE = 0.05, 0.08


def planned(replicas: int) -> Plan:
    """A plan for all ranks."""
    model = ModelSpec(family="gpt", num_layers=96, hidden=12288, num_heads=96, vocab=51200, max_sequence=2048)
    micro_batches = 16
    workload = Workload(micro_batch=replicas, num_micro_batches=micro_batches, sequence=2048, precision="bf16-mixed")
    layout = Layout.of(pp=PP, dp=replicas, tp=TP)
    schedule = generate("1f1b", Shape(ranks=PP, micro_batches=micro_batches))
    step = Step.of(model, workload, Strategy(), layout, schedule)
    return assemble_plan(step, Hosts(ranks_per_host=HOST, rate=25e9))


def write_run(folder: Path, replicas: int, steps: int, slow: float, *, apart: bool = False) -> tuple[int, int]:
    """A run's folder; the slow rank, and bytes written. apart: roll-ups as earlier versions wrote them, a
    file for each rank and no totals."""
    plan = planned(replicas)
    plan.write(folder / "plan.json")
    world = plan.layout.world_size
    culprit = world // 3
    rng = np.random.default_rng(7)
    numbers = np.arange(steps)
    pace = (1 + 0.003 * rng.standard_normal((world, 1))) * (1 + 0.01 * rng.standard_normal((world, steps)))
    pace[culprit, max(0, min(FROM, steps - SOON)) :] *= 1 + slow
    late = np.clip((pace[culprit] - 1) * sum(one[2] for one in OPS), 0, None)
    timeline = folder / "timeline"
    (timeline / FOLDER / "block=0").mkdir(parents=True)
    stamp = {"plait.plan": plan.key}
    sums: list[pl.DataFrame] = []
    for rank in range(world):
        waits = rank % (replicas * TP) // TP == culprit % (replicas * TP) // TP
        spans = _collectives(rank, numbers, pace[rank], late * waits, late)
        sums.append(_rollup(rank, numbers, pace[rank]))
        if apart:
            path = timeline / FOLDER / "block=0" / f"rank-{rank:05d}-step-00000000.parquet"
            sums.pop().write_parquet(path, metadata=stamp | {"plait.rollup.version": "1"})
        elif len(sums) == HOST or rank == world - 1:
            _write_host(timeline, sums, plan.key)
            sums = []
        for first in range(0, steps, BLOCK):
            last = min(first + BLOCK, steps)
            own = spans.filter(pl.col("step").is_between(first, last - 1))
            path = timeline / f"rank-{rank:05d}-step-{last:08d}.parquet"
            own.write_parquet(path, metadata=stamp | {"plait.timeline.version": "2"})
    return culprit, sum(path.stat().st_size for path in timeline.rglob("*.parquet"))


def _write_host(timeline: Path, sums: Sequence[pl.DataFrame], plan: str) -> None:
    """Roll-ups of the ranks of a host, as its agent writes them: one file, and one of totals."""
    table = pl.concat(sums)
    columns: dict[str, Any] = {name: _column(table[name]) for name in COLUMNS}
    ranks, first = table["rank"].unique().sort().to_list(), int(columns["step"].min())
    source = RollupSource(plan=plan, began=0, rings={rank: (1, int(columns["step"].max())) for rank in ranks})
    write_rollup(rollup_file(timeline, range(ranks[0], ranks[-1] + 1), first), columns, source)


def _column(values: pl.Series) -> np.ndarray | Coded:
    if values.dtype != pl.String:
        return values.to_numpy()
    texts = values.unique().sort().to_list()
    return Coded(texts, values.cast(pl.Enum(texts)).to_physical().to_numpy().astype(np.int32))


def _rollup(rank: int, steps: np.ndarray, pace: np.ndarray) -> pl.DataFrame:
    """A rank's, of all its steps."""
    rows = [("compute", site, way, seconds * pace) for site, way, seconds in OPS]
    rows += [(kind, site, "forward", seconds * (2 - pace)) for kind, site, seconds in WAITS]
    sums = np.concatenate([np.round(seconds * 1e9).astype(np.int64) for *_, seconds in rows])
    texts = {name: [row[n] for row in rows for _ in steps] for n, name in enumerate(("kind", "site", "direction"))}
    return pl.DataFrame({
        "step": np.tile(steps, len(rows)), "rank": np.full(len(sums), rank), **texts,
        "n": np.full(len(sums), 192), "sum_ns": sums, "min_ns": sums // 250, "max_ns": sums // 150,
    })  # fmt: skip


def _collectives(rank: int, steps: np.ndarray, pace: np.ndarray, arrival: np.ndarray, late: np.ndarray) -> pl.DataFrame:
    """One gather and one reduction a step, whose members end together."""
    begin = steps * 6.34
    reach = begin + 5.0 + 0.02 * (pace - 1) + arrival
    starts = begin + 0.001 * (pace - 1), reach
    ends = begin + GATHER, begin + 5.0 + late + REDUCE
    many = len(steps)
    return pl.DataFrame({
        "step": np.tile(steps, 2), "rank": np.full(2 * many, rank), "kind": ["comm"] * 2 * many,
        "name": ["gather mlp0"] * many + ["reduce mlp0"] * many, "seq": np.zeros(2 * many, np.int64),
        "site": ["mlp"] * 2 * many, "layer": np.zeros(2 * many, np.int64), "slice": np.zeros(2 * many, np.int64),
        "direction": ["forward"] * many + ["backward"] * many,
        "start_ns": np.round(np.concatenate(starts) * 1e9).astype(np.int64),
        "end_ns": np.round(np.maximum(np.concatenate(starts), np.concatenate(ends)) * 1e9).astype(np.int64),
        "bytes": np.full(2 * many, 1 << 28),
    })  # fmt: skip


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
        "next_z": round(report["nearest"]["z"], 2),
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
        start = time.perf_counter()
        culprit, size = write_run(folder, args.replicas, args.steps, args.slow)
        made = {"made_in": round(time.perf_counter() - start, 1), "mib": round(size / 2**20), "slow_rank": culprit}
        found = made | {"steps": args.steps, "slow": args.slow} | measured(folder)
    tell(found, args)
    right = found["named"] == ([[culprit]] if args.slow else [])
    return 0 if right else 1


if __name__ == "__main__":
    finish(main)
