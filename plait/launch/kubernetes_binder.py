"""Binding pods to nodes in the order of a rank table, all or none.

Pods are made with a scheduling gate. Once all of them are there, each is given the name of its node, and only
when every one has it are the gates opened. Kubernetes does not let a node be taken back from a pod: what
cannot be finished is undone by deleting the pods, which the Job makes anew behind the gate.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from plait.core.base.errors import LaunchError, PlacementError
from plait.core.topology.hostlist import fold
from plait.core.topology.rank_table import NAME as RANK_TABLE
from plait.core.topology.rank_table import RankTable
from plait.core.topology.switches import RESERVED_TAINT
from plait.launch.kubernetes_api import Away, Conflict, KubernetesNamespace, NotThere
from plait.launch.kubernetes_manifests import GATE, HOSTNAME, HOSTS, INDEX, Object, PodRun, table_text

AT_ONCE = 8
"""Requests that are under way at a time."""
TRIES = 3
"""Bindings in a row that may be undone."""
NEAR = ("fabric.topograph.run/", "accelerator.topograph.run/", "topology.kubernetes.io/", "cloud.google.com/")
"""Labels that tell how near nodes are to each other."""
OVER = ("Succeeded", "Failed")


class Undone(LaunchError):
    """A binding was given up before any pod was started; it may be tried again."""


class Binder:
    """Binds the pods of ``run`` to the nodes of its rank table, anew after each restart.

    table: as bound last. Where a node is lost, a spare one takes its place.
    """

    def __init__(self, cluster: KubernetesNamespace, run: PodRun, say: Callable[[str], None]) -> None:
        assert run.table is not None
        self.cluster, self.run, self.table, self.say = cluster, run, run.table, say
        self.bound: frozenset[str] = frozenset()
        """Which pods, by their uids, have a node by this binder and an open gate."""
        self._ended: set[str] = set()
        self._doomed: dict[str, str] = {}
        """Pods that are to be ended and may not have been, by their uids: their names."""
        self._undone = 0
        self._began = False
        """Whether pods have been given nodes in the binding that is under way."""
        self._labels: dict[str, Mapping[str, str]] = {}
        self._since = 0.0

    def look(self, pods: Iterable[Object]) -> None:
        """Bind the pods if all are there and wait; check those that were bound. Raises PlacementError if it
        cannot be done, with nothing left bound. Raises Away if the server does not answer: the next look
        finishes what was begun."""
        self._end_the_doomed()
        living = [pod for pod in pods if not over(pod) and uid(pod) not in self._ended]
        gang = {index_of(pod): pod for pod in living}
        # What is seen may lag behind what was done: pods that are bound may still look as if they waited.
        new = all(gated(pod) and uid(pod) not in self.bound for pod in living)
        if len(living) == len(gang) == self.run.nodes and new:
            try:
                self._bind([gang[index] for index in range(self.run.nodes)])
            except (Undone, Conflict, NotThere) as error:
                self._undo(living)
                self._undone += 1
                if self._undone >= TRIES:
                    raise PlacementError(f"Binding was undone {self._undone} times in a row. {error}") from None
                self.say(f"the binding was undone and is tried again: {error}")
            except Away:
                if self._began:
                    self._doom(living)
                raise
            except LaunchError as error:
                self._undo(living)
                raise PlacementError(f"Pods cannot be bound. {error}") from None
        else:
            self._check(living)

    def _bind(self, pods: Sequence[Object]) -> None:
        self._began = False
        self.table = self._whole(self.table)
        nodes = self._nodes()
        table = {"data": {RANK_TABLE: table_text(self.table)}}
        self.cluster.patch("ConfigMap", self.run.name, table)
        hosts = fold(self.table.hosts)
        names = [nodes[host]["metadata"]["labels"].get(HOSTNAME, host) for host in self.table.hosts]
        self._began = True
        self._each(lambda place: self._point(pods[place], names[place], hosts), len(pods))
        self._confirm(pods, names)
        self._each(lambda place: self._open(pods[place]), len(pods))
        self.bound = frozenset(uid(pod) for pod in pods)
        self._since, self._undone = time.monotonic(), 0
        self.say(f"bound {len(pods)} pods to {hosts}")

    def _point(self, pod: Object, node: str, hosts: str) -> None:
        """Give a pod its node; the gate stays shut."""
        spec, metadata = pod["spec"], pod["metadata"]
        selector = {**spec.get("nodeSelector", {}), HOSTNAME: node}
        annotations = {**metadata.get("annotations", {}), HOSTS: hosts}
        self.cluster.patch("Pod", metadata["name"], [
            {"op": "test", "path": "/metadata/uid", "value": uid(pod)},
            {"op": "add", "path": "/spec/nodeSelector", "value": selector},
            {"op": "add", "path": "/metadata/annotations", "value": annotations},
        ])  # fmt: skip

    def _confirm(self, pods: Sequence[Object], names: Sequence[str]) -> None:
        """Raise Undone unless, by the server's word, every pod is there, waits, and has its node, which still
        is fit."""
        found = {uid(pod): pod for pod in self.cluster.list("Pod", f"plait.dev/run={self.run.name}")[0]}
        for pod, name in zip(pods, names, strict=True):
            now = found.get(uid(pod))
            if now is None or over(now) or not gated(now):
                raise Undone(f"Pod {pod['metadata']['name']} went away while pods were being bound.")
            if now["spec"].get("nodeSelector", {}).get(HOSTNAME) != name:
                raise Undone(f"Pod {pod['metadata']['name']} was given another node than {name} by somebody else.")
        if lost := [host for host in self.table.hosts if not self._fit(self._nodes().get(host))]:
            raise Undone(f"{', '.join(lost)} went away while pods were being bound.")

    def _open(self, pod: Object) -> None:
        gates = [gate["name"] for gate in pod["spec"]["schedulingGates"]]
        path = f"/spec/schedulingGates/{gates.index(GATE)}"
        self.cluster.patch("Pod", pod["metadata"]["name"], [
            {"op": "test", "path": "/metadata/uid", "value": uid(pod)},
            {"op": "test", "path": f"{path}/name", "value": GATE},
            {"op": "remove", "path": path},
        ])  # fmt: skip

    def _check(self, living: Sequence[Object]) -> None:
        """Raise PlacementError if pods that were bound are not one to a node as the table has it."""
        bound = [pod for pod in living if uid(pod) in self.bound]
        nodes = Counter(pod["spec"].get("nodeName") for pod in bound if pod["spec"].get("nodeName"))
        wrong = [f"node {node} has {count} pods of this run" for node, count in nodes.items() if count > 1]
        for pod in bound:
            node, meant = pod["spec"].get("nodeName"), self.table.hosts[index_of(pod)]
            if node and node != meant:
                wrong.append(f"pod {index_of(pod)} is on {node} and not on {meant}")
            elif not node and time.monotonic() - self._since > self.run.settings.wait:
                wrong.append(f"pod {index_of(pod)} found no room on {meant}: {unschedulable(pod) or 'it only waits'}")
        if wrong:
            self._undo(living)
            raise PlacementError(f"Pods are not where the rank table has them, and were ended: {'; '.join(wrong[:5])}.")

    def _undo(self, pods: Iterable[Object]) -> None:
        """End pods, bound or not."""
        self._doom(pods)
        self._end_the_doomed()

    def _doom(self, pods: Iterable[Object]) -> None:
        self._doomed |= {uid(pod): pod["metadata"]["name"] for pod in pods}
        self._ended |= self._doomed.keys()
        self.bound = frozenset()

    def _end_the_doomed(self) -> None:
        doomed = list(self._doomed.items())

        def end(place: int) -> None:
            one, name = doomed[place]
            self.cluster.delete("Pod", name, grace=0)
            del self._doomed[one]

        self._each(end, len(doomed))

    def _whole(self, table: RankTable) -> RankTable:
        """The table with another node for each that is not there or not fit."""
        nodes = self._nodes()
        for place, host in enumerate(table.hosts):
            node = nodes.get(host)
            if node:
                self._labels[host] = node["metadata"].get("labels", {})
            if not self._fit(node):
                spare = self._spare(host, nodes, table)
                why = "is not there" if node is None else "is not ready"
                if spare is None:
                    raise PlacementError(f"The node {host} of the rank table {why}, and there is no other to take.")
                self.say(f"the node {host} {why}; {spare} takes its place")
                table = table.with_host(place, spare)
                self._labels[spare] = nodes[spare]["metadata"].get("labels", {})
        return table

    def _spare(self, lost: str, nodes: Mapping[str, Object], table: RankTable) -> str | None:
        """The next of the user's spares; without any, the nearest node that fits."""
        one = self.run.settings
        free = [
            host for host in one.spare_nodes or sorted(nodes) if host not in table.hosts and self._fit(nodes.get(host))
        ]
        if one.spare_nodes:
            return free[0] if free else None
        was = self._labels.get(lost, {})
        free = [host for host in free if self._could_hold(nodes[host])]

        def near(host: str) -> int:
            labels = nodes[host]["metadata"].get("labels", {})
            return sum(labels.get(key) == value for key, value in was.items() if key.startswith(NEAR))

        return max(free, key=near, default=None)

    def _could_hold(self, node: Object) -> bool:
        one = self.run.settings
        labels = node["metadata"].get("labels", {})
        room = int(node.get("status", {}).get("allocatable", {}).get(one.gpu_resource, "0")) >= one.gpus
        wanted = (label.partition("=") for label in one.node_labels)
        return room and all(labels.get(key) == value for key, _, value in wanted)

    def _fit(self, node: Object | None) -> bool:
        """Whether a node is there, ready, and not closed or reserved for others."""
        if node is None or node.get("spec", {}).get("unschedulable"):
            return False
        reserved = [taint.get("value") for taint in node["spec"].get("taints", []) if taint["key"] == RESERVED_TAINT]
        conditions = {one["type"]: one["status"] for one in node.get("status", {}).get("conditions", [])}
        return conditions.get("Ready") == "True" and all(one == self.run.settings.reservation for one in reserved)

    def _nodes(self) -> dict[str, Object]:
        return {node["metadata"]["name"]: node for node in self.cluster.list("Node")[0]}

    def _each(self, do: Callable[[int], Any], count: int) -> None:
        """For every place; the first error is raised after the others have ended."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(do, range(count)))


def uid(pod: Object) -> str:
    """Which tells a pod from an earlier one of the same name."""
    return pod["metadata"]["uid"]


def index_of(pod: Object) -> int:
    """Its completion index: its node rank."""
    metadata = pod["metadata"]
    return int(metadata.get("labels", {}).get(INDEX, metadata.get("annotations", {}).get(INDEX, -1)))


def gated(pod: Object) -> bool:
    """Whether it waits for us."""
    return any(gate["name"] == GATE for gate in pod["spec"].get("schedulingGates", []))


def over(pod: Object) -> bool:
    """Whether it has ended or is about to."""
    return bool(pod["metadata"].get("deletionTimestamp")) or pod.get("status", {}).get("phase") in OVER


def unschedulable(pod: Object) -> str:
    """What the scheduler says of it."""
    conditions = pod.get("status", {}).get("conditions", [])
    return next((one.get("message", "") for one in conditions if one.get("reason") == "Unschedulable"), "")
