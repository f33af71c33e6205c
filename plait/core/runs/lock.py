"""A lock that allows one run in a folder at a time, even if several machines share the folder.

The lock is a file that names its holder. A hard link creates it atomically with its contents, on
NFS too. A holder whose process id is valid in this pid namespace is looked up by id and start time.
Any other holder is presumed dead if it has not touched its file for ``EXPIRES`` seconds. ``flock``
would be simpler, but many shared file systems lack it.

A dead holder's lock is replaced, never removed and made again. The process that holds the lock *of
that lock* renames it over the dead one. So exactly one of many starting processes wins, even if one
of them is killed meanwhile.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pwd
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

from plait.core.base.cluster_env import cluster_job
from plait.core.base.codec.data import decode
from plait.core.base.codec.json_text import parse_table
from plait.core.base.errors import JobError, LaunchError, RunLost
from plait.core.base.files import explained
from plait.core.base.process import pid_namespace_key, process_since, process_state

NAME = "lock.json"
BEAT = 5.0
"""The seconds between two touches of the file."""
EXPIRES = 60.0
"""The seconds without a touch after which a holder on another machine is presumed dead."""
LONGEST = 1 << 16
"""The most bytes that are read of a lock file."""
CLAIM = 10.0
"""The seconds to wait for another process that is about to replace a dead holder's lock."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that holds a lock. ``place`` and ``started`` tell it from other processes with
    the same pid. job, attempt: the cluster manager's job and its start number; the manager ends one
    start of a job before the next."""

    host: str
    pid: int
    started: int
    place: str
    user: str
    since: str
    token: str
    job: str = ""
    attempt: int = 0

    @staticmethod
    def me() -> Holder:
        """Return this process as a holder, with a unique token."""
        state, (job, attempt) = process_state(os.getpid()), cluster_job()
        return Holder(
            host=socket.gethostname(),
            pid=os.getpid(),
            started=state.started if state else 0,
            place=pid_namespace_key(),
            user=_user(),
            since=datetime.now(UTC).astimezone().isoformat(timespec="seconds"),
            token=secrets.token_hex(8),
            job=job,
            attempt=attempt,
        )

    def __str__(self) -> str:
        user = f" of {self.user}" if self.user else ""
        return f"process {self.pid}{user} on {self.host}, since {self.since.replace('T', ' ')}"


@dataclass(frozen=True)
class _LockFile:
    """The state of a lock file. holder: None if it cannot be read. touched: modification time by
    the file system's clock, in seconds."""

    folder: Path
    holder: Holder | None
    token: str
    touched: float

    @cached_property
    def silent(self) -> float:
        """The seconds since the file was touched."""
        return max(0.0, _clock_of(self.folder) - self.touched)

    @property
    def here(self) -> bool:
        """True if the holder's process id is valid in this process's pid namespace."""
        return self.holder is not None and self.holder.place == pid_namespace_key()

    @property
    def dead(self) -> bool:
        job, attempt = cluster_job()
        if self.holder and job and (self.holder.job, self.holder.attempt < attempt) == (job, True):
            return True
        if self.holder is None or not self.here:
            return self.silent > EXPIRES
        return process_since(self.holder.pid, self.holder.started) is None


@dataclass(frozen=True)
class Held:
    """A lock that a process has taken. holder: None if its file cannot be read. alive: True if the
    holder is presumed alive. here: True if its process id is valid in this process's pid namespace.
    silent: seconds since its last touch of the file."""

    holder: Holder | None
    alive: bool
    here: bool
    silent: float
    token: str


def lock_state(folder: Path) -> Held | None:
    """Return the lock of the run in ``folder``; None if it is free. The lock is not taken. Raises
    OSError."""
    found = _find(folder / NAME)
    return found and Held(found.holder, not found.dead, found.here, found.silent, found.token)


class RunLock:
    """The lock of a run's folder, held by this process inside the ``with`` block; the folder is
    made if it is missing.

    Raises LaunchError naming the holder if the lock is taken. ``check`` and the end of the block
    raise RunLost if the lock was lost: its file was removed, or another process presumed this one
    dead and took it over.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / NAME
        self._me = Holder.me()
        self._lost = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run lock", daemon=True)

    def __enter__(self) -> Self:
        with explained(f"the run folder {self.folder} cannot be written", fix="Choose another with run.folder=FOLDER"):
            self.folder.mkdir(parents=True, exist_ok=True)
            _take(self.path, self._me)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join()
        with suppress(OSError):  # a failing disk must not hide the run's own error
            self._lost = self._lost or not self._ours()
            if not self._lost:
                self.path.unlink(missing_ok=True)
        if kind is None:
            self.check()

    def check(self) -> None:
        """Raise RunLost if the lock was removed, or another process holds it now."""
        if not self._lost:
            return
        found, there = None, True
        with suppress(OSError):
            there = self.folder.is_dir()
            found = _find(self.path) if there else None
        if found is not None and found.token != self._me.token:
            raise RunLost(f"the run in {self.folder} was taken over by {found.holder or 'an unreadable lock file'}")
        gone = f"its lock {NAME}" if there else "the folder"
        raise RunLost(
            f"{self.folder}: {gone} was removed or renamed while the run was going on, so that nothing more can safely "
            "be saved there"
        )

    def _beat(self) -> None:
        while not self._lost and not self._ending.wait(BEAT):
            with suppress(OSError):  # the file server is away: other machines see the lack of touches
                self._lost = not self._ours()
                os.utime(self.path)

    def _ours(self) -> bool:
        found = _find(self.path)
        return found is not None and found.token == self._me.token


def _take(path: Path, me: Holder) -> None:
    """Write the lock file ``path`` for ``me``, or raise LaunchError naming its present holder."""
    patience = time.monotonic() + CLAIM
    while not _link(path, me):
        found = _find(path)
        if found is None:  # released a moment ago
            continue
        if not found.dead:
            raise LaunchError(_refusal(path, found))
        claim = path.with_name(f".{path.name}.{found.token}")
        try:
            _take(claim, me)  # the right to replace this dead lock
        except LaunchError:
            if time.monotonic() > patience:
                raise
            time.sleep(0.02)  # another process holds the claim and is replacing the lock
            continue
        now = _find(path)
        if now is not None and now.token == found.token:
            os.replace(claim, path)
            return
        claim.unlink(missing_ok=True)  # another process was faster


def _link(path: Path, me: Holder) -> bool:
    """Create ``path`` for the holder ``me``, atomically with its contents; return False if it
    exists."""
    draft = path.with_name(f".{path.name}.{me.token}.{secrets.token_hex(4)}")
    with draft.open("w") as file:
        file.write(json.dumps(asdict(me), indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())  # or a crash leaves a lock without a holder
    try:
        os.link(draft, path)
    except FileExistsError:
        return draft.stat().st_nlink > 1  # over NFS the link may exist although its reply was lost
    except OSError:  # a file system without hard links
        return _create(path, draft.read_bytes())
    finally:
        draft.unlink(missing_ok=True)
    return True


def _create(path: Path, content: bytes) -> bool:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return False
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    return True


def _find(path: Path) -> _LockFile | None:
    """Return the lock file's present state; None if there is none. The file is opened anew, so that
    NFS asks its server.

    A file that is no valid lock (damaged, too deep, wrong types) has no holder, and a hash of its
    content as token.
    """
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            content, touched = file.read(LONGEST), os.fstat(file.fileno()).st_mtime
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
            return None
        raise
    try:
        holder = decode(Holder, parse_table(content))
        if not (holder.token.isascii() and holder.token.isalnum()):
            raise ValueError(holder.token)
        token = holder.token
    except (ValueError, JobError):
        holder, token = None, hashlib.sha256(content).hexdigest()[:16]
    return _LockFile(path.parent, holder, token, touched)


def _without_waiting(path: str, flags: int) -> int:
    """Return the descriptor of a file that is opened without blocking: a named pipe may have no
    writer."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _clock_of(folder: Path) -> float:
    """Return the present time in seconds, by the clock that stamps the folder's files, which may be
    another machine's."""
    draft = folder / f".clock.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        draft.touch()
        return draft.stat().st_mtime
    except OSError:  # a folder that we may only read
        return time.time()
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def _refusal(path: Path, lock_file: _LockFile) -> str:
    left = f"{max(1.0, EXPIRES - lock_file.silent):.0f} s"
    if lock_file.holder is None:
        return (
            f"{path.parent} is locked by {path.name}, which cannot be read. If no run is going on there, remove the "
            f"file or start again in {left}."
        )
    where = f"{path.parent} is in use by {lock_file.holder}"
    if lock_file.here:
        return (
            f"{where}. Give this run another name with run.name=NAME, or end that one first (kill "
            f"{lock_file.holder.pid})."
        )
    return (
        f"{where}; it gave a sign of life {lock_file.silent:.0f} s ago. End that run first, or give this "
        f"one another name "
        f"with run.name=NAME; if that machine has died, the run can be started again in {left}."
    )


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container's user without a name
        return ""
