"""The source files of a corpus: which files a user's files, folders and ``python-stdlib`` mean."""

from __future__ import annotations

import os
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from plait.core.base.errors import DataError
from plait.core.base.files import DEEPEST, kind_of
from plait.core.base.passed_over import PassedOver
from plait.train.data.saved import saved_files

STDLIB = "python-stdlib"
STDLIB_BYTES = (
    20 << 20
)  # the library is 14 MB without its tests (3.11); the cap keeps preparation to seconds if it grows
FOOTERS = {"_metadata", "_common_metadata"}
"""What Spark, Dask and pyarrow write beside the files of a Parquet folder."""
STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file to prepare; ``name`` is its path below its source, so that moving a data folder changes
    nothing. named: the user named it itself, not a folder that it is in."""

    path: Path
    name: str
    bytes: int
    mtime_ns: int
    named: bool = False


def find_files(
    sources: Sequence[str | Path], pattern: str, *, leave_out: Path | None = None, over: PassedOver | None = None
) -> list[SourceFile]:
    """The files of all sources, source by source, each source sorted by path; a file met twice counts
    once. over: counts what is passed over, a hidden file, a pipe, a file met again."""
    over = over if over is not None else PassedOver()
    listed = [sources] if isinstance(sources, str | Path) else list(sources)
    seen: set[tuple[int, int]] = set()
    found: list[SourceFile] = []
    for source in listed:
        budget = STDLIB_BYTES if source == STDLIB else None
        for path, name in _matches(source, pattern, leave_out, over):
            try:
                status = path.stat()
            except OSError as error:
                raise DataError(
                    f"{path}: cannot read this source file: {error.strerror}; repair or remove it"
                ) from error
            if not stat.S_ISREG(status.st_mode):
                over.note("pipes, devices and sockets", str(path))
                continue
            if (status.st_dev, status.st_ino) in seen:
                over.note("file(s) met before", str(path))
                continue
            if budget is not None and (budget := budget - status.st_size) < 0:
                break
            seen.add((status.st_dev, status.st_ino))
            if not status.st_size and source != STDLIB:
                over.note("empty files", str(path))
            named = path == _path(source)
            if path.suffix == ".idx" and not named and path.with_suffix(".bin").is_file():
                continue  # belongs to the .bin
            found.append(
                SourceFile(path=path, name=name, bytes=status.st_size, mtime_ns=status.st_mtime_ns, named=named)
            )
    if not any(file.bytes for file in found):
        raise DataError(
            f"{', '.join(map(str, listed)) or 'no source'}: the corpus is empty; name a file or folder that has text"
        )
    return found


def _path(source: str | Path) -> Path:
    """Where a source is. Raises DataError for what is no path."""
    told = os.path.expanduser(source)  # Path's raises for users that there are not
    if not told or "\0" in told:
        raise DataError(f"{told!r} is no path; name a file or folder, or '.' for the folder that is open")
    return Path(told)


def _matches(source: str | Path, pattern: str, leave_out: Path | None, over: PassedOver) -> list[tuple[Path, str]]:
    """The files of one source that match, each with its path below the source, sorted by that path."""
    if source == STDLIB:
        root, pattern = Path(sysconfig.get_path("stdlib")), "*.py"
    else:
        root = _path(source)
    try:
        kind = kind_of(root)
        if not kind and kind_of(f"{root}.bin") == kind_of(f"{root}.idx") == "file":  # as Megatron names a pair
            root, kind = Path(f"{root}.bin"), "file"
    except OSError as error:
        raise DataError(f"{source}: cannot be read: {error.strerror}; check its permissions") from None
    if kind == "file":
        return [(root, root.name)]
    if kind != "folder":
        problem = f"is a {kind}, no regular file" if kind else "no such file or folder"
        if not kind and set("*?[") & set(str(source)):
            raise DataError(f"{source}: {problem}; name a folder, and its files with data.pattern")
        raise DataError(f"{source}: {problem}; correct the path, or use {STDLIB!r} for text that is always there")
    if saved := saved_files(root, over):
        return saved
    skipped = STDLIB_SKIPPED if source == STDLIB else set[str]()
    files = [(path, path.relative_to(root).as_posix()) for path in _walk(root, skipped, leave_out, over)]
    matching = sorted(((path, name) for path, name in files if fnmatchcase(name, pattern)), key=lambda item: item[1])
    if not matching:
        if not files:
            raise DataError(f"{source}: has no file (hidden ones are not read); name a file or folder that has text")
        endings = ", ".join(sorted({path.suffix or path.name for path, _ in files})[:8])
        raise DataError(
            f"{source}: no file in it matches the pattern {pattern!r}, its files end in {endings}; change the pattern"
        )
    return matching


def _walk(root: Path, skipped: set[str], leave_out: Path | None, over: PassedOver) -> Iterator[Path]:
    """Files below ``root``, without hidden ones; links to folders are followed, each folder once."""

    def fail(error: OSError) -> None:
        raise DataError(
            f"{error.filename}: cannot list this source folder: {error.strerror}; check its permissions"
        ) from error

    seen: set[str] = set()
    for folder, folders, names in os.walk(root, onerror=fail, followlinks=True):
        if folder.count(os.sep) - str(root).count(os.sep) > DEEPEST:
            raise DataError(
                f"{root}: folders in it are more than {DEEPEST} deep in each other; name those that hold text"
            )
        real = os.path.realpath(folder)
        if real in seen or (folder != str(root) and real == str(leave_out)):
            folders.clear()
            continue
        seen.add(real)
        for name in (*folders, *names):
            if name.startswith("."):
                over.note("hidden files and folders", str(Path(folder, name)))
        for name in FOOTERS.intersection(names):
            over.note("footer(s) of a Parquet folder, which have no rows", str(Path(folder, name)))
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in skipped)
        yield from (Path(folder, name) for name in names if not name.startswith(".") and name not in FOOTERS)
