"""Runs in a folder: the state, progress and location of each.

All facts are read from the runs' folders, which are not changed. Slurm is queried once if a run was
submitted to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.base.errors import JobError, LaunchError, PlaitError, nearest
from plait.core.base.text import Column, Part, Shown, Table

if TYPE_CHECKING:
    from plait.core.runs.attempts import Attempt
    from plait.core.runs.lock import Held
    from plait.launch.kubernetes.api import KubernetesNamespace
    from plait.launch.kubernetes.objects import ClusterRun

STATES = {"finished": "ended", "stopped": "stopped", "failed": "failed", "cut off": "lost", "running": "lost"}
"""The state of a run without a launcher, by the outcome of its last attempt. A run that is recorded
as running has lost its launcher."""
RUN_FILES = ("plan.json", "attempts.jsonl", "lock.json")
"""Files that identify a run's folder."""


@dataclass(frozen=True, kw_only=True)
class RunView:
    """A run as its folder records it. state: ``running``, ``waiting`` (in Slurm's queue),
    ``ended``, ``stopped`` (on request), ``failed``, ``lost`` (its launcher is gone), ``new`` (never
    started), ``unknown``. job: the model. step, steps, loss: last step, total number of steps and
    last loss; None if unknown. started: the last start, seconds since 1970. where: hosts. why: the
    reason of a failure. pid: the launcher's, if it is a process of this host. slurm: Slurm jobs of
    the run that have not ended."""

    name: str
    folder: Path
    state: str
    job: str = ""
    ranks: int | None = None
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    started: float | None = None
    where: str = ""
    why: str = ""
    pid: int | None = None
    slurm: tuple[str, ...] = ()

    @property
    def is_active(self) -> bool:
        """True if the run is running, or waits for Slurm to start it."""
        return self.state in ("running", "waiting")


@dataclass(frozen=True)
class RunList(Shown):
    """Runs of a folder. notes: sentences on what could not be read."""

    folder: Path
    runs: Sequence[RunView]
    notes: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of every run, for JSON."""
        runs = [asdict(one) | {"folder": str(one.folder)} for one in self.runs]
        return {"folder": str(self.folder), "runs": runs, "notes": list(self.notes)}

    def parts(self) -> Iterator[Part]:
        """Yield a line for each run, and the reasons of runs that failed."""
        header = ("run", "job", "state", Column("step", none="?"), Column("of", none="?"), Column("loss", ".4g"),
                  Column("ranks", none="?"), "started", "where")  # fmt: skip
        rows = [
            (
                one.name,
                one.job or "?",
                one.state,
                one.step,
                one.steps,
                one.loss,
                one.ranks,
                _since(one.started),
                one.where,
            )
            for one in self.runs
        ]
        if rows:
            yield Table(f"Runs in {self.folder}", header, rows)
        else:
            yield f"There are no runs in {self.folder}."
        yield from (f"{one.name} {one.state}: {one.why}" for one in self.runs if one.why and not one.is_active)
        yield from self.notes


def _since(started: float | None) -> str:
    if started is None:
        return "?"
    ago = max(0.0, time.time() - started)
    stamp = datetime.fromtimestamp(started).astimezone()
    if ago >= 86400:
        return stamp.strftime("%Y-%m-%d %H:%M")
    minutes, hours = int(ago) // 60, int(ago) // 3600
    told = f"{hours} h {minutes % 60} min" if hours else f"{minutes} min" if minutes else f"{int(ago)} s"
    return f"{told} ago"


def list_runs(folder: Path | str = "runs") -> RunList:
    """Return the runs of a folder, the one started last at the end; for a run's own folder, this
    run. Raises JobError for a folder that does not exist or cannot be read."""
    folder = Path(folder)
    names = [folder] if is_run(folder) else sorted(_inside(folder))
    queued, notes = _queued(names)
    found = [view_run(one, queued) for one in names]
    return RunList(folder, sorted(found, key=lambda one: (one.started or 0.0, one.name)), notes)


def _inside(folder: Path) -> list[Path]:
    try:
        return [one for one in folder.iterdir() if is_run(one)]
    except OSError as error:
        fix = "Name the folder of runs, which is run.folder of their jobs"
        raise JobError(f"{error.strerror}", file=str(folder), fix=fix) from None


def is_run(folder: Path) -> bool:
    """Return True if the folder is a run's folder."""
    try:
        return folder.is_dir() and any((folder / name).is_file() for name in RUN_FILES)
    except OSError:
        return False


def find_run(word: str, folder: Path | str = "runs") -> Path:
    """Return the folder of a run, given by its path or by its name in ``folder``. Raises JobError
    if neither exists, or if both exist and differ."""
    path, named = Path(word), Path(folder) / word
    found = [one for one in (path, named) if is_run(one)]
    if len(found) == 2 and not path.samefile(named):
        fix = f"Name it by its path: {named.absolute()} or {path.absolute()}"
        raise JobError(f"{path.absolute()} and {named} are two runs", key=f"run {word}", fix=fix)
    if found:
        return found[-1]
    known = [one.name for one in _inside(Path(folder))] if Path(folder).is_dir() else []
    there = f"There are {', '.join(sorted(known)[-10:])}" if known else f"There are no runs in {folder}"
    fix = f"{there}; --folder names another folder of runs"
    raise JobError(f"is no run{nearest(word, known)}", key=f"run {word}", fix=fix)


def _queued(folders: Sequence[Path]) -> tuple[list[tuple[str, Path]], list[str]]:
    """Return (the jobs in Slurm's queue with their batch scripts, if a run was submitted to Slurm;
    a note if Slurm does not answer)."""
    from plait.launch.slurm import commands as slurm

    if not any((one / slurm.SCRIPT).is_file() for one in folders):
        return [], []
    try:
        return slurm.queue(), []
    except LaunchError as error:
        return [], [f"note: whether runs wait in Slurm's queue is not known: {error}"]


def view_run(folder: Path, queued: Sequence[tuple[str, Path]] | None = None) -> RunView:
    """Return a run as its folder records it, even if the folder is damaged. queued: Slurm's queue;
    None: it is queried."""
    from plait.core.runs.attempts import read_attempts
    from plait.core.runs.history import last_metrics, newest_checkpoint
    from plait.core.runs.lock import lock_state
    from plait.launch.slurm.commands import jobs_of

    queued = _queued([folder])[0] if queued is None else queued
    unreadable, held, why = list[bytes](), None, ""
    attempts = read_attempts(folder, unreadable)
    with suppress(OSError):
        held = lock_state(folder)
    last, jobs = attempts[-1] if attempts else None, tuple(jobs_of(folder, queued))
    state = _state(last, held, jobs, damaged=bool(unreadable))
    metrics = last_metrics(folder / "metrics.jsonl")
    loss, step = metrics.get("loss"), metrics.get("step")
    known = [one for one in (step, last and last.step, newest_checkpoint(folder) or None) if isinstance(one, int)]
    if last and state in ("failed", "lost"):
        why = last.why
        if state == "lost" and (last.outcome == "running" or not why):
            gone = "its launcher is gone; the same command goes on from the last checkpoint"
            why = f"{why} Then {gone}" if why else gone
    job, steps = _job(folder)
    return RunView(
        name=folder.absolute().name, folder=folder, state=state, job=job, ranks=(last and last.world) or None,
        step=max((one for one in known if one >= 0), default=None), steps=steps,
        loss=float(loss) if isinstance(loss, int | float) else None, started=last and last.started,
        where=_where(last, held, jobs, folder), why=why or ("attempts.jsonl cannot be read" * (state == "unknown")),
        pid=held.holder.pid if held and held.holder and held.alive and held.here else None, slurm=jobs,
    )  # fmt: skip


def _state(last: Attempt | None, held: Held | None, jobs: Sequence[str], *, damaged: bool) -> str:
    if held and held.alive:
        return "running"
    if jobs:
        return "waiting"
    if last is None:
        return "unknown" if damaged else "lost" if held else "new"
    return STATES[last.outcome]


def _where(last: Attempt | None, held: Held | None, jobs: Sequence[str], folder: Path) -> str:
    """Return a phrase on where the run runs, or ran last: Slurm jobs or hosts."""
    from plait.core.topology.hostlist import fold

    holder = held.holder if held and held.alive else None
    if holder and holder.job:
        cluster, _, job = holder.job.partition("/")
        return f"Kubernetes {job}" if cluster == "kubernetes" else f"Slurm job {job}"
    if holder:
        return f"{holder.host}, process {holder.pid}"
    if jobs:
        return f"Slurm job {', '.join(jobs)}"
    if logs := sorted(folder.glob("logs/slurm-*.log"), key=lambda one: one.stat().st_mtime):
        return f"Slurm job {logs[-1].stem.removeprefix('slurm-')}"
    return fold(last.hosts) if last and last.hosts else ""


def _job(folder: Path) -> tuple[str, int | None]:
    """Return (the model in a word, total number of steps; None if unknown)."""
    from plait.core.job.spec import Job

    try:
        job = Job.read(folder / "job.toml")
    except PlaitError:
        return "", None
    model = job.model
    said = model.get("preset") or Path(str(model.get("huggingface", ""))).name
    return str(said or f"{model.get('family', '?')} of {model.get('num_layers', '?')} layers"), job.train.steps


# ---- in a cluster ----


def namespace(on: str) -> KubernetesNamespace | None:
    """Return the namespace that ``--on`` names; None for runs whose folders are on this machine.
    Raises JobError."""
    place, _, name = on.partition(":")
    if on == "local":
        return None
    if place != "kubernetes":
        fix = "Use local (also for runs under Slurm, by their folder), kubernetes or kubernetes:NAMESPACE"
        raise JobError(f"'{on}' has no list of runs", key="--on", fix=fix)
    from plait.launch.kubernetes.api import KubernetesNamespace

    return KubernetesNamespace("", name, patience=10.0)


@dataclass(frozen=True)
class ClusterRuns(Shown):
    """Runs of a Kubernetes namespace."""

    namespace_name: str
    runs: Sequence[ClusterRun]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of every run, for JSON."""
        return {"namespace": self.namespace_name, "runs": [asdict(one) for one in self.runs]}

    def parts(self) -> Iterator[Part]:
        """Yield a line for each run."""
        if not self.runs:
            yield f"There are no runs in the namespace {self.namespace_name}."
            return
        rows = [(one.name, one.kind, one.state, one.pods, one.started) for one in self.runs]
        yield Table(
            f"Runs in the namespace {self.namespace_name}", ("run", "kind", "state", Column("pods"), "created"), rows
        )


def cluster_runs(cluster: KubernetesNamespace) -> ClusterRuns:
    """Return the runs of a Kubernetes namespace. Raises LaunchError."""
    from plait.launch.kubernetes.objects import runs_in

    return ClusterRuns(cluster.namespace, runs_in(cluster))
