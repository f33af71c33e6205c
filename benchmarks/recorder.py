"""What the recorder costs: the same job's steps, recorded and not, in turns within one run.

Each round runs both, in alternating order, over the same weights, wires and threads; a figure is the median
of the rounds' own differences, its spread half their interquartile range; *least* compares the quickest of
both. Recording includes reading the step's records back and the metrics made of them; what the journal's
thread takes to write files is said apart, as processor time. Wall time on a machine that others use is noisy;
processor time, over all threads and ranks, is less so. *alone*: what as many records take in a loop that does
nothing else.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keeping import HERE, LONGEST, finish, keep, make_parser

from plait.core.text import table
from plait.launch.local import local_start, run_ranks

MODEL = {"family": "gpt", "num_layers": 4, "hidden": 256, "num_heads": 4, "vocab": 256, "max_sequence": 256}
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
    parser = make_parser(__doc__, rounds=40, quick=4, cases=JOBS)
    options = parser.parse_args()
    found = {name: measured(JOBS[name], options.rounds) for name in options.case or JOBS}
    costs = ("wall", "spread", "least", "processor", "spread", "least", "alone", "writing")
    header = ("job", "ms a step", *costs, "records", "disk, bytes a step")
    print("\n".join(table(header, [(name, *_row(one)) for name, one in found.items()], None)))
    keep({"bound": BOUND, "jobs": found}, options)
    return int(any(one["processor"]["median"] > BOUND for one in found.values()))


def measured(strategy: dict[str, Any], rounds: int) -> dict[str, Any]:
    """One job's figures."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        argv = [sys.executable, "-W", "ignore", str(HERE / "recorder_ranks.py"), str(out), str(rounds)]
        argv.append(json.dumps(job(strategy)))
        run_ranks(local_start(argv, 2), 2, Path(folder) / "logs", timeout=LONGEST)
        result = json.loads(out.read_text())
    wall, cpu = result.pop("wall"), result.pop("cpu")
    step = statistics.median(off for _, off in wall)
    return {"step_seconds": step, "wall": overhead(wall), "processor": overhead(cpu), **result, "rounds": wall}


def overhead(pairs: Sequence[Sequence[float]]) -> dict[str, float]:
    """Median and spread of what recording adds, relative to the same round without. pairs: on, off."""
    found = [on / off - 1 for on, off in pairs]
    quarters = statistics.quantiles(found, n=4)
    least = min(on for on, _ in pairs) / min(off for _, off in pairs) - 1
    spread = (quarters[2] - quarters[0]) / 2
    return {"median": statistics.median(found), "spread": spread, "least": least, "of": len(found)}


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    figures = ("median", "spread", "least")
    shares = (f"{one[clock][what]:+.2%}" for clock in ("wall", "processor") for what in figures)
    disk = one["span_file_bytes_per_step"] + one["sums_file_bytes_per_step"]
    alone, writing = (one[f"{what}_seconds_per_step"] / one["step_seconds"] for what in ("alone", "writing"))
    costs = (*shares, f"{alone:.2%}", f"{writing:.2%}")
    return f"{one['step_seconds'] * 1e3:.0f}", *costs, str(one["records_per_step"]), f"{disk:.0f}"


if __name__ == "__main__":
    finish(main)
