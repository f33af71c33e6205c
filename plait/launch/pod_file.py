"""The user's own YAML of a pod (``kubernetes.pod``), which is merged into the pods of a run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from plait.core.base.codec.yaml_text import load
from plait.core.base.errors import JobError, nearest
from plait.core.base.files import contents_within, reason_of
from plait.core.job.kubernetes_settings import LABEL, QUANTITY, VALUE

KEY = "kubernetes.pod"
LARGEST = 1 << 20
"""Bytes; the whole run has to fit into what etcd keeps of an object."""
WHOLE = ("apiVersion", "kind", "metadata", "spec")
OURS = ("plait.dev/", "batch.kubernetes.io/", "jobset.sigs.k8s.io/", "app.kubernetes.io/managed-by",
        "app.kubernetes.io/name")  # fmt: skip
"""How labels and annotations begin by which a run and its pods are known."""
QUEUE = "kueue.x-k8s.io/"
"""How labels begin that Kueue reads of the Job, and not of its pods."""
AMOUNTS = ("limits", "requests", "overhead", "capacity", "sizeLimit", "divisor")
"""Where the API takes a number for an amount, which is a text otherwise."""
NAMED = ("V1Container", "V1Volume", "V1EnvVar")
"""What is merged by name, and has to have one."""
_MANY = re.compile(r"(?i)list\[(.*)\]")
_TABLE = re.compile(r"(?i)dict[\[(]str, (.*)[\])]")
_PLAIN = {"str": (str,), "datetime": (str,), "bytes": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}
_NAMES = {"str": "a text", "datetime": "a text", "bytes": "a text", "int": "a whole number", "float": "a number",
          "bool": "true or false"}  # fmt: skip


@dataclass(frozen=True)
class PodFile:
    """spec: of the pods. labels, annotations: of the pods. queued: labels of the Job that Kueue reads."""

    spec: Mapping[str, Any] = field(default_factory=dict[str, Any])
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    annotations: Mapping[str, str] = field(default_factory=dict[str, str])
    queued: Mapping[str, str] = field(default_factory=dict[str, str])


def read_pod(file: str) -> PodFile:
    """A pod's spec, or a whole pod, in a YAML file.

    Known: every key of a pod's spec that the package kubernetes knows, ``metadata.labels`` and
    ``metadata.annotations``. Passed over: comments. Refused, as JobError that names the file and the key:
    other keys, values of another type, null, labels and annotations that are Plait's or another setting's.
    """
    try:
        return _checked(load(contents_within(file, LARGEST).decode()))
    except OSError as error:
        raise JobError(reason_of(error), file=file, key=KEY) from None
    except ValueError as error:  # of a size, or of bytes that are no text
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
    _refuse_others(pod, WHOLE, "")
    if pod.get("kind", "Pod") != "Pod" or pod.get("apiVersion", "v1") != "v1":
        raise JobError(f"is '{pod.get('apiVersion', 'v1')} {pod.get('kind', 'Pod')}'", key="kind", fix="Write a v1 Pod")
    _check(pod.get("spec", {}), "V1PodSpec", "spec")
    metadata = pod.get("metadata", {})
    _check(metadata, "V1ObjectMeta", "metadata")
    _refuse_others(metadata, ("labels", "annotations"), "metadata.")
    labels, annotations = metadata.get("labels", {}), metadata.get("annotations", {})
    for kind, texts in (("labels", labels), ("annotations", annotations)):
        for key, text in texts.items():
            _check_label(f"metadata.{kind}.{key}", key, text if kind == "labels" else "")
            if key.startswith(OURS):
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
    """Raise JobError for what the API does not take as a label, or as an annotation's key."""
    if not re.fullmatch(LABEL, key, re.ASCII):
        fix = "Write letters, digits, - . and _, 63 at most, after a domain and / if it needs one"
        raise JobError("is no name that Kubernetes takes", key=where, fix=fix)
    if not re.fullmatch(VALUE, value, re.ASCII):
        fix = "Write at most 63 letters, digits, - . and _, or make it an annotation"
        raise JobError(f"{_shown(value)} is no label that Kubernetes takes", key=where, fix=fix)


def _refuse_others(found: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    for key in found:
        if key not in known:
            fix = f"Allowed here: {', '.join(known)}"
            raise JobError("is not taken from this file, and would be lost", key=f"{where}{key}", fix=fix)


def _check(value: Any, kind: str, where: str) -> None:
    """Raise JobError unless a value is of a type that the client's models have, all the way down."""
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
