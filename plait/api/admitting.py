"""A live queue beside a planned job: jobs that opted in are held, and let start as Algorithm 1 has it.

A round looks at the cluster, decides, acts. It keeps nothing in memory that the next one needs, so that
it can be killed at any moment and started again; the same function decides in a replay
(``place/admission.py``).
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
from plait.launch.live_queue import LetIn, LiveQueue, QueuedJob, QueueView, seconds_of
from plait.launch.watch import catching_signals, say
from plait.place.live import LiveCluster, LiveJob, LiveStart, LiveZone, decide

Forecast = Callable[[Sequence[QueuedJob]], Sequence[float]]
"""Seconds of jobs."""
GRACE = 120.0
"""Seconds that a job that was let in may wait for Slurm to start it, before it is held and decided anew."""


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """Something that was done. where: ``outside``, or the zones entered.
    until: seconds since 1970 at which the first of these is due; None outside."""

    at: float
    job: str
    what: Literal["hold", "start", "requeue", "restore"]
    where: str = ""
    nodes: tuple[str, ...] = ()
    until: float | None = None

    def line(self) -> str:
        """For people."""
        clock = time.strftime("%H:%M:%S", time.localtime(self.at))
        where = f" {self.where} on {','.join(self.nodes)}" if self.nodes else ""
        return f"{clock}  {self.what} {self.job}{where}"

    def to_json(self) -> str:
        """A line of JSON."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, kw_only=True)
class Round:
    """What a round saw before it let anybody in: jobs that opted in, and GPUs in use on every node, those of
    jobs that are about to start among them."""

    at: float
    waiting: tuple[str, ...]
    running: tuple[str, ...]
    used: dict[str, int]
    passed: Mapping[str, str]

    def to_json(self) -> str:
        """A line of JSON."""
        return json.dumps({"what": "round"} | asdict(self))


@dataclass(frozen=True, kw_only=True)
class Admitting:
    """A queue that is watched. reservations: names of Slurm's, one a planned job. partition, qos: jobs in
    it have opted in. late: who is still in a zone when it is due, of those that opted in, goes back into
    the queue (``preempt``), or only who is preemptible does (``wait``). dry: say what would be done, and
    do nothing."""

    queue: LiveQueue
    late: Literal["preempt", "wait"] = "preempt"
    forecast: Forecast | None = None
    dry: bool = False
    told: Callable[[Admitted | Round], None] = field(default=lambda _: None)
    foreseen: dict[str, float] = field(default_factory=dict[str, float])

    def round(self) -> Round:
        """Look, decide, act once. Raises LaunchError where Slurm does not answer."""
        view, now = self.queue.look(), time.time()
        due = {one.name: one.start for one in view.reservations if one.start <= now < one.end}
        taken = {node for one in view.reservations if one.name in due for node in one.nodes}
        waiting: list[QueuedJob] = []
        used = dict(view.used)
        for job in view.jobs:
            if job.state == "running":
                self._running(job, now, taken)
            elif job.state == "waiting" and self._kept_back(job, view, used, now):
                waiting.append(job)
        going = tuple(job.name for job in view.jobs if job.state in ("running", "ending"))
        seen = Round(
            at=now, waiting=tuple(job.name for job in waiting), running=going, used=used, passed=view.passed
        )  # fmt: skip
        self.told(seen)
        by_name = {job.name: job for job in waiting}
        there = _cluster(view, used, self.queue.closes, now)
        believed = self._believed([job for job in waiting if job.ready])
        for one in decide([_live(job, jct) for job, jct in believed], there, now):
            self._start(by_name[one.job.name], one, now)
        return seen

    def _believed(self, jobs: Sequence[QueuedJob]) -> list[tuple[QueuedJob, float]]:
        """Seconds of each, forecast once: what is known of a job at its submission does not change."""
        unknown = [job for job in jobs if not job.told and job.name not in self.foreseen]
        if self.forecast and unknown:
            seconds = self.forecast(unknown)
            self.foreseen.update(zip((job.name for job in unknown), seconds, strict=True))
        return [(job, job.jct if job.told else min(job.jct, self.foreseen.get(job.name, inf))) for job in jobs]

    def _running(self, job: QueuedJob, now: float, taken: set[str]) -> None:
        """Let it run until its zone is due; then it goes."""
        if set(job.nodes) & taken and (job.preemptible or self.late == "preempt"):
            self._do(Admitted(at=now, job=job.name, what="requeue"), lambda: self.queue.send_back(job))
        elif job.mark and job.mark.until < inf and not self.dry:
            self.queue.settle(job)

    def _kept_back(self, job: QueuedJob, view: QueueView, used: dict[str, int], now: float) -> bool:
        """Whether a job that does not run is to be decided now; it is held. One that was let in a moment ago
        keeps its nodes until it has started."""
        if job.held:
            if job.mark and job.mark.at:
                self._do(Admitted(at=now, job=job.name, what="restore"), lambda: self.queue.restore(job))
            return True
        if job.mark and now - job.mark.at < GRACE:
            for node in job.asked:
                each = -(-job.gpus // max(1, len(job.asked)))
                used[node] = min(view.size, used.get(node, 0) + each)
            return False
        self._do(Admitted(at=now, job=job.name, what="hold"), lambda: self.queue.hold(job))
        return True

    def _start(self, job: QueuedJob, one: LiveStart, now: float) -> None:
        where = ",".join(one.zones) or "outside"
        until = None if one.until == inf else one.until
        how = LetIn(nodes=one.nodes, gpus=one.gpus, zones=one.zones, until=one.until, now=now)
        self._do(
            Admitted(at=now, job=job.name, what="start", where=where, nodes=one.nodes, until=until),
            lambda: self.queue.start(job, how),
        )

    def _do(self, done: Admitted, act: Callable[[], None]) -> None:
        """Act, then tell. A job that has ended or changed meanwhile is looked at again in the next round."""
        if not self.dry:
            try:
                act()
            except LaunchError as error:
                if not self.queue.gone(error):
                    raise
                return
        self.told(done)


@dataclass(frozen=True, kw_only=True)
class AdmitSettings:
    """What is watched, as people write it. on: ``slurm`` or ``kubernetes``. reservation: names of
    Slurm's, or of Kubernetes' taints with their time, ``NAME@2030-01-31T22:00``. partition, qos: of
    Slurm, jobs of which have opted in. context, namespace: of Kubernetes. model, trace, columns: a model
    of ``plait queue fit`` and the jobs that the cluster has had, for jobs that do not say how long they
    run. interval: between two rounds. late: who is still there when the planned job comes: ``preempt``
    all that opted in, or ``wait``."""

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
        """Raises JobError for what does not go together."""
        if not self.reservation:
            raise JobError("none is named", key="reservation", fix="Write reservation=NAME")
        if self.on == "slurm":
            from plait.launch.slurm_queue import SlurmQueue

            if not self.partition and not self.qos:
                raise JobError("nobody has opted in", key="partition", fix="Name the partition, or qos=NAME")
            return SlurmQueue(self.partition, self.qos, tuple(self.reservation))
        if self.partition or self.qos:
            key = "partition" if self.partition else "qos"
            raise JobError("is Slurm's", key=key, fix="Pods opt in by the scheduling gate plait.dev/admission")
        due = dict(map(_with_time, self.reservation))
        from plait.launch.kubernetes_api import KubernetesNamespace
        from plait.launch.kubernetes_queue import KubernetesQueue

        return KubernetesQueue(KubernetesNamespace(self.context, self.namespace), due)

    @property
    def forecast(self) -> Forecast | None:
        """None without a model. Raises JobError for one without a trace."""
        if bool(self.model) != bool(self.trace):
            raise JobError("model and trace go together", key="model, trace", fix="Give both, or neither")
        return forecast_of(Path(self.model), Path(self.trace), self.columns) if self.model else None


def _with_time(text: str) -> tuple[str, float]:
    name, _, when = text.partition("@")
    try:
        return name, datetime.fromisoformat(when).timestamp()
    except ValueError:
        problem = f"'{text}' does not say when it begins, as Kubernetes does not know"
        raise JobError(problem, key="reservation", fix="Write NAME@2030-01-31T22:00") from None


def forecast_of(model: Path, trace: Path, columns: str | None) -> Forecast:
    """Mean seconds by a model of ``plait queue fit``, beside the jobs that the cluster has had. Raises
    JobError and DataError."""
    from plait.api.queue_trace import read_jobs
    from plait.place.live_forecast import WaitingJob, believed
    from plait.place.model_files import load

    fitted, past = load(model), read_jobs(trace, columns)

    def seconds(jobs: Sequence[QueuedJob]) -> Sequence[float]:
        return believed(fitted, past, [WaitingJob(submit=job.submit, gpus=job.gpus, known=job.known) for job in jobs])

    return seconds


def admit_jobs(settings: AdmitSettings, *, once: bool, dry: bool, tell: Callable[[Admitted | Round], None]) -> None:
    """Watch a queue until the user ends it, or once. tell: takes what is seen and done. Raises JobError for
    what cannot be asked, LaunchError for what the cluster does not know."""
    interval = seconds_of(settings.interval, 0.0)
    if not interval:
        raise JobError(f"'{settings.interval}' is no time", key="interval", fix="Write for example 15s or 1m")
    asked = Admitting(
        queue=settings.queue, late=settings.late, forecast=settings.forecast, dry=dry, told=tell
    )  # fmt: skip
    say(described(asked.queue.look()))
    if once:
        asked.round()
        return
    with catching_signals() as signals:
        _watch(asked, interval, signals)


def _watch(asked: Admitting, interval: float, signals: Collection[int]) -> None:
    """Rounds until a signal comes. A controller that does not answer is asked again, without end."""
    away, passed = False, set[str]()
    while not signals:
        try:
            seen = asked.round()
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


def described(view: QueueView) -> str:
    """What is watched, in a sentence."""
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
    """What Algorithm 1 sees: reservations that have not ended are zones, closed from a minute before they
    are due, since no shorter limit can be given. Nodes of jobs that were let in and have not started are
    theirs."""
    zones = [
        LiveZone(name=one.name, nodes=one.nodes, due=one.start, closes=closes)
        for one in view.reservations
        if now < one.end
    ]
    return LiveCluster(used=used, size=view.size, zones=zones)
