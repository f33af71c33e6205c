"""Runs on a lab to which something happens, and what is found out about it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from plait.api.ranks import RankSet, hang_detection_of
from plait.core.base.errors import RankFailure
from plait.core.record.ring import read_ring
from plait.core.runs.evidence import FILE, FIRST, Verdict, read_hang, ring_path
from plait.lab import Lab, LabSpec
from plait.launch.local.local import run_ranks
from plait.launch.watch import RunGuard

ROOT = Path(__file__).parents[2]
DEADLINE = 4.0
ALLOWED = 5.0
"""Seconds beyond the deadline in which the culprit is to be named."""
JOB = """
[model]
family = "gpt"
num_layers = 2
hidden = 32
num_heads = 4
[data]
text = "text"
sequence_length = 16
[train]
steps = {steps}
global_batch_size = 12
micro_batch_size = 1
learning_rate = 1e-2
eval_every = 0
checkpoint_every = 0
[strategy]
slices = {{ batch = 1, columns = 1 }}
{strategy}
[run]
hang_deadline = {deadline}
timeout = 60
"""


@dataclass(frozen=True)
class Shape:
    """A lab and what runs on it. strategy: as in a job file."""

    hosts: int
    ranks: int
    strategy: str

    @property
    def spec(self) -> LabSpec:
        return LabSpec.parse(f"{self.hosts}x{self.ranks}@200mbit")

    def ranks_of(self, host: int) -> set[int]:
        return set(range(host * self.ranks, (host + 1) * self.ranks))


SHAPES = {
    "dp2-tp2": Shape(2, 2, "dp = 2\ntp = 2"),
    "pp2-dp2": Shape(2, 2, "pp = 2\ndp = 2"),
    "dp2": Shape(2, 1, "dp = 2"),
    "dp3": Shape(3, 1, "dp = 3"),
    "pp2-tp2": Shape(4, 1, "pp = 2\ntp = 2"),
    "dp4": Shape(4, 1, "dp = 4"),
}
MIXED = Shape(4, 2, "pp = 2\ndp = 2\ntp = 2")


@dataclass(frozen=True)
class Outcome:
    """error: what the user reads; None if the run ended well. seconds: from the fault until
    then."""

    error: str | None
    verdict: Verdict | None
    seconds: float
    status: int | None


def plan(folder: Path, shape: Shape, *, steps: int = 100_000, settings: Sequence[str] = ()) -> Path:
    """A run's folder, ready for ranks. settings: as on the command line."""
    text = folder / "text"
    text.mkdir(parents=True)
    (text / "a.txt").write_text("".join(f"line {i} says {i * i % 97}\n" for i in range(3000)))
    job = folder / "job.toml"
    job.write_text(JOB.format(steps=steps, strategy=shape.strategy, deadline=DEADLINE))
    done = subprocess.run(
        [sys.executable, "-m", "plait.cli.main", "train", "--plan-only", "job.toml", f"run.folder={folder}/runs",
         *settings],
        cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "job"


@contextmanager
def environment(**values: str) -> Generator[None]:
    """Variables that ranks inherit."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def run(folder: Path, shape: Shape, *, fault: str = "",
        harm: Callable[[Lab], object] | None = None, after: int = 5, steps: int = 100_000) -> Outcome:  # fmt: skip
    """Train until something happens. fault: what happens to a rank (``tests.faults.faulty``). harm:
    what happens to the network, once ``after`` steps are done."""
    where = plan(folder, shape, steps=steps)
    ranks = RankSet(
        module="tests.faults.faulty", arguments=[str(where)], world=shape.spec.world_size, logs=where / "logs",
        timeout=60, folder=where, deadline=DEADLINE,
        first_deadline=FIRST * DEADLINE,
    )  # fmt: skip
    error: str | None = None
    status: int | None = None
    with (
        environment(PYTHONPATH=str(ROOT), **({"FAULT": fault} if fault else {})),
        Lab(shape.spec, command=ranks.argv) as lab,
    ):
        if harm:
            threading.Thread(target=_later, args=(where, after, partial(harm, lab)), daemon=True).start()
        try:
            status = run_ranks(
                partial(lab.popen, argv=ranks.argv),
                ranks.world,
                ranks.logs,
                guard=RunGuard(suspicion=hang_detection_of(ranks)),
                timeout=60,
            )
        except RankFailure as failure:
            error = str(failure)
        ended = time.time()
    began = float((where / "fault").read_text()) if (where / "fault").exists() else ended
    found = read_hang(where / FILE)[0] if (where / FILE).exists() else None
    return Outcome(error, found, ended - began, status)


def rank_process(folder: Path, rank: int) -> int:
    """The process of a rank of the run in a folder, by its ring."""
    return read_ring(ring_path(folder / "runs" / "job", rank)).header.pid


def _later(where: Path, steps: int, harm: Callable[[], object]) -> None:
    until(where, steps)
    (where / "fault").write_text(str(time.time()))
    harm()


def until(where: Path, steps: int) -> None:
    """Wait for so many steps of a run."""
    metrics = where / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < steps:
        time.sleep(0.05)
