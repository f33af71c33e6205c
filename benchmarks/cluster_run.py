"""A run that is disturbed, and the same undisturbed: what ``cluster_faults`` does on any cluster."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from plait.core.runs.lock import EXPIRES
from tests.support.managed import write_job

BOUND = 180.0
"""Seconds from a fault to the next new step, or from a stop to the end of all, at most, beside what it takes
itself."""
SETTLING = 6.0
"""Seconds until a fault is felt: a pod's grace, a limit."""
BEGINNING = 240.0
"""Seconds until a run that was started trains."""
STEPS = 1_000_000
IN_USE = "it gave a sign of life"
"""Of the message that refuses a run which another launcher has."""
HANDED_OVER = "submitted as"
REST = 0.1
"""Seconds that ranks rest after each step: a run that lasts an hour shall leave the processors to others."""
RESTING = f"""
import importlib.abc, importlib.util, sys, time

class Rests(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "plait.train.session":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            after = module.Session._after
            module.Session._after = lambda self, *said: (time.sleep({REST}), after(self, *said))[1]

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Rests())
"""


class Cluster(Protocol):
    """Where the run is. faults: by name, which a run outlives; each returns the seconds for which it holds
    the run up by itself. long: those of them that take minutes. stops: by name; each tells the run to end in
    another state. killing: those of them after which nobody can note how it ended. run: the one that is
    disturbed."""

    faults: Mapping[str, Callable[[], float]]
    long: Mapping[str, Callable[[], float]]
    stops: Mapping[str, Callable[[], None]]
    killing: Collection[str]
    run: Run

    def up(self) -> AbstractContextManager[None]:
        """The cluster, inside the block."""
        ...

    def command(self, job: Path) -> tuple[list[str], dict[str, str]]:
        """How to start the run, and its environment."""
        ...

    def after(self) -> None:
        """Mend what the fault has left."""
        ...

    def going(self) -> list[str]:
        """What still goes on of a run that was told to stop, in words."""
        ...

    def lost(self) -> list[str]:
        """What must never happen, and has."""
        ...


@dataclass
class Outcome:
    """Of a fault. step: that was done before. seconds: until a new one was, or until all had ended."""

    fault: str
    step: int
    seconds: float
    ok: bool = True
    problem: str = ""


@dataclass
class Run:
    """In ``folder``. more: options that it is started with from now on."""

    folder: Path
    cluster: Cluster
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    more: list[str] = field(default_factory=list[str])
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    @property
    def home(self) -> Path:
        return self.folder / "runs" / "job"

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self, *, trains: bool = True) -> None:
        """Begin, or go on with it; once it trains, or at once."""
        job, rest = write_job(self.folder, STEPS), self.folder / "rest"
        rest.mkdir(exist_ok=True)
        (rest / "sitecustomize.py").write_text(RESTING)
        argv, env = self.cluster.command(job)
        self.starts += 1
        env = env | {"PYTHONPATH": f"{rest}{os.pathsep}{env['PYTHONPATH']}"}
        argv, since = [*argv, *self.more], time.monotonic()
        while True:
            with open(self.folder / "output", "a") as output:
                self.process = subprocess.Popen(argv, cwd=self.folder, env=env, stdout=output, stderr=output,
                                                start_new_session=True)  # fmt: skip
            if self.passes(self.step() + 10, BEGINNING) if trains else not self._ended_at_once():
                break
            assert time.monotonic() - since < EXPIRES + 10 and IN_USE in self.output[-600:], self.output[-4000:]
            time.sleep(5.0)  # a launcher that was killed left its lock, which expires

    def _ended_at_once(self) -> bool:
        """Whether the command ends before it has handed the run over."""
        said = self.output.count(HANDED_OVER)
        while self.alive and self.output.count(HANDED_OVER) == said:
            time.sleep(0.1)
        return not self.alive

    def ends(self, seconds: float = BOUND) -> bool:
        """Whether the command that follows it ends in time."""
        assert self.process
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return False
        return True

    def stop(self) -> None:
        """By one signal."""
        if self.process and self.alive:
            self.process.send_signal(signal.SIGTERM)
            assert self.ends(), self.output[-4000:]

    def step(self) -> int:
        """The last that was written down."""
        return last_step(self.home)

    def losses(self) -> dict[int, float]:
        return losses(self.home)

    def passes(self, step: int, seconds: float) -> bool:
        """Whether it does a step beyond ``step`` in time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.alive:
            if self.step() > step:
                return True
            time.sleep(0.2)
        return False


def last_step(home: Path) -> int:
    """The last whose loss is written down; 0 if there is none."""
    try:
        return int(json.loads((home / "metrics.jsonl").read_bytes().rpartition(b"\n")[0].rpartition(b"\n")[2])["step"])
    except (OSError, ValueError):
        return 0


def losses(home: Path) -> dict[int, float]:
    """By step, of the run in that folder."""
    lines = (json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines())
    return {int(line["step"]): line["loss"] for line in lines}


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


def ranks(folder: str) -> dict[int, int]:
    """Processes of the run in ``folder``, by rank."""
    found = dict[int, int]()
    for pid in pids(lambda words: "plait.train.worker" in words and folder in words):
        try:
            env = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        found |= {int(one[5:]): pid for one in env if one.startswith(b"RANK=")}
    return found


def kill_rank(rank: int, folder: str) -> None:
    """A rank of the run in ``folder``."""
    if pid := ranks(folder).get(rank):
        os.kill(pid, signal.SIGKILL)


def disturbed(cluster: Cluster, run: Run, names: Sequence[str]) -> list[str]:
    """Faults and stops one after the other, until one is not outlived; then the run is stopped. Returns what
    must never happen, and has."""
    cluster.run = run
    for name in names:
        run.outcomes.append(_stopped(cluster, run, name) if name in cluster.stops else _outlived(cluster, run, name))
        last = run.outcomes[-1]
        print(f"{len(run.outcomes):>3} {'ok  ' if last.ok else 'LOST'} {last.seconds:>6.1f} s  {name} {last.problem}",
              flush=True)  # fmt: skip
        if not last.ok:
            break
        cluster.after()
    lost = cluster.lost()
    if run.process and run.alive:
        run.process.send_signal(signal.SIGTERM)
        run.ends()
    return lost


def _outlived(cluster: Cluster, run: Run, name: str) -> Outcome:
    """Whether a run goes on after a fault."""
    if not run.alive:
        run.start()
    before, since = run.step(), time.monotonic()
    allowed = BOUND + cluster.faults[name]()
    before = max(before, run.step())
    ok = run.passes(before + 1, allowed)
    time.sleep(SETTLING)  # what takes a while to be felt
    ok = ok and run.passes(run.step() + 12, allowed)  # a checkpoint, too
    return Outcome(name, before, round(time.monotonic() - since - SETTLING, 1), ok)


def _stopped(cluster: Cluster, run: Run, name: str) -> Outcome:
    """Whether a run ends when it is told to, all of it, and what it has done is saved."""
    problems = list[str]()
    try:
        cluster.stops[name]()
    except AssertionError as error:
        problems.append(str(error))
    since, before = time.monotonic(), run.step()
    problems += [] if run.ends() else ["the command that follows it goes on"]
    while (going := cluster.going()) and time.monotonic() - since < BOUND:
        time.sleep(0.5)
    ended = time.monotonic()
    time.sleep(SETTLING)  # it might come back
    problems += going or cluster.going()
    if run.process and run.process.returncode == 0:
        problems.append("its status is 0")
    return Outcome(name, before, round(ended - since, 1), not problems, "; ".join(problems))


def undisturbed(folder: Path, steps: int) -> dict[int, float]:
    """Losses of the same job on this machine, as far as that: of fewer steps the learning rate would be
    another. What was done in ``folder`` before is gone on with."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = folder / "runs" / "job"
        if last_step(run) < steps:
            argv = [sys.executable, "-m", "plait.cli.main", "train", str(write_job(folder, STEPS))]
            quiet, more = subprocess.DEVNULL, ["train.checkpoint_every=100000"]
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen([*argv, *more], cwd=folder, env=env, stdout=quiet, stderr=quiet,
                                       start_new_session=True)  # fmt: skip
            while process.poll() is None and last_step(run) < steps:
                time.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            process.wait(240)
        return losses(run)
