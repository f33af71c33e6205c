"""The list of running labs: one small file per lab, so that another terminal can list labs and
reach their networks."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import stat
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from operator import index
from pathlib import Path
from typing import Any

from plait.core.base.codec.json_text import read_table
from plait.core.base.env import inherited
from plait.core.base.errors import JobError, LaunchError
from plait.core.base.files import explained
from plait.lab.network import LabNetwork
from plait.lab.spec import LabSpec

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class LabEntry:
    """A running lab as other processes see it. pid, started: its process and that process's start
    time, in clock ticks since boot. starter: the same for the process that started it (usually a
    shell). keeper_started: start time of the network's keeper. command: what its ranks run."""

    name: str
    pid: int
    started: int  # clock ticks since boot; with the pid it identifies one process unambiguously
    starter: tuple[int, int]
    spec: LabSpec
    network: LabNetwork
    keeper_started: int
    command: tuple[str, ...]

    @property
    def alive(self) -> bool:
        """True if the lab's process and its network's keeper are both running."""
        return start_time(self.pid) == self.started and start_time(self.network.keeper) == self.keeper_started

    def report(self) -> dict[str, Any]:
        """Return the entry of ``plait lab list --json``: the lab, and the present state of each
        host's and minipod's links."""
        hosts = [asdict(state) for state in self.network.state()]
        return {
            "name": self.name,
            "pid": self.pid,
            "spec": asdict(self.spec),
            "command": list(self.command),
            "hosts": hosts,
            "pods": [asdict(state) for state in self.network.pod_state()],
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LabEntry:
        """Build an entry from the dictionary that ``asdict`` made. Raises KeyError, TypeError,
        ValueError or JobError for any other value."""
        # Decoded by hand: a lab needs only the standard library.
        spec, told = LabSpec(**values["spec"]), values["network"]
        words = [values["name"], *values["command"]]
        if not all(isinstance(word, str) for word in words) or not isinstance(told["userns"], bool):
            raise TypeError("no entry of a lab")
        shell, since = values["starter"]
        numbers = (shell, since, values["pid"], values["started"], values["keeper_started"], told["keeper"])
        shell, since, pid, started, keeper_started, keeper, *fds = map(index, (*numbers, *told["fds"]))
        network = LabNetwork(keeper, tuple(fds), told["userns"], spec)
        return LabEntry(words[0], pid, started, (shell, since), spec, network, keeper_started, tuple(words[1:]))


def runtime_dir() -> Path:
    """Return the folder that lists this user's running labs, created if absent; no other user can
    write there. Raises LaunchError if the folder cannot be made or belongs to another user."""
    base = inherited().get("XDG_RUNTIME_DIR")
    folder = (
        Path(base, "plait-lab")
        if base and os.path.isdir(base)
        else Path(tempfile.gettempdir(), f"plait-lab-{os.geteuid()}")
    )
    with explained(f"{folder} cannot hold the list of labs", fix="Remove what is there, or set XDG_RUNTIME_DIR"):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
        raise LaunchError(
            f"{folder} is a link, or belongs to another user. Remove it, or set XDG_RUNTIME_DIR to a folder of "
            "your own."
        )
    return folder


def _fields(pid: int) -> list[bytes] | None:
    """Return the fields of /proc/PID/stat from the process state on (proc(5)); None if the process
    has ended (zombies included)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name before them may contain any character
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields


def start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; None if it has ended."""
    fields = _fields(pid)
    return None if fields is None else int(fields[19])


def _lineage() -> set[tuple[int, int]]:
    """Return this process and its ancestors as (pid, start time), as in ``LabEntry.starter``.
    Process 1, every process's ancestor, is left out."""
    found, pid = set[tuple[int, int]](), os.getpid()
    while pid > 1 and (fields := _fields(pid)):
        found.add((pid, int(fields[19])))
        pid = int(fields[1])
    return found


def register(name: str | None, spec: LabSpec, network: LabNetwork, command: Sequence[str]) -> LabEntry:
    """Add a lab of this process to the list, under ``name`` or the first free name of lab1, lab2,
    ... Raises JobError if the name is invalid or taken."""
    if name is not None and not _NAME.fullmatch(name):
        raise JobError(
            f"{name!r} cannot name a lab", fix="Use letters, digits, '.', '_' and '-', beginning with a letter or digit"
        )
    pid, keeper, shell = os.getpid(), network.keeper, os.getppid()
    with _locked() as folder:
        taken = {entry.name for entry in _read(folder)}
        if name in taken:
            raise JobError(f"a lab called {name!r} is running already", fix="Choose another name")
        chosen = name or next(f"lab{number}" for number in count(1) if f"lab{number}" not in taken)
        starter = (shell, start_time(shell) or 0)
        entry = LabEntry(
            chosen, pid, start_time(pid) or 0, starter, spec, network, start_time(keeper) or 0, tuple(command)
        )  # fmt: skip
        (folder / f"{chosen}.json").write_text(json.dumps(asdict(entry)))
    return entry


def unregister(entry: LabEntry) -> None:
    """Remove a lab from the list."""
    with _locked() as folder:
        (folder / f"{entry.name}.json").unlink(missing_ok=True)


def running() -> list[LabEntry]:
    """Return this user's running labs, sorted by name; remove entries of crashed labs."""
    with _locked() as folder:
        return _read(folder)


def _read(folder: Path) -> list[LabEntry]:
    entries: list[LabEntry] = []
    for path in sorted(folder.glob("*.json")):
        try:
            entry = LabEntry.from_dict(read_table(path))
        except (OSError, ValueError, KeyError, TypeError, JobError):
            entry = None  # half written by a killed lab, of another version, or no file
        if entry is not None and entry.alive:
            entries.append(entry)
        else:
            with suppress(OSError):  # a folder, which no lab has made
                path.unlink()
    return entries


@contextmanager
def _locked() -> Generator[Path]:
    """Lock the list for this process; yield its folder."""
    folder = runtime_dir()
    with explained(f"{folder / 'lock'} cannot be opened", fix="Remove it"):
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(lock)


def find(name: str | None = None) -> LabEntry:
    """Return the running lab called ``name``; without a name, the one lab that this process's shell
    has started. Raises JobError if there is none, or several."""
    entries = running()
    if not entries:
        raise JobError("no lab is running", fix="Start one with: plait lab run 2x1@1gbit -- COMMAND")
    names = ", ".join(entry.name for entry in entries)
    if name is None:
        lineage = _lineage()
        own = [entry for entry in entries if {entry.starter, (entry.pid, entry.started)} & lineage]
        if len(own) == 1:
            return own[0]
        if own:
            names = ", ".join(entry.name for entry in own)
            raise JobError(f"several labs of this shell are running ({names})", fix="Say which one with --name NAME")
        problem = f"no lab that is running ({names}) was started by this shell"
        raise JobError(problem, fix="Say which one with --name NAME, if it is yours to change")
    for entry in entries:
        if entry.name == name:
            return entry
    raise JobError(f"no lab called {name!r} is running", fix=f"Running now: {names}")


def stop(entry: LabEntry, seconds: float) -> bool:
    """Send SIGTERM to a lab's process; return True if the lab has ended within ``seconds``."""
    end = time.monotonic() + seconds
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(entry.pid)
        try:
            if entry.alive:
                signal.pidfd_send_signal(handle, signal.SIGTERM)
        finally:
            os.close(handle)
    while entry.alive and time.monotonic() < end:
        time.sleep(0.02)
    return not entry.alive
