"""Requests a minute that following a run costs a cluster's one API server, or Slurm's one controller.

    python -m benchmarks.cluster_requests --nodes 1024 --seconds 60

Kubernetes: an emulated API server with so many nodes and pods, some of which say something new every second.
Slurm: a stand-in for its commands that counts them. Nothing runs.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

from benchmarks.keeping import keep_as


def kubernetes(folder: Path, nodes: int, seconds: float) -> dict[str, float]:
    """Requests a minute, by method and kind of object."""
    from kubernetes.config import kube_config

    from plait.launch.kubernetes.api import KubernetesNamespace
    from plait.launch.kubernetes.follow import follow
    from tests.support.kubernetes.runs import pod_run
    from tests.support.kubernetes.server import Server

    server = Server(folder / "logs")
    server.running = set  # type: ignore[method-assign]
    (folder / "logs").mkdir()
    server.start()
    kube_config.KUBE_CONFIG_DEFAULT_LOCATION = str(server.kubeconfig(folder / "config"))  # which is read at import
    cluster, run = KubernetesNamespace(), pod_run(folder, world=nodes)
    job = server.store.create(run.workload())
    for index in range(nodes):
        server.store.create(a_node(index))
        server.store.create(a_pod(run.name, job["metadata"]["uid"], index))
    until = time.monotonic() + seconds

    def change() -> None:
        at = 0
        while time.monotonic() < until:
            pod = server.store.of("Pod")[at % nodes]
            pod["status"]["startTime"] = str(at)
            server.store.update(pod)
            at += 1
            time.sleep(1.0)
        job.setdefault("status", {})["conditions"] = [{"type": "Complete", "status": "True"}]
        for pod in server.store.of("Pod"):
            pod["status"]["phase"] = "Succeeded"
        server.store.update(job)

    threading.Thread(target=change, daemon=True).start()
    follow(cluster, run, deque())
    asked = Counter(f"{method} {path.rstrip('/').split('/')[-1 if path.count('/') < 7 else -2]}" for method, path in
                    server.asked)  # fmt: skip
    server.stop()
    return {what: round(60 * count / seconds, 1) for what, count in sorted(asked.items())}


def a_node(index: int) -> dict[str, Any]:
    return {"kind": "Node", "metadata": {"name": f"n{index}", "labels": {"kubernetes.io/hostname": f"n{index}"}},
            "spec": {}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}  # fmt: skip


def a_pod(run: str, owner: str, index: int) -> dict[str, Any]:
    labels = {"plait.dev/run": run, "batch.kubernetes.io/job-completion-index": str(index)}
    metadata = {"name": f"{run}-{index}", "labels": labels, "ownerReferences": [{"uid": owner}]}
    return {"kind": "Pod", "metadata": metadata,
            "spec": {"nodeName": f"n{index}"}, "status": {"phase": "Running"}}  # fmt: skip


COMMAND = """#!/bin/sh
echo "$(basename "$0") $*" >> {asked}
case "$*" in *"show job"*) cat {job};; esac
"""


def slurm(folder: Path, seconds: float) -> dict[str, float]:
    """Commands a minute."""
    from plait.launch.slurm import commands

    try:
        from plait.launch.slurm.follow import follow
    except ImportError:  # as it was before
        from plait.launch.slurm.commands import follow  # type: ignore[attr-defined,no-redef]

    asked, job = folder / "asked", folder / "job"
    job.write_text("JobId=7 JobState=RUNNING Reason=None NodeList=n[1-1024] ExitCode=0:0\n")
    for name in ("scontrol", "scancel", "squeue"):
        (folder / name).write_text(COMMAND.format(asked=asked, job=job))
        (folder / name).chmod(0o755)
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    done = "JobId=7 JobState=COMPLETED Reason=None NodeList= ExitCode=0:0\n"
    threading.Timer(seconds, lambda: job.write_text(done)).start()
    follow(commands.SubmittedSlurmJob("7", folder / "log"))
    counts = Counter(line.split()[0] for line in asked.read_text().splitlines())
    return {name: round(60 * count / seconds, 1) for name, count in sorted(counts.items())}


def main() -> int:
    """Print what is asked, and keep it."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--nodes", type=int, default=1024)
    asked.add_argument("--seconds", type=float, default=60.0)
    given = asked.parse_args()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with tempfile.TemporaryDirectory(prefix="requests-") as place:
        for name in ("kubernetes", "slurm"):
            (Path(place) / name).mkdir()
        told = {
            "nodes": given.nodes, "seconds": given.seconds,
            "kubernetes": kubernetes(Path(place) / "kubernetes", given.nodes, given.seconds),
            "slurm": slurm(Path(place) / "slurm", given.seconds),
        }  # fmt: skip
    keep_as("cluster_requests", told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
