"""Slurm from outside a job: the batch script, its submission, the job's state, reservations.

Slurm is called through its own commands (sbatch, scontrol, scancel, sinfo), which find the cluster
by SLURM_CONF or the machine's configuration.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from plait.core.base import programs
from plait.core.base.cluster_env import forget, sbatch_variables
from plait.core.base.errors import JobError, LaunchError
from plait.core.base.process import command_of
from plait.core.job.cluster_settings import SlurmSection
from plait.core.job.settings import RunSection
from plait.core.topology.hostlist import expand, fold
from plait.core.topology.rank_table import RankTable
from plait.formats.slurm import lines as slurm_lines
from plait.formats.slurm.options import (
    CPUS,
    MEMORY,
    check,
    check_gres,
    named,
    overriding_variables,
    requests_gpus,
    resources,
)
from plait.launch.run_folder import forget_stop
from plait.launch.watch import say

LOOK = 5.0
"""Seconds between two queries of a job's state: every query is work for the cluster's one
controller (slurmctld)."""
PATIENCE = 1800.0
"""Seconds that Slurm's controller may be unavailable while a job is to be restarted: its nodes wait
meanwhile."""
SCRIPT = "slurm.sh"
"""The batch script's name in the run's folder."""
HOSTS = ("-w", "--nodelist", "-F", "--nodefile")
"""Options of sbatch that name hosts, as a rank table does."""
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
GONE = "Invalid job id"
"""Slurm's message on a job that it has forgotten."""
ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
         "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT", "UNKNOWN")  # fmt: skip
"""Final states of a job (squeue(1), JOB STATE CODES), and UNKNOWN, the state of a job without
one."""
FAILED = re.compile(r"DOWN|FAIL|NOT_RESPONDING|DRAIN|\*$")
"""A pattern of node states in which no rank may be started."""
_FIELD = re.compile(r"(\S+?)=(\S*)")
_OWN_WORDS = re.compile(r" JobName=.* UserId=(?=\S+\(\d+\) GroupId=)")
"""A pattern of the text in a job's record that its user wrote, up to the fields that Slurm
wrote."""


def command(*argv: str, data: str | None = None) -> str:
    """Run a Slurm command; return its output. data: its standard input. Raises LaunchError with the
    command's error message."""
    if shutil.which(argv[0]) is None:
        raise LaunchError(f"Slurm's command {argv[0]} is not installed here. Run on a machine that submits to Slurm.")
    done = subprocess.run(argv, check=False, input=data, capture_output=True, text=True)
    if done.returncode:
        cause = " ".join(done.stderr.split()) or f"it ended with status {done.returncode}"
        raise LaunchError(f"Slurm refused: {cause}.")
    return done.stdout


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A run as a Slurm batch job."""

    folder: Path
    name: str
    world_size: int
    settings: SlurmSection
    table: RankTable | None = None

    @property
    def nodes(self) -> int:
        """The number of nodes, without spares."""
        return len(self.table.hosts) if self.table else self.settings.nodes

    def script(self) -> str:
        """Return the batch script, which starts ``plait.api.in_cluster`` on the first node."""
        one = self.settings
        shared = not one.exclusive and not named(one.options, CPUS)
        asked = {
            "job-name": self.name,
            "nodes": self.nodes + one.spares,
            "ntasks-per-node": 1,
            "cpus-per-task": one.cpus if shared else "",
            "mem": one.mem or (0 if one.exclusive and not named(one.options, MEMORY) else ""),
            "gres": resources(one, one.gpus if isinstance(one.gpus, int) else 0),
            "segment": one.segment or "",
            "output": self.log("%j", written="%%"),
            "open-mode": "append",
            "signal": f"TERM@{one.signal_time}",
            "partition": one.partition,
            "time": one.time,
            "account": one.account,
            "reservation": one.reservation,
            "nodelist": fold(self.table.hosts) if self.table else "",
        }
        again = one.requeue and not one.chain
        flags = ["--requeue" if again else "--no-requeue"] + ["--exclusive"] * one.exclusive
        flags += ["--no-kill"] * bool(one.spares)  # the job outlives the loss of a node that has a spare
        lines = [f"--{key}={shlex.quote(str(value))}" for key, value in asked.items() if value != ""]
        run = command_of(programs.IN_CLUSTER, str(self.folder.absolute()))
        text = "\n".join(f"#SBATCH {line}" for line in [*lines, *flags, *one.options])
        setup = "".join(f"{line}\n" for line in one.setup)
        return f"#!/bin/bash\n{text}\n{setup}exec {shlex.join(run)}\n"

    def log(self, job: str, written: str = "%") -> Path:
        """Return the path of the file with a job's output. written: the replacement of a percent
        sign in the folder, which begins a placeholder in Slurm."""
        return Path(str(self.folder.absolute()).replace("%", written)) / "logs" / f"slurm-{job}.log"


def resolve_resources(
    settings: SlurmSection, world_size: int, table: RankTable | None, run: RunSection
) -> SlurmSection:
    """Return the settings with the number of nodes, and of GPUs and CPUs per node, filled in.
    Raises JobError for settings that conflict, LaunchError if Slurm has to be queried and does not
    answer."""
    check(settings)
    if table and named(settings.options, HOSTS):
        problem = f"has '{named(settings.options, HOSTS)}', and the rank table has hosts of its own"
        raise JobError(problem, key="slurm.options", fix="Leave one of the two out")
    if table:
        table.check_job(world_size, settings.nodes, "slurm")
    nodes = len(table.hosts) if table else settings.nodes
    if not nodes:
        each = settings.gpus if isinstance(settings.gpus, int) else gpus_of_a_node(settings.partition, run.device)
        nodes = -(-world_size // min(each or 1, world_size))
    if world_size % nodes:
        fix = f"Choose a number that divides {world_size}"
        raise JobError(f"{world_size} ranks do not spread evenly over {nodes} nodes", key="slurm.nodes", fix=fix)
    ranks = world_size // nodes
    gpus = _gpus(settings, ranks, run.device, table.hosts if table else ())
    check_gres(settings, gpus)
    return settings.model_copy(update={"nodes": nodes, "gpus": gpus, "cpus": settings.cpus or ranks * run.threads})


def _gpus(settings: SlurmSection, ranks: int, device: str, hosts: Sequence[str]) -> int:
    """Return the GPUs to request per node of ``ranks`` ranks. hosts: names of the nodes, if they
    are known."""
    if isinstance(settings.gpus, int):
        if settings.gpus:
            check_gpus(settings.gpus, ranks, device, f"slurm.gpus asks for {settings.gpus} on each node")
        return settings.gpus
    if device == "cpu" or requests_gpus(settings.options):
        return 0
    if device == "cuda":
        return ranks
    there = gpus_of_a_node(settings.partition, device, hosts)
    if there:
        check_gpus(there, ranks, device, f"nodes have {there} GPUs")
    return min(there, ranks)


def check_gpus(gpus: int, ranks: int, device: str, problem: str) -> None:
    """Raise JobError if a node has fewer GPUs than ranks, unless ``device`` allows that."""
    if device in ("auto", "cuda") and gpus < ranks:
        fix = 'Use more nodes, or run.device = "shared", or "cpu"'
        raise JobError(f"{problem}, and each runs {ranks} ranks", key="run.device", fix=fix)


def gpus_of_a_node(partition: str, device: str, hosts: Sequence[str] = ()) -> int:
    """Return the smallest number of whole GPUs of the hosts, or else of the partition's nodes (the
    default partition, if empty). Raises JobError if only some nodes have GPUs, unless ranks use
    CPUs anyway."""
    if hosts:
        counts = [_counted(one.get("Gres", "")) for one in _nodes(hosts)]
    else:
        where = ["-p", partition] if partition else []
        found = [line.rpartition("|") for line in command("sinfo", "-h", "-o", "%P|%G", *where).splitlines()]
        counts = [_counted(gres) for name, _, gres in found if partition or name.endswith("*")]
    if device != "cpu" and 0 in counts and any(counts):
        problem = f"some nodes have no GPUs, and others up to {max(counts)}"
        raise JobError(problem, key="slurm.gpus", fix='Say how many each is to have, or run.device = "cpu"')
    return min(counts, default=0)


def gpus_of_job(job: str) -> int:
    """Return the GPUs that a job has on each of its nodes: the smallest number.

    Known: the ``GRES`` of each group of nodes, as ``scontrol -d show job`` prints them. Passed
    over: other resources than GPUs, which no step of Plait's needs.
    """
    told = command("scontrol", "--oneliner", "--details", "show", "job", job)
    groups = re.findall(r" Nodes=\S+ CPU_IDs=\S* Mem=\S* GRES=(\S*)", told)
    return min((_counted(gres, parts=True) for gres in groups), default=0)


def _counted(gres: str, *, parts: bool = False) -> int:
    """Return the number of GPUs in Slurm's list of resources: whole GPUs, and with ``parts`` MIG
    slices as well.

    >>> _counted("gpu:h100:4(S:0-1),gpu:2,nic:2"), _counted("(null)"), _counted("gpu:1g.10gb:7,gpu:a100:1")
    (6, 0, 1)
    """
    return sum(one.number for one in slurm_lines.resources(gres)[0] if one.name == "gpu" and (parts or not one.part))


class SubmittedSlurmJob(NamedTuple):
    """A submitted job. log: the path of its output. written: the log's size in bytes before
    submission: another Slurm, or this one years ago, may have used the same job number. hosts: the
    only hosts that the job can run on, if it has a rank table. folder: of its run."""

    job: str
    log: Path
    written: int = 0
    hosts: tuple[str, ...] = ()
    folder: Path | None = None


def submit(batch: Batch) -> SubmittedSlurmJob:
    """Write the script into the run's folder and submit it. Raises JobError if a job of this run
    waits already: that job holds no lock on the folder yet."""
    _check_segment(batch.settings)
    (batch.folder / "logs").mkdir(parents=True, exist_ok=True)
    script = batch.folder.absolute() / SCRIPT
    if job := next(iter(jobs_of(batch.folder, queue())), ""):
        fix = f"End it first (scancel {job}), or give this run another name with run.name=NAME"
        raise JobError(f"Slurm job {job} is this run, and has not ended", file=str(batch.folder), fix=fix)
    before = {file: file.stat().st_size for file in batch.log("*").parent.glob(batch.log("*").name)}
    script.write_text(batch.script())
    if batch.table:
        batch.table.write(batch.folder / "placed_ranks.json")
    else:
        (batch.folder / "placed_ranks.json").unlink(missing_ok=True)
    forget_stop(batch.folder)
    job = sbatch(script)
    hosts = batch.table.hosts if batch.table else ()
    return SubmittedSlurmJob(job, batch.log(job), before.get(batch.log(job), 0), hosts, batch.folder)


def sbatch(script: Path, *options: str) -> str:
    """Submit a batch script; return the job's number. Environment variables that would override the
    script are removed, for the job too, since sbatch gives them precedence."""
    if undone := overriding_variables(script.read_text(), sbatch_variables()):
        say(f"environment variables that would override {script.name} are ignored: {', '.join(undone)}")
        forget(undone)
    return command("sbatch", "--parsable", *options, str(script)).strip().partition(";")[0]


def queue() -> list[tuple[str, Path]]:
    """Return (job number, path of its batch script) of the jobs that have not ended. Raises
    LaunchError."""
    lines = (line.partition("|") for line in command("squeue", "-h", "-o", "%A|%o").splitlines())
    return [(number, Path(told)) for number, _, told in lines if told]


def jobs_of(folder: Path, queued: Sequence[tuple[str, Path]]) -> list[str]:
    """Return the numbers of the jobs of the run in ``folder``. queued: the result of ``queue``."""
    script = folder.absolute() / SCRIPT
    return [number for number, told in queued if _same(told, script)]


def _check_segment(settings: SlurmSection) -> None:
    """Raise JobError if this Slurm does not support ``--segment``, which is newer than its blocks.
    ``sbatch
    --help`` does not list it (24.11); but sbatch fails on an unknown option before it prints its
    version."""
    if not settings.segment:
        return
    try:
        command("sbatch", f"--segment={settings.segment}", "--version")
    except LaunchError as error:
        if "unrecognized option" not in str(error):
            raise
        version = command("scontrol", "version").strip()
        problem = f"asks for blocks of {settings.segment} nodes, and {version} has no --segment"
        raise JobError(problem, key="slurm.segment", fix="Leave it out") from None


def _same(first: Path, second: Path) -> bool:
    """Return True if two paths lead to the same file, possibly through a symbolic link."""
    return first.name == second.name and first.resolve() == second.resolve()


@dataclass(frozen=True)
class SlurmJobState:
    """A job's state in Slurm. name: such as RUNNING. status: the exit status so far. reason: why
    the job waits."""

    name: str
    status: int
    nodes: tuple[str, ...]
    reason: str

    @property
    def going(self) -> bool:
        """True if the job waits, runs or will run again."""
        return self.name not in ENDED


def state(job: str) -> SlurmJobState:
    """Return the state of a job. Raises LaunchError for a job that Slurm does not know."""
    told = _OWN_WORDS.sub(" UserId=", command("scontrol", "--oneliner", "show", "job", job))
    found = dict(reversed(_FIELD.findall(told)))  # the first value of a field counts: comments and paths come later
    code, _, number = found.get("ExitCode", "0:0").partition(":")
    status = int(code) or (128 + int(number) if int(number) else 0)
    listed = found.get("NodeList", "")
    nodes = tuple(expand(listed)) if listed not in ("", "(null)") else ()
    return SlurmJobState(found.get("JobState", "UNKNOWN"), status, nodes, found.get("Reason", ""))


def patient_state(job: str) -> SlurmJobState:
    """Return a job's state; retry while Slurm's controller is unavailable, up to ``PATIENCE``.
    Raises LaunchError as ``state``."""
    since = time.monotonic()
    while True:
        try:
            return state(job)
        except LaunchError as error:
            away = time.monotonic() - since
            if away > PATIENCE or GONE in str(error):
                raise
            if away < LOOK:
                say(f"Slurm does not answer ({error}); asking again")
            time.sleep(LOOK)


def reserve(table: RankTable, name: str, *, start: str, duration: str, users: Sequence[str]) -> None:
    """Reserve a rank table's hosts for a planned job, from ``start`` (``now``, or a time in Slurm's
    format) for ``duration``. Jobs that run there now may finish; no job starts that would last into
    the reservation."""
    command(
        "scontrol", "create", "reservation", f"ReservationName={name}", f"StartTime={start}", f"Duration={duration}",
        f"Nodes={fold(table.hosts)}", f"Users={','.join(users)}", "Flags=STATIC_ALLOC,IGNORE_JOBS",
    )  # fmt: skip


def node_addresses(nodes: Sequence[str]) -> dict[str, str]:
    """Return the addresses of nodes by name."""
    return {one["NodeName"]: one.get("NodeAddr", one["NodeName"]) for one in _nodes(nodes)}


def nodes_down(nodes: Sequence[str]) -> set[str]:
    """Return the nodes that are down or failing in Slurm; empty if Slurm does not answer."""
    try:
        return {one["NodeName"] for one in _nodes(nodes) if FAILED.search(one.get("State", ""))}
    except LaunchError:
        return set()


def release_hosts(job: str, hosts: Sequence[str], lost: set[str]) -> None:
    """Make a waiting job request only those of its hosts that are not lost; Slurm chooses
    replacements. Raises LaunchError if the job does not wait, or the change is refused."""
    left = fold([host for host in hosts if host not in lost]) if set(hosts) - lost else ""
    command("scontrol", "update", f"JobId={job}", f"ReqNodeList={left}")


def _nodes(names: Sequence[str]) -> list[dict[str, str]]:
    """Return Slurm's records of nodes (``scontrol show node``), each as a dictionary."""
    told = command("scontrol", "--oneliner", "show", "node", fold(names)).splitlines()
    return [one for one in (dict(_FIELD.findall(line)) for line in told) if "NodeName" in one]
