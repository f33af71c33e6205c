"""Training: prepares a run from a job file or a plan, and starts its ranks at a launch target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.base.errors import PlaitError
from plait.core.base.text import Part, Shown, counted

if TYPE_CHECKING:
    from plait.api.job_check import JobCheck
    from plait.api.places.base import LaunchTarget
    from plait.api.places.kubernetes import KubernetesTarget
    from plait.core.base.ignored_input import Checked
    from plait.core.cluster.hardware import Hosts
    from plait.core.job.plan import Plan
    from plait.core.job.spec import Job
    from plait.plan.search.fits import AvailableMemory
    from plait.train.checkpoint.export import Exported
    from plait.train.sample import Sampler

CHECKED = 64
"""The largest number of ranks for which a dry run also plans every transfer, as a run does."""


@dataclass(frozen=True, kw_only=True)
class PreparedRun(Shown):
    """A run that can be started. chosen: a sentence on the planner's choices; empty if it had
    nothing to choose. open_job: the job as the user wrote it; None if a plan was given.
    memory_checked: True if the run is known to fit this machine; otherwise the start checks it."""

    plan: Plan
    folder: Path
    checked: Checked
    chosen: str = ""
    open_job: Job | None = None
    memory_checked: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the folder, the plan's hash, and input that readers ignored."""
        return {"folder": str(self.folder), "plan": self.plan.key, "passed_over": self.checked.over.rows()}

    def parts(self) -> Iterator[Part]:
        """Yield sentences on the choice, the run and its folder."""
        yield from filter(None, (self.chosen, *self.checked.over.lines(), self.checked.note))
        yield f"{describe_run(self.plan, None)}; in {self.folder}"


def prepare(
    file: Path | str, overrides: Sequence[str], place: LaunchTarget, *, check_memory: bool = True
) -> PreparedRun:
    """Prepare the run of a job file (TOML), or of a plan (``JOB.plan.json``), which is obeyed
    unchanged.

    A run that has begun in the same folder continues with its own plan. check_memory: True to
    refuse a job for this machine that needs more memory than the machine has; a job for another
    cluster is checked when it is started here. Raises JobError, DataError, InfeasiblePlan,
    MissingExtra.
    """
    from plait.api.choices import other_cluster
    from plait.api.job_check import check_files, check_processors, check_room
    from plait.core.base.errors import need
    from plait.core.job.plan import setting_origins
    from plait.plan.make import make_plan
    from plait.plan.search.fits import check_size

    if place.is_local:
        need("torch", "training")
    file = Path(file)
    if file.suffix == ".json":
        return _written(file, overrides, place)
    asked, vocab, job, chosen = _closed(file, overrides, place)
    compared = place.is_local and other_cluster(job) is None
    if compared and check_memory:
        check_room(job, vocab)
    else:
        check_size(job, vocab, None)
    fresh = replace(make_plan(job, place.hosts, vocab=vocab), chosen=setting_origins(asked))
    fresh = replace(fresh, hosts=_hosts(fresh, place))
    checked = check_files(job, job.run.path, place, original_job=asked)
    if compared:
        check_processors(job, place)
    plan = fresh.continued(job.run.path / "plan.json")
    return PreparedRun(
        plan=plan,
        folder=job.run.path,
        checked=checked,
        chosen=chosen,
        open_job=asked,
        memory_checked=compared and check_memory,
    )


def dry_run(file: Path | str, overrides: Sequence[str], place: LaunchTarget) -> JobCheck:
    """Check a job or a plan as ``prepare`` does, and predict memory and traffic of every rank.

    Memory is predicted for the devices of ``[cluster]``, as by ``plan_job``.
    ``JobCheck.check_fits`` raises the error if it does not fit.
    """
    from plait.api.choices import other_cluster
    from plait.api.job_check import JobCheck, check_files, check_processors, memory_of_step
    from plait.core.job.plan import setting_origins
    from plait.plan.make import job_step, make_plan
    from plait.plan.search.fits import check_device, check_size

    file = Path(file)
    if file.suffix == ".json":
        ready = _written(file, overrides, place, dry=True)
        plan, job = ready.plan, ready.plan.job
        assert job is not None
        cluster = other_cluster(job)
        if place.is_local and cluster is None:
            check_device(job.run.device, job.world_size)
            check_processors(job, place)
        return JobCheck(
            file=file, folder=ready.folder, memory=memory_of_step(plan, job, cluster, place), checked=ready.checked,
            vocab=plan.model.vocab, job=job, origins=plan.chosen,
        )  # fmt: skip
    asked, vocab, job, chosen = _closed(file, overrides, place)
    folder, cluster = job.run.path, other_cluster(job)
    if place.is_local and cluster is None:
        check_device(job.run.device, job.world_size)
    check_size(job, vocab, None)
    fresh = make_plan(job, place.hosts, vocab=vocab) if job.world_size <= CHECKED else None
    checked = check_files(job, folder, place, dry=True, original_job=asked)
    if place.is_local and cluster is None:
        check_processors(job, place)
    if fresh:
        fresh.continued(job.run.path / "plan.json")
    step = make_plan(job, cluster.hosts, vocab=vocab, draft=True) if cluster else job_step(job, vocab)
    return JobCheck(
        file=file, folder=folder, memory=memory_of_step(step, job, cluster, place), checked=checked, vocab=vocab,
        job=job, choice_note=chosen, origins=setting_origins(asked),
    )  # fmt: skip


def _closed(file: Path, overrides: Sequence[str], place: LaunchTarget) -> tuple[Job, int, Job, str]:
    """Return a file's job as the user wrote it, the vocabulary of its tokenizer, the job with all
    keys that it leaves open, and a sentence on the planner's choices."""
    from plait.api.choices import close_job, reading_job
    from plait.api.job_check import lab_without_spares
    from plait.core.job.spec import Job
    from plait.train.data.tokenizer import load_tokenizer

    with reading_job(file):
        asked = Job.read(file, overrides).named(file.stem)
    _check_place(asked, place)
    vocab = load_tokenizer(asked.data.tokenizer).vocab
    asked.check_trains(asked.model_spec(vocab))
    return asked, vocab, *close_job(asked, vocab, lab_without_spares(asked, place))


def _check_place(job: Job, place: LaunchTarget) -> None:
    """Raise JobError, before planning, for settings without which a cluster starts nothing."""
    from plait.api.places.kubernetes import KubernetesTarget

    if isinstance(place, KubernetesTarget):
        from plait.formats.kubernetes.manifests import check_image

        check_image(job.kubernetes)


def _written(file: Path, overrides: Sequence[str], place: LaunchTarget, *, dry: bool = False) -> PreparedRun:
    """Return the run of a plan, unchanged, in the folder that its job names. Overrides may only
    change where it runs."""
    from plait.api.choices import reading_job
    from plait.api.job_check import check_files
    from plait.core.base.errors import JobError
    from plait.core.job.plan import Plan
    from plait.core.job.refine import Measurements, refine

    with reading_job(file):
        plan = Plan.read(file)
    for setting in overrides:
        if not setting.startswith(("run.", "slurm.", "kubernetes.")):
            fix = "Only run.*, slurm.* and kubernetes.* may be set; for all else change the job file and plan again"
            raise JobError(f"'{setting}' would change the plan", file=str(file), fix=fix)
    if plan.job is None:
        problem = "was made without a job file, so its data and steps are unknown"
        raise JobError(problem, file=str(file), key="job", fix="Name a plan that plait plan or plait train wrote")
    plan.job.check_trains(plan.model)
    job = plan.job.changed(overrides)
    _check_place(job, place)
    folder = job.run.path
    plan = replace(plan, job=job, hosts=_hosts(plan, place))
    plan = refine(plan, Measurements()) if plan.choices.any else plan
    plan.of_the_same_job(folder / "plan.json")
    return PreparedRun(plan=plan, folder=folder, checked=check_files(job, folder, place, dry=dry))


def _hosts(plan: Plan, place: LaunchTarget) -> Hosts | None:
    """Return the hosts whose links the plan may count on: of a lab, only without a slower core
    between its hosts."""
    if place.lab is None:
        return plan.hosts
    return place.lab.as_hosts if place.lab.pods == 1 and place.lab.rate else None


def run_plan(
    plan: Plan, folder: Path, place: LaunchTarget, *, silent: bool = False, open_job: Job | None = None
) -> int:
    """Train as a plan prescribes, in a folder that is locked meanwhile; return the exit status.

    silent: True to send the output of rank 0 to its log. open_job: the job as the user wrote it, if
    the planner chose values that it leaves open; for fewer hosts, the run is planned again from
    this job.
    """
    from plait.api.ranks import RankSet
    from plait.core.base import programs
    from plait.core.runs.lock import RunLock
    from plait.core.topology.rank_table import NAME
    from plait.launch.run_folder import write_run

    job = plan.job
    assert job is not None
    with RunLock(folder) as lock:
        plan = write_run(plan, folder)
        (folder / NAME).unlink(missing_ok=True)  # left by an earlier start elsewhere
        ranks = RankSet(
            module=programs.RANK, arguments=[str(folder)], world=plan.layout.world_size, logs=folder / "logs",
            timeout=job.run.timeout, lock=lock, silent=silent, folder=folder,
            deadline=job.run.call_deadline, first_deadline=job.run.first_deadline, plan=plan,
            restarts=job.run.restarts, open_job=open_job,
        )  # fmt: skip
        return place.run(ranks)


def start_run(
    ready: PreparedRun, place: LaunchTarget, *, follow: bool = True, report: Callable[[str], None] = print
) -> int:
    """Run a plan here, or submit it to a cluster manager; return the exit status.

    follow: True to wait for a submitted run and show its output. report: called with sentences on
    the start, or on a submitted run. Raises LaunchError, and InfeasiblePlan and JobError for a plan
    that cannot run here.
    """
    from plait.api.job_check import check_start
    from plait.api.places.base import ManagedTarget

    if not ready.memory_checked:
        check_start(ready.plan, place)
    if not isinstance(place, ManagedTarget) or place.inside:
        report(f"starting {counted(ready.plan.layout.world_size, 'rank')}; their logs are in {ready.folder / 'logs'}")
        return run_plan(ready.plan, ready.folder, place, open_job=ready.open_job)
    sent = place.submit(ready.plan, ready.folder, follow=follow)
    for note in sent.notes:
        report(note)
    return sent.wait()


def write_manifests(ready: PreparedRun, place: KubernetesTarget, folder: Path) -> str:
    """Write the objects that would be sent to Kubernetes, readable by this user only: the secret in
    them lets anybody join the run. Return a note. Raises LaunchError, and JobError if the folder
    already has a run's files, which are needed to end that run."""
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
    """Return the run whose object a file has, from the object's label."""
    import re

    from plait.formats.kubernetes.manifests import RUN

    found = re.search(rf"{re.escape(RUN)}: (\S+)", file.read_text(errors="replace"))
    return f"the run {found[1]}" if found else f"a {file.name}"


def write_plan(ready: PreparedRun) -> None:
    """Write the files of a run that another process starts; that process holds the run's lock."""
    from plait.launch.run_folder import write_run

    write_run(ready.plan, ready.folder)


# ---- descriptions of a run ----


def describe_run(plan: Plan, available: AvailableMemory | None) -> str:
    """Return a line about a plan. available: this machine's memory; None if ranks run elsewhere, or
    none starts."""
    work, model = plan.workload, plan.model
    sequences = work.micro_batch * work.num_micro_batches
    batches = f" in {work.num_micro_batches} micro-batches" if work.num_micro_batches > 1 else ""
    steps = f"{counted(plan.job.train.steps, 'step')} of " if plan.job else ""
    parts = (
        f"{model.family} of {counted(model.num_layers, 'layer')}, hidden {model.hidden}: {model.num_parameters:,} "
        f"parameters ({work.precision}) on {counted(plan.layout.world_size, 'rank')}{_strategy(plan)}",
        f"{steps}{counted(sequences * work.sequence, 'token')} ({counted(sequences, 'sequence')} of {work.sequence:,}"
        f"{batches})",
        _memory(plan, available),
    )
    return "; ".join(parts)


def _strategy(plan: Plan) -> str:
    found = ", ".join([*_degrees(plan), *_slices(plan), *_rest(plan)])
    return f" ({found})" if found else ""


def _degrees(plan: Plan) -> Iterator[str]:
    """Yield the degrees of the axes along which ranks differ; several degrees if stages differ."""
    meshes = plan.layout.degrees
    varying = {"tp": [tp for _, tp in meshes], "dp": [dp for dp, _ in meshes]}
    for axis, degrees in (varying | {"pp": [len(meshes)], "cp": [plan.layout.cp]}).items():
        if max(degrees) > 1:
            yield f"{axis} {'/'.join(map(str, degrees if len(set(degrees)) > 1 else degrees[:1]))}"


def _slices(plan: Plan) -> Iterator[str]:
    """Yield the methods that hide communication of tensor and context parallelism, if there is
    any."""
    strategy = plan.strategy
    if strategy.tp == strategy.cp == 1 and plan.layout.uniform:
        return
    if strategy.overlap != "domino":
        yield f"overlap {strategy.overlap}"
    elif len({(one.p1, one.p2) for one in plan.choices.strategies}) > 1:
        yield "slices chosen before training"
    else:
        yield f"slices {strategy.p1} x {strategy.p2}"
    if strategy.sequence_parallel:
        yield "sequence parallel"


def _rest(plan: Plan) -> Iterator[str]:
    """Yield the first stage's sharding factors, the schedule, and recomputation."""
    first = plan.shardings[0]
    factors = {"parameters": first.params, "gradients": first.grads, "optimizer": first.optim}
    if cut := [f"{name} over {factor}" for name, factor in factors.items() if factor > 1]:
        yield "sharded " + ", ".join(cut)
    if len(plan.layout.degrees) > 1:
        yield plan.schedule.name
    if plan.strategy.recompute != "none":
        yield f"{plan.strategy.recompute} recomputation"


def _memory(plan: Plan, available: AvailableMemory | None) -> str:
    """Return the predicted bytes of the rank that needs the most, here or on the cluster's devices.
    While slices are not chosen, return two figures: of the slices that need the least and the
    most."""
    from plait.api.choices import other_cluster
    from plait.core.base.text import in_bytes
    from plait.plan.explain.memory_report import estimate_on
    from plait.plan.search.fits import estimate_in

    steps = [replace(plan, strategy=one) for one in plan.choices.strategies or (plan.strategy,)]
    free = ""
    try:
        cluster = other_cluster(plan.job) if plan.job and not available else None
        sizes = [
            estimate_on(one, cluster, traffic=False) if cluster else estimate_in(one, available, traffic=False)
            for one in steps
        ]
    except PlaitError as error:
        return f"memory is not predicted ({error})"
    found = [one.most.memory.total for one in sizes]
    if cluster:
        free = f" on {cluster.device.name}"
    elif available:
        free = f" of {in_bytes(available.each)}" if available.each else f", {in_bytes(available.shared)} free for all"
    least, most = in_bytes(min(found)), in_bytes(max(found))
    return f"tensors take {f'{least} to {most}' if least != most else most} a rank (predicted{free})"


def export_run(run: Path | str, out: Path | str, step: int | str | None = None) -> Exported:
    """Write a checkpoint of a run as a Hugging Face folder. step: the checkpoint's step, or
    ``best`` for the least evaluation loss; None: the newest complete checkpoint. Raises
    CheckpointError."""
    from plait.train.checkpoint import export
    from plait.train.checkpoint.whole import step_of

    return export.export_run(Path(run), Path(out), step_of(Path(run), step))


def sampler(run: Path | str, step: int | str | None = None) -> Sampler:
    """Return the model of a run; its ``generate`` continues texts. step: the checkpoint's step, or
    ``best`` for the least evaluation loss; None: the newest complete checkpoint. Raises
    CheckpointError."""
    from plait.train.checkpoint.whole import step_of
    from plait.train.sample import Sampler

    return Sampler.of_run(Path(run), step_of(Path(run), step))
