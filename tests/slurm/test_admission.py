"""``plait queue admit`` on a real Slurm: who is let in where, and that it and the controller may
die."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from plait.launch.slurm.queue import SlurmQueue
from tests.support.command import plait
from tests.support.lab import wait_until
from tests.support.slurm import SlurmCluster, ask, environment, slurm_cluster


def submit(cluster: SlurmCluster, seconds: int, words: str = "", *more: str) -> str:
    return ask(cluster, "sbatch", "--parsable", "--hold", "-p", "gated", "-N1", "--exclusive", "--output=/dev/null",
               f"--comment={words}", *more, f"--wrap=sleep {seconds}").strip()  # fmt: skip


def one_round(cluster: SlurmCluster, *more: str) -> list[tuple[str, str, str, list[str]]]:
    """What a round does, by a command of its own: it remembers nothing."""
    words = ("queue", "admit", "reservation=lpj", "partition=gated", "--once", "--json", *more)
    told = plait(*words, variables=environment(cluster)).stdout
    lines = [json.loads(line) for line in told.splitlines()]
    return [(one["what"], one["job"], one["where"], one["nodes"]) for one in lines if one["what"] != "round"]


def reserve(cluster: SlurmCluster, seconds: float) -> None:
    begin = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))
    ask(cluster, "scontrol", "create", "reservation", "ReservationName=lpj", f"StartTime={begin}", "Duration=60",
        "Nodes=n2", "Users=root", "Flags=STATIC_ALLOC,IGNORE_JOBS")  # fmt: skip


def opted_in(cluster: SlurmCluster) -> None:
    with cluster.conf.open("a") as conf:
        conf.write("PartitionName=gated Nodes=ALL MaxTime=INFINITE State=UP\n")
    ask(cluster, "scontrol", "reconfigure")


def states(cluster: SlurmCluster) -> dict[str, str]:
    return dict(line.split() for line in ask(cluster, "squeue", "-h", "-o", "%A %T").splitlines())


def saved(cluster: SlurmCluster, reservation: str, since: float) -> bool:
    """Whether the controller has saved the reservation, and the jobs after ``since`` (seconds of
    the epoch).

    It saves every few seconds.  Until it has, and while it puts a new file in place, there is none.
    """
    state = cluster.folder / "state"
    try:
        reservations = (state / "resv_state").read_bytes()
        return reservation.encode() in reservations and (state / "job_state").stat().st_mtime > since
    except FileNotFoundError:
        return False


def test_jobs_are_let_in_beside_and_inside_a_reservation_whoever_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    with slurm_cluster(2) as cluster:
        opted_in(cluster)
        reserve(cluster, 600)
        foreign = ask(cluster, "sbatch", "--parsable", "--hold", "-p", "all", "--wrap=true").strip()
        long, other = submit(cluster, 300), submit(cluster, 300, "jct=20m")
        short, urgent = submit(cluster, 300, "jct=9m"), submit(cluster, 300, "jct=20m,priority=7")
        assert one_round(cluster, "--dry-run") == [
            ("start", urgent, "outside", ["n1"]), ("start", short, "lpj", ["n2"]),
        ]  # fmt: skip
        assert set(states(cluster).values()) == {"PENDING"}
        assert [one[:3] for one in one_round(cluster)] == [("start", urgent, "outside"), ("start", short, "lpj")]
        wait_until(lambda: states(cluster)[short] == "RUNNING", "the job did not start in the zone", seconds=60)
        began = time.time()
        wait_until(lambda: saved(cluster, "lpj", began), "the controller saved nothing", seconds=60)
        os.kill(json.loads((cluster.folder / "pids.json").read_text())["slurmctld"], signal.SIGKILL)
        wait_until(lambda: len(cluster.states()) == 2, "the controller did not come back", seconds=60)
        assert one_round(cluster) == [], "both nodes are taken"
        now = states(cluster)
        assert (now[urgent], now[short], now[long], now[other]) == ("RUNNING", "RUNNING", "PENDING", "PENDING")
        monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
        view = SlurmQueue("gated", "", ("lpj",)).look()
        job = next(job for job in view.jobs if job.name == short)
        assert job.mark and job.mark.zones == ("lpj",) and job.nodes == ("n2",)
        ask(cluster, "scontrol", "update", "ReservationName=lpj", "StartTime=now")  # it comes early
        assert [one[:2] for one in one_round(cluster, "late=wait")] == []
        assert [one[:2] for one in one_round(cluster)] == [("requeue", short)]
        wait_until(lambda: states(cluster)[short] != "RUNNING", "the late job was not sent back", seconds=60)
        assert states(cluster)[foreign] == "PENDING", "nobody has touched who did not opt in"
