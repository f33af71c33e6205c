"""What one rank runs, under torchrun's variables:

    python -m plait.train.worker RUN_FOLDER                        started by ``plait train``
    python -m plait.train.worker JOB.toml [section.key=value ...]  started by torchrun or a scheduler

``plan.json`` does in place of a job file.

In the second form rank 0 does what ``plait train`` does before it starts ranks: it takes the run's lock, has
the run planned by a process of its own, and tells the others the folder, which all machines must see.

torchrun lets Python import from the working directory first; PYTHONSAFEPATH=1 in its environment keeps what
lies there out, as ``plait train`` does.

Only what needs no torch is imported at the top: a rank listens from the beginning, and torch takes seconds.
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
from plait.core.runs.parts import forget_hang
from plait.core.topology.rank_table import NAME, RankTable
from plait.train.machine.control import Control
from plait.train.machine.own_history import kept
from plait.train.machine.rank_process import print_to_nobody, run_and_end
from plait.train.machine.stacks import stacks_on_signal
from plait.train.machine.started_by import take_place
from plait.train.machine.watchdog import Watchdog, address_towards

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from plait.train.rank_run import Started

USAGE = "Start a rank with a run's folder, a plan, or a job file and settings: JOB.toml [section.key=value ...]."
PLAN = (programs.PLAIT, "train", "--plan-only")
"""The process that plans."""
RUN = "run"
"""Where in the store rank 0 says which folder it is; empty if it has refused."""
JOB = "job"
"""Where it says what it was asked to run."""
IMPORTS = ("plait.train.comm.selfcheck", "plait.train.comm.world", "plait.train.report", "plait.train.session")
"""What every rank imports when it begins to train."""


def main() -> int:
    """Train; returns the exit status."""
    die_with_parent()
    print_to_nobody()
    stacks_on_signal()
    descriptor = take_launcher()
    launcher = Channel.inherited(descriptor) if descriptor is not None else None
    with Control(launcher) as control:
        try:
            take_place()
            with naming_extras("a rank"):
                return _run(RankEnv.read(), control, sys.argv[1:])
        except PlaitError as error:
            control.fails(error)
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
            return LaunchError.exit_status  # rank 0 says why
        return _train(rank, control, folder, store)


def meet(
    rank: RankEnv, control: Control, held: ExitStack, arguments: Sequence[str]
) -> tuple[Store | None, Path | None]:
    """Where ranks that nobody of Plait's has launched meet, and the run's folder, which rank 0 has planned;
    None where it has refused."""
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
    control.doing("waiting for rank 0 to plan", patient=True)
    if not (said := store.get(RUN).decode()):
        return store, None
    _compare(rank.rank, _settings(arguments), json.loads(store.get(JOB).decode()))
    return store, Path(said)


def _settings(arguments: Sequence[str]) -> dict[str, Any]:
    """What a rank was asked to run, by key; nothing where it was only told a run's folder or a plan."""
    if Path(arguments[0]).suffix == ".json" or not Path(arguments[0]).is_file():
        return {}
    job = Job.read(arguments[0], arguments[1:]).named(Path(arguments[0]).stem)
    return {f"{section}.{key}": value for section, table in job.to_dict().items() for key, value in table.items()}


def _compare(rank: int, own: dict[str, Any], first: dict[str, Any]) -> None:
    """Raise JobError, naming the key, if this rank was asked for another job than rank 0."""
    for key in sorted(own.keys() | first.keys()) if own and first else ():
        if own.get(key) != first.get(key):
            problem = f"rank {rank} was given {own.get(key)!r} and rank 0 {first.get(key)!r}"
            raise JobError(problem, key=key, fix="Start all ranks with the same job file and settings")


def _plan(rank: RankEnv, control: Control, held: ExitStack, arguments: Sequence[str]) -> Path:
    """The run's folder, locked and ready for the ranks."""
    path, folder, world = Path(arguments[0]), *_asked(Path(arguments[0]), arguments[1:])
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
    control.always(lock.check)
    if not path.is_dir():
        control.doing("planning", patient=True)
        done = subprocess.run(command_of(*PLAN, *arguments), stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            error = LaunchError(done.stderr.strip().removeprefix("plait: "))
            error.exit_status = done.returncode
            raise error
        with suppress(OSError):
            print(done.stderr, end="", file=sys.stderr, flush=True)  # with what other settings a run goes on
    return folder.resolve()


def _asked(path: Path, overrides: Sequence[str]) -> tuple[Path, int | None]:
    """The run's folder and how many ranks it needs, by a job file, a plan or the folder itself; None for a
    job that is planned for as many as there are."""
    if path.is_dir():
        return path, Plan.read(path / "plan.json").layout.world_size
    if path.suffix != ".json":
        job = Job.read(path, overrides).named(path.stem)
        return job.run.path, (job.cluster.ranks or None) if job.leaves_ranks_open else job.world_size
    plan = Plan.read(path)
    if plan.job is None:
        raise JobError("was made without a job file and says nothing of data or steps", file=str(path))
    return plan.job.changed(overrides).run.path, plan.layout.world_size


def _train(rank: RankEnv, control: Control, folder: Path, store: Store | None) -> int:
    """Join the other ranks, and train the run in ``folder``."""
    plan = run_plan(rank, folder)
    if rank.rank or control.launched:
        return _joined(plan, rank, control, folder, store)
    return kept(lambda: _joined(plan, rank, control, folder, store), folder, plan, rank, control)


def run_plan(rank: RankEnv, folder: Path) -> Plan:
    """The plan of the run in ``folder``, which this rank can obey. Raises LaunchError or JobError."""
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
    use_network(plan.job.run.network_variables)
    if (folder / NAME).is_file() or chosen_rank_table():
        RankTable.read(chosen_rank_table() or folder / NAME).check(rank.rank, rank.world_size, this_host())
    return plan


def _joined(plan: Plan, rank: RankEnv, control: Control, folder: Path, store: Store | None) -> int:
    control.doing("importing", patient=True)  # as long as the disk takes
    from plait.train.session import Session

    with joined_run(plan, rank, control, folder, store) as (started, watchdog):
        session = Session(*started)
        watchdog.note = session.run.recorder.look
        return session.train()


@contextmanager
def joined_run(
    plan: Plan, rank: RankEnv, control: Control, folder: Path, store: Store | None
) -> Generator[tuple[Started, Watchdog]]:
    """Join the other ranks: what a rank then has, and who looks whether it hangs."""
    assert plan.job is not None
    control.doing("importing", patient=True)  # as long as the disk takes
    from plait.train.comm.selfcheck import check_links
    from plait.train.comm.world import joined
    from plait.train.rank_run import Started
    from plait.train.report import Reporter

    run = plan.job.run
    collects = not control.launched and rank.local_rank == 0  # a launcher's agent does, where there is one
    with (
        collecting(folder, rank.rank, rank.local_world_size, is_rank=True) if collects else nullcontext(),
        joined(rank, run, control, store) as device,
        Reporter(folder, speaks=rank.rank == 0, steps=plan.job.train.steps) as report,
    ):
        if run.selfcheck != "off" and rank.world_size > rank.local_world_size:
            control.doing("trying the links between machines")
            if found := check_links(rank, device):
                if run.selfcheck == "stop":
                    raise RankFailure(f"{found[0]} (run.selfcheck)")
                for one in found if rank.rank == 0 else ():
                    report.warn(f"warning: {one}")
        watchdog = Watchdog(
            folder, rank.rank, control, deadline=run.call_deadline,
            address=address_towards(rank.master_addr, rank.master_port),
        )  # fmt: skip
        if rank.rank == 0 and not control.launched:  # of an earlier start; a launcher has done that
            forget_hang(folder)
        with watchdog if rank.world_size > 1 else nullcontext():
            yield Started(plan, folder, rank, device, report, control), watchdog


def _meet(rank: RankEnv, timeout: float) -> Store:
    from plait.train.comm.world import open_store

    return open_store(rank, timeout)


if __name__ == "__main__":
    run_and_end(main)
