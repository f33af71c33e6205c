"""The user's own pod YAML (``kubernetes.pod``): reading, checks of keys that Plait sets itself, and
the merge into a run's pods."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, cast

from plait.core.base.codec.yaml_text import load
from plait.core.base.errors import JobError, nearest
from plait.core.base.files import contents_within, reason_of
from plait.core.job.cluster_settings import LABEL, QUANTITY, VALUE, VOLUME, KubernetesSection

Object = dict[str, Any]
CONTAINER = "ranks"
"""The name of Plait's own container in a run's pods."""
FILES = "/etc/plait"
"""The folder with plan and rank table in a pod."""
HOSTNAME = "kubernetes.io/hostname"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
"""The key of required node affinity. Its terms are alternatives: another term lets pods go to more
nodes."""
RESERVED_VARIABLES = (
    "PLAIT_RUN", "PLAIT_FILES", "PLAIT_ENDED", "PLAIT_NODE", "PLAIT_POD_ADDRESS", "PLAIT_HOSTS", "PLAIT_BY_NODES",
    "PLAIT_AGENT", "PLAIT_GPUS", "PLAIT_ATTEMPT", "PLAIT_EPOCH", "PLAIT_LAUNCHER",
)  # fmt: skip
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
"""Refused keys of a pod's spec (``SPEC``) and of its container ``ranks`` (``RANKS``), with
advice."""
MERGED_BY = {"volumeMounts": "mountPath", "volumeDevices": "devicePath"}
"""The merge key of lists in which a name may occur several times."""


def check_reserved(settings: KubernetesSection) -> None:
    """Raise JobError for settings that contradict each other, or Plait's own parts of a pod."""
    for name in (one.partition("=")[0] for one in settings.env):
        if name in RESERVED_VARIABLES:
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
    """Raise JobError if a user's pod spec contradicts the run's needs. settings: with the number of
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
    for index, one in enumerate(spec.get("containers", [])):
        if one.get("name") == CONTAINER:
            _check_ranks(one, f"spec.containers[{index}]", settings)
    ours = {"files", "shm", *(f"volume-{number}" for number in range(len(settings.volumes)))}
    for index, one in enumerate(spec.get("volumes", [])):
        if one.get("name") in ours and not (one["name"] == "shm" and one.keys() <= {"name", "emptyDir"}):
            problem = f"'{one['name']}' is a volume of Plait's own"
            raise _error(problem, f"spec.volumes[{index}].name", settings, "Choose another name")


def _check_ranks(one: Mapping[str, Any], where: str, settings: KubernetesSection) -> None:
    """Raise JobError if the user's spec of Plait's own container contradicts the run's needs."""
    _refuse(one, RANKS, where, settings)
    for index, variable in enumerate(one.get("env", [])):
        if variable.get("name") in RESERVED_VARIABLES:
            problem = f"{variable['name']} is Plait's own"
            raise _error(problem, f"{where}.env[{index}].name", settings, "Leave it out")
    for kind in ("limits", "requests"):
        if settings.gpu_resource in one.get("resources", {}).get(kind, {}):
            key, fix = f"{where}.resources.{kind}.{settings.gpu_resource}", "Write kubernetes.gpus"
            raise _error("says how many GPUs a pod has, and ranks would not know", key, settings, fix)
    for index, mount in enumerate(one.get("volumeMounts", [])):
        if mount.get("mountPath") == FILES:
            raise _error(f"{FILES} has the run's plan", f"{where}.volumeMounts[{index}].mountPath", settings,
                         "Choose another path")  # fmt: skip


def _refuse(table: Mapping[str, Any], keys: Mapping[str, str], where: str, settings: KubernetesSection) -> None:
    same = {"restartPolicy": "Never", "terminationGracePeriodSeconds": settings.grace, "image": settings.image,
            "serviceAccountName": settings.service_account}  # fmt: skip
    for key, fix in keys.items():
        if key in table and table[key] != same.get(key):
            raise _error("is set by Plait", f"{where}.{key}", settings, fix)


def _error(problem: str, key: str, settings: KubernetesSection, fix: str) -> JobError:
    return JobError(problem, file=settings.pod, key=f"kubernetes.pod: {key}", fix=fix)


def merged(ours: Object, theirs: Mapping[str, Any]) -> Object:
    """Return both objects merged; ``theirs`` wins where they differ. Lists of named items are
    merged by name, or by the key in ``MERGED_BY``, as ``kubectl patch`` does; other lists are
    concatenated.

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
        index = next((i for i, old in enumerate(ours) if name(one) is not None and name(old) == name(one)), None)
        if index is None:
            found.append(one)
        else:
            found[index] = merged(found[index], one)
    return found


KEY = "kubernetes.pod"
LARGEST = 1 << 20
"""The largest pod file in bytes; the whole run must fit into one object of etcd."""
WHOLE = ("apiVersion", "kind", "metadata", "spec")
RESERVED_PREFIXES = ("plait.dev/", "batch.kubernetes.io/", "jobset.sigs.k8s.io/", "app.kubernetes.io/managed-by",
        "app.kubernetes.io/name")  # fmt: skip
"""Prefixes of the labels and annotations that identify a run and its pods."""
QUEUE = "kueue.x-k8s.io/"
"""The prefix of labels that Kueue reads from the Job, not from its pods."""
AMOUNTS = ("limits", "requests", "overhead", "capacity", "sizeLimit", "divisor")
"""Keys below which the API takes a number as a quantity, which is otherwise a text."""
NAMED = ("V1Container", "V1Volume", "V1EnvVar")
"""Types that are merged by name and therefore need one."""
_MANY = re.compile(r"(?i)list\[(.*)\]")
_TABLE = re.compile(r"(?i)dict[\[(]str, (.*)[\])]")
_PLAIN = {"str": (str,), "datetime": (str,), "bytes": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}
_NAMES = {"str": "a text", "datetime": "a text", "bytes": "a text", "int": "a whole number", "float": "a number",
          "bool": "true or false"}  # fmt: skip


@dataclass(frozen=True)
class PodFile:
    """The user's pod file. spec, labels, annotations: the pods'. queued: labels for the Job, read
    by Kueue."""

    spec: Mapping[str, Any] = field(default_factory=dict[str, Any])
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    annotations: Mapping[str, str] = field(default_factory=dict[str, str])
    queued: Mapping[str, str] = field(default_factory=dict[str, str])


def read_pod(file: str) -> PodFile:
    """Return the pod of a YAML file that has a pod's spec, or a whole pod.

    Accepted: every key of a pod's spec that the package kubernetes knows, ``metadata.labels`` and
    ``metadata.annotations``. Ignored: comments. Raises JobError naming file and key for other keys,
    wrong types, null, and labels and annotations that Plait or another setting sets.
    """
    try:
        return _checked(load(contents_within(file, LARGEST).decode()))
    except OSError as error:
        raise JobError(reason_of(error), file=file, key=KEY) from None
    except ValueError as error:  # too large, or no text
        raise JobError(f"cannot be read: {error}", file=file, key=KEY) from None
    except JobError as error:
        key = f"{KEY}: {error.key}" if error.key else KEY
        raise JobError(error.problem, file=file, key=key, fix=error.fix) from None


def _checked(found: Any) -> PodFile:
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in cast("dict[Any, Any]", found)):
        raise JobError("holds no pod", fix="Write a pod's spec, as kubectl takes it")
    pod = cast("dict[str, Any]", found)
    if not pod.keys() & set(WHOLE):
        pod = {"spec": pod}
    _refuse_unknown(pod, WHOLE, "")
    if pod.get("kind", "Pod") != "Pod" or pod.get("apiVersion", "v1") != "v1":
        raise JobError(f"is '{pod.get('apiVersion', 'v1')} {pod.get('kind', 'Pod')}'", key="kind", fix="Write a v1 Pod")
    _check(pod.get("spec", {}), "V1PodSpec", "spec")
    metadata = pod.get("metadata", {})
    _check(metadata, "V1ObjectMeta", "metadata")
    _refuse_unknown(metadata, ("labels", "annotations"), "metadata.")
    labels, annotations = metadata.get("labels", {}), metadata.get("annotations", {})
    for kind, texts in (("labels", labels), ("annotations", annotations)):
        for key, text in texts.items():
            _check_label(f"metadata.{kind}.{key}", key, text if kind == "labels" else "")
            if key.startswith(RESERVED_PREFIXES):
                raise JobError("is Plait's own", key=f"metadata.{kind}.{key}", fix="Leave it out")
    if f"{QUEUE}queue-name" in labels:
        fix = "Write kubernetes.kueue_queue, and leave it out here"
        raise JobError("says which queue", key=f"metadata.labels.{QUEUE}queue-name", fix=fix)
    if topology := next((key for key in annotations if key.startswith(f"{QUEUE}podset-")), ""):
        fix = "Write kubernetes.kueue_topology, and leave it out here"
        raise JobError("says where Kueue places pods", key=f"metadata.annotations.{topology}", fix=fix)
    if "nodeName" in pod.get("spec", {}):
        fix = "Leave it out; kubernetes.node_labels or a rank table say which nodes"
        raise JobError("binds every pod to one node, past queues and schedulers", key="spec.nodeName", fix=fix)
    queued = {key: value for key, value in labels.items() if key.startswith(QUEUE)}
    return PodFile(pod.get("spec", {}), {key: labels[key] for key in labels if key not in queued}, annotations, queued)


def _check_label(where: str, key: str, value: str) -> None:
    """Raise JobError for an invalid label, or an invalid key of an annotation."""
    if not re.fullmatch(LABEL, key, re.ASCII):
        fix = "Write letters, digits, - . and _, 63 at most, after a domain and / if it needs one"
        raise JobError("is no name that Kubernetes takes", key=where, fix=fix)
    if not re.fullmatch(VALUE, value, re.ASCII):
        fix = "Write at most 63 letters, digits, - . and _, or make it an annotation"
        raise JobError(f"{_shown(value)} is no label that Kubernetes takes", key=where, fix=fix)


def _refuse_unknown(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    for key in table:
        if key not in known:
            fix = f"Allowed here: {', '.join(known)}"
            raise JobError("is not taken from this file, and would be lost", key=f"{where}{key}", fix=fix)


def _check(value: Any, kind: str, where: str) -> None:
    """Raise JobError unless a value and all values below it have the types of the client's
    models."""
    from kubernetes import client

    if value is None:
        raise JobError("is null", key=where, fix="Give it a value, or leave it out")
    if kind == "object":
        return
    if many := _MANY.fullmatch(kind):
        if not isinstance(value, list):
            raise JobError(f"{_shown(value)} is no list", key=where, fix="Begin each of its items with a dash")
        for number, one in enumerate(cast("list[Any]", value)):
            _check(one, many[1], f"{where}[{number}]")
    elif kind in _PLAIN:
        _check_plain(value, kind, where)
    elif not isinstance(value, dict) or not all(isinstance(key, str) for key in cast("dict[Any, Any]", value)):
        raise JobError(f"{_shown(value)} is no table of keys and values", key=where, fix="Write KEY: VALUE lines")
    elif table := _TABLE.fullmatch(kind):
        for key, one in cast("dict[str, Any]", value).items():
            _check(one, table[1], f"{where}.{key}")
    else:
        model: Any = getattr(client, kind)
        types = {model.attribute_map[name]: its for name, its in model.openapi_types.items()}
        for key, one in cast("dict[str, Any]", value).items():
            if key not in types:
                fix = "Correct it; if it is new, install a newer package kubernetes"
                raise JobError(
                    f"is no key that Kubernetes has there{nearest(key, types)}", key=f"{where}.{key}", fix=fix
                )
            _check(one, types[key], f"{where}.{key}")
        if kind in NAMED and "name" not in cast("dict[str, Any]", value):
            raise JobError("has no name", key=where, fix="Give it one, by which it is merged with ours")


def _check_plain(value: Any, kind: str, where: str) -> None:
    allowed = _PLAIN[kind]
    if kind == "str" and set(re.split(r"[.\[]", where)) & set(AMOUNTS):
        allowed = (str, int, float)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        fix = "Put it in quotes" if allowed == (str,) and not isinstance(value, (list, dict)) else None
        raise JobError(f"{_shown(value)} is not {_NAMES[kind]}", key=where, fix=fix)
    if len(allowed) == 3 and kind == "str" and not re.fullmatch(QUANTITY, str(value)):
        raise JobError(f"{_shown(value)} is no amount", key=where, fix="Write such as 32, 500m, 200Gi or 1e3")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
