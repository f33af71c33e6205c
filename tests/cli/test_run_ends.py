"""How a run ends when it is told to, when somebody is silent, when its folder is taken away, when
another start is there first."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from plait.core.base.errors import LaunchError
from plait.core.runs.attempts import read_attempts
from plait.core.runs.host_memory import memory_of
from plait.core.runs.lock import NAME, RunLock
from tests.support.lab import why_no_lab
from tests.support.runs import (
    command,
    curve,
    kill_rank,
    metrics,
    rank_pids,
    start,
    train,
    wait_for_step,
    write_job,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_saves_and_the_same_command_resumes(
    finished: Path, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    job = write_job(tmp_path, every=0)
    process = start(job)
    wait_for_step(process, job, 4)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    assert "stopped and saved after step" in output
    assert f"{number.name}: stopping after this step" in errors
    train(job)
    assert curve(job) == curve(finished)


def test_sigterm_to_one_rank_stops_the_run_as_sigterm_to_the_launcher_does(tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=100000, every=0)
    process = start(job)
    wait_for_step(process, job, 2)
    os.kill(rank_pids(process)[1], signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert "stopped and saved after step" in output
    assert "rank 1 got SIGTERM" in errors


def test_the_terminal_is_closed(finished: Path, tmp_path: Path) -> None:
    """Then what is printed goes nowhere, and the run is saved all the same."""
    job = write_job(tmp_path, every=0)
    master, terminal = os.openpty()
    code = (
        "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "os.execvp(sys.argv[1], sys.argv[1:])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command(job)], stdin=terminal, stdout=terminal, stderr=terminal, text=True
    )
    os.close(terminal)
    reader = threading.Thread(target=_read_all, args=(master,), daemon=True)
    reader.start()
    wait_for_step(process, job, 4)
    os.close(master)  # hangs up
    assert process.wait(timeout=60) == 129
    last = metrics(job)[-1]["step"]
    assert (tmp_path / "runs" / "job" / "checkpoints" / f"step-{last:08d}").is_dir()
    train(job)
    assert curve(job) == curve(finished)


def _read_all(descriptor: int) -> None:
    try:
        while os.read(descriptor, 1 << 16):
            pass
    except OSError:
        pass


@pytest.mark.parametrize("moment", [0.3, 1.5])
def test_sigterm_in_a_scripts_background_job_at_any_early_moment(tmp_path: Path, moment: float) -> None:
    """Where SIGINT is ignored; while ranks import, meet, prepare."""
    job = write_job(tmp_path, steps=100000)
    process = subprocess.Popen(["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command(job)], stderr=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True, start_new_session=True)  # fmt: skip
    _until(lambda: bool(rank_pids(process)))
    ranks = rank_pids(process)
    time.sleep(moment)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert "SIGTERM" in errors
    _until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
    assert not (tmp_path / "runs" / "job" / NAME).exists()


def _until(true: object, timeout: float = 60) -> None:
    assert callable(true)
    end = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=100000)
    process = start(job, "run.timeout=6", "run.restarts=0")
    wait_for_step(process, job, 3)
    os.kill(rank_pids(process)[1], signal.SIGSTOP)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 1, errors
    text = " ".join(errors.split())
    assert re.search(r"rank 1 has not answered for \d+ s \(.*its process is stopped", text), text


def test_a_run_listens_on_loopback_and_a_second_start_changes_nothing(tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=100000)
    process = start(job)
    try:
        wait_for_step(process, job, 2)
        listening = {address for pid in [process.pid, *rank_pids(process)] for address in _listening(pid)}
        assert listening == {"127.0.0.1"}, "the store and gloo are nobody else's"
        before = (tmp_path / "runs" / "job" / "job.toml").read_bytes()
        second = train(job, "strategy.tp=1", status=2)
        text = " ".join(second.stderr.split())
        assert f"in use by process {process.pid}" in text
        assert "since" in text
        assert "Traceback" not in text
        assert (tmp_path / "runs" / "job" / "job.toml").read_bytes() == before
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
    train(job, "train.steps=3")  # the holder is dead


@pytest.mark.parametrize("what", ["the folder", "the lock"])
def test_a_run_whose_folder_or_lock_is_taken_away_is_an_error(tmp_path: Path, what: str) -> None:
    job = write_job(tmp_path, steps=100000, every=0)
    process = start(job)
    wait_for_step(process, job, 2)
    run = tmp_path / "runs" / "job"
    if what == "the folder":
        run.rename(tmp_path / "away")  # at once, so that nothing is written in between
        shutil.rmtree(tmp_path / "away")
    else:
        (run / NAME).unlink()
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 1, errors
    assert "Traceback" not in errors
    text = " ".join(errors.split())
    assert str(run) in text
    assert re.search(r"was removed or (renamed|moved)", text)
    assert run.exists() == (what == "the lock"), "nothing is written where the folder was"


def test_a_run_whose_folder_goes_just_before_its_end_is_an_error(tmp_path: Path) -> None:
    """Sooner than anybody looks at the lock."""
    job = write_job(tmp_path, steps=30, every=0)
    process = start(job)
    wait_for_step(process, job, 25)
    (tmp_path / "runs" / "job").rename(tmp_path / "away")
    _, errors = process.communicate(timeout=90)
    assert process.returncode not in (0, None), errors
    assert "Traceback" not in errors


def _listening(pid: int) -> set[str]:
    """The addresses on which a process listens."""
    sockets = set[str]()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(descriptor))
        except FileNotFoundError:  # closed meanwhile
            continue
    found = set[str]()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                raw = bytes.fromhex(words[1].partition(":")[0])
                groups = [raw[i : i + 4][::-1] for i in range(0, len(raw), 4)]
                address = b"".join(groups)
                found.add(
                    ".".join(map(str, address[-4:])) if table == "tcp" or address[:12] == MAPPED else address.hex()
                )
    return found


MAPPED = b"\0" * 10 + b"\xff\xff"


@pytest.mark.lab
def test_sigterm_in_a_lab_saves(tmp_path: Path) -> None:
    if reason := why_no_lab():
        pytest.skip(reason)
    job = write_job(tmp_path, steps=100000, every=0)
    process = start(job, "--on", "lab:2x1@1gbit")
    wait_for_step(process, job, 2)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=90)
    assert process.returncode == 143, errors
    assert "stopped and saved after step" in output


def test_a_killed_rank_is_started_again_by_itself_and_the_curve_is_the_same(finished: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    process = start(job)
    wait_for_step(process, job, 9)
    kill_rank(process, 1)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    text = " ".join(errors.split())
    assert "rank 1 was killed by SIGKILL" in text
    assert "starting again in 1 s from the checkpoint of step" in text
    assert "the run goes on from step" in text
    assert re.search("resuming after step [48]", output)
    assert curve(job) == curve(finished)
    first, second = read_attempts(tmp_path / "runs" / "job")
    assert (first.outcome, second.outcome, second.step) == ("failed", "finished", 12)


def test_ctrl_c_while_it_waits_to_start_again_and_no_second_start_meanwhile(finished: Path, tmp_path: Path) -> None:
    job, run = write_job(tmp_path, every=0), tmp_path / "runs" / "job"
    process = start(job)
    wait_for_step(process, job, 2)
    kill_rank(process, 0)
    _until((run / "logs" / "attempt-1").is_dir)
    with pytest.raises(LaunchError, match=f"in use by process {process.pid}"), RunLock(run):
        pass
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "SIGINT: not started again" in errors
    train(job)
    assert curve(job) == curve(finished)


def test_states_in_memory_are_newer_than_checkpoints_and_are_removed(finished: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path, every=0)
    process = start(job, "run.memory_every=2")
    wait_for_step(process, job, 9)
    assert memory_of(tmp_path / "runs" / "job").is_dir()
    kill_rank(process, 1)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert re.search("the state after step (8|10) is still in memory", output)
    assert curve(job) == curve(finished)
    assert not memory_of(tmp_path / "runs" / "job").exists()


def test_ranks_and_states_in_memory_go_when_the_launcher_is_killed(tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=100_000, every=0)
    process = start(job, "run.memory_every=2")
    wait_for_step(process, job, 5)
    folder, ranks = memory_of(tmp_path / "runs" / "job"), rank_pids(process)
    assert folder.is_dir()
    process.kill()
    process.communicate(timeout=60)
    _until(lambda: not folder.exists() and not any(Path(f"/proc/{pid}").exists() for pid in ranks))
