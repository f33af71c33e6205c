"""``plait init``: files that plan, answers that are refused with what is allowed, and files that stay as they
are."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plait.api.commented import commented
from plait.api.new_job import QUESTIONS, Wish, examples, job_text, kinds, next_commands
from plait.core.base.errors import JobError
from plait.core.job.spec import Job
from plait.plan import fits
from tests.example_jobs import AS_WRITTEN, ROW, START, row_of
from tests.support.command import plait
from tests.support.hugging_face import hugging_face

TIER = "unit"


def written(folder: Path, **answers: str) -> str:
    """The file of some answers, all others by default."""
    wish = Wish()
    for question in QUESTIONS:
        wish.answer(question, answers.get(question.name.replace("-", "_")) or question.default(wish))
    return job_text(wish, folder)


# ---- files ----


@pytest.mark.parametrize("on", ["here", "slurm", "slurm:gpu", "kubernetes", "kubernetes:team"])
@pytest.mark.parametrize("accelerators", ["2xcpu", "8xh100", "64xh200", "4 A100-80"])
@pytest.mark.parametrize("model", ["small", "llama3-8b", "mixtral-8x7b", "gpt3-125m"])
def test_every_answer_makes_a_valid_job(model: str, accelerators: str, on: str, tmp_path: Path) -> None:
    text = written(tmp_path, model=model, accelerators=accelerators, on=on)
    file = tmp_path / "job.toml"
    file.write_text(text)
    job = Job.read(file)
    assert job.leaves_ranks_open and job.cluster.ranks == int(accelerators.split("x")[0].split()[0])
    assert job.train.global_batch_size % job.cluster.ranks == 0
    assert job.train.precision == ("fp32" if "cpu" in accelerators else "bf16-mixed")
    assert commented(text) == text  # each key has its meaning above it, once


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
        assert commented(file.read_text()) == file.read_text(), "python -m tests.example_jobs writes them anew"


def test_the_table_of_examples_has_them_all() -> None:
    assert {row["job"] for row in ROW.finditer(START.read_text())} == examples().keys() - set(AS_WRITTEN)


@pytest.mark.contract
@pytest.mark.parametrize("row", list(ROW.finditer(START.read_text())), ids=lambda row: row["job"])
def test_the_table_of_examples_is_what_the_planner_says(row: re.Match[str]) -> None:
    assert row_of(row["job"], row["for"]) == row[0], "python -m tests.example_jobs writes it anew"


def test_a_key_that_is_no_setting_is_named() -> None:
    with pytest.raises(JobError, match=r"train\.stepz: no setting has this name"):
        commented("[train]\nstepz = 3")


# ---- options ----


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--model", "lama3-8b"], "no preset (did you mean 'llama3-8b'?) and no folder. Use small"),
        (["--accelerators", "8xh1000"], "no accelerator is called 'h1000' (did you mean 'h100'?). Write COUNTxKIND"),
        (["--accelerators", "0xh100"], "0 accelerators train nothing"),
        (["--accelerators", "12xh100"], "12 are no whole hosts: each has 8 of h100. Use at most 8, or a multiple"),
        (["--accelerators", "eight"], "no accelerator is called 'eight'"),
        (["--accelerators", "4096xcpu"], "4096 ranks would share"),
        (["--model", "llama3-8b", "--sequence-length", "9000"], "Use a whole number from 1 to 8192"),
        (["--sequence-length", "-1"], "Use a whole number from 1 to"),
        (["--data", "nowhere"], "--data: 'nowhere' is not there. Name files and folders"),
        (["--data", " , "], "no data are named"),
        (["--tokenizer", "nowhere"], "--tokenizer: 'nowhere' is no file"),
        (["--on", "moon"], "'moon' is no place to run. Use here, slurm"),
        (["--on", "here:x"], "'here:x' is no place to run"),
        (["--example", "llama"], "no example is called 'llama'"),
        (["--example", "llama3-8b-slurm", "--model", "small"], "--example: stands beside --model"),
    ],
)
def test_a_wrong_answer_is_explained(words: list[str], told: str, tmp_path: Path) -> None:
    done = plait("init", *words, *([] if "--example" in words else ["--defaults"]), folder=tmp_path)
    assert done.returncode == 2 and told in done.stderr
    assert not list(tmp_path.iterdir())


def test_without_a_terminal_nothing_is_asked(tmp_path: Path) -> None:
    done = plait("init", "--model", "small", "--data", "python-stdlib", text="2xcpu\n", folder=tmp_path)
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    assert "--accelerators: is not said, and this is no terminal" in done.stderr
    assert "Add --accelerators, --on, --sequence-length, --tokenizer, or --defaults" in done.stderr


def test_no_file_is_overwritten_and_no_folder_made(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("mine")
    (tmp_path / "link.toml").symlink_to(tmp_path / "gone")
    for name, told in (("job.toml", "is there already"), ("link.toml", "is there already"),
                       ("a/job.toml", "there is no folder"), ("job.json", "ends in .toml")):  # fmt: skip
        done = plait("init", name, "--defaults", folder=tmp_path)
        assert done.returncode == 2 and told in done.stderr, done.stderr
    assert (tmp_path / "job.toml").read_text() == "mine" and sorted(os.listdir(tmp_path)) == ["job.toml", "link.toml"]


def test_what_does_not_fit_is_not_written(tmp_path: Path) -> None:
    done = plait("init", "--model", "llama3-70b", "--accelerators", "1xh100", "--defaults", folder=tmp_path)
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    assert "GiB" in done.stderr


def test_kinds_are_those_that_ship() -> None:
    assert {"h100", "h200", "b200", "mi300x"} <= set(kinds()) and "lab" not in kinds()


# ---- on a terminal, planned and trained ----


def _typed(folder: Path, *answers: bytes) -> tuple[int, str]:
    """``plait init`` on a terminal on which these lines are typed, each after a question."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "plait.cli.main", "init"]
    command = ["setsid", "--ctty", *command]  # whose Ctrl-C it hears
    process = subprocess.Popen(command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said, left, end = b"", list(answers), time.monotonic() + 90
    while select.select([ours], [], [], max(0.0, end - time.monotonic()))[0]:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # the other end was closed
            break
        if not piece:
            break
        said += piece
        if left and said.rstrip(b" ").endswith(b"]:"):
            os.write(ours, left.pop(0))
    os.close(ours)  # which hangs up
    return process.wait(60), said.decode(errors="replace")


@pytest.mark.system
def test_questions_are_asked_again_until_they_are_answered(tmp_path: Path) -> None:
    status, said = _typed(tmp_path, b"small\n", b"9999xcpu\n", b"\n", b"moon\n", b"here\n", b"64\n", b"\n", b"\n")
    assert status == 0, said
    assert "9999 ranks would share" in said and "'moon' is no place to run" in said
    job = Job.read(tmp_path / "job.toml")
    assert job.data.sequence_length == 64 and job.cluster.ranks == 1


@pytest.mark.system
@pytest.mark.parametrize(("key", "status"), [(b"\x03", 130), (b"\x04", 2)])
def test_who_leaves_a_question_leaves_no_file(key: bytes, status: int, tmp_path: Path) -> None:
    ended, said = _typed(tmp_path, b"small\n", key)
    assert ended == status, said
    assert "othing was written" in said and "Traceback" not in said and not list(tmp_path.iterdir())


@pytest.mark.system
def test_a_file_of_defaults_plans_and_trains(tmp_path: Path) -> None:
    assert plait("init", "first.toml", "--defaults", folder=tmp_path).returncode == 0
    done = plait("plan", "first.toml", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    command = [sys.executable, "-m", "plait.cli.main", "train", "first.toml", "train.steps=3", "train.warmup_steps=0"]
    trained = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    listed = json.loads(plait("runs", "--json", folder=tmp_path).stdout)["runs"]
    assert [(one["name"], one["state"], one["step"], one["steps"]) for one in listed] == [("first", "ended", 3, 3)]


def test_no_dry_run_comes_next_of_what_is_planned_and_not_trained(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    for model, count in (("mixtral-8x7b", 1), ("llama3-8b", 2)):
        file.write_text(written(tmp_path, model=model, accelerators="64xh100"))
        assert len(next_commands(file)) == count


@pytest.mark.system
def test_what_is_said_to_come_next_works_where_the_accelerators_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fits, "room", lambda *_: fits.Room(shared=1 << 20))
    asked = ("--model", "gpt3-125m", "--accelerators", "2xh100", "--sequence-length", "512", "--defaults")
    done = plait("init", "job.toml", *asked, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    commands = done.stdout.split("next: ")[1].strip().split("; ")
    assert commands == ["plait plan job.toml", "plait train job.toml --dry-run"]
    for command in commands:
        tried = plait(*command.split()[1:], folder=tmp_path)
        assert tried.returncode == 0, tried.stderr


@pytest.mark.system
@pytest.mark.parametrize("name", [name for name in examples() if name.endswith(("slurm", "kubernetes"))])
def test_an_example_is_planned(name: str, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(examples()[name].read_text())
    if "finetune" in name:
        hugging_face(tmp_path / "Meta-Llama-3-8B-Instruct")
        (tmp_path / "chats.jsonl").touch()
        file.write_text(file.read_text().replace("\ninit_from", "\n#init_from"))  # weights of 16 GB
    done = plait("plan", file, "plan.points=20000", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    best = json.loads(done.stdout)["candidates"][0]
    job = Job.read(file)
    assert best["seconds"] > 0 and job.cluster.ranks == 8 * max(job.slurm.nodes, job.kubernetes.nodes)


@pytest.mark.system
def test_an_example_is_written_as_it_ships(tmp_path: Path) -> None:
    done = plait("init", "mine.toml", "--example", "llama3-8b-finetune-slurm", folder=tmp_path)
    assert done.returncode == 0 and "model.huggingface" in done.stdout
    assert (tmp_path / "mine.toml").read_text() == examples()["llama3-8b-finetune-slurm"].read_text()
