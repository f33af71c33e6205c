"""The user's own YAML of a pod: all of it gets into the pods, or is refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plait.core.base.errors import JobError
from plait.formats.kubernetes.pod_file import PodFile, read_pod

TIER = "unit"

WHOLE = """
apiVersion: v1
kind: Pod
metadata:
  labels: {team: ml, kueue.x-k8s.io/priority-class: high}
  annotations:
    k8s.v1.cni.cncf.io/networks: rdma-1,rdma-2
    scheduling.k8s.io/group-name: "7"
spec:
  hostNetwork: true
  containers:
  - name: ranks
    securityContext: {capabilities: {add: [IPC_LOCK]}}
    resources: {limits: {cpu: 8, rdma/hca: "4"}}
  volumes:
  - {name: scratch, emptyDir: {sizeLimit: 10}}
"""


def write(folder: Path, text: str | bytes) -> str:
    file = folder / "pod.yaml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(file)


def test_a_whole_pod_is_taken_with_its_labels_and_annotations(tmp_path: Path) -> None:
    found = read_pod(write(tmp_path, WHOLE))
    assert found.labels == {"team": "ml"}
    assert found.queued == {"kueue.x-k8s.io/priority-class": "high"}
    assert found.annotations["k8s.v1.cni.cncf.io/networks"] == "rdma-1,rdma-2"
    assert found.annotations["scheduling.k8s.io/group-name"] == "7"
    assert found.spec["hostNetwork"] is True
    assert found.spec["containers"][0]["resources"] == {"limits": {"cpu": 8, "rdma/hca": "4"}}


def test_a_spec_alone_and_metadata_alone_are_taken(tmp_path: Path) -> None:
    assert read_pod(write(tmp_path, "schedulerName: volcano\n")) == PodFile({"schedulerName": "volcano"})
    found = read_pod(write(tmp_path, "metadata: {annotations: {a/b: c}}\n"))
    assert (found.spec, found.annotations) == ({}, {"a/b": "c"})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("containers: 5", "kubernetes.pod: spec.containers: 5 is no list"),
        ("containers: [5]", r"spec.containers\[0\]: 5 is no table"),
        ("containers: null", "spec.containers: is null"),
        ("containers: [{name: ranks, env: {A: b}}]", r"spec.containers\[0\].env: .* is no list"),
        ("volumes: {name: a}", "spec.volumes: .* is no list"),
        ("affinity: []", "spec.affinity: .* is no table"),
        ("nodeSelector: {a: 1}", "spec.nodeSelector.a: 1 is not a text. Put it in quotes"),
        ("hostNetwork: 1", "spec.hostNetwork: 1 is not true or false"),
        ("priority: true", "spec.priority: True is not a whole number"),
        ("priority: 1.5", "spec.priority: 1.5 is not a whole number"),
        ("priorityClassName: [a]", "spec.priorityClassName: .* is not a text"),
        ("hostnetwork: true", r"spec.hostnetwork: is no key that Kubernetes has there \(did you mean 'hostNetwork'"),
        (
            "containers: [{name: ranks, imagePullPolices: Always}]",
            r"\[0\].imagePullPolices: is no key .*imagePullPolicy",
        ),
        ("spec: {}\nstatus: {}", "status: is not taken from this file, and would be lost"),
        ("spec: {}\ncontainers: []", "containers: is not taken from this file"),
        ("metadata: {name: mine}", "metadata.name: is not taken from this file, and would be lost"),
        ("metadata: {namespace: mine}", "metadata.namespace: is not taken"),
        ("metadata: {labels: {a: 5}}", "metadata.labels.a: 5 is not a text"),
        ("metadata: 5", "metadata: 5 is no table"),
        ("metadata: {labels: {plait.dev/run: x}}", "metadata.labels.plait.dev/run: is Plait's own"),
        ("metadata: {annotations: {plait.dev/hosts: x}}", "metadata.annotations.plait.dev/hosts: is Plait's own"),
        ("metadata: {labels: {app.kubernetes.io/managed-by: x}}", "is Plait's own"),
        (
            "metadata: {labels: {kueue.x-k8s.io/queue-name: q}}",
            "queue-name: says which queue. Write kubernetes.kueue_queue",
        ),
        (
            "metadata: {annotations: {kueue.x-k8s.io/podset-required-topology: rack}}",
            "podset-required-topology: says where Kueue places pods. Write kubernetes.kueue_topology",
        ),
        ("nodeName: n1", "spec.nodeName: binds every pod to one node, past queues and schedulers. Leave it out"),
        ("kind: Deployment\nspec: {}", "kind: is 'v1 Deployment'"),
        ("spec: 5", "spec: 5 is no table"),
        ("[" * 60_000, "nested too deeply"),
        ("a: " + "1" * 5_000, "not valid YAML"),
        ("activeDeadlineSeconds: 2026-13-45", "spec.activeDeadlineSeconds: '2026-13-45' is not a whole number"),
        ("&a [*a]", "aliases"),
        ("hostNetwork: true\nhostNetwork: false", "a key occurs twice"),
        ("", "holds no pod"),
        ("5", "holds no pod"),
        ("- a", "holds no pod"),
        ("1: 2", "holds no pod"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"a: 1\n" * 300_000, "at most 1048576 are read"),
    ],
    ids=range(38),
)
def test_what_would_be_lost_or_break_later_is_refused_by_name(tmp_path: Path, text: str | bytes, says: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(JobError, match=says) as caught:
        read_pod(file)
    assert str(caught.value).startswith(f"{file}: kubernetes.pod")
    assert len(str(caught.value)) < 500 + len(file)


def test_what_is_no_file_is_one_sentence(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, says in ((tmp_path / "none", "No such file"), (tmp_path, "directory"), (tmp_path / "pipe", "pipe"),
                       (Path("/dev/zero"), "device")):  # fmt: skip
        with pytest.raises(JobError, match=says):
            read_pod(str(path))


def test_what_the_api_leaves_open_may_hold_anything_but_is_not_taken_all_the_same(tmp_path: Path) -> None:
    told = "metadata: {managedFields: [{fieldsV1: {a: [1, {b: true}]}}]}"
    with pytest.raises(JobError, match=r"metadata\.managedFields: is not taken from this file"):
        read_pod(write(tmp_path, told))
    with pytest.raises(JobError, match=r"metadata\.managedFields\[0\]\.fieldsV1: is null"):
        read_pod(write(tmp_path, "metadata: {managedFields: [{fieldsV1: null}]}"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("apiVersion: v2\nspec: {}", "kind: is 'v2 Pod'. Write a v1 Pod"),
        ("kind: Pod\nspec: {}", ""),
        ("apiVersion: v1\nspec: {}", ""),
        ("priority: 5", ""),
        ("containers: [{name: a, readinessProbe: {periodSeconds: '5'}}]", "periodSeconds: '5' is not a whole number"),
        ("containers: [{name: a, resources: {limits: {cpu: 1.5, memory: 1Gi}}}]", ""),
        ("containers: [{name: a, resources: {limits: {cpu: true}}}]", "limits.cpu: True is not a text"),
        ("containers: [{name: a, resources: {limits: {cpu: [1]}}}]", r"limits.cpu: \[1\] is not a text"),
        ("containers: [{name: 5}]", r"containers\[0\].name: 5 is not a text. Put it in quotes"),
        ("containers: [{name: {a: 1}}]", r"containers\[0\].name: \{'a': 1\} is not a text\.$"),
        ("overhead: {cpu: 2}", ""),
        ("nodeSelector: {" + "a" * 70 + ": [" + ", ".join(["1"] * 40) + "]}", r"is not a text"),
        ("metadata: {labels: {batch.kubernetes.io/x: y}}", "is Plait's own. Leave it out"),
        ("metadata: {labels: {jobset.sigs.k8s.io/x: y}}", "is Plait's own"),
        ("metadata: {labels: {app.kubernetes.io/name: y}}", "is Plait's own"),
        ("metadata: {labels: {app.kubernetes.io/part-of: y}}", ""),
        ("metadata: {annotations: {kueue.x-k8s.io/queue-name: y}}", ""),
    ],
)
def test_values_are_of_the_types_that_kubernetes_has(tmp_path: Path, text: str, says: str) -> None:
    file = write(tmp_path, text)
    if not says:
        read_pod(file)
        return
    with pytest.raises(JobError, match=says) as caught:
        read_pod(file)
    assert len(str(caught.value)) < 500 + len(file)
