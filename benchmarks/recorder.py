"""What the recorder costs: the same job's steps, recorded and not, in turns within one run.

Each round runs both, in alternating order, over the same weights, wires and threads; a figure is the median
of the rounds' own differences, its error 1.57 interquartile ranges over the root of their number (about 95 %,
McGill, Tukey and Larsen 1978); *least* compares the quickest of both. Processor time is that of both ranks,
with all their threads, and of the agent that collects their records beside them, which a host of a cluster
runs once for all of its ranks. Wall time on a machine that others use is noisy, processor time less so.
*alone*: what as many records take in a loop that does nothing else; *agent*: its share of the processor time.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keeping import HERE, LONGEST, finish, keep, make_parser

from plait.core.cluster import Hosts
from plait.core.collecting import MODULE
from plait.core.job import Job
from plait.core.text import table
from plait.launch.local import local_start, run_ranks
from plait.launch.run_folder import write_run
from plait.plan.make import make_plan

MODEL = {"family": "gpt", "num_layers": 4, "hidden": 256, "num_heads": 4, "vocab": 256, "max_sequence": 256}
VOCAB = 256
JOBS: dict[str, dict[str, Any]] = {
    "tp 2, domino": {"tp": 2, "slices": {"p1": 2}},
    "dp 2, fsdp": {"dp": 2, "shard": "fsdp"},
    "pp 2, eager-1f1b": {"pp": 2},
}
BOUND = 0.005
"""Of a step's time, that recording may take."""


def job(strategy: dict[str, Any]) -> dict[str, Any]:
    """Eight sequences of 256 tokens a step."""
    micro = 2 if "pp" in strategy else 4
    return {
        "model": MODEL,
        "data": {"sequence_length": 256},
        "train": {"global_batch_size": 8, "micro_batch_size": micro},
        "strategy": strategy,
    }


def main() -> int:
    """Measure every job; the exit status is 1 where recording costs more than it may."""
    parser = make_parser(__doc__, rounds=100, quick=4, cases=JOBS)
    options = parser.parse_args()
    idle = _agent_alone()
    found = {name: measured(JOBS[name], options.rounds, idle) for name in options.case or JOBS}
    header = ("job", "ms a step", "wall", "error", "least", "processor", "error", "least", "alone", "agent", "records",
              "disk, bytes a step")  # fmt: skip
    print("\n".join(table(header, [(name, *_row(one)) for name, one in found.items()], None)))
    keep({"bound": BOUND, "jobs": found}, options)
    return int(any(one["processor"]["median"] > BOUND for one in found.values()))


def measured(strategy: dict[str, Any], rounds: int, idle: float) -> dict[str, Any]:
    """One job's figures. idle: processor seconds of an agent that has nothing to do."""
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name) / "run", Path(name) / "times.json"
        write_run(make_plan(Job.from_dict(job(strategy)), Hosts(ranks_per_host=1, rate=1e9), vocab=VOCAB), folder)
        argv = [sys.executable, "-W", "ignore", str(HERE / "recorder_ranks.py"), str(out), str(rounds), str(folder)]
        agent = _start_agent(folder)
        try:
            run_ranks(local_start(argv, 2), 2, Path(name) / "logs", timeout=LONGEST)
        finally:
            spent = _end_agent(agent)
        result = json.loads(out.read_text())
        disk = sum(path.stat().st_size for path in (folder / "timeline").rglob("*.parquet"))
    steps = result["steps"]
    agent_step = max(0.0, spent - idle) / steps
    wall, cpu = result.pop("wall"), [(on + agent_step, off) for on, off in result.pop("cpu")]
    step, processor = (statistics.median(off for _, off in pairs) for pairs in (wall, cpu))
    return {
        "step_seconds": step, "processor_seconds": processor, "wall": overhead(wall), "processor": overhead(cpu),
        "agent": agent_step / processor, "file_bytes_per_step": disk / steps, **result, "rounds": wall,
        "processor_rounds": cpu,
    }  # fmt: skip


def overhead(pairs: Sequence[Sequence[float]]) -> dict[str, float]:
    """Median of what recording adds, relative to the same round without, and its error. pairs: on, off."""
    found = [on / off - 1 for on, off in pairs]
    quarters = statistics.quantiles(found, n=4)
    least = min(on for on, _ in pairs) / min(off for _, off in pairs) - 1
    error = 1.57 * (quarters[2] - quarters[0]) / math.sqrt(len(found))
    return {"median": statistics.median(found), "error": error, "least": least, "of": len(found)}


def _start_agent(folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", MODULE, str(folder), "0", "2"], stdin=subprocess.PIPE)


def _end_agent(agent: subprocess.Popen[bytes]) -> float:
    """Processor seconds that it has spent in all."""
    assert agent.stdin is not None
    agent.stdin.close()
    _, status, used = os.wait4(agent.pid, 0)
    agent.returncode = os.waitstatus_to_exitcode(status)
    return used.ru_utime + used.ru_stime


def _agent_alone() -> float:
    """Processor seconds that one spends which finds nothing: it starts, and imports what writing needs."""
    with tempfile.TemporaryDirectory() as name:
        write_run(make_plan(Job.from_dict(job({})), Hosts(ranks_per_host=1, rate=1e9), vocab=VOCAB), Path(name))
        agent = _start_agent(Path(name))
        time.sleep(3)
        return _end_agent(agent)


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    shares = (f"{one[clock][what]:+.2%}" for clock in ("wall", "processor") for what in ("median", "error", "least"))
    alone = one["alone_seconds_per_step"] / one["step_seconds"]
    costs = (*shares, f"{alone:.2%}", f"{one['agent']:.2%}")
    return (
        f"{one['step_seconds'] * 1e3:.0f}", *costs, str(one["records_per_step"]), f"{one['file_bytes_per_step']:.0f}"
    )  # fmt: skip


if __name__ == "__main__":
    finish(main)
