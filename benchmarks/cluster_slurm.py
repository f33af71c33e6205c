"""Faults of a real Slurm of four nodes on this machine, for ``cluster_faults``, and stops in every state that
a job has."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cluster_run import BEGINNING, Run, kill_rank, pids, ranks
from plait.core.topology.rank_table import RankTable

OUTAGE = 600.0
"""Seconds of the long outages of the controller."""
GATES = {"configuring": "configuring", "prolog": "prolog", "shell": "shell", "completing": "epilog"}
"""What holds a job up in a state."""
STATES = ("pending", *GATES, "running", "requeued", "suspended")
"""Of the run's job."""
EARLY = ("pending", "configuring", "prolog", "shell")
"""Those that come before ranks do."""
GATE = "#!/bin/sh\nwhile [ -e {gate} ]; do sleep 0.2; done\n"
SETTINGS = """PrologFlags=Alloc
PrologSlurmctld={folder}/configuring
Prolog={folder}/prolog
Epilog={folder}/epilog
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL PriorityTier=10 MaxTime=INFINITE State=UP
"""
"""Of slurm.conf, beside the laboratory's: scripts that hold a job up before and after, and preemption."""


class Nodes:
    """Four nodes of Slurm's own."""

    def __init__(self, folder: Path, drawn: random.Random) -> None:
        self.folder, self.drawn = folder, drawn
        self.faults: dict[str, Callable[[], float]] = {
            "power of a node": lambda: self._cut(first=False),
            "power of the first node": lambda: self._cut(first=True),
            "a node of the rank table is lost": self._cut_of_table,
            "a node is set down": lambda: self._state("DOWN"),
            "a node is drained": lambda: self._state("DRAIN"),
            "slurmd is killed": self._slurmd,
            "the controller is away": lambda: self._away(20.0),
            "the controller is away while a rank dies": lambda: self._away(20.0, dies=1.0),
            "the time limit": self._limit,
            "preempted": self._preempted,
            "requeued": self._requeue,
            "a rank is killed": self._kill_rank,
        }
        self.long: dict[str, Callable[[], float]] = {
            "the controller is away for ten minutes": lambda: self._away(OUTAGE),
            "the controller is away for ten minutes while a rank dies": lambda: self._away(OUTAGE, dies=60.0),
        }
        self.faults |= self.long
        self.stops: dict[str, Callable[[], None]] = {
            f"{how}, {state}": partial(self._stopped, how=how, state=state)
            for state in STATES
            for how in ("scancel", "SIGTERM")
        }
        self.stops["SIGTERM, the controller is away"] = self._stopped_away
        self.killing = ("scancel, suspended",)
        self._mend: list[Callable[[], Any]] = []
        self.run: Run

    @contextmanager
    def up(self) -> Iterator[None]:
        from tests.support.slurm import slurm_cluster

        for name in ("configuring", "prolog", "epilog"):
            script = self.folder / name
            script.write_text(GATE.format(gate=self.gate(name)))
            script.chmod(0o755)
        with slurm_cluster(4, settings=SETTINGS.format(folder=self.folder)) as self.cluster:
            yield

    def command(self, job: Path) -> tuple[list[str], dict[str, str]]:
        from tests.support.slurm import environment

        setup = f'slurm.setup=["while [ -e {self.gate("shell")} ]; do sleep 0.2; done"]'
        argv = [sys.executable, "-m", "plait.cli.main", "train", str(job), "slurm.nodes=2", "slurm.restarts=8", setup]
        return [*argv, "slurm.signal_time=30", "--on", "slurm"], environment(self.cluster)

    def after(self) -> None:
        while self._mend:
            self._mend.pop()()

    def going(self) -> list[str]:
        said = self._ask("squeue", "-h", "-n", "job", "-o", "%A is %T").splitlines()
        return said + [f"rank {rank} runs" for rank in ranks(str(self.folder))]

    def lost(self) -> list[str]:
        """A job that was given up, so that another had to be begun."""
        jobs = len(list((self.run.home / "logs").glob("slurm-*.log")))
        return [f"there were {jobs} jobs for {self.run.starts} starts"] * (jobs > self.run.starts)

    def gate(self, name: str) -> Path:
        """While this file is there, a job is held up at that point."""
        return self.folder / f"{name}.closed"

    def _ask(self, *argv: str) -> str:
        from tests.support.slurm import ask

        return ask(self.cluster, *argv)

    # ---- the job ----

    def _job(self) -> tuple[str, list[str]]:
        from plait.core.topology.hostlist import expand

        while not (told := self._ask("squeue", "-h", "-t", "R", "-n", "job", "-o", "%A|%N").strip()):
            time.sleep(0.5)  # it is between two starts
        number, _, nodes = told.partition("|")
        return number, expand(nodes)

    def _told(self) -> dict[str, str]:
        """What Slurm says of the run's job; nothing if there is none."""
        number = self._ask("squeue", "-h", "-n", "job", "-o", "%A").split()
        if not number:
            return {}
        said = self._ask("scontrol", "-o", "show", "job", number[-1])
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def _until(self, wanted: Callable[[dict[str, str]], bool], what: str) -> str:
        """Wait until the job is as wanted; its number."""
        end = time.monotonic() + BEGINNING
        while time.monotonic() < end:
            if (told := self._told()) and wanted(told):
                return told["JobId"]
            time.sleep(0.05)
        raise AssertionError(f"the job did not come to be {what}")

    # ---- faults that a run outlives ----

    def _cut(self, *, first: bool) -> float:
        self.cluster.cut(self._job()[1][0 if first else -1])
        self._mend.append(self.cluster.heal)
        return 0.0

    def _cut_of_table(self) -> float:
        run = self.run
        run.stop()
        table = self.folder / "table.json"
        RankTable(("n3", "n2"), ranks_per_node=1).write(table)
        run.more = ["--rank-table", str(table)]
        run.start()
        run.more = []
        self.cluster.cut("n3")
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
        conf = str(self.cluster.folder / "slurm.conf")
        for pid in pids(lambda words: f"slurmd\0-D\0-N\0{node}\0" in words and conf in words):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._mend.append(self.cluster.heal)
        return 10.0

    def _resume(self) -> None:
        """Nodes that were drained."""
        for node in set(self._ask("sinfo", "-h", "-N", "-t", "drain", "-o", "%N").split()):
            self._ask("scontrol", "update", f"NodeName={node}", "State=RESUME")

    @contextmanager
    def _without_controller(self) -> Iterator[None]:
        conf = str(self.cluster.folder / "slurm.conf")
        stopped = pids(lambda words: "slurmctld\0" in words and conf in words)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)

    def _away(self, seconds: float, *, dies: float = 0.0) -> float:
        """dies: seconds until a rank does."""
        self._job()
        self._mend.append(self._resume)  # Slurm 24.11 drains a node with remains of the job (slurm_follow)
        with self._without_controller():
            time.sleep(dies)
            if dies:
                self._kill_rank()
            time.sleep(seconds - dies)
        return 20.0

    def _limit(self) -> float:
        job, _ = self._job()
        told = self._told()
        hours, minutes, seconds = (int(part) for part in told["RunTime"].split("-")[-1].split(":"))
        limit = hours * 60 + minutes + (2 if seconds > 20 else 1)
        self._ask("scontrol", "update", f"JobId={job}", f"TimeLimit={limit}")
        self._mend.append(lambda: self._ask("scontrol", "update", f"JobId={job}", "TimeLimit=UNLIMITED"))
        until = time.monotonic() + 150
        while time.monotonic() < until and self._ask("squeue", "-h", "-t", "R", "-n", "job", "-o", "%A"):
            time.sleep(0.5)
        self.after()
        return 60.0

    def _preempted(self) -> float:
        self._job()
        self._ask(
            "sbatch", "-p", "urgent", "-J", "urgent", "--exclusive", "-N3", "-o", "/dev/null", "--wrap", "sleep 8"
        )
        return 30.0

    def _requeue(self) -> float:
        self._ask("scontrol", "requeue", self._job()[0])
        return 10.0

    def _kill_rank(self) -> float:
        kill_rank(self.drawn.randrange(2), str(self.folder))
        return 0.0

    # ---- stops ----

    def _stopped(self, *, how: str, state: str) -> None:
        """Have the job come to be in the state, and stop it."""
        run = self.run
        if state in EARLY:
            run.stop()
        elif not run.alive:
            run.start()
        if gate := GATES.get(state):
            self.gate(gate).touch()
        try:
            job = self._brought(run, state)
            time.sleep(self.drawn.uniform(0.0, 3.0) if state != "requeued" else 0.0)
            self._tell(run, job, how)
            time.sleep(3.0)
            if state == "suspended" and how != "scancel":
                self._ask("scontrol", "resume", job)  # Slurm kills what is suspended: it ends when it goes on
        finally:
            if gate:
                self.gate(gate).unlink()
            if state == "pending":
                self._ask("scontrol", "update", "NodeName=ALL", "State=RESUME")

    def _brought(self, run: Run, state: str) -> str:
        """The job's number, once it is in the state."""
        if state == "pending":
            self._ask("scontrol", "update", "NodeName=ALL", "State=DRAIN", "Reason=fault")
        if state in EARLY:
            run.start(trains=False)
        elif state == "completing":
            self._kill_rank()
        elif state == "requeued":
            self._requeue()
        elif state == "suspended":
            self._ask("scontrol", "suspend", self._job()[0])
        name = {"prolog": "RUNNING", "shell": "RUNNING", "requeued": "PENDING"}.get(state, state.upper())
        return self._until(
            lambda told: (
                told["JobState"] == name
                and (state != "requeued" or told["Restarts"] != "0")
                and (state == "prolog") == (told["Reason"] == "Prolog")
            ),
            state,
        )

    def _tell(self, run: Run, job: str, how: str) -> None:
        if how == "scancel":
            self._ask("scancel", job)
        else:
            assert run.process
            run.process.send_signal(signal.SIGTERM)

    def _stopped_away(self) -> None:
        run = self.run
        if not run.alive:
            run.start()
        self._job()
        with self._without_controller():
            self._tell(run, "", "SIGTERM")
            time.sleep(20.0)
