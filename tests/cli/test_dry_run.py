"""``plait train --dry-run``: the plan in a table, without starting a rank; what cannot fit is not started."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from plait.cli.main import main
from plait.core.job.spec import Job
from plait.plan import fits
from tests.support.runs import on_terminal, write_job
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


def run(job: Path, *settings: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """plait train, 80 columns wide."""
    argv = [sys.executable, "-m", "plait.cli.main", "train", str(job), f"run.folder={job.parent / 'runs'}", *settings]
    env = os.environ | {"COLUMNS": "80"} | variables
    return subprocess.run(argv, capture_output=True, text=True, check=False, env=env)


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


@pytest.mark.parametrize("name", ["[v2]", "[red]x"])
def test_what_users_write_is_no_markup(tmp_path: Path, name: str) -> None:
    done = run(write_job(tmp_path), f"run.name={name}", "--dry-run", NO_COLOR="1", FORCE_COLOR="1")
    assert done.returncode == 0, done.stderr
    assert name in "".join(done.stdout.split("\n"))
    assert not re.search(r"\x1b\[[34][0-9]", done.stdout)


def test_it_says_that_an_evaluation_is_of_training_data(tmp_path: Path) -> None:
    evaluated = f"data.eval=[{{ path = '{tmp_path / 'text' / '3.txt'}', name = 'val' }}]"
    done = run(write_job(tmp_path), evaluated, f"data.text={tmp_path / 'text'}", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("trained on, too: eval_loss/val") == 1


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


WEIGHTS = '{"model_type": "gpt2", "n_layer": 9, "n_embd": 32, "n_head": 4, "vocab_size": 257, "n_positions": 16}'


@pytest.fixture
def strange(tmp_path: Path) -> Path:
    """A job, and beside it files that are none, or of another kind."""
    job = write_job(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin.toml").write_bytes(b"[model]\npreset = 'caf\xe9'\n")
    (tmp_path / "twice.toml").write_text("[train]\nsteps = 3\nsteps = 4\n")
    for name in ("empty", "other", "taken"):
        (tmp_path / name).mkdir()
    (tmp_path / "taken" / "logs").touch()
    (tmp_path / "other" / "model.safetensors").touch()
    (tmp_path / "other" / "config.json").write_text(WEIGHTS)
    return job


@pytest.mark.parametrize("dry", [True, False], ids=["dry run", "run"])
@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (["train.init_from=none"], "train.init_from: .*none: no such folder"),
        (["train.init_from=latin.toml"], "train.init_from: .*latin.toml is a file, and a folder is needed"),
        (["train.init_from=empty"], "empty: holds neither model.safetensors nor"),
        (["train.init_from=other"], "config.json: describes another model: num_layers is 9 there and 2 in the job"),
        (["run.folder=/dev/null"], "/dev/null/job/plan.json cannot be written: Not a directory.*run.folder"),
        (["run.name=taken", "run.folder=."], "taken/logs is a file, and a run needs a folder there"),
        (["run.folder=pipe"], "plan.json cannot be written: Not a directory.*run.folder"),
        (["strategy.schedule=1f1p", "strategy.tp=1"], "no schedule is called '1f1p'.*did you mean '1f1b'"),
        (["strategy.schedule=/dev/zero", "strategy.tp=1"], "/dev/zero: cannot be read as a schedule: It is a device"),
        (["strategy.schedule=empty", "strategy.tp=1"], "empty: cannot be read as a schedule: Is a directory"),
        (["strategy.schedule=latin.toml", "strategy.tp=1"], "latin.toml: cannot be read as a schedule: 'utf-8'"),
        (["data.text=/dev/zero"], "/dev/zero: is a device, no regular file"),
        (["data.text=pipe"], "pipe: is a pipe, no regular file"),
        (["data.tokenizer=/dev/zero"], "/dev/zero: is a device, no tokenizer file"),
        (["model.huggingface=/dev/zero"], "/dev/zero: cannot be read as a Hugging Face config: It is a device"),
        (["model.huggingface=empty"], "config.json: cannot be read as a Hugging Face config: No such file"),
        (["cluster.file=/dev/zero", "strategy.tp=auto"], "/dev/zero: cannot be read: It is a device"),
        (["cluster.profile=pipe", "strategy.tp=auto"], "pipe: cannot be read as a profile: It is a pipe"),
        (["cluster.preset=../clusters/h100", "strategy.tp=auto"], "no cluster '../clusters/h100'"),
        (["/dev/zero"], "/dev/zero: cannot be read: It is a device, no regular file"),
        (["pipe"], "pipe: cannot be read: It is a pipe"),
        (["empty"], "empty: cannot be read: Is a directory"),
        (["latin.toml"], "latin.toml: byte 21 is not UTF-8"),
        (["twice.toml"], "twice.toml: train.steps: not valid TOML: .*line 3.*Say it once"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_can_never_run_is_refused_before_anything_starts(
    strange: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    asked: list[str], says: str, dry: bool,
) -> None:  # fmt: skip
    monkeypatch.chdir(strange.parent)
    there = sorted(os.listdir())
    file = [] if "=" not in asked[0] else ["job.toml"]
    monkeypatch.setattr(sys, "argv", ["plait", "train", *file, *asked, *["--dry-run"] * dry])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert re.search(says, capsys.readouterr().err)
    assert sorted(os.listdir()) == there


@pytest.mark.parametrize(("option", "says"), [("--json", "is for --dry-run"), ("--no-follow", "is for --on slurm")])
def test_an_option_that_would_be_ignored_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, says: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["plait", "train", str(write_job(tmp_path)), option])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert f"{option}: {says}" in capsys.readouterr().err


def test_no_line_is_wider_than_the_terminal(tmp_path: Path) -> None:
    """Also where what a job needs is more than there is."""
    asked = ["strategy.tp=1", "train.global_batch_size=100000000", "train.eval_every=0", "--dry-run"]
    code, screen = on_terminal([sys.executable, "-m", "plait.cli.main", "train", write_job(tmp_path).name, *asked],
                               folder=tmp_path)  # fmt: skip
    lines = re.sub(r"\x1b\[[0-9;]*m", "", screen).splitlines()
    assert code == 2, screen
    assert "does not fit" in " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= 80


def test_what_cannot_fit_is_not_started(tmp_path: Path) -> None:
    job = write_big(tmp_path)
    for settings in (["model.num_layers=100000"], []):
        done = run(job, "model.preset='llama3-405b'", *settings)
        assert done.returncode == 2, done.stdout
        assert "cannot fit" in done.stderr
        assert "available" in done.stderr or "there are" in done.stderr
        assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("data.text=nowhere", "command line: data.text: .*nowhere: no such file or folder"),
        ("data.tokenizer=none.json", "command line: data.tokenizer: .*none.json: no such tokenizer file"),
        ("train.init_from=other", "command line: train.init_from: .*describes another model.* Set model.num_layers=9"),
        ("strategy.schedule=latin.toml", "command line: strategy.schedule: .*cannot be read as a schedule"),
        ("data.sequence_length=9999", "command line: data.sequence_length: .* Add text, set data.sequence_length = "),
        ("run.device=cuda", "command line: run.device: cuda, and this machine has no GPU"),
        ("model.vocab=3", "command line: model.vocab: 3 is less than the tokenizer's 257 tokens. Use at least 257"),
    ],
)
def test_what_only_a_start_can_know_names_file_and_key_too(
    strange: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: str, says: str
) -> None:
    monkeypatch.chdir(strange.parent)
    monkeypatch.setattr(fits, "gpus", list)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(sys, "argv", ["plait", "train", "job.toml", "strategy.tp=1", asked, "--dry-run"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert re.search(says, capsys.readouterr().err)


def test_whose_vocabulary_counts_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.toml").write_text(
        '[model]\npreset = "utransformer-small"\n[strategy]\ntp = 1\nslices = { batch = 1 }\n'
    )
    monkeypatch.chdir(tmp_path)
    for asked, says in (([], True), (["model.vocab=300"], False)):
        monkeypatch.setattr(sys, "argv", ["plait", "train", "job.toml", *asked, "data.sequence_length=32", "--dry-run"])
        with pytest.raises(SystemExit):
            main()
        assert (
            "of which the byte tokenizer gives 257; the others are never sampled" in capsys.readouterr().err
        ) == says


def test_what_is_passed_over_stands_in_json_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path)
    (tmp_path / "text" / "empty.txt").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["plait", "train", job.name, "--dry-run", "--json"])
    with pytest.raises(SystemExit):
        main()
    told = capsys.readouterr()
    first = str(tmp_path / "text" / "empty.txt")
    assert json.loads(told.out)["passed_over"] == [{"what": "empty files", "count": 1, "first": first}]
    assert told.err == f"note: passed over 1 empty files (the first: {first})\n"
