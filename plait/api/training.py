"""Training: from a job file, or a plan, to a run that is ready, and its ranks started at a place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.base.text import Part, Shown

if TYPE_CHECKING:
    from plait.api.job_check import JobCheck
    from plait.api.places.base import LaunchTarget
    from plait.api.places.kubernetes import InKubernetes
    from plait.core.base.passed_over import Checked
    from plait.core.cluster.hardware import Hosts
    from plait.core.job.plan import Plan
    from plait.core.job.spec import Job

CHECKED = 64
"""Ranks up to which a dry run also plans every transfer, as a run does."""


@dataclass(frozen=True, kw_only=True)
class Prepared(Shown):
    """A run that can be started. chosen: a sentence on what the planner chose; empty if it had nothing to
    choose. open_job: the job as the user wrote it; None where a plan was given. compared: whether it is known
    to fit this machine; a start compares what is not."""

    plan: Plan
    folder: Path
    checked: Checked
    chosen: str = ""
    open_job: Job | None = None
    compared: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The folder, the plan's hash, and what readers passed over."""
        return {"folder": str(self.folder), "plan": self.plan.key, "passed_over": self.checked.over.rows()}

    def parts(self) -> Iterator[Part]:
        """Sentences on the choice, the run and its folder."""
        from plait.api.summary import what_runs

        yield from filter(None, (self.chosen, *self.checked.over.lines(), self.checked.note))
        yield f"{what_runs(self.plan, None)}; in {self.folder}"


def prepare(file: Path | str, overrides: Sequence[str], place: LaunchTarget, *, refuse: bool = True) -> Prepared:
    """The run of a job file (TOML), or of a plan (``JOB.plan.json``), which is obeyed as it stands.

    A run that has begun in the same folder goes on with its own plan. refuse: whether a job for this machine
    is refused that its memory cannot hold; one for another cluster is compared when it is started here.
    Raises JobError, DataError, InfeasiblePlan, MissingExtra.
    """
    from plait.api.checks import check_files, check_processors, check_room, planned_lab
    from plait.api.choose import other_cluster, planned
    from plait.core.base.errors import need
    from plait.core.job.plan import chosen_by
    from plait.core.job.spec import Job
    from plait.plan.fits import check_size
    from plait.plan.make import make_plan
    from plait.train.data.tokenizer import load_tokenizer

    if place.ours:
        need("torch", "training")
    file = Path(file)
    if file.suffix == ".json":
        return _written(file, overrides, place)
    asked = Job.read(file, overrides).named(file.stem)
    vocab = load_tokenizer(asked.data.tokenizer).vocab
    asked.check_trains(asked.model_spec(vocab))
    job, chosen = planned(asked, vocab, planned_lab(asked, place))
    compared = place.ours and other_cluster(job) is None
    if compared and refuse:
        check_room(job, vocab)
    else:
        check_size(job, vocab, None)
    fresh = replace(make_plan(job, place.hosts, vocab=vocab), chosen=chosen_by(asked))
    fresh = replace(fresh, hosts=_hosts(fresh, place))
    checked = check_files(job, job.run.path, place, asked=asked)
    if compared:
        check_processors(job, place)
    plan = fresh.continued(job.run.path / "plan.json")
    return Prepared(
        plan=plan, folder=job.run.path, checked=checked, chosen=chosen, open_job=asked, compared=compared and refuse
    )


def dry_run(file: Path | str, overrides: Sequence[str], place: LaunchTarget) -> JobCheck:
    """Check a job or a plan as ``prepare`` does, and predict memory and traffic of every rank.

    Memory is that on the devices of ``[cluster]``, as ``plan_job`` predicts it. Whether it fits there is left
    to ``JobCheck.check_fits``.
    """
    from plait.api.checks import check_files, check_processors, planned_lab
    from plait.api.choose import other_cluster, planned
    from plait.api.job_check import JobCheck, sized
    from plait.core.job.plan import chosen_by
    from plait.core.job.spec import Job
    from plait.plan.fits import check_device, check_size
    from plait.plan.make import job_step, make_plan
    from plait.train.data.tokenizer import load_tokenizer

    file = Path(file)
    if file.suffix == ".json":
        ready = _written(file, overrides, place, dry=True)
        plan, job = ready.plan, ready.plan.job
        assert job is not None
        cluster = other_cluster(job)
        if place.ours and cluster is None:
            check_device(job.run.device, job.world_size)
            check_processors(job, place)
        return JobCheck(file=file, folder=ready.folder, memory=sized(plan, job, cluster, place), checked=ready.checked,
                      vocab=plan.model.vocab, job=job, by=plan.chosen)  # fmt: skip
    asked = Job.read(file, overrides).named(file.stem)
    vocab, folder = load_tokenizer(asked.data.tokenizer).vocab, asked.run.path
    asked.check_trains(asked.model_spec(vocab))
    job, chosen = planned(asked, vocab, planned_lab(asked, place))
    cluster = other_cluster(job)
    if place.ours and cluster is None:
        check_device(job.run.device, job.world_size)
    check_size(job, vocab, None)
    fresh = make_plan(job, place.hosts, vocab=vocab) if job.world_size <= CHECKED else None
    checked = check_files(job, folder, place, dry=True, asked=asked)
    if place.ours and cluster is None:
        check_processors(job, place)
    if fresh:
        fresh.continued(job.run.path / "plan.json")
    step = make_plan(job, cluster.hosts, vocab=vocab, draft=True) if cluster else job_step(job, vocab)
    return JobCheck(
        file=file, folder=folder, memory=sized(step, job, cluster, place), checked=checked, vocab=vocab, job=job,
        chosen=chosen, by=chosen_by(asked),
    )  # fmt: skip


def _written(file: Path, overrides: Sequence[str], place: LaunchTarget, *, dry: bool = False) -> Prepared:
    """The run of a plan as it stands, in the folder that its job names; only where it runs may be set
    anew."""
    from plait.api.checks import check_files
    from plait.core.base.errors import JobError
    from plait.core.job.plan import Plan
    from plait.core.job.refine import Measurements, refine

    plan = Plan.read(file)
    for setting in overrides:
        if not setting.startswith(("run.", "slurm.", "kubernetes.")):
            fix = "Only run.*, slurm.* and kubernetes.* may be set; for all else change the job file and plan again"
            raise JobError(f"'{setting}' would change the plan", file=str(file), fix=fix)
    if plan.job is None:
        problem = "was made without a job file and says nothing of data or steps"
        raise JobError(problem, file=str(file), key="job", fix="Name a plan that plait plan or plait train wrote")
    plan.job.check_trains(plan.model)
    job = plan.job.changed(overrides)
    folder = job.run.path
    plan = replace(plan, job=job, hosts=_hosts(plan, place))
    plan = refine(plan, Measurements()) if plan.choices.any else plan
    plan.of_the_same_job(folder / "plan.json")
    return Prepared(plan=plan, folder=folder, checked=check_files(job, folder, place, dry=dry))


def _hosts(plan: Plan, place: LaunchTarget) -> Hosts | None:
    """Hosts whose links the plan may count on: a lab's, where no slower core lies between them."""
    if place.lab is None:
        return plan.hosts
    return place.lab.as_hosts if place.lab.pods == 1 and place.lab.rate else None


def run_plan(
    plan: Plan, folder: Path, place: LaunchTarget, *, silent: bool = False, open_job: Job | None = None
) -> int:
    """Train as a plan says, in a folder that is locked meanwhile; the exit status.

    silent: whether the output of rank 0 goes to its log. open_job: the job as the user wrote it, if the
    planner has closed what it leaves open; the run is planned anew from it for fewer hosts.
    """
    from plait.api.ranks import Ranks
    from plait.core.base import programs
    from plait.core.runs.lock import RunLock
    from plait.core.topology.rank_table import NAME
    from plait.launch.run_folder import write_run

    job = plan.job
    assert job is not None
    with RunLock(folder) as lock:
        plan = write_run(plan, folder)
        (folder / NAME).unlink(missing_ok=True)  # of an earlier start, elsewhere
        ranks = Ranks(
            module=programs.RANK, arguments=[str(folder)], world=plan.layout.world_size, logs=folder / "logs",
            timeout=job.run.timeout, lock=lock, silent=silent, folder=folder,
            deadline=job.run.call_deadline, first=job.run.first_deadline, plan=plan,
            restarts=job.run.restarts, open_job=open_job,
        )  # fmt: skip
        return place.run(ranks)


def start_run(ready: Prepared, place: LaunchTarget, *, follow: bool = True, told: Callable[[str], None] = print) -> int:
    """Run a plan here, or send it to a cluster's manager; the exit status.

    follow: whether a run that was sent is waited for, and what it prints is shown. told: takes sentences on a
    run that was sent. Raises LaunchError, and InfeasiblePlan and JobError for what cannot run here.
    """
    from plait.api.checks import check_start
    from plait.api.places.base import Managed

    if not ready.compared:
        check_start(ready.plan, place)
    if not isinstance(place, Managed) or place.inside:
        return run_plan(ready.plan, ready.folder, place, open_job=ready.open_job)
    sent = place.submit(ready.plan, ready.folder, follow=follow)
    for note in sent.notes:
        told(note)
    return sent.wait()


def write_manifests(ready: Prepared, place: InKubernetes, folder: Path) -> str:
    """Write the objects that would be sent to Kubernetes, for this user's eyes alone: the word in them lets
    anybody join the run. Returns a note. Raises LaunchError, and JobError where the folder has a run already:
    its files are what it is ended by."""
    from plait.core.base.errors import JobError
    from plait.core.base.files import explained, replacing

    files, note = place.manifests(ready.plan, ready.folder)
    if there := [folder / name for name in files if (folder / name).exists()]:
        problem = f"{folder} has {_run_of(there[-1])} already, which is ended by these files"
        fix = f"Choose another folder, or end it if it was applied (kubectl delete -f {folder}) and remove them"
        raise JobError(problem, key="--write", fix=fix)
    for name, text in files.items():
        with (
            explained(f"{folder / name} cannot be written", fix="Choose another with --write DIR"),
            replacing(folder / name) as draft,
        ):
            draft.chmod(0o600)
            draft.write_text(text)
    return note


def _run_of(file: Path) -> str:
    """The run whose object a file has, by its label."""
    import re

    from plait.launch.kubernetes_manifests import RUN

    found = re.search(rf"{re.escape(RUN)}: (\S+)", file.read_text(errors="replace"))
    return f"the run {found[1]}" if found else f"a {file.name}"


def write_plan(ready: Prepared) -> None:
    """Write the files of a run that somebody else starts, whose lock he holds."""
    from plait.launch.run_folder import write_run

    write_run(ready.plan, ready.folder)
