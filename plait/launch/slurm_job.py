"""A run inside of a Slurm job: the rank table, one agent on every node by srun, and what becomes of the job.

    python -m plait.api.in_slurm RUN_FOLDER          in the batch script, on the job's first node

srun is given the nodes in the order of the rank table (SLURM_HOSTFILE, ``--distribution=arbitrary``), which
Slurm's own numbering would sort by name; every agent is compared with the table, and every rank once more.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from plait.core.base import programs
from plait.core.base.cluster_env import cluster_job, granted, slurm_job, this_host
from plait.core.base.env import inherited
from plait.core.base.errors import JobError, LaunchError, PlaitError, RankFailure
from plait.core.base.process import command_of
from plait.core.job.plan import CHANGED, Plan
from plait.core.job.slurm_settings import SlurmSection
from plait.core.runs.history import History, newest_checkpoint
from plait.core.runs.lock import RunLock
from plait.core.runs.progress import Progress
from plait.core.topology.hostlist import expand, fold
from plait.core.topology.rank_table import RankTable
from plait.launch import slurm, slurm_chain
from plait.launch.agents import Agents, Rendezvous
from plait.launch.hang import Suspicion
from plait.launch.run_folder import DO_NOT_RETRY, asked_to_stop, keep_plan, last_job, starts_in_vain
from plait.launch.slurm_nodes import JobNodes, Order
from plait.launch.slurm_options import check_gres, check_step
from plait.launch.slurm_step import NOT_BESIDE_HOSTS, python, srun
from plait.launch.watch import RunGuard, say, watched

TERMINATED, INTERRUPTED = 128 + signal.SIGTERM, 128 + signal.SIGINT


@dataclass(frozen=True)
class SlurmHooks:
    """What a run inside of a job needs of the other verbs. guarded: makes what looks after an attempt, once
    the evidence of the one before is put aside. order: of the nodes."""

    guarded: Callable[[Progress], RunGuard] = lambda progress: RunGuard(progress=progress)
    order: Order | None = None


def run(
    folder: Path, argv: Sequence[str], world_size: int, *, timeout: float, plan: Plan | None = None,
    hooks: SlurmHooks = SlurmHooks(),
) -> int:  # fmt: skip
    """Run ``argv`` as every rank on the nodes of the job that we are in; as ``run_ranks``. plan: the one that
    they obey, if they train: each attempt goes into the run's history then."""
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
    again = cluster_job()[1] > 0 or (settings.chain and last_job(folder) == slurm_chain.NAME)
    while True:
        keep_plan(plan, folder)
        history = History(folder)
        history.begin_again(world_size, table.hosts, plan.key, again=again, changed=changed)

        def start(progress: Progress, table: RankTable = table) -> int:
            return step.run(table, hooks.guarded(progress), nodes)

        def stepped(one: Progress, history: History = history) -> None:
            history.goes_on(one, say)

        try:
            return history.attempt(start, Progress(world_size, stepped=stepped))
        except RankFailure as failure:
            if not (moved := nodes.mend(failure, table)) or asked_to_stop(folder, job):
                raise
            table = nodes.table(plan, hooks.order)
            changed, again = f"{moved}, on {fold(table.hosts)}", True
            say(f"{failure} Going on {changed}")


def _gpus(job: str, settings: SlurmSection, table: RankTable, device: str) -> int:
    """GPUs of each node that the step asks for. Raises JobError where ranks would not get those that were
    planned."""
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
    """What starts ranks on the job's nodes. srun: its command."""

    folder: Path
    argv: Sequence[str]
    srun: Sequence[str]
    gpus: int
    timeout: float

    def run(self, table: RankTable, guard: RunGuard, nodes: JobNodes) -> int:
        """Start agents and ranks, and see them to their end. nodes: are told which were lost."""
        job, listed = slurm_job()
        hosts = self.folder / f"slurm-hosts-{job}.txt"
        hosts.write_text("".join(f"{host}\n" for host in table.hosts))
        addresses = slurm.node_addresses(expand(listed))  # under salloc we are on none of them
        here = addresses.get(this_host(), this_host())
        logs = self.folder / "logs"
        try:
            with (
                Agents(table, self.argv, logs, Rendezvous(host=here), addresses=addresses, numbered=True) as agents,
                ExitStack() as held,
            ):
                step = subprocess.Popen(
                    self.srun,
                    env={key: value for key, value in inherited().items() if key not in NOT_BESIDE_HOSTS}
                    | agents.variables | granted(self.gpus) | {"SLURM_HOSTFILE": str(hosts.absolute())},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )  # fmt: skip
                held.callback(_finish, step, agents)
                try:
                    ranks = agents.ranks(lambda: _still(step))
                    sources = list(agents.agents.values())
                    return watched(ranks, logs, timeout=self.timeout, guard=guard, sources=sources)
                finally:
                    nodes.lost |= agents.lost
        finally:
            hosts.unlink(missing_ok=True)


def _still(step: subprocess.Popen[bytes]) -> None:
    if (status := step.poll()) is not None:
        raise LaunchError(f"srun ended with status {status} before all nodes had answered; it says why above.")


def _finish(step: subprocess.Popen[bytes], agents: Agents) -> None:
    """Hang up, upon which the agents end; a step that stays is ended by force."""
    agents.__exit__(None, None, None)
    try:
        step.wait(15)
    except subprocess.TimeoutExpired:
        step.terminate()
        with suppress(subprocess.TimeoutExpired):
            step.wait(15)
        step.kill()
        step.wait()


def main(suspicion: Callable[[Plan, Path], Suspicion | None] = lambda plan, folder: None,
         order: Order | None = None) -> int:  # fmt: skip
    """Run, and say by the exit status, or by a requeue, whether the job is to start again. suspicion: finds
    out why ranks of a plan hang. order: as in ``SlurmHooks``."""
    folder = Path(sys.argv[1])
    try:
        plan = Plan.read(folder / "plan.json")
        assert plan.job is not None
        settings, (job, _) = plan.job.slurm, slurm_job()
        if asked_to_stop(folder, job):
            say("this job was asked to end before its ranks were started")
            return INTERRUPTED
        if settings.chain and slurm_chain.cancelled_before(folder, job):
            say("the job before was cancelled: the run ends")
            return INTERRUPTED
        argv = command_of(programs.RANK, str(folder), python=python(settings))
        before = newest_checkpoint(folder)
        if settings.chain:
            slurm_chain.begin_next(folder, job)
        try:
            with slurm_chain.lock_in_turn(folder) if settings.chain else RunLock(folder) as lock:
                asked = _Asked(folder, job)

                def guarded(progress: Progress) -> RunGuard:
                    return RunGuard(lock=lock, suspicion=suspicion(plan, folder), progress=progress, asked=asked)

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
            slurm_chain.take_back(folder, job)
        return ended
    except PlaitError as error:
        print(f"plait: {error}", file=sys.stderr, flush=True)
        return DO_NOT_RETRY
    except KeyboardInterrupt:  # before there were ranks to ask
        return INTERRUPTED


class _Asked:
    """Whether the job is to end by the word that was left in the run's folder, looked at once a second."""

    def __init__(self, folder: Path, job: str) -> None:
        self.folder, self.job, self._next = folder, job, 0.0

    def __call__(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + 1.0
        return asked_to_stop(self.folder, self.job, running=True)


def _again(folder: Path, status: int, before: int, settings: SlurmSection) -> tuple[int, bool]:
    """Have the run started again, unless the job was cancelled, or makes no progress: the exit status, and
    whether it is."""
    job, _ = slurm_job()
    if slurm.patient_state(job).name != "RUNNING":
        return status, False
    if asked_to_stop(folder, job):
        say("this job was asked to end: it is not started again")
        return INTERRUPTED, False
    vain = starts_in_vain(folder, slurm_chain.NAME if settings.chain else job, before)
    if vain > settings.restarts:
        say(f"{vain} starts in a row ended without a new checkpoint; not started again (slurm.restarts)")
        return DO_NOT_RETRY, False
    if settings.chain:
        return status, True
    say(f"Slurm job {job} is put back into the queue, after start {cluster_job()[1] + 1}")
    _requeue(job)
    try:
        signal.pause()  # Slurm ends this start
    except KeyboardInterrupt:  # a stop that came while it goes back
        slurm.command("scancel", job)
    return status, True


def _requeue(job: str) -> None:
    """Put the job back into the queue. A controller that is away once more is asked again: else the run would
    be given up, having outlived the outage before. Raises LaunchError."""
    try:
        slurm.command("scontrol", "requeue", job)
    except LaunchError as error:
        say(f"Slurm does not put the job back ({error}); asking again")
        time.sleep(slurm.LOOK)
        if slurm.patient_state(job).name == "RUNNING":  # else Slurm does so by itself
            slurm.command("scontrol", "requeue", job)
