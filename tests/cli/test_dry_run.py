"""``plait train --dry-run``: the plan in a table, without starting a rank; what cannot fit is not started."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.runs import write_job

LIMIT = 30.0
"""Seconds; three are enough on a machine that does nothing else."""
BIG = ["model.preset='llama3-405b'", "data.text='python-stdlib'",
       "model.max_sequence=8192", "data.sequence_length=8192",
       "train.global_batch_size=2048", "train.micro_batch_size=1", "train.warmup_steps=0",
       "strategy.tp=8", "strategy.pp=16", "strategy.dp=128", "strategy.shard=zero1"]  # fmt: skip
SHAPES = ("family", "num_layers", "hidden", "num_heads", "slices")


def write_big(folder: Path) -> Path:
    """A job whose model is a preset."""
    job = write_job(folder)
    kept = [line for line in job.read_text().splitlines() if not line.startswith(SHAPES)]
    job.write_text("\n".join(kept))
    return job


def run(job: Path, *settings: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """plait train, 80 columns wide."""
    argv = [sys.executable, "-m", "plait.cli.main", "train", str(job), f"run.folder={job.parent / 'runs'}", *settings]
    start = time.perf_counter()
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "80"} | variables
    )
    assert time.perf_counter() - start < LIMIT
    return done


def test_a_table_and_no_run(tmp_path: Path) -> None:
    done = run(write_job(tmp_path), "--dry-run")
    assert done.returncode == 0, done.stderr
    for words in ("on 2 ranks", "params", "activ.", "tensor parallelism", "other slices", "available"):
        assert words in done.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("cp", [1, 16])
def test_16384_ranks(tmp_path: Path, cp: int) -> None:
    asked = [*BIG, f"strategy.cp={cp}", f"strategy.dp={128 // cp}", "--dry-run"]
    done = run(write_big(tmp_path), *asked)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    tables = [line for line in lines if "  " in line]
    assert len(tables) > 6
    assert max(map(len, tables)) <= 80
    assert "16,384 ranks" in done.stdout
    assert "14 more" in done.stdout
    assert "15360-16383" in done.stdout
    values = json.loads(run(write_big(tmp_path), *asked, "--json").stdout)
    assert values["world_size"] == 16384
    assert len(values["places"]) == 16
    assert values["fits"] in (True, False)


@pytest.mark.parametrize("name", ["[v2]", "[red]x"])
def test_what_users_write_is_no_markup(tmp_path: Path, name: str) -> None:
    done = run(write_job(tmp_path), f"run.name={name}", "--dry-run", NO_COLOR="1", FORCE_COLOR="1")
    assert done.returncode == 0, done.stderr
    assert name in "".join(done.stdout.split("\n"))
    assert not re.search(r"\x1b\[[34][0-9]", done.stdout)


def test_what_the_dry_run_refuses(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    for settings, says in (
        (["data.text=/nowhere"], "nowhere"),
        (["strategy.tp=3"], "num_heads"),
        (["strategy.pp=2", "strategy.stage_layers=[1, 2]", "strategy.tp=1"], "stage_layers"),
        (["--on", "moon"], "no place to run"),
    ):
        done = run(job, *settings, "--dry-run")
        assert done.returncode == 2
        assert says in done.stderr
        assert "Traceback" not in done.stderr


def test_what_cannot_fit_is_not_started(tmp_path: Path) -> None:
    job = write_big(tmp_path)
    for settings in (["model.num_layers=100000000"], []):
        done = run(job, "model.preset='llama3-405b'", *settings)
        assert done.returncode == 2, done.stdout
        assert "cannot fit" in done.stderr
        assert "available" in done.stderr or "there are" in done.stderr
        assert not (tmp_path / "runs").exists()
