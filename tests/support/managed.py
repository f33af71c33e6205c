"""A small run to hand over to a cluster manager, and what its folder shows of it."""

from __future__ import annotations

import json
from pathlib import Path

JOB = """
[model]
family = "gpt"
num_layers = 2
hidden = 32
num_heads = 2
max_sequence = 32

[data]
text = "text.txt"
sequence_length = 32

[train]
steps = {steps}
global_batch_size = 8
micro_batch_size = 2
checkpoint_every = 10
eval_every = 0
log_every = 5

[strategy]
dp = {dp}
pp = 2
slices = {{ batch = 1, columns = 1 }}

[run]
timeout = 60
"""


TINY = {
    "model": {"family": "gpt", "num_layers": 2, "hidden": 32, "num_heads": 2, "max_sequence": 32, "vocab": 16},
    "data": {"sequence_length": 32},
    "strategy": {"slices": {"batch": 1, "columns": 1}},
    "run": {"name": "job", "device": "cpu"},
}
"""A job of one rank, as a table."""


def write_job(folder: Path, steps: int, *, dp: int = 1) -> Path:
    """A job of 2 x dp ranks that saves every ten steps."""
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 400)
    (folder / "job.toml").write_text(JOB.format(steps=steps, dp=dp))
    return folder / "job.toml"


def saved_steps(folder: Path) -> list[int]:
    """Steps of the job's checkpoints, in order."""
    return sorted(int(path.name[5:]) for path in (folder / "runs" / "job" / "checkpoints").glob("step-????????"))


def stopped_after(folder: Path) -> int:
    """The step after which the job was stopped and saved, as its summary says, which it writes
    last."""
    return int(json.loads((folder / "runs" / "job" / "summary.json").read_text())["steps"])
