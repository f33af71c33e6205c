"""Faults of an emulated Kubernetes cluster, for ``cluster_faults``."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.cluster_run import Run, kill_rank


class Pods:
    """Four nodes of an emulated cluster."""

    def __init__(self, folder: Path, drawn: random.Random, jobset: bool) -> None:
        from tests.support.kubernetes.server import Fault

        self.folder, self.drawn, self._fault = folder, drawn, Fault
        self.jobset = jobset
        self.faults: dict[str, Callable[[], float]] = {
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
        self.stops: dict[str, Callable[[], None]] = {}
        self.long: dict[str, Callable[[], float]] = {}
        self.run: Run
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

    def going(self) -> list[str]:
        return [f"pod {pod['metadata']['name']}" for pod in self.cluster.pods()]

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
