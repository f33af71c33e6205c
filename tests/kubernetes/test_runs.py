"""``plait runs``, ``stop`` and ``logs`` on a run in a small Kubernetes that nobody follows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.core.runs.attempts import read_attempts
from tests.support.command import plait
from tests.support.kubernetes.cluster import SmallCluster
from tests.support.kubernetes.runs import environment, options, small_cluster
from tests.support.lab import wait_until
from tests.support.managed import saved_steps, stopped_after, write_job

pytestmark = pytest.mark.system


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SmallCluster]:
    """Two nodes, and JobSets."""
    with small_cluster(tmp_path / "cluster", 2, jobset=True) as found:
        yield found


def begin(folder: Path) -> str:
    """Send a run that trains for hours; its name in the cluster, once it has saved."""
    job = write_job(folder, 100_000)
    sent = plait("train", job, "--no-follow", *options(folder), "--on", "kubernetes", folder=folder)
    assert sent.returncode == 0, sent.stdout + sent.stderr
    wait_until(lambda: saved_steps(folder), "no checkpoint was saved", seconds=90)
    (one,) = listed(folder, "--on", "kubernetes:ml")
    return one["name"]


def listed(folder: Path, *words: str) -> list[dict[str, Any]]:
    done = plait("runs", "--json", *words, folder=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["runs"]


def empty(cluster: SmallCluster) -> bool:
    with cluster.store.changed:
        return {kind for kind, _ in cluster.store.objects} == {"Node"} and not cluster.running()


def test_a_run_is_listed_told_saved_and_ended_by_its_folder(cluster: SmallCluster, tmp_path: Path) -> None:
    name = begin(tmp_path)
    (one,) = listed(tmp_path, "--on", "kubernetes")
    assert (one["kind"], one["state"], one["pods"]) == ("JobSet", "running", 2)
    (here,) = listed(tmp_path)
    assert (here["state"], here["where"], here["ranks"]) == ("running", f"Kubernetes {name}", 2)
    argv = [sys.executable, "-m", "plait.cli.main", "logs", name, "--on", "kubernetes"]
    follower = subprocess.Popen(argv, env=environment(cluster), stdout=subprocess.PIPE, text=True)
    assert follower.stdout
    first = follower.stdout.readline()
    done = plait("stop", "job", folder=tmp_path)
    last = stopped_after(tmp_path)
    assert done.returncode == 0 and f"asking JobSet {name} to save and end" in done.stderr, done.stderr
    assert f"job is stopped after step {last}; the same command goes on from step {last}" in done.stdout
    told = first + follower.communicate(timeout=60)[0]
    assert "[pod 0] " in told and "stopping after this step" in told and follower.returncode == 0, told
    assert saved_steps(tmp_path)[-1] == last, "the last checkpoint is the one of the stop"
    assert read_attempts(tmp_path / "runs" / "job")[-1].outcome == "stopped"
    wait_until(lambda: empty(cluster), "something is left")
    again = plait("stop", "job", folder=tmp_path)
    assert again.returncode == 0 and "does not run: it is stopped; nothing was stopped" in again.stdout, again.stderr
    gone = plait("stop", name, "--on", "kubernetes")
    assert gone.returncode == 2 and f"No run {name} is in the namespace ml. There is none." in gone.stderr
    assert not listed(tmp_path, "--on", "kubernetes")


def test_a_run_whose_pods_hang_is_killed(tmp_path: Path) -> None:
    with small_cluster(tmp_path / "cluster", 2) as cluster:
        name = begin(tmp_path)
        for uid in cluster.running():
            cluster.hang(uid)
        done = plait("stop", name, "--on", "kubernetes", "--wait", 1)
        assert done.returncode == 1 and f"plait stop {name} --on kubernetes:ml --kill" in done.stdout, done.stderr
        done = plait("stop", name, "--on", "kubernetes", "--kill")
        assert done.returncode == 0 and f"{name} is stopped" in done.stdout, done.stdout + done.stderr
        assert not listed(tmp_path, "--on", "kubernetes")


def test_a_namespace_that_may_not_be_looked_into_is_named(tmp_path: Path) -> None:
    with small_cluster(tmp_path / "cluster", 1):
        for words in (["runs"], ["stop", "x"], ["logs", "x"]):
            done = plait(*words, "--on", "kubernetes:theirs")
            assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
            assert "does not let you list" in done.stderr and "namespace theirs" in done.stderr
