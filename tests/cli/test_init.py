"""``plait init``: files that plan, options that are refused with what is allowed, and files that
stay as they are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from plait.api.new_job import accelerator_kinds, examples, job_text, next_commands, read_options, with_comments
from plait.core.base.errors import JobError
from plait.core.job.spec import Job
from plait.plan.search import fits
from tests.example_jobs import AS_WRITTEN, ROW, START, row_of
from tests.support.command import succeed, values
from tests.support.hugging_face import hugging_face

TIER = "unit"


def written(folder: Path, **options: str) -> str:
    """The file of some options, all others by default."""
    return job_text(read_options({name.replace("_", "-"): value for name, value in options.items()}), folder)


# ---- files ----


@pytest.mark.parametrize(
    ("model", "accelerators", "on", "ranks", "keys"),
    [
        ("small", "2xcpu", "here", 2, {"run.device": "cpu", "train.precision": "fp32", "train.learning_rate": 3e-3,
                                       "train.global_batch_size": 16, "data.sequence_length": 128}),
        ("gpt3-125m", "4 A100-80", "slurm:gpu", 4, {"slurm.partition": "gpu", "slurm.nodes": 1, "slurm.gpus": 4,
                                                    "train.learning_rate": 6e-4, "train.global_batch_size": 256}),
        ("llama3-8b", "64xh200", "kubernetes:team", 64, {"kubernetes.namespace": "team", "kubernetes.nodes": 8,
                                                         "kubernetes.gpus": 8, "train.learning_rate": 3e-4,
                                                         "train.global_batch_size": 128, "run.folder": "/data/runs",
                                                         "data.sequence_length": 8192}),
        ("mixtral-8x7b", "8xh100", "slurm", 8, {"slurm.nodes": 1, "train.learning_rate": 1.5e-4,
                                                "train.precision": "bf16-mixed", "train.micro_batch_size": "auto"}),
        ("llama3-8b", "2xcpu", "kubernetes", 2, {"kubernetes.nodes": 1, "kubernetes.gpus": 0,
                                                 "data.sequence_length": 512}),
    ],
)  # fmt: skip
def test_options_make_a_valid_job(
    model: str, accelerators: str, on: str, ranks: int, keys: dict[str, object], tmp_path: Path
) -> None:
    text = written(tmp_path, model=model, accelerators=accelerators, on=on)
    file = tmp_path / "job.toml"
    file.write_text(text)
    job = Job.read(file)
    assert job.leaves_ranks_open and job.cluster.ranks == ranks
    values = job.to_dict()
    assert {key: values[key.split(".")[0]][key.split(".")[1]] for key in keys} == keys
    file.write_text(re.sub(r"^#(\[strategy]|(?:tp|dp|pp|shard) =)", r"\1", text, flags=re.MULTILINE))
    assert Job.read(file).world_size == ranks  # with the strategy that is shown as an example
    assert with_comments(text) == text  # each key has its meaning above it, once


def test_paths_are_named_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hugging_face(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").touch()
    (tmp_path / "jobs").mkdir()
    (tmp_path / "books").mkdir()
    text = written(tmp_path / "jobs", model="hf", data="books, python-stdlib")
    assert 'huggingface = "../hf"' in text and 'tokenizer = "../hf/tokenizer.json"' in text
    assert 'text = ["../books", "python-stdlib"]' in text and 'init_from = "../hf"' in text
    assert "learning_rate = 1e-05" in text


@pytest.mark.parametrize("file", examples().values(), ids=lambda file: file.stem)
def test_examples_have_the_comments_of_the_reference(file: Path) -> None:
    if file.stem not in AS_WRITTEN:
        assert with_comments(file.read_text()) == file.read_text(), "python -m tests.example_jobs writes them anew"


def test_the_table_of_examples_has_them_all() -> None:
    assert {row["job"] for row in ROW.finditer(START.read_text())} == examples().keys() - set(AS_WRITTEN)


@pytest.mark.contract
@pytest.mark.parametrize("row", list(ROW.finditer(START.read_text())), ids=lambda row: row["job"])
def test_the_table_of_examples_is_what_the_planner_says(row: re.Match[str]) -> None:
    assert row_of(row["job"], row["for"]) == row[0], "python -m tests.example_jobs writes it anew"


def test_a_key_that_is_no_setting_is_named() -> None:
    with pytest.raises(JobError, match=r"train\.stepz: no setting has this name"):
        with_comments("[train]\nstepz = 3")


# ---- options ----


def test_kinds_are_those_that_ship() -> None:
    assert {"h100", "h200", "b200", "mi300x"} <= set(accelerator_kinds()) and "lab" not in accelerator_kinds()


# ---- planned and trained ----


@pytest.mark.system
def test_a_file_of_defaults_plans_and_trains(tmp_path: Path) -> None:
    succeed("init", "first.toml", "--defaults", folder=tmp_path)
    succeed("plan", "first.toml", folder=tmp_path)
    command = [sys.executable, "-m", "plait.cli.main", "train", "first.toml", "train.steps=3", "train.warmup_steps=0"]
    trained = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    listed = values("runs", folder=tmp_path)["runs"]
    assert [(one["name"], one["state"], one["step"], one["steps"]) for one in listed] == [("first", "ended", 3, 3)]


def test_no_dry_run_comes_next_of_what_is_planned_and_not_trained(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    for model, count in (("deepseek-v3", 1), ("mixtral-8x7b", 2), ("llama3-8b", 2)):
        file.write_text(written(tmp_path, model=model, accelerators="64xh100"))
        assert len(next_commands(file)) == count


@pytest.mark.system
def test_what_is_said_to_come_next_works_where_the_accelerators_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fits, "room", lambda *_: fits.AvailableMemory(shared=1 << 20))
    asked = ("--model", "gpt3-125m", "--accelerators", "2xh100", "--sequence-length", "512", "--defaults")
    done = succeed("init", "job.toml", *asked, folder=tmp_path)
    commands = done.stdout.split("next: ")[1].strip().split("; ")
    assert commands == ["plait plan job.toml", "plait train job.toml --dry-run"]
    for command in commands:
        succeed(*command.split()[1:], folder=tmp_path)


@pytest.mark.system
def test_an_example_is_written_as_it_ships(tmp_path: Path) -> None:
    done = succeed("init", "mine.toml", "--example", "llama3-8b-finetune-slurm", folder=tmp_path)
    assert "model.huggingface" in done.stdout
    assert (tmp_path / "mine.toml").read_text() == examples()["llama3-8b-finetune-slurm"].read_text()
