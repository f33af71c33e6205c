"""``--on kubernetes`` before anything is sent: what would be, and whether a run could outlive its
pods."""

from __future__ import annotations

import base64
import gzip
import json
import os
import signal
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from plait.api.places.kubernetes import KubernetesTarget
from plait.cli.main import app
from plait.core.base.errors import JobError
from plait.core.cluster.hardware import HERE
from plait.core.job.plan import Plan
from plait.core.job.spec import Job
from plait.core.topology.rank_table import RankTable
from plait.launch.kubernetes.api import KubernetesNamespace
from plait.plan.make import make_plan
from tests.support.kubernetes.in_memory import InMemory

TIER = "unit"

JOB: dict[str, Any] = {
    "model": {"family": "gpt", "num_layers": 2, "hidden": 32, "num_heads": 2, "max_sequence": 128},
    "run": {"folder": "/data/runs", "name": "job"},
    "kubernetes": {"image": "registry/plait:1", "volumes": ["claim:/data"]},
}


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No cluster is known."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))


def a_job(**more: dict[str, Any]) -> Job:
    return Job.from_dict({name: JOB.get(name, {}) | more.get(name, {}) for name in JOB | more})


def preview(job: Job) -> tuple[str, list[dict[str, Any]]]:
    _, text = KubernetesTarget("").preview(job, job.run.path)
    return text, list(yaml.safe_load_all(text))


@pytest.mark.parametrize(("workload", "kind"), [("jobset", "JobSet"), ("job", "Job")])
def test_a_workload_that_the_job_names_needs_no_cluster_to_be_shown(workload: str, kind: str) -> None:
    text, objects = preview(a_job(kubernetes={"workload": workload}))
    assert objects[0]["kind"] == kind
    assert "Without a cluster" not in text


def test_without_a_cluster_to_ask_the_choice_is_named_as_a_guess() -> None:
    text, objects = preview(a_job())
    assert objects[0]["kind"] == "Job"
    assert text.startswith("# Without a cluster to ask whether it has JobSets: No cluster of Kubernetes is known here")


@pytest.mark.parametrize(("jobset", "kind"), [(True, "JobSet"), (False, "Job")])
def test_a_cluster_is_asked_what_it_knows(monkeypatch: pytest.MonkeyPatch, jobset: bool, kind: str) -> None:
    monkeypatch.setattr(KubernetesNamespace, "__init__", lambda self, *arguments: None)
    monkeypatch.setattr(KubernetesNamespace, "has_jobset", lambda self: jobset)
    assert preview(a_job())[1][0]["kind"] == kind


def a_plan(job: Job) -> Plan:
    return make_plan(job, HERE, vocab=16)


def written(place: KubernetesTarget, plan: Plan) -> dict[str, list[dict[str, Any]]]:
    files, _ = place.manifests(plan, Path("/data/runs/job"))
    return {name: list(yaml.safe_load_all(text)) for name, text in files.items()}


def test_what_is_written_is_all_that_a_cluster_needs() -> None:
    plan = a_plan(a_job(kubernetes={"workload": "job", "gpus": 1, "namespace": "ml"}))
    found = written(KubernetesTarget(""), plan)
    kinds = {name: [one["kind"] for one in objects] for name, objects in found.items()}
    assert kinds == {
        "1-access.yaml": ["ServiceAccount", "Role", "RoleBinding", "NetworkPolicy"],
        "2-files.yaml": ["ConfigMap", "Secret", "Service"],
        "3-workload.yaml": ["Job"],
    }
    assert {one["metadata"]["namespace"] for objects in found.values() for one in objects} == {"ml"}
    files, secret, _ = found["2-files.yaml"]
    (workload,) = found["3-workload.yaml"]
    assert gzip.decompress(base64.b64decode(files["binaryData"]["plan.json.gz"])).decode() == plan.to_json()
    head, _, word = secret["stringData"]["agent"].partition(" ")
    assert head == json.loads(files["data"]["run.json"])["head"] + ":29400"
    assert len(word) == 32
    env = {one["name"]: one.get("value") for one in workload["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert env["PLAIT_GPUS"] == "1"


@pytest.mark.parametrize(("own", "account", "made"), [("", None, 1), ("team-bot", "team-bot", 0)])
def test_pods_may_free_lost_nodes_of_their_own_run_by_their_account(own: str, account: str | None, made: int) -> None:
    found = written(KubernetesTarget("ml"), a_plan(a_job(kubernetes={"workload": "job", "service_account": own})))
    *accounts, role, binding, network = found["1-access.yaml"]
    name = role["metadata"]["name"]
    assert len(accounts) == made
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "delete"]},
        {"apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"]},
    ]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account or name, "namespace": "ml"}]
    assert found["3-workload.yaml"][0]["spec"]["template"]["spec"]["serviceAccountName"] == (account or name)
    pods = found["3-workload.yaml"][0]["spec"]["template"]["metadata"]["labels"]
    assert network["spec"]["podSelector"]["matchLabels"].items() <= pods.items()


def test_without_a_cluster_a_job_is_written_and_that_is_said(tmp_path: Path) -> None:
    RankTable(("n1",), 1).write(tmp_path / "table.json")
    files, note = KubernetesTarget("", table=tmp_path / "table.json").manifests(a_plan(a_job()), Path("/data/runs/job"))
    assert "kind: Job\n" in files["3-workload.yaml"] and "nodeAffinity" in files["3-workload.yaml"]
    assert note.startswith("It is a Job, since no cluster could be asked whether it has JobSets: No cluster")


VERSIONS = ["1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", kubernetes_validate.latest_version()]


POD = """
metadata: {labels: {team: ml}, annotations: {k8s.v1.cni.cncf.io/networks: rdma-1}}
spec:
  imagePullSecrets: [{name: registry}]
  securityContext: {runAsUser: 1000}
  containers:
  - name: ranks
    securityContext: {capabilities: {add: [IPC_LOCK]}}
    volumeMounts: [{name: scratch, mountPath: /a, subPath: a}, {name: scratch, mountPath: /b, subPath: b}]
  volumes: [{name: scratch, emptyDir: {sizeLimit: 1e3}}]
"""
EVERY: dict[str, Any] = {
    "gpus": 1, "nodes": 2, "resources": ["cpu=1.5", "memory=1e9", "hugepages-2Mi=100Mi", "rdma/hca=8"],
    "env": ["A=b=c", "B=$(A)"], "service_account": "bot", "priority": "high", "reservation": "big_run",
    "tolerations": ["", "a.b/c=:NoSchedule", "spot"], "node_labels": ["pool=gpu"], "host_network": True,
    "volumes": ["data:/data", "/mnt/x:/x"], "kueue_queue": "team", "kueue_topology": "required:a.b/block",
}  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("workload", ["job", "jobset", "a table of nodes"])
def test_what_all_settings_write_is_valid_in_every_version(tmp_path: Path, version: str, workload: str) -> None:
    (tmp_path / "pod.yaml").write_text(POD)
    RankTable(("n1", "n2"), 1).write(tmp_path / "table.json")
    every = EVERY | {"workload": workload, "pod": str(tmp_path / "pod.yaml")}
    table = {"workload": "job", "gpus": 1, "nodes": 2, "spare_nodes": ["n9"]} if workload == "a table of nodes" else {}
    job = a_job(kubernetes=table or every, strategy={"dp": 2},
                train={"global_batch_size": 4, "micro_batch_size": 1})  # fmt: skip
    found = written(KubernetesTarget("ml", table=tmp_path / "table.json" if table else None), a_plan(job))
    (workload_object,) = found["3-workload.yaml"]
    if workload == "jobset":  # a definition of its own; what it makes is a Job
        made = workload_object["spec"]["replicatedJobs"][0]["template"]["spec"]
        found["3-workload.yaml"] = [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": made}]
    for one in (one for objects in found.values() for one in objects):
        kubernetes_validate.validate(one, version, strict=True)
    mounts = found["3-workload.yaml"][0]["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert table or {"/a", "/b", "/data", "/x"} <= {one["mountPath"] for one in mounts}


CRDS = os.environ.get("PLAIT_TEST_CRDS", "")


@pytest.mark.skipif(not CRDS, reason="PLAIT_TEST_CRDS names no folder with the CRDs of JobSet and Kueue")
@pytest.mark.parametrize("queue", ["", "team"])
def test_a_jobset_is_as_its_own_crd_has_it(queue: str) -> None:
    crd = yaml.safe_load((Path(CRDS) / "jobset.x-k8s.io_jobsets.yaml").read_text())
    (version,) = [one for one in crd["spec"]["versions"] if one["name"] == "v1alpha2"]
    schema = jsonschema.Draft202012Validator(closed(version["schema"]["openAPIV3Schema"]))
    job = a_job(kubernetes={"workload": "jobset", "gpus": 1, "kueue_queue": queue})
    (body,) = written(KubernetesTarget("ml"), a_plan(job))["3-workload.yaml"]
    assert body["kind"] == crd["spec"]["names"]["kind"]
    assert not [f"{error.json_path}: {error.message}" for error in schema.iter_errors(body)]
    body["spec"]["failurePolicy"]["maxRestart"] = 1
    assert list(schema.iter_errors(body)), "keys that it does not know are errors"


@pytest.mark.skipif(not CRDS, reason="PLAIT_TEST_CRDS names no folder with the CRDs of JobSet and Kueue")
def test_kueue_makes_a_workload_of_the_pods_that_we_write() -> None:
    """Its pod sets take the template as it stands."""
    crd = yaml.safe_load((Path(CRDS) / "kueue.x-k8s.io_workloads.yaml").read_text())
    version = next(one for one in crd["spec"]["versions"] if one["storage"])
    schema = jsonschema.Draft202012Validator(closed(version["schema"]["openAPIV3Schema"]))
    (job,) = written(KubernetesTarget("ml"), a_plan(a_job(kubernetes={"workload": "job", "kueue_queue": "team"})))[
        "3-workload.yaml"
    ]
    assert job["spec"]["suspend"] and job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    pods = {"name": "main", "count": job["spec"]["parallelism"], "template": job["spec"]["template"]}
    body = {"apiVersion": f"kueue.x-k8s.io/{version['name']}", "kind": "Workload", "metadata": {"name": "job-x"},
            "spec": {"queueName": "team", "podSets": [pods]}}  # fmt: skip
    assert not [f"{error.json_path}: {error.message}" for error in schema.iter_errors(body)]


def closed(schema: Any) -> Any:
    """The schema of a CRD with keys refused that it does not know, as the API server prunes
    them."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    if "properties" in schema and "x-kubernetes-preserve-unknown-fields" not in schema:
        found.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        found.pop("pattern", None)
    return found


@pytest.mark.parametrize(
    ("folder", "pod", "says"),
    [
        ("/data/runs", {}, ""),
        ("/elsewhere", {}, "no volume of the pods holds"),
        ("/dev/shm/runs", {}, r"in /dev/shm, a volume \(emptyDir\) that is lost with the pods"),
        ("/etc/plait/runs", {}, r"in /etc/plait, a volume \(configMap\) that is lost"),
        ("/scratch", {"volumes": [{"name": "s", "emptyDir": {}}],
                      "containers": [{"name": "ranks", "volumeMounts": [{"name": "s", "mountPath": "/scratch/"}]}]},
         r"in /scratch/, a volume \(emptyDir\)"),
        ("/data/runs", {"volumes": [{"name": "s", "emptyDir": {}}],
                        "containers": [{"name": "ranks", "volumeMounts": [{"name": "s", "mountPath": "/data/runs"}]}]},
         r"in /data/runs, a volume \(emptyDir\)"),  # the nearest counts
        ("/keep", {"volumes": [{"name": "s", "nfs": {"server": "x", "path": "/"}}],
                   "containers": [{"name": "ranks", "volumeMounts": [{"name": "s", "mountPath": "/keep"}]}]}, ""),
        ("/keep", {"volumes": [{"name": "s", "nfs": {"server": "x", "path": "/"}}],
                   "containers": [{"name": "ranks", "volumeMounts": [{"name": "s", "mountPath": "/keep",
                                                                      "readOnly": True}]}]}, "mounted read-only"),
    ],
)  # fmt: skip
def test_a_run_is_kept_where_it_outlives_its_pods(folder: str, pod: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "pod.yaml").write_text(json.dumps(pod))
    job = a_job(run={"folder": folder}, kubernetes={"pod": str(tmp_path / "pod.yaml"), "workload": "job"})
    if not says:
        assert preview(job)[1]
        return
    with pytest.raises(JobError, match=rf"^run.folder: is {folder}/job.*{says}"):
        preview(job)


def test_the_folder_is_meant_as_pods_see_it(tmp_path: Path) -> None:
    """A link of the machine that sends the run says nothing of them."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    link = tmp_path / "link"
    _, objects = preview(a_job(run={"folder": str(link)}, kubernetes={"volumes": [f"claim:{link}"], "workload": "job"}))
    assert json.loads(objects[1]["data"]["run.json"])["folder"] == f"{link}/job"


def test_labels_and_annotations_of_the_users_pod_are_in_the_runs_pods(tmp_path: Path) -> None:
    metadata = {"labels": {"team": "ml", "kueue.x-k8s.io/priority-class": "high"}, "annotations": {"a/b": "c"}}
    (tmp_path / "pod.yaml").write_text(json.dumps({"metadata": metadata}))
    pod = str(tmp_path / "pod.yaml")
    for workload in ("job", "jobset"):
        settings = {"pod": pod, "workload": workload, "kueue_queue": "q", "kueue_topology": "unconstrained"}
        _, (one, *_) = preview(a_job(kubernetes=settings))
        job = one["spec"]["replicatedJobs"][0]["template"] if workload == "jobset" else one
        made = job["spec"]["template"]["metadata"]
        assert made["labels"]["team"] == "ml"
        assert made["labels"]["app.kubernetes.io/managed-by"] == "plait"
        assert made["annotations"] == {
        "a/b": "c", "kueue.x-k8s.io/podset-unconstrained-topology": "true",
        "kueue.x-k8s.io/safe-to-forcefully-terminate": "true",
    }  # fmt: skip
        assert one["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "high"
        assert one["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
        assert not any(key.startswith("kueue") for key in made["labels"])


JOB_FILE = """
[model]
family = "gpt"
num_layers = 2
hidden = 32
num_heads = 2
max_sequence = 128

[strategy]
slices = { batch = 1, columns = 1 }

[run]
folder = "/data/runs"

[kubernetes]
image = "registry/plait:1"
workload = "job"
volumes = ["claim:/data"]
"""


def test_the_command_writes_what_would_be_sent_for_its_user_alone_and_sends_nothing(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB_FILE)
    folder = tmp_path / "manifests"
    words = ["train", str(tmp_path / "job.toml"), "--on", "kubernetes", "--write", str(folder)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert f"kubectl apply -f {folder}" in " ".join(done.output.split())
    assert sorted(path.name for path in folder.iterdir()) == ["1-access.yaml", "2-files.yaml", "3-workload.yaml"]
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in folder.iterdir())
    assert "The manifests" in CliRunner().invoke(app, [*words, "--dry-run"]).output
    before = (folder / "3-workload.yaml").read_text()
    again = CliRunner().invoke(app, words)
    assert isinstance(again.exception, JobError) and (folder / "3-workload.yaml").read_text() == before
    name = yaml.safe_load(before)["metadata"]["name"]
    assert f"--write: {folder} has the run {name} already" in str(again.exception)
    assert f"kubectl delete -f {folder}" in str(again.exception)
    refused = CliRunner().invoke(app, ["train", str(tmp_path / "job.toml"), "--write", str(folder)])
    assert isinstance(refused.exception, JobError)
    assert "--write: is for --on kubernetes" in str(refused.exception)


@pytest.mark.parametrize("follow", [False, True])
def test_a_stop_that_comes_while_objects_are_sent_ends_the_run(monkeypatch: pytest.MonkeyPatch, follow: bool) -> None:
    from plait.launch.kubernetes import follow as kubernetes

    cluster, sent, before = InMemory(), kubernetes.submit, signal.getsignal(signal.SIGTERM)

    def stopped(*asked: Any) -> None:
        sent(*asked)
        signal.raise_signal(signal.SIGTERM)

    def followed(_: object, run: Any, signals: Any) -> int:
        return kubernetes.unfollowed_status(cluster.api, run, signals)

    monkeypatch.setattr(KubernetesTarget, "_cluster", lambda *_: cluster)
    monkeypatch.setattr(kubernetes, "submit", stopped)
    monkeypatch.setattr(kubernetes, "follow", followed)
    plan = a_plan(a_job(kubernetes={"workload": "job"}))
    submitted = KubernetesTarget("ml").submit(plan, Path("/data/runs/job"), follow=follow)
    assert [body["kind"] for body in cluster.store.objects.values()].count("Job") == 1
    assert submitted.wait() == 128 + signal.SIGTERM
    assert "Job" not in [body["kind"] for body in cluster.store.objects.values()]
    assert signal.getsignal(signal.SIGTERM) == before
