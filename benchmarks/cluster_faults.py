"""A run under faults of its cluster, one after the other: does it go on each time, soon, and with the same
numbers.

    python -m benchmarks.cluster_faults kubernetes --faults 40 --seed 1
    python -m benchmarks.cluster_faults slurm --faults 40 --seed 1

One run of two ranks trains throughout. A fault is drawn, then the run must do a new step within ``BOUND``
seconds; in the end it is stopped, and its losses are compared with those of a run on one machine that nobody
disturbed, bit for bit. Clusters are those of the tests: Slurm's own daemons, or an emulated API server whose
pods are processes. Timers are shortened: a node is held to be lost after seconds, not minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from plait.core.runs.attempts import read_attempts
from tests.support.managed import write_job

BOUND = 180.0
"""Seconds from a fault to the next new step, at most, beside what the fault itself takes."""
SETTLING = 6.0
"""Seconds until a fault is felt: a pod's grace, a limit."""
STEPS = 1_000_000
RESULTS = Path(__file__).parent / "results"


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


# ---- Kubernetes ----


class Pods:
    """Four nodes of an emulated cluster."""

    def __init__(self, folder: Path, drawn: random.Random, jobset: bool) -> None:
        from tests.support.kubernetes.server import Fault

        self.folder, self.drawn, self._fault = folder, drawn, Fault
        self.jobset = jobset
        self.faults = {
            "power of a node": lambda: self._lose(power=True, first=False),
            "power of the first pod's node": lambda: self._lose(power=True, first=True),
            "network of a node, which comes back": lambda: self._lose(power=False, first=False),
            "network of the first pod's node": lambda: self._lose(power=False, first=True),
            "a node is drained": self._drain,
            "a node's object is deleted": self._remove,
            "a rank is killed": self._kill_rank,
            "a container is killed": self._kill_container,
            "a pod is deleted": self._delete,
            "the API is away": lambda: self._outage(25.0),
            "the API is away while a node fails": self._outage_and_node,
            "watches end, and are too old": self._expired,
            "throttling": lambda: self._answers(429, 12),
            "conflicts": lambda: self._answers(409, 3),
        }
        self._mend: list[Callable[[], Any]] = []

    def command(self, job: Path) -> tuple[list[str], dict[str, str]]:
        from tests.support.kubernetes.runs import environment, options

        self.cluster.folder.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-m", "plait.cli.main", "train", str(job), *options(job.parent, max_restarts=8)]
        return [*argv, "--on", "kubernetes"], environment(self.cluster)

    @contextmanager
    def up(self) -> Iterator[None]:
        from tests.support.kubernetes.runs import small_cluster

        with small_cluster(self.folder / "cluster", 4, jobset=self.jobset) as self.cluster:
            yield

    def after(self) -> None:
        while self._mend:
            self._mend.pop()()

    def lost(self) -> list[str]:
        events = [(what, body["kind"]) for _, what, body in self.cluster.store.events]
        return ["the workload was deleted"] * (("DELETED", "JobSet" if self.jobset else "Job") in events)

    def _pod(self, *, first: bool) -> Any:
        pods = [pod for pod in self.cluster.pods() if pod["status"]["phase"] == "Running"
                and "deletionTimestamp" not in pod["metadata"]]  # fmt: skip
        key = "batch.kubernetes.io/job-completion-index"
        found = [pod for pod in pods if (pod["metadata"]["labels"][key] == "0") == first]
        return found[-1] if found else pods[-1]

    def _lose(self, *, power: bool, first: bool) -> float:
        node = self._pod(first=first)["spec"]["nodeName"]
        self.cluster.lose(node, power=power)
        self._mend.append(lambda: self.cluster.heal(node))
        return 0.0

    def _drain(self) -> float:
        node = self._pod(first=self.drawn.random() < 0.5)["spec"]["nodeName"]
        self.cluster.drain(node)

        def undrain() -> None:
            self.cluster.store.patch("Node", node, {"spec": {"unschedulable": False}})

        self._mend.append(undrain)
        return 0.0

    def _remove(self) -> float:
        node = self._pod(first=self.drawn.random() < 0.5)["spec"]["nodeName"]
        self.cluster.lose(node)
        self.cluster.remove(node)
        self._mend.append(lambda: (self.cluster.lost.pop(node, None), self.cluster.add(node)))
        return 0.0

    def _kill_rank(self) -> float:
        kill_rank(self.drawn.randrange(2), str(self.folder))
        return 0.0

    def _kill_container(self) -> float:
        uid = self._pod(first=self.drawn.random() < 0.5)["metadata"]["uid"]
        self.cluster._processes[uid].kill()
        return 0.0

    def _delete(self) -> float:
        pod = self._pod(first=self.drawn.random() < 0.5)
        self.cluster.delete("Pod", pod["metadata"]["name"], False, None)
        return 0.0

    def _outage(self, seconds: float) -> float:
        self.cluster.outage(seconds)
        return 0.0

    def _outage_and_node(self) -> float:
        self.cluster.outage(15.0)
        self._lose(power=True, first=False)
        return 75.0  # the server is asked again after a minute at most

    def _expired(self) -> float:
        self.cluster.store.compact()
        self.cluster.faults += [self._fault("WATCH", "Pod", 0), self._fault("WATCH", "Job", 0)]
        kill_rank(0, str(self.folder))
        return 0.0

    def _answers(self, status: int, times: int) -> float:
        for method in ("GET", "PATCH", "DELETE"):
            self.cluster.faults.append(self._fault(method, "/", status, times=times))
        return self._lose(power=True, first=False) + 30.0


# ---- Slurm ----


class Nodes:
    """Four nodes of Slurm's own."""

    def __init__(self, folder: Path, drawn: random.Random) -> None:
        self.folder, self.drawn = folder, drawn
        self.faults = {
            "power of a node": lambda: self._cut(first=False),
            "power of the first node": lambda: self._cut(first=True),
            "a node is set down": lambda: self._state("DOWN"),
            "a node is drained": lambda: self._state("DRAIN"),
            "slurmd is killed": self._slurmd,
            "the controller is away": lambda: self._away(20.0),
            "the controller is away while a rank dies": self._away_and_rank,
            "the time limit": self._limit,
            "requeued, as when preempted": self._requeue,
            "a rank is killed": self._kill_rank,
        }
        self._mend: list[Callable[[], Any]] = []

    @contextmanager
    def up(self) -> Iterator[None]:
        from tests.support.slurm import slurm_cluster

        with slurm_cluster(4) as self.cluster:
            yield

    def command(self, job: Path) -> tuple[list[str], dict[str, str]]:
        from tests.support.slurm import environment

        argv = [sys.executable, "-m", "plait.cli.main", "train", str(job), "slurm.nodes=2", "slurm.restarts=8"]
        return [*argv, "slurm.signal_time=30", "--on", "slurm"], environment(self.cluster)

    def after(self) -> None:
        while self._mend:
            self._mend.pop()()

    def lost(self) -> list[str]:
        return []

    def _ask(self, *argv: str) -> str:
        from tests.support.slurm import ask

        return ask(self.cluster, *argv)

    def _job(self) -> tuple[str, list[str]]:
        from plait.core.topology.hostlist import expand

        while not (told := self._ask("squeue", "-h", "-t", "R", "-o", "%A|%N").strip()):
            time.sleep(0.5)  # it is between two starts
        number, _, nodes = told.partition("|")
        return number, expand(nodes)

    def _cut(self, *, first: bool) -> float:
        self.cluster.cut(self._job()[1][0 if first else -1])
        self._mend.append(self.cluster.heal)
        return 0.0

    def _state(self, state: str) -> float:
        job, nodes = self._job()
        node = nodes[-1]
        self._ask("scontrol", "update", f"NodeName={node}", f"State={state}", "Reason=fault")
        self._mend.append(lambda: self._ask("scontrol", "update", f"NodeName={node}", "State=RESUME"))
        if state == "DRAIN":  # which a job that runs there outlives: it leaves at its next start
            self._ask("scontrol", "requeue", job)
        return 0.0

    def _slurmd(self) -> float:
        node = self._job()[1][-1]
        for pid in pids(lambda words: f"slurmd\0-D\0-N\0{node}\0" in words):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._mend.append(self.cluster.heal)
        return 10.0

    def _controller(self) -> list[int]:
        conf = str(self.cluster.folder / "slurm.conf")
        return pids(lambda words: "slurmctld\0" in words and conf in words)

    def _away(self, seconds: float) -> float:
        stopped = self._controller()
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        return 0.0

    def _away_and_rank(self) -> float:
        stopped = self._controller()
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        self._kill_rank()
        time.sleep(20.0)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        return 20.0

    def _limit(self) -> float:
        job, _ = self._job()
        told = dict(
            word.split("=", 1) for word in self._ask("scontrol", "-o", "show", "job", job).split() if "=" in word
        )
        hours, minutes, seconds = (int(part) for part in told["RunTime"].split("-")[-1].split(":"))
        limit = hours * 60 + minutes + (2 if seconds > 20 else 1)
        self._ask("scontrol", "update", f"JobId={job}", f"TimeLimit={limit}")
        self._mend.append(lambda: self._ask("scontrol", "update", f"JobId={job}", "TimeLimit=UNLIMITED"))
        until = time.monotonic() + 150
        while time.monotonic() < until and self._ask("squeue", "-h", "-t", "R", "-o", "%A"):
            time.sleep(0.5)
        self.after()
        return 60.0

    def _requeue(self) -> float:
        self._ask("scontrol", "requeue", self._job()[0])
        return 10.0

    def _kill_rank(self) -> float:
        kill_rank(self.drawn.randrange(2), str(self.folder))
        return 0.0


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


def main() -> int:
    """Print what became of each fault, and write the results."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("where", choices=["kubernetes", "slurm"])
    asked.add_argument("--faults", type=int, default=40)
    asked.add_argument("--seed", type=int, default=1)
    asked.add_argument("--jobset", action="store_true")
    asked.add_argument("--keep", default="")
    given = asked.parse_args()
    drawn, began = random.Random(given.seed), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as place:
        folder = Path(given.keep or place)
        (folder / "run").mkdir(parents=True)
        (folder / "reference").mkdir()
        made = (
            Pods(folder / "run", drawn, given.jobset) if given.where == "kubernetes" else Nodes(folder / "run", drawn)
        )
        with made.up():
            run, status, text = disturbed(made, folder / "run", drawn, given.faults)
            lost = made.lost()[: 0 if status in (130, 143) else 1]  # it is deleted when it is stopped
        losses = run.losses()
        same = undisturbed(folder / "reference", max(losses)).losses()
        attempts = read_attempts(folder / "run" / "runs" / "job")
        wrong = sorted(step for step, loss in losses.items() if same[step] != loss)
        missing = sorted(set(range(1, max(losses) + 1)) - set(losses))
    failed = [one for one in run.outcomes if not one.ok]
    worst = max(run.outcomes, key=lambda one: one.seconds)
    told = {
        "where": given.where, "jobset": given.jobset, "seed": given.seed, "faults": len(run.outcomes),
        "lost": [asdict(one) for one in failed], "status": status, "steps": max(losses),
        "losses_that_differ": len(wrong),
        "steps_missing": len(missing), "attempts": len(attempts), "never": lost,
        "outcomes": [asdict(one) for one in run.outcomes], "seconds": round(time.monotonic() - began),
    }  # fmt: skip
    print(
        f"{len(run.outcomes)} faults, {len(failed)} lost; slowest {worst.seconds:.0f} s ({worst.fault}); "
        f"{max(losses)} steps, {len(wrong)} losses differ, {len(missing)} are missing; {len(attempts)} attempts; "
        f"status {status} {lost}"
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"cluster_faults_{given.where}{'_jobset' * given.jobset}.json").write_text(
        json.dumps(told, indent=1) + "\n"
    )
    if failed:
        print(text[-4000:])
    return int(bool(failed or wrong or missing or lost))


if __name__ == "__main__":
    sys.exit(main())
