"""Files: read where they are ordinary ones, written whole or not at all; what is said where that fails."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkstemp
from typing import Literal

from plait.core.base.errors import JobError, LaunchError

LONGEST_NAME, LONGEST_PATH = 255, 3840
"""Bytes of a name, which every file system has, and of a path, so that names of ours still fit below it."""
DEEPEST = 100
"""Folders in each other that are looked into: each costs the length of its path."""


def contents(path: str | Path) -> bytes:
    """All of an ordinary file. Raises OSError where there is none, also for a device, which may never end,
    and a pipe, which may never begin."""
    if (kind := kind_of(path)) in ("device", "pipe", "socket"):
        raise OSError(errno.EINVAL, f"It is a {kind}, no regular file", str(path))
    return Path(path).read_bytes()


def contents_within(path: str | Path, limit: int) -> bytes:
    """As ``contents``, of a file of at most ``limit`` bytes. Raises ValueError for a longer one, unread."""
    if (size := os.stat(path).st_size) > limit:
        raise ValueError(f"it has {size} bytes; at most {limit} are read")
    return contents(path)


def reason_of(error: Exception) -> str:
    """What went wrong, without the number and the path that the system's own text has."""
    return str(getattr(error, "strerror", None) or error)


def kind_of(path: str | Path) -> Literal["file", "folder", "device", "pipe", "socket", ""]:
    """What a path leads to; empty where it leads nowhere. Raises OSError where nobody may know."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "folder"
    return "pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"


def walk(folder: str | Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """As ``os.walk``: a folder, the folders and the names in it. Those that are ``DEEPEST`` deep in each
    other are told, and not entered."""
    start = str(folder).count(os.sep)
    for place, folders, names in os.walk(folder):
        yield Path(place), folders, names
        if place.count(os.sep) - start >= DEEPEST:
            folders.clear()


def check_path(path: str, key: str) -> None:
    """Raise JobError, naming the key, for a text that no file system takes as a path, or no job file as a
    text.

    >>> check_path("x" * 300, "run.folder")
    Traceback (most recent call last):
    plait.core.base.errors.JobError: run.folder: has a name of 300 bytes. Allowed: names of at most 255 bytes.
    """
    if not path:
        raise JobError("is empty", key=key, fix="Name a path, or leave the key out")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise JobError(f"{path!r} is not UTF-8", key=key, fix="Rename it") from None
    if "\0" in path:
        raise JobError(f"{path!r} holds a zero byte, which no path can have", key=key, fix="Leave it out")
    if longest := max((size for size in map(_size, path.split("/")) if size > LONGEST_NAME), default=0):
        problem = f"has a name of {longest} bytes"
        raise JobError(problem, key=key, fix=f"Allowed: names of at most {LONGEST_NAME} bytes")
    if _size(path) > LONGEST_PATH:
        raise JobError(f"has {_size(path)} bytes", key=key, fix=f"Allowed: at most {LONGEST_PATH}")


def _size(text: str) -> int:
    return len(text.encode())


@contextmanager
def explained(problem: str, *, fix: str) -> Generator[None]:
    """Raise LaunchError in place of an OSError: the problem, the system's reason, what to change.

    >>> with explained("plan.json cannot be written", fix="Choose another with --out"):
    ...     raise OSError(28, "No space left")
    Traceback (most recent call last):
    plait.core.base.errors.LaunchError: plan.json cannot be written: No space left. Choose another with --out.
    """
    try:
        yield
    except OSError as error:
        raise LaunchError(f"{problem}: {error.strerror or error}. {fix}.") from None


def check_target(path: str | Path, *, fix: str) -> None:
    """Raise LaunchError for a file that could not be written, before the work of which it is the result.
    fix: what to change."""
    target = Path(path)
    with explained(f"{target} cannot be written", fix=fix):
        _check_kind(target)
        there = next(folder for folder in (target.parent, *target.parent.parents) if folder.exists())
        handle, name = mkstemp(dir=there, prefix=f".{target.name}.")
        os.close(handle)
        os.unlink(name)


@contextmanager
def replacing(path: str | Path, *, parents: bool = True) -> Generator[Path]:
    """A new file beside ``path`` to write to; it takes ``path``'s name when the block ends, and is removed if
    it fails.

    A reader sees the old content or the new, never a part, also after a crash. Missing folders are made,
    unless not ``parents``: the folder of a run that was removed stays gone.
    """
    target = Path(path)
    _check_kind(target)
    if parents:
        target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    try:
        os.chmod(name, 0o666 & ~_umask())  # mkstemp's own mode would hide the file from everybody else
        yield Path(name)
        handle = os.open(name, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _check_kind(target: Path) -> None:
    """Raise OSError for a folder, and for what a file may not take the place of: a device, a pipe."""
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "It is no ordinary file, and a file would take its place")


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
