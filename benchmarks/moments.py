"""The loss with moments in bf16 beside moments in the type of master weights, over some hundred steps.

    python benchmarks/moments.py [--json] [--rounds 3] [--steps 400] [--optimizer adamw] [--save FILE]

One process trains a GPT of 0.9 million parameters on the sources of Python's library, ``rounds`` times with
another seed for each type of moments. Seeds decide initial weights; data and their order are the same. What
seeds alone do is the scale on which the difference stands.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from keeping import finish, keep, make_parser, timed
from rich.console import Console
from rich.table import Table

JOB = """
[model]
family = "gpt"
num_layers = 4
hidden = 128
num_heads = 4
[data]
sequence_length = 128
[train]
global_batch_size = 16
micro_batch_size = 16
learning_rate = 1e-3

eval_batches = 16
checkpoint_every = 0
log_every = 1000
[strategy]
slices = { batch = 1 }
"""
TYPES = ("master", "bf16")


def main() -> int:
    """Train them in turn; print a table, and with --json one last line for programs."""
    options = _options()
    losses = {one: [losses_of(options, one, seed) for seed in range(options.rounds)] for one in TYPES}
    point = work_out(losses) | {"steps": options.steps, "optimizer": options.optimizer}
    if not options.json:
        show(point)
    keep(point, options)
    return 0


def losses_of(options: argparse.Namespace, kind: str, seed: int) -> dict[str, float]:
    """Evaluation loss at the end, and mean training loss of the last tenth."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.toml"
        job.write_text(JOB)
        settings = {
            "run.folder": json.dumps(folder), "train.steps": options.steps, "train.eval_every": options.steps,
            "train.optimizer": json.dumps(options.optimizer), "train.optimizer_dtype": json.dumps(kind),
            "train.seed": seed, "train.warmup_steps": options.steps // 10,
        }  # fmt: skip
        timed(
            [
                sys.executable,
                "-m",
                "plait.cli.main",
                "train",
                str(job),
                *(f"{key}={value}" for key, value in settings.items()),
            ]
        )
        lines = [json.loads(line) for line in (Path(folder) / "job" / "metrics.jsonl").read_text().splitlines()]
    last = [line["loss"] for line in lines[-max(1, options.steps // 10) :]]
    return {"evaluation": lines[-1]["eval_loss"], "training": statistics.fmean(last)}


def work_out(losses: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Means over seeds, the mean and the largest difference within a seed, and how far seeds are apart."""
    found: dict[str, Any] = {"losses": losses}
    for name in ("evaluation", "training"):
        each = {kind: [one[name] for one in some] for kind, some in losses.items()}
        apart = [ours - theirs for theirs, ours in zip(*(each[kind] for kind in TYPES), strict=True)]
        found[name] = {
            **{kind: statistics.fmean(values) for kind, values in each.items()},
            "difference": statistics.fmean(apart),
            "largest": max(apart, key=abs),
            "between_seeds": max(each["master"]) - min(each["master"]),
        }
    return found


def show(point: dict[str, Any]) -> None:
    """One table for people."""
    table = Table(
        "loss", *TYPES, "difference", "largest of a seed", "between seeds",
        title=f"{point['optimizer']}, {point['steps']} steps, {len(point['losses']['master'])} seeds",
    )  # fmt: skip
    for name in ("evaluation", "training"):
        row = point[name]
        signed = [f"{row[key]:+.5f}" for key in ("difference", "largest")]
        table.add_row(name, *(f"{row[kind]:.4f}" for kind in TYPES), *signed, f"{row['between_seeds']:.4f}")
    Console(width=120).print(table)


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--optimizer", choices=("adamw", "muon", "sgd"), default="adamw")
    return parser.parse_args()


if __name__ == "__main__":
    finish(main)
