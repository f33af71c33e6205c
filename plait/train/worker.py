"""Run one rank, under torchrun's variables:

    python -m plait.train.worker RUN_FOLDER                        started by ``plait train``
    python -m plait.train.worker JOB.toml [section.key=value ...]  started by torchrun or a scheduler

``plan.json`` may replace the job file. In the second form rank 0 does what ``plait train`` does
before it starts ranks. It takes the run's lock, plans the run in a child process, and sends the
other ranks the folder, which all machines must see.

torchrun puts the working directory first on Python's import path; PYTHONSAFEPATH=1 in its
environment prevents that, as ``plait train`` does.

Only modules that need no torch are imported at the top: a rank listens for stop requests from the
beginning, and importing torch takes seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.base import programs
from plait.core.base.cluster_env import chosen_rank_table, this_host
from plait.core.base.env import RankEnv, take_launcher, use_network
from plait.core.base.errors import (
    DO_NOT_RETRY,
    JobError,
    LaunchError,
    MissingExtra,
    NotFinite,
    PlaitError,
    RankFailure,
    RunLost,
    naming_extras,
)
from plait.core.base.process import command_of, die_with_parent, name_process
from plait.core.job.collecting import collecting
from plait.core.job.plan import Plan
from plait.core.job.settings import RunSection
from plait.core.job.spec import Job
from plait.core.runs.channel import Channel
from plait.core.runs.lock import RunLock
from plait.core.runs.rank_reports import forget_hang
from plait.core.topology.rank_table import NAME, RankTable
from plait.train.machine.control import Control
from plait.train.machine.rank_process import ignore_print_errors, record_attempt, run_and_end, set_rank_variables
from plait.train.machine.watchdog import Watchdog, address_towards, stacks_on_signal

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from plait.train.rank_run import Started

USAGE = "Start a rank with a run's folder, a plan, or a job file and settings: JOB.toml [section.key=value ...]."
PLAN = (programs.PLAIT, "train", "--plan-only")
"""The program that plans."""
RUN = "run"
"""The store's key under which rank 0 publishes the run's folder; empty if rank 0 refused the
job."""
JOB = "job"
"""The store's key under which rank 0 publishes its job settings."""
IMPORTS = ("plait.train.comm.selfcheck", "plait.train.comm.world", "plait.train.report", "plait.train.session")
"""Modules that every rank imports when it begins to train."""


def main() -> int:
    """Train; return the exit status."""
    die_with_parent()
    ignore_print_errors()
    stacks_on_signal()
    descriptor = take_launcher()
    launcher = Channel.inherited(descriptor) if descriptor is not None else None
    with Control(launcher) as control:
        try:
            set_rank_variables()
            with naming_extras("a rank"):
                return _run(RankEnv.read(), control, sys.argv[1:])
        except PlaitError as error:
            control.report_failure(error)
            again = not isinstance(error, (MissingExtra, NotFinite, RunLost))
            return error.exit_status if again or not control.launched else DO_NOT_RETRY


def _run(rank: RankEnv, control: Control, arguments: Sequence[str]) -> int:
    name_process(f"plait-rank-{rank.rank}")
    if not arguments or arguments[0].startswith("-"):
        raise LaunchError(USAGE)
    with ExitStack() as held:
        if control.launched:
            return _train(rank, control, Path(arguments[0]), None)
        store, folder = meet(rank, control, held, arguments)
        if folder is None:
            return LaunchError.exit_status  # rank 0 prints the reason
        return _train(rank, control, folder, store)


def meet(
    rank: RankEnv, control: Control, held: ExitStack, arguments: Sequence[str]
) -> tuple[Store | None, Path | None]:
    """Rendezvous with the other ranks when no Plait launcher started them. Return the store of the
    rendezvous (None for a single rank) and the run's folder, which rank 0 has planned; None instead
    of the folder if rank 0 refused the job."""
    store = _meet(rank, RunSection().timeout) if rank.world_size > 1 else None
    if rank.rank == 0:
        try:
            folder = _plan(rank, control, held, arguments)
            asked = _settings(arguments)
        except BaseException:
            if store:
                store.set(RUN, "")
            raise
        if store:
            store.set(JOB, json.dumps(asked))
            store.set(RUN, str(folder))
        return store, folder
    assert store is not None
    control.set_activity("waiting for rank 0 to plan", patient=True)
    if not (said := store.get(RUN).decode()):
        return store, None
    _compare(rank.rank, _settings(arguments), json.loads(store.get(JOB).decode()))
    return store, Path(said)


def _settings(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the job's settings by key; empty if the rank was started with a run's folder or a
    plan."""
    if Path(arguments[0]).suffix == ".json" or not Path(arguments[0]).is_file():
        return {}
    job = Job.read(arguments[0], arguments[1:]).named(Path(arguments[0]).stem)
    return {f"{section}.{key}": value for section, table in job.to_dict().items() for key, value in table.items()}


def _compare(rank: int, own: dict[str, Any], first: dict[str, Any]) -> None:
    """Raise JobError, naming the key, if this rank was started with other settings than rank 0."""
    for key in sorted(own.keys() | first.keys()) if own and first else ():
        if own.get(key) != first.get(key):
            problem = f"rank {rank} was given {own.get(key)!r} and rank 0 {first.get(key)!r}"
            raise JobError(problem, key=key, fix="Start all ranks with the same job file and settings")


def _plan(rank: RankEnv, control: Control, held: ExitStack, arguments: Sequence[str]) -> Path:
    """Plan the run and take its lock. Return the run's folder, ready for the ranks."""
    path, folder, world = Path(arguments[0]), *_folder_and_ranks(Path(arguments[0]), arguments[1:])
    if world is None:
        arguments = [*arguments, f"cluster.ranks={rank.world_size}"]
    elif world != rank.world_size:
        raise JobError(
            f"the job needs {world} ranks, and {rank.world_size} were started",
            file=str(path),
            key="strategy",
            fix=f"Start {world} (torchrun's --nproc-per-node times --nnodes), or change strategy.tp, dp or pp",
        )
    lock = held.enter_context(RunLock(folder))
    control.add_check(lock.check)
    if not path.is_dir():
        control.set_activity("planning", patient=True)
        done = subprocess.run(command_of(*PLAN, *arguments), stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            error = LaunchError(done.stderr.strip().removeprefix("plait: "))
            error.exit_status = done.returncode
            raise error
        with suppress(OSError):
            print(done.stderr, end="", file=sys.stderr, flush=True)  # names settings that a resumed run changes
    return folder.resolve()


def _folder_and_ranks(path: Path, overrides: Sequence[str]) -> tuple[Path, int | None]:
    """Return the run's folder and the number of ranks that it needs, from a job file, a plan or the
    folder itself. The number is None for a job that adapts to the ranks that were started."""
    if path.is_dir():
        return path, Plan.read(path / "plan.json").layout.world_size
    if path.suffix != ".json":
        job = Job.read(path, overrides).named(path.stem)
        return job.run.path, (job.cluster.ranks or None) if job.leaves_ranks_open else job.world_size
    plan = Plan.read(path)
    if plan.job is None:
        raise JobError("was made without a job file, so its data and steps are unknown", file=str(path))
    return plan.job.changed(overrides).run.path, plan.layout.world_size


def _train(rank: RankEnv, control: Control, folder: Path, store: Store | None) -> int:
    """Join the other ranks, and train the run in ``folder``."""
    plan = run_plan(rank, folder)
    if rank.rank or control.launched:
        return _joined(plan, rank, control, folder, store)
    return record_attempt(lambda: _joined(plan, rank, control, folder, store), folder, plan, rank, control)


def run_plan(rank: RankEnv, folder: Path) -> Plan:
    """Return the plan of the run in ``folder``, after checking that this rank can execute it.
    Raises LaunchError if there is no run, JobError or PlacementError if the plan does not fit."""
    if not (folder / "plan.json").is_file():
        raise LaunchError(
            f"rank {rank.rank} finds no run in {folder}. All machines must see one folder: name it with "
            "run.folder=FOLDER."
        )
    plan = Plan.read(folder / "plan.json")
    assert plan.job is not None
    plan.job.check_trains(plan.model)
    if plan.layout.world_size != rank.world_size:
        problem = f"the job needs {plan.layout.world_size} ranks, and {rank.world_size} were started"
        fix = f"Start {plan.layout.world_size}, or change strategy.tp, dp, pp or cp"
        raise JobError(problem, key="strategy", fix=fix)
    assert plan.settings is not None
    use_network(plan.settings.run.network_variables)
    if (folder / NAME).is_file() or chosen_rank_table():
        RankTable.read(chosen_rank_table() or folder / NAME).check(rank.rank, rank.world_size, this_host())
    return plan


def _joined(plan: Plan, rank: RankEnv, control: Control, folder: Path, store: Store | None) -> int:
    control.set_activity("importing", patient=True)  # slow on a slow disk
    from plait.train.session import Session

    with joined_run(plan, rank, control, folder, store) as (started, watchdog):
        session = Session(*started)
        watchdog.record_finished = session.run.recorder.look
        return session.train()


@contextmanager
def joined_run(
    plan: Plan, rank: RankEnv, control: Control, folder: Path, store: Store | None
) -> Generator[tuple[Started, Watchdog]]:
    """Join the other ranks. Yield the rank's ``Started`` and its watchdog, which detects hangs."""
    assert plan.settings is not None
    control.set_activity("importing", patient=True)  # slow on a slow disk
    from plait.train.comm.selfcheck import check_links
    from plait.train.comm.world import joined
    from plait.train.rank_run import Started
    from plait.train.report import Reporter

    run = plan.settings.run
    collects = not control.launched and rank.local_rank == 0  # otherwise the launcher's agent collects
    with (
        collecting(folder, rank.rank, rank.local_world_size, is_rank=True) if collects else nullcontext(),
        joined(rank, run, control, store) as device,
        Reporter(folder, speaks=rank.rank == 0, steps=plan.settings.train.steps) as report,
    ):
        if run.selfcheck != "off" and rank.world_size > rank.local_world_size:
            control.set_activity("trying the links between machines")
            report.say(control.activity)
            if found := check_links(rank, device):
                if run.selfcheck == "stop":
                    raise RankFailure(f"{found[0]} (run.selfcheck)")
                for one in found if rank.rank == 0 else ():
                    report.warn(f"warning: {one}")
        watchdog = Watchdog(
            folder, rank.rank, control, deadline=run.call_deadline,
            address=address_towards(rank.master_addr, rank.master_port),
        )  # fmt: skip
        if rank.rank == 0 and not control.launched:  # remove an earlier start's files; a launcher does so itself
            forget_hang(folder)
        with watchdog if rank.world_size > 1 else nullcontext():
            yield Started(plan, folder, rank, device, report, control), watchdog


def _meet(rank: RankEnv, timeout: float) -> Store:
    from plait.train.comm.world import open_store

    return open_store(rank, timeout)


if __name__ == "__main__":
    run_and_end(main)
