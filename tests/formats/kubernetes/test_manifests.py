"""Runs as Kubernetes' objects: as the official schemas have them, and as the user has asked."""

from __future__ import annotations

import gzip
import itertools
import json
from base64 import b64decode
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import JobError, LaunchError
from plait.core.job.cluster_settings import KubernetesSection
from plait.core.job.spec import Job
from plait.core.topology.rank_table import RankTable
from plait.formats.kubernetes.manifests import HOSTNAME, MOST, PodRun, with_node_count
from plait.formats.kubernetes.pod_file import PodFile
from plait.launch.kubernetes.follow import new_name
from plait.launch.run_folder import DO_NOT_RETRY
from tests.support.kubernetes.objects import schema

TIER = "unit"

TABLE = RankTable(("n3", "n1"), ranks_per_node=2)
FULL: dict[str, Any] = {
    "gpus": 2,
    "resources": ("cpu=32", "memory=200Gi", "rdma/hca=8"),
    "volumes": ("data-claim:/data", "/mnt/shared:/shared"),
    "env": ("NCCL_DEBUG=INFO", "EMPTY="),
    "service_account": "trainer",
    "tolerations": ("nvidia.com/gpu:NoSchedule", "team=ml:NoExecute", "spot"),
    "node_labels": ("node.kubernetes.io/instance-type=p5.48xlarge",),
    "reservation": "big-run",
    "priority": "high",
    "kueue_queue": "team-queue",
}
SECTION = """
[model]
family = "gpt"
num_layers = 2
hidden = 32
num_heads = 2
max_sequence = 32

[kubernetes]
"""


def run(kind: Literal["Job", "JobSet"] = "Job", table: RankTable | None = None, **values: Any) -> PodRun:
    fields = {name: values.pop(name) for name in ("pod", "plan", "stages", "hostnames") if name in values}
    settings = with_node_count(KubernetesSection(image="registry/plait:1", **values), 4, table)
    return PodRun(
        name="plait-x-123456", argv=("python", "-m", "plait.train.worker", "/data/runs/x"), world_size=4,
        folder=Path("/data/runs/x"), secret="sesame", settings=settings, kind=kind, timeout=600.0, table=table,
        **fields,
    )  # fmt: skip


def job_of(one: PodRun) -> dict[str, Any]:
    spec = one.workload()["spec"]
    return spec["replicatedJobs"][0]["template"]["spec"] if one.kind == "JobSet" else spec


def pod_of(one: PodRun) -> dict[str, Any]:
    return job_of(one)["template"]["spec"]


@pytest.mark.parametrize("kind", ["Job", "JobSet"])
@pytest.mark.parametrize("table", [None, TABLE])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"exclusive": False, "nodes": 0, "keep": 0, "max_restarts": 0},
        FULL,
        {
            "pod": PodFile(
                {"hostNetwork": True, "containers": [{"name": "ranks", "securityContext": {"privileged": True}}]},
                {"team": "ml"},
                {"k8s.v1.cni.cncf.io/networks": "rdma"},
                {"kueue.x-k8s.io/priority-class": "high"},
            )
        },
    ],
)
def test_every_object_is_as_the_official_schemas_have_it(
    kind: Literal["Job", "JobSet"], table: RankTable | None, values: dict[str, Any]
) -> None:
    one = run(kind, table, plan="{}", **values)
    owner = one.workload()
    owner["metadata"]["uid"] = "1234"
    for body in [one.workload(), *one.owned_objects(owner), *one.owned_objects()]:
        errors = [f"{error.json_path}: {error.message}" for error in schema(body["kind"]).iter_errors(body)]
        assert not errors, body["kind"]


def test_a_run_that_would_fail_again_is_not_started_again() -> None:
    for kind in ("Job", "JobSet"):
        one = run(kind, TABLE, max_restarts=4)
        rule = job_of(one)["podFailurePolicy"]["rules"][0]
        assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [DO_NOT_RETRY])
        assert rule["onExitCodes"]["containerName"] == pod_of(one)["containers"][0]["name"]
    for restarts, limit in ((4, MOST), (0, 0)):  # pod 0 counts, and only what brings nothing
        assert job_of(run("Job", TABLE, max_restarts=restarts))["backoffLimit"] == limit
        failing = run("JobSet", TABLE, max_restarts=restarts).workload()["spec"]["failurePolicy"]
        assert (failing["maxRestarts"], failing["rules"][0]["action"]) == (limit, "FailJobSet")
        files, *_ = run(max_restarts=restarts).owned_objects()
        assert json.loads(files["data"]["run.json"])["restarts"] == restarts


def test_a_pod_that_the_cluster_takes_away_is_no_failure_of_a_jobs() -> None:
    """Under a JobSet the whole gang is made anew, and only if its Job fails."""
    rules = job_of(run("Job", TABLE))["podFailurePolicy"]["rules"][1:]
    disrupted = [{"type": "DisruptionTarget", "status": "True"}]
    assert rules == [{"action": "Ignore", "onPodConditions": disrupted}]
    assert job_of(run("JobSet", TABLE))["podFailurePolicy"]["rules"][1:] == []
    assert job_of(run("JobSet", TABLE))["backoffLimit"] == 0


def test_names_of_pods_are_known_before_they_are_ready() -> None:
    network = run("JobSet").workload()["spec"]["network"]
    assert network == {"enableDNSHostnames": True, "subdomain": "plait-x-123456", "publishNotReadyAddresses": True}


@pytest.mark.parametrize("kind", ["Job", "JobSet"])
@pytest.mark.parametrize(("queue", "waits"), [("", False), ("team", True)])
def test_a_workload_waits_only_in_a_queue(kind: Literal["Job", "JobSet"], queue: str, waits: bool) -> None:
    assert run(kind, kueue_queue=queue).workload()["spec"].get("suspend", False) is waits


@pytest.mark.parametrize("kind", ["Job", "JobSet"])
def test_a_workload_is_kept_for_a_while_by_itself_alone(kind: Literal["Job", "JobSet"]) -> None:
    one = run(kind, keep=77).workload()["spec"]
    assert one["ttlSecondsAfterFinished"] == 77
    if kind == "JobSet":
        assert "ttlSecondsAfterFinished" not in job_of(run(kind, keep=77))


def test_pods_are_drawn_to_the_nodes_of_a_table_and_bound_to_them_and_the_spare_ones() -> None:
    during = "DuringSchedulingIgnoredDuringExecution"

    def on(*names: str) -> Any:
        return {"matchExpressions": [{"key": HOSTNAME, "operator": "In", "values": [*names]}]}

    assert "nodeAffinity" not in pod_of(run())["affinity"]
    wanted = pod_of(run(table=TABLE, hostnames={"n1": "host-n1"}))["affinity"]["nodeAffinity"]
    assert wanted == {f"preferred{during}": [{"weight": 100, "preference": on("n3", "host-n1")}]}
    bound = pod_of(run(table=TABLE, spare_nodes=["n9"]))["affinity"]["nodeAffinity"]
    assert bound[f"required{during}"] == {"nodeSelectorTerms": [on("n3", "n1", "n9")]}
    assert bound[f"preferred{during}"] == [{"weight": 100, "preference": on("n3", "n1")}]
    assert "schedulingGates" not in pod_of(run(table=TABLE))  # others bind them, if anybody


def test_pods_of_a_topology_of_kueues_are_kept_apart_by_their_gpus() -> None:
    """Which passes over what keeps pods apart, so that they could stay pending."""
    keeps: dict[str, Any] = {"kueue_queue": "team", "kueue_topology": "required:rack"}
    assert "podAntiAffinity" in pod_of(run(**keeps))["affinity"]
    assert "affinity" not in pod_of(run(**keeps, gpus=2))
    assert "podAntiAffinity" in pod_of(run(gpus=2))["affinity"]


def test_kueue_may_give_up_pods_of_a_node_that_is_lost() -> None:
    for kind in ("Job", "JobSet"):
        found = job_of(run(kind))["template"]["metadata"]["annotations"]
        assert found["kueue.x-k8s.io/safe-to-forcefully-terminate"] == "true"


def test_what_users_ask_for_is_in_the_pod() -> None:
    pod = pod_of(run(**FULL))
    container = pod["containers"][0]
    assert container["resources"]["limits"] == {
        "cpu": "32", "memory": "200Gi", "rdma/hca": "8", "nvidia.com/gpu": "2",
    }  # fmt: skip
    assert {"name": "NCCL_DEBUG", "value": "INFO"} in container["env"]
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert mounts["volume-0"] == "/data"
    assert volumes["volume-0"]["persistentVolumeClaim"] == {"claimName": "data-claim"}
    assert volumes["volume-1"]["hostPath"] == {"path": "/mnt/shared"}
    assert {"key": "plait.dev/reserved", "operator": "Equal", "value": "big-run", "effect": "NoSchedule"} in pod[
        "tolerations"
    ]
    assert {"key": "team", "operator": "Equal", "value": "ml", "effect": "NoExecute"} in pod["tolerations"]
    assert {"key": "spot", "operator": "Exists"} in pod["tolerations"]
    assert (pod["serviceAccountName"], pod["priorityClassName"]) == ("trainer", "high")


def test_kueue_is_asked_for_what_the_layout_needs() -> None:
    values = {
        "kueue_queue": "team",
        "kueue_topology": "required:cloud/block",
        "kueue_stage_topology": "cloud/rack",
        "nodes": 4,
    }
    one = run(stages=2, **values)
    found = job_of(one)["template"]["metadata"]["annotations"]
    assert found == {
        "kueue.x-k8s.io/podset-required-topology": "cloud/block",
        "kueue.x-k8s.io/podset-slice-required-topology": "cloud/rack",
        "kueue.x-k8s.io/podset-slice-size": "2",
        "kueue.x-k8s.io/safe-to-forcefully-terminate": "true",
    }
    assert one.workload()["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert one.workload()["spec"]["suspend"] is True
    with pytest.raises(JobError, match=r"kueue_stage_topology: 4 pods do not divide into 3 pipeline stages"):
        run(stages=3, **values).workload()
    free = run(kueue_topology="unconstrained")
    assert job_of(free)["template"]["metadata"]["annotations"] == {
        "kueue.x-k8s.io/podset-unconstrained-topology": "true",
        "kueue.x-k8s.io/safe-to-forcefully-terminate": "true",
    }


def test_the_plan_the_table_and_where_to_meet_travel_along() -> None:
    files, secret, *rest = run(table=TABLE, plan='{"plan": 1}').owned_objects()
    assert gzip.decompress(b64decode(files["binaryData"]["plan.json.gz"])) == b'{"plan": 1}'
    said = json.loads(files["data"]["run.json"])
    assert (said["nodes"], said["world_size"], said["head"]) == (2, 4, "plait-x-123456-0.plait-x-123456")
    assert [one["host"] for one in json.loads(files["data"]["rank_table.json"])] == ["n3", "n1"]
    assert secret["stringData"]["agent"] == "plait-x-123456-0.plait-x-123456:29400 sesame"
    assert "sesame" not in json.dumps([files, *rest, run(table=TABLE).workload()])
    assert run("JobSet").head == "plait-x-123456-ranks-0-0.plait-x-123456"


def test_a_plan_too_large_for_a_configmap_is_refused() -> None:
    noise = "".join(map(str, itertools.islice(_noise(), 400_000)))
    with pytest.raises(LaunchError, match="ConfigMap holds"):
        run(plan=noise).owned_objects()


def _noise() -> Any:
    state = 1
    while True:
        state = state * 6364136223846793005 + 1442695040888963407 & (1 << 64) - 1
        yield f"{state >> 16:x}"


@pytest.mark.parametrize(
    "values, table, key",
    [
        ({"image": ""}, None, "kubernetes.image"),
        ({"nodes": 3}, None, "kubernetes.nodes"),
        ({"nodes": 4}, TABLE, "kubernetes.nodes"),
        ({"gpus": 1}, TABLE, "kubernetes.gpus"),
        ({"kueue_topology": "required:rack"}, TABLE, "kubernetes.kueue_topology"),
        ({"kueue_queue": "team", "spare_nodes": ["n9"]}, TABLE, "kubernetes.spare_nodes"),
        ({"kueue_stage_topology": "rack"}, None, "kubernetes.kueue_stage_topology"),
        ({}, RankTable(("n0", "n1", "n2"), 1), "--rank-table"),
    ],
)
def test_what_does_not_fit_together_is_refused(values: dict[str, Any], table: RankTable | None, key: str) -> None:
    with pytest.raises(JobError) as caught:
        with_node_count(KubernetesSection.model_validate({"image": "i", **values}), 4, table)
    assert caught.value.key == key


@pytest.mark.parametrize(
    "line",
    [
        'volumes = ["data"]', 'volumes = ["data:relative"]', 'env = ["NAME"]', 'resources = ["32"]',
        'tolerations = ["a=b:Sometimes"]', 'topology = "rack"', 'node_labels = ["label"]', "port = 80",
    ],
)  # fmt: skip
def test_a_job_file_with_a_mistake_names_the_key(line: str, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(f"{SECTION}{line}\n")
    with pytest.raises(JobError) as caught:
        Job.read(tmp_path / "job.toml")
    assert caught.value.key == f"kubernetes.{line.split()[0]}"


@pytest.mark.parametrize("gpus, nodes", [(0, 4), (1, 4), (2, 2), (4, 1)])
def test_as_many_pods_as_the_gpus_of_each_leave(gpus: int, nodes: int) -> None:
    assert run(gpus=gpus).nodes == nodes


@given(st.text(max_size=80))
def test_names_are_what_dns_allows(name: str) -> None:
    found = new_name(name)
    assert len(found) <= 45  # a pod's adds to it, and a label holds 63
    assert all(one.isascii() and (one.isalnum() or one == "-") for one in found)
    assert found == found.lower()
    assert not found.endswith("-")


@pytest.mark.parametrize(
    ("text", "refused"),
    [("claim:/in", False), ("/host:/in", False), ("claim", True), ("claim:in", True), ("", True), (":/in", True)],
)
def test_a_volume_is_a_claim_or_a_folder_of_the_node(text: str, refused: bool) -> None:
    if not refused:
        (mount,) = (one for one in pod_of(run(volumes=(text,)))["volumes"] if one["name"] == "volume-0")
        where = {"hostPath": {"path": "/host"}} if text[0] == "/" else {"persistentVolumeClaim": {"claimName": "claim"}}
        assert mount == {"name": "volume-0", **where}
        return
    with pytest.raises(JobError, match=r"kubernetes.volumes(\[0\])?: .*(/path in the pod|/path)"):
        run(volumes=(text,)).workload()
