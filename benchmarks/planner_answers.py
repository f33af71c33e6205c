"""What the planner answers for jobs of many kinds, and whether it still does: for changes that are to make it
faster and nothing else.

    python benchmarks/planner_answers.py --save before.json
    python benchmarks/planner_answers.py --against before.json

Of every job the strategies that are shown, with predicted seconds and the bytes of the fullest rank; or why
there is none. Exit status 1 where anything differs by more than the last digits of a number.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from keeping import finish, keep, make_parser

from plait.core.base.errors import PlaitError
from plait.core.cluster.hardware import Cluster
from plait.core.job.spec import Job
from plait.plan.answer import Planner

CLOSE = 1e-12
"""Relative: sums in another order may differ by so much."""
Asked = tuple[str, str, int, int, int]
"""Preset, cluster, ranks, tokens of a sequence, sequences of a step."""
JOBS: tuple[Asked, ...] = (
    ("gpt3-125m", "v100", 1, 1024, 32), ("gpt3-350m", "a100-40", 4, 2048, 64), ("gpt3-760m", "v100", 8, 1024, 48),
    ("gpt3-1.3b", "a100-80", 8, 2048, 512), ("gpt3-2.7b", "a800", 16, 2048, 256), ("gpt3-6.7b", "v100", 64, 2048, 256),
    ("gpt3-13b", "a100-40", 64, 2048, 1024), ("gpt3-175b", "a100-80", 1024, 2048, 1024),
    ("gpt3-175b", "h100", 256, 2048, 1536), ("llama2-7b", "h100", 8, 4096, 256), ("llama2-7b", "h100", 64, 4096, 1024),
    ("llama2-7b", "a800", 1024, 4096, 1024), ("llama3-8b", "h100", 128, 8192, 128),
    ("llama2-13b", "a100-40", 64, 4096, 64), ("llama2-13b", "a100-80", 128, 4096, 256),
    ("llama2-70b", "h100", 256, 4096, 64), ("llama2-70b", "a100-80", 96, 4096, 480),
    ("llama3-8b", "h200", 16, 8192, 128), ("llama3-8b", "gb200", 72, 8192, 144),
    ("llama3-8b", "h100-96", 32, 8192, 64),
    ("llama3-70b", "h100", 512, 8192, 1024), ("llama3-70b", "gb200", 576, 8192, 1152),
    ("llama3-70b", "h200", 64, 8192, 64), ("llama3-405b", "h100", 1024, 8192, 512),
    ("llama3-405b", "gb200", 1152, 8192, 2304), ("llama3-405b", "h100", 64, 8192, 64),
    ("mixtral-8x7b", "h100", 32, 4096, 256), ("mixtral-8x22b", "h200", 128, 4096, 512),
    ("qwen3-30b-a3b", "h100", 64, 4096, 512), ("qwen3-235b-a22b", "gb200", 288, 4096, 1152),
    ("grok-1", "h100", 256, 8192, 512), ("utransformer-1b", "a100-80", 8, 2048, 64),
)  # fmt: skip
OPEN = dict.fromkeys(("pp", "dp", "cp", "tp"), "auto")
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {"train": {"precision": "fp32"}},
    "tp <= 4, memory <= 60 GiB": {"plan": {"constraints": ["tp <= 4", "memory <= 60 GiB"]}},
    "memory >= 70 GiB": {"plan": {"constraints": ["memory >= 70 GiB"]}},
    "full recomputation": {"strategy": OPEN | {"recompute": "full"}},
    "pp 4, tp 4": {"strategy": OPEN | {"pp": 4, "tp": 4}},
    "async": {"strategy": OPEN | {"overlap": "async"}},
    "zero3": {"strategy": OPEN | {"shard": "zero3"}},
}
"""Of one more job, of 70B on 128 ranks."""


def main() -> int:
    """Answer, and compare."""
    parser = make_parser(__doc__, rounds=1)
    parser.add_argument("--against", type=Path, help="what --save wrote before")
    parser.add_argument("--points", type=int, help="plan.points of all jobs: fewer, for a quick check")
    options = parser.parse_args()
    found = dict[str, Any]()
    for name, values in jobs().items():
        if options.points:
            values["plan"] = values.get("plan", {}) | {"points": options.points}
        begun = sum(os.times()[:4])
        found[name] = answered(values)
        if not options.json:
            print(f"{name:44} {sum(os.times()[:4]) - begun:6.2f} s {told(found[name])}", flush=True)
    keep({"answers": found}, options)
    if not options.against:
        return 0
    before = json.loads(options.against.read_text())["answers"]
    changed = [name for name in before if not same(before[name], found.get(name))]
    for name in changed:
        print(f"differs: {name}: {told(before[name])} before, {told(found.get(name))} now", file=sys.stderr)
    print(f"{len(before) - len(changed)} of {len(before)} answers are as before")
    return 1 if changed else 0


def jobs() -> dict[str, dict[str, Any]]:
    """By name."""
    found = {f"{preset} on {ranks} {where}, {tokens} x {batch}": job(preset, where, ranks, tokens, batch)
             for preset, where, ranks, tokens, batch in JOBS}  # fmt: skip
    for name, more in SETTINGS.items():
        values = job("llama2-70b", "h100", 128, 4096, 512)
        found[name] = values | {section: values.get(section, {}) | keys for section, keys in more.items()}
    return found


def job(preset: str, cluster: str, ranks: int, tokens: int, batch: int) -> dict[str, Any]:
    """As a job file has it."""
    return {
        "model": {"preset": preset},
        "data": {"sequence_length": tokens},
        "train": {"global_batch_size": batch, "precision": "bf16-mixed"},
        "cluster": {"preset": cluster, "ranks": ranks},
    }


def answered(values: dict[str, Any]) -> Any:
    """What is shown, or why nothing is."""
    try:
        asked = Job.from_dict(values)
        answer = Planner(asked, Cluster.preset(asked.cluster.preset), 256).answer()
    except PlaitError as error:
        return str(error)
    best = [{"point": dict(one.point), "seconds": one.seconds, "memory": one.most_memory} for one in answer.candidates]
    return {"searched": answer.searched, "why": list(answer.why), "best": best}


def told(answer: Any) -> str:
    """In a line."""
    if not isinstance(answer, dict):
        return str(answer)[:60]
    return f"{answer['searched']:,} strategies, {answer['best'][0]['seconds']:.4g} s"


def same(one: Any, other: Any) -> bool:
    """Whether values are equal, but for the last digits of numbers that are no whole ones."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=CLOSE)
    return bool(one == other)


if __name__ == "__main__":
    finish(main)
