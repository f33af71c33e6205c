"""``plait train --dry-run``: the plan in a table, without starting a rank; what cannot fit is not
started."""

from __future__ import annotations

import json
import math
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from plait.core.job.spec import Job
from tests.support.command import plait
from tests.support.runs import write_job
from tests.train.checkpoint.weights import numbers, write

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


def run(job: Path, *settings: str) -> CompletedProcess[str]:
    """plait train, 80 columns wide."""
    return plait("train", job, f"run.folder={job.parent / 'runs'}", *settings, variables={"COLUMNS": "80"})


@pytest.mark.parametrize("cp", [1, 16])
def test_16384_ranks(tmp_path: Path, cp: int) -> None:
    asked = [*BIG, f"strategy.cp={cp}", f"strategy.dp={128 // cp}", "--dry-run"]
    done = run(write_big(tmp_path), *asked)
    assert done.returncode == 2, "which fits nowhere here"
    assert "The job cannot fit" in done.stderr
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


def test_it_says_that_an_evaluation_is_of_training_data(tmp_path: Path) -> None:
    evaluated = f"data.eval=[{{ path = '{tmp_path / 'text' / '3.txt'}', name = 'val' }}]"
    done = run(write_job(tmp_path), evaluated, f"data.text={tmp_path / 'text'}", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("contains training data: eval_loss/val") == 1
    for words in ("on 2 ranks", "params", "activ.", "tensor parallelism", "other slices", "available"):
        assert words in done.stdout
    assert not (tmp_path / "runs").exists()


def test_it_says_that_values_of_weights_were_not_looked_at(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    weights = numbers(Job.read(job).model_spec(257))
    next(iter(weights.values())).fill(math.nan)
    (tmp_path / "weights").mkdir()
    write(tmp_path / "weights" / "model.safetensors", weights)
    done = run(job, f"train.init_from={tmp_path / 'weights'}", "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    assert any("values (NaN) were not looked at" in one["what"] for one in json.loads(done.stdout)["passed_over"])
    assert "folder of weights" in done.stderr
    assert "weights" not in run(job, "--dry-run").stderr


def test_what_cannot_fit_is_not_started(tmp_path: Path) -> None:
    job = write_big(tmp_path)
    done = run(job, "model.preset='llama3-405b'")
    assert done.returncode == 2 and "cannot fit" in done.stderr
    assert "available" in done.stderr or "there are" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_whose_vocabulary_counts_is_said(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text('[model]\npreset = "utransformer-small"\n[strategy]\ntp = 1\nslices = { batch = 1 }\n')
    for asked, says in (([], True), (["model.vocab=300"], False)):
        said = run(job, *asked, "data.sequence_length=32", "--dry-run").stderr
        assert ("of which the byte tokenizer gives 257; the others are never sampled" in said) == says


def test_what_is_passed_over_stands_in_json_too(tmp_path: Path) -> None:
    job, empty = write_job(tmp_path), tmp_path / "text" / "empty.txt"
    empty.touch()
    told = run(job, "--dry-run", "--json")
    assert json.loads(told.stdout)["passed_over"] == [{"what": "empty files", "count": 1, "first": str(empty)}]
    assert told.stderr == f"note: passed over 1 empty files (the first: {empty})\n"
