"""Folders for copies of a run's state in the memory of its hosts (/dev/shm), from which restarted
ranks can resume.

The launcher makes the folder, with its own identity in it, and removes it. If the launcher is
killed, the collector of its run's timeline removes the folder, or else the next launcher. Each host
of a lab has a folder of its own and does not see those of other hosts, as on separate machines.
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
from plait.core.base.process import pid_namespace_key, process_since, process_state

OWNER_FILE = "owner.json"
"""The file that identifies the owner of a folder."""
SHARED = Path("/dev/shm")
"""Linux's file system in memory; other systems have none."""


def memory_of(run: Path) -> Path:
    """Return the memory folder of the run in ``run``, which is the same for all processes."""
    return SHARED / f"plait-{os.geteuid()}-{sha256(str(run.resolve()).encode()).hexdigest()[:16]}"


def open_memory(run: Path) -> None:
    """Make the run's memory folder, empty and private to this user, owned by this process. Folders
    of dead launchers are removed first. Raises JobError if there is no file system in memory."""
    sweep_memory()
    folder, state = memory_of(run), process_state(os.getpid())
    owner = {"pid": os.getpid(), "started": state.started if state else 0, "place": pid_namespace_key()}
    shutil.rmtree(folder, ignore_errors=True)
    try:
        draft = Path(mkdtemp(dir=SHARED, prefix=f".{folder.name}."))
        try:
            (draft / OWNER_FILE).write_text(json.dumps(owner))
            draft.rename(folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    except OSError as error:
        problem = f"{SHARED} cannot hold copies of the state: {error.strerror or error}"
        raise JobError(problem, key="run.memory_every", fix="Set it to 0") from None


def has_copies(run: Path) -> bool:
    """True if ranks have left copies of their state, from which they may resume."""
    return any(memory_of(run).glob("*/*"))


def close_memory(run: Path) -> None:
    """Remove the run's memory folder."""
    shutil.rmtree(memory_of(run), ignore_errors=True)


def sweep_memory() -> None:
    """Remove memory folders of this user's launchers that were killed.

    A folder is kept if its owner is alive, cannot be read, or has a process id of another pid
    namespace, such as another container's: its state is unknown.
    """
    with suppress(OSError):
        for folder in SHARED.glob(f"plait-{os.geteuid()}-*"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                owner = read_table(folder / OWNER_FILE)
                pid, started = owner["pid"], owner["started"]
                known = isinstance(pid, int) and isinstance(started, int) and owner["place"] == pid_namespace_key()
                if known and process_since(pid, started) is None:
                    shutil.rmtree(folder, ignore_errors=True)


def lose_memory(run: Path, hosts: Collection[str]) -> None:
    """Remove the copies of some hosts, as if these machines had failed."""
    with suppress(OSError):
        for folder in memory_of(run).iterdir():
            if folder.name in hosts:
                shutil.rmtree(folder, ignore_errors=True)
