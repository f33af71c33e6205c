"""The user's own of a pod merged into a run's, and what of a pod only Plait may say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, cast

from plait.core.base.errors import JobError
from plait.core.job.kubernetes_settings import VOLUME, KubernetesSection

Object = dict[str, Any]
CONTAINER = "ranks"
"""The container of a run's pods that is ours."""
FILES = "/etc/plait"
"""Where pods have the plan and the rank table."""
HOSTNAME = "kubernetes.io/hostname"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
"""Its terms are alternatives: one more lets pods go to more nodes."""
OURS = ("PLAIT_RUN", "PLAIT_FILES", "PLAIT_ENDED", "PLAIT_NODE", "PLAIT_POD_ADDRESS", "PLAIT_HOSTS", "PLAIT_BY_NODES",
        "PLAIT_AGENT", "PLAIT_GPUS", "PLAIT_ATTEMPT", "PLAIT_EPOCH", "PLAIT_LAUNCHER")  # fmt: skip
"""Variables by which ranks and their launcher find each other."""
SPEC: Mapping[str, str] = {
    "restartPolicy": "Leave it out; kubernetes.max_restarts says how often ranks are started again",
    "terminationGracePeriodSeconds": "Write kubernetes.grace",
    "serviceAccountName": "Write kubernetes.service_account",
    "serviceAccount": "Write kubernetes.service_account",
    "hostname": "Leave it out; pods find each other by their names",
    "subdomain": "Leave it out; pods find each other by their names",
}
RANKS: Mapping[str, str] = {
    "command": "Leave it out; kubernetes.python says which Python runs",
    "args": "Leave it out; kubernetes.python says which Python runs",
    "image": "Write kubernetes.image",
    "terminationMessagePath": "Leave it out; the run's last words are there",
    "terminationMessagePolicy": "Leave it out; the run's last words are in a file",
}
"""Keys of a pod's spec, and of its container ``ranks``, that are refused, and what to do."""
MERGED_BY = {"volumeMounts": "mountPath", "volumeDevices": "devicePath"}
"""Lists in which one name may stand several times, against what tells their items apart."""


def check_own(settings: KubernetesSection) -> None:
    """Raise JobError for settings that contradict each other, or what every pod of a run has."""
    for name in (one.partition("=")[0] for one in settings.env):
        if name in OURS:
            raise JobError(f"has {name}, which is Plait's own", key="kubernetes.env", fix="Leave it out")
    if settings.gpu_resource in (one.partition("=")[0] for one in settings.resources):
        fix = "Write kubernetes.gpus, by which ranks know of them"
        raise JobError(f"has {settings.gpu_resource}", key="kubernetes.resources", fix=fix)
    _check_mounts(settings)


def _check_mounts(settings: KubernetesSection) -> None:
    taken = {FILES: "has the run's plan", "/dev/shm": "is the pods' shared memory"}
    for one in settings.volumes:
        match = VOLUME.fullmatch(one)
        mount = str(PurePosixPath(match["mount"])) if match else ""
        if mount in taken:
            fix = "Choose another path in the pod"
            raise JobError(f"has '{one}', and {mount} {taken[mount]}", key="kubernetes.volumes", fix=fix)
        if match and ".." in PurePosixPath(match["path"] or "/").parts:
            raise JobError(f"has '{one}', and Kubernetes takes no '..' there", key="kubernetes.volumes",
                           fix="Write the path that is meant")  # fmt: skip
        taken[mount] = f"has '{one}' already"


def check_pod(settings: KubernetesSection, spec: Mapping[str, Any]) -> None:
    """Raise JobError for what a user's spec says otherwise than a run needs it. settings: with the number of
    nodes."""
    _refuse(spec, SPEC, "spec", settings)
    if settings.spare_nodes and REQUIRED in spec.get("affinity", {}).get("nodeAffinity", {}):
        problem = "would let pods go elsewhere than to the rank table's hosts and kubernetes.spare_nodes"
        key, fix = f"spec.affinity.nodeAffinity.{REQUIRED}", "Write kubernetes.node_labels, or leave one of the two out"
        raise _error(problem, key, settings, fix)
    if settings.nodes > 1 and HOSTNAME in spec.get("nodeSelector", {}):
        problem = f"would have all {settings.nodes} pods on one node"
        fix = "Leave it out; a rank table says which nodes"
        raise _error(problem, f"spec.nodeSelector.{HOSTNAME}", settings, fix)
    for place, one in enumerate(spec.get("containers", [])):
        if one.get("name") == CONTAINER:
            _check_ranks(one, f"spec.containers[{place}]", settings)
    ours = {"files", "shm", *(f"volume-{number}" for number in range(len(settings.volumes)))}
    for place, one in enumerate(spec.get("volumes", [])):
        if one.get("name") in ours and not (one["name"] == "shm" and one.keys() <= {"name", "emptyDir"}):
            problem = f"'{one['name']}' is a volume of Plait's own"
            raise _error(problem, f"spec.volumes[{place}].name", settings, "Choose another name")


def _check_ranks(one: Mapping[str, Any], where: str, settings: KubernetesSection) -> None:
    """The same of the container that is ours."""
    _refuse(one, RANKS, where, settings)
    for place, variable in enumerate(one.get("env", [])):
        if variable.get("name") in OURS:
            problem = f"{variable['name']} is Plait's own"
            raise _error(problem, f"{where}.env[{place}].name", settings, "Leave it out")
    for kind in ("limits", "requests"):
        if settings.gpu_resource in one.get("resources", {}).get(kind, {}):
            key, fix = f"{where}.resources.{kind}.{settings.gpu_resource}", "Write kubernetes.gpus"
            raise _error("says how many GPUs a pod has, and ranks would not know", key, settings, fix)
    for place, mount in enumerate(one.get("volumeMounts", [])):
        if mount.get("mountPath") == FILES:
            raise _error(f"{FILES} has the run's plan", f"{where}.volumeMounts[{place}].mountPath", settings,
                         "Choose another path")  # fmt: skip


def _refuse(found: Mapping[str, Any], keys: Mapping[str, str], where: str, settings: KubernetesSection) -> None:
    same = {"restartPolicy": "Never", "terminationGracePeriodSeconds": settings.grace, "image": settings.image,
            "serviceAccountName": settings.service_account}  # fmt: skip
    for key, fix in keys.items():
        if key in found and found[key] != same.get(key):
            raise _error("is for Plait to say", f"{where}.{key}", settings, fix)


def _error(problem: str, key: str, settings: KubernetesSection, fix: str) -> JobError:
    return JobError(problem, file=settings.pod, key=f"kubernetes.pod: {key}", fix=fix)


def merged(ours: Object, theirs: Mapping[str, Any]) -> Object:
    """Both, theirs where they differ. Lists of things with names are merged by name (``MERGED_BY`` has those
    that go by another key, as for ``kubectl patch``), other lists joined.

    >>> merged({"a": [{"name": "x", "v": 1}], "b": [1]}, {"a": [{"name": "x", "v": 2}], "b": [2]})
    {'a': [{'name': 'x', 'v': 2}], 'b': [1, 2]}
    """
    found = dict(ours)
    for key, value in theirs.items():
        old = found.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            found[key] = merged(cast("Object", old), cast("Object", value))
        elif isinstance(old, list) and isinstance(value, list):
            found[key] = _joined(cast("list[Any]", old), cast("list[Any]", value), MERGED_BY.get(key, "name"))
        else:
            found[key] = value
    return found


def _joined(ours: list[Any], theirs: list[Any], key: str) -> list[Any]:
    def name(one: Any) -> str | None:
        return cast("Object", one).get(key) if isinstance(one, dict) else None

    found = list(ours)
    for one in theirs:
        place = next((i for i, old in enumerate(ours) if name(one) is not None and name(old) == name(one)), None)
        if place is None:
            found.append(one)
        else:
            found[place] = merged(found[place], one)
    return found
