"""Who may do what about a run in a cluster: the rights of its pods, and who may connect to them."""

from __future__ import annotations

from plait.launch.kubernetes_manifests import RUN, Object, PodRun

RBAC = "rbac.authorization.k8s.io"


def access(run: PodRun, namespace: str) -> list[Object]:
    """A service account whose pods may give up pods of lost nodes (``kubernetes_guard``), and a
    network in which pods of the run hear each other alone. The account is the user's, if the run has one."""
    account, made = run.settings.service_account or run.name, list[Object]()
    if not run.settings.service_account:
        made.append({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _metadata(run)})
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "delete"]},
        {"apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"]},
    ]
    role = {"apiGroup": RBAC, "kind": "Role", "name": run.name}
    subject = {"kind": "ServiceAccount", "name": account, "namespace": namespace}
    own = {"matchLabels": {RUN: run.name}}
    return [
        *made,
        {"apiVersion": f"{RBAC}/v1", "kind": "Role", "metadata": _metadata(run), "rules": rules},
        {"apiVersion": f"{RBAC}/v1", "kind": "RoleBinding", "metadata": _metadata(run), "roleRef": role,
         "subjects": [subject]},
        {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": _metadata(run),
         "spec": {"podSelector": own, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": own}]}]}},
    ]  # fmt: skip


def _metadata(run: PodRun) -> Object:
    return {"name": run.name, "labels": run.labels}
