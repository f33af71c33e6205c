"""``plait train``: from a job file to a trained model, on this machine or on an emulated cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from plait.api.places.base import Place
    from plait.core.base.passed_over import PassedOver
    from plait.core.job.plan import Plan
    from plait.core.job.spec import Job
    from plait.lab import LabSpec

UNREAD = "folder(s) of weights of which names and shapes were checked, and values (NaN) were not looked at"
CHECKED = 64
"""Ranks up to which a dry run also plans every transfer, as a run does."""


def train(
    job: Annotated[Path, typer.Argument(help="The job file (TOML), or a plan (plan.json) to be obeyed as it stands.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="SECTION.KEY=VALUE, in place of the file's: train.steps=100.")
    ] = None,
    on: Annotated[
        str,
        typer.Option(
            help="Where: local; slurm or slurm:PARTITION; kubernetes or kubernetes:NAMESPACE; lab:HOSTSxRANKS@RATE "
            "for an emulated cluster, such as lab:2x1@1gbit or, with a slower core between minipods, "
            "lab:4x1@1gbit,2pods@300mbit."
        ),
    ] = "local",
    rank_table: Annotated[
        Path | None,
        typer.Option(help="With --on slurm, kubernetes or lab: which host runs which ranks (rank_table.json)."),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option(help="With --on slurm or kubernetes: show what the job prints until it ends; Ctrl-C stops it."),
    ] = True,
    plan_only: Annotated[bool, typer.Option("--plan-only", hidden=True, help="For torchrun's ranks.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only check the job, and show what it takes of every rank.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: as JSON.")] = False,
    manifests: Annotated[
        Path | None,
        typer.Option(
            help="With --dry-run --on kubernetes: write what would be sent to this file, for kubectl apply -f."
        ),
    ] = None,
) -> None:
    """Train; the same command resumes a run that was stopped or killed.

    Settings stand in the job file, in the tables [model], [data], [train], [strategy] and [run]: plait job
    --reference lists them all, plait job --reference KEY explains one, and docs/job.md has the same to read.

    Example: plait train specs/jobs/quickstart.toml train.steps=100 strategy.tp=1
    """
    from plait.api.places import place_of, with_table
    from plait.cli import what_runs
    from plait.core.job.spec import naming
    from plait.plan.fits import room

    place = with_table(place_of(on), rank_table)
    _check_options(place, follow=follow, dry_run=dry_run, as_json=as_json, manifests=manifests)
    with naming(job, overrides or []):
        if dry_run:
            _show(job, overrides or [], place, as_json)
            if manifests:
                _write_manifests(manifests, job, overrides or [], place)
            return
        plan, folder, open_job = _to_run(job, overrides or [], place, plan_only=plan_only)
    _check_ranks(plan, place, on)
    what_runs.say(plan, room(plan.job.run.device, plan.layout.world_size) if place.ours and plan.job else None)
    _start(plan, folder, place, open_job, follow=follow, plan_only=plan_only)


def _to_run(file: Path, overrides: list[str], place: Place, *, plan_only: bool) -> tuple[Plan, Path, Job | None]:
    """What is to run: its plan, its folder, and the job as the user wrote it, where one is."""
    from plait.core.job.spec import Job

    if file.suffix == ".json":
        return *_written(file, overrides, place), None
    job = Job.read(file, overrides).named(file.stem)
    # torchrun's ranks may stand on other machines too
    return *_planned(job, place, refuse=place.ours and not plan_only), job


def _start(plan: Plan, folder: Path, place: Place, open_job: Job | None, *, follow: bool, plan_only: bool) -> None:
    """Run the plan, or send it to who runs it, and end with its status."""
    from plait.api.places.base import Managed
    from plait.api.train_run import run_plan
    from plait.cli import terminal
    from plait.launch.run_folder import write_run

    if plan_only:  # whoever asks holds the run's lock
        write_run(plan, folder)
        return
    if isinstance(place, Managed) and not place.inside:
        sent = place.submit(plan, folder, follow=follow)
        for note in sent.notes:
            terminal.text(note)
        raise typer.Exit(sent.wait())
    raise typer.Exit(run_plan(plan, folder, place, open_job=open_job))


def _check_options(place: Place, *, follow: bool, dry_run: bool, as_json: bool, manifests: Path | None = None) -> None:
    """Raise JobError for an option that would be ignored."""
    from plait.api.places.base import Managed
    from plait.api.places.kubernetes import InKubernetes
    from plait.core.base.errors import JobError

    if manifests and not (dry_run and isinstance(place, InKubernetes)):
        raise JobError("is for --dry-run --on kubernetes", key="--manifests", fix="Add them, or leave it out")

    if as_json and not dry_run:
        raise JobError("is for --dry-run; a run's numbers are in its metrics.jsonl", key="--json", fix="Leave it out")
    if not follow and not isinstance(place, Managed):
        raise JobError("is for --on slurm and kubernetes", key="--no-follow", fix="Leave it out")


def _write_manifests(file: Path, job: Path, overrides: list[str], place: Place) -> None:
    """Write what would be sent, for this user's eyes alone: the word in it lets anybody join the run."""
    from plait.api.places.kubernetes import InKubernetes
    from plait.cli import terminal
    from plait.core.base.files import explained, replacing
    from plait.core.job.spec import Job

    assert isinstance(place, InKubernetes)
    if job.suffix == ".json":
        plan, folder = _written(job, overrides, place)
    else:
        plan, folder = _planned(Job.read(job, overrides).named(job.stem), place)
    text = place.manifests(plan, folder)
    with explained(f"{file} cannot be written", fix="Choose another with --manifests FILE"), replacing(file) as draft:
        draft.chmod(0o600)
        draft.write_text(text)
    terminal.text(f"wrote {file}; send it with kubectl apply -f {file}")


def _check_ranks(plan: Plan, place: Place, on: str) -> None:
    """Raise JobError for a plan of more ranks than the place has, or of other hosts; say which hosts are
    spares."""
    from plait.cli import terminal
    from plait.core.base.errors import JobError
    from plait.core.base.lab_hosts import name

    world = plan.layout.world_size
    if not place.takes(world):
        problem = f"{on} has {place.world} ranks, the job needs {world}"
        raise JobError(problem, key="--on", fix="Change one of the two, or strategy.tp, dp, pp")
    if place.lab and place.world and world < place.world:
        used, hosts = world // place.lab.ranks_per_host, place.lab.hosts
        spares = ", ".join(name(host) for host in range(used, hosts)[:5]) + (", ..." if hosts - used > 5 else "")
        terminal.text(f"{hosts - used} of {hosts} hosts are spares: {spares}")


def _lab(job: Job, place: Place) -> LabSpec | None:
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


def _show(file: Path, overrides: list[str], place: Place, as_json: bool) -> None:
    """The dry run: what is checked before a run is, and the tables."""
    from plait.api.choose import planned
    from plait.api.places.base import Managed
    from plait.cli import terminal
    from plait.cli.dry_run import show
    from plait.core.base.passed_over import PassedOver
    from plait.core.job.spec import Job
    from plait.core.model.experts import refuse_experts
    from plait.plan.estimate import PlannedStep, estimate
    from plait.plan.fits import check_device, check_fits, check_size, room
    from plait.train.data.tokenizer import load_tokenizer

    over = PassedOver()
    if file.suffix == ".json":
        plan, folder = _written(file, overrides, place, over)
        job, device = plan.job, plan.job.run.device if plan.job else "auto"
        if place.ours:
            check_device(device, plan.layout.world_size)
        there = room(device, plan.layout.world_size) if place.ours else None
        step = PlannedStep.of_plan(plan, gpu=bool(there and there.each))
    else:
        job = Job.read(file, overrides).named(file.stem)
        vocab, folder = load_tokenizer(job.data.tokenizer).vocab, job.run.path
        refuse_experts(job.model_spec(vocab))
        job, chosen = planned(job, vocab, _lab(job, place))
        if chosen and not as_json:
            terminal.text(chosen)
        if place.ours:
            check_device(job.run.device, job.world_size)
        there = room(job.run.device, job.world_size) if place.ours else None
        check_size(job, vocab, None)
        if job.world_size <= CHECKED:
            _of_job(job, vocab, place, over)
        else:
            _check_files(job, folder, place, over)
        step = PlannedStep.of(job, vocab, gpu=bool(there and there.each))
    found = estimate(step)
    show(f"{file}, which would run in {folder}", found, there, over if as_json else None)
    if there and job:
        check_fits(job, found, step.model.vocab, there)
    if isinstance(place, Managed) and job and not as_json:
        title, text = place.preview(job, folder)
        terminal.title(title)
        terminal.say(text)


def _refuse(job: Job, vocab: int) -> None:
    """Raise InfeasiblePlan for a job that this machine has no memory for, before anything is planned."""
    from plait.plan.estimate import PlannedStep, estimate
    from plait.plan.fits import check_device, check_fits, check_size, room

    check_device(job.run.device, job.world_size)
    there = room(job.run.device, job.world_size)
    check_size(job, vocab, there)
    if there:
        check_fits(job, estimate(PlannedStep.of(job, vocab, gpu=bool(there.each))), vocab, there)


def plan_to_run(file: Path, overrides: list[str], place: Place) -> Plan:
    """The plan that ``plait train`` would run of a job file at a place."""
    from plait.core.job.spec import Job

    return _planned(Job.read(file, overrides).named(file.stem), place)[0]


def _planned(job: Job, place: Place, *, refuse: bool = False) -> tuple[Plan, Path]:
    """The plan of a job, or the one with which an earlier start of it goes on, and the run's folder.
    refuse: a job that cannot fit here."""
    from plait.api.choose import planned
    from plait.cli import terminal
    from plait.core.model.experts import refuse_experts
    from plait.train.data.tokenizer import load_tokenizer

    vocab = load_tokenizer(job.data.tokenizer).vocab
    refuse_experts(job.model_spec(vocab))
    job, chosen = planned(job, vocab, _lab(job, place))
    if chosen:
        terminal.text(chosen)
    if refuse:
        _refuse(job, vocab)
    return _of_job(job, vocab, place), job.run.path


def _of_job(job: Job, vocab: int, place: Place, over: PassedOver | None = None) -> Plan:
    """The plan of a job that leaves nothing to the planner, or the one with which an earlier start of it goes
    on."""
    from plait.plan.make import make_plan

    fresh = make_plan(job, place.hosts, vocab=vocab)
    _check_files(job, job.run.path, place, over)
    return fresh.continued(job.run.path / "plan.json")


def _written(file: Path, overrides: list[str], place: Place, over: PassedOver | None = None) -> tuple[Plan, Path]:
    """A plan as it stands, and the folder that its job names; only where it runs may be set anew."""
    from dataclasses import replace

    from plait.core.base.errors import JobError
    from plait.core.job.plan import Plan
    from plait.core.job.refine import Measurements, refine
    from plait.core.model.experts import refuse_experts

    plan = Plan.read(file)
    refuse_experts(plan.model)
    for setting in overrides:
        if not setting.startswith(("run.", "slurm.", "kubernetes.")):
            fix = "Only run.*, slurm.* and kubernetes.* may be set; for all else change the job file and plan again"
            raise JobError(f"'{setting}' would change the plan", file=str(file), fix=fix)
    if plan.job is None:
        problem = "was made without a job file and says nothing of data or steps"
        raise JobError(problem, file=str(file), key="job", fix="Name a plan that plait plan or plait train wrote")
    job = plan.job.changed(overrides)
    folder = job.run.path
    plan = replace(plan, job=job)
    plan = refine(plan, Measurements()) if plan.choices.any else plan
    plan.of_the_same_job(folder / "plan.json")
    _check_files(job, folder, place, over)
    return plan, folder


def _check_files(job: Job, folder: Path, place: Place, counted: PassedOver | None = None) -> None:
    """Refuse at once what ranks would refuse, seconds later: a folder that cannot be written, data that
    are not there or not enough, weights that are not there or another model's. Say what of them is passed
    over, and count it in ``counted``."""
    from plait.api.places.base import Managed

    if isinstance(place, Managed) and not place.shares_files:
        return
    from plait.api.choose import model_notes, vocabulary_note
    from plait.cli import terminal
    from plait.core.base.errors import JobError, LaunchError
    from plait.train.checkpoint.weight_files import check_weights
    from plait.train.data.check import check_data
    from plait.train.data.tokenizer import load_tokenizer

    try:
        _check_folder(folder)
    except LaunchError as error:
        raise JobError(str(error), key="run.folder") from None
    over = model_notes(job)
    over.add(check_data(job.data, job.train, folder / "corpus"))
    vocab = load_tokenizer(job.data.tokenizer).vocab
    if job.train.init_from:
        spec = job.model_spec(vocab)
        over.add(check_weights(Path(job.train.init_from), spec))
        if counted is not None:  # a run reads them, and says so
            over.note(UNREAD, job.train.init_from)
    _check_processors(job, place)
    terminal.passed_over(over)
    if counted is not None:
        counted.add(over)
    terminal.note(vocabulary_note(job, vocab, own=False))


def _check_processors(job: Job, place: Place) -> None:
    """Refuse a job whose ranks would compute on this machine's processors, and cannot as it says."""
    from plait.core.base.errors import JobError
    from plait.core.job.compiler import check_compiler
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
