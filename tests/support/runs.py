"""Starting ``plait train`` as a user would, on a job small enough for a test."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.lab import children

JOB = """
[model]
family = "{family}"
num_layers = 2
hidden = 32
num_heads = 4
{more}

[data]
text = "text"
sequence_length = 16
eval_fraction = 0.1

[train]
steps = {steps}
global_batch_size = 4
micro_batch_size = 0
learning_rate = 1e-2
warmup_steps = 2
eval_every = 5
eval_batches = 2
checkpoint_every = {every}
log_every = 1

[strategy]
tp = 2
slices = {{ batch = 2, columns = 1 }}
"""


def write_job(folder: Path, *, steps: int = 12, every: int = 4, family: str = "gpt", more: str = "") -> Path:
    """A job file and its corpus in ``folder``."""
    text = folder / "text"
    text.mkdir(exist_ok=True)
    for number in range(12):
        (text / f"{number}.txt").write_text(
            "".join(f"line {i} of file {number} says {i * number % 97}\n" for i in range(120))
        )
    job = folder / "job.toml"
    job.write_text(JOB.format(steps=steps, every=every, family=family, more=more))
    return job


def command(job: Path, *settings: str) -> list[str]:
    return [sys.executable, "-m", "plait.cli.main", "train", str(job), f"run.folder={job.parent / 'runs'}", *settings]


def train(
    job: Path,
    *settings: str,
    environ: dict[str, str] | None = None,
    timeout: float = 120,
    status: int | None = 0,
) -> subprocess.CompletedProcess[str]:
    """Train to the end. status: with which it ends; None: with any."""
    done = subprocess.run(
        command(job, *settings),
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **(environ or {})},
        check=False,
    )
    assert status in (None, done.returncode), done.stdout + done.stderr
    return done


def trained(folder: Path) -> Path:
    """The job of a run in ``folder`` that was never disturbed."""
    job = write_job(folder)
    train(job)
    return job


def assert_refused(done: subprocess.CompletedProcess[str], *says: str) -> None:
    """Exit status 2 and one clear paragraph."""
    assert done.returncode == 2, done.stdout + done.stderr
    text = " ".join(done.stderr.split())
    assert text.startswith("plait: ")
    assert "Traceback" not in text
    for word in says:
        assert word in text


def start(job: Path, *settings: str) -> subprocess.Popen[str]:
    """Begin training, in a session of its own."""
    return subprocess.Popen(
        command(job, *settings), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def stopped_after(job: Path, step: int, *settings: str) -> str:
    """Begin training and ask it to stop after ``step``: what it said, once it has saved."""
    process = start(job, *settings)
    wait_for_step(process, job, step)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, output + errors
    return output


def metrics(job: Path, name: str = "job") -> list[dict[str, Any]]:
    """What the run wrote, a dict per step."""
    path = job.parent / "runs" / name / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def on_terminal(
    argv: list[str],
    *,
    columns: int = 80,
    environ: dict[str, str] | None = None,
    timeout: float = 120,
    folder: Path | None = None,
) -> tuple[int, str]:
    """Run a command on a terminal of its own: its exit status, and all that came to the screen."""
    main, side = pty.openpty()
    termios.tcsetwinsize(side, (24, columns))
    env = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS", "TERM", "LINES")}
    process = subprocess.Popen(
        argv,
        stdin=side,
        stdout=side,
        stderr=side,
        env={**env, "TERM": "xterm-256color", **(environ or {})},
        cwd=folder,
    )
    os.close(side)
    came, end = b"", time.monotonic() + timeout
    with open(main, "rb", buffering=0) as screen, suppress(OSError):  # EIO: the last writer has gone
        while time.monotonic() < end and (chunk := screen.read(1 << 16)):
            came += chunk
    if process.poll() is None and time.monotonic() >= end:
        process.kill()
    return process.wait(timeout=60), came.decode()


def wait_for_step(process: subprocess.Popen[str], job: Path, step: int, name: str = "job", timeout: float = 90) -> None:
    """Return when the run has written the metrics of ``step``, or has ended."""
    end = time.monotonic() + timeout
    while time.monotonic() < end and process.poll() is None:
        if any(m["step"] >= step for m in metrics(job, name)):
            return
        time.sleep(0.02)
    assert process.poll() is not None, f"step {step} did not come within {timeout} s"


def rank_pids(process: subprocess.Popen[str]) -> list[int]:
    """Processes of the ranks, in rank order; the launcher has other children too."""
    found: dict[int, int] = {}
    for pid in children(process.pid):
        with suppress(OSError):  # ended meanwhile
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            if name.startswith("plait-rank-"):
                found[int(name.rpartition("-")[2])] = pid
    return [found[rank] for rank in sorted(found)]


def kill_rank(process: subprocess.Popen[str], rank: int) -> None:
    """Kill one rank without warning."""
    os.kill(rank_pids(process)[rank], signal.SIGKILL)


def start_and_kill(job: Path, rank: int, step: int, *settings: str) -> None:
    """Begin training and kill a rank after ``step``: the run, which is not restarted, fails and
    names it."""
    process = start(job, "run.restarts=0", *settings)
    wait_for_step(process, job, step)
    kill_rank(process, rank)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"rank {rank} was killed by SIGKILL" in errors


def curve(job: Path, name: str = "job") -> list[tuple[int, float, float, float | None]]:
    """(step, loss, norm, evaluation loss), exactly as written."""
    return [(m["step"], m["loss"], m["norm"], m.get("eval_loss")) for m in metrics(job, name)]
