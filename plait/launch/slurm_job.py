"""A run inside of a Slurm job: the rank table, one agent on every node by srun, and what becomes of the job.

    python -m plait.api.in_slurm RUN_FOLDER          in the batch script, on the job's first node

srun is given the nodes in the order of the rank table (SLURM_HOSTFILE, ``--distribution=arbitrary``), which
Slurm's own numbering would sort by name; every agent is compared with the table, and every rank once more.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from plait.core.base import programs
from plait.core.base.env import cluster_job, granted, inherited, slurm_job, this_host
from plait.core.base.errors import JobError, LaunchError, PlacementError, PlaitError
from plait.core.base.process import command_of
from plait.core.job.plan import CHANGED, Plan
from plait.core.runs.history import History, newest_checkpoint
from plait.core.runs.lock import RunLock
from plait.core.runs.progress import Progress
from plait.core.topology.hostlist import expand
from plait.core.topology.rank_table import NAME, RankTable
from plait.core.topology.slurm_lines import in_topological_order
from plait.launch import slurm
from plait.launch.agents import Agents, Rendezvous
from plait.launch.hang import Suspicion
from plait.launch.run_folder import DO_NOT_RETRY, starts_in_vain
from plait.launch.watch import RunGuard, say, watched

PLACED = "placed_ranks.json"
"""The rank table that the user has given, in the run's folder."""
TERMINATED, INTERRUPTED = 128 + signal.SIGTERM, 128 + signal.SIGINT


def run(
    folder: Path, argv: Sequence[str], world_size: int, *, timeout: float, plan: Plan | None = None,
    guarded: Callable[[Progress], RunGuard] = lambda progress: RunGuard(progress=progress),
) -> int:  # fmt: skip
    """Run ``argv`` as every rank on the nodes of the job that we are in; as ``run_ranks``. plan: the one that
    they obey, if they train: this start goes into the run's history then. guarded: makes what looks after
    the run, once the evidence of the start before is put aside."""
    job, listed = slurm_job()
    table = _table(folder, expand(listed), world_size)
    device = plan.job.run.device if plan and plan.job else "auto"
    gpus = 0 if device == "cpu" else slurm.gpus_of_job(job)
    if gpus:
        problem = f"each node of Slurm job {job} has {gpus} GPUs"
        slurm.check_gpus(gpus, table.ranks_per_node, device, problem)

    def start(progress: Progress) -> int:
        return _start(folder, argv, table, gpus, timeout, guarded(progress))

    if plan is None:
        return start(Progress(world_size))
    history = History(folder)
    changed = plan.notes.get(CHANGED, "")
    history.begin_again(world_size, table.hosts, plan.key, again=cluster_job()[1] > 0, changed=changed)
    return history.attempt(start, Progress(world_size, stepped=lambda one: history.goes_on(one, say)))


def _start(folder: Path, argv: Sequence[str], table: RankTable, gpus: int, timeout: float, guard: RunGuard) -> int:
    job, listed = slurm_job()
    hosts = folder / f"slurm-hosts-{job}.txt"
    hosts.write_text("".join(f"{host}\n" for host in table.hosts))
    addresses = slurm.node_addresses(expand(listed))  # under salloc we are on none of them
    here = addresses.get(this_host(), this_host())
    logs = folder / "logs"
    try:
        with (
            Agents(table, argv, logs, Rendezvous(host=here), addresses=addresses, numbered=True) as agents,
            ExitStack() as held,
        ):
            step = subprocess.Popen(
                _srun(len(table.hosts), gpus),
                env=inherited() | agents.variables | granted(gpus) | {"SLURM_HOSTFILE": str(hosts.absolute())},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            held.callback(_finish, step, agents)
            ranks = agents.ranks(lambda: _still(step))
            sources = list(agents.agents.values())
            return watched(ranks, logs, timeout=timeout, guard=guard, sources=sources)
    finally:
        hosts.unlink(missing_ok=True)


def _srun(nodes: int, gpus: int) -> list[str]:
    # Of GPUs that came with --exclusive alone a step gets those only that it asks for.
    return [
        "srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--distribution=arbitrary", "--overlap",
        "--kill-on-bad-exit=0", "--wait=0", "--export=ALL", *([f"--gres=gpu:{gpus}"] if gpus else []),
        *command_of(programs.AGENT),
    ]  # fmt: skip


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


def _table(folder: Path, nodes: Sequence[str], world_size: int) -> RankTable:
    """The user's rank table, if all its hosts are ours; else the job's nodes in the order of the switches."""
    if (folder / PLACED).is_file():
        table = RankTable.read(folder / PLACED)
        if missing := [host for host in table.hosts if host not in nodes]:
            raise PlacementError(f"The rank table has {', '.join(missing)}, which this Slurm job was not given.")
    else:
        if world_size % len(nodes):
            raise PlacementError(f"{world_size} ranks do not spread evenly over the {len(nodes)} nodes of this job.")
        ordered = list(nodes)
        with suppress(LaunchError, JobError, ValueError):  # a cluster without switches, or with none that we can read
            ordered = in_topological_order(nodes, slurm.command("scontrol", "show", "topology"))
        table = RankTable(tuple(ordered), world_size // len(nodes))
    if table.world_size != world_size:
        raise PlacementError(f"The rank table has {table.world_size} ranks, and the run needs {world_size}.")
    table.write(folder / NAME)
    return table


def main(suspicion: Callable[[Plan, Path], Suspicion | None] = lambda plan, folder: None) -> int:
    """Run, and say by the exit status, or by a requeue, whether the job is to start again. suspicion: finds
    out why ranks of a plan hang."""
    folder = Path(sys.argv[1])
    try:
        plan = Plan.read(folder / "plan.json")
        assert plan.job is not None
        settings = plan.job.slurm
        argv = command_of(programs.RANK, str(folder))
        before = newest_checkpoint(folder)
        try:
            with RunLock(folder) as lock:

                def guarded(progress: Progress) -> RunGuard:
                    return RunGuard(lock=lock, suspicion=suspicion(plan, folder), progress=progress)

                timeout = plan.job.run.timeout
                status = run(folder, argv, plan.layout.world_size, timeout=timeout, plan=plan, guarded=guarded)
        except PlaitError as error:
            print(f"plait: {error}", file=sys.stderr, flush=True)
            status = error.exit_status
            if status != 1 or not settings.requeue:
                return DO_NOT_RETRY
        if status in (1, TERMINATED) and settings.requeue:
            return _again(folder, status, before, settings.restarts)
        return status
    except PlaitError as error:
        print(f"plait: {error}", file=sys.stderr, flush=True)
        return DO_NOT_RETRY
    except KeyboardInterrupt:  # before there were ranks to ask
        return INTERRUPTED


def _again(folder: Path, status: int, before: int, restarts: int) -> int:
    """Have the job started again, unless it was cancelled, or makes no progress."""
    job, _ = slurm_job()
    if slurm.patient_state(job).name != "RUNNING":
        return status
    vain = starts_in_vain(folder, job, before)
    if vain > restarts:
        say(f"{vain} starts in a row ended without a new checkpoint; not started again (slurm.restarts)")
        return DO_NOT_RETRY
    say(f"Slurm job {job} is put back into the queue, after start {cluster_job()[1] + 1}")
    slurm.command("scontrol", "requeue", job)
    signal.pause()  # Slurm ends this start
    return status
