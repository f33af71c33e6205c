"""Ranks that torchrun starts: they plan, lock, train, save and end as ``plait train``'s do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plait.core.record.ring import read_rings
from plait.core.runs.attempts import read_attempts
from plait.core.runs.evidence import RINGS
from plait.core.runs.lock import NAME
from tests.support.ports import own_port
from tests.support.runs import curve, metrics, train, wait_for_step, write_job

pytestmark = pytest.mark.slow


def torchrun(job: Path, *settings: str, options: tuple[str, ...] = ("--nproc-per-node=2",)) -> subprocess.Popen[str]:
    """Begin training by torchrun, in a session of its own."""
    where = () if any(option.startswith("--master") for option in options) else (f"--master-port={own_port()}",)
    argv = [sys.executable, "-m", "torch.distributed.run", *options, *where, "-m", "plait.train.worker", str(job)]
    return subprocess.Popen(
        [*argv, f"run.folder={job.parent / 'runs'}", *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def two_agents(job: Path, *settings: str) -> list[subprocess.Popen[str]]:
    """Two machines of one rank each, both this one. settings: of each machine in turn, if there are
    any."""
    where = ("--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={own_port()}")
    own = [settings[number : number + 1] for number in range(2)]
    return [torchrun(job, *own[number], options=(*where, f"--node-rank={number}")) for number in range(2)]


def test_one_machine(finished: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    process = torchrun(job, "train.log_every=1")
    output, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    assert "trained 12 steps" in output
    assert curve(job) == curve(finished)
    assert not (tmp_path / "runs" / "job" / NAME).exists()
    assert (tmp_path / "runs" / "job" / "plan.json").is_file()
    (one,) = read_attempts(tmp_path / "runs" / "job")
    assert (one.outcome, one.world, one.resumed, one.step, one.steps) == ("finished", 2, 0, 12, 12)
    assert one.restart_seconds and one.first_step_seconds and one.plan


def test_two_machines(finished: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    agents = two_agents(job)
    ends = [agent.communicate(timeout=180) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], ends
    assert curve(job) == curve(finished)


def test_machines_with_other_settings_are_refused_by_key(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    agents = two_agents(job, "train.learning_rate=0.001", "train.learning_rate=0.002")
    try:
        _, errors = agents[1].communicate(timeout=120)
        text = " ".join(errors.split())
        assert agents[1].returncode != 0
        assert "train.learning_rate: rank 1 was given 0.002 and rank 0 0.001" in text
    finally:
        for agent in agents:
            agent.terminate()
        for agent in agents:
            agent.communicate(timeout=120)
    assert metrics(job) == []


def test_sigterm_saves_and_the_same_command_resumes(finished: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path, every=0)
    process = torchrun(job)
    wait_for_step(process, job, 4)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "stopped and saved after step" in output, output + errors
    assert not (tmp_path / "runs" / "job" / NAME).exists()
    again = torchrun(job)
    output, errors = again.communicate(timeout=180)
    assert again.returncode == 0, errors
    assert "resuming after step" in output
    assert curve(job) == curve(finished)
    first, second = read_attempts(tmp_path / "runs" / "job")
    assert (first.outcome, second.outcome) == ("stopped", "finished")
    assert (second.resumed, second.step) == (first.step, 12)


def test_a_restart_of_torchruns_is_one_more_attempt(finished: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path, every=2)
    process = torchrun(job, options=("--nproc-per-node=2", "--max-restarts=1"))
    wait_for_step(process, job, 4)
    rings = read_rings(tmp_path / "runs" / "job" / RINGS, [])
    os.kill(next(one.header.pid for one in rings if one.rank == 1), signal.SIGKILL)
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert curve(job) == curve(finished), output
    first, second = read_attempts(tmp_path / "runs" / "job")
    assert first.outcome in ("failed", "stopped", "cut off")  # as rank 0 saw it
    assert (second.outcome, second.attempt, second.step) == ("finished", 2, 12)
    assert 2 <= second.resumed <= first.step


def test_the_wrong_number_of_ranks_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    process = torchrun(job, "strategy.tp=4")
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    text = " ".join(errors.split())
    assert "plait: " in text
    assert "the job needs 4 ranks, and 2 were started" in text
    assert "--nproc-per-node" in text
    assert not (tmp_path / "runs").exists()


def test_what_plait_train_refuses_is_refused_once(tmp_path: Path) -> None:
    process = torchrun(write_job(tmp_path), "data.text=nowhere")
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0 and "nowhere: no such file" in " ".join(errors.split())
    assert sum(line.startswith("plait: ") for line in errors.splitlines()) == 1, errors


def test_a_run_that_is_going_on_is_refused(tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=100000)
    process = torchrun(job)
    try:
        wait_for_step(process, job, 2)
        before = metrics(job)[-1]["step"]
        second = train(job, status=2)
        assert "is in use by process" in " ".join(second.stderr.split())
        _wait_beyond(process, job, before)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def _wait_beyond(process: subprocess.Popen[str], job: Path, step: int) -> None:
    end = time.monotonic() + 60
    while metrics(job)[-1]["step"] <= step:
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)


def test_without_torchrun_one_rank_trains_alone(tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=3)
    done = subprocess.run(
        [sys.executable, "-m", "plait.train.worker", str(job), f"run.folder={tmp_path / 'runs'}", "strategy.tp=1"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(metrics(job)) == 3


def test_a_rank_that_waits_in_vain_says_so_where_no_launcher_does(tmp_path: Path) -> None:
    """Ranks as a scheduler starts them: the store is rank 0's, nobody watches."""
    job = write_job(tmp_path, steps=100000)
    port = own_port()
    argv = [sys.executable, "-m", "plait.train.worker", str(job), f"run.folder={tmp_path / 'runs'}", "run.timeout=4"]
    ranks = [
        subprocess.Popen(
            argv,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(port)},
        )
        for rank in range(2)
    ]
    try:
        wait_for_step(ranks[0], job, 2)
        ranks[1].send_signal(signal.SIGSTOP)
        _, errors = ranks[0].communicate(timeout=90)
        assert ranks[0].returncode == 1
        assert "plait: rank 0 timed out after 4 s (run.timeout) waiting for another rank while step" in errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
