"""What of a pod only Plait may say, and what the API would not take, is refused by key before it is
sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.api.places.kubernetes import KubernetesTarget
from plait.core.base.errors import JobError
from plait.core.job.cluster_settings import KubernetesSection
from plait.core.job.spec import Job
from plait.core.topology.rank_table import RankTable
from plait.formats.kubernetes.manifests import merged, with_node_count
from plait.formats.kubernetes.pod_file import check_pod, read_pod
from tests.formats.kubernetes.test_manifests import pod_of, run
from tests.formats.kubernetes.test_pod_file import write

TIER = "unit"


def ask(**values: Any) -> KubernetesSection:
    return with_node_count(KubernetesSection.model_validate({"image": "registry/plait:1"} | values), 4, None)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"reservation": "big run"}, "reservation: has 'big run'"),
        ({"reservation": "x" * 64}, "reservation: has 'xxx"),
        ({"tolerations": ["=v:NoSchedule"]}, "tolerations: has '=v:NoSchedule'"),
        ({"node_labels": ["a=b c"]}, "node_labels: has 'a=b c'"),
        ({"node_labels": ["a=b", "a=c"]}, "node_labels: contains a twice"),
        ({"resources": ["cpu=lots"]}, "resources: has 'cpu=lots'"),
        ({"resources": ["cpu="]}, "resources: has 'cpu='"),
        ({"resources": ["rdma/hca=1.5"]}, "resources: has 'rdma/hca=1.5'. .* whole numbers"),
        ({"resources": ["cpu=1", "cpu=2"]}, "resources: contains cpu twice"),
        ({"resources": ["nvidia.com/gpu=8"]}, "resources: has nvidia.com/gpu. Write kubernetes.gpus"),
        ({"gpu_resource": "amd.com/gpu", "resources": ["amd.com/gpu=8"]}, "resources: has amd.com/gpu"),
        ({"gpu_resource": "gpu"}, "gpu_resource: has 'gpu'"),
        ({"env": ["A=1", "A=2"]}, "env: contains A twice"),
        ({"env": ["PLAIT_RUN=x"]}, "env: has PLAIT_RUN, which is Plait's own"),
        ({"env": ["1/A=x"]}, "env: has '1/A=x'"),
        ({"volumes": ["a:/data", "b:/data/"]}, "volumes: has 'b:/data/', and /data has 'a:/data' already"),
        ({"volumes": ["a:/etc/plait"]}, "volumes: .* /etc/plait has the run's plan"),
        ({"volumes": ["a:/dev/shm"]}, "volumes: .* /dev/shm is the pods' shared memory"),
        ({"volumes": ["/mnt/../x:/data"]}, r"volumes: .* no '\.\.' there"),
        ({"spare_nodes": ["n9"]}, "spare_nodes: are nodes beside those of a rank table, and there is none"),
        ({"namespace": "team_a"}, "namespace: has 'team_a'"),
        ({"service_account": "Me"}, "service_account: has 'Me'"),
        ({"priority": "UP"}, "priority: has 'UP'"),
        ({"kueue_queue": "my queue"}, "kueue_queue: has 'my queue'"),
        ({"kueue_topology": "required:a/b/c"}, "kueue_topology: has 'required:a/b/c'"),
        ({"image": "a b"}, "image: has 'a b'"),
        ({"python": "python3 -X dev"}, "python: has 'python3 -X dev'"),
    ],
)
def test_settings_that_the_api_would_not_take_are_refused_by_key(values: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError, match=f"^kubernetes.{says}"):
        ask(**values)


def test_what_the_api_takes_is_taken() -> None:
    resources = ["cpu=1.5", "memory=1e3", "ephemeral-storage=.5Gi", "hugepages-2Mi=100Mi", "rdma/hca=8", "a.b/c=4k"]
    tolerations = ["", ":NoExecute", "a.b/c=:NoSchedule", "spot"]
    labels = ["a.b/c=", "node.kubernetes.io/instance-type=p5.48xlarge", "n=1"]
    assert ask(resources=resources, tolerations=tolerations, node_labels=labels, env=["A=b=c $(B)", "a.b-c="],
               reservation="r_1.2", image="r.io:5000/a/b@sha256:0", kueue_topology="preferred:a.b/c")  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("restartPolicy: OnFailure", "spec.restartPolicy: is set by Plait"),
        ("terminationGracePeriodSeconds: 5", "spec.terminationGracePeriodSeconds: .* Write kubernetes.grace"),
        ("serviceAccountName: b", "spec.serviceAccountName: .* Write kubernetes.service_account"),
        ("subdomain: other", "spec.subdomain: is set by Plait"),
        ("nodeSelector: {kubernetes.io/hostname: n1}", "would have all 4 pods on one node"),
        ("volumes: [{name: volume-0, emptyDir: {}}]", "'volume-0' is a volume of Plait's own. Choose another name"),
        ("volumes: [{name: shm, hostPath: {path: /x}}]", "'shm' is a volume of Plait's own"),
        ("volumes: [{emptyDir: {}}]", r"spec.volumes\[0\]: has no name"),
        ("containers: [{image: x}]", r"spec.containers\[0\]: has no name"),
        ("containers: [{name: ranks, command: [sleep]}]", r"containers\[0\].command: .* kubernetes.python"),
        ("containers: [{name: ranks, image: other}]", r"containers\[0\].image: .* Write kubernetes.image"),
        ("containers: [{name: ranks, env: [{name: PLAIT_NODE, value: x}]}]", r"env\[0\].name: PLAIT_NODE is Plait's"),
        (
            "containers: [{name: ranks, resources: {limits: {nvidia.com/gpu: 8}}}]",
            "limits.nvidia.com/gpu: .* Write kubernetes.gpus",
        ),
        ("containers: [{name: ranks, volumeMounts: [{name: a, mountPath: /etc/plait}]}]", "has the run's plan"),
        ("containers: [{name: ranks, resources: {limits: {cpu: lots}}}]", "limits.cpu: 'lots' is no amount"),
        ("metadata: {labels: {bad key: x}}", "metadata.labels.bad key: is no name that Kubernetes takes"),
        ("metadata: {annotations: {a/b/c: x}}", "metadata.annotations.a/b/c: is no name that Kubernetes takes"),
        (f"metadata: {{labels: {{a: {'x' * 64}}}}}", "metadata.labels.a: .* is no label that Kubernetes takes"),
    ],
)
def test_a_pod_says_nothing_otherwise_than_its_run_needs_it(text: str, says: str, tmp_path: Path) -> None:
    file = write(tmp_path, text)
    with pytest.raises(JobError, match=rf"pod\.yaml: kubernetes\.pod: .*{says}"):
        check_pod(ask(volumes=["a:/data"], pod=file), read_pod(file).spec)


def test_spare_nodes_are_not_widened_by_terms_that_are_alternatives(tmp_path: Path) -> None:
    terms = "{nodeSelectorTerms: [{matchExpressions: [{key: a, operator: In, values: [b]}]}]}"
    text = f"affinity: {{nodeAffinity: {{requiredDuringSchedulingIgnoredDuringExecution: {terms}}}}}"
    file, table = write(tmp_path, text), RankTable(("n1", "n2"), 2)
    one = KubernetesSection.model_validate({"image": "a", "pod": file, "spare_nodes": ["n3"]})
    with pytest.raises(JobError, match=r"spec\.affinity\.nodeAffinity\..* Write kubernetes.node_labels"):
        check_pod(with_node_count(one, 4, table), read_pod(file).spec)
    check_pod(with_node_count(one.model_copy(update={"spare_nodes": ()}), 4, table), read_pod(file).spec)


@pytest.mark.parametrize(
    "text",
    [
        "restartPolicy: Never\nterminationGracePeriodSeconds: 120",
        "nodeSelector: {pool: gpu}\nvolumes: [{name: shm, emptyDir: {sizeLimit: 1e3}}, {name: own, emptyDir: {}}]",
        "containers: [{name: ranks, image: 'registry/plait:1'}, {name: side, image: x, command: [sleep], args: [a]}]",
        "containers: [{name: ranks, resources: {limits: {cpu: '1e3', memory: 1.5Gi, a/b: 4}}}]",
        "metadata: {labels: {a.b/c: '', d: e}, annotations: {f: any thing}}",
    ],
)
def test_all_else_of_a_pod_is_merged(text: str, tmp_path: Path) -> None:
    file = write(tmp_path, text)
    check_pod(ask(volumes=["a:/data"], pod=file), read_pod(file).spec)


def test_one_volume_is_mounted_in_two_places() -> None:
    """As ``kubectl patch`` tells mounts apart: one of the two was lost without a word."""
    own = [{"name": "own", "mountPath": "/a", "subPath": "a"}, {"name": "own", "mountPath": "/b", "subPath": "b"},
           {"name": "volume-0", "mountPath": "/c"}, {"name": "own", "mountPath": "/dev/shm"}]  # fmt: skip
    found = merged(pod_of(run(volumes=("claim:/data",))), {"containers": [{"name": "ranks", "volumeMounts": own}]})
    mounts = {one["mountPath"]: one["name"] for one in found["containers"][0]["volumeMounts"]}
    assert mounts == {"/data": "volume-0", "/etc/plait": "files", "/a": "own", "/b": "own", "/c": "volume-0",
                      "/dev/shm": "own"}  # fmt: skip


def test_pods_on_their_nodes_network_find_each_other_by_the_clusters_names(tmp_path: Path) -> None:
    policy = "ClusterFirstWithHostNet"
    own = read_pod(write(tmp_path, "hostNetwork: true"))
    assert pod_of(run(host_network=True))["dnsPolicy"] == pod_of(run(pod=own))["dnsPolicy"] == policy
    own = read_pod(write(tmp_path, "hostNetwork: true\ndnsPolicy: Default"))
    assert pod_of(run(pod=own))["dnsPolicy"] == "Default"
    assert "dnsPolicy" not in pod_of(run())


def test_ranks_that_are_planned_for_gpus_have_some_in_their_pods(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[model]\nfamily = 'gpt'\nnum_layers = 2\nhidden = 8\nnum_heads = 2\nmax_sequence = 32\n"
                    "[data]\nsequence_length = 32\n[run]\nfolder = '/data/runs'\ndevice = 'cuda'\n"
                    "[kubernetes]\nimage = 'a'\nworkload = 'job'\nvolumes = ['a:/data']\n")  # fmt: skip
    with pytest.raises(JobError, match=r"^kubernetes.gpus: is 0, and run.device = 'cuda' plans ranks for GPUs"):
        KubernetesTarget().preview(Job.read(file), Path("/data/runs/a"))
    _, text = KubernetesTarget().preview(Job.read(file, ["kubernetes.gpus=1"]), Path("/data/runs/a"))
    assert "nvidia.com/gpu: '1'" in text
    with pytest.raises(JobError, match=r"^--on kubernetes: has 'team_a'"):
        KubernetesTarget(namespace="team_a").preview(Job.read(file), Path("/data/runs/a"))
