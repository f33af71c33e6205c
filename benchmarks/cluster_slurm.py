"""Faults of a real Slurm of four nodes on this machine, for ``cluster_faults``."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.cluster_run import kill_rank, pids


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
