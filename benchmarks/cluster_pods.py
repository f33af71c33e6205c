"""Faults of an emulated Kubernetes cluster, for ``cluster_faults``, and stops in every state of a run.

What an API server and a cluster do to clients is emulated by ``tests/support/kubernetes``, each behaviour
with its source there: pods that stay terminating, waits between failed pods, conflicts (409), throttling
(429), errors (500, 503), watches that end or are too old (410), an API that is away.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.cluster_run import BEGINNING, Run, kill_rank, ranks
from plait.launch.kubernetes.lost import LONG

OUTAGE = 600.0
"""Seconds of the long outages of the API."""
INDEX = "batch.kubernetes.io/job-completion-index"


class Pods:
    """Four nodes of an emulated cluster, and a run of two pods."""

    def __init__(self, folder: Path, drawn: random.Random, jobset: bool) -> None:
        from tests.support.kubernetes.server import Fault

        self.folder, self.drawn, self._fault = folder, drawn, Fault
        self.kind = "JobSet" if jobset else "Job"
        self.long: dict[str, Callable[[], float]] = {
            "the API is away for ten minutes": lambda: self._outage(OUTAGE),
            "the API is away for ten minutes, and a node fails": lambda: self._outage(OUTAGE, node=True),
            "a pod hangs on a node that answers": self._hang,
        }
        self.faults: dict[str, Callable[[], float]] = {
            "power of a node": lambda: self._lose(power=True, first=False),
            "power of the first pod's node": lambda: self._lose(power=True, first=True),
            "power of both nodes": self._lose_both,
            "network of a node, which comes back": lambda: self._lose(power=False, first=False),
            "network of the first pod's node": lambda: self._lose(power=False, first=True),
            "a node is drained": self._drain,
            "a node's object is deleted": self._remove,
            "a rank is killed": self._kill_rank,
            "a container is killed": self._kill_container,
            "a pod is deleted": self._delete,
            "suspended by a queue": self._suspend,
            "the API is away": lambda: self._outage(25.0),
            "the API is away while a node fails": lambda: self._outage(15.0, node=True),
            "the API is away while a rank is killed": lambda: self._outage(15.0) + self._kill_rank(),
            "watches end, and are too old": self._expired,
            "throttling": lambda: self._answers(429, 12),
            "conflicts": lambda: self._answers(409, 3),
            "an overloaded server": lambda: self._answers(503, 8),
            "a server with errors of its own": lambda: self._answers(500, 8),
            **self.long,
        }
        self.stops: dict[str, Callable[[], None]] = {
            "SIGTERM, running": lambda: self._stop(signal.SIGTERM),
            "SIGINT twice, running": lambda: self._stop(signal.SIGINT, again=3.0),
            "SIGHUP, running": lambda: self._stop(signal.SIGHUP),
            "SIGTERM, pods start": lambda: self._stop(signal.SIGTERM, self._starting),
            "SIGTERM, pods find no node": lambda: self._stop(signal.SIGTERM, self._pending),
            "SIGTERM, ranks start again": lambda: self._stop(signal.SIGTERM, self._again),
            "SIGTERM, a node is lost": lambda: self._stop(signal.SIGTERM, self._without_node),
            "SIGTERM, the API is away": lambda: self._stop(signal.SIGTERM, self._away),
        }
        self.killing = ("SIGINT twice, running", "SIGTERM, a node is lost")
        self.run: Run
        self._told: set[str] = set()
        """Workloads that were told to end."""
        self._mend: list[Callable[[], Any]] = []

    def command(self, job: Path) -> tuple[list[str], dict[str, str]]:
        from tests.support.kubernetes.runs import environment, options

        self.cluster.folder.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-m", "plait.cli.main", "train", str(job), *options(job.parent, max_restarts=8)]
        return [*argv, "--on", "kubernetes"], environment(self.cluster)

    @contextmanager
    def up(self) -> Iterator[None]:
        from tests.support.kubernetes.runs import small_cluster

        with small_cluster(self.folder / "cluster", 4, jobset=self.kind == "JobSet") as self.cluster:
            yield

    def after(self) -> None:
        while self._mend:
            self._mend.pop()()

    def going(self) -> list[str]:
        pods = [f"pod {pod['metadata']['name']}" for pod in self.cluster.pods()]
        return [*pods, *self._workloads(), *(f"rank {rank} runs" for rank in ranks(str(self.folder)))]

    def _workloads(self) -> list[str]:
        with self.cluster.store.changed:
            return [one["metadata"]["name"] for one in self.cluster.store.of(self.kind)]

    def lost(self) -> list[str]:
        """Workloads that were deleted though nobody had told them to end, and no other had taken their
        place."""
        there, found = set[str](), list[str]()
        with self.cluster.store.changed:
            events = [(what, body["metadata"]["name"]) for _, what, body in self.cluster.store.events
                      if body["kind"] == self.kind]  # fmt: skip
        for what, name in events:
            there = there | {name} if what == "ADDED" else there - {name} if what == "DELETED" else there
            if what == "DELETED" and name not in self._told and not there:
                found.append(f"the workload {name} was deleted")
        return found

    # ---- stops ----

    def _stop(self, number: int, state: Callable[[], None] | None = None, again: float = 0.0) -> None:
        """Have the run come to be in the state, and tell it to end."""
        if state in (self._starting, self._pending):
            self._told |= {*self._workloads()}
            self.run.stop()
        elif not self.run.alive:
            self.run.start()
        if state:
            state()
        self._told |= {*self._workloads()}
        assert self.run.process
        self.run.process.send_signal(number)
        if again:
            time.sleep(again)
            self.run.process.send_signal(number)

    def _started(self, wanted: Callable[[Any], bool]) -> None:
        """Sent anew, and its pods are there."""
        self.run.start(trains=False)
        until = time.monotonic() + BEGINNING
        while not any(wanted(pod) for pod in self.cluster.pods()) and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(self.drawn.uniform(0.0, 2.0))

    def _starting(self) -> None:
        self._started(lambda pod: pod["status"]["phase"] == "Running")

    def _pending(self) -> None:
        nodes = [node["metadata"]["name"] for node in self.cluster.store.of("Node")]
        for name in nodes:
            self.cluster.drain(name)
            self._mend.append(lambda name=name: self._undrain(name))
        self._started(lambda pod: bool(pod["status"].get("conditions")))

    def _again(self) -> None:
        self._kill_rank()
        time.sleep(self.drawn.uniform(1.0, 4.0))

    def _without_node(self) -> None:
        self._lose(power=True, first=False)
        time.sleep(self.drawn.uniform(0.0, 4.0))

    def _away(self) -> None:
        self.cluster.outage(20.0)
        time.sleep(1.0)

    # ---- faults ----

    def _pod(self, *, first: bool) -> Any:
        pods = [pod for pod in self.cluster.pods() if pod["status"]["phase"] == "Running"
                and "deletionTimestamp" not in pod["metadata"]]  # fmt: skip
        found = [pod for pod in pods if (pod["metadata"]["labels"][INDEX] == "0") == first]
        return found[-1] if found else pods[-1]

    def _lose(self, *, power: bool, first: bool) -> float:
        node = self._pod(first=first)["spec"]["nodeName"]
        self.cluster.lose(node, power=power)
        self._mend.append(lambda: self.cluster.heal(node))
        return 0.0

    def _lose_both(self) -> float:
        for first in (False, True):
            self._lose(power=True, first=first)
        return 0.0

    def _drain(self) -> float:
        node = self._pod(first=self.drawn.random() < 0.5)["spec"]["nodeName"]
        self.cluster.drain(node)
        self._mend.append(lambda: self._undrain(node))
        return 0.0

    def _undrain(self, node: str) -> None:
        self.cluster.store.patch("Node", node, {"spec": {"unschedulable": False}})

    def _hang(self) -> float:
        """Its processes do not end, and nobody sets its phase: it is given up after its grace and five
        minutes."""
        pod = self._pod(first=False)
        self.cluster.hang(pod["metadata"]["uid"])
        self._mend.append(self.cluster.hanging.clear)
        self._delete(pod)
        return 20.0 + LONG

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

    def _delete(self, pod: Any = None) -> float:
        pod = pod or self._pod(first=self.drawn.random() < 0.5)
        self.cluster.delete("Pod", pod["metadata"]["name"], False, None)
        return 0.0

    def _suspend(self) -> float:
        """A queue takes the nodes back, and gives others: pods have the time to save."""
        name = self._workloads()[-1]
        self.cluster.store.patch(self.kind, name, {"spec": {"suspend": True}})
        until = time.monotonic() + 60.0
        while self.cluster.pods() and time.monotonic() < until:
            time.sleep(0.2)
        time.sleep(self.drawn.uniform(0.0, 5.0))
        self.cluster.store.patch(self.kind, name, {"spec": {"suspend": False}})
        return 60.0

    def _outage(self, seconds: float, *, node: bool = False) -> float:
        """Through which the run goes on, as far as it can."""
        self.cluster.outage(seconds)
        if node:
            self._lose(power=True, first=False)
        time.sleep(seconds)
        return 75.0  # the server is asked again after a minute at most

    def _expired(self) -> float:
        self.cluster.store.compact()
        self.cluster.faults += [self._fault("WATCH", "Pod", 0), self._fault("WATCH", self.kind, 0)]
        kill_rank(0, str(self.folder))
        return 0.0

    def _answers(self, status: int, times: int) -> float:
        changes = ("PATCH", "DELETE")
        for method in changes if status == 409 else ("GET", *changes):  # who reads conflicts with nobody
            self.cluster.faults.append(self._fault(method, "/", status, times=times))
        self._mend.append(self.cluster.faults.clear)
        return self._lose(power=True, first=False) + 30.0
