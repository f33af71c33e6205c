"""Files that appear whole or not at all, and what is said where they cannot."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkstemp

from plait.core.errors import LaunchError


@contextmanager
def explained(problem: str, *, fix: str) -> Generator[None]:
    """Raise LaunchError in place of an OSError: the problem, the system's reason, what to change.

    >>> with explained("plan.json cannot be written", fix="Choose another with --out"):
    ...     raise OSError(28, "No space left")
    Traceback (most recent call last):
    plait.core.errors.LaunchError: plan.json cannot be written: No space left. Choose another with --out.
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
