from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.codec.stamped import digest
from plait.core.base.codec.toml_text import override
from plait.core.base.errors import JobError
from plait.core.cluster.hardware import HERE
from plait.core.job.cluster_settings import PlaceSection
from plait.core.job.plan import Choices, Plan
from plait.core.job.refine import Measurements, TimedTrial, Times, refine, slack_schedule
from plait.core.job.spec import Job
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Strategy
from plait.core.step.orders.segment_costs import SegmentCosts
from plait.core.step.schedules import Shape, generate
from plait.plan.make import make_plan


def make(**settings: Any) -> Plan:
    strategy = {"tp": 2, "slices": {"batch": 2}} | settings.pop("strategy", {})
    settings["train"] = {"micro_batch_size": 0} | settings.get("train", {})
    job = Job.from_dict({"model": {"preset": "llama3-405b"}, "strategy": strategy} | settings)
    return make_plan(job, HERE, vocab=257)


@pytest.fixture
def plan() -> Plan:
    costs = SegmentCosts({"attn.F": 0.1 + 0.2}, {"attn.R": 1e-9}, 5e-6)
    return replace(make(), costs=costs, notes={"slices": "as the job says"})


def test_a_plan_reads_back_equal_with_an_equal_hash(plan: Plan, tmp_path: Path) -> None:
    pipeline = make(strategy={"pp": 2, "dp": [2, 1], "shard": "fsdp", "slices": "auto", "sequence_parallel": "auto"})
    for one in (plan, replace(plan, costs=None), pipeline):
        one.write(tmp_path / "plan.json")
        again = Plan.read(tmp_path / "plan.json")
        assert again == one
        assert again.hash == one.hash


def test_another_jobs_plan_is_refused(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert plan.continued(file) is plan
    make(train={"seed": 1}, data={"sequence_length": 64}).write(file)
    with pytest.raises(JobError, match=r"another job.*run\.name") as caught:
        plan.continued(file)
    assert caught.value.file == str(tmp_path)
    assert "data.sequence_length was 64 and is" in str(caught.value)
    assert "train.seed was 1 and is 0" in str(caught.value)


@pytest.mark.parametrize(
    "train",
    [
        {"learning_rate": 1e-5}, {"clip_grad": 0.1}, {"weight_decay": 0.0}, {"adam_betas": (0.8, 0.9)},
        {"adam_eps": 1e-6},
        {"warmup_steps": 7}, {"lr_decay_style": "wsd"}, {"lr_decay_steps": 500}, {"min_learning_rate": 1e-6},
        {"steps": 900}, {"log_every": 3}, {"checkpoint_every": 5}, {"keep_checkpoints": 1}, {"eval_every": 0},
        {"eval_batches": 2}, {"on_nan": "skip"},
    ],
)  # fmt: skip
def test_what_ranks_do_in_a_step_is_one_thing_and_how_a_run_is_called_another(
    tmp_path: Path, train: dict[str, Any]
) -> None:
    """Such settings may change in a folder: the run goes on with its plan, and its records stay
    readable."""
    file, asked = tmp_path / "plan.json", {"strategy": {"slices": "auto"}}
    refined = refine(make(**asked), Measurements())
    refined.write(file)
    again = make(**asked, train=train, run={"timeout": 60.0, "timeline_steps": 5, "loggers": ["wandb"]}).continued(file)
    assert again.hash != refined.hash
    assert again.key == refined.key and again.strategy == refined.strategy
    assert Plan.read(file).key == refined.key


def test_a_damaged_plan_of_a_run_is_refused_with_the_way_out(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("garb{")
    with pytest.raises(
        JobError, match=r"plan\.json: cannot be read as a plan.*Remove this file to have the run planned"
    ):
        plan.continued(tmp_path / "plan.json")


def test_a_run_goes_on_with_what_was_measured_unless_its_shape_changes(tmp_path: Path) -> None:
    file, asked = tmp_path / "plan.json", {"strategy": {"slices": "auto", "sequence_parallel": "auto"}}
    fresh = make(**asked)
    fastest = TimedTrial(fresh.choices.strategies[-1], 1.0)
    refined = refine(fresh, Measurements(strategies=(TimedTrial(fresh.strategy, 2.0), fastest)))
    refined.write(file)
    again = make(**asked, train={"steps": 900}, run={"name": "other"}).continued(file)
    assert again.strategy == fastest.strategy
    assert again.job is not None and again.job.train.steps == 900
    assert not again.choices.any and again.intent == fresh.intent
    assert make(strategy={"dp": 2} | asked["strategy"]).continued(file).choices.any


def test_refining_closes_what_was_open_once() -> None:
    fresh = make(strategy={"slices": "auto", "sequence_parallel": "auto", "pp": 2})
    assert set(fresh.reshards) == {False, True}
    costs = {False: SegmentCosts({}, {}), True: SegmentCosts({"attn.F": 1.0}, {})}
    parallel = next(one for one in fresh.choices.strategies if one.sequence_parallel)
    refined = refine(
        fresh, Measurements(costs=costs, strategies=(TimedTrial(parallel, 1.0), TimedTrial(fresh.strategy, 2.0)))
    )
    assert refined.strategy == parallel and refined.costs == costs[True]
    assert set(refined.reshards) == {True}
    assert not refined.choices.any
    assert refined.hash != fresh.hash and refined.intent == fresh.intent
    assert refine(refined, Measurements()) == refined


@pytest.mark.parametrize("key", ["compile", "cuda_graphs"])
def test_whether_to_compile_and_to_capture_are_choices_of_timed_steps(tmp_path: Path, key: str) -> None:
    def found(*timed: TimedTrial) -> Measurements:
        return Measurements(compiled=timed) if key == "compile" else Measurements(graphed=timed)

    fresh = make(strategy={key: "auto", "slices": {"batch": 2}})
    assert getattr(fresh.choices, key) and fresh.choices.any and not getattr(fresh.strategy, key)
    fresh.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == fresh
    with_it = replace(fresh.strategy, **{key: True})
    both = TimedTrial(fresh.strategy, 1.0), TimedTrial(with_it, 0.9)
    assert refine(fresh, found(*both)).strategy == with_it
    for nothing in (Measurements(), found(both[0], replace(both[1], seconds=1.1))):
        refined = refine(fresh, nothing)
        assert refined.strategy == fresh.strategy and not refined.choices.any


def test_the_hash_covers_the_content_and_not_the_notes(plan: Plan) -> None:
    assert replace(plan, notes={}).hash == plan.hash
    assert replace(plan, notes={"a": "b"}, origin="c", job=None).key == plan.key
    assert replace(plan, seed=5).hash != plan.hash
    sliced = replace(plan, strategy=replace(plan.strategy, p2=2))
    assert sliced.hash != plan.hash and sliced.key != plan.key


def test_where_ranks_may_go_stands_beside_what_is_hashed(tmp_path: Path) -> None:
    plain, placed = make(), make(place={"alpha": 0.3, "gpu": "H100", "spares": "1/row"})
    assert placed.hash == plain.hash and placed.key == plain.key and placed.intent == plain.intent
    placed.write(tmp_path / "plan.json")
    again = Plan.read(tmp_path / "plan.json")
    assert again == placed and again.job is not None
    assert (again.job.place.alpha, again.job.place.gpu, again.job.place.spares) == (0.3, ("H100",), "1/row")
    assert "place" not in json.loads(plain.to_json())
    changed = again.job.place.changed(["place.alpha=1", "place.tolerate=maintenance"])
    assert (changed.alpha, changed.gpu, changed.tolerate) == (1, ("H100",), ("maintenance",))
    assert PlaceSection().changed(["place.flows=2"]).flows == 2
    with pytest.raises(JobError, match=r"place\.flows: -1 is not allowed"):
        PlaceSection().changed(["place.flows=-1"])


EDITED = {
    "version=1": "1 is not a plan version this Plait reads. It reads version 4. Name a JOB.plan.json",
    "strategy={tp = 4}": "edited or damaged",
    "layout={qp = 4}": r"layout\.qp: unknown key. Known here: cp, degrees",
    "layout={degrees = [[0, 1]], cp = 1}": r"layout\.degrees: 0 is not allowed",
    "layout={degrees = [], cp = 1}": r"layout\.degrees: \[\] is not allowed",
    "stage_layers=x": 'stage_layers: "x" is not allowed. Allowed: a list, each a whole number',
    "stage_layers=[3]": "stage_layers: 3 layers, and the model has 126",
    "reshards=[1]": r"reshards: \[1\] is not a table",
    'reshards={false = {plans = [], edges = {"0>1" = {h = 3}}}}': "not a complete plan",
    "reshards={false = {plans = [{}], edges = {}}}": r"reshards\.false\.plans\[0\]\.source: is missing",
    "schedule=rank 0: 0F0": "not a complete plan",
    "schedule=3": "schedule: 3 is not allowed. Allowed: a text",
    "shardings=[]": "shardings: 0 for 1 pipeline ranks",
    'shardings=[{params = "1"}]': r"shardings\[0\]\.params: \"1\" is not allowed",
    "costs=3": "costs: 3 is not a table",
    'costs={compute = {"attn.F" = "x"}, collective = {}, latency = 0}': "costs.compute.attn.F: .x. is not",
    "seed=1000000000000000000000000000000": "seed: .* is not allowed. Allowed: a whole number, at most",
    'choices={strategies = [{tp = "2"}], shard_overlap = false}': r"choices\.strategies\[0\]\.tp: \"2\" is not",
    'job={model = {preset = "gpt3-125m"}, train = {steps = 0}}': r"job\.train\.steps: 0 is not allowed",
    "job=[]": r"job: \[\] is not a table",
    "notes=3": "notes: 3 is not",
    "sead=3": r"sead: unknown key \(did you mean 'seed'\?\)",
    "model={}": "is missing",
    "hash=0": "edited or damaged",
}


@pytest.mark.parametrize("change", EDITED)
def test_an_edited_plan_is_refused(plan: Plan, tmp_path: Path, change: str) -> None:
    file = tmp_path / "plan.json"
    plan.write(file)
    edited, _ = override(json.loads(file.read_text()), [change], lambda key: key == "hash")
    file.write_text(json.dumps(edited))
    with pytest.raises(JobError, match=EDITED[change]) as caught:
        Plan.read(file)
    assert caught.value.file == str(file)


def test_a_plan_without_one_of_its_keys_is_refused_by_name(plan: Plan, tmp_path: Path) -> None:
    file, values = tmp_path / "plan.json", json.loads(plan.to_json())
    for key in ("job", "costs", "notes", "schedule", "origin"):
        file.write_text(json.dumps({name: value for name, value in values.items() if name != key}))
        with pytest.raises(JobError, match="is missing") as caught:
            Plan.read(file)
        assert (caught.value.file, caught.value.key) == (str(file), key)


def test_a_key_that_stands_twice_is_refused(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    text = plan.to_json()
    for old, key in (('"seed": 0', "seed"), ('"p1": 2', "p1")):
        file.write_text(text.replace(old, f"{old}, {old}", 1))
        with pytest.raises(JobError, match=f"cannot be read as a plan: the key '{key}' occurs twice") as caught:
            Plan.read(file)
        assert caught.value.file == str(file)


@pytest.mark.parametrize(
    ("content", "says"),
    [("", "is no JSON|not valid JSON|cannot be read"), ("[]", ""), (None, "No such file"), (os.mkfifo, "It is a pipe"),
     (os.mkdir, "Is a directory")],
)  # fmt: skip
def test_what_is_no_plan_is_refused(tmp_path: Path, content: Any, says: str) -> None:
    file = tmp_path / "plan.json"
    if callable(content):
        content(file)
    elif content is not None:
        file.write_text(content)
    with pytest.raises(JobError, match=says or None) as caught:
        Plan.read(file)
    assert caught.value.file == str(file)


def test_a_plan_whose_parts_do_not_fit_each_other_cannot_be(plan: Plan) -> None:
    two = make(strategy={"pp": 2, "tp": 1, "slices": {"batch": 1}})
    with pytest.raises(JobError, match="shardings: 2 for 1 pipeline ranks"):
        replace(plan, shardings=plan.shardings * 2)
    with pytest.raises(JobError, match=r"a schedule of 1 pipeline ranks, 1 stages with 2 meshes and 2 ranges"):
        replace(two, schedule=plan.schedule)
    with pytest.raises(JobError, match=r"a schedule of 1 pipeline ranks, 2 stages with 2 meshes and 2 ranges"):
        replace(two, schedule=generate("interleaved", Shape(ranks=1, micro_batches=2, chunks=2)))
    with pytest.raises(JobError, match=r"a schedule of 2 pipeline ranks, 2 stages with 2 meshes and 1 ranges"):
        replace(two, stages=plan.stages)


def test_replicas_share_out_the_sequences_of_a_micro_batch() -> None:
    plan = make(strategy={"pp": 2, "dp": [2, 3], "tp": [2, 1], "slices": {"batch": 1}}, train={"global_batch_size": 8,
                "micro_batch_size": 4})  # fmt: skip
    sequences = plan.workload.micro_batch
    shares = [plan.largest_share(0), plan.largest_share(1)]
    assert shares == [-(-sequences // 2), -(-sequences // 3)]
    assert [plan.strategy_of(pp_rank).tp for pp_rank in (0, 1)] == [2, 1]
    rows = [plan.rows_of(rank, 7) for rank in range(plan.layout.world_size)]
    assert rows == [slice(0, 4), slice(0, 4), slice(4, 7), slice(4, 7), slice(0, 3), slice(3, 5), slice(5, 7)]


@pytest.mark.parametrize("key", ["shard_overlap", "slack", "compile", "cuda_graphs"])
def test_each_choice_of_timed_steps_is_one(key: str) -> None:
    assert not Choices().any
    told: dict[str, Any] = {key: True}
    assert Choices(**told).any
    assert Choices(strategies=(Strategy(),)).any


@pytest.mark.parametrize(
    ("train", "more"),
    [
        ({"seed": 1}, ""),
        ({"seed": 1, "precision": "bf16-mixed"}, "; 1 more settings differ"),
        ({"seed": 1, "precision": "bf16-mixed", "init_from": "/x"}, r"; 2 more settings differ\. Give this run"),
    ],
)
def test_three_settings_that_differ_are_all_named(plan: Plan, tmp_path: Path, train: dict[str, Any], more: str) -> None:
    file = tmp_path / "plan.json"
    make(train=train, data={"seed": 1, "sequence_length": 64}).write(file)
    with pytest.raises(JobError, match=more or None) as caught:
        plan.continued(file)
    assert str(caught.value).count(" was ") == 3
    assert ("more setting" in str(caught.value)) == bool(more)


def test_slack_is_found_where_it_was_open() -> None:
    job = {"pp": 3, "tp": 1, "slices": {"batch": 1}}
    times = Times((1.0, 1.0, 1.0), (0.0, 0.9))
    plain = make(strategy=job, train={"global_batch_size": 16, "micro_batch_size": 2})
    assert refine(plain, Measurements(times=times)).schedule == plain.schedule
    slack = make(strategy={**job, "schedule": "slack-1f1b"}, train={"global_batch_size": 16, "micro_batch_size": 2})
    assert slack.choices.slack
    assert refine(slack, Measurements()).schedule == slack.schedule
    refined = refine(slack, Measurements(times=times)).schedule
    assert refined == slack_schedule(slack, times)
    warm = [next(at for at, op in enumerate(ops) if op.kind == "B") for ops in
            ([op for op in ops if op.computes] for ops in refined.ranks)]  # fmt: skip
    assert warm == [5, 4, 1]  # (1 + 1 + 2 x 0.9) / (1 + 3) is no more than 1
    assert any(not op.computes for ops in refined.ranks for op in ops)


def test_plans_without_job_files_go_on_with_each_other_alone(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    bare = replace(plan, job=None)
    bare.write(file)
    assert bare.continued(file).strategy == bare.strategy
    with pytest.raises(JobError, match="one of the two was planned without a job file"):
        plan.continued(file)
    plan.write(file)
    with pytest.raises(JobError, match="one of the two was planned without a job file"):
        bare.continued(file)


def test_replicas_of_a_plan_can_be_cut_as_it_says(plan: Plan) -> None:
    with pytest.raises(JobError, match="2 does not divide the 1 ranks that hold the same weights"):
        replace(plan, shardings=(Sharding(optim=2),))


def test_a_plan_of_an_older_plait_is_read(plan: Plan, tmp_path: Path) -> None:
    """Its hash is of what it says, without keys that came later; its key is the same."""
    plan.write(tmp_path / "plan.json")
    values = json.loads((tmp_path / "plan.json").read_text())
    assert values["version"] == 4
    del values["job"]["strategy"]["streams"], values["job"]["train"]["optimizer_dtype"]
    (tmp_path / "plan.json").write_text(json.dumps(values))
    with pytest.raises(JobError, match="was edited or damaged"):
        Plan.read(tmp_path / "plan.json")
    values["hash"] = digest({key: values[key] for key in plan.to_dict()})
    (tmp_path / "plan.json").write_text(json.dumps(values))
    old = Plan.read(tmp_path / "plan.json")
    assert old == plan and old.key == plan.key
    assert "streams" not in plan.to_dict()["strategy"]
    assert set(plan.to_dict()["workload"]) == {
        "micro_batch", "num_micro_batches", "sequence", "precision", "optimizer", "matrix_itemsize",
    }  # fmt: skip
