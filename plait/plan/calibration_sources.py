"""What people have of a cluster, told by content: which kind each file is, and what all say together.

| file | kind |
|---|---|
| a folder | a run of Plait |
| text with Megatron-LM's arguments or iterations, or torchtitan's mesh or steps | a training log |
| JSON with ``traceEvents``, or an array of events | a trace of PyTorch's profiler (Kineto) |
| nccl-tests' text or JSON, Galvatron's files, a profile of Plait | a profile |
| what ``plait.plan.read_config`` reads, and a job | a configuration, of a log without one |

What measurements say of a constant counts where it is surer than what was known, or far from that for what
they are sure of. A share that no device and no link reaches (``MOST``) is named, and nothing of its kind is
taken from that file.

Two sources contradict each other where their values of a constant differ by more than twice their errors
together, and by more than a tenth.
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
from plait.core.base.passed_over import PassedOver
from plait.core.cluster.efficiency import Constant
from plait.core.cluster.hardware import Cluster
from plait.core.cluster.profile import Profile, joined
from plait.core.job.spec import Job
from plait.plan.added_links import why_too_fast
from plait.plan.constants import constant_of, taken_from, timed_constants
from plait.plan.kineto_profile import kineto_profile
from plait.plan.profile_import import import_profile
from plait.plan.profiled import with_profile
from plait.plan.read_config import read_configuration
from plait.plan.recorded import Recorded, TimedRun
from plait.plan.told import Told
from plait.plan.training_log import LoggedRun, TrainingLog, differing, framework_of_log, read_training_log, run_of_log
from plait.plan.where import unlike_devices

HEAD = 1 << 20
"""Bytes by which a JSON document is told."""
UNLIKE = 3.0
"""Factor by which a log's step and its prediction differ, from which on no constants are taken for why."""
APART, LEAST_APART = 2.0, 0.1
"""Errors by which values differ that contradict each other, and how far apart they are at least."""
MOST = {"matmul": 1.25, "attention": 1.25, "memory": 1.5, "inside": 2.5, "across": 2.5}
"""By beginnings of constants' names, shares of a peak or a rate that nothing reaches; a switch that sums up
doubles what a link seems to carry."""
SHARES = ("matmul", "matmul_fp8", "matmul_mxfp8", "matmul_nvfp4", "attention_forward", "attention_backward", "memory",
          "inside.share", "across.share")  # fmt: skip
CONFIGURATIONS = (".py", ".toml", ".yaml", ".yml", ".sh", ".bash", ".slurm", ".sbatch")
_TRACE = re.compile(rb'"(?:traceEvents|schemaVersion|deviceProperties|distributedInfo)"\s*:|^\s*\[\s*\{[^}]{0,500}"ph"')
_CONFIGURED = re.compile(rb'"(?:train_batch_size|train_micro_batch_size_per_gpu|zero_optimization|model_type)(?:"|\.)')
_FLAG = re.compile(rb"(?:^|\s)--[a-z][a-z-]+")
_TEST = re.compile(rb"nccl-tests|rccl-tests|algbw|busbw|_perf\b|#\s+Rank\s+\d+", re.IGNORECASE)


@dataclass(kw_only=True)
class Sources:
    """runs: timed ones. profiles: by file. files: by name, what each is, in words. devices: named by files.
    conflicts: what contradicts each other. notes: what is not understood. over: what was passed over."""

    runs: list[TimedRun] = field(default_factory=list[TimedRun])
    profiles: dict[str, Profile] = field(default_factory=dict[str, Profile])
    files: dict[str, str] = field(default_factory=dict[str, str])
    devices: dict[str, str] = field(default_factory=dict[str, str])
    conflicts: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    over: PassedOver = field(default_factory=PassedOver)


def source_kind(path: Path) -> str:
    """``run``, ``megatron``, ``torchtitan``, ``trace``, ``profile`` or ``configuration``. Raises JobError for
    a file that is none of them."""
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
    raise JobError("is nothing that a cluster is calibrated by", file=str(path), fix=fix)


def _head(path: Path) -> bytes:
    try:
        with open_unpacked(path, Most(size=1 << 40, line=1 << 40, lines=1 << 40)) as stream:
            return stream.read(HEAD)
    except (OSError, ValueError) as error:
        raise JobError(
            f"cannot be read: {reason_of(error)}", file=str(path), fix="Name a file or a run's folder"
        ) from None


def read_runs(files: Mapping[Path, str], overrides: Sequence[str], vocab: int) -> Sources:
    """Timed runs of all files. vocab: of a job that does not say. Raises JobError."""
    found = Sources()
    beside = _configurations(files)
    logs = [read_training_log(path, kind) for path, kind in files.items() if kind in ("megatron", "torchtitan")]
    for path in (path for path, kind in files.items() if kind == "run"):
        run = Recorded.read(path)
        found.runs.append(run)
        found.files[str(path)] = f"run of Plait: {run.seconds:.4g} s a step"
    for log in logs:
        _add_log(found, log, _beside(log, beside, alone=len(logs) == 1), overrides, vocab)
    for path in beside:
        found.files.setdefault(str(path), "configuration")
    if beside and not logs:
        problem = "is a configuration, and no log is there whose run it is of"
        raise JobError(problem, file=str(next(iter(beside))), fix="Give the run's log as well")
    if overrides and not logs:
        raise JobError("is of a log's configuration, and no log is there", key=overrides[0].partition("=")[0])
    return found


def _add_log(found: Sources, log: TrainingLog, given: Told | Job | None, overrides: Sequence[str], vocab: int) -> None:
    run = run_of_log(log, given, overrides, vocab)
    found.runs.append(run)
    found.devices[log.file] = log.device
    error = f", {run.times.error:.1%} of error" if run.times.error else ""
    found.files[log.file] = f"log of {log.framework}: {run.times}{error}"
    found.conflicts += differing(log, given)
    told = log.told or given
    for line in told.lines() if isinstance(told, Told) else ():
        found.notes.append(line if Path(log.file).name in line else f"{Path(log.file).name}: {line}")
    found.over.add(log.over, Path(log.file).name)


def _configurations(files: Mapping[Path, str]) -> dict[Path, Told | Job]:
    named = (path for path, kind in files.items() if kind == "configuration")
    return {path: read_configuration(path) or Job.read(path) for path in named}


def _beside(log: TrainingLog, given: Mapping[Path, Told | Job], *, alone: bool) -> Told | Job | None:
    """The configuration of a log: the one that has its name, or else the only one, of a log without its own
    or one that is ``alone``. Raises JobError where nobody can say which."""
    same = [one for path, one in given.items() if path.stem == Path(log.file).stem]
    if len(same) == 1:
        return same[0]
    if len(given) == 1 and (alone or log.told is None):
        return next(iter(given.values()))
    if given and log.told is None:
        fix = "Name it as the log is named, with its own ending"
        raise JobError(f"has no configuration, and nobody says which of {len(given)} it is", file=log.file, fix=fix)
    return None


def leave_out_devices(found: Sources, cluster: Cluster) -> None:
    """Take away logs and measurements of devices that are surely others than the cluster's. Raises JobError
    if nothing is left."""
    other = {file: device for file, device in found.devices.items() if unlike_devices(device, cluster.device.name)}
    found.runs = [run for run in found.runs if run.folder not in other]
    found.profiles = {file: one for file, one in found.profiles.items() if file not in other}
    for file, device in other.items():
        said = f"is of {device}, and {cluster.name} has {cluster.device.name}"
        if not found.runs and not found.profiles:
            fix = "Name the cluster that it ran on with --cluster (plait plan lists them), or by a file"
            raise JobError(f"{said}: nothing is left to learn from", file=file, fix=fix)
        found.conflicts.append(f"{file} {said}: left out.")


def leave_out_others(found: Sources, cluster: Cluster) -> None:
    """Take away logs of another run or another cluster. Raises JobError if nothing is left."""
    unlike = dict[str, str]()
    for run in found.runs:
        predicted = run.predicted(cluster)
        if isinstance(run, LoggedRun) and not 1 / UNLIKE <= run.seconds / predicted <= UNLIKE:
            unlike[run.folder] = f"{run.seconds:.4g} s a step, and {predicted:.4g} s predicted for {cluster.name}"
    found.runs = [run for run in found.runs if run.folder not in unlike]
    for file, said in unlike.items():
        if not found.runs and not found.profiles:
            fix = "Check --cluster and the configuration: ranks, precision, batch, recomputation"
            raise JobError(f"has {said}: this is another run, or another cluster", file=file, fix=fix)
        found.conflicts.append(f"{file} has {said}: left out, as another run's or another cluster's.")


# ---- what is measured directly ----


@dataclass(frozen=True)
class Measured:
    """cluster: with constants that profiles tell. told: by constant, the files that tell it. fitted: what all
    profiles say, of constants too that they make no surer, and said by which files."""

    cluster: Cluster
    told: Mapping[str, Sequence[str]]
    fitted: Mapping[str, tuple[Constant, Sequence[str]]]


def read_profiles(found: Sources, files: Mapping[Path, str], ranks_per_node: int) -> None:
    """Add traces and profiles. Raises JobError."""
    for path, kind in files.items():
        own = PassedOver()
        if kind == "trace":
            found.profiles[str(path)] = kineto_profile(path, ranks_per_node, own)
        elif kind == "profile":
            found.profiles[str(path)] = import_profile(path, own)
        else:
            continue
        found.files[str(path)] = _words(kind, found.profiles[str(path)])
        found.devices[str(path)] = found.profiles[str(path)].machine.device
        found.over.add(own, path.name)


def _words(kind: str, profile: Profile) -> str:
    counts = {
        "products": len(profile.products), "attentions": len(profile.attention), "passes": len(profile.passes),
        "modules": len(profile.modules), "sizes of collectives": sum(len(one.points) for one in profile.collectives),
    }  # fmt: skip
    said = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f"{'trace of PyTorch' if kind == 'trace' else 'measurements'}: {said}"


def measured(cluster: Cluster, found: Sources) -> Measured:
    """The cluster as all profiles know it; what contradicts each other goes to ``found``. Raises JobError for
    profiles of other devices."""
    if not found.profiles:
        return Measured(cluster, {}, {})
    begun = _begun(cluster, found.profiles)
    alone = {file: with_profile(begun[file], profile) for file, profile in found.profiles.items()}
    cannot = _impossible(found, cluster, alone)
    told: dict[str, list[str]] = {}
    for name in timed_constants(cluster):
        wrong = cannot.get(_kind(name), ())
        tellers = [file for file, one in alone.items()
                   if file not in wrong and constant_of(one, name) != constant_of(begun[file], name)]  # fmt: skip
        if tellers:
            told[name] = tellers
            values = {file: (constant_of(alone[file], name).value, constant_of(alone[file], name).error)
                      for file in tellers}  # fmt: skip
            found.conflicts += contradictions(name, values)
    fitted = _together(cluster, list(found.profiles.values()))
    for kind, wrong in cannot.items():
        right = _together(cluster, [one for file, one in found.profiles.items() if file not in wrong])
        fitted = taken_from(fitted, right, _all_of(cluster, kind))
    kept = [name for name in told if not _tells(constant_of(cluster, name), constant_of(fitted, name))]
    surer = {name: files for name, files in told.items() if name not in kept}
    said = {name: (constant_of(fitted, name), files) for name, files in told.items()}
    return Measured(taken_from(fitted, cluster, kept), surer, said)


def _together(cluster: Cluster, profiles: Sequence[Profile]) -> Cluster:
    """The cluster as several profiles know it, as it is without any."""
    if not profiles:
        return cluster
    return with_profile(cluster, joined(list(profiles)).model_copy(update={
        "products": tuple(one for each in profiles for one in each.products),
        "attention": tuple(one for each in profiles for one in each.attention),
    }))  # fmt: skip


def _begun(cluster: Cluster, profiles: Mapping[str, Profile]) -> dict[str, Cluster]:
    """By file what its fit begins with. Links inside nodes are part of what a collective between nodes takes:
    a file of such alone begins with what others say of these, unless that cannot be."""
    telling = {file: one for file, one in profiles.items() if any(each.group.nodes == 1 for each in one.collectives)}
    names = _all_of(cluster, "inside")
    inside = taken_from(cluster, _together(cluster, list(telling.values())), names)
    inside = inside if constant_of(inside, "inside.share").value <= MOST["inside"] else cluster
    return {file: cluster if file in telling else inside for file in profiles}


def _kind(name: str) -> str:
    """Of a constant that is measured with a share; nothing for others."""
    return next((kind for kind in MOST if name.startswith(kind)), "")


def _tells(before: Constant, after: Constant) -> bool:
    """Whether a fit to measurements says more of a constant than was known: it is surer, or further from that
    than both may be off."""
    apart = abs(math.log(after.value / before.value)) if before.value > 0 < after.value else math.inf
    return after.error < before.error or apart > max(before.error, after.error)


def _impossible(found: Sources, cluster: Cluster, alone: Mapping[str, Cluster]) -> dict[str, set[str]]:
    """Files that say of a constant what cannot be, by its kind; a sentence on each."""
    wrong = dict[str, set[str]]()
    for file, one in alone.items():
        for name in SHARES:
            value, kind = constant_of(one, name).value, _kind(name)
            if constant_of(one, name) != constant_of(cluster, name) and value > MOST[kind]:
                wrong.setdefault(kind, set()).add(file)
                what = "links carry" if "." in name else f"{cluster.device.name} does"
                why = why_too_fast(one, found.profiles[file]) if kind == "across" else ""
                why = why or "another device, another format, or links used otherwise than predicted"
                found.conflicts.append(
                    f"{file} says {value:.3g} times what {what} at most ({name}), which cannot be: {why}. Nothing of "
                    f"{kind} is taken from it: {', '.join(_all_of(cluster, kind))} stay as they were."
                )
    return wrong


def _all_of(cluster: Cluster, kind: str) -> list[str]:
    """Constants that are measured with a share."""
    return [name for name in timed_constants(cluster) if _kind(name) == kind]


def contradictions(name: str, values: Mapping[str, tuple[float, float]]) -> list[str]:
    """Sentences on sources that contradict each other. values: of a constant and its relative error, by
    source.

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
