"""A run inside a Slurm job: the rank table, one agent per node started by srun, and the job's
requeue or successor.

    python -m plait.api.in_cluster RUN_FOLDER          in the batch script, on the job's first node

srun gets the nodes in the rank table's order (SLURM_HOSTFILE, ``--distribution=arbitrary``);
Slurm's own numbering would sort them by name. Every agent is checked against the table, and every
rank once more. In a chain of jobs (``slurm.chain``), each job submits its successor at its start,
dependent on its own end, and cancels it if the run is over. So a run continues even if its job is
lost with its node, or may not be requeued.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from plait.core.base import programs
from plait.core.base.cluster_env import cluster_job, gpus_variable, slurm_job, this_host
from plait.core.base.codec.json_text import is_list
from plait.core.base.env import inherited
from plait.core.base.errors import JobError, LaunchError, PlaitError, RankFailure
from plait.core.base.process import command_of
from plait.core.job.cluster_settings import SlurmSection
from plait.core.job.plan import CHANGED, Plan
from plait.core.runs.history import History, newest_checkpoint
from plait.core.runs.lock import EXPIRES, RunLock
from plait.core.runs.progress import Progress
from plait.core.topology.hostlist import expand, fold
from plait.core.topology.rank_table import RankTable
from plait.formats.slurm.options import check_gres, check_step
from plait.launch.hang import HangDetection
from plait.launch.local.agents import Agents, Rendezvous
from plait.launch.run_folder import (
    DO_NOT_RETRY,
    keep_plan,
    last_job,
    read_note,
    starts_in_vain,
    stop_requested,
    write_note,
)
from plait.launch.slurm import commands as slurm
from plait.launch.slurm.nodes import CONFLICTING_VARIABLES, JobNodes, Order, python, srun
from plait.launch.watch import RunGuard, say, watched

FILE = "chain.json"
NAME = "chain"
"""The name under which consecutive failed starts of all jobs of a chain are counted together."""


def next_job(folder: Path, job: str) -> str:
    """Return the number of the Slurm job that follows ``job`` in the chain, even if it has started;
    empty if there is none."""
    jobs = _jobs(folder)
    return dict(pairwise(jobs)).get(job, "")


def cancelled_before(folder: Path, job: str) -> bool:
    """Return True if the job before ``job`` in the chain was cancelled by a user, so that the run
    has to end."""
    jobs = _jobs(folder)
    with suppress(LaunchError):
        if jobs[-1:] == [job] and len(jobs) > 1:
            return slurm.state(jobs[-2]).name == "CANCELLED"
    return False


def _jobs(folder: Path) -> list[str]:
    """Return the chain's jobs so far, in order; empty if the file is damaged. All jobs are kept: a
    follower may look for a job's successor when that has already started, and has submitted its
    own."""
    jobs: Any = read_note(folder, FILE).get("jobs")
    return [str(one) for one in jobs] if is_list(jobs) else []


def begin_next(folder: Path, job: str) -> None:
    """Submit the next job of the chain, which waits for the end of ``job``. Raises LaunchError."""
    following = slurm.sbatch(folder.absolute() / slurm.SCRIPT, f"--dependency=afterany:{job}")
    before = _jobs(folder)
    write_note(folder, FILE, jobs=[*before[: before.index(job) if job in before else 0], job, following])
    say(f"Slurm job {following} goes on when this one has ended")


def take_back(folder: Path, job: str) -> None:
    """Cancel the next job of the chain after ``job``: the run is over."""
    if following := next_job(folder, job):
        with suppress(LaunchError):
            slurm.command("scancel", following)


@contextmanager
def lock_in_turn(folder: Path) -> Generator[RunLock]:
    """Acquire the run's lock for a job of a chain; wait until the previous job's lock expires,
    since a killed job could not release it."""
    until = time.monotonic() + EXPIRES + 10.0
    with ExitStack() as held:
        while True:
            try:
                lock = held.enter_context(RunLock(folder))
                break
            except LaunchError:
                if time.monotonic() > until:
                    raise
                time.sleep(1.0)
        yield lock


TERMINATED, INTERRUPTED = 128 + signal.SIGTERM, 128 + signal.SIGINT


@dataclass(frozen=True)
class SlurmHooks:
    """Functions that a run inside a job gets from its caller. guarded: makes the guard of an
    attempt, once the previous attempt's evidence is moved away. order: orders the nodes."""

    guarded: Callable[[Progress], RunGuard] = lambda progress: RunGuard(progress=progress)
    order: Order | None = None


def run(
    folder: Path, argv: Sequence[str], world_size: int, *, timeout: float, plan: Plan | None = None,
    hooks: SlurmHooks = SlurmHooks(),
) -> int:  # fmt: skip
    """Run ``argv`` as every rank on the nodes of this Slurm job; return and raise as ``run_ranks``.
    plan: the ranks' plan if they train; then each attempt is recorded in the run's history."""
    job, listed = slurm_job()
    settings = plan.job.slurm if plan and plan.job else SlurmSection()
    nodes = JobNodes(folder, expand(listed), world_size, settings.spares)
    table = nodes.table(plan, hooks.order)
    gpus = _gpus(job, settings, table, plan.job.run.device if plan and plan.job else "auto")
    check_step(settings)
    check_gres(settings, gpus, "srun_options")
    step = _Step(folder, argv, srun(settings, folder, len(table.hosts), gpus), gpus, timeout)
    if plan is None:
        return step.run(table, hooks.guarded(Progress(world_size)), nodes)
    changed = plan.notes.get(CHANGED, "")
    again = cluster_job()[1] > 0 or (settings.chain and last_job(folder) == NAME)
    while True:
        keep_plan(plan, folder)
        history = History(folder)
        history.begin_again(world_size, table.hosts, plan.key, again=again, changed=changed)

        def start(progress: Progress, table: RankTable = table) -> int:
            return step.run(table, hooks.guarded(progress), nodes)

        def stepped(one: Progress, history: History = history) -> None:
            history.record_restart(one, say)

        try:
            return history.attempt(start, Progress(world_size, stepped=stepped))
        except RankFailure as failure:
            if not (moved := nodes.mend(failure, table)) or stop_requested(folder, job):
                raise
            table = nodes.table(plan, hooks.order)
            changed, again = f"{moved}, on {fold(table.hosts)}", True
            say(f"{failure} Going on {changed}")


def _gpus(job: str, settings: SlurmSection, table: RankTable, device: str) -> int:
    """Return the GPUs per node that the step requests. Raises JobError if ranks would not get the
    planned GPUs."""
    gpus = 0 if device == "cpu" else slurm.gpus_of_job(job)
    if gpus:
        problem = f"each node of Slurm job {job} has {gpus} GPUs"
        slurm.check_gpus(gpus, table.ranks_per_node, device, problem)
    elif device == "cuda" or (device == "auto" and settings.gpus not in ("auto", 0)):
        problem = f"ranks are planned for GPUs, and Slurm job {job} has none on its nodes"
        fix = f'Ask for them (sbatch or salloc with --gres=gpu:{table.ranks_per_node}), or use run.device = "cpu"'
        raise JobError(problem, key="run.device", fix=fix)
    return gpus


@dataclass(frozen=True)
class _Step:
    """The srun step that starts ranks on the job's nodes. srun: its command. gpus: per node.
    timeout: seconds that a rank may be silent."""

    folder: Path
    argv: Sequence[str]
    srun: Sequence[str]
    gpus: int
    timeout: float

    def run(self, table: RankTable, guard: RunGuard, nodes: JobNodes) -> int:
        """Start agents and ranks, and watch them until they end; return the exit status. nodes:
        gets the lost hosts."""
        job, listed = slurm_job()
        hosts = self.folder / f"slurm-hosts-{job}.txt"
        hosts.write_text("".join(f"{host}\n" for host in table.hosts))
        addresses = slurm.node_addresses(expand(listed))  # under salloc, this process is on none of them
        here = addresses.get(this_host(), this_host())
        logs = self.folder / "logs"
        try:
            with (
                Agents(table, self.argv, logs, Rendezvous(host=here), addresses=addresses, numbered=True) as agents,
                ExitStack() as held,
            ):
                step = subprocess.Popen(
                    self.srun,
                    env={key: value for key, value in inherited().items() if key not in CONFLICTING_VARIABLES}
                    | agents.variables | gpus_variable(self.gpus) | {"SLURM_HOSTFILE": str(hosts.absolute())},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )  # fmt: skip
                held.callback(_finish, step, agents)
                try:
                    ranks = agents.ranks(lambda: _check_step(step))
                    sources = list(agents.agents.values())
                    return watched(ranks, logs, timeout=self.timeout, guard=guard, sources=sources)
                finally:
                    nodes.lost |= agents.lost
        finally:
            hosts.unlink(missing_ok=True)


def _check_step(step: subprocess.Popen[bytes]) -> None:
    if (status := step.poll()) is not None:
        raise LaunchError(f"srun ended with status {status} before all nodes had answered; it says why above.")


def _finish(step: subprocess.Popen[bytes], agents: Agents) -> None:
    """Disconnect, upon which the agents end; kill a step that does not end."""
    agents.__exit__(None, None, None)
    try:
        step.wait(15)
    except subprocess.TimeoutExpired:
        step.terminate()
        with suppress(subprocess.TimeoutExpired):
            step.wait(15)
        step.kill()
        step.wait()


def main(suspicion: Callable[[Plan, Path], HangDetection | None] = lambda plan, folder: None,
         order: Order | None = None) -> int:  # fmt: skip
    """Run the job's ranks. The exit status, or a requeue, decides whether the job starts again.
    suspicion: creates the hang detection of a plan's ranks. order: as in ``SlurmHooks``."""
    folder = Path(sys.argv[1])
    try:
        plan = Plan.read(folder / "plan.json")
        assert plan.job is not None
        settings, (job, _) = plan.job.slurm, slurm_job()
        if stop_requested(folder, job):
            say("this job was asked to end before its ranks were started")
            return INTERRUPTED
        if settings.chain and cancelled_before(folder, job):
            say("the previous job of the chain was cancelled: the run ends")
            return INTERRUPTED
        argv = command_of(programs.RANK, str(folder), python=python(settings))
        before = newest_checkpoint(folder)
        if settings.chain:
            begin_next(folder, job)
        try:
            with lock_in_turn(folder) if settings.chain else RunLock(folder) as lock:
                asked = _StopNote(folder, job)

                def guarded(progress: Progress) -> RunGuard:
                    return RunGuard(
                        lock=lock, suspicion=suspicion(plan, folder), progress=progress, stop_requested=asked
                    )

                timeout, hooks = plan.job.run.timeout, SlurmHooks(guarded, order)
                status = run(folder, argv, plan.layout.world_size, timeout=timeout, plan=plan, hooks=hooks)
        except PlaitError as error:
            print(f"plait: {error}", file=sys.stderr, flush=True)
            status = error.exit_status if error.exit_status == 1 else DO_NOT_RETRY
        if not settings.requeue:
            ended, again = (DO_NOT_RETRY if status == 1 else status), False
        elif status in (1, TERMINATED):
            ended, again = _again(folder, status, before, settings)
        else:
            ended, again = status, False
        if settings.chain and not again:
            take_back(folder, job)
        return ended
    except PlaitError as error:
        print(f"plait: {error}", file=sys.stderr, flush=True)
        return DO_NOT_RETRY
    except KeyboardInterrupt:  # before ranks were started
        return INTERRUPTED


class _StopNote:
    """True, when called, if a note in the run's folder asks the job to end; the folder is checked
    once a second."""

    def __init__(self, folder: Path, job: str) -> None:
        self.folder, self.job, self._next = folder, job, 0.0

    def __call__(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + 1.0
        return stop_requested(self.folder, self.job, running=True)


def _again(folder: Path, status: int, before: int, settings: SlurmSection) -> tuple[int, bool]:
    """Arrange another start of the run, unless the job was cancelled or makes no progress. Returns
    (exit status of this start, True if the run starts again). before: step of the newest checkpoint
    when this start began."""
    job, _ = slurm_job()
    if slurm.patient_state(job).name != "RUNNING":
        return status, False
    if stop_requested(folder, job):
        say("this job was asked to end: it is not started again")
        return INTERRUPTED, False
    vain = starts_in_vain(folder, NAME if settings.chain else job, before)
    if vain > settings.restarts:
        say(f"{vain} starts in a row ended without a new checkpoint; not started again (slurm.restarts)")
        return DO_NOT_RETRY, False
    if settings.chain:
        return status, True
    say(f"Slurm job {job} is put back into the queue, after start {cluster_job()[1] + 1}")
    _requeue(job)
    try:
        signal.pause()  # Slurm kills this start
    except KeyboardInterrupt:  # a request to stop during the requeue
        slurm.command("scancel", job)
    return status, True


def _requeue(job: str) -> None:
    """Have Slurm requeue the job; retry once after a controller outage, since otherwise the run
    would be given up after it survived the first outage. Raises LaunchError."""
    try:
        slurm.command("scontrol", "requeue", job)
    except LaunchError as error:
        say(f"Slurm does not requeue the job ({error}); trying once more")
        time.sleep(slurm.LOOK)
        if slurm.patient_state(job).name == "RUNNING":  # otherwise Slurm has requeued it
            slurm.command("scontrol", "requeue", job)
