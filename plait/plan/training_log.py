"""Training logs of other frameworks as timed runs: which kind a log is, its configuration, its step times.

| what is missing in the log | what stands for it |
|---|---|
| the configuration | one that is given beside: what ``plait.plan.read_config`` reads, or a job |
| single keys | ``section.key=value`` beside |
| the ranks | the configuration's; the log's own where both are there, and the difference is said |

A launcher's prefix before lines (``[rank0]:``, ``[default0]:``, ``0:``) and colours are passed over.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.core.base.codec.json_text import Most, open_unpacked
from plait.core.base.errors import JobError
from plait.core.base.files import reason_of
from plait.core.base.passed_over import PassedOver
from plait.core.cluster.hardware import Cluster
from plait.core.job.spec import Job
from plait.core.model.spec import ModelSpec
from plait.core.step.columns.points import Points
from plait.core.step.seconds.closed_form import step_seconds
from plait.plan import megatron_log, torchtitan_log
from plait.plan.asking import point_of
from plait.plan.frameworks import Framework, framework_of
from plait.plan.job_options import options_of
from plait.plan.megatron_log import MegatronLog
from plait.plan.step_log import LoggedSteps, step_times
from plait.plan.told import Told
from plait.plan.torchtitan_log import TorchtitanLog

LIMITS = Most(size=256 << 20, line=1 << 20, lines=4_000_000)
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}[A-Za-z]")
_PREFIX = re.compile(r"^(?:\[(?:rank|default|Rank )?\d{1,7}[^\]]{0,40}\]:? ?|\d{1,7}: ?)")
_STARTS = {
    "megatron": (megatron_log.BEGIN, megatron_log.STEP),
    "torchtitan": (torchtitan_log.STEP, torchtitan_log.MESH, torchtitan_log.OLD_MESH),
}
"""What tells a framework's log."""


@dataclass(frozen=True, kw_only=True)
class TrainingLog:
    """A log that was read. told: its configuration, None where it prints none. read: its lines. device: as
    the log names it, or nothing. over: what was passed over."""

    file: str
    framework: str
    told: Told | None
    read: MegatronLog | TorchtitanLog
    device: str
    over: PassedOver


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """A log's run as the closed form knows it. folder: the log's name. framework: that ran it."""

    folder: str
    times: LoggedSteps
    job: Job
    model: ModelSpec
    point: dict[str, int]
    framework: Framework | None

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.times.seconds

    def predicted(self, cluster: Cluster) -> float:
        """Seconds of a step on a cluster, in closed form."""
        asked = {"sequence": self.job.data.sequence_length, "precision": self.job.train.precision}
        options = options_of(self.job, cluster.device, self.framework)
        return float(step_seconds(self.model, Points.of([self.point]), cluster, **asked, options=options).total[0])


def framework_of_log(path: Path) -> str:
    """Whose log a file is; nothing where it is none. Raises JobError for a file that cannot be read."""
    for line in _lines(path):
        for name, patterns in _STARTS.items():
            if any(pattern.search(line) for pattern in patterns):
                return name
    return ""


def read_training_log(path: Path, framework: str) -> TrainingLog:
    """Raises JobError for a log that cannot be read, or contradicts itself."""
    over = PassedOver()
    log = {"megatron": MegatronLog, "torchtitan": TorchtitanLog}[framework](str(path), over)
    for line in _lines(path):
        log.add(line)
    device = log.device if isinstance(log, TorchtitanLog) else ""
    return TrainingLog(file=str(path), framework=framework, told=log.told(), read=log, device=device, over=over)


def run_of_log(log: TrainingLog, beside: Told | Job | None, overrides: Sequence[str], vocab: int) -> LoggedRun:
    """What the log's run is to the closed form. beside: a configuration for a log without one. vocab: of a
    job that does not say. Raises JobError where a configuration is missing or contradicts itself, and where
    too few steps are told."""
    given = log.told or beside
    if given is None:
        fix = "Give the log from its start, or its configuration beside it (a script, a torchtitan module, a job)"
        raise JobError("does not say which configuration ran", file=log.file, fix=fix)
    runs = given.runs if isinstance(given, Told) else None
    job = given.job(overrides) if isinstance(given, Told) else given.changed(list(overrides)) if overrides else given
    framework = runs or framework_of(job.plan.framework) or framework_of(log.framework)
    if len(set(job.degrees)) > 1:
        raise JobError("has places that differ, which the closed form does not describe", file=log.file)
    if job.open:
        problem = f"{', '.join(job.open)} are left open, so nobody knows what ran"
        raise JobError(problem, file=log.file, fix="Give a job in which every key says what ran")
    point = point_of(job)
    ranks = math.prod(point[name] for name in ("pp", "dp", "cp", "tp"))
    batch = job.train.global_batch_size
    lines = log.read.seconds_of(batch * job.data.sequence_length / ranks)
    return LoggedRun(
        folder=log.file, times=step_times(lines, batch, log.file, log.over), job=job, model=job.model_spec(vocab),
        point=framework.point(point) if framework else point, framework=framework,
    )  # fmt: skip


def differing(log: TrainingLog, beside: Told | Job | None) -> list[str]:
    """What a configuration beside a log says otherwise than the log, a sentence each. Of a job, whose keys
    all have defaults, numbers alone count, and 0 is unsaid."""
    if log.told is None or beside is None:
        return []
    values = beside.values if isinstance(beside, Told) else beside.to_dict()
    said: list[str] = []
    for section, table in log.told.values.items():
        for key, own in table.items():
            other = values.get(section, {}).get(key)
            if other not in (None, own) and (isinstance(beside, Told) or (isinstance(own, int) and other)):
                said.append(f"{section}.{key} is {own} in the log and {other}")
    name = beside.file if isinstance(beside, Told) else "the job beside it"
    return [f"{log.file} and {name} differ: {', '.join(said)}; what the log says ran, counts."] if said else []


def _lines(path: Path) -> Iterator[str]:
    """Lines without colours and launchers' prefixes."""
    try:
        with open_unpacked(path, LIMITS) as stream:
            for line in stream:
                plain = _COLOUR.sub("", line.decode(errors="replace")).rstrip("\r\n")
                yield _PREFIX.sub("", plain)
    except (OSError, ValueError) as error:
        problem = f"cannot be read: {reason_of(error)}"
        raise JobError(problem, file=str(path), fix="Name a text file, or one that is packed whole") from None
