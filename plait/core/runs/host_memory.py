"""Where copies of a run's state lie in the memory of its hosts, so that ranks which are started again find
them there: files of a file system that is memory.

The launcher makes the folder, in which it says who it is, and removes it. One that was killed cannot: what
collects its run's timeline does it then, or the next launcher. A host of a lab has a folder of its own there
and is not shown the others', as if it were a machine of its own.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp

from plait.core.base.codec.json_text import read_table
from plait.core.base.errors import JobError
from plait.core.base.process import process_since, process_state, where_pids_mean_the_same

OWNER = "owner.json"
"""Whose a folder is."""
SHARED = Path("/dev/shm")
"""Linux's; elsewhere there is none."""


def memory_of(run: Path) -> Path:
    """The folder for the run in ``run``: the same for all who ask."""
    return SHARED / f"plait-{os.geteuid()}-{sha256(str(run.resolve()).encode()).hexdigest()[:16]}"


def open_memory(run: Path) -> None:
    """Make the folder, empty, for this user alone, as this process's; free what dead launchers left. Raises
    JobError where there is no such memory."""
    sweep_memory()
    folder, state = memory_of(run), process_state(os.getpid())
    owner = {"pid": os.getpid(), "started": state.started if state else 0, "place": where_pids_mean_the_same()}
    shutil.rmtree(folder, ignore_errors=True)
    try:
        draft = Path(mkdtemp(dir=SHARED, prefix=f".{folder.name}."))
        try:
            (draft / OWNER).write_text(json.dumps(owner))
            draft.rename(folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    except OSError as error:
        problem = f"{SHARED} cannot hold copies of the state: {error.strerror or error}"
        raise JobError(problem, key="run.memory_every", fix="Set it to 0") from None


def has_copies(run: Path) -> bool:
    """Whether ranks have left any there, which they may go on from."""
    return any(memory_of(run).glob("*/*"))


def close_memory(run: Path) -> None:
    """Free it."""
    shutil.rmtree(memory_of(run), ignore_errors=True)


def sweep_memory() -> None:
    """Free what launchers of this user have left that were killed.

    Known: a folder whose owner is a process of ours. Passed over: one whose owner cannot be read, or whose
    number means nothing here (another container's): nobody can tell whether it lives.
    """
    with suppress(OSError):
        for folder in SHARED.glob(f"plait-{os.geteuid()}-*"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                owner = read_table(folder / OWNER)
                pid, started = owner["pid"], owner["started"]
                known = (
                    isinstance(pid, int) and isinstance(started, int) and owner["place"] == where_pids_mean_the_same()
                )
                if known and process_since(pid, started) is None:
                    shutil.rmtree(folder, ignore_errors=True)


def lose_memory(run: Path, hosts: Collection[str]) -> None:
    """What these hosts had is gone, as it is when a machine fails."""
    with suppress(OSError):
        for folder in memory_of(run).iterdir():
            if folder.name in hosts:
                shutil.rmtree(folder, ignore_errors=True)
