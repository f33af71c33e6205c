"""A setting on the command line changes its own key alone: what else the planner chooses stays its
own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.core.base.codec.toml_text import to_toml
from plait.core.job.open_keys import MICRO, PLANNED
from plait.core.job.plan import format_defaults, setting_origins
from plait.core.job.settings import PLANNABLE
from plait.core.job.spec import Job

MODEL = {"family": "llama", "hidden": 32, "num_heads": 4, "num_layers": 4, "ffn_hidden": 64, "vocab": 257}
VALUES: dict[str, Any] = {"model": MODEL, "data": {"sequence_length": 16}, "train": {"global_batch_size": 8}}
ALONE = {
    "tp": "2", "dp": "2", "pp": "2", "schedule": '"gpipe"', "virtual_stages": "1", "stage_layers": "[1, 3]",
    "shard": '"zero1"', "cp": "2", "ep": "1", "cp_comm_type": '"ring"', "overlap": '"sync"', "slices.batch": "2",
    "sequence_parallel": "true", "recompute.kind": '"none"',
}  # fmt: skip
BESIDE = {"recompute.kind": ["strategy.recompute.layers=1"], "stage_layers": ["strategy.pp=2"], "cp": ["strategy.dp=1"]}
"""What a value needs to be allowed."""


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A job that is planned whole."""
    file = tmp_path / "job.toml"
    file.write_text(to_toml(VALUES))
    return file


def test_every_key_has_a_case() -> None:
    assert {key.partition(".")[0] for key in ALONE} == set(PLANNABLE)


@pytest.mark.parametrize("key", ALONE)
def test_a_setting_closes_its_own_key_alone(whole: Path, key: str) -> None:
    settings = [f"strategy.{key}={ALONE[key]}", *BESIDE.get(key, [])]
    job, closed = Job.read(whole, settings), {".".join(one.split("=")[0].split(".")[:2]) for one in settings}
    assert set(job.open) == set(PLANNED) - closed
    assert job == Job.read(whole).changed(settings)
    assert all(setting_origins(job)[one] == "given" for one in closed)
    assert format_defaults(job) == ""


def test_what_is_no_choice_of_the_planner_leaves_all_of_it_open(whole: Path) -> None:
    for setting in ("strategy.compile=true", "train.steps=3"):
        assert set(Job.read(whole, [setting]).open) == set(PLANNED)


def test_a_table_that_is_there_leaves_nothing_open(whole: Path) -> None:
    whole.write_text(to_toml({**VALUES, "strategy": {"tp": 2, "slices": {"batch": 1}}}))
    job = Job.read(whole, ["strategy.dp=2"])
    assert job.open == () and MICRO not in job.open and job.strategy.pp == 1
    assert format_defaults(job).startswith("[strategy] leaves out pp, schedule, ")
