"""What an API server keeps: objects with versions, patches, and the rules for changing pods."""

from __future__ import annotations

import copy
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate

Object = dict[str, Any]
SCHEMAS = Path(__file__).parent / "schemas" / "kubernetes.json"
KINDS = {
    "pods": "Pod", "services": "Service", "configmaps": "ConfigMap", "secrets": "Secret", "jobs": "Job",
    "jobsets": "JobSet", "nodes": "Node", "serviceaccounts": "ServiceAccount", "roles": "Role",
    "rolebindings": "RoleBinding", "networkpolicies": "NetworkPolicy",
}  # fmt: skip


class Refusal(Exception):
    """An answer other than what was asked for."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@cache
def schema(kind: str) -> jsonschema.Draft202012Validator:
    """Kubernetes' own schema of a kind; keys that it does not know are refused."""
    whole = json.loads(SCHEMAS.read_text())
    return jsonschema.Draft202012Validator({"$ref": f"#/definitions/{whole['roots'][kind]}", **whole})


def check(body: Object) -> None:
    """Raises Refusal for what no server takes."""
    if body["kind"] not in json.loads(SCHEMAS.read_text())["roots"]:
        try:
            kubernetes_validate.validate(body, kubernetes_validate.latest_version(), strict=True)
        except kubernetes_validate.ValidationError as error:
            raise Refusal(422, f"{body['kind']} is invalid: {error.message}") from None
        return
    for error in schema(body["kind"]).iter_errors(body):
        raise Refusal(422, f"{body['kind']} is invalid: {error.json_path}: {error.message[:300]}")


def stamp() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class Store:
    """Objects by kind and name, of one namespace, and all that has happened to them."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.objects: dict[tuple[str, str], Object] = {}
        self.events: list[tuple[int, str, Object]] = []
        self.version = self.forgotten = 0
        self.counted: dict[str, Object] = {}
        """What the Job controller knows of each Job, by its uid."""
        self.removed = set[str]()
        """Objects, by their uids, that are gone as soon as they have no finalizers."""

    def of(self, kind: str, labels: str = "") -> list[Object]:
        with self.changed:
            return [one for (its, _), one in self.objects.items() if its == kind and matches(one, labels)]

    def get(self, kind: str, name: str) -> Object:
        if (kind, name) not in self.objects:
            raise Refusal(404, f'{kind.lower()}s "{name}" not found')
        return self.objects[kind, name]

    def create(self, body: Object) -> Object:
        with self.changed:
            body = copy.deepcopy(body)
            kind, name = body["kind"], body["metadata"]["name"]
            if (kind, name) in self.objects:
                raise Refusal(409, f'{kind.lower()}s "{name}" already exists')
            body["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": stamp(), "namespace": "ml"}
            self.objects[kind, name] = body
            self._happened("ADDED", body)
            return body

    def update(self, body: Object) -> None:
        """``body``, an object of ours, was changed in place."""
        with self.changed:
            key = body["kind"], body["metadata"]["name"]
            if self.objects.get(key) is body:
                self._happened("MODIFIED", body)

    def release(self, body: Object) -> None:
        """Take its finalizers away."""
        with self.changed:
            if body["metadata"].pop("finalizers", None):
                self.update(body)
            if body["metadata"]["uid"] in self.removed:
                self.remove(body)

    def patch(self, kind: str, name: str, changes: Any, *, status: bool = False) -> Object:
        """status: only that is changed, and otherwise everything but that."""
        with self.changed:
            old = self.get(kind, name)
            new = copy.deepcopy(old)
            if isinstance(changes, list):
                for one in changes:
                    _apply(new, one)
            else:
                _merge(new, changes)
            if new["metadata"].get("uid") != old["metadata"].get("uid"):
                raise Refusal(409, f"Precondition failed: UID in precondition: {new['metadata']['uid']}")
            if status:
                new = {**copy.deepcopy(old), "status": new.get("status", {})}
            elif "status" in old:
                new["status"] = old["status"]
            if new["metadata"].get("resourceVersion") != old["metadata"].get("resourceVersion"):
                raise Refusal(409, f"Operation cannot be fulfilled on {kind} {name}: the object has been modified")
            if kind == "Pod":
                _check_pod(name, old["spec"], new["spec"])
            if kind == "Job":
                _check_job(name, old, new)
            self.objects[kind, name] = new
            self._happened("MODIFIED", new)
            return new

    def remove(self, body: Object) -> None:
        """It is gone, or will be when its finalizers are
        (https://kubernetes.io/docs/concepts/overview/working-with-objects/finalizers/)."""
        with self.changed:
            if body["metadata"].get("finalizers"):
                if body["metadata"]["uid"] not in self.removed:
                    self.removed.add(body["metadata"]["uid"])
                    body["metadata"].setdefault("deletionTimestamp", stamp())
                    body["metadata"]["deletionGracePeriodSeconds"] = 0
                    self.update(body)
                return
            if self.objects.pop((body["kind"], body["metadata"]["name"]), None):
                self._happened("DELETED", body)

    def _happened(self, what: str, body: Object) -> None:
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        self.events.append((self.version, what, copy.deepcopy(body)))
        self.changed.notify_all()

    def compact(self) -> None:
        """Forget what has happened until now, as etcd does every five minutes."""
        with self.changed:
            self.forgotten = self.version

    def watch(self, kind: str, labels: str, version: int, wait: float, going: Callable[[], bool]) -> Iterator[Object]:
        """Events after ``version``; of one that is forgotten an error, after which the client lists
        anew (https://kubernetes.io/docs/reference/using-api/api-concepts/#410-gone-responses)."""
        place = 0
        if version < self.forgotten:
            gone = {"kind": "Status", "status": "Failure", "reason": "Expired", "code": 410,
                    "message": f"too old resource version: {version} ({self.forgotten})"}  # fmt: skip
            yield {"type": "ERROR", "object": gone}
            return
        while going():
            with self.changed:
                if place == len(self.events):
                    self.changed.wait(wait)
                new, place = self.events[place:], len(self.events)
            for at, what, body in new:
                if at > version and body["kind"] == kind and matches(body, labels):
                    yield {"type": what, "object": body}


def matches(body: Object, labels: str) -> bool:
    """Whether it has them: ``key=value``, or ``key`` of any value
    (https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#equality-based-requirement)."""
    its = body["metadata"].get("labels", {})
    pairs = [one.partition("=") for one in labels.split(",") if one]
    return all(key in its and (not equal or its[key] == value) for key, equal, value in pairs)


def _apply(body: Any, change: Object) -> None:
    """One operation of a JSON patch (RFC 6902)."""
    *above, last = [part.replace("~1", "/").replace("~0", "~") for part in change["path"].split("/")[1:]]
    for part in above:
        body = _below(body, part)
    if change["op"] == "test":
        if _below(body, last) != change["value"]:
            raise Refusal(422, f"the server rejected our request: testing path {change['path']} failed")
    elif change["op"] == "remove":
        _below(body, last)
        del body[int(last) if isinstance(body, list) else last]
    elif isinstance(body, list):
        body.insert(int(last), change["value"])
    else:
        body[last] = change["value"]


def _below(body: Any, part: str) -> Any:
    try:
        return body[int(part)] if isinstance(body, list) else body[part]
    except (KeyError, IndexError, ValueError):
        raise Refusal(422, f"the server rejected our request: there is no {part}") from None


def _merge(body: Object, changes: Object) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(body.get(key), dict):
            _merge(body[key], value)
        else:
            body[key] = value


FREE = "suspend", "parallelism", "ttlSecondsAfterFinished", "backoffLimit", "activeDeadlineSeconds"
"""What may be changed of a Job whenever."""
DIRECTIVES = "nodeSelector", "tolerations", "schedulingGates", "affinity"
"""And of its pods' spec, before the first of them was made (of the affinity that to nodes)."""


def _check_job(name: str, old: Object, new: Object) -> None:
    """What may be changed of a Job (ValidateJobUpdate in pkg/apis/batch/validation): of one that is
    suspended and has never been started also where its pods go, and what their labels and
    annotations are
    (https://kubernetes.io/docs/concepts/workloads/controllers/job/#mutable-scheduling-directives)."""
    before, after = ({**one["spec"], "template": one["spec"].get("template", {})} for one in (old, new))
    if before.get("suspend") and not old.get("status", {}).get("startTime"):
        before, after = ({**one, "template": _fixed(one["template"])} for one in (before, after))
    for key in sorted(before.keys() | after.keys()):
        if key not in FREE and before.get(key) != after.get(key):
            value = json.dumps(after.get(key))[:200]
            raise Refusal(422, f'Job.batch "{name}" is invalid: spec.{key}: Invalid value: {value}: field is immutable')


def _fixed(template: Object) -> Object:
    """What may not be changed of a template even then."""
    spec = {key: value for key, value in template.get("spec", {}).items() if key not in DIRECTIVES}
    near = template.get("spec", {}).get("affinity") or {}
    kept = {key: value for key, value in near.items() if key != "nodeAffinity"}
    metadata = template.get("metadata", {}).items()
    return {
        "metadata": {key: value for key, value in metadata if key not in ("labels", "annotations")},
        "spec": {**spec, "affinity": kept},
    }


def _check_pod(name: str, old: Object, new: Object) -> None:
    """What may be changed of a pod's spec (ValidatePodUpdate in pkg/apis/core/validation): gates
    may go; while there are any, the nodeSelector may grow; tolerations may be added, a deadline may
    be set or brought forward."""

    def refuse(why: str) -> Refusal:
        return Refusal(422, f'Pod "{name}" is invalid: spec{why}')

    changes = "pod updates may not change fields other than `spec.activeDeadlineSeconds`, `spec.tolerations`"
    before, after = old.get("nodeSelector", {}), new.get("nodeSelector", {})
    if before != after and not old.get("schedulingGates"):
        raise refuse(f": Forbidden: {changes}")
    if not before.items() <= after.items():
        value, why = json.dumps(after), "only additions to spec.nodeSelector are allowed (no mutations or deletions)"
        raise refuse(f".nodeSelector: Invalid value: {value}: {why}")
    known = {gate["name"] for gate in old.get("schedulingGates", [])}
    for place, gate in enumerate(new.get("schedulingGates", [])):
        if gate["name"] not in known:
            why = f"only deletion is allowed, but found new scheduling gate '{gate['name']}'"
            raise refuse(f".schedulingGates[{place}].name: Forbidden: {why}")
    if not all(one in new.get("tolerations", []) for one in old.get("tolerations", [])):
        why = "existing toleration can not be modified except its tolerationSeconds"
        raise refuse(f".tolerations: Forbidden: {why}")
    deadline, was = new.get("activeDeadlineSeconds"), old.get("activeDeadlineSeconds")
    if was is not None and (deadline is None or deadline > was):
        why = "must be less than or equal to previous value"
        why = why if deadline else "must not update from a positive integer to nil value"
        raise refuse(f".activeDeadlineSeconds: Invalid value: {json.dumps(deadline)}: {why}")
    free = "nodeSelector", "schedulingGates", "tolerations", "activeDeadlineSeconds"
    fixed = [{key: value for key, value in one.items() if key not in free} for one in (old, new)]
    if fixed[0] != fixed[1]:
        raise refuse(f": Forbidden: {changes}")
