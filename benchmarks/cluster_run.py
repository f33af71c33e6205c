"""A run that is disturbed, and the same undisturbed: what ``cluster_faults`` does on any cluster."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tests.support.managed import write_job

BOUND = 180.0
"""Seconds from a fault to the next new step, at most, beside what the fault itself takes."""
SETTLING = 6.0
"""Seconds until a fault is felt: a pod's grace, a limit."""
STEPS = 1_000_000


class Cluster(Protocol):
    """Where the run is. faults: by name; each returns the seconds for which it holds the run up by itself."""

    faults: Mapping[str, Callable[[], float]]

    def command(self, job: Path) -> tuple[list[str], dict[str, str]]:
        """How to start the run, and its environment."""
        ...

    def after(self) -> None:
        """Mend what the fault has left."""
        ...

    def lost(self) -> list[str]:
        """What must never happen, and has."""
        ...


@dataclass
class Outcome:
    """Of a fault. step: that was done before. seconds: until a new one was."""

    fault: str
    step: int
    seconds: float
    ok: bool = True


@dataclass
class Run:
    """In ``folder``."""

    folder: Path
    outcomes: list[Outcome] = field(default_factory=list[Outcome])

    @property
    def metrics(self) -> Path:
        return self.folder / "runs" / "job" / "metrics.jsonl"

    def step(self) -> int:
        """The last that was written down."""
        try:
            return int(json.loads(self.metrics.read_bytes().rstrip().rpartition(b"\n")[2])["step"])
        except (OSError, ValueError, KeyError):
            return 0

    def losses(self) -> dict[int, float]:
        lines = (json.loads(line) for line in self.metrics.read_text().splitlines())
        return {int(line["step"]): line["loss"] for line in lines}

    def passes(self, step: int, seconds: float, alive: Callable[[], bool]) -> bool:
        """Whether it does a step beyond ``step`` in time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and alive():
            if self.step() > step:
                return True
            time.sleep(0.2)
        return False


def pids(wanted: Callable[[str], bool]) -> list[int]:
    """Processes by their words."""
    found = list[int]()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if wanted(words):
            found.append(int(process.name))
    return found


def kill_rank(rank: int, folder: str) -> None:
    """A rank of the run in ``folder``."""
    for pid in pids(lambda words: "plait.train.worker" in words and folder in words):
        try:
            env = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"RANK={rank}".encode() in env:
            os.kill(pid, signal.SIGKILL)


def disturbed(cluster: Any, folder: Path, drawn: random.Random, faults: int) -> tuple[Run, int, str]:
    """The run, its exit status, and what it printed."""
    job, run = write_job(folder, STEPS), Run(folder)
    argv, env = cluster.command(job)
    with open(folder / "output", "w") as output:
        process = subprocess.Popen(argv, cwd=folder, env=env, stdout=output, stderr=output, start_new_session=True)
        names = list(cluster.faults)
        order = [*drawn.sample(names, len(names)), *drawn.choices(names, k=faults)][:faults]
        assert run.passes(10, 240, lambda: process.poll() is None), (folder / "output").read_text()
        for name in order:
            before, since = run.step(), time.monotonic()
            allowed = BOUND + cluster.faults[name]()
            before = max(before, run.step())
            ok = run.passes(before + 1, allowed, lambda: process.poll() is None)
            time.sleep(SETTLING)  # what takes a while to be felt
            ok = ok and run.passes(run.step() + 12, allowed, lambda: process.poll() is None)  # a checkpoint, too
            run.outcomes.append(Outcome(name, before, round(time.monotonic() - since - SETTLING, 1), ok))
            print(
                f"{len(run.outcomes):>3} {'ok  ' if ok else 'LOST'} {run.outcomes[-1].seconds:>6.1f} s  {name}",
                flush=True,
            )
            cluster.after()
            if not ok:
                break
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(240)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
    return run, status, (folder / "output").read_text()


def undisturbed(folder: Path, steps: int) -> Run:
    """The same job on this machine, as far as that: of fewer steps the learning rate would be another."""
    argv = [sys.executable, "-m", "plait.cli.main", "train", str(write_job(folder, STEPS))]
    run, quiet = Run(folder), subprocess.DEVNULL
    process = subprocess.Popen(argv, cwd=folder, stdout=quiet, stderr=quiet, start_new_session=True)
    while run.step() < steps and process.poll() is None:
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    process.wait(240)
    return run
