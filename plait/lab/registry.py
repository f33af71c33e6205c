"""Which labs run now: one small file per lab, so that another terminal can list them and reach their
networks."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from operator import index
from pathlib import Path
from typing import Any

from plait.core.base.codec.json_text import read_table
from plait.core.base.errors import JobError
from plait.core.base.files import explained
from plait.lab.environment import runtime_dir
from plait.lab.network import LabNetwork
from plait.lab.spec import LabSpec

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class LabEntry:
    """A running lab as other processes see it. starter: the process that started it (a shell, most often) by
    its number and when it began itself."""

    name: str
    pid: int
    started: int  # clock ticks since boot: with the pid it names one process for ever
    starter: tuple[int, int]
    spec: LabSpec
    network: LabNetwork
    keeper_started: int
    command: tuple[str, ...]

    @property
    def alive(self) -> bool:
        """Whether the lab and the keeper of its network both run still."""
        return start_time(self.pid) == self.started and start_time(self.network.keeper) == self.keeper_started

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        network = {"keeper": self.network.keeper, "fds": list(self.network.fds), "userns": self.network.userns}
        return {
            "name": self.name,
            "pid": self.pid,
            "started": self.started,
            "starter": self.starter,
            "spec": str(self.spec),
            "network": network,
            "keeper_started": self.keeper_started,
            "command": list(self.command),
        }

    def report(self) -> dict[str, Any]:
        """What ``plait lab list --json`` shows: the lab, and each host's link as it is now."""
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
        """The inverse of :meth:`to_dict`. Raises KeyError, TypeError, ValueError or JobError for anything
        else."""
        spec, told = LabSpec.parse(values["spec"]), values["network"]  # by hand: a lab needs Python alone
        words = [values["name"], *values["command"]]
        if not all(isinstance(word, str) for word in words) or not isinstance(told["userns"], bool):
            raise TypeError("no entry of a lab")
        shell, since = values["starter"]
        numbers = (shell, since, values["pid"], values["started"], values["keeper_started"], told["keeper"])
        shell, since, pid, started, keeper_started, keeper, *fds = map(index, (*numbers, *told["fds"]))
        network = LabNetwork(keeper, tuple(fds), told["userns"], spec)
        return LabEntry(words[0], pid, started, (shell, since), spec, network, keeper_started, tuple(words[1:]))


def _fields(pid: int) -> list[bytes] | None:
    """What the kernel says of a process from its state on (proc(5)); None if it has ended (a zombie has)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name before it may hold anything
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it has ended."""
    fields = _fields(pid)
    return None if fields is None else int(fields[19])


def _lineage() -> set[tuple[int, int]]:
    """This process and those above it, as ``LabEntry.starter`` has one; but for the first of the system,
    which is everybody's."""
    found, pid = set[tuple[int, int]](), os.getpid()
    while pid > 1 and (fields := _fields(pid)):
        found.add((pid, int(fields[19])))
        pid = int(fields[1])
    return found


def note(name: str | None, spec: LabSpec, network: LabNetwork, command: Sequence[str]) -> LabEntry:
    """Enter a lab of this process in the list, under ``name`` or the first free of lab1, lab2, ..."""
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
        (folder / f"{chosen}.json").write_text(json.dumps(entry.to_dict()))
    return entry


def strike(entry: LabEntry) -> None:
    """Take a lab off the list."""
    with _locked() as folder:
        (folder / f"{entry.name}.json").unlink(missing_ok=True)


def running() -> list[LabEntry]:
    """The labs of this user that run now, by name; what crashed labs left in the list is removed."""
    with _locked() as folder:
        return _read(folder)


def _read(folder: Path) -> list[LabEntry]:
    entries: list[LabEntry] = []
    for path in sorted(folder.glob("*.json")):
        try:
            entry = LabEntry.from_dict(read_table(path))
        except (OSError, ValueError, KeyError, TypeError, JobError):
            entry = None  # half written by a lab that was killed, by another version, or no file
        if entry is not None and entry.alive:
            entries.append(entry)
        else:
            with suppress(OSError):  # a folder, which is none of ours
                path.unlink()
    return entries


@contextmanager
def _locked() -> Iterator[Path]:
    """The folder of the list, for one process at a time."""
    folder = runtime_dir()
    with explained(f"{folder / 'lock'} cannot be opened", fix="Remove it"):
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(lock)


def find(name: str | None = None) -> LabEntry:
    """The running lab of that name, or the one that this process's shell has started. Raises JobError."""
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
    """Ask a lab to end, as SIGTERM to its process does; whether it has ended within so many seconds."""
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
