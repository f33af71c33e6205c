"""The rest of a small Kubernetes: nodes, controllers, a scheduler, and kubelets that run pods as
processes of this machine."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from plait.core.base.files import replacing
from tests.support.kubernetes.jobs import control, job_sets
from tests.support.kubernetes.objects import Object, stamp
from tests.support.kubernetes.server import Server, delete_pod

REPOSITORY = Path(__file__).resolve().parents[3]
NAMES = Path(__file__).parent / "names"
UNREACHABLE = {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}
DURING = "DuringSchedulingIgnoredDuringExecution"
UID = "KUBERNETES_POD_UID"
"""A variable by which the processes of a container are known."""


class SmallCluster(Server):
    """Nodes n0, n1, ..., each with GPUs, in one namespace called ml. tick: of the cluster's own
    waits, such as between two starts of a pod, in seconds for each of its seconds."""

    def __init__(self, folder: Path, nodes: int, *, jobset: bool = False, gpus: int = 0, tick: float = 0.01) -> None:
        super().__init__(folder / "logs", jobset)
        self.folder = folder
        self.logs.mkdir(parents=True)
        self.lost: dict[str, float] = {}
        """Nodes that do not answer, and since when."""
        self.hanging = set[str]()
        """Pods, by their uids, that their kubelet cannot end: a process that waits for a device."""
        self.tick = tick
        self._where: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._files: dict[str, Path] = {}
        for number in range(nodes):
            self.add(f"n{number}", gpus)

    def add(self, name: str, gpus: int = 0, labels: dict[str, str] | None = None) -> None:
        """A node."""
        self.store.create({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": name, "labels": {"kubernetes.io/hostname": f"host-{name}", **(labels or {})}},
            "spec": {}, "status": {"allocatable": {"nvidia.com/gpu": str(gpus)},
                                   "conditions": [{"type": "Ready", "status": "True"}]},
        })  # fmt: skip

    def lose(self, name: str, *, power: bool = True) -> None:
        """The node's power fails, or its network alone: then its processes stand still, and go on
        when it is healed. Its pods are told to end, and nobody says that they have
        (https://kubernetes.io/docs/concepts/architecture/nodes/#node-controller,
        https://kubernetes.io/docs/concepts/scheduling-eviction/taint-and-toleration/#taint-based-evictions)."""
        with self.store.changed:
            self._ready(name, "Unknown", [UNREACHABLE])
            self.lost[name] = time.monotonic()
            for pod in self._on(name):
                if process := self._processes.get(pod["metadata"]["uid"]):
                    _signal(pod["metadata"]["uid"], signal.SIGKILL if power else signal.SIGSTOP)
                    if power:
                        process.wait()
                        del self._processes[pod["metadata"]["uid"]]

    def heal(self, name: str) -> None:
        """The node is back, with what goes on there."""
        with self.store.changed:
            self.lost.pop(name, None)
            self._ready(name, "True", [])
        for uid, where in list(self._where.items()):
            if where == name and uid in self._processes:
                _signal(uid, signal.SIGCONT)

    def hang(self, uid: str) -> None:
        """The processes of a pod stand still, and do not end before it is given up."""
        with self.store.changed:
            self.hanging.add(uid)
            _signal(uid, signal.SIGSTOP)

    def drain(self, name: str) -> None:
        """Close the node, and have its pods end with grace (kubectl drain)."""
        with self.store.changed:
            node = self.store.get("Node", name)
            node["spec"]["unschedulable"] = True
            self.store.update(node)
            for pod in self._on(name):
                self._disrupt(pod, "EvictionByEvictionAPI")
                delete_pod(self.store, pod, None)

    def remove(self, name: str) -> None:
        """The node's object is deleted; the pod garbage collector fails its pods and removes them
        (https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-garbage-collection)."""
        with self.store.changed:
            self.store.remove(self.store.get("Node", name))
            for pod in self._on(name):
                self._disrupt(pod, "DeletionByPodGC", phase="Failed")
                self.store.update(pod)
                self.store.remove(pod)

    def outage(self, seconds: float) -> None:
        """The API server is away for so long; what runs goes on."""
        self.away = True
        timer = threading.Timer(seconds, lambda: setattr(self, "away", False))
        timer.daemon = True
        timer.start()

    @staticmethod
    def _disrupt(pod: Object, reason: str, **more: str) -> None:
        pod["status"] |= {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": reason}], **more}

    def _on(self, name: str) -> list[Object]:
        return [pod for pod in self.store.of("Pod") if pod["spec"].get("nodeName") == name
                and pod["status"]["phase"] in ("Pending", "Running")]  # fmt: skip

    def _ready(self, name: str, status: str, taints: list[Object]) -> None:
        node = self.store.get("Node", name)
        node["status"]["conditions"] = [{"type": "Ready", "status": status}]
        node["spec"]["taints"] = taints
        self.store.update(node)

    def _evict(self) -> None:
        """Pods tolerate a node that does not answer for a while."""
        for name, since in self.lost.items():
            for pod in self._on(name):
                seconds = [one.get("tolerationSeconds") for one in pod["spec"].get("tolerations", [])
                           if one.get("key") == UNREACHABLE["key"]]  # fmt: skip
                late = time.monotonic() > since + (seconds[0] or 0 if seconds else 300) * self.tick
                if late and "deletionTimestamp" not in pod["metadata"]:
                    self._disrupt(pod, "DeletionByTaintManager")
                    delete_pod(self.store, pod, None)

    def running(self) -> set[str]:
        """Pods, by their uids, that have a process."""
        return set(self._processes)

    def pods(self) -> list[Object]:
        with self.store.changed:
            return self.store.of("Pod")

    @contextmanager
    def up(self) -> Iterator[SmallCluster]:
        self.start()
        self._loop = threading.Thread(target=self._work, daemon=True)
        self._loop.start()
        try:
            yield self
        finally:
            self.stop()
            self._loop.join()
            for uid, process in self._processes.items():
                _kill(uid, process)

    def _work(self) -> None:
        while self.going:
            with self.store.changed:
                job_sets(self.store)
                control(self.store, self.tick)
                self._evict()
                self._name()
                self._schedule()
                self._kubelet()
            time.sleep(0.03)

    def _schedule(self) -> None:
        for pod in self.store.of("Pod"):
            if (
                pod["spec"].get("nodeName")
                or pod["spec"].get("schedulingGates")
                or "deletionTimestamp" in pod["metadata"]
            ):
                continue
            fitting = [node for node in self.store.of("Node") if self._fits(pod, node)]
            fitting.sort(key=lambda node: _preferred(pod, node))  # the last: the order of names is nobody's plan
            if fitting:
                pod["spec"]["nodeName"] = fitting[-1]["metadata"]["name"]
                pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
                self.store.update(pod)
            elif not pod["status"].get("conditions"):
                why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                       "message": "0 nodes are available."}  # fmt: skip
                pod["status"]["conditions"] = [why]
                self.store.update(pod)

    def _fits(self, pod: Object, node: Object) -> bool:
        spec, labels, name = pod["spec"], node["metadata"]["labels"], node["metadata"]["name"]
        ready = all(one["status"] == "True" for one in node["status"]["conditions"])
        wanted = spec.get("nodeSelector", {}).items() <= labels.items()
        there = self._on(name)
        alone = not spec.get("affinity", {}).get("podAntiAffinity") or not there
        tolerated = all(any(_tolerates(one, taint) for one in spec["tolerations"])
                        for taint in node["spec"].get("taints", []))  # fmt: skip
        used = sum(map(_gpus, there))
        room = int(node["status"]["allocatable"]["nvidia.com/gpu"]) >= used + _gpus(pod)
        required = spec.get("affinity", {}).get("nodeAffinity", {}).get(f"required{DURING}", {})
        terms = required.get("nodeSelectorTerms", [{"matchExpressions": []}])
        allowed = any(_matches(term, labels) for term in terms)
        opened = not node["spec"].get("unschedulable")
        return ready and opened and wanted and alone and tolerated and room and allowed

    def _kubelet(self) -> None:
        known = {pod["metadata"]["uid"] for pod in self.store.of("Pod")}
        for uid in self._processes.keys() - known:  # of a pod that was deleted by force
            if self._where[uid] not in self.lost:
                _kill(uid, self._processes.pop(uid))
        for pod in self.store.of("Pod"):
            uid, metadata, status = pod["metadata"]["uid"], pod["metadata"], pod["status"]
            process = self._processes.get(uid)
            if pod["spec"].get("nodeName") in self.lost or uid in self.hanging:
                continue
            if process is None and pod["spec"].get("nodeName") and status["phase"] == "Pending":
                if "deletionTimestamp" in metadata:
                    status["phase"] = "Failed"
                    self.store.remove(pod)
                elif pod["spec"]["containers"][0]["image"] == "missing":
                    self._waits(pod, "ErrImagePull", "not found")
                elif self._has_files(pod):
                    self._start(pod)
            elif process and (code := process.poll()) is not None:
                self._ended(pod, code)
            elif process and "deletionTimestamp" in metadata:
                self._end(pod, process)
            elif process is None and "deletionTimestamp" in metadata and status["phase"] == "Running":
                status["phase"] = "Failed"  # a kubelet that is back, and whose containers are gone
                self.store.update(pod)
                self.store.remove(pod)

    def _waits(self, pod: Object, reason: str, message: str) -> None:
        state = {"name": "ranks", "state": {"waiting": {"reason": reason, "message": message}}}
        if pod["status"].get("containerStatuses") != [state]:
            pod["status"]["containerStatuses"] = [state]
            self.store.update(pod)

    def _has_files(self, pod: Object) -> bool:
        """Whether what it mounts is there: a kubelet waits for it."""
        secrets = [one["valueFrom"]["secretKeyRef"]["name"] for one in pod["spec"]["containers"][0]["env"]
                   if "secretKeyRef" in one.get("valueFrom", {})]  # fmt: skip
        if not all(("Secret", name) in self.store.objects for name in secrets):
            self._waits(pod, "CreateContainerConfigError", "secret not found")
            return False
        return all(("ConfigMap", one["configMap"]["name"]) in self.store.objects
                   for one in pod["spec"]["volumes"] if "configMap" in one)  # fmt: skip

    def _start(self, pod: Object) -> None:
        uid, container = pod["metadata"]["uid"], pod["spec"]["containers"][0]
        self._where[uid] = pod["spec"]["nodeName"]
        place = self._files[uid] = self.folder / "pods" / uid
        place.mkdir(parents=True)
        paths = {container["terminationMessagePath"]: str(place / "ended")}
        for volume in pod["spec"]["volumes"]:
            if "configMap" in volume:
                mount = next(one["mountPath"] for one in container["volumeMounts"] if one["name"] == volume["name"])
                paths[mount] = str(place)
                found = self.store.get("ConfigMap", volume["configMap"]["name"])
                for name, text in found.get("data", {}).items():
                    (place / name).write_text(self._resolved(text, pod, {}))
                for name, text in found.get("binaryData", {}).items():
                    (place / name).write_bytes(base64.b64decode(text))
        env = {UID: uid, "PATH": os.environ["PATH"], "PYTHONPATH": f"{NAMES}:{REPOSITORY}", "HOME": str(self.folder),
               "KUBERNETES_NAMES": str(self.folder / "names.json")}  # fmt: skip
        index = pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]
        env |= {one["name"]: self._value(one, pod, paths) for one in container["env"]} | {"JOB_COMPLETION_INDEX": index}
        with open(self.logs / uid, "wb") as log:
            self._processes[uid] = subprocess.Popen(
                container["command"], env=env, cwd=place, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        running = {"name": "ranks", "state": {"running": {"startedAt": stamp()}}}
        pod["status"] |= {"phase": "Running", "startTime": stamp(), "containerStatuses": [running]}
        self.store.update(pod)

    def _value(self, one: Object, pod: Object, paths: dict[str, str]) -> str:
        if "value" in one:
            return self._resolved(one["value"], pod, paths)
        source = one["valueFrom"]
        if "secretKeyRef" in source:
            secret = self.store.get("Secret", source["secretKeyRef"]["name"])
            return self._resolved(secret["stringData"][source["secretKeyRef"]["key"]], pod, paths)
        path = source["fieldRef"]["fieldPath"]
        if path.startswith("metadata.annotations["):
            return pod["metadata"].get("annotations", {}).get(path.split("'")[1], "")
        return {"spec.nodeName": pod["spec"]["nodeName"], "status.podIP": _address(pod)}[path]

    def _resolved(self, text: str, pod: Object, paths: dict[str, str]) -> str:
        """As the pod would find it: mounted paths."""
        for path, there in paths.items():
            text = text.replace(path, there)
        return text

    def _name(self) -> None:
        """What the name service says: of two pods of one name the later."""
        pods = sorted(self.store.of("Pod"), key=lambda pod: pod["metadata"]["creationTimestamp"])
        names = {f"{pod['spec']['hostname']}.{pod['spec']['subdomain']}": _address(pod) for pod in pods
                 if pod["spec"].get("nodeName")}  # fmt: skip
        if names != self._names:
            self._names = names
            with replacing(self.folder / "names.json") as draft:
                draft.write_text(json.dumps(names))

    def _end(self, pod: Object, process: subprocess.Popen[bytes]) -> None:
        """SIGTERM, and after its grace SIGKILL."""
        metadata = pod["metadata"]
        if "asked" not in metadata:
            metadata["asked"] = time.monotonic()
            if metadata["deletionGracePeriodSeconds"]:
                process.send_signal(signal.SIGTERM)
        if time.monotonic() >= metadata["asked"] + metadata["deletionGracePeriodSeconds"]:
            _kill(metadata["uid"], process)

    def _ended(self, pod: Object, code: int) -> None:
        uid, message = pod["metadata"]["uid"], ""
        _kill(uid, self._processes.pop(uid))  # what is left in the container
        with suppress(OSError):
            message = (self._files[uid] / "ended").read_text()
        status = code if code >= 0 else 128 - code
        ended = {"exitCode": status, "message": message}
        phase = "Failed" if status else "Succeeded"
        pod["status"] |= {"phase": phase, "containerStatuses": [{"name": "ranks", "state": {"terminated": ended}}]}
        self.store.update(pod)
        shutil.rmtree(self._files[uid], ignore_errors=True)
        if "deletionTimestamp" in pod["metadata"]:
            self.store.remove(pod)


def _address(pod: Object) -> str:
    """Of a pod: one of its node's own, so that what goes on where nobody reaches it keeps no port
    from others."""
    number = "".join(filter(str.isdigit, pod["spec"]["nodeName"])) or "0"
    return f"127.0.1.{int(number) + 1}"


def _kill(uid: str, process: subprocess.Popen[bytes]) -> None:
    """Everything in the container, as when its first process ends."""
    _signal(uid, signal.SIGKILL)
    process.wait()


def _matches(term: Object, labels: dict[str, str]) -> bool:
    """A term of a node selector, of which we write ``In`` alone."""
    assert all(one["operator"] == "In" for one in term["matchExpressions"])
    return all(labels.get(one["key"]) in one["values"] for one in term["matchExpressions"])


def _preferred(pod: Object, node: Object) -> int:
    wanted = pod["spec"].get("affinity", {}).get("nodeAffinity", {}).get(f"preferred{DURING}", [])
    return sum(one["weight"] for one in wanted if _matches(one["preference"], node["metadata"]["labels"]))


def _signal(uid: str, number: int) -> None:
    """To all processes of a container."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and f"{UID}={uid}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), number)


def _gpus(pod: Object) -> int:
    limits = pod["spec"]["containers"][0].get("resources", {}).get("limits", {})
    return int(limits.get("nvidia.com/gpu", 0))


def _tolerates(toleration: dict[str, Any], taint: Object) -> bool:
    keyed = toleration.get("key") in (None, taint["key"])
    valued = toleration["operator"] == "Exists" or toleration.get("value") == taint.get("value")
    return keyed and valued and toleration.get("effect") in (None, taint["effect"])
