"""Training logs of other frameworks as timed runs: detects a log's framework, its configuration and
its step times.

| missing in the log | substitute |
|---|---|
| the configuration | a separate file: one that ``plait.plan.read_config`` reads, or a job |
| single keys | ``section.key=value`` settings |
| the ranks | the configuration's; if both are there, the log's count, and the difference is reported |

Colours and a launcher's prefix of lines (``[rank0]:``, ``[default0]:``, ``0:``) are skipped.
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
from plait.core.base.ignored_input import IgnoredInput
from plait.core.cluster.hardware import Device
from plait.core.job.spec import Job
from plait.core.model.spec import ModelSpec
from plait.formats.base.frameworks import Framework, framework_of
from plait.formats.base.parsed_config import ParsedConfig
from plait.formats.base.step_log import LoggedSteps, step_times
from plait.formats.megatron import log as megatron_log
from plait.formats.megatron.log import MegatronLog
from plait.formats.torchtitan import log as torchtitan_log
from plait.formats.torchtitan.log import TorchtitanLog
from plait.plan.calibrate.recorded import PricedStep
from plait.plan.search.job_options import options_of
from plait.plan.search.request import point_of

LIMITS = Most(size=256 << 20, line=1 << 20, lines=4_000_000)
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}[A-Za-z]")
_PREFIX = re.compile(r"^(?:\[(?:rank|default|Rank )?\d{1,7}[^\]]{0,40}\]:? ?|\d{1,7}: ?)")
_STARTS = {
    "megatron": (megatron_log.BEGIN, megatron_log.STEP),
    "torchtitan": (torchtitan_log.STEP, torchtitan_log.MESH, torchtitan_log.OLD_MESH),
}
"""Patterns of lines that identify a framework's log."""


@dataclass(frozen=True, kw_only=True)
class TrainingLog:
    """A training log. configuration: its configuration; None if it prints none. read: its parsed
    lines. device: as the log names it, or empty. over: counts of what was skipped."""

    file: str
    framework: str
    configuration: ParsedConfig | None
    read: MegatronLog | TorchtitanLog
    device: str
    over: IgnoredInput


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """A log's run as input of the closed form. folder: the log's name. times: the step times that
    it prints. point: its strategy, as columns of ``StrategyTable``. framework: the one that ran it.
    """

    folder: str
    times: LoggedSteps
    job: Job
    model: ModelSpec
    point: dict[str, int]
    framework: Framework | None

    @property
    def seconds(self) -> float:
        """Seconds per step."""
        return self.times.seconds

    def priced_step(self, device: Device) -> PricedStep:
        """Return the run's step as the closed form prices it on a device."""
        options = options_of(self.job, device, self.framework)
        return PricedStep(self.point, self.model, self.job.data.sequence_length, self.job.train.precision, options)


def framework_of_log(path: Path) -> str:
    """Return the framework that wrote a log; empty if the file is not a log. Raises JobError if the
    file cannot be read."""
    for line in _lines(path):
        for name, patterns in _STARTS.items():
            if any(pattern.search(line) for pattern in patterns):
                return name
    return ""


def read_training_log(path: Path, framework: str) -> TrainingLog:
    """Read a log of ``framework``. Raises JobError if the log cannot be read, or contradicts
    itself."""
    over = IgnoredInput()
    log = {"megatron": MegatronLog, "torchtitan": TorchtitanLog}[framework](str(path), over)
    for line in _lines(path):
        log.add(line)
    device = log.device if isinstance(log, TorchtitanLog) else ""
    return TrainingLog(
        file=str(path), framework=framework, configuration=log.configuration(), read=log, device=device, over=over
    )


def run_of_log(
    log: TrainingLog, configuration: ParsedConfig | Job | None, overrides: Sequence[str], vocab: int
) -> LoggedRun:
    """Return the log's run as input of the closed form.

    configuration: the configuration for a log without one. vocab: for a job that does not set one.
    Raises JobError if the configuration is missing or contradicts itself, or if the log has too few
    steps.
    """
    given = log.configuration or configuration
    if given is None:
        fix = "Give the log from its start, or its configuration beside it (a script, a torchtitan module, a job)"
        raise JobError("does not say which configuration ran", file=log.file, fix=fix)
    runs = given.runs if isinstance(given, ParsedConfig) else None
    job = (
        given.job(overrides)
        if isinstance(given, ParsedConfig)
        else given.changed(list(overrides))
        if overrides
        else given
    )
    framework = runs or framework_of(job.plan.framework) or framework_of(log.framework)
    if len(set(job.degrees)) > 1:
        raise JobError("has pp ranks of different sizes", file=log.file, fix="Leave this log out")
    if job.open:
        problem = f"{', '.join(job.open)} are left open, so it is unknown what ran"
        raise JobError(problem, file=log.file, fix="Give a job in which every key says what ran")
    point = point_of(job)
    ranks = math.prod(point[name] for name in ("pp", "dp", "cp", "tp"))
    batch = job.train.global_batch_size
    lines = log.read.seconds_of(batch * job.data.sequence_length / ranks)
    return LoggedRun(
        folder=log.file, times=step_times(lines, batch, log.file, log.over), job=job, model=job.model_spec(vocab),
        point=framework.adapt(point) if framework else point, framework=framework,
    )  # fmt: skip


def describe_differences(log: TrainingLog, configuration: ParsedConfig | Job | None) -> list[str]:
    """Return a sentence on the settings in which a separate configuration differs from the log;
    empty if it agrees. In a job every key has a default: there only whole numbers count, and 0
    counts as not set."""
    if log.configuration is None or configuration is None:
        return []
    values = configuration.values if isinstance(configuration, ParsedConfig) else configuration.to_dict()
    said: list[str] = []
    for section, table in log.configuration.values.items():
        for key, own in table.items():
            other = values.get(section, {}).get(key)
            if other not in (None, own) and (
                isinstance(configuration, ParsedConfig) or (isinstance(own, int) and other)
            ):
                said.append(f"{section}.{key} is {own} in the log and {other}")
    name = configuration.file if isinstance(configuration, ParsedConfig) else "the job beside it"
    return [f"{log.file} and {name} differ: {', '.join(said)}; what the log says ran, counts."] if said else []


def _lines(path: Path) -> Iterator[str]:
    """Yield a text file's lines without terminal colours and launchers' prefixes. Raises JobError
    if it cannot be read."""
    try:
        with open_unpacked(path, LIMITS) as stream:
            for line in stream:
                plain = _COLOUR.sub("", line.decode(errors="replace")).rstrip("\r\n")
                yield _PREFIX.sub("", plain)
    except (OSError, ValueError) as error:
        problem = f"cannot be read: {reason_of(error)}"
        raise JobError(problem, file=str(path), fix="Name a text file, or one that is packed whole") from None
