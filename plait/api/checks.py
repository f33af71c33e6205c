"""Checks of a job before its ranks start: whether they fit, files that they read and write, their number."""

from __future__ import annotations

import math
import shutil
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from plait.core.base.env import cpp_compiler
from plait.core.base.errors import JobError
from plait.core.base.passed_over import Checked

if TYPE_CHECKING:
    from plait.api.places.base import LaunchTarget
    from plait.core.job.plan import Plan
    from plait.core.job.settings import TrainSection
    from plait.core.job.spec import Job
    from plait.lab import LabSpec
    from plait.plan.fits import Room

UNREAD = "folder(s) of weights of which names and shapes were checked, and values (NaN) were not looked at"


def check_files(job: Job, folder: Path, place: LaunchTarget, *, dry: bool = False, asked: Job | None = None) -> Checked:
    """Refuse at once what ranks would refuse, seconds later.

    These are a folder that cannot be written, data that are missing or not enough, weights that are missing
    or of another model. Nothing is checked for a place that does not read the files of this machine. dry:
    whether no run follows, which would look at the values of weights. asked: the job as its file has it.
    Raises JobError or DataError.
    """
    from plait.api.choose import model_notes, precision_note, unmodelled, vocabulary_note
    from plait.api.places.base import Managed
    from plait.core.base.errors import JobError, LaunchError
    from plait.train.checkpoint.initial import check_initial
    from plait.train.data.check import check_data
    from plait.train.data.tokenizer import load_tokenizer

    best = best_note(job.train)
    if isinstance(place, Managed) and not place.shares_files:
        return Checked(note=best)
    try:
        _check_folder(folder)
    except LaunchError as error:
        raise JobError(str(error), key="run.folder") from None
    over = model_notes(job)
    data = check_data(job.data, job.train, folder / "corpus")
    over.add(data.over)
    vocab = load_tokenizer(job.data.tokenizer).vocab
    if job.train.init_from:
        over.add(check_initial(Path(job.train.init_from), job.model_spec(vocab)))
        if dry:
            over.note(UNREAD, job.train.init_from)
    notes = [*unmodelled(job), vocabulary_note(job, vocab), precision_note(asked or job), data.note, best]
    return Checked(over, " ".join(filter(None, notes)))


def best_note(train: TrainSection) -> str:
    """Which checkpoints ``train.keep_best`` compares, where not all; empty if nothing is to be said. Raises
    JobError where none is ever evaluated."""
    every, evaluated = train.checkpoint_every, train.eval_every
    if not train.keep_best or (every and evaluated and every % evaluated == 0):
        return ""
    if not evaluated:
        problem = "true, and train.eval_every = 0 evaluates nothing, so that no checkpoint would be the best"
        fix = f"Set train.eval_every={every or train.steps}, or train.keep_best=false"
        raise JobError(problem, key="train.keep_best", fix=fix)
    meet = math.lcm(every, evaluated)
    when = f"every {meet:,} steps and at the end" if every and meet < train.steps else "at the end alone"
    return (
        f"train.keep_best: evaluations (train.eval_every = {evaluated}) and checkpoints (train.checkpoint_every = "
        f"{every}) meet {when}: no others are compared."
    )


def check_ranks(plan: Plan, place: LaunchTarget, on: str) -> str:
    """Refuse a plan of more ranks than the place has, or of other hosts. Returns a sentence that names the
    spare hosts of a lab, or nothing. Raises JobError. on: the place, as the user named it."""
    from plait.core.base.errors import JobError
    from plait.core.base.lab_hosts import name

    world = plan.layout.world_size
    if not place.takes(world):
        problem = f"{on} has {place.world} ranks, the job needs {world}"
        raise JobError(problem, key="--on", fix="Change one of the two, or strategy.tp, dp, pp")
    if not (place.lab and place.world and world < place.world):
        return ""
    used, hosts = world // place.lab.ranks_per_host, place.lab.hosts
    spares = ", ".join(name(host) for host in range(used, hosts)[:5]) + (", ..." if hosts - used > 5 else "")
    return f"{hosts - used} of {hosts} hosts are spares: {spares}"


def room_of(plan: Plan, place: LaunchTarget) -> Room | None:
    """The memory for the ranks of a plan; None if they run elsewhere."""
    from plait.plan.fits import room

    return room(plan.job.run.device, plan.layout.world_size) if place.ours and plan.job else None


def planned_lab(job: Job, place: LaunchTarget) -> LabSpec | None:
    """The lab to plan for: without the hosts that the job wants kept free."""
    from dataclasses import replace

    from plait.core.base.errors import JobError

    lab, spares = place.lab, job.run.spares
    if lab is None or not spares:
        return lab
    if spares >= lab.hosts or (lab.hosts - spares) % lab.pods:
        problem = f"{spares} of {lab.hosts} hosts in {lab.pods} minipods leave no equal minipods"
        raise JobError(problem, key="run.spares", fix="Choose fewer, or more hosts with --on")
    return replace(lab, hosts=lab.hosts - spares)


def check_room(job: Job, vocab: int) -> None:
    """Raise InfeasiblePlan for a job that this machine has no memory for, before anything is planned."""
    from plait.plan.fits import check_device, check_fits, check_size, estimate_in, room
    from plait.plan.make import job_step

    check_device(job.run.device, job.world_size)
    there = room(job.run.device, job.world_size)
    check_size(job, vocab, there)
    if there:
        check_fits(job, estimate_in(job_step(job, vocab), there), vocab, there)


def check_start(plan: Plan, place: LaunchTarget) -> None:
    """Raise InfeasiblePlan or JobError for a plan whose ranks would run here, and that this machine has no
    memory, devices or compiler for."""
    from plait.plan.fits import check_device, check_fits, estimate_in

    job = plan.job
    if job is None or not place.ours:
        return
    check_processors(job, place)
    check_device(job.run.device, plan.layout.world_size)
    if there := room_of(plan, place):
        check_fits(job, estimate_in(plan, there, traffic=False), plan.model.vocab, there)


def check_processors(job: Job, place: LaunchTarget) -> None:
    """Refuse a job whose ranks would compute on this machine's processors, and cannot as it says."""
    from plait.plan.fits import room

    if True not in (job.strategy.compile, job.strategy.cuda_graphs):
        return
    there = room(job.run.device, job.world_size) if place.ours else None
    if not (place.lab or (there and not there.each)):
        return
    if job.strategy.cuda_graphs is True:
        raise JobError("true, and ranks here compute on processors, which capture nothing",
                       key="strategy.cuda_graphs", fix='Use "auto" or false')  # fmt: skip
    if job.strategy.compile is True:
        check_compiler()


def _check_folder(folder: Path) -> None:
    """Raise LaunchError for a run's folder that cannot be written, or where something else is in the way."""
    from plait.core.base.errors import LaunchError
    from plait.core.base.files import check_target, kind_of

    fix = "Choose another with run.folder=FOLDER or run.name=NAME"
    check_target(folder / "plan.json", fix=fix)
    for name in ("logs", "checkpoints", "corpus"):  # a run goes on without what cannot be recorded
        if (kind := kind_of(folder / name)) not in ("", "folder"):
            raise LaunchError(f"{folder / name} is a {kind}, and a run needs a folder there. {fix}.")


def check_compiler() -> None:
    """Raise JobError where torch.compile lacks what it needs for a CPU: a C++ compiler and Python's
    headers."""
    compiler, fix = cpp_compiler(), 'Install it, or use strategy.compile = "auto" or false'
    if shutil.which(compiler) is None:
        problem = f"true needs a C++ compiler, and '{compiler}' is not here (CXX names another)"
        raise JobError(problem, key="strategy.compile", fix=fix)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        problem = f"true needs Python's headers, and {header} is not here"
        raise JobError(problem, key="strategy.compile", fix=fix)
