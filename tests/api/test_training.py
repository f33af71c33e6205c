"""Runs that are made ready by values, and not started."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.api.job_check import UNREAD, best_note, check_ranks
from plait.api.places import place_of
from plait.api.planning import plan_job
from plait.api.training import dry_run, prepare, start_run, write_plan
from plait.core.base.errors import InfeasiblePlan, JobError
from plait.core.job.plan import Plan
from plait.core.job.settings import TrainSection
from plait.plan.search import fits

HERE = place_of("local")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    file = tmp_path / "job.toml"
    file.write_text(
        f'[model]\nfamily = "gpt"\nnum_layers = 2\nhidden = 32\nnum_heads = 2\nmax_sequence = 64\n'
        f'[data]\ntext = "{tmp_path}/text.txt"\nsequence_length = 64\n'
        "[train]\nsteps = 5\neval_every = 0\nglobal_batch_size = 4\nmicro_batch_size = 0\n"
        f'[strategy]\ntp = 2\n[run]\nfolder = "{tmp_path}/runs"\ndevice = "cpu"\n'
    )
    return file


def test_a_job_file_becomes_a_plan_in_a_folder_of_its_name(job: Path) -> None:
    ready = prepare(job, ["run.name=first"], HERE)
    assert ready.folder == job.parent / "runs" / "first"
    assert ready.plan.layout.world_size == 2
    assert not ready.folder.exists()
    assert ready.open_job is not None and ready.chosen == ""


def test_a_run_that_has_begun_goes_on_with_its_plan(job: Path) -> None:
    ready = prepare(job, (), HERE)
    write_plan(ready)
    assert prepare(job, (), HERE).plan.key == ready.plan.key
    with pytest.raises(JobError):
        prepare(job, ["train.seed=8"], HERE)


def test_of_a_plan_only_where_it_runs_may_be_changed(job: Path) -> None:
    file = job.with_name("plan.json")
    prepare(job, (), HERE).plan.write(file)
    assert prepare(file, ["run.name=other"], HERE).folder.name == "other"
    with pytest.raises(JobError, match="would change the plan"):
        prepare(file, ["train.steps=6"], HERE)


def test_a_dry_run_predicts_and_leaves_the_verdict_to_who_asks(job: Path) -> None:
    found = dry_run(job, (), HERE)
    assert found.estimate.world_size == 2 and found.memory.available_here is not None
    found.check_fits()
    big = dry_run(job, ["model.hidden=65536", "model.num_heads=512", "model.num_layers=100"], HERE)
    with pytest.raises(InfeasiblePlan):
        big.check_fits()
    with pytest.raises(InfeasiblePlan):
        prepare(job, ["model.hidden=65536", "model.num_heads=512", "model.num_layers=100"], HERE)


WIDE = ["model.hidden=2048", "model.num_heads=16", "model.num_layers=8", "train.precision=bf16-mixed",
        "data.sequence_length=512", "model.max_sequence=512", "train.global_batch_size=32"]  # fmt: skip
ELSEWHERE = {
    "tensor": ("h100", ["strategy.tp=4", "strategy.sequence_parallel=true"]),
    "pipeline": ("a100-40", ["strategy.tp=1", "strategy.pp=4", "strategy.schedule=1f1b", "train.micro_batch_size=2"]),
    "sharded": ("mi300x", ["strategy.tp=1", "strategy.dp=8", "strategy.shard=zero3", "train.micro_batch_size=1"]),
    "slices": ("l40s", ["strategy.slices={ batch = 2, columns = 1 }", "strategy.recompute=full"]),
    "of processors": ("lab", ["train.precision=fp32", "train.micro_batch_size=4"]),
    "searched": ("h100", ["cluster.ranks=8"]),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_dry_run_for_another_cluster_has_the_memory_that_its_plan_has(job: Path, name: str) -> None:
    preset, own = ELSEWHERE[name]
    asked = [*WIDE, f"cluster.preset={preset}", *own]
    if name == "searched":
        job.write_text(job.read_text().replace("[strategy]\ntp = 2\n", ""))
    found = dry_run(job, asked, HERE)
    planner = plan_job(job, asked, evaluate=name != "searched").planner
    memory = planner.predict(found.job).memory
    assert found.memory.device_report and found.memory.available_here is None
    assert found.memory.device_report.to_dict() == memory.to_dict()
    assert found.estimate.most.memory == memory.fullest.estimate.memory, "the table's rows are of the same kernels"
    values = found.to_dict()
    assert values["fits"] is memory.fits and values["available"]["fullest"] == memory.fullest.total
    assert memory.summary in found.text(200)
    (job.parent / "plans").mkdir()
    planner.plan(found.job).write(job.parent / "plans" / "plan.json")
    again = dry_run(job.parent / "plans" / "plan.json", (), HERE)
    assert again.memory.device_report and again.memory.device_report.fullest.total == memory.fullest.total


def test_what_fits_there_and_not_here_is_refused_at_its_start_alone(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "room", lambda *_: fits.AvailableMemory(shared=1 << 20))
    there = ["cluster.preset=h100"]
    dry_run(job, there, HERE).check_fits()
    ready = prepare(job, there, HERE)
    assert "on H100-SXM5-80GB" in ready.text(300)
    with pytest.raises(InfeasiblePlan, match="1 MiB are available on this machine"):
        start_run(ready, HERE)
    assert not ready.folder.exists()
    for check in (lambda: prepare(job, (), HERE), lambda: dry_run(job, (), HERE).check_fits()):
        with pytest.raises(InfeasiblePlan, match="1 MiB are available on this machine"):
            check()


def test_what_does_not_fit_there_is_refused_with_what_would(job: Path) -> None:
    found = dry_run(job, [*WIDE, "model.num_layers=96", "cluster.preset=l40s", "train.micro_batch_size=16"], HERE)
    assert found.to_dict()["fits"] is False
    with pytest.raises(InfeasiblePlan, match=r"more than the .* of L40S-48GB that a plan may fill\. .*would fit"):
        found.check_fits()


def test_a_lab_has_as_many_ranks_as_it_has_and_names_its_spares(job: Path) -> None:
    plan: Plan = prepare(job, (), HERE).plan
    assert check_ranks(plan, place_of("lab:2x1@1gbit"), "lab:2x1@1gbit") == ""
    assert "host2, host3" in check_ranks(plan, place_of("lab:4x1@1gbit"), "lab:4x1@1gbit")
    with pytest.raises(JobError, match="has 1 rank, the job needs 2"):
        check_ranks(plan, place_of("lab:1x1@1gbit"), "lab:1x1@1gbit")


def test_data_that_are_missing_are_refused_before_ranks_start(job: Path) -> None:
    (job.parent / "text.txt").unlink()
    with pytest.raises(JobError):
        prepare(job, (), HERE)
    assert UNREAD not in dry_run_over(job)


def dry_run_over(job: Path) -> dict[str, int]:
    """What a dry run of whole data passes over."""
    (job.parent / "text.txt").write_text("to be or not to be\n" * 400)
    return dry_run(job, (), HERE).checked.over.counts


def test_the_best_checkpoint_of_evaluations_that_there_are_not_is_refused(job: Path) -> None:
    advice = r"evaluates nothing.*Set train\.eval_every=100, or train\.keep_best=false"
    for check in (prepare, dry_run):
        with pytest.raises(JobError, match=advice) as refused:
            check(job, ["train.keep_best=true"], HERE)
        assert refused.value.key == "train.keep_best"
    assert prepare(job, ["train.keep_best=false"], HERE).checked.note == ""
    assert best_note(TrainSection(steps=500, eval_every=100, keep_best=True)) == ""


@pytest.mark.parametrize(
    ("evaluated", "every", "said"),
    [(5, 10, ""), (10, 10, ""), (6, 10, "meet every 30 steps and at the end"), (20, 10, "meet every 20 steps"),
     (10, 0, "meet at the end alone"), (11, 13, "meet at the end alone")],
)  # fmt: skip
def test_which_checkpoints_are_compared_is_said(evaluated: int, every: int, said: str) -> None:
    train = TrainSection(steps=100, eval_every=evaluated, checkpoint_every=every, keep_best=True)
    assert said in best_note(train) and bool(best_note(train)) is bool(said)
    assert best_note(train.model_copy(update={"keep_best": False})) == ""
