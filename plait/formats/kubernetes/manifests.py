"""A run's Kubernetes objects: a JobSet or an Indexed Job, and the ConfigMap, Secret and Service
that it owns.

Every node has one pod, whose completion index is the node rank. Pod 0 runs the launcher
(``launch.kubernetes.pod``) and an agent, every other pod an agent.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from plait.core.base import programs
from plait.core.base.cluster_env import gpus_variable
from plait.core.base.errors import DO_NOT_RETRY, JobError, LaunchError
from plait.core.base.process import command_of
from plait.core.job.cluster_settings import PAIR, TAINT, VOLUME, KubernetesSection
from plait.core.topology.hostlist import fold
from plait.core.topology.rank_table import NAME as RANK_TABLE
from plait.core.topology.rank_table import RankTable
from plait.core.topology.switches import RESERVED_TAINT
from plait.formats.kubernetes.pod_file import CONTAINER, FILES, PodFile, check_reserved, merged

Object = dict[str, Any]
RUN = "plait.dev/run"
TOPOLOGY = "topology.json"
"""The name of the cluster's topology file among the files that pods mount."""
HOSTNAME = "kubernetes.io/hostname"
INDEX = "batch.kubernetes.io/job-completion-index"
MANAGED = {"app.kubernetes.io/managed-by": "plait"}
KUEUE = "kueue.x-k8s.io"
FORCED = f"{KUEUE}/safe-to-forcefully-terminate"
"""The annotation that lets Kueue's failure recovery terminate a pod of a lost node
(https://kueue.sigs.k8s.io/docs/tasks/manage/setup_failure_recovery/)."""
UNREACHABLE = 30
"""Seconds until pods of a lost node are started elsewhere; Kubernetes' default is 300."""
ENDED = "/dev/termination-log"
MOST_BYTES = 1_000_000
"""The largest ConfigMap in bytes; etcd takes at most one MiB."""
MOST = 2**31 - 1
"""The largest int32, Kubernetes' type of counts."""
REPLICATED = "ranks"


@dataclass(frozen=True, kw_only=True)
class PodRun:
    """A run in pods: the command ``argv`` for each of ``world_size`` ranks.

    name: unique in the namespace. folder: the run's folder in the pods' file system. secret: the
    shared secret of launcher and agents. timeout: seconds that a rank may be silent. hostnames:
    values of the hostname label by host of the rank table, for hosts whose label differs from their
    name. plan: the plan's text; empty without a plan. stages: number of pipeline stages; nodes of
    one stage are neighbours. pod: the user's additions to the pods. topology: the cluster's
    topology as Plait's JSON, which orders ranks on the pods' nodes; empty for none. origin: the
    name of the run's first Job, if this is another Job.
    """

    name: str
    argv: tuple[str, ...]
    world_size: int
    folder: Path
    secret: str
    settings: KubernetesSection
    kind: Literal["Job", "JobSet"]
    timeout: float
    table: RankTable | None = None
    hostnames: Mapping[str, str] = field(default_factory=dict[str, str])
    plan: str = ""
    stages: int = 1
    pod: PodFile = field(default_factory=PodFile)
    topology: str = ""
    origin: str = ""

    @property
    def nodes(self) -> int:
        """The number of pods."""
        return self.settings.nodes

    @property
    def head(self) -> str:
        """Pod 0's DNS name in the cluster."""
        return f"{self.name}-{REPLICATED}-0-0.{self.name}" if self.kind == "JobSet" else f"{self.name}-0.{self.name}"

    @property
    def labels(self) -> dict[str, str]:
        """Labels of all objects of the run."""
        return {**MANAGED, "app.kubernetes.io/name": "plait", RUN: self.name}

    def workload(self) -> Object:
        """Return the JobSet or Job."""
        return _jobset(self) if self.kind == "JobSet" else _job_object(self)

    def template(self) -> Object:
        """Return the pods' template."""
        return _pod(self)

    def owned_objects(self, owner: Object | None = None) -> list[Object]:
        """Return the ConfigMap, Secret and, for a Job, Service, which are removed with the workload
        ``owner``."""
        found = [_files(self), _secret(self), *([] if self.kind == "JobSet" else [_service(self)])]
        if owner:
            reference = {
                "apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": self.name,
                "uid": owner["metadata"]["uid"], "controller": False, "blockOwnerDeletion": False,
            }  # fmt: skip
            for one in found:
                one["metadata"]["ownerReferences"] = [reference]
        return found


def check_image(settings: KubernetesSection) -> None:
    """Raise JobError for settings without a container image."""
    if not settings.image:
        fix = 'Name one with Plait in it, such as kubernetes.image="registry/plait:1.0"'
        raise JobError("is missing", key="kubernetes.image", fix=fix)


def with_node_count(settings: KubernetesSection, world_size: int, table: RankTable | None) -> KubernetesSection:
    """Return the settings with the number of nodes filled in. Raises JobError for contradictory
    settings."""
    check_image(settings)
    if table:
        table.check_job(world_size, settings.nodes, "kubernetes")
    if table and settings.kueue_topology:
        fix = "Leave one of the two out"
        raise JobError(
            "has Kueue choose the nodes, and the rank table names them", key="kubernetes.kueue_topology", fix=fix
        )
    if table and settings.kueue_queue and settings.spare_nodes:
        problem = f"allows certain nodes alone, and the queue {settings.kueue_queue} may give others to the pods"
        raise JobError(problem, key="kubernetes.spare_nodes", fix="Leave it out, or leave out kubernetes.kueue_queue")
    if settings.spare_nodes and not table:
        problem = "are nodes beside those of a rank table, and there is none"
        raise JobError(problem, key="kubernetes.spare_nodes", fix="Give a rank table (--rank-table), or leave it out")
    check_reserved(settings)
    if settings.kueue_stage_topology and not settings.kueue_topology:
        raise JobError("needs kubernetes.kueue_topology", key="kubernetes.kueue_stage_topology", fix="Set both")
    nodes = len(table.hosts) if table else settings.nodes or -(-world_size // max(settings.gpus, 1))
    if world_size % nodes:
        fix = f"Choose a number that divides {world_size}"
        raise JobError(f"{world_size} ranks do not spread evenly over {nodes} pods", key="kubernetes.nodes", fix=fix)
    if settings.gpus and settings.gpus < world_size // nodes:
        problem = f"is {settings.gpus}, and each of {nodes} pods runs {world_size // nodes} ranks"
        raise JobError(problem, key="kubernetes.gpus", fix="Give every rank a GPU")
    return settings.model_copy(update={"nodes": nodes})


def _jobset(run: PodRun) -> Object:
    job = _job(run, backoff=0)
    ttl = job.pop("ttlSecondsAfterFinished")
    never = {"name": "neverAgain", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    replicated = {"name": REPLICATED, "replicas": 1, "template": {"spec": job}}
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": run.name, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": _without_limit(run), "rules": [never]},
        "replicatedJobs": [replicated],
        "ttlSecondsAfterFinished": ttl,
    }
    if run.settings.kueue_queue:
        spec["suspend"] = True
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _metadata(run), "spec": spec}


def _job_object(run: PodRun) -> Object:
    spec = _job(run, backoff=_without_limit(run))
    if run.settings.kueue_queue:
        spec["suspend"] = True
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(run), "spec": spec}


def _without_limit(run: PodRun) -> int:
    """Return the limit on pod restarts: unlimited if restarts are allowed, because pod 0 counts
    starts without progress and ends the run; else 0."""
    return MOST if run.settings.max_restarts else 0


def _job(run: PodRun, *, backoff: int) -> Object:
    statuses = {"containerName": CONTAINER, "operator": "In", "values": [DO_NOT_RETRY]}
    rules: list[Object] = [{"action": "FailJob", "onExitCodes": statuses}]
    if run.kind == "Job":  # a JobSet restarts all pods, and only if its Job fails
        disrupted = [{"type": "DisruptionTarget", "status": "True"}]
        rules.append({"action": "Ignore", "onPodConditions": disrupted})
    return {
        "completionMode": "Indexed",
        "completions": run.nodes,
        "parallelism": run.nodes,
        "backoffLimit": backoff,
        "podReplacementPolicy": "Failed",  # never two pods of one node rank at a time
        "podFailurePolicy": {"rules": rules},
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "ttlSecondsAfterFinished": run.settings.keep,
        "template": _pod(run),
    }


def _metadata(run: PodRun) -> Object:
    queue = {f"{KUEUE}/queue-name": run.settings.kueue_queue} if run.settings.kueue_queue else {}
    return {"name": run.name, "labels": {**run.pod.queued, **run.labels, **queue}}


def _pod(run: PodRun) -> Object:
    """Return the pods' template, with the user's own pod file merged in last."""
    one = run.settings
    volumes, mounts = _volumes(one.volumes)
    limits = dict(_pairs(one.resources)) | ({one.gpu_resource: str(one.gpus)} if one.gpus else {})
    container: Object = {
        "name": CONTAINER,
        "image": one.image,
        "command": command_of(programs.IN_CLUSTER, python=one.python),
        "env": _env(run),
        "ports": [{"name": "launcher", "containerPort": one.port}],
        "volumeMounts": [*mounts, {"name": "files", "mountPath": FILES, "readOnly": True},
                         {"name": "shm", "mountPath": "/dev/shm"}],
        "terminationMessagePath": ENDED,
    }  # fmt: skip
    if limits:
        container["resources"] = {"limits": limits, "requests": dict(limits)}
    spec: Object = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": one.grace,
        "enableServiceLinks": False,
        "tolerations": _tolerations(one),
        "containers": [container],
        "volumes": [*volumes, {"name": "files", "configMap": {"name": run.name}},
                    {"name": "shm", "emptyDir": {"medium": "Memory"}}],  # the default of 64 MiB is too small for NCCL
    }  # fmt: skip
    if run.kind == "Job":
        spec["subdomain"] = run.name
    if one.host_network:
        spec["hostNetwork"] = True
    if affinity := _affinity(run):
        spec["affinity"] = affinity
    for key, value in {
        "serviceAccountName": one.service_account,
        "priorityClassName": one.priority,
        "nodeSelector": dict(_pairs(one.node_labels)),
    }.items():
        if value:
            spec[key] = value
    metadata: Object = {
        "labels": {**run.pod.labels, **run.labels},
        "annotations": {FORCED: "true", **run.pod.annotations, **_kueue(run)},
    }
    spec = merged(spec, run.pod.spec)
    if spec.get("hostNetwork"):
        spec.setdefault("dnsPolicy", "ClusterFirstWithHostNet")  # else the agents would not find pod 0
    return {"metadata": metadata, "spec": spec}


def _affinity(run: PodRun) -> Object:
    """Return the pods' affinity. Pods prefer hosts of the rank table, and, if there are spare
    nodes, require these or the table's hosts; keep exclusive pods apart from other Plait runs. The
    order of pods on hosts is free, because node ranks follow the hosts. Kueue's topologies ignore
    anti-affinity, but requested GPUs also keep pods apart."""
    one, found = run.settings, Object()
    if one.exclusive and not (one.kueue_topology and one.gpus):
        ours = {"labelSelector": {"matchLabels": dict(MANAGED)}, "namespaceSelector": {}}  # of all namespaces
        apart = {**ours, "topologyKey": HOSTNAME}
        found["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}
    if run.table:

        def on(hosts: Sequence[str]) -> Object:
            names = [run.hostnames.get(host, host) for host in hosts]
            return {"matchExpressions": [{"key": HOSTNAME, "operator": "In", "values": names}]}

        wanted = [{"weight": 100, "preference": on(run.table.hosts)}]
        near: Object = {"preferredDuringSchedulingIgnoredDuringExecution": wanted}
        if one.spare_nodes:
            terms = {"nodeSelectorTerms": [on([*run.table.hosts, *one.spare_nodes])]}
            near["requiredDuringSchedulingIgnoredDuringExecution"] = terms
        found["nodeAffinity"] = near
    return found


def _env(run: PodRun) -> list[Object]:
    def of_the_pod(path: str) -> Object:
        return {"fieldRef": {"fieldPath": path}}

    ours: dict[str, Any] = gpus_variable(run.settings.gpus) | {
        "PLAIT_RUN": run.origin or run.name,
        "PLAIT_FILES": FILES,
        "PLAIT_ENDED": ENDED,
        "PLAIT_NODE": of_the_pod("spec.nodeName"),
        "PLAIT_POD_ADDRESS": of_the_pod("status.podIP"),
        "PLAIT_HOSTS": fold(run.table.hosts) if run.table else "",
        "PLAIT_BY_NODES": "1" if run.topology else "",
        "PLAIT_AGENT": {"secretKeyRef": {"name": run.name, "key": "agent"}},
    }
    users = [{"name": name, "value": value} for name, value in _pairs(run.settings.env)]
    return users + [
        {"name": name, "value": value} if isinstance(value, str) else {"name": name, "valueFrom": value}
        for name, value in ours.items()
    ]


def _tolerations(one: KubernetesSection) -> list[Object]:
    found: list[Object] = [
        {"key": f"node.kubernetes.io/{kind}", "operator": "Exists", "effect": "NoExecute",
         "tolerationSeconds": UNREACHABLE}
        for kind in ("not-ready", "unreachable")
    ]  # fmt: skip
    reserved = [f"{RESERVED_TAINT}={one.reservation}:NoSchedule"] if one.reservation else []
    for text in (*reserved, *one.tolerations):
        match = TAINT.fullmatch(text)
        assert match
        exists = {"operator": "Exists"} if match["value"] is None else {"operator": "Equal", "value": match["value"]}
        keyed = {"key": match["key"]} if match["key"] else {}
        effect = {"effect": match["effect"]} if match["effect"] else {}
        found.append({**keyed, **exists, **effect})
    return found


def _volumes(texts: Sequence[str]) -> tuple[list[Object], list[Object]]:
    """Return the volumes and their mounts. Raises JobError for a text that is no volume."""
    volumes: list[Object] = []
    mounts: list[Object] = []
    for number, text in enumerate(texts):
        match = VOLUME.fullmatch(text)
        if not match or (match["claim"] is None) == (match["path"] is None):
            fix = "Write CLAIM:/path in the pod, or /path on the node:/path in the pod"
            raise JobError(f"has '{text}'", key="kubernetes.volumes", fix=fix)
        name = f"volume-{number}"
        claim = {"persistentVolumeClaim": {"claimName": match["claim"]}}
        volumes.append({"name": name, **(claim if match["claim"] else {"hostPath": {"path": match["path"]}})})
        mounts.append({"name": name, "mountPath": match["mount"]})
    return volumes, mounts


def _pairs(texts: Sequence[str]) -> list[tuple[str, str]]:
    matches = [PAIR.fullmatch(text) for text in texts]
    return [(match["key"], match["value"]) for match in matches if match]


def _kueue(run: PodRun) -> dict[str, str]:
    one = run.settings
    if not one.kueue_topology:
        return {}
    mode, _, level = one.kueue_topology.partition(":")
    found = {f"{KUEUE}/podset-{mode}-topology": level or "true"}
    if one.kueue_stage_topology:
        if run.nodes % run.stages:
            problem = f"{run.nodes} pods do not divide into {run.stages} pipeline stages"
            raise JobError(problem, key="kubernetes.kueue_stage_topology", fix="Leave it out")
        found[f"{KUEUE}/podset-slice-required-topology"] = one.kueue_stage_topology
        found[f"{KUEUE}/podset-slice-size"] = str(run.nodes // run.stages)
    return found


def _files(run: PodRun) -> Object:
    said = {
        "argv": list(run.argv), "folder": str(run.folder), "world_size": run.world_size, "nodes": run.nodes,
        "name": run.name, "head": run.head, "port": run.settings.port, "wait": run.settings.wait,
        "timeout": run.timeout, "restarts": run.settings.max_restarts,
    }  # fmt: skip
    data = {"run.json": json.dumps(said, indent=1)} | ({RANK_TABLE: table_text(run.table)} if run.table else {})
    data |= {TOPOLOGY: run.topology} if run.topology else {}
    found: Object = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(run), "data": data}
    if run.plan:
        packed = base64.b64encode(gzip.compress(run.plan.encode(), mtime=0)).decode()
        found["binaryData"] = {"plan.json.gz": packed}
    if (size := len(json.dumps(found))) > MOST_BYTES:
        raise LaunchError(f"The plan and the rank table take {size} bytes, and a ConfigMap holds {MOST_BYTES}.")
    return found


def table_text(table: RankTable) -> str:
    """Return the rank table's JSON text, kept in the ConfigMap for users and their tools."""
    return json.dumps([{"host": host, "node_rank": node} for node, host in enumerate(table.hosts)], indent=1)


def _secret(run: PodRun) -> Object:
    agent = {"agent": f"{run.head}:{run.settings.port} {run.secret}"}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": _metadata(run), "type": "Opaque", "stringData": agent}


def _service(run: PodRun) -> Object:
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {RUN: run.name},
        "ports": [{"name": "launcher", "port": run.settings.port}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(run), "spec": spec}
