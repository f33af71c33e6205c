"""Slurm's queue as admission reads it, and the commands that it gives: against texts of Slurm
22.05."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import pytest

from plait.core.base.errors import LaunchError
from plait.launch.live_queue import MOST, AdmissionRecord, AdmissionTerms, QueuedJob
from plait.launch.slurm import queue as slurm_queue
from plait.launch.slurm.queue import SlurmQueue
from plait.place.queue.live import LiveCluster, LiveJob, decide

QUEUE = SlurmQueue("gated", "", ("lpj",))
JOB = """JobId={id} JobName=a name with Partition=all in it
   UserId=eva(1000) GroupId=eva(1000) MCS_label=N/A
   Priority={priority} Nice={nice} Account=(null) QOS=(null)
   JobState={state} Reason={reason} Dependency={dependency}
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:00 TimeLimit={limit} TimeMin=N/A
   SubmitTime=1000 EligibleTime=Unknown
   StartTime={start} EndTime=Unknown Deadline=N/A
   Partition={partition} AllocNode:Sid=localhost:3960
   ReqNodeList={asked} ExcNodeList=(null)
   NodeList={nodes}
   NumNodes={count} NumCPUs=1 NumTasks=1 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   TRES=cpu=1,node=1
   Features=(null) DelayBoot=00:00:00
   Command=/home/eva/JobState=RUNNING Partition=all.sh
   AdminComment={admin}
   Comment={comment}
   TresPerNode={tres}
"""
USUAL = {
    "priority": "0", "nice": "0", "state": "PENDING", "reason": "JobHeldUser", "dependency": "(null)",
    "limit": "UNLIMITED", "start": "Unknown", "partition": "gated", "asked": "(null)", "nodes": "(null)",
    "count": "1-1", "comment": "", "admin": "", "tres": "(null)",
}  # fmt: skip
NODE = """NodeName={name} Arch=x86_64 CoresPerSocket=1
   CPUAlloc={alloc} CPUEfctv=64 CPUTot=64 CPULoad=0.00
   Gres={gres}
   GresUsed={used}
   OS=Linux 6.1 State=DOWN #1
   State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1
   Reason=Not responding State=DOWN [root@now]
"""
PARTITION = "PartitionName=gated\n   AllowGroups=ALL\n   Nodes=n[1-2]\n   State=UP TotalCPUs=2\n"
RESERVATION = (
    "ReservationName=lpj StartTime=5000 EndTime=9000 Duration=01:00:00\n   Nodes=n2 NodeCnt=1 Flags=IGNORE_JOBS\n"
)


def job_text(number: int, **values: str) -> str:
    return JOB.format(id=number, **(USUAL | values))


def node_text(name: str, **values: str) -> str:
    usual = {"alloc": "0", "gres": "(null)", "used": "gpu:0", "state": "IDLE"}
    return NODE.format(name=name, **(usual | values))


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, ...]]]:
    """A Slurm that prints these texts, and lists these jobs (None: all of them), of which some are
    printed ``alone``, otherwise; returns the other commands that it is given."""

    def there(
        jobs: str = "",
        nodes: str = node_text("n1") + node_text("n2"),
        listed: Sequence[str] | None = None,
        **alone: str,
    ) -> list[tuple[str, ...]]:
        given: list[tuple[str, ...]] = []
        texts = {"job": jobs, "node": nodes, "partition": PARTITION, "reservation": RESERVATION}

        def command(*argv: str) -> str:
            if "show" in argv:
                what, *names = argv[argv.index("show") + 1 :]
                return alone[names[0]] if names else texts[what]
            if argv[0] == "squeue":
                return "\n".join(listed if listed is not None else re.findall(r"(?m)^JobId=(\d+)", jobs))
            given.append(argv)
            return ""

        monkeypatch.setattr(slurm_queue, "command", command)
        return given

    return there


def one(slurm: Callable[..., object], **values: str) -> QueuedJob:
    slurm(job_text(7, **values))
    (job,) = QUEUE.look().jobs
    return job


def test_a_job_is_read(slurm: Callable[..., object]) -> None:
    job = one(slurm, comment="jct=90m,priority=3 preemptible Partition=all", count="2-2", limit="1-02:30:00")
    assert (job.name, job.state, job.held, job.ready, job.submit) == ("7", "waiting", True, True, 1000.0)
    assert (job.gpus, job.jct, job.priority, job.preemptible, job.mark) == (2, 5400.0, 3, True, None)
    assert job.limit == job.own_limit == "1-02:30:00" and job.nodes == ()
    other = one(slurm, limit="02:00:00", nice="-4", comment="jct=soon")
    assert (other.jct, other.priority, other.preemptible) == (7200.0, 4, False), "the limit, where nobody says better"
    assert one(slurm).jct == inf
    assert not one(slurm, dependency="afterok:5(unfulfilled)").ready


@pytest.mark.parametrize(
    ("comment", "preemptible", "priority", "jct", "told"),
    [
        ("preemptible", True, -3, 60.0, False), ("preemptible=yes", True, -3, 60.0, False),
        ("preemptible=no", False, -3, 60.0, False), ("preemptible=False", False, -3, 60.0, False),
        ("jct=soon", False, -3, 60.0, False), ("jct=", False, -3, 60.0, False), ("jct=0", False, -3, 0.0, True),
        (f"jct={'9' * 400}d", False, -3, 60.0, False), (f"priority={'9' * 30}", False, MOST, 60.0, False),
        (f"priority=-{'9' * 30}", False, -MOST, 60.0, False), (f"priority={'9' * 5000}", False, -3, 60.0, False),
    ],
)  # fmt: skip
def test_what_users_write_stops_nobody_elses_jobs(
    slurm: Callable[..., object], comment: str, preemptible: bool, priority: int, jct: float, told: bool
) -> None:
    """A "no" was taken for a yes, and a number that no machine holds ended the loop for all."""
    job = one(slurm, comment=comment, nice="3", limit="00:01:00")
    assert (job.preemptible, job.priority, job.jct, job.has_jct) == (preemptible, priority, jct, told)
    waiting = [LiveJob(name=job.name, submit=1.0, gpus=1, jct=job.jct, priority=job.priority)]
    cluster = LiveCluster(used={"n1": 0}, size=8, zones=())
    assert [start.job.name for start in decide(waiting, cluster, 2.0)] == [job.name]


def test_whose_jobs_are_left_alone(slurm: Callable[..., object]) -> None:
    jobs = job_text(1, partition="all") + job_text(2, reason="JobHeldAdmin") + job_text(3, asked="n1")
    jobs += job_text(4).replace("JobId=4", "JobId=4 ArrayJobId=4 ArrayTaskId=0-3") + job_text(5)
    slurm(jobs)
    view = QUEUE.look()
    assert [job.name for job in view.jobs] == ["5"]
    assert set(view.passed) == {"2", "3", "4"} and "certain nodes" in view.passed["3"]


MARK = f"   AdminComment={AdmissionRecord(submit=1.0).text()}"
FORGED = job_text(6, comment="preemptible")
"""Another record of job 6 than Slurm has of it, which its user did not write."""


@pytest.mark.parametrize(
    "jobs",
    [
        job_text(5, comment=f"jct=90m\n{FORGED}"),
        job_text(5).replace("JobName=a name", f"JobName=na\n{FORGED.splitlines()[0]}"),
    ],
    ids=["comment", "name"],
)
def test_nobody_writes_the_record_of_somebody_elses_job(slurm: Callable[..., object], jobs: str) -> None:
    """Slurm prints names and comments as they are, ends of lines included."""
    true = job_text(6, nice="2")
    slurm(jobs + true, listed=["5", "6"], **{"6": true})
    view = QUEUE.look()
    (job,) = (one for one in view.jobs if one.name == "6")
    assert (job.preemptible, job.priority) == (False, -2)
    slurm(jobs + job_text(6, partition="all"), listed=["5"])
    assert {one.name for one in QUEUE.look().jobs} <= {"5"}


@pytest.mark.parametrize(
    "jobs",
    [
        job_text(5).replace("JobName=a name", f"JobName=na\n{MARK}"),
        job_text(5).replace(
            "JobName=a name", "JobName=na\n   UserId=root(0)\n   AdminComment=" + AdmissionRecord(submit=1.0).text()
        ),
        job_text(5, comment=f"x\n{MARK}"),
        job_text(5).replace("JobName=a name", "JobName=na\nJobId=6 JobName=y"),
    ],
    ids=["name", "name and user", "comment", "record"],
)
def test_a_job_whose_name_or_comment_passes_for_fields_is_left_alone(slurm: Callable[..., object], jobs: str) -> None:
    slurm(jobs, listed=["5"])
    view = QUEUE.look()
    assert not view.jobs and set(view.passed) == {"5"} and "look like Slurm's own" in view.passed["5"]


def test_a_job_that_has_gone_is_no_job(slurm: Callable[..., object]) -> None:
    slurm(job_text(6), listed=["5", "6"])
    assert [job.name for job in QUEUE.look().jobs] == ["6"]


def test_nodes_and_reservations(slurm: Callable[..., object]) -> None:
    slurm("", node_text("n1", alloc="8", state="MIXED") + node_text("n2", state="IDLE+DRAIN") + node_text("n9"))
    view = QUEUE.look()
    assert (view.used, view.size) == ({"n1": 1, "n2": 1}, 1), "n9 is of another partition; a node that drains is none"
    (kept,) = view.reservations
    assert (kept.name, kept.nodes, kept.start, kept.end) == ("lpj", frozenset({"n2"}), 5000.0, 9000.0)
    gpus = {"gres": "gpu:h100:8(S:0-1)", "used": "gpu:h100:3(IDX:0-2)"}
    slurm(job_text(1, tres="gres:gpu:h100:4", count="2"), node_text("n1", **gpus) + node_text("n2", **gpus))
    view = replace(QUEUE, reservations=()).look()
    assert (view.used, view.size, view.jobs[0].gpus) == ({"n1": 3, "n2": 3}, 8, 8)
    with pytest.raises(LaunchError, match="no partition 'gate'"):
        replace(QUEUE, partition="gate").look()
    with pytest.raises(LaunchError, match="no reservation 'none'"):
        replace(QUEUE, reservations=("lpj", "none")).look()


@pytest.mark.parametrize("zones", [(), ("lpj",), ("lpj", "second")])
def test_a_mark_is_read_again(zones: tuple[str, ...]) -> None:
    for until in (inf, 5000.0):
        mark = AdmissionRecord(submit=1000.0, at=2000.0, until=until, limit="1-00:00:00", zones=zones)
        assert AdmissionRecord.read(mark.text()) == mark
    assert AdmissionRecord.read("somebody's own comment") is None


def test_what_starts_in_a_zone_ends_before_it_is_due(slurm: Callable[..., list[tuple[str, ...]]]) -> None:
    job = one(slurm)
    given = slurm()
    in_zone = AdmissionTerms(nodes=("n2",), gpus=(1,), zones=("lpj",), until=5000.0, now=4521.0)
    QUEUE.start(job, in_zone)
    (update, release) = given
    assert release == ("scontrol", "release", "7")
    assert "TimeLimit=7" in update and "ReqNodeList=n2" in update, "479 s are seven whole minutes"
    mark = AdmissionRecord.read(next(word for word in update if word.startswith("AdminComment=")))
    assert mark == AdmissionRecord(submit=1000.0, at=4521.0, until=5000.0, limit="UNLIMITED", zones=("lpj",))
    given.clear()
    QUEUE.start(replace(job, limit="00:03:00"), in_zone)
    assert "TimeLimit=3" in given[0], "its own limit where that is shorter"
    given.clear()
    QUEUE.start(job, AdmissionTerms(nodes=("n1",), gpus=(1,), zones=(), until=inf, now=4521.0))
    assert not any(word.startswith("TimeLimit") for word in given[0])


def test_a_limit_is_put_right_once_a_job_runs(slurm: Callable[..., list[tuple[str, ...]]]) -> None:
    mark = AdmissionRecord(submit=1000.0, at=4521.0, until=5000.0, limit="UNLIMITED", zones=("lpj",))
    job = one(slurm, state="RUNNING", start="4530", limit="00:07:00", admin=mark.text(), nodes="n2", priority="5")
    given = slurm()
    QUEUE.settle(job)
    assert given == [("scontrol", "update", "JobId=7", "TimeLimit=9")], "470 s, to the minute after"
    given.clear()
    QUEUE.settle(replace(job, limit="00:09:00"))
    assert given == []


def test_a_job_that_comes_back_is_as_it_was(slurm: Callable[..., list[tuple[str, ...]]]) -> None:
    """Slurm counts its submission anew; the mark does not."""
    mark = AdmissionRecord(submit=500.0, at=4521.0, until=5000.0, limit="01:00:00", zones=("lpj",))
    job = one(slurm, state="RUNNING", start="4530", limit="00:07:00", admin=mark.text(), nodes="n2")
    assert (job.submit, job.own_limit, job.jct) == (500.0, "01:00:00", 3600.0)
    given = slurm()
    QUEUE.send_back(job)
    assert given[1] == ("scontrol", "requeuehold", "7")
    kept = AdmissionRecord.read(given[0][-1])
    assert kept and (kept.submit, kept.limit) == (500.0, "01:00:00")
    given.clear()
    QUEUE.restore(replace(job, mark=kept))
    assert {"ReqNodeList=", "TimeLimit=01:00:00"} <= set(given[0])
    waiting = AdmissionRecord.read(given[0][-1])
    assert waiting and (waiting.at, waiting.submit) == (0.0, 500.0)
    given.clear()
    QUEUE.hold(replace(job, mark=None))
    assert given == [("scontrol", "uhold", "7")]
