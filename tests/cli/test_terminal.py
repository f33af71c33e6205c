"""What people see: tables that fit and lose no number, no escape sequence that was not asked for,
nothing that a user wrote read as markup."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from plait.core.record.timeline import Span, Timeline
from tests.support.command import plait, values
from tests.support.runs import command, on_terminal, write_job

PLAIT = [sys.executable, "-m", "plait.cli.main"]
EXPLAIN = [*PLAIT, "reshard", "(2,4) R S0 R", "(2,4) S0 R R", "shape=1024,1024,512",
           "dtype=int32", "latency=0s"]  # fmt: skip
SHOW = [*PLAIT, "schedule"]
NAME = "[v2] [b] :smile: \x1b[31m"
SHOWN = "[v2] [b] :smile: \\x1b[31m"


def piped(argv: list[str], **environ: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **environ})
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d+\.\d{2,}|\d+-\d+", text))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder of an awkward name with a timeline."""
    folder = tmp_path / NAME
    kinds = ("compute", "comm", "wait")
    spans = [Span(0, 0, kind, f"x{i}", 0, "attention" * 6, 0, 0, "forward", i, i + 0.1234, 0)
             for i, kind in enumerate(kinds)]  # fmt: skip
    (folder / "timeline").mkdir(parents=True)
    Timeline(tuple(spans), "hash").write_parquet(folder / "timeline" / "rank-00000-step-00000001.parquet")
    return folder


@pytest.mark.parametrize(("verb", "columns"), [("reshard", 60), ("schedule", 80), ("timeline", 60), ("timeline", 150)])
def test_a_table_fits_the_terminal_and_has_all_numbers_of_the_piped_one(run: Path, verb: str, columns: int) -> None:
    argv = {
        "reshard": EXPLAIN,
        "schedule": [*SHOW, "slack-1f1b", "pp=6", "transfer=0.333"],
        "timeline": [*PLAIT, "diagnose", str(run), "--timeline"],
    }[verb]
    whole = piped(argv)
    status, screen = on_terminal(argv, columns=columns, environ={"NO_COLOR": "1"})
    assert status == 0
    assert "…" not in whole + screen
    assert "\x1b" not in whole + screen
    assert numbers(whole)
    assert numbers(whole) <= numbers(screen)
    lines = screen.replace("\r", "").splitlines()
    assert max(len(line) for line in lines if str(run.parent) not in line) <= columns


def test_a_piped_table_has_one_line_a_row_and_every_column() -> None:
    (row,) = (line for line in piped(EXPLAIN, COLUMNS="40").splitlines() if "[0:512, 0:512, 0:512]" in line)
    assert row.split()[-4:] == ["broadcast", "128", "0.0000", "0.4295"]


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--help"],
        ["lab", "run", "--help"],
        ["trian"],
        ["train"],
        ["train", "no.toml"],
        ["schedule", "[/b]"],
        ["job", "a", "b"],
    ],
    ids=" ".join,
)
def test_no_escape_sequences_where_none_are_wanted(argv: list[str]) -> None:
    status, screen = on_terminal([*PLAIT, *argv], environ={"NO_COLOR": "1"})
    assert status == (0 if "--help" in argv else 2), screen
    assert screen.strip()
    assert "\x1b" not in screen
    assert "Traceback" not in screen


@pytest.mark.parametrize("argv", [EXPLAIN, [*PLAIT, "job"]], ids=["reshard", "job"])
def test_colours_are_for_terminals_that_want_them(argv: list[str]) -> None:
    assert "\x1b[" in on_terminal(argv)[1]
    for environ in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert "\x1b" not in on_terminal(argv, environ=environ)[1]
    assert "\x1b" not in piped(argv)


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "environ"), [(60, {}), (80, {"TERM": "dumb"})])
def test_training_on_a_terminal(tmp_path: Path, columns: int, environ: dict[str, str]) -> None:
    job = write_job(tmp_path, steps=6)
    folder = tmp_path / "runs" / NAME
    settings = (f"run.folder={folder}", "run.name=job", "strategy.slices=auto")
    status, screen = on_terminal(command(job, *settings), columns=columns, environ=environ)
    assert status == 0, screen
    assert "\x1b" not in screen
    assert f"the run is in {tmp_path / 'runs'}/{SHOWN}/job" in screen
    assert (folder / "job" / "summary.json").is_file()
    parts = [part for line in screen.replace("\r\n", "\n").split("\n") for part in line.split("\r")]
    live = [part for part in parts if re.search(r"[━─]{8}", part)]
    if "TERM" in environ:
        assert live == []
        assert "\r" not in screen.replace("\r\n", "")
    else:
        assert len(live) >= 5
        assert all(re.match(r"step \d/6  [━─]{8,}  loss \d\.\d{3}  .*\d:\d\d left$", part) for part in live)
        assert max(map(len, live)) < columns


def test_errors_fit_the_terminal_and_never_break_a_path(tmp_path: Path) -> None:
    folder = tmp_path / ("folder-with-hyphens-" * 5) / ("x" * 50)
    for columns in (60, 200):
        status, screen = on_terminal([*PLAIT, "diagnose", str(folder), "--timeline"], columns=columns)
        assert status == 2
        assert str(folder) in screen
        lines = screen.replace("\r", "").splitlines()
        assert all(len(line) <= min(columns, 100) for line in lines if str(tmp_path) not in line)
        assert len(lines) > 1
    done = subprocess.run([*PLAIT, "diagnose", str(folder), "--timeline"], capture_output=True, text=True, check=False)
    assert done.stderr.count("\n") == 1, "one line where there is no terminal"


def test_the_title_of_a_timeline_is_the_path_as_it_is(run: Path) -> None:
    assert str(run).replace("\x1b", "\\x1b") in piped([*PLAIT, "diagnose", str(run), "--timeline"])


def test_settings_can_be_looked_up() -> None:
    help_text = " ".join(plait("train", "--help").stdout.split())
    assert "plait job" in help_text
    assert "docs/job.md" in help_text
    assert "train.steps" in help_text
    every = plait("job").stdout
    for key in ("model.num_layers", "data.text", "train.global_batch_size", "strategy.slices.batch", "run.timeout"):
        assert f"\n{key}: " in every
    (key,) = values("job", "train.steps")["settings"]
    assert key["name"] == "train.steps"
    assert key["default"] == "300"
    sections = [one["name"] for one in values("job")["settings"]]
    tables = ["model", "data", "train", "strategy", "cluster", "plan", "recipe", "run", "slurm", "kubernetes", "place"]
    assert sections == tables


def test_ctrl_c_while_the_code_is_read_is_no_traceback() -> None:
    code = """
import sys, plait.cli
class Interrupted:
    def find_spec(self, name, *_):
        if name == "plait.cli.main":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
plait.cli.run()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
