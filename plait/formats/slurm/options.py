"""Options of sbatch and srun that a job file passes on (``slurm.options``, ``slurm.srun_options``).
Options that would override Plait's own are refused by name.

Of a repeated option Slurm silently takes the last (sbatch(1), srun(1); observed in 22.05)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from plait.core.base.errors import JobError
from plait.core.job.cluster_settings import SlurmSection
from plait.formats.slurm import lines as slurm_lines

CPUS = ("-c", "--cpus-per-task", "--cpus-per-gpu")
MEMORY = ("--mem", "--mem-per-cpu", "--mem-per-gpu")
GPUS = ("-G", "--gpus", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket")
GRES = ("--gres",)
LONGEST_SIGNAL = 65535
"""The longest time of ``--signal``, in seconds (sbatch(1))."""
BATCH: Sequence[tuple[tuple[str, ...], str, str]] = (
    (("-N", "--nodes"), "ranks are spread over the nodes that Plait asks for", "Write slurm.nodes"),
    (("-p", "--partition"), "Plait looks for GPUs where slurm.partition says", "Write slurm.partition"),
    (("-a", "--array"), "each job of an array would be this one run", "Submit an array as docs/slurm.md shows"),
    (("-o", "--output", "-e", "--error", "--open-mode"), "what a job prints is followed in the run's logs",
     "Leave it out"),
    (("--signal",), "ranks would not hear when their time is over", "Write slurm.signal_time"),
    (("--requeue", "--no-requeue"), "Plait decides whether a job is started again", "Write slurm.requeue"),
    (("-W", "--wait", "--test-only", "--wrap"), "there would be no job to follow", "Leave it out"),
)  # fmt: skip
"""Refused options of sbatch, the reason, and what to write instead."""
STEP: Sequence[tuple[tuple[str, ...], str, str]] = (
    (("-N", "--nodes", "-n", "--ntasks"), "every node has one task, an agent that starts its ranks",
     "Leave it out; slurm.nodes says how many nodes there are"),
    (("-w", "--nodelist", "-x", "--exclude", "-r", "--relative", "-m", "--distribution"),
     "the step runs on the rank table's hosts, in its order", "Leave it out, or give a rank table"),
    (("--exclusive",), "the step shares the job's processors with its launcher (--overlap)", "Leave it out"),
    (("--multi-prog", "--test-only"), "no agent would be started", "Leave it out"),
)  # fmt: skip
"""Refused options of srun in the step that starts an agent on every node, the reason, and what to
write."""
OF_CONTAINERS = ("container_mounts", "container_options")
VARIABLES: Mapping[str, str] = {
    "SBATCH_JOB_NAME": "job-name", "SBATCH_OUTPUT": "output", "SBATCH_OPEN_MODE": "open-mode",
    "SBATCH_SIGNAL": "signal", "SBATCH_REQUEUE": "no-requeue", "SBATCH_NO_REQUEUE": "requeue",
    "SBATCH_PARTITION": "partition", "SBATCH_TIMELIMIT": "time", "SBATCH_ACCOUNT": "account",
    "SBATCH_RESERVATION": "reservation", "SBATCH_GRES": "gres", "SBATCH_MEM_PER_NODE": "mem",
}  # fmt: skip
"""Variables that override options of a batch script, by the overridden option (sbatch(1), INPUT
ENVIRONMENT VARIABLES)."""
NEVER = ("SBATCH_ARRAY_INX", "SBATCH_WAIT", "SBATCH_ERROR")
"""Variables of sbatch that no run of Plait's may have."""


def named(options: Sequence[str], known: Sequence[str]) -> str:
    """Return the first of ``options`` that is one of ``known``; empty if there is none.

    >>> named(["--qos=high", "-N2"], ["-N", "--nodes"])
    '-N2'
    """
    for option in options:
        word = option.split("=")[0].split()[0] if option.strip() else ""
        if word in known or (not word.startswith("--") and word[:2] in known):
            return option
    return ""


def requests_gpus(options: Sequence[str]) -> bool:
    """True if options of sbatch request GPUs.

    >>> requests_gpus(["--gres=gpu:h100:8"]), requests_gpus(["-G 8"]), requests_gpus(["--gres=nic:1"])
    (True, True, False)
    """
    return bool(named(options, GPUS)) or any(
        re.match(r"--(gres|tres-per-(node|task|socket|job))[=\s].*\bgpu\b", option) for option in options
    )


def check(settings: SlurmSection) -> None:
    """Raise JobError for settings that would have no effect, or would override other settings."""
    _check_lines(settings.options)
    _refuse("slurm.options", settings.options, BATCH)
    check_step(settings)
    for one in settings.gres:
        if re.search(r"(^|,)(gres[:/])?gpu\b", one):
            raise JobError(f"has '{one}'", key="slurm.gres", fix="Say in slurm.gpus how many GPUs each node is to have")
    if not settings.container and (lost := next((key for key in OF_CONTAINERS if getattr(settings, key)), "")):
        fix = "Name its image in slurm.container, or leave this out"
        raise JobError("is for containers, but slurm.container is not set", key=f"slurm.{lost}", fix=fix)
    if settings.chain and not settings.requeue:
        problem = "has jobs go on after one has ended, and slurm.requeue = false that none does"
        raise JobError(problem, key="slurm.chain", fix="Leave one of the two out")
    _check_times(settings)


def check_step(settings: SlurmSection) -> None:
    """Raise JobError for srun options that the step which starts the agents cannot have."""
    _check_words(settings.srun_options)
    _refuse("slurm.srun_options", settings.srun_options, STEP)
    for one in settings.srun_options:
        if re.match(r"--export[=\s](?!ALL\b)", one):
            fix = "Write --export=ALL,NAME=VALUE, or export it in slurm.setup"
            raise JobError(f"has '{one}': ranks need the job's environment", key="slurm.srun_options", fix=fix)


def check_gres(settings: SlurmSection, gpus: int, key: str = "options") -> None:
    """Raise JobError if an option would replace the requested generic resources. gpus: per node.
    key: the setting with the options."""
    option = named(getattr(settings, key), GRES)
    if not option or not (gpus or settings.gres):
        return
    found = slurm_lines.resources(option[len("--gres=") :].strip("\"'"))[0]
    if not settings.gres and gpus == sum(one.number for one in found if one.name == "gpu"):
        return  # the same number, perhaps with the GPUs' type
    fix = "Say GPUs in slurm.gpus, all else in slurm.gres"
    raise JobError(f"has '{option}', which replaces --gres={resources(settings, gpus)}", key=f"slurm.{key}", fix=fix)


def resources(settings: SlurmSection, gpus: int) -> str:
    """Return a node's generic resources in the form of ``--gres``.

    >>> resources(SlurmSection(gres=("nic:2",)), 8)
    'gpu:8,nic:2'
    """
    return ",".join([*([f"gpu:{gpus}"] if gpus else []), *settings.gres])


def _refuse(key: str, options: Sequence[str], table: Sequence[tuple[tuple[str, ...], str, str]]) -> None:
    for known, why, fix in table:
        if option := named(options, known):
            raise JobError(f"has '{option}': {why}", key=key, fix=fix)


def _check_lines(options: Sequence[str]) -> None:
    """Raise JobError unless each option can be a line of the batch script, in which ``#`` begins a
    comment."""
    for one in options:
        fix = "Write options as \"--constraint=h100\"; quote a value with '#' or blanks: \"--comment='a #1'\""
        try:
            words, whole = shlex.split(one, comments=True), shlex.split(one)
        except ValueError as error:
            raise JobError(f"has {one!r}: {str(error).lower()}", key="slurm.options", fix=fix) from None
        if not one.startswith("-"):
            raise JobError(f"has {one!r}, which is no option", key="slurm.options", fix=fix)
        if words != whole:
            raise JobError(f"has {one!r}, of which Slurm drops what follows '#'", key="slurm.options", fix=fix)


def _check_words(options: Sequence[str]) -> None:
    """Raise JobError unless each is an option or an option's value; srun takes another word as the
    program."""
    before = ""
    for one in options:
        if not one.startswith("-") and (not before.startswith("-") or "=" in before or not one.strip()):
            fix = 'Write "--mpi=none"'
            raise JobError(f"has {one!r}, which srun would take for a program", key="slurm.srun_options", fix=fix)
        before = one


def _check_times(settings: SlurmSection) -> None:
    if settings.signal_time > LONGEST_SIGNAL:
        problem = f"is {settings.signal_time}, and Slurm's --signal takes {LONGEST_SIGNAL} seconds at most"
        raise JobError(problem, key="slurm.signal_time", fix="Give ranks less")
    limit = seconds_of(settings.time)
    if limit and settings.signal_time >= limit:
        problem = f"is {settings.signal_time} s, and a job's time limit (slurm.time = '{settings.time}') {limit} s"
        fix = "Ranks would be signalled to end at once: give the job more, or ranks less"
        raise JobError(problem, key="slurm.signal_time", fix=fix)


def seconds_of(limit: str) -> int:
    """Return the seconds of a time limit in the form of sbatch's ``--time``; 0 for none and for
    unknown forms.

    >>> seconds_of("90"), seconds_of("1:30"), seconds_of("12:00:00"), seconds_of("1-12")
    (5400, 90, 43200, 129600)
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if not match:
        return 0
    days, *parts = (int(part or 0) for part in match.groups())
    first, second, third = parts
    if match[1]:  # days-hours:minutes:seconds
        return days * 86400 + first * 3600 + second * 60 + third
    if match[4]:  # hours:minutes:seconds
        return first * 3600 + second * 60 + third
    return first * 60 + second  # minutes:seconds


def overriding_variables(script: str, variables: Mapping[str, str]) -> list[str]:
    """Return the variables of sbatch that would override the batch script's options."""
    return [
        name for name in variables
        if name in NEVER or (name in VARIABLES and re.search(rf"^#SBATCH --{VARIABLES[name]}\b", script, re.MULTILINE))
    ]  # fmt: skip
