"""What a job leaves open: to the planner, and to timed steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import JobError
from plait.core.job.open_keys import PLANNED
from plait.core.job.spec import Job, StrategySection
from tests.core.conftest import MODEL, made


def test_automatic_choices_are_marked() -> None:
    assert StrategySection().slices == "auto"
    assert made(train={"micro_batch_size": 2}, strategy={"slices": {"batch": 2}}).strategy.slices != "auto"


def test_a_job_without_a_strategy_leaves_all_of_it_open() -> None:
    assert set(made().open) == set(PLANNED)
    assert made().leaves_ranks_open
    assert made(strategy={}).open == ()
    assert set(PLANNED) - set(made(train={"micro_batch_size": 2}).open) == {"train.micro_batch_size"}


def test_auto_leaves_a_setting_open_at_its_default() -> None:
    job = made(strategy={"tp": "auto", "pp": 2, "recompute": "auto"})
    micro = "train.micro_batch_size"  # which is the planner's wherever it chooses anything
    assert set(job.open) == {"strategy.tp", "strategy.recompute", "strategy.slices", micro}  # its default is auto
    assert set(made(strategy={"tp": "auto", "slices": {"batch": 2}}).open) == {"strategy.tp", micro}
    assert set(made(strategy={"tp": "auto"}, train={"micro_batch_size": 2}).open) == {"strategy.tp", "strategy.slices"}
    assert (job.strategy.tp, job.strategy.pp, job.strategy.recompute) == (1, 2, "none")
    assert job.leaves_ranks_open
    assert not made(strategy={"schedule": "auto"}).leaves_ranks_open


def test_what_is_timed_is_open_only_beside_what_is_planned() -> None:
    assert made(strategy={"slices": "auto", "sequence_parallel": "auto"}).open == ()
    job = made(strategy={"slices": "auto", "sequence_parallel": "auto", "tp": "auto"})
    assert set(job.open) == {"strategy.slices", "strategy.sequence_parallel", "strategy.tp", "train.micro_batch_size"}


def test_open_is_no_key_of_a_file(job_file) -> None:
    with pytest.raises(JobError, match="unknown key"):
        Job.read(job_file('open = ["strategy.tp"]\n' + MODEL))


@given(st.sets(st.sampled_from(PLANNED)))
def test_open_settings_round_trip_and_close_as_another_job_has_them(tmp_path: Path, keys: set[str]) -> None:
    tables: dict[str, Any] = {"strategy": {}, "train": {}}
    for key in keys:
        section, _, name = key.partition(".")
        tables[section][name] = "auto"
    job = made(**tables)
    file = tmp_path / "job.toml"
    file.write_text(job.to_toml(), encoding="utf-8")
    for again in (Job.read(file), Job.from_dict(job.to_dict()), job.changed([])):
        assert again == job
        assert set(again.open) == set(job.open)
    other = made(
        strategy={"tp": 2, "dp": 2, "recompute": "full", "slices": {"batch": 2}}, train={"micro_batch_size": 4}
    )
    closed = job.with_choices_of(other)
    assert closed.open == ()
    ours, theirs = closed.to_dict(), other.to_dict()
    for key in job.open:
        section, _, name = key.partition(".")
        assert ours[section][name] == theirs[section][name]


def test_slices_that_are_given_leave_all_else_open() -> None:
    every = {key.partition(".")[2]: "auto" for key in PLANNED if key.startswith("strategy.")}
    del every["slices"]
    assert set(made(strategy={**every, "slices": {"batch": 2}}).open) == set(PLANNED) - {"strategy.slices"}
    assert set(made(strategy={**every, "slices": {"columns": 2}}).open) == set(PLANNED) - {"strategy.slices"}


@pytest.mark.parametrize(
    ("strategy", "measures"),
    [({"schedule": "slack-1f1b", "pp": 2}, True), ({"schedule": "slack-1f1b", "pp": 2, "slack": [2]}, False),
     ({"pp": 2}, False)],
)  # fmt: skip
def test_slack_that_is_not_given_is_measured(strategy: dict[str, Any], measures: bool) -> None:
    assert made(strategy=strategy).measures_slack == measures


@pytest.mark.parametrize(
    ("overlap", "tunes"), [("domino", False), ({"shard": "auto"}, True), ({"shard": "none"}, False), ("sync", False)]
)
def test_sharding_is_tuned_where_it_is_asked_for(overlap: Any, tunes: bool) -> None:
    assert made(strategy={"overlap": overlap}).tunes_sharding == tunes
