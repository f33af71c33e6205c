"""What launchers write into a run's folder, and what they read of earlier starts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from plait.api.places import base as here
from plait.api.ranks import RankSet
from plait.core.cluster.hardware import HERE
from plait.core.job.plan import Plan
from plait.core.job.spec import Job
from plait.launch.local import local as warm
from plait.launch.local.supervisor import Fleet
from plait.launch.run_folder import STARTS, last_job, starts_in_vain, write_run
from plait.plan.make import make_plan

TIER = "unit"
MODEL = {"family": "gpt", "num_layers": 2, "hidden": 32, "num_heads": 4}


def planned(**train: object) -> Plan:
    job = Job.from_dict({"model": MODEL, "train": train, "strategy": {"tp": 1, "slices": {"batch": 1, "columns": 1}}})
    return make_plan(job, HERE, vocab=257)


def test_settings_that_are_others_than_at_the_start_before_are_said_and_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "changed" not in write_run(planned(), tmp_path).notes
    assert capsys.readouterr().err == ""
    plan = write_run(planned(learning_rate=1e-5, steps=9).continued(tmp_path / "plan.json"), tmp_path)
    what = "train.learning_rate was 0.0003 and is 1e-05"
    assert plan.notes["changed"] == what and Plan.read(tmp_path / "plan.json").notes["changed"] == what
    assert capsys.readouterr().err == f"plait: the run goes on with other settings: {what}\n"
    again = write_run(planned(learning_rate=1e-5).continued(tmp_path / "plan.json"), tmp_path)
    assert "changed" not in again.notes
    assert capsys.readouterr().err == ""


HELD = [
    ("cut short", lambda file, plan: file.write_text(file.read_text()[:99]), True),
    ("gone", lambda file, plan: file.unlink(), True),
    ("no text", lambda file, plan: file.write_bytes(b"\xff\x00"), True),
    ("another job's", lambda file, plan: planned(seed=7).write(file), True),
    ("as it was", lambda file, plan: None, False),
    ("refined by ranks", lambda file, plan: replace(plan, seed=plan.seed + 1, origin=plan.intent).write(file), False),
]


@pytest.mark.parametrize(("harm", "again"), [pytest.param(harm, again, id=name) for name, harm, again in HELD])
def test_ranks_that_are_started_again_obey_the_plan_that_their_launcher_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    harm: Callable[[Path, Plan], object], again: bool,
) -> None:  # fmt: skip
    plan, file = write_run(planned(), tmp_path), tmp_path / "plan.json"

    def kept_going(fleet: Fleet, ranks: RankSet) -> int:
        harm(file, plan)
        fleet.crew()
        return 0

    monkeypatch.setattr(here, "run_supervised", kept_going)
    monkeypatch.setattr(warm, "warm_starts", lambda *asked: nullcontext(lambda: None))
    here.LocalTarget().run(RankSet(module="m", arguments=(), world=1, logs=tmp_path / "logs", timeout=9.0, plan=plan))
    assert (Plan.read(file) == plan) == (again or plan.seed == Plan.read(file).seed)
    assert ("it is written again" in capsys.readouterr().err) == again


DAMAGED = ["", "null", "[]", pytest.param("[" * 60_000, id="deep"),
           '{"job": 1, "vain": 2}', '{"job": "a", "vain": Infinity}',
           '{"job": "a", "vain": "2"}', '{"job": "a", "vain": -1}', "\x00"]  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_count_of_starts_begins_anew(tmp_path: Path, content: str) -> None:
    (tmp_path / STARTS).write_text(content)
    assert last_job(tmp_path) == ""
    assert starts_in_vain(tmp_path, "a", before=0) == 1
    assert (last_job(tmp_path), starts_in_vain(tmp_path, "a", before=0)) == ("a", 2)
    assert starts_in_vain(tmp_path, "b", before=0) == 1
