"""What an API server says of itself: its groups, their kinds, and that it checks fields, as kubectl
asks before it sends anything (https://kubernetes.io/docs/concepts/overview/kubernetes-api/)."""

from __future__ import annotations

from typing import Any, NamedTuple


class Resource(NamedTuple):
    group: str
    version: str
    plural: str
    kind: str

    @property
    def root(self) -> str:
        return f"apis/{self.group}/{self.version}" if self.group else f"api/{self.version}"


RESOURCES = (
    Resource("", "v1", "pods", "Pod"), Resource("", "v1", "services", "Service"),
    Resource("", "v1", "configmaps", "ConfigMap"), Resource("", "v1", "secrets", "Secret"),
    Resource("", "v1", "nodes", "Node"), Resource("", "v1", "serviceaccounts", "ServiceAccount"),
    Resource("batch", "v1", "jobs", "Job"), Resource("rbac.authorization.k8s.io", "v1", "roles", "Role"),
    Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding"),
    Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"),
    Resource("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet"),
)  # fmt: skip


def answer(path: str, *, jobset: bool) -> dict[str, Any] | None:
    """What is said at a path; None where it is none of these."""
    known = [one for one in RESOURCES if jobset or one.kind != "JobSet"]
    at = path.strip("/")
    if at == "version":
        return {"major": "1", "minor": "37", "gitVersion": "v1.37.0"}
    if at == "api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if at == "apis":
        groups = sorted({(one.group, one.version) for one in known if one.group})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(*one) for one in groups]}
    if at == "openapi/v3":
        roots = {one.root for one in known}
        return {"paths": {root: {"serverRelativeURL": f"/openapi/v3/{root}?hash=1"} for root in roots}}
    if at.startswith("openapi/v3/"):
        own = [one for one in known if one.root == at.removeprefix("openapi/v3/")]
        return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "v1.37.0"},
                "paths": dict(map(_operation, own))}  # fmt: skip
    own = [one for one in known if one.root == at]
    if not own:
        return None
    verbs = ["create", "delete", "get", "list", "patch", "watch"]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": at.partition("/")[2], "resources": [
        {"name": one.plural, "singularName": one.kind.lower(), "namespaced": one.kind != "Node", "kind": one.kind,
         "verbs": verbs} for one in own]}  # fmt: skip


def _group(group: str, version: str) -> dict[str, Any]:
    one = {"groupVersion": f"{group}/{version}", "version": version}
    return {"name": group, "versions": [one], "preferredVersion": one}


def _operation(one: Resource) -> tuple[str, dict[str, Any]]:
    """By which kubectl knows that the server refuses fields that it does not know."""
    field = {"name": "fieldValidation", "in": "query", "schema": {"type": "string", "uniqueItems": True}}
    what = {"group": one.group, "kind": one.kind, "version": one.version}
    patch = {"parameters": [field], "x-kubernetes-group-version-kind": what, "responses": {}}
    return f"/{one.root}/namespaces/{{namespace}}/{one.plural}/{{name}}", {"patch": patch}
