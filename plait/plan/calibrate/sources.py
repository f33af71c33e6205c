"""Measurements of a cluster from files: detects each file's kind by its content, and combines them
all.

| file | kind |
|---|---|
| a folder | a run of Plait |
| text with Megatron-LM's arguments or iterations, or torchtitan's mesh or steps | a training log |
| JSON with ``traceEvents``, or an array of events | a trace of PyTorch's profiler (Kineto) |
| nccl-tests' text or JSON, Galvatron's files, a profile of Plait | a profile |
| a file that ``plait.plan.read_config`` reads, and a job | a configuration, for a log without one |

A measured constant replaces the known one if its error is smaller, or if the two differ by more
than either's error. A share that no device and no link can reach (``MOST``) is reported, and no
constant of that kind is taken from the file.

Two sources contradict each other if their values of a constant differ by more than twice their
combined error, and by more than a tenth.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from plait.core.base.codec.json_text import Most, open_unpacked
from plait.core.base.errors import JobError
from plait.core.base.files import reason_of
from plait.core.base.ignored_input import IgnoredInput
from plait.core.base.text import in_bytes, in_seconds
from plait.core.cluster.efficiency import Constant
from plait.core.cluster.hardware import Cluster
from plait.core.cluster.profile import Profile, joined
from plait.core.job.spec import Job
from plait.core.step.seconds import rates
from plait.formats.base.parsed_config import ParsedConfig
from plait.formats.kineto.profile import kineto_profile
from plait.plan.calibrate.fit import constant_of, copy_constants, timed_constants, with_constants
from plait.plan.calibrate.profile_import import import_profile
from plait.plan.calibrate.profiled import with_profile
from plait.plan.calibrate.recorded import Recorded, TimedRun, predicted_seconds
from plait.plan.calibrate.training_log import (
    LoggedRun,
    TrainingLog,
    describe_differences,
    framework_of_log,
    read_training_log,
    run_of_log,
)
from plait.plan.explain.job_cluster import are_different_devices
from plait.plan.read_config import read_configuration

HEAD = 1 << 20
"""Number of bytes at the start of a JSON document that are searched to detect its kind."""
MAX_STEP_RATIO = 3.0
"""Factor between a log's step time and its prediction beyond which no constants are fitted to the
log."""
APART, LEAST_APART = 2.0, 0.1
"""Minimum difference between contradicting values: as a multiple of their combined error, and in
logarithms."""
MOST = {"matmul": 1.25, "attention": 1.25, "memory": 1.5, "inside": 2.5, "across": 2.5}
"""Impossible shares of a peak or a rate, by prefixes of constants' names. A switch that adds up
data in flight (in-network reduction) doubles a link's apparent rate."""
SHARES = ("matmul", "matmul_fp8", "matmul_mxfp8", "matmul_nvfp4", "attention_forward", "attention_backward", "memory",
          "inside.share", "across.share")  # fmt: skip
CONFIGURATIONS = (".py", ".toml", ".yaml", ".yml", ".sh", ".bash", ".slurm", ".sbatch")
_TRACE = re.compile(rb'"(?:traceEvents|schemaVersion|deviceProperties|distributedInfo)"\s*:|^\s*\[\s*\{[^}]{0,500}"ph"')
_CONFIGURED = re.compile(rb'"(?:train_batch_size|train_micro_batch_size_per_gpu|zero_optimization|model_type)(?:"|\.)')
_FLAG = re.compile(rb"(?:^|\s)--[a-z][a-z-]+")
_TEST = re.compile(rb"nccl-tests|rccl-tests|algbw|busbw|_perf\b|#\s+Rank\s+\d+", re.IGNORECASE)


@dataclass(kw_only=True)
class Sources:
    """Measurements of a cluster.

    runs: with step times. profiles: by file. files: description of each file by name. devices:
    device names by file. conflicts: sentences on contradictions. notes: remarks on what was not
    understood. over: counts of what was skipped.
    """

    runs: list[TimedRun] = field(default_factory=list[TimedRun])
    profiles: dict[str, Profile] = field(default_factory=dict[str, Profile])
    files: dict[str, str] = field(default_factory=dict[str, str])
    devices: dict[str, str] = field(default_factory=dict[str, str])
    conflicts: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    over: IgnoredInput = field(default_factory=IgnoredInput)


def source_kind(path: Path) -> str:
    """Return a file's kind: ``run``, ``megatron``, ``torchtitan``, ``trace``, ``profile`` or
    ``configuration``. Raises JobError for any other file."""
    if path.is_dir():
        return "run"
    if path.suffix.partition(":")[0] in CONFIGURATIONS:
        return "configuration"
    head = _head(path)
    if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[") and not _TEST.search(head[:4096].partition(b"\n")[0]):
        if _TRACE.search(head):
            return "trace"
        if _CONFIGURED.search(head):
            return "configuration"
    if framework := framework_of_log(path):
        return framework
    if head.lstrip()[:1] in (b"{", b"[") or _TEST.search(head):
        return "profile"
    if _FLAG.search(head):
        return "configuration"
    fix = "Give a log of Megatron-LM, torchtitan or nccl-tests, a Kineto trace, a profile, or a run's folder"
    raise JobError("is not a file that a cluster can be calibrated with", file=str(path), fix=fix)


def _head(path: Path) -> bytes:
    try:
        with open_unpacked(path, Most(size=1 << 40, line=1 << 40, lines=1 << 40)) as stream:
            return stream.read(HEAD)
    except (OSError, ValueError) as error:
        raise JobError(
            f"cannot be read: {reason_of(error)}", file=str(path), fix="Name a file or a run's folder"
        ) from None


def read_runs(files: Mapping[Path, str], overrides: Sequence[str], vocab: int) -> Sources:
    """Return the timed runs of all files. vocab: for jobs that do not set one. Raises JobError."""
    found = Sources()
    beside = _configurations(files)
    logs = [read_training_log(path, kind) for path, kind in files.items() if kind in ("megatron", "torchtitan")]
    for path in (path for path, kind in files.items() if kind == "run"):
        run = Recorded.read(path)
        found.runs.append(run)
        found.files[str(path)] = f"run of Plait: {run.seconds:.4g} s a step"
    for log in logs:
        _add_log(found, log, _configuration_for(log, beside, alone=len(logs) == 1), overrides, vocab)
    for path in beside:
        found.files.setdefault(str(path), "configuration")
    if beside and not logs:
        problem = "is a configuration, but there is no log of its run"
        raise JobError(problem, file=str(next(iter(beside))), fix="Give the run's log as well")
    if overrides and not logs:
        key = overrides[0].partition("=")[0]
        raise JobError("overrides a log's configuration, but there is no log", key=key, fix="Name the log, too")
    return found


def _add_log(
    sources: Sources, log: TrainingLog, configuration: ParsedConfig | Job | None, overrides: Sequence[str], vocab: int
) -> None:
    run = run_of_log(log, configuration, overrides, vocab)
    sources.runs.append(run)
    sources.devices[log.file] = log.device
    error = f", {run.times.error:.1%} of error" if run.times.error else ""
    sources.files[log.file] = f"log of {log.framework}: {run.times}{error}"
    sources.conflicts += describe_differences(log, configuration)
    told = log.configuration or configuration
    for line in told.lines() if isinstance(told, ParsedConfig) else ():
        sources.notes.append(line if Path(log.file).name in line else f"{Path(log.file).name}: {line}")
    sources.over.add(log.over, Path(log.file).name)


def _configurations(files: Mapping[Path, str]) -> dict[Path, ParsedConfig | Job]:
    named = (path for path, kind in files.items() if kind == "configuration")
    return {path: read_configuration(path) or Job.read(path) for path in named}


def _configuration_for(
    log: TrainingLog, configurations: Mapping[Path, ParsedConfig | Job], *, alone: bool
) -> ParsedConfig | Job | None:
    """Return the configuration for a log: the one with the log's name. Otherwise the only one, if
    the log lacks its own configuration or is ``alone``. Raises JobError if the choice is
    unclear."""
    same = [one for path, one in configurations.items() if path.stem == Path(log.file).stem]
    if len(same) == 1:
        return same[0]
    if len(configurations) == 1 and (alone or log.configuration is None):
        return next(iter(configurations.values()))
    if configurations and log.configuration is None:
        fix = "Name it as the log is named, with its own ending"
        raise JobError(
            f"has no configuration, and it is unclear which of {len(configurations)} it has", file=log.file, fix=fix
        )
    return None


def leave_out_devices(sources: Sources, cluster: Cluster) -> None:
    """Remove logs and measurements of devices that are certainly not the cluster's. Raises JobError
    if nothing is left."""
    other = {
        file: device for file, device in sources.devices.items() if are_different_devices(device, cluster.device.name)
    }
    sources.runs = [run for run in sources.runs if run.folder not in other]
    sources.profiles = {file: one for file, one in sources.profiles.items() if file not in other}
    for file, device in other.items():
        said = f"is of {device}, and {cluster.name} has {cluster.device.name}"
        if not sources.runs and not sources.profiles:
            fix = "Name the cluster that it ran on with --cluster (plait plan lists them), or by a file"
            raise JobError(f"{said}: nothing is left to learn from", file=file, fix=fix)
        sources.conflicts.append(f"{file} {said}: left out.")


def leave_out_other_runs(sources: Sources, cluster: Cluster) -> None:
    """Remove logs of another run or another cluster: their step times are too far from the
    predictions. Raises JobError if nothing is left."""
    unlike = dict[str, str]()
    for run in sources.runs:
        predicted = predicted_seconds(cluster, [run.priced_step(cluster.device)])[0]
        if isinstance(run, LoggedRun) and not 1 / MAX_STEP_RATIO <= run.seconds / predicted <= MAX_STEP_RATIO:
            unlike[run.folder] = f"{run.seconds:.4g} s a step, and {predicted:.4g} s predicted for {cluster.name}"
    sources.runs = [run for run in sources.runs if run.folder not in unlike]
    for file, said in unlike.items():
        if not sources.runs and not sources.profiles:
            fix = "Check --cluster and the configuration: ranks, precision, batch, recomputation"
            raise JobError(f"has {said}: this is another run, or another cluster", file=file, fix=fix)
        sources.conflicts.append(f"{file} has {said}: left out, as another run's or another cluster's.")


# ---- direct measurements ----


@dataclass(frozen=True)
class Measured:
    """Result of all profiles. cluster: with the constants that profiles improve. sources: the files
    that determine each of these constants. fitted: (fitted constant, files) by name, also for
    constants that profiles do not improve."""

    cluster: Cluster
    sources: Mapping[str, Sequence[str]]
    fitted: Mapping[str, tuple[Constant, Sequence[str]]]


def read_profiles(sources: Sources, files: Mapping[Path, str], ranks_per_node: int) -> None:
    """Add the traces and profiles among ``files`` to ``sources``. Raises JobError."""
    for path, kind in files.items():
        own = IgnoredInput()
        if kind == "trace":
            sources.profiles[str(path)] = kineto_profile(path, ranks_per_node, own)
        elif kind == "profile":
            sources.profiles[str(path)] = import_profile(path, own)
        else:
            continue
        sources.files[str(path)] = _words(kind, sources.profiles[str(path)])
        sources.devices[str(path)] = sources.profiles[str(path)].machine.device
        sources.over.add(own, path.name)


def _words(kind: str, profile: Profile) -> str:
    counts = {
        "products": len(profile.products), "attentions": len(profile.attention), "passes": len(profile.passes),
        "modules": len(profile.modules), "sizes of collectives": sum(len(one.points) for one in profile.collectives),
    }  # fmt: skip
    said = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f"{'trace of PyTorch' if kind == 'trace' else 'measurements'}: {said}"


def measured(cluster: Cluster, sources: Sources) -> Measured:
    """Return the cluster with constants from all profiles, and add contradictions to ``sources``.
    Raises JobError if a profile is of another kind of device."""
    if not sources.profiles:
        return Measured(cluster, {}, {})
    begun = _begun(cluster, sources.profiles)
    alone = {file: with_profile(begun[file], profile) for file, profile in sources.profiles.items()}
    cannot = _impossible(sources, cluster, alone)
    told: dict[str, list[str]] = {}
    for name in timed_constants(cluster):
        wrong = cannot.get(_kind(name), ())
        tellers = [file for file, one in alone.items()
                   if file not in wrong and constant_of(one, name) != constant_of(begun[file], name)]  # fmt: skip
        if tellers:
            told[name] = tellers
            values = {file: (constant_of(alone[file], name).value, constant_of(alone[file], name).error)
                      for file in tellers}  # fmt: skip
            sources.conflicts += contradictions(name, values)
    fitted = _together(cluster, list(sources.profiles.values()))
    for kind, wrong in cannot.items():
        right = _together(cluster, [one for file, one in sources.profiles.items() if file not in wrong])
        fitted = copy_constants(fitted, right, _all_of(cluster, kind))
    kept = [name for name in told if not _improves(constant_of(cluster, name), constant_of(fitted, name))]
    surer = {name: files for name, files in told.items() if name not in kept}
    said = {name: (constant_of(fitted, name), files) for name, files in told.items()}
    return Measured(copy_constants(fitted, cluster, kept), surer, said)


def _together(cluster: Cluster, profiles: Sequence[Profile]) -> Cluster:
    """Return the cluster with constants fitted to all profiles at once; the cluster itself if there
    are none."""
    if not profiles:
        return cluster
    return with_profile(cluster, joined(list(profiles)).model_copy(update={
        "products": tuple(one for each in profiles for one in each.products),
        "attention": tuple(one for each in profiles for one in each.attention),
    }))  # fmt: skip


def _begun(cluster: Cluster, profiles: Mapping[str, Profile]) -> dict[str, Cluster]:
    """Return, by file, the cluster with which the file's fit begins. Links inside nodes are part of
    a collective between nodes. So a file without collectives inside nodes begins with the inside
    constants of the other files, unless these are impossible."""
    telling = {file: one for file, one in profiles.items() if any(each.group.nodes == 1 for each in one.collectives)}
    names = _all_of(cluster, "inside")
    inside = copy_constants(cluster, _together(cluster, list(telling.values())), names)
    inside = inside if constant_of(inside, "inside.share").value <= MOST["inside"] else cluster
    return {file: cluster if file in telling else inside for file in profiles}


def _kind(name: str) -> str:
    """Return the kind of hardware that a measured constant describes, a key of ``MOST``; empty for
    other constants."""
    return next((kind for kind in MOST if name.startswith(kind)), "")


def _improves(before: Constant, after: Constant) -> bool:
    """True if the fitted constant is better than the known one: its error is smaller, or it differs
    by more than the error of either."""
    apart = abs(math.log(after.value / before.value)) if before.value > 0 < after.value else math.inf
    return after.error < before.error or apart > max(before.error, after.error)


def _impossible(sources: Sources, cluster: Cluster, alone: Mapping[str, Cluster]) -> dict[str, set[str]]:
    """Return the files that measured more than the hardware can reach (``MOST``), by the constant's
    kind. alone: the cluster fitted to each file alone. Adds a sentence on each to
    ``sources.conflicts``."""
    wrong = dict[str, set[str]]()
    for file, one in alone.items():
        for name in SHARES:
            value, kind = constant_of(one, name).value, _kind(name)
            if constant_of(one, name) != constant_of(cluster, name) and value > MOST[kind]:
                wrong.setdefault(kind, set()).add(file)
                what = "links carry" if "." in name else f"{cluster.device.name} does"
                why = why_too_fast(one, sources.profiles[file]) if kind == "across" else ""
                why = why or "another device, another format, or links used otherwise than predicted"
                sources.conflicts.append(
                    f"{file} says {value:.3g} times what {what} at most ({name}), which cannot be: {why}. Nothing of "
                    f"{kind} is taken from it: {', '.join(_all_of(cluster, kind))} stay as they were."
                )
    return wrong


def _all_of(cluster: Cluster, kind: str) -> list[str]:
    """Return the names of all constants of a kind, which are fitted together with its share."""
    return [name for name in timed_constants(cluster) if _kind(name) == kind]


def contradictions(name: str, values: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return sentences on sources that contradict each other. values: (value, relative error) of a
    constant, by source.

    >>> contradictions("across.share", {"a.log": (0.8, 0.05), "b.log": (0.4, 0.05)})
    ['across.share: a.log says 0.8 (5 % of error), b.log 0.4 (5 %): they contradict each other.']
    >>> contradictions("across.share", {"a.log": (0.8, 0.05), "b.log": (0.82, 0.05)})
    []
    """
    found: list[str] = []
    sources = list(values)
    for at, one in enumerate(sources):
        for other in sources[at + 1 :]:
            (first, error), (second, its) = values[one], values[other]
            apart = abs(math.log(first / second)) if first > 0 < second else math.inf * (first != second)
            if apart > max(LEAST_APART, APART * math.hypot(error, its)):
                found.append(
                    f"{name}: {one} says {first:.3g} ({100 * error:.0f} % of error), {other} {second:.3g} "
                    f"({100 * its:.0f} %): they contradict each other."
                )
    return found


# ---- collectives faster than their links ----


FREE_LINKS = {"across.share": (1e9, 0.0), "across.latency": (1e-9, 0.0), "across.hop": (1e-9, 0.0)}
"""Constants of links between nodes that take no time."""
INSIDE_SHARE = 0.5
"""Share of a measured time between nodes from which on the links inside nodes explain it, so that
no time is left for the links between nodes."""


def why_too_fast(cluster: Cluster, profile: Profile) -> str:
    """Return an explanation of a link share that is too high: by the cluster's constants, links
    inside nodes take most of the largest collective between nodes. Empty if that is not the
    reason."""
    if cluster.efficiency.tiers == "slowest":
        return ""
    curves = [one for one in profile.collectives if one.group.nodes > 1 and one.group.per_node > 1 and one.points]
    if not curves:
        return ""
    free = with_constants(cluster, FREE_LINKS, source="supposed", date=profile.date)
    largest = max(curves, key=lambda one: one.points[-1].bytes)
    point, group = largest.points[-1], largest.group
    inside = float(rates.collective(free, largest.kind, point.bytes, group.ranks, group.stride))
    if inside < INSIDE_SHARE * point.seconds:
        return ""
    share = constant_of(cluster, "inside.share").value
    return (
        f"predictions add up what links inside nodes and between them take, and of the {in_seconds(point.seconds)} of "
        f"its {largest.kind} of {in_bytes(point.bytes)} over {group.nodes} nodes of {group.per_node} the first take "
        f"{in_seconds(inside)} alone (inside.share = {share:.3g}, which a log of one node tells). A collective that "
        'passes both at once is faster than such a sum; efficiency.tiers = "slowest" in the cluster\'s file predicts '
        "it so"
    )
