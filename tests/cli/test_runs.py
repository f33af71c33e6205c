"""``plait runs``, ``plait stop`` and ``plait logs`` on runs that go on, hang, have ended, or are
damaged."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.api.runs import RunList, RunView
from plait.core.base.text import Table
from plait.core.runs.lock import RunLock
from tests.support.command import plait, succeed
from tests.support.lab import children
from tests.support.runs import command, wait_for_step, write_job

TIER = "unit"
ATTEMPT = {"attempt": 1, "started": 1.7e9, "world": 2, "hosts": ["n1", "n2"], "resumed": 0, "step": 7, "steps": 7}


def run_folder(folder: Path, name: str, **attempt: Any) -> Path:
    """A run as it lies on a disk."""
    run = folder / name
    (run / "logs").mkdir(parents=True)
    (run / "plan.json").write_text("{}")
    (run / "attempts.jsonl").write_text(json.dumps(ATTEMPT | attempt) + "\n")
    return run


def listed(folder: Path) -> dict[str, dict[str, Any]]:
    """Runs of a folder, by name."""
    done = succeed("runs", folder, "--json")
    return {one["name"]: one for one in json.loads(done.stdout)["runs"]}


# ---- folders ----


def test_each_state_is_told(tmp_path: Path) -> None:
    for name, outcome in (("a", "finished"), ("b", "stopped"), ("c", "failed"), ("d", "running"), ("e", "cut off")):
        run_folder(tmp_path, name, outcome=outcome, why="rank 1 was killed" if outcome == "failed" else "")
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "plan.json").write_text("{}")
    (tmp_path / "no run").mkdir()
    (tmp_path / "file").touch()
    run_folder(tmp_path, "g", outcome="failed")
    with RunLock(tmp_path / "g"):  # between two attempts
        found = listed(tmp_path)
    states = {name: one["state"] for name, one in found.items()}
    assert states == {"a": "ended", "b": "stopped", "c": "failed", "d": "lost", "e": "lost", "f": "new", "g": "running"}
    assert found["a"]["where"] == "n[1-2]" and found["g"]["pid"] == os.getpid()
    shown = plait("runs", tmp_path).stdout
    assert "c failed: rank 1 was killed" in shown and "d lost: its launcher is gone" in shown


@pytest.mark.parametrize(
    ("seconds", "told"), [(5, "5 s ago"), (2051, "34 min ago"), (7500, "2 h 5 min ago"), (1e6, ":")]
)
def test_when_a_run_was_started_is_told_with_its_unit(tmp_path: Path, seconds: float, told: str) -> None:
    run = RunView(name="a", folder=tmp_path, state="ended", started=time.time() - seconds)
    (table,) = RunList(tmp_path, [run]).parts()
    assert isinstance(table, Table)
    assert told in str(table.rows[0])


@pytest.mark.parametrize("damage", [b"", b"\x00" * 64, b'{"attempt": 1', b'[]\n{"attempt": "x"}\n'])
def test_a_damaged_run_is_told_as_far_as_it_can_be_read(damage: bytes, tmp_path: Path) -> None:
    run = run_folder(tmp_path, "a", outcome="finished")
    (run / "attempts.jsonl").write_bytes(damage)
    (run / "metrics.jsonl").write_bytes(b'{"step": 3, "loss": 2.5}\n{"step": 4, "lo')
    (run / "job.toml").write_bytes(b"[model")
    (run / "lock.json").write_bytes(b"{")
    os.utime(run / "lock.json", (1.0, 1.0))
    one = listed(tmp_path)["a"]
    assert one["state"] in ("lost", "unknown") and (one["step"], one["steps"], one["loss"]) == (3, None, 2.5)
    assert plait("stop", run).returncode == 0 and plait("logs", run).returncode == 0


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    run_folder(tmp_path / "runs", "first", outcome="finished")
    done = plait("stop", "frist", folder=tmp_path)
    assert done.returncode == 2 and "did you mean 'first'?" in done.stderr and "There are first" in done.stderr


def test_two_runs_of_a_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    run_folder(tmp_path / "runs", "a", outcome="finished")
    run_folder(tmp_path, "a", outcome="stopped")
    done = plait("stop", "a", folder=tmp_path)
    assert done.returncode == 2 and "are two runs" in done.stderr and str(tmp_path / "runs" / "a") in done.stderr
    for path in (tmp_path / "a", tmp_path / "runs" / "a"):
        assert "does not run" in plait("stop", path, folder=tmp_path).stdout


def test_a_run_of_another_machine_names_it(tmp_path: Path) -> None:
    run = run_folder(tmp_path, "a", outcome="running")
    with RunLock(run):
        said = json.loads((run / "lock.json").read_text()) | {"place": "elsewhere", "host": "n7", "pid": 12}
    (run / "lock.json").write_text(json.dumps(said))
    for kill in ([], ["--kill"]):
        done = plait("stop", run, *kill)
        assert done.returncode == 2 and "process 12" in done.stderr and "nothing was stopped" in done.stderr
        assert f"Run this on n7: {' '.join(['plait stop', str(run), *kill])} (" in done.stderr
        assert "kill 12 on n7 has it save and end" in done.stderr and "counts as lost 60 s after" in done.stderr
    (run / "lock.json").write_text(json.dumps(said | {"job": "ants/7", "host": socket.gethostname()}))
    done = plait("stop", run)
    assert f"Run this on {socket.gethostname()}, in the container or namespace of that process" in done.stderr
    assert "or where squeue shows Slurm job 7: plait stop" in done.stderr
    assert listed(tmp_path)["a"]["state"] == "running"
    os.utime(run / "lock.json", (1.0, 1.0))  # silent for years
    assert listed(tmp_path)["a"]["state"] == "lost"


def test_logs_say_whose_lines_they_are(tmp_path: Path) -> None:
    run = run_folder(tmp_path, "a", outcome="finished")
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5, "tokens_per_second": 1234.5}\nnonsense\n')
    (run / "logs" / "rank-0.log").write_text("one\ntwo\x1b[31m\n")
    (run / "logs" / "rank-10.log").write_text("ten")
    (run / "logs" / "rank-2.log").write_text("a\nb\nc\n")
    shown = plait("logs", run).stdout.splitlines()
    assert shown == ["[steps] step 1  loss 2.5  1,234 tokens/s", "[rank 0] one", r"[rank 0] two\x1b[31m", "[rank 2] a",
                     "[rank 2] b", "[rank 2] c", "[rank 10] ten"]  # fmt: skip
    assert plait("logs", run, "--rank", 2, "--last", 1).stdout == "[rank 2] c\n"
    (run / "logs" / "terminal.log").write_text("preparing\nstep 1/9  loss 2.500\n")
    printed = ["[rank 0] preparing", "[rank 0] step 1/9  loss 2.500"]
    assert plait("logs", run).stdout.splitlines() == printed + shown[1:]
    assert plait("logs", run, "--rank", 0).stdout.splitlines() == printed + shown[1:3]
    (run / "logs" / "slurm-7.log").write_text("step 1\n")
    assert plait("logs", run).stdout.startswith("[slurm 7] step 1\n[rank 0]")
    assert "[rank 10] ten" in plait("logs", run, "--follow").stdout  # it has ended


# ---- runs ----


@pytest.fixture
def going(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run of many steps that has begun to train, and its folder."""
    job = write_job(tmp_path, steps=100_000, every=1000)
    process = subprocess.Popen(command(job), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for_step(process, job, 3)
        yield process, tmp_path / "runs" / "job"
    finally:
        process.kill()
        process.communicate()


@pytest.mark.system
def test_a_run_is_stopped_saved_and_goes_on(going: tuple[subprocess.Popen[str], Path]) -> None:
    process, run = going
    one = listed(run.parent)["job"]
    assert one["state"] == "running" and one["pid"] == process.pid and one["steps"] == 100_000 and one["loss"] > 0
    follower = subprocess.Popen([sys.executable, "-m", "plait.cli.main", "logs", str(run), "--follow"],
                                stdout=subprocess.PIPE, text=True)  # fmt: skip
    done = succeed("stop", run)
    assert "job is stopped after step" in done.stdout, done.stderr
    assert process.wait(60) == 128 + signal.SIGTERM
    said, _ = follower.communicate(timeout=60)
    last = listed(run.parent)["job"]["step"]
    assert f"[rank 0] stopped and saved after step {last}" in said and f"[rank 0] step {last:>6}/100000  loss" in said
    assert "[steps]" not in said, "nothing twice"
    assert f"from step {last}" in done.stdout
    again = succeed("stop", run)
    assert "does not run: it is stopped; nothing was stopped" in again.stdout


@pytest.mark.system
def test_a_run_that_hangs_is_killed(going: tuple[subprocess.Popen[str], Path]) -> None:
    process, run = going
    ranks = [pid for pid in children(process.pid) if b"collect" not in Path(f"/proc/{pid}/cmdline").read_bytes()]
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)
    done = plait("stop", run, "--wait", 1)
    assert done.returncode == 1 and f"plait stop {run} --kill ends it at once" in done.stdout
    done = succeed("stop", run, "--kill")
    assert "job is stopped" in done.stdout, done.stdout + done.stderr
    process.wait(60)
    end = time.monotonic() + 20
    while any(Path(f"/proc/{rank}").exists() for rank in ranks) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


@pytest.mark.system
def test_a_launcher_that_was_stopped_is_let_go_on(going: tuple[subprocess.Popen[str], Path]) -> None:
    process, run = going
    os.kill(process.pid, signal.SIGSTOP)
    done = succeed("stop", run)
    assert "job is stopped" in done.stdout, done.stdout + done.stderr


@pytest.mark.system
def test_a_launcher_that_was_killed_is_lost(going: tuple[subprocess.Popen[str], Path]) -> None:
    process, run = going
    process.kill()
    process.wait()
    assert listed(run.parent)["job"]["state"] == "lost"
    done = succeed("stop", run)
    assert "its launcher is gone; nothing was stopped" in done.stdout
