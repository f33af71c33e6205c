"""Reading of regular files, atomic writing of files, and error messages if reading or writing
fails."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkstemp
from typing import Literal

from plait.core.base.errors import JobError, LaunchError

LONGEST_NAME, LONGEST_PATH = 255, 3840
"""The longest file name and path, in bytes. Every file system takes such a name; the path leaves
room for file names of Plait's below it."""
DEEPEST = 100
"""The deepest nesting of folders that ``walk`` enters: each level costs the length of its path."""


def contents(path: str | Path) -> bytes:
    """Return the bytes of a regular file. Raises OSError if there is none, and for a device, which
    may never end, a pipe, which may never begin, and a socket."""
    if (kind := kind_of(path)) in ("device", "pipe", "socket"):
        raise OSError(errno.EINVAL, f"It is a {kind}, no regular file", str(path))
    return Path(path).read_bytes()


def contents_within(path: str | Path, limit: int) -> bytes:
    """Return the bytes of a regular file of at most ``limit`` bytes. Raises OSError as ``contents``
    does, and ValueError for a larger file, without reading it."""
    if (size := os.stat(path).st_size) > limit:
        raise ValueError(f"it has {size} bytes; at most {limit} are read")
    return contents(path)


def reason_of(error: Exception) -> str:
    """Return why an operation on a file failed: the system's text without the error number and the
    path."""
    return str(getattr(error, "strerror", None) or error)


def kind_of(path: str | Path) -> Literal["file", "folder", "device", "pipe", "socket", ""]:
    """Return the kind of file that a path leads to; empty if it does not exist. Raises OSError if a
    folder above it may not be searched."""
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
    """Yield (folder, names of its folders, names of its files) as ``os.walk`` does. Folders
    ``DEEPEST`` levels deep are yielded, their subfolders are not entered."""
    start = str(folder).count(os.sep)
    for place, folders, names in os.walk(folder):
        yield Path(place), folders, names
        if place.count(os.sep) - start >= DEEPEST:
            folders.clear()


def check_path(path: str, key: str) -> None:
    """Raise JobError, naming the key, if no file system takes a text as a path, or no job file
    takes it as a text.

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
    """Raise LaunchError in place of an OSError: the problem, the system's reason and what to
    change.

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
    """Raise LaunchError if a file cannot be written, before the work whose result it is to hold.
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
    """Yield a new file in the folder of ``path`` to write to. The file is renamed to ``path`` when
    the block ends, and removed if the block fails.

    A reader gets the old content or the new, never a part, even after a crash. Missing folders are
    made, unless ``parents`` is False: the folder of a removed run is not made again.
    """
    target = Path(path)
    _check_kind(target)
    if parents:
        target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    try:
        os.chmod(name, 0o666 & ~_umask())  # mkstemp's own mode lets no other user read the file
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


def write_synced(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file and wait until its contents are on the disk. Raises OSError."""
    with path.open("wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that the names in it survive a power cut. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_kind(target: Path) -> None:
    """Raise OSError if the target is a folder, or a device or a pipe, which a file must not
    replace."""
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "The target is not a regular file, and writing would replace it")


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
