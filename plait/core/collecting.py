"""Starting the agent that collects what the ranks of a host record, beside the ranks and in a process of its
own, so that a rank that is killed takes nothing with it.

Whoever starts ranks starts it: ``plait train`` for this machine and for a lab, the node's agent under Slurm
and Kubernetes, and the first rank of a machine where none of these did (torchrun).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from plait.core.errors import JobError, PlaitError
from plait.core.plan import Plan
from plait.core.settings import RunSection

MODULE = "plait.launch.collect"
LOGGERS = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""The package that each of ``run.loggers`` needs."""
PATIENCE = 60.0
"""Seconds that it may take to write what is left when the ranks have ended."""


@contextmanager
def collecting(folder: Path, first: int, count: int, *, is_rank: bool = False) -> Generator[None]:
    """What ranks ``first`` to ``first + count - 1`` of the run in ``folder`` record is collected while the
    block runs, and when it ends to the last record. is_rank: this process is one of them, and is not waited
    for if it fails.

    Raises JobError for a logger that is not installed here.
    """
    run = _settings(folder)
    check_loggers(run.loggers)
    if not (run.timeline_steps or run.metrics_port or run.loggers):
        yield
        return
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE, str(folder), str(first), str(count)],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    failed = True
    try:
        yield
        failed = False
    finally:
        with suppress(OSError):
            process.stdin.close()  # which tells it, as our end would
        if not (failed and is_rank):
            _wait(process)


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        print("plait: the timeline could not be written in time; its last steps are missing", file=sys.stderr)
        process.kill()
        process.wait()


def check_loggers(loggers: tuple[str, ...]) -> None:
    """Raise JobError, naming the package, for a logger that is not installed."""
    for name in loggers:
        if find_spec(LOGGERS[name]) is None:
            fix = f"Install it with: pip install {LOGGERS[name]}, or leave it out of run.loggers"
            raise JobError(f"'{name}' needs the package {LOGGERS[name]}, which is not installed", key="run.loggers",
                           fix=fix)  # fmt: skip


def _settings(folder: Path) -> RunSection:
    try:
        plan = Plan.read(folder / "plan.json")
    except PlaitError:
        return RunSection()
    return plan.job.run if plan.job else RunSection()
