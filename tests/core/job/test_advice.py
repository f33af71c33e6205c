"""What a refusal of a job advises is done, and the same place does not refuse again; every refusal
names file and key."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.base.codec.toml_text import override, to_toml
from plait.core.base.errors import JobError
from plait.core.job.advice import changed, overlapping_keys
from plait.core.job.rules import MOST_STAGES
from plait.core.job.spec import Job

GPT: dict[str, Any] = {"family": "gpt", "num_layers": 6, "hidden": 36, "num_heads": 9, "max_sequence": 256}
LLAMA: dict[str, Any] = {**GPT, "family": "llama", "ffn_hidden": 40, "head_size": 4}
U: dict[str, Any] = {**GPT, "family": "utransformer", "levels": 1}
MODELS = {"gpt": GPT, "llama": LLAMA, "u": U, "-": {}, "short": {"family": "gpt", "num_layers": 6},
          "experts": {**GPT, "experts": {"count": 6, "per_token": 2}}}  # fmt: skip

BAD = [
    "gpt model.family=bert",
    "gpt model.num_layers=0",
    "gpt model.num_layers=2.5",
    "gpt model.hidden=-1",
    "gpt model.hidden=1099511627776",
    "gpt model.num_heads=8",
    "gpt model.head_size=-1",
    "llama model.num_kv_heads=4",
    "gpt model.num_kv_heads=3",
    "llama model.ffn_hidden=0",
    "llama model.head_size=5",
    "gpt model.levels=1",
    "u model.levels=0",
    "u model.num_layers=7",
    "gpt model.dropout=1.5",
    "gpt model.attention_dropout=-0.1",
    "gpt model.norm_eps=0.0",
    "llama model.rope_theta=0.0",
    "gpt model.rope_theta=500000.0",
    "gpt model.tied_embeddings=yes",
    "llama model.rope_scaling={factor=2.0} | model.rope_scaling.low_freq_factor",
    "gpt model.rope_scaling={factor=8.0,low_freq_factor=1.0,high_freq_factor=4.0,original_max_positions=64}",
    "gpt model.colour=1",
    "short | model.hidden",
    "- model.preset=gpt5",
    "- model.preset=3",
    "- model.preset=gpt3-125m model.huggingface=nowhere",
    "gpt model.experts={count=6} | model.experts.per_token",
    "gpt model.experts={count=6,per_token=7} | model.experts.per_token",
    "gpt model.experts={count=0,per_token=1} | model.experts.count",
    "gpt model.experts={count=6,per_token=1,shared_ffn_hidden=4} | model.experts.shared_ffn_hidden",
    "gpt model.experts={count=6,per_token=1,first_dense=9} | model.experts.first_dense",
    "u model.experts={count=6,per_token=1}",
    "experts strategy.dp=4 strategy.ep=4",
    "experts strategy.dp=4 strategy.ep=3",
    "gpt strategy.dp=2 strategy.ep=2",
    "gpt strategy.tp=5",
    "llama strategy.tp=3",
    "gpt model.ffn_hidden=10 strategy.tp=2",
    "llama model.num_heads=12 model.ffn_hidden=48 model.num_kv_heads=3 strategy.tp=2",
    "gpt strategy.pp=2 strategy.tp=[1,2]",
    "gpt strategy.pp=2 strategy.tp=[1,3,9]",
    "gpt strategy.pp=2 strategy.dp=[2,9]",
    "gpt strategy.dp=9",
    "gpt strategy.pp=7",
    "gpt strategy.virtual_stages=4 strategy.schedule=interleaved strategy.pp=3",
    "gpt strategy.pp=2 strategy.virtual_stages=2",
    "gpt strategy.pp=2 strategy.schedule=zb-v strategy.virtual_stages=3",
    "gpt 'strategy.recompute={kind=\"full\",layers=7}' | strategy.recompute.layers",
    "gpt strategy.slices={batch=9,columns=1} | strategy.slices.batch",
    "gpt strategy.slices={batch=4} strategy.dp=4 | strategy.slices.batch",
    "gpt strategy.slices={batch=1,columns=5} | strategy.slices.columns",
    "gpt strategy.tp=3 strategy.sequence_parallel=true",
    "u strategy.tp=3 data.sequence_length=126 strategy.sequence_parallel=true",
    "u model.num_layers=9 model.levels=4 data.sequence_length=100",
    "u data.sequence_length=126 strategy.cp=3",
    "gpt strategy.cp=2",
    "gpt strategy.cp=3",
    "gpt strategy.cp_comm_type=ring strategy.cp=5",
    "gpt strategy.cp=4 strategy.cp_comm_type={ulysses=3,ring=2}",
    "gpt strategy.cp=2 strategy.cp_comm_type=ring model.attention_dropout=0.1",
    "gpt strategy.shard=zero9",
    "gpt strategy.dp=4 strategy.shard={params=3,grads=4,optim=4} | strategy.shard.params",
    "gpt strategy.dp=4 strategy.shard={params=1,grads=1,optim=3} | strategy.shard.optim",
    "gpt strategy.dp=4 strategy.shard={params=4,grads=4,optim=4,secondary=3} | strategy.shard.secondary",
    "gpt strategy.dp=4 strategy.shard=zero3 strategy.cuda_graphs=true",
    "gpt strategy.pp=2 strategy.stage_layers=[2,2]",
    "gpt strategy.pp=2 strategy.stage_layers=[2,2,2]",
    "gpt strategy.pp=2 strategy.stage_layers=[6,0]",
    "gpt strategy.pp=2 strategy.schedule=zb-v strategy.stage_layers=[3,3]",
    "gpt strategy.pp=2 strategy.slack=[3]",
    "gpt strategy.pp=3 strategy.schedule=slack-1f1b strategy.slack=[3]",
    "gpt 'plan.constraints=[\"tp << 3\"]'",
    "gpt 'plan.constraints=[\"color = red\"]'",
    "gpt 'plan.constraints=[\"memory <= 3\"]'",
    "gpt data.sequence_length=300",
    "gpt data.text=[]",
    "gpt data.eval_fraction=1.0",
    "gpt train.steps=5 train.warmup_steps=6",
    "gpt train.lr_decay_steps=5 train.warmup_steps=6",
    "gpt train.steps=5 train.warmup_steps=3 train.lr_wsd_decay_steps=4",
    "gpt train.min_learning_rate=1.0",
    "gpt train.micro_batch_size=3 train.global_batch_size=8",
    "gpt train.micro_batch_size=3 train.global_batch_size=1",
    "gpt train.stepz=5",
    "gpt train.batch=5",
    "gpt train=5",
    "gpt run.name=a/b",
    "gpt run.folder=",
    "gpt run.device=tpu",
    "gpt trian.steps=5 | trian",
    "gpt 'open=[\"x\"]'",
]
"""A model and settings, of which the last is refused; else the key that is stands after a line."""


def read(folder: Path, values: dict[str, Any]) -> JobError | None:
    """Why the job file with these values is refused; None if it is not."""
    file = folder / "job.toml"
    top = {key: value for key, value in values.items() if not isinstance(value, dict)}
    file.write_text(to_toml(top | {key: value for key, value in values.items() if isinstance(value, dict)}))
    try:
        Job.read(file)
        return None
    except JobError as caught:
        error = caught
    assert error.file and error.key, error
    return error


def follow(folder: Path, values: dict[str, Any], error: JobError) -> int:
    """Make every change that is advised, one by one; how many there were."""
    for change in error.changes:
        again = read(folder, changed(values, change))
        assert again is None or not overlapping_keys(again.key, error.key), (str(error), change, str(again))
        for key in change:
            assert key == error.key or key in str(error), str(error)
    return len(error.changes)


@pytest.mark.parametrize("row", BAD)
def test_a_bad_job_names_file_and_key_and_its_advice_works(tmp_path: Path, row: str) -> None:
    words, _, key = row.partition(" | ")
    model, *given = shlex.split(words)
    key = key or given[-1].partition("=")[0]
    values = override({"data": {}, "model": MODELS[model]}, given, lambda key: False)[0]
    error = read(tmp_path, values)
    assert error is not None
    assert error.key == key
    assert error.fix, f"no advice: {error}"
    follow(tmp_path, values, error)
    if "a list" not in error.fix and (bound := re.search(r"(?:at least|above) (-?\d+)", error.fix)):
        above = 0.5 if "below" in error.fix else 1
        least = int(bound[1]) + (above if "above" in error.fix else 0)
        again = read(tmp_path, changed(values, {key: least}))
        assert again is None or not overlapping_keys(again.key, key), str(again)


def test_advice_that_would_be_refused_is_not_given(tmp_path: Path) -> None:
    error = read(tmp_path, {"model": LLAMA, "strategy": {"tp": 3}})
    assert error is not None
    assert str(error).endswith("tp = 3 does not divide ffn_hidden = 40. Use 1.")


def test_all_tables_of_a_change_are_kept() -> None:
    values = {"strategy": {"slices": {"batch": 3}, "tp": 2}, "data": {}}
    sliced = changed(values, {"strategy.slices": {"batch": 1, "columns": 1}})
    assert sliced == {"strategy": {"tp": 2, "slices": {"batch": 1, "columns": 1}}, "data": {}}
    assert values["strategy"]["slices"] == {"batch": 3}, "the values themselves stay"


numbers = st.integers(1, 12)
SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "model.num_layers": numbers,
    "model.num_heads": numbers,
    "model.num_kv_heads": st.integers(0, 6),
    "model.ffn_hidden": st.sampled_from([0, 24, 40, 36]),
    "model.family": st.sampled_from(["gpt", "llama", "utransformer"]),
    "model.levels": st.integers(0, 2),
    "model.attention_dropout": st.sampled_from([0.0, 0.1]),
    "model.max_sequence": st.sampled_from([64, 128, 256]),
    "data.sequence_length": st.sampled_from([30, 60, 64, 100, 128]),
    "train.global_batch_size": numbers,
    "train.micro_batch_size": st.integers(0, 4),
    "train.warmup_steps": st.sampled_from([0, 5, 500]),
    "train.lr_wsd_decay_steps": st.sampled_from([0, 5, 500]),
    "strategy.tp": numbers | st.lists(numbers, min_size=1, max_size=3),
    "strategy.dp": numbers | st.lists(numbers, min_size=1, max_size=3),
    "strategy.pp": st.integers(1, 4),
    "strategy.virtual_stages": st.integers(1, 3),
    "strategy.schedule": st.sampled_from(["1f1b", "interleaved", "zb-v", "zb-h1"]),
    "strategy.cp": st.integers(1, 4),
    "strategy.cp_comm_type": st.sampled_from(["ring", "ulysses"])
    | st.fixed_dictionaries({"ulysses": numbers, "ring": numbers}),
    "strategy.slices": st.fixed_dictionaries({"p1": numbers, "p2": numbers}),
    "strategy.sequence_parallel": st.booleans(),
    "strategy.recompute": st.fixed_dictionaries({"kind": st.just("full"), "layers": st.integers(0, 12)}),
    "strategy.shard": st.sampled_from(["ddp", "zero1", "zero3", "none"])
    | st.fixed_dictionaries({"params": numbers, "grads": numbers, "optim": numbers, "secondary": st.integers(0, 4)}),
    "strategy.cuda_graphs": st.sampled_from([True, False]),
}


@given(asked=st.fixed_dictionaries({}, optional=SETTINGS))
@settings(max_examples=250, deadline=None)
def test_advice_about_drawn_jobs_works(tmp_path_factory: pytest.TempPathFactory, asked: dict[str, Any]) -> None:
    values = changed({"model": GPT}, asked)
    folder = tmp_path_factory.mktemp("drawn")
    if error := read(folder, values):
        assert error.fix or error.key in ("strategy.slices.columns", "strategy.cp"), str(error)
        follow(folder, values, error)


def test_lengths_are_offered_up_to_what_the_model_has(tmp_path: Path) -> None:
    error = read(tmp_path, {"model": GPT, "strategy": {"cp": 3}, "data": {"sequence_length": 256}})
    assert error is not None
    assert [change["data.sequence_length"] for change in error.changes] == [255]
    assert math.gcd(255, 3) == 3


def test_a_schedule_that_nobody_knows_is_named_before_its_numbers(tmp_path: Path) -> None:
    values = {"model": {**GPT, "num_layers": 1}, "strategy": {"pp": 2, "schedule": "interleaved-1f1b"}}
    (tmp_path / "job.toml").write_text(to_toml(values))
    with pytest.raises(JobError, match=r"strategy\.schedule: unknown schedule 'interleaved-1f1b'"):
        Job.read(tmp_path / "job.toml")


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        ({"pp": 2, "stage_layers": [4, 3]}, [{"strategy.stage_layers": [3, 3]}, {"strategy.stage_layers": None}]),
        ({"pp": 2, "stage_layers": [2, 2, 2]}, [{"strategy.stage_layers": [3, 3]}, {"strategy.stage_layers": None}]),
        ({"pp": 2, "virtual_stages": 2, "schedule": "interleaved", "stage_layers": [3, 3]},
         [{"strategy.stage_layers": [2, 2, 1, 1]}, {"strategy.stage_layers": None}]),
        ({"pp": 4, "schedule": "zb-v", "stage_layers": [2, 2, 1, 1]}, [{"strategy.stage_layers": None}]),
    ],
)  # fmt: skip
def test_layers_of_stages_that_are_advised_are_as_many_as_there_are(
    strategy: dict[str, Any], changes: list[dict[str, Any]]
) -> None:
    with pytest.raises(JobError) as caught:
        Job.from_dict({"model": GPT, "strategy": strategy, "train": {"global_batch_size": 16}})
    assert caught.value.key == "strategy.stage_layers"
    assert list(caught.value.changes) == changes


def test_a_schedule_in_a_file_has_a_name_though_its_stages_are_too_many(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("rank 0: 0F0 0B0")
    with pytest.raises(JobError) as caught:
        Job.from_dict({"model": GPT, "strategy": {"pp": 7, "schedule": str(file)}})
    assert caught.value.key == "strategy.pp"


def test_so_many_stages_there_may_be() -> None:
    for layers, stages, says in (
        (MOST_STAGES + 1, MOST_STAGES + 1, f"{MOST_STAGES + 1} stages are more than {MOST_STAGES}"),
        (MOST_STAGES, MOST_STAGES + 1, f"{MOST_STAGES} layers cannot fill {MOST_STAGES + 1} stages"),
    ):
        with pytest.raises(JobError, match=says):
            Job.from_dict({"model": {**GPT, "num_layers": layers}, "strategy": {"pp": stages}})


@pytest.mark.parametrize(
    ("pp", "virtual", "changes"),
    [
        (7, 1, [{"strategy.pp": one} for one in (6, 3, 2, 1)]),
        (3, 4, [{"strategy.pp": 1}, {"strategy.virtual_stages": 1}, {"strategy.pp": 1, "strategy.virtual_stages": 1}]),
        (4, 3, [{"strategy.pp": 2}, {"strategy.pp": 1}, {"strategy.virtual_stages": 1},
                {"strategy.pp": 1, "strategy.virtual_stages": 1}]),
        (2, 7, [{"strategy.pp": 1}, {"strategy.virtual_stages": 1}, {"strategy.pp": 1, "strategy.virtual_stages": 1}]),
        (1, 7, [{"strategy.virtual_stages": 1}, {"strategy.pp": 1, "strategy.virtual_stages": 1}]),
    ],
)  # fmt: skip
def test_fewer_stages_are_advised_than_there_are_layers(pp: int, virtual: int, changes: list[dict[str, int]]) -> None:
    strategy = {"pp": pp, "virtual_stages": virtual, "schedule": "interleaved"}
    with pytest.raises(JobError) as caught:
        Job.from_dict({"model": GPT, "strategy": strategy})
    assert (caught.value.key, list(caught.value.changes)) == ("strategy.pp", changes)


@pytest.mark.parametrize(("shard", "allowed"), [("ddp", True), ("zero1", True), ("zero2", False), ("fsdp", False)])
def test_graphs_are_captured_where_weights_and_gradients_stay(shard: str, allowed: bool) -> None:
    job = {"model": GPT, "strategy": {"dp": 2, "shard": shard, "cuda_graphs": True}}
    if allowed:
        assert Job.from_dict(job).strategy.cuda_graphs is True
    else:
        with pytest.raises(JobError) as caught:
            Job.from_dict(job)
        assert caught.value.key == "strategy.cuda_graphs"
    assert Job.from_dict({**job, "strategy": {**job["strategy"], "cuda_graphs": False}})


@pytest.mark.parametrize("key", ["pp", "virtual_stages", "schedule"])
def test_layers_of_stages_are_not_judged_where_their_number_is_open(key: str) -> None:
    given = {"pp": 2, "virtual_stages": 1, "schedule": "1f1b", "stage_layers": [1, 2, 3], key: "auto"}
    assert Job.from_dict({"model": GPT, "strategy": given}).strategy.stage_layers == (1, 2, 3)


def test_layers_of_stages_of_a_schedule_in_a_file_are_judged_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("rank 0: 0F0 0B0")
    given = {"pp": 2, "schedule": str(file), "stage_layers": [1, 2, 3]}
    assert Job.from_dict({"model": GPT, "strategy": given}).strategy.stage_layers == (1, 2, 3)


def test_a_wider_place_is_told_a_micro_batch_that_it_can_share() -> None:
    """Of a micro-batch of one sequence a second replica has nothing, however large the batch is."""
    strategy = {"pp": 3, "dp": [1, 2, 3], "tp": 1}
    values: dict[str, Any] = {"model": GPT, "train": {"global_batch_size": 8}, "strategy": strategy}
    with pytest.raises(JobError) as caught:
        Job.from_dict(values)
    assert caught.value.changes[0] == {"train.micro_batch_size": 4}
    assert Job.from_dict(changed(values, caught.value.changes[0])).micro_batch == 4
