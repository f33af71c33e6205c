"""Every key of [train] and [strategy], changed when a run goes on: it takes effect, or is refused
by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.base.errors import JobError, ScheduleError
from plait.core.cluster.hardware import HERE
from plait.core.job.advice import changed
from plait.core.job.plan import Plan
from plait.core.job.resuming import TRAIN_EFFECTS, Change, effect_of
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
    "steps": 60, "tokens": "10K", "global_batch_size": 16, "micro_batch_size": 4,
    "rampup_batch_size": {"start": 4, "increment": 4, "samples": 40}, "learning_rate": 1e-5,
    "min_learning_rate": 1e-6, "warmup_steps": 3, "lr_decay_style": "linear", "lr_decay_steps": 40,
    "lr_wsd_decay_steps": 7, "optimizer": "muon", "muon": {"momentum": 0.9}, "sgd": {"momentum": 0.5},
    "weight_decay": 0.0, "weight_decay_of": {"embedding.*": 0.0}, "adam_betas": [0.8, 0.9], "adam_eps": 1e-6,
    "clip_grad": 0.5, "precision": "bf16-mixed", "on_nan": "skip", "seed": 3, "eval_every": 7, "eval_batches": 2,
    "checkpoint_every": 5, "keep_checkpoints": 3, "keep_every": 10, "keep_best": True,
    "optimizer_dtype": "bf16", "log_every": 1, "init_from": "/x",
}  # fmt: skip
OTHER_STRATEGY: dict[str, Any] = {
    "tp": 1, "dp": 1, "pp": 1, "schedule": "gpipe", "virtual_stages": 2, "slack": [2], "stage_layers": [1, 3],
    "shard": "zero1", "cp": 2, "ep": 2, "etp": 1, "cp_comm_type": "ring", "overlap": "sync", "slices": {"batch": 2},
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
    assert set(TRAIN_EFFECTS) == set(TrainSection.model_fields) == set(OTHER_TRAIN)
    assert set(OTHER_STRATEGY) == set(StrategySection.model_fields)


@pytest.mark.parametrize("key", TRAIN_EFFECTS)
def test_a_changed_key_of_train(tmp_path: Path, key: str) -> None:
    file = tmp_path / "plan.json"
    old, new = plan_of("train", {}), plan_of("train", {key: OTHER_TRAIN[key]})
    old.write(file)
    assert old.job and new.job
    if TRAIN_EFFECTS[key] == "refused":
        with pytest.raises(JobError, match=rf"train\.{key} was .* and is .*Give this run another name"):
            new.continued(file)
        return
    again = new.continued(file)
    assert again.job and getattr(again.job.train, key) == getattr(new.job.train, key) != getattr(old.job.train, key)
    told = [str(one) for one in new.job.changes(old.job)]
    assert bool(told) is (TRAIN_EFFECTS[key] == "noted")
    assert all(line.startswith(f"train.{key}") for line in told)


@pytest.mark.parametrize("key", [key for key in OTHER_STRATEGY if key not in ("ep", "etp")])
def test_a_changed_key_of_strategy_is_another_shape_of_the_same_run(tmp_path: Path, key: str) -> None:
    file, beside = tmp_path / "plan.json", BESIDE.get(key, {})
    old, new = plan_of("strategy", beside), plan_of("strategy", beside | {key: OTHER_STRATEGY[key]})
    old.write(file)
    again = new.continued(file)
    assert again.job and new.job and getattr(again.job.strategy, key) == getattr(new.job.strategy, key)
    assert again.key == new.key != old.key
    assert effect_of(f"strategy.{key}") == "another shape"


@pytest.mark.parametrize("key", ["ep", "etp"])
def test_experts_are_refused_by_name(key: str) -> None:
    with pytest.raises(JobError) as refused:
        plan_of("strategy", {key: OTHER_STRATEGY[key]})
    assert refused.value.key == f"strategy.{key}"


FORMS = st.sampled_from(["another", "low", "high", "word"])
BOUNDS: dict[str, Any] = {"low": 0, "high": 1000, "word": "x"}


@settings(max_examples=60)
@given(
    table=st.sampled_from(["train", "strategy"]),
    keys=st.lists(st.tuples(st.integers(0, 99), FORMS), min_size=1, max_size=3),
)
def test_advice_of_whatever_refuses_a_resume_is_accepted(table: str, keys: list[tuple[int, str]]) -> None:
    """Drawn keys, each with another value, one that is too small or too large, or none of its kind:
    what the refusal says is done to the letter until the run goes on."""
    names = list(OTHER_TRAIN if table == "train" else OTHER_STRATEGY)
    more = {names[at % len(names)]: form for at, form in keys}
    follow_resume(
        table,
        {key: (OTHER_TRAIN | OTHER_STRATEGY)[key] if form == "another" else BOUNDS[form] for key, form in more.items()},
    )


@pytest.mark.parametrize("form", ["another", *BOUNDS])
@pytest.mark.parametrize(
    ("table", "key"),
    [
        *(("train", key) for key in OTHER_TRAIN),
        *(("strategy", key) for key in OTHER_STRATEGY),
    ],
)
def test_advice_on_each_key_is_accepted(table: str, key: str, form: str) -> None:
    value = (OTHER_TRAIN | OTHER_STRATEGY)[key] if form == "another" else BOUNDS[form]
    refusals = [follow_resume(table, {key: value}, choice) for choice in range(2)]
    assert all(refusals) or form != "word"


def follow_resume(table: str, more: dict[str, Any], choice: int = 0) -> list[str]:
    """Change a table's keys and go on; do what each refusal says. choice: which of several changes.
    Returns the refusals."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "first", "plan.json")
        file.parent.mkdir()
        plan_of("train", {}).write(file)
        values: dict[str, Any] = {**BASE, table: BASE[table] | more}
        refusals = list[str]()
        while (error := resumed(file, values)) is not None:
            refusals.append(str(error))
            assert error.fix, refusals
            if "another name with run.name=NAME" in error.fix:
                file = Path(folder, "second", "plan.json")  # where no run is
                continue
            assert error.key, refusals
            values = done(values, error, choice)
            assert len(refusals) <= 2 * len(more) + 5, refusals  # a table may lack three keys
        return refusals


def done(values: dict[str, Any], error: JobError, choice: int) -> dict[str, Any]:
    """The job with what an error advises: its change, or a value of the kind that it allows."""
    assert error.key and error.fix
    if error.changes:
        return changed(values, error.changes[choice % len(error.changes)])
    for words, value in ALLOWED:
        if found := re.search(words, error.fix):
            return changed(values, {error.key: value(found)})
    raise AssertionError(f"nothing to do: {error}")


ALLOWED: list[tuple[str, Callable[[re.Match[str]], Any]]] = [
    (r'Allowed: "([^"]+)"', lambda found: found[1]),
    (r"Allowed: true or false", lambda _: True),
    (r"Allowed: (\d+) or \d+", lambda found: int(found[1])),
    (r"Allowed: a list of 2, each a number of at least 0", lambda _: [0.5, 0.5]),
    (r"(?:Allowed:|Give) a (?:whole )?number of at least (\d+)", lambda found: int(found[1])),
    (r"Allowed: a (?:whole )?number above (\d+)", lambda found: int(found[1]) + 0.5),
    (r"Use ([\w-]+), .* or a schedule file", lambda found: found[1]),
    (r"Allowed: a list", lambda _: []),
    (r"Allowed: a text", lambda _: "x"),
    (r"Write \[[\w.]+\] and the keys below it", lambda _: {}),
    (r"Write a whole number of at most 1e\+18", lambda _: 10_000),
    (r"Allowed: a whole number$", lambda _: 5),
    (r"known schedules: ([\w-]+)", lambda found: found[1]),
]
"""What refusals of a value say, and a value that does it."""


def resumed(file: Path, values: dict[str, Any]) -> JobError | None:
    try:
        make_plan(Job.from_dict(values), HERE, vocab=257).continued(file)
    except JobError as error:
        return error
    except ScheduleError as error:  # which names what there is
        return JobError("is no schedule", key="strategy.schedule", fix=str(error))
    return None


def test_sources_that_changed_are_told_one_by_one() -> None:
    a, b = {"path": "/a", "weight": 2.0}, {"path": ["/b", "/c"], "weight": 1.0}
    for before, now, said in (
        ([a], [b, a], "\"['/b', '/c']\" was added"),
        ([a, b], [a], "\"['/b', '/c']\" was removed"),
        ([a, b], [b, a], "another order"),
        (
            [a],
            [a | {"weight": 5.0, "name": "x"}],
            "weight of '/a' was 2.0 and is 5.0, name of '/a' was not set and is 'x'",
        ),
        (None, [a], "'/a' was added"),
    ):
        assert str(Change("data.sources", before, now, True)) == f"data.sources: {said}"
    for before, now in ((None, 0), ([], 0.5), ([1], [2]), ([], None)):
        assert " was " in str(Change("train.clip_norm", before, now, True))
