"""Algorithm 1 live: ``plait queue admit`` on a real Slurm against the replay of the same jobs.

An emulated cluster (Slurm's own daemons) of eight nodes keeps four for a planned
job. Twenty jobs come, eight of them preemptible, with priorities and predicted durations of which some
are wrong. ``plait queue admit`` is killed and started again, and so is Slurm's controller. When all has
ended, the replay gets the same jobs: when each was first seen, how long it ran, what was predicted. Every
start must be the replay's: on the same nodes, outside or in the zone, as often, within some seconds.

    python -m benchmarks.admission [--seed 1] [--minutes 5] [--save benchmarks/results/admission-2core.json]
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.keeping import finish, keep
from plait.core.base.errors import PlaitError
from plait.launch.slurm.queue import MINUTE
from plait.place.queue.admission import POLICIES
from plait.place.queue.replay import ReplayOutcome, ReplayRules, replay
from plait.place.queue.reservation import ClusterShape, Planned
from plait.place.queue.workload import JobTrace
from tests.support.slurm import SlurmCluster, SlurmSpec, down, up

NODES, ZONE = 8, ("n5", "n6", "n7", "n8")
NAME, PARTITION, RESERVATION = "admission", "gated", "lpj"
INTERVAL = 2
LATE = 15.0
"""Seconds by which a start may differ: what Slurm takes to end and start jobs moves those that wait for
them."""


@dataclass(frozen=True, kw_only=True)
class DrawnJob:
    """submit: seconds from the start; runs, predicted: seconds."""

    submit: float
    runs: int
    predicted: int
    nodes: int
    priority: int
    preemptible: bool


@dataclass(kw_only=True)
class Seen:
    """Of one job, in seconds since 1970. starts: (decided, where, nodes) of every start; ended: when its
    nodes were seen free; sent_back: how often it was."""

    first: float = 0.0
    starts: list[tuple[float, str, tuple[str, ...]]] = field(default_factory=list[tuple[float, str, tuple[str, ...]]])
    ended: float = 0.0
    sent_back: int = 0


def drawn(seed: int, arrival: float) -> list[DrawnJob]:
    """Twenty jobs, the last two after the arrival. Of five the prediction is too short."""
    chance = random.Random(seed)
    before = sorted(chance.uniform(0, arrival - 110) for _ in range(18))
    submits = [*before, arrival + 25.0, arrival + 35.0]
    flexible = set(chance.sample(range(20), 8))
    wrong = set(chance.sample(range(18), 5))
    found: list[DrawnJob] = []
    for at, submit in enumerate(submits):
        runs = chance.choice((20, 30, 45, 60, 90, 150))
        predicted = round(runs * (0.5 if at in wrong else chance.uniform(1.1, 1.6)))
        found.append(DrawnJob(
            submit=submit, runs=runs, predicted=predicted, nodes=chance.choice((1, 1, 2, 3)),
            priority=chance.choice((0, 0, 1, 5)), preemptible=at in flexible,
        ))  # fmt: skip
    return found


class Trial:
    """One cluster, its jobs, and admission with its accidents."""

    def __init__(self, cluster: SlurmCluster, jobs: Sequence[DrawnJob], arrival: float, log: Path) -> None:
        self.cluster, self.jobs, self.log = cluster, jobs, log
        self.environment = os.environ | cluster.variables
        self.begin = time.time()
        self.due = float(round(self.begin + arrival))
        self.names: list[str] = []
        self.admit: subprocess.Popen[bytes] | None = None
        self.accidents: list[str] = []

    def slurm(self, *argv: str) -> str:
        """What a command of Slurm's prints; asked again while the controller is away."""
        for _ in range(30):
            done = subprocess.run(argv, capture_output=True, text=True, check=False, env=self.environment, cwd="/tmp")
            if done.returncode == 0:
                return done.stdout
            time.sleep(1.0)
        raise PlaitError(f"{' '.join(argv)}: {done.stderr}")

    def prepare(self) -> None:
        """The partition that opts in, and the reservation."""
        conf = self.cluster.conf  # a partition that is made at run time dies with the controller
        partition = f"PartitionName={PARTITION} Nodes=ALL MaxTime=INFINITE State=UP\n"
        # On a busy machine nodes answer late; one that is thought lost sends its jobs back: no replay knows.
        conf.write_text(conf.read_text().replace("SlurmdTimeout=4", "SlurmdTimeout=300") + partition)
        self.slurm("scontrol", "reconfigure")
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(self.due))
        self.slurm(
            "scontrol", "create", "reservation", f"ReservationName={RESERVATION}", f"StartTime={when}", "Duration=60",
            f"Nodes={','.join(ZONE)}", "Users=root", "Flags=STATIC_ALLOC,IGNORE_JOBS",
        )  # fmt: skip

    def start_admit(self) -> None:
        """Admission, which writes what it does to the log."""
        argv = [sys.executable, "-W", "ignore", "-m", "plait.cli.main", "queue", "admit", f"partition={PARTITION}",
                f"reservation={RESERVATION}", f"interval={INTERVAL}s", "--json"]  # fmt: skip
        with self.log.open("ab") as log:
            self.admit = subprocess.Popen(argv, stdout=log, stderr=subprocess.DEVNULL, env=self.environment)

    def kill_admit(self) -> None:
        """As kill -9 does."""
        assert self.admit
        self.admit.kill()
        self.admit.wait()
        self.accidents.append(f"{time.time() - self.begin:.0f} s: plait queue admit killed")

    def kill_controller(self) -> None:
        """The keeper starts it again, from what it had written down."""
        pid = json.loads((self.cluster.folder / "pids.json").read_text())["slurmctld"]
        os.kill(pid, signal.SIGKILL)
        self.accidents.append(f"{time.time() - self.begin:.0f} s: slurmctld killed")

    def submit(self, job: DrawnJob) -> None:
        """Held, as docs/queue.md says."""
        words = f"jct={job.predicted}s,priority={job.priority}" + ",preemptible" * job.preemptible
        told = self.slurm("sbatch", "--parsable", "--hold", "--requeue", f"--partition={PARTITION}", f"-N{job.nodes}",
                          "--exclusive", f"--comment={words}", "--output=/dev/null",
                          f"--wrap=sleep {job.runs}")  # fmt: skip
        self.names.append(told.strip())

    def play(self) -> None:
        """All jobs, the planned one, the accidents."""
        arrival = self.due - self.begin
        plan = [(job.submit, lambda job=job: self.submit(job)) for job in self.jobs]
        plan += [
            (0.22 * arrival, self.kill_admit), (0.22 * arrival + 9, self.start_admit),
            (0.45 * arrival, self.kill_controller), (0.66 * arrival, self.kill_admit),
            (0.66 * arrival, self.kill_controller), (0.66 * arrival + 9, self.start_admit),
            (arrival, self.start_planned), (arrival + 15, self.kill_controller),
        ]  # fmt: skip
        self.start_admit()
        for when, act in sorted(plan, key=lambda one: one[0]):
            time.sleep(max(0.0, self.begin + when - time.time()))
            act()
        end = time.time() + 600
        while time.time() < end and self.slurm("squeue", "-h", "-p", PARTITION, "-o", "%A").split():
            time.sleep(2.0)
        time.sleep(3 * INTERVAL)
        assert self.admit
        self.admit.terminate()
        self.admit.wait(timeout=60)

    def start_planned(self) -> None:
        """The job that all this is for; it has its nodes until the end."""
        self.slurm("sbatch", "-p", "all", f"--reservation={RESERVATION}", f"-N{len(ZONE)}", "--exclusive",
                   "--output=/dev/null", "--wrap=sleep 1200")  # fmt: skip

    def seen(self) -> dict[str, Seen]:
        """Of every job, from the log."""
        found: dict[str, Seen] = defaultdict(Seen)
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        lines = [line for line in lines if "what" in line]
        for line in lines:
            if line["what"] == "round":
                for name in line["waiting"]:
                    found[name].first = found[name].first or line["at"]
            elif line["what"] == "start":
                found[line["job"]].starts.append((line["at"], line["where"], tuple(line["nodes"])))
            elif line["what"] == "requeue":
                found[line["job"]].sent_back += 1
        rounds = [line for line in lines if line["what"] == "round"]
        for name, one in found.items():
            began = one.starts[-1][0]
            ran = max((line["at"] for line in rounds if name in line["running"]), default=began)
            nodes = one.starts[-1][2]
            free = (line["at"] for line in rounds if not any(line["used"].get(node) for node in nodes))
            one.ended = next((at for at in free if at > max(began, ran)), began)
        return found


def replayed(jobs: Sequence[DrawnJob], seen: Sequence[Seen], zero: float, due: float) -> ReplayOutcome:
    """The replay of the same jobs."""
    order = [one.first - zero for one in seen]
    trace = JobTrace(
        submit=np.array(order), duration=np.array([one.ended - one.starts[-1][0] for one in seen]),
        gpus=np.array([job.nodes for job in jobs]), mean=np.array([float(job.predicted) for job in jobs]),
        upper=np.zeros(len(jobs)), preemptible=np.array([job.preemptible for job in jobs]),
        priority=np.array([job.priority for job in jobs]), job=np.arange(len(jobs)), window=max(order) + 1,
    )  # fmt: skip
    planned = Planned(
        nodes=len(ZONE), arrival=due - zero, notice=due - zero, duration=1200.0, zone=(4, 5, 6, 7), closes=MINUTE
    )
    cluster = ClusterShape(nodes=NODES, gpus_per_node=1, minipod=NODES)
    return replay(trace, cluster, POLICIES["jct-mean"], [planned], rules=ReplayRules(checkpoint=1e9))


def compared(trial: Trial) -> dict[str, Any]:
    """Every start, live and replayed."""
    found = trial.seen()
    seen = [found[name] for name in trial.names]
    zero = min(one.first for one in seen)
    outcome = replayed(trial.jobs, seen, zero, trial.due)
    rows: list[dict[str, Any]] = []
    for at, (job, one) in enumerate(zip(trial.jobs, seen, strict=True)):
        runs = [run for run in outcome.runs if run.job == at]
        theirs = [(run.start, tuple(f"n{node + 1}" for node, _ in run.held)) for run in runs]
        mine = [(when - zero, nodes) for when, _, nodes in one.starts]
        same = [nodes for _, nodes in mine] == [nodes for _, nodes in theirs]
        apart = max((abs(a[0] - b[0]) for a, b in zip(mine, theirs, strict=False)), default=0.0)
        rows.append(asdict(job) | {
            "where": [where for _, where, _ in one.starts], "live": mine, "replay": theirs, "sent_back": one.sent_back,
            "restarts": int(outcome.restarts[at]), "apart_s": apart,
            "equal": same and apart <= LATE and one.sent_back == int(outcome.restarts[at]),
        })  # fmt: skip
    return {
        "jobs": rows, "equal": sum(row["equal"] for row in rows), "of": len(rows), "accidents": trial.accidents,
        "in_zone": sum(RESERVATION in where for row in rows for where in row["where"]),
        "sent_back": sum(row["sent_back"] for row in rows), "most_apart_s": max(row["apart_s"] for row in rows),
    }  # fmt: skip


def main() -> int:
    """One trial."""
    given = options()
    cluster = up(SlurmSpec.tree(NODES))
    try:
        with tempfile.TemporaryDirectory() as folder:
            trial = Trial(cluster, drawn(given.seed, given.minutes * 60), given.minutes * 60, Path(folder) / "log")
            trial.prepare()
            try:
                trial.play()
            finally:
                if trial.admit and trial.admit.poll() is None:
                    trial.admit.kill()
            result = compared(trial)
    finally:
        down(cluster)
    for row in result["jobs"]:
        print(f"{'ok ' if row['equal'] else 'NOT'} {row}", file=sys.stderr)
    print(f"{result['equal']} of {result['of']} jobs as replayed, {result['in_zone']} starts in the zone, "
          f"{result['sent_back']} sent back; {'; '.join(result['accidents'])}")  # fmt: skip
    keep(result, given)
    return int(result["equal"] < result["of"])


def options() -> Namespace:
    """What is asked."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--save", help="also write the result, with machine and command, to this file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=5.0, help="until the planned job comes")
    return parser.parse_args()


if __name__ == "__main__":
    finish(main)
