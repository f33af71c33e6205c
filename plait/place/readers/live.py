"""A running cluster manager, asked by its own commands."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from plait.core.base.errors import JobError

SECONDS = 60.0
"""That a command may take."""
SOURCES: dict[str, tuple[tuple[str, ...], ...]] = {
    "slurm:": (
        ("scontrol", "show", "topology"),
        ("scontrol", "-o", "show", "nodes"),
        ("squeue", "-h", "-t", "R,CG,CF", "-o", "%i|%e|%N"),
    ),
    "kubernetes:": (("kubectl", "get", "nodes,pods", "--all-namespaces", "-o", "json"),),
}
"""The commands of each: the first tells the wires, the others states."""
SQUEUE_HEADER = "JOBID|END_TIME|NODELIST\n"


def answers(source: str) -> list[tuple[str, str]]:
    """(command, what it printed) for every command of a source. Raises JobError for one that is not there or
    fails."""
    found: list[tuple[str, str]] = []
    for command in SOURCES[source]:
        text = _answer(command)
        found.append((" ".join(command), (SQUEUE_HEADER if command[0] == "squeue" else "") + text))
    return found


def _answer(command: Sequence[str]) -> str:
    shown = " ".join(command)
    if not shutil.which(command[0]):
        raise JobError(f"there is no command {command[0]} here", fix="Give a file with what it prints elsewhere")
    try:
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise JobError(f"'{shown}' has not answered within {SECONDS:.0f} s") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise JobError(f"'{shown}' failed: {said[-1][:200] if said else f'status {done.returncode}'}")
    return done.stdout.decode(errors="replace")
