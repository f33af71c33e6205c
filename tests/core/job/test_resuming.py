"""Every key of [train] and [strategy], changed when a run goes on: it takes effect, or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.core.cluster.hardware import HERE
from plait.core.job.plan import Plan
from plait.core.job.resuming import TRAIN, effect_of
from plait.core.job.settings import StrategySection, TrainSection
from plait.core.job.spec import Job
from plait.plan.make import make_plan

MODEL = {"family": "llama", "hidden": 32, "num_heads": 4, "num_layers": 4, "ffn_hidden": 64, "vocab": 257}
BASE: dict[str, dict[str, Any]] = {
    "model": MODEL,
    "data": {"sequence_length": 16},
    "train": {"steps": 50, "global_batch_size": 8, "micro_batch_size": 2, "lr_decay_style": "wsd"},
    "strategy": {"tp": 2, "dp": 2, "pp": 2, "slices": {"batch": 1}},
}
OTHER_TRAIN: dict[str, Any] = {
    "steps": 60, "tokens": "10K", "global_batch_size": 16, "micro_batch_size": 4, "learning_rate": 1e-5,
    "min_learning_rate": 1e-6, "warmup_steps": 3, "lr_decay_style": "linear", "lr_decay_steps": 40,
    "lr_wsd_decay_steps": 7, "optimizer": "muon", "muon": {"momentum": 0.9}, "sgd": {"momentum": 0.5},
    "weight_decay": 0.0, "weight_decay_of": {"embedding.*": 0.0}, "adam_betas": [0.8, 0.9], "adam_eps": 1e-6,
    "clip_grad": 0.5, "precision": "bf16-mixed", "on_nan": "skip", "seed": 3, "eval_every": 7, "eval_batches": 2,
    "checkpoint_every": 5, "keep_checkpoints": 3, "keep_every": 10, "keep_best": True,
    "optimizer_dtype": "bf16", "log_every": 1, "init_from": "/x",
}  # fmt: skip
OTHER_STRATEGY: dict[str, Any] = {
    "tp": 1, "dp": 1, "pp": 1, "schedule": "gpipe", "virtual_stages": 2, "slack": [2], "stage_layers": [1, 3],
    "shard": "zero1", "cp": 2, "ep": 2, "cp_comm_type": "ring", "overlap": "sync", "slices": {"batch": 2},
    "sequence_parallel": True, "recompute": "full", "compile": True, "reduce_dtype": "bf16", "cuda_graphs": True,
    "streams": 2,
}  # fmt: skip
BESIDE: dict[str, dict[str, Any]] = {
    "slack": {"schedule": "slack-1f1b"}, "virtual_stages": {"schedule": "interleaved"}, "cp_comm_type": {"cp": 2},
    "streams": {"slices": {"batch": 2}},
}  # fmt: skip
"""What else a key needs to be allowed at all, before and after."""


def plan_of(table: str, more: dict[str, Any]) -> Plan:
    values = {**BASE, table: BASE[table] | more}
    if "tokens" in more:
        values["train"] = {key: value for key, value in values["train"].items() if key != "steps"}
    return make_plan(Job.from_dict(values), HERE, vocab=257)


def test_every_key_has_a_row_and_a_case() -> None:
    assert set(TRAIN) == set(TrainSection.model_fields) == set(OTHER_TRAIN)
    assert set(OTHER_STRATEGY) == set(StrategySection.model_fields)


@pytest.mark.parametrize("key", TRAIN)
def test_a_changed_key_of_train(tmp_path: Path, key: str) -> None:
    file = tmp_path / "plan.json"
    old, new = plan_of("train", {}), plan_of("train", {key: OTHER_TRAIN[key]})
    old.write(file)
    assert old.job and new.job
    if TRAIN[key] == "refused":
        with pytest.raises(JobError, match=rf"train\.{key} was .* and is .*Give this run another name"):
            new.continued(file)
        return
    again = new.continued(file)
    assert again.job and getattr(again.job.train, key) == getattr(new.job.train, key) != getattr(old.job.train, key)
    told = [str(one) for one in new.job.changes(old.job)]
    assert bool(told) is (TRAIN[key] == "noted")
    assert all(line.startswith(f"train.{key}") for line in told)


@pytest.mark.parametrize("key", [key for key in OTHER_STRATEGY if key != "ep"])
def test_a_changed_key_of_strategy_is_another_shape_of_the_same_run(tmp_path: Path, key: str) -> None:
    file, beside = tmp_path / "plan.json", BESIDE.get(key, {})
    old, new = plan_of("strategy", beside), plan_of("strategy", beside | {key: OTHER_STRATEGY[key]})
    old.write(file)
    again = new.continued(file)
    assert again.job and new.job and getattr(again.job.strategy, key) == getattr(new.job.strategy, key)
    assert again.key == new.key != old.key
    assert effect_of(f"strategy.{key}") == "another shape"


def test_experts_are_refused_by_name() -> None:
    with pytest.raises(JobError) as refused:
        plan_of("strategy", {"ep": 2})
    assert refused.value.key == "strategy.ep"
