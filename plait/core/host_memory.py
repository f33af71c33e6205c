"""Where copies of a run's state lie in the memory of its hosts, so that ranks which are started again find
them there: files of a file system that is memory.

The launcher makes the folder and removes it: what it does not remove stays in memory. A host of a lab has a
folder of its own there and is not shown the others', as if it were a machine of its own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from plait.core.errors import JobError

SHARED = Path("/dev/shm")
"""Linux's; elsewhere there is none."""


def memory_of(run: Path) -> Path:
    """The folder for the run in ``run``: the same for all who ask."""
    return SHARED / f"plait-{os.geteuid()}-{sha256(str(run.resolve()).encode()).hexdigest()[:16]}"


def open_memory(run: Path) -> None:
    """Make the folder, empty, for this user alone. Raises JobError where there is no such memory."""
    folder = memory_of(run)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        problem = f"{SHARED} cannot hold copies of the state: {error.strerror or error}"
        raise JobError(problem, key="run.memory_every", fix="Set it to 0") from None


def close_memory(run: Path) -> None:
    """Free it."""
    shutil.rmtree(memory_of(run), ignore_errors=True)


def lose_memory(run: Path, hosts: Collection[str]) -> None:
    """What these hosts had is gone, as it is when a machine fails."""
    with suppress(OSError):
        for folder in memory_of(run).iterdir():
            if folder.name in hosts:
                shutil.rmtree(folder, ignore_errors=True)
