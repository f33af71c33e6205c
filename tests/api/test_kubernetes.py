"""``--on kubernetes`` before anything is sent: what would be, and whether a run could outlive its pods."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from plait.api.places.kubernetes import InKubernetes
from plait.cli.main import app
from plait.core.base.errors import JobError, LaunchError
from plait.core.cluster.hardware import HERE
from plait.core.job.plan import Plan
from plait.core.job.spec import Job
from plait.core.topology.rank_table import RankTable
from plait.launch.kubernetes_api import KubernetesNamespace
from plait.plan.make import make_plan

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
    _, text = InKubernetes("").preview(job, job.run.path)
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


def test_what_is_written_to_a_file_is_all_that_would_be_sent() -> None:
    plan = a_plan(a_job(kubernetes={"workload": "job", "gpus": 1}))
    text = InKubernetes("").manifests(plan, Path("/data/runs/job"))
    workload, files, secret, service = yaml.safe_load_all(text)
    assert [one["kind"] for one in (workload, files, secret, service)] == ["Job", "ConfigMap", "Secret", "Service"]
    assert gzip.decompress(base64.b64decode(files["binaryData"]["plan.json.gz"])).decode() == plan.to_json()
    head, _, word = secret["stringData"]["agent"].partition(" ")
    assert head == json.loads(files["data"]["run.json"])["head"] + ":29400"
    assert len(word) == 32
    env = {one["name"]: one.get("value") for one in workload["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert env["PLAIT_GPUS"] == "1"


def test_what_somebody_has_to_bind_is_not_written_to_a_file(tmp_path: Path) -> None:
    RankTable(("n1",), 1).write(tmp_path / "table.json")
    with pytest.raises(JobError, match="--rank-table: needs somebody who binds pods"):
        InKubernetes("", table=tmp_path / "table.json").manifests(a_plan(a_job()), Path("/data/runs/job"))
    with pytest.raises(LaunchError, match="No cluster"):  # whether it has JobSets
        InKubernetes("").manifests(a_plan(a_job()), Path("/data/runs/job"))


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
        assert made["annotations"] == {"a/b": "c", "kueue.x-k8s.io/podset-unconstrained-topology": "true"}
        assert one["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "high"
        assert one["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
        assert not any(key.startswith("kueue") for key in made["labels"])


@pytest.mark.parametrize(
    "key", ["image", "namespace", "context", "python", "priority", "kueue_queue", "env", "volumes"]
)
@pytest.mark.parametrize("text", ["a\nb", "a\0", "a\r"])
def test_a_line_break_in_an_option_is_refused(key: str, text: str) -> None:
    value: Any = [f"A={text}"] if key in ("env", "volumes") else text
    with pytest.raises(JobError, match=f"^kubernetes.{key}: .* holds a line break"):
        a_job(kubernetes={key: value})


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


def test_the_command_writes_what_would_be_sent_to_a_file_for_its_user_alone(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB_FILE)
    file = tmp_path / "run.yaml"
    words = ["train", str(tmp_path / "job.toml"), "--on", "kubernetes", "--manifests", str(file)]
    done = CliRunner().invoke(app, [*words, "--dry-run"])
    assert done.exit_code == 0, done.output
    assert "The manifests" in done.output
    assert [one["kind"] for one in yaml.safe_load_all(file.read_text())] == ["Job", "ConfigMap", "Secret", "Service"]
    assert file.stat().st_mode & 0o777 == 0o600
    for wrong in (words, ["train", str(tmp_path / "job.toml"), "--dry-run", "--manifests", str(file)]):
        refused = CliRunner().invoke(app, wrong)
        assert isinstance(refused.exception, JobError)
        assert "--manifests: is for --dry-run --on kubernetes" in str(refused.exception)
