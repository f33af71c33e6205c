"""How long planning takes, Python's start included, and how much memory: common jobs, and a space of a
million strategies for 16,384 GPUs, finalists' simulation included.

    python benchmarks/planner_speed.py [--json] [--save FILE]

Every case is a ``plait plan`` of its own; the best of ``--rounds`` counts, since others on the machine only
add. Processor seconds stand beside the clock's.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from keeping import finish, keep, make_parser, timed

JOB = """
[model]
preset = "{preset}"
[data]
sequence_length = {sequence}
[train]
global_batch_size = {batch}
precision = "bf16-mixed"
[cluster]
preset = "{cluster}"
ranks = {ranks}
[plan]
points = {points}
"""
COMMON: dict[str, Any] = {"sequence": 4096, "batch": 1024, "cluster": "h100", "points": 250_000}
CASES: dict[str, dict[str, Any]] = {
    "llama2-7b on 8": COMMON | {"preset": "llama2-7b", "ranks": 8, "batch": 256},
    "llama2-7b on 64": COMMON | {"preset": "llama2-7b", "ranks": 64},
    "llama3-70b on 512": COMMON | {"preset": "llama3-70b", "ranks": 512, "sequence": 8192},
    "gpt3-175b on 1024": COMMON | {"preset": "gpt3-175b", "ranks": 1024, "sequence": 2048, "cluster": "a100-80"},
    "a million for llama3-405b on 16384": COMMON
    | {"preset": "llama3-405b", "ranks": 16384, "sequence": 8192, "batch": 2048, "points": 1_600_000},
}


def main() -> int:
    """Measure every case."""
    options = make_parser(__doc__, rounds=3, quick=1, cases=CASES).parse_args()
    found = {name: measured(CASES[name], options.rounds) for name in options.case or CASES}
    for name, each in found.items():
        if not options.json:
            print(f"{name:36} {json.dumps(each)}")
    keep({"cases": found}, options)
    return 0


def measured(case: dict[str, Any], rounds: int) -> dict[str, Any]:
    """The fastest of several runs."""
    return min((once(case) for _ in range(rounds)), key=lambda each: each["seconds"])


def once(case: dict[str, Any]) -> dict[str, Any]:
    """Seconds, processor seconds, the largest resident size, and what was found."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job.toml")
        job.write_text(JOB.format(**case))
        argv = [sys.executable, "-m", "plait.cli.main", "plan", str(job), "--json"]
        ran = timed(["/usr/bin/env", "OMP_NUM_THREADS=1", *argv])
    answer = json.loads(ran.output)
    return {
        "seconds": round(ran.seconds, 2),
        "processor_seconds": round(ran.processor_seconds, 2),
        "largest_mib": ran.largest_mib,
        "strategies": answer["searched"],
        "step_seconds": answer["candidates"][0]["seconds"],
    }


if __name__ == "__main__":
    finish(main)
