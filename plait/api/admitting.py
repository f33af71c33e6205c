"""Live admission control for a cluster with a planned job: opted-in jobs are held, and started by
Algorithm 1 of Arnold (arXiv 2509.15940).

A round takes a snapshot of the cluster, decides and acts. No round needs state that an earlier
round kept in memory, so the process can be killed and restarted at any moment. A replay decides
with the same function (``place/queue/admission.py``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from math import inf
from pathlib import Path
from typing import Literal

from plait.core.base.codec.data import Texts
from plait.core.base.errors import JobError, LaunchError
from plait.core.base.text import counted
from plait.launch.live_queue import AdmissionTerms, LiveQueue, QueuedJob, QueueView, seconds_of
from plait.launch.watch import catching_signals, say
from plait.place.queue.live import LiveCluster, LiveJob, LiveStart, LiveZone, decide

Forecast = Callable[[Sequence[QueuedJob]], Sequence[float]]
"""A function that returns the predicted run times of jobs, in seconds."""
GRACE = 120.0
"""The longest time, in seconds, that an admitted job may wait for Slurm to start it, before it is
held and decided again."""


@dataclass(frozen=True, kw_only=True)
class AdmissionAction:
    """An action on a job. at: seconds since 1970. where: ``outside``, or the zones that the job
    enters; empty for other actions. until: seconds since 1970 at which the first of these zones is
    due; None outside zones."""

    at: float
    job: str
    what: Literal["hold", "start", "requeue", "restore"]
    where: str = ""
    nodes: tuple[str, ...] = ()
    until: float | None = None

    def line(self) -> str:
        """Return the action as a line of text for the user."""
        clock = time.strftime("%H:%M:%S", time.localtime(self.at))
        where = f" {self.where} on {','.join(self.nodes)}" if self.nodes else ""
        return f"{clock}  {self.what} {self.job}{where}"

    def to_json(self) -> str:
        """Return the action as a line of JSON."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, kw_only=True)
class Round:
    """The queue as a round sees it before it admits jobs. at: seconds since 1970. waiting, running:
    names of opted-in jobs. used: GPUs in use on every node, including those of jobs that are about
    to start. passed: jobs that are left alone, with the reason."""

    at: float
    waiting: tuple[str, ...]
    running: tuple[str, ...]
    used: dict[str, int]
    passed: Mapping[str, str]

    def to_json(self) -> str:
        """Return the round as a line of JSON."""
        return json.dumps({"what": "round"} | asdict(self))


@dataclass(frozen=True, kw_only=True)
class AdmissionController:
    """Controller that admits jobs of a queue, round by round. late_policy: which opted-in jobs are
    requeued if they are still in a zone when it is due: all (``preempt``), or only preemptible jobs
    (``wait``). forecast: predicts run times; None: jobs state their own. dry: True to report
    actions without performing them. report: called with each round and action. predicted_seconds:
    predicted run times by job name."""

    queue: LiveQueue
    late_policy: Literal["preempt", "wait"] = "preempt"
    forecast: Forecast | None = None
    dry: bool = False
    report: Callable[[AdmissionAction | Round], None] = field(default=lambda _: None)
    predicted_seconds: dict[str, float] = field(default_factory=dict[str, float])

    def round(self) -> Round:
        """Run one round: look at the queue, decide and act. Raises LaunchError if the cluster
        manager does not answer."""
        view, now = self.queue.look(), time.time()
        due = {one.name: one.start for one in view.reservations if one.start <= now < one.end}
        taken = {node for one in view.reservations if one.name in due for node in one.nodes}
        waiting: list[QueuedJob] = []
        used = dict(view.used)
        for job in view.jobs:
            if job.state == "running":
                self._check_running(job, now, taken)
            elif job.state == "waiting" and self._hold_waiting(job, view, used, now):
                waiting.append(job)
        going = tuple(job.name for job in view.jobs if job.state in ("running", "ending"))
        seen = Round(
            at=now, waiting=tuple(job.name for job in waiting), running=going, used=used, passed=view.passed
        )  # fmt: skip
        self.report(seen)
        by_name = {job.name: job for job in waiting}
        there = _cluster(view, used, self.queue.closing_seconds, now)
        believed = self._with_predicted_seconds([job for job in waiting if job.ready])
        for one in decide([_live(job, jct) for job, jct in believed], there, now):
            self._start(by_name[one.job.name], one, now)
        return seen

    def _with_predicted_seconds(self, jobs: Sequence[QueuedJob]) -> list[tuple[QueuedJob, float]]:
        """Return (job, run time in seconds: stated, predicted or inf) of each job. Each job is
        forecast once, because its properties at submission do not change."""
        unknown = [job for job in jobs if not job.has_jct and job.name not in self.predicted_seconds]
        if self.forecast and unknown:
            seconds = self.forecast(unknown)
            self.predicted_seconds.update(zip((job.name for job in unknown), seconds, strict=True))
        return [
            (job, job.jct if job.has_jct else min(job.jct, self.predicted_seconds.get(job.name, inf))) for job in jobs
        ]

    def _check_running(self, job: QueuedJob, now: float, taken: set[str]) -> None:
        """Requeue a running job if its zone is due; otherwise only correct its time limit."""
        if set(job.nodes) & taken and (job.preemptible or self.late_policy == "preempt"):
            self._perform(AdmissionAction(at=now, job=job.name, what="requeue"), lambda: self.queue.send_back(job))
        elif job.mark and job.mark.until < inf and not self.dry:
            self.queue.settle(job)

    def _hold_waiting(self, job: QueuedJob, view: QueueView, used: dict[str, int], now: float) -> bool:
        """Return True if a job that does not run is to be decided in this round; the job is then
        held. A job that was admitted less than ``GRACE`` seconds ago keeps its nodes until it has
        started."""
        if job.held:
            if job.mark and job.mark.at:
                self._perform(AdmissionAction(at=now, job=job.name, what="restore"), lambda: self.queue.restore(job))
            return True
        if job.mark and now - job.mark.at < GRACE:
            for node in job.requested_nodes:
                each = -(-job.gpus // max(1, len(job.requested_nodes)))
                used[node] = min(view.size, used.get(node, 0) + each)
            return False
        self._perform(AdmissionAction(at=now, job=job.name, what="hold"), lambda: self.queue.hold(job))
        return True

    def _start(self, job: QueuedJob, decision: LiveStart, now: float) -> None:
        where = ",".join(decision.zones) or "outside"
        until = None if decision.until == inf else decision.until
        how = AdmissionTerms(
            nodes=decision.nodes, gpus=decision.gpus, zones=decision.zones, until=decision.until, now=now
        )
        self._perform(
            AdmissionAction(at=now, job=job.name, what="start", where=where, nodes=decision.nodes, until=until),
            lambda: self.queue.start(job, how),
        )

    def _perform(self, action: AdmissionAction, act: Callable[[], None]) -> None:
        """Perform an action, then report it. A job that has ended or changed meanwhile is left to
        the next round."""
        if not self.dry:
            try:
                act()
            except LaunchError as error:
                if not self.queue.job_changed(error):
                    raise
                return
        self.report(action)


@dataclass(frozen=True, kw_only=True)
class AdmitSettings:
    """Settings of ``plait queue admit`` as the user writes them. on: ``slurm`` or ``kubernetes``.
    reservation: names of Slurm reservations, or of Kubernetes taints with their start,
    ``NAME@2030-01-31T22:00``; one for each planned job. partition, qos: of Slurm; their jobs have
    opted in. context, namespace: of Kubernetes. model, trace, columns: a model of ``plait queue
    fit`` and the cluster's past jobs, to predict jobs without a stated run time. interval: time
    between rounds. late: which jobs are requeued if they still run when the planned job is due:
    ``preempt`` requeues all that opted in, ``wait`` only preemptible jobs."""

    on: Literal["slurm", "kubernetes"] = "slurm"
    reservation: Texts = ()
    partition: str = ""
    qos: str = ""
    context: str = ""
    namespace: str = ""
    model: str = ""
    trace: str = ""
    columns: str | None = None
    interval: str = "15s"
    late: Literal["preempt", "wait"] = "preempt"

    @property
    def queue(self) -> LiveQueue:
        """The queue that these settings name. Raises JobError for settings that are incomplete or
        contradictory."""
        if not self.reservation:
            raise JobError("is not set", key="reservation", fix="Write reservation=NAME")
        if self.on == "slurm":
            from plait.launch.slurm.queue import SlurmQueue

            if not self.partition and not self.qos:
                raise JobError(
                    "is not set, so no job has opted in", key="partition", fix="Name the partition, or qos=NAME"
                )
            return SlurmQueue(self.partition, self.qos, tuple(self.reservation))
        if self.partition or self.qos:
            key = "partition" if self.partition else "qos"
            raise JobError(
                "is an option of Slurm alone", key=key, fix="Pods opt in by the scheduling gate plait.dev/admission"
            )
        due = dict(map(_with_time, self.reservation))
        from plait.launch.kubernetes.api import KubernetesNamespace
        from plait.launch.kubernetes.queue import KubernetesQueue

        return KubernetesQueue(KubernetesNamespace(self.context, self.namespace), due)

    @property
    def forecast(self) -> Forecast | None:
        """The predictor of run times; None without a model. Raises JobError for a model without a
        trace, and for a trace without a model; DataError for files that cannot be read."""
        if bool(self.model) != bool(self.trace):
            raise JobError("model and trace go together", key="model, trace", fix="Give both, or neither")
        return forecast_of(Path(self.model), Path(self.trace), self.columns) if self.model else None


def _with_time(text: str) -> tuple[str, float]:
    name, _, when = text.partition("@")
    try:
        return name, datetime.fromisoformat(when).timestamp()
    except ValueError:
        problem = f"'{text}' has no start time, which Kubernetes does not store"
        raise JobError(problem, key="reservation", fix="Write NAME@2030-01-31T22:00") from None


def forecast_of(model: Path, trace: Path, columns: str | None) -> Forecast:
    """Return a predictor of mean run times in seconds. model: a folder of ``plait queue fit``.
    trace: a file with the jobs that the cluster has had. columns: the trace's columns by field;
    None: known ones. Raises JobError and DataError for files that cannot be read."""
    from plait.api.durations import read_jobs
    from plait.place.queue.jct import load
    from plait.place.queue.live import WaitingJob, predict_jct

    fitted, past = load(model), read_jobs(trace, "", columns)

    def seconds(jobs: Sequence[QueuedJob]) -> Sequence[float]:
        return predict_jct(
            fitted, past, [WaitingJob(submit=job.submit, gpus=job.gpus, known=job.known) for job in jobs]
        )

    return seconds


def admit_jobs(
    settings: AdmitSettings, *, once: bool, dry: bool, report: Callable[[AdmissionAction | Round], None]
) -> None:
    """Run rounds until the user ends the program, or one round if ``once``. report: called with
    each round and action. Raises JobError for invalid settings, LaunchError for names that the
    cluster does not know."""
    interval = seconds_of(settings.interval, 0.0)
    if not interval:
        raise JobError(f"'{settings.interval}' is no time", key="interval", fix="Write for example 15s or 1m")
    asked = AdmissionController(
        queue=settings.queue, late_policy=settings.late, forecast=settings.forecast, dry=dry, report=report
    )  # fmt: skip
    say(describe_queue(asked.queue.look()))
    if once:
        asked.round()
        return
    with catching_signals() as signals:
        _watch(asked, interval, signals)


def _watch(controller: AdmissionController, interval: float, signals: Collection[int]) -> None:
    """Run rounds every ``interval`` seconds until a signal arrives. A cluster manager that does not
    answer is queried again, without end."""
    away, passed = False, set[str]()
    while not signals:
        try:
            seen = controller.round()
        except LaunchError as error:
            if not away:
                say(f"no answer ({error}); asking again")
            away = True
        else:
            if away:
                say("answered again")
            away = False
            for job in sorted(seen.passed.keys() - passed):
                say(f"job {job} is left alone: {seen.passed[job]}")
            passed |= seen.passed.keys()
        end = time.monotonic() + interval
        while time.monotonic() < end and not signals:
            time.sleep(min(0.2, interval))


def describe_queue(view: QueueView) -> str:
    """Return a sentence on the queue: its nodes, waiting jobs and reservations."""
    held = sum(job.state == "waiting" for job in view.jobs)
    zones = ", ".join(
        f"{one.name} ({counted(len(one.nodes), 'node')} from {time.strftime('%H:%M:%S', time.localtime(one.start))})"
        for one in view.reservations
    )
    return f"{counted(len(view.used), 'node')}, {counted(held, 'job')} waiting; reserved: {zones}"


def _live(job: QueuedJob, jct: float) -> LiveJob:
    return LiveJob(
        name=job.name, submit=job.submit, gpus=job.gpus, jct=jct, preemptible=job.preemptible,
        priority=job.priority,
    )  # fmt: skip


def _cluster(view: QueueView, used: dict[str, int], closes: float, now: float) -> LiveCluster:
    """Return the cluster as Algorithm 1 needs it. Reservations that have not ended are zones. A
    zone closes ``closes`` seconds before it is due, because no shorter time limit can be set. Nodes
    of jobs that were admitted and have not started count as used."""
    zones = [
        LiveZone(name=one.name, nodes=one.nodes, due=one.start, closes=closes)
        for one in view.reservations
        if now < one.end
    ]
    return LiveCluster(used=used, size=view.size, zones=zones)
