"""Find the source files of a corpus: the meaning of a user's files, folders, addresses and
``python-stdlib``.

| a source | its files |
|---|---|
| a file | itself |
| a folder | those below it that match the pattern, except hidden ones |
| a folder that ``Dataset.save_to_disk`` of Hugging Face ``datasets`` made | the Arrow files that it lists |
| an address that fsspec opens (``s3://``, ``gs://``, ``https://``) | fetched once, then as above |

A saved dataset (datasets 4.0, ``arrow_dataset.py``, ``dataset_dict.py``,
https://github.com/huggingface/datasets) has a ``dataset_info.json``, and a ``state.json`` with
``_data_files``, the Arrow files in order, and ``_indices_data_files``, a selection of rows.
``dataset_dict.json`` has ``splits``, folders of several such datasets.

fsspec (https://filesystem-spec.readthedocs.io) is the common interface to the clients of object
stores; each store's own client must be installed separately.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, cast

from plait.core.base.codec.json_text import read_table
from plait.core.base.errors import DataError, how_to_install, missing
from plait.core.base.files import DEEPEST, kind_of, replacing
from plait.core.base.ignored_input import IgnoredInput
from plait.core.base.numbers import shown

STDLIB = "python-stdlib"
STDLIB_BYTES = 20 << 20
"""Bytes to read, at most: the library is 14 MB without its tests (3.11); this keeps preparation to
seconds if it grows."""
STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
FOOTERS = {"_metadata", "_common_metadata"}
"""Names of files that Spark, Dask and pyarrow write beside the files of a Parquet folder."""
STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
OTHERS = "split(s) of a saved dataset; name their folders to read them"
BLOCK = 8 << 20
"""Bytes that are fetched at once."""
Progress = Callable[..., None]
"""A function called with the bytes done and the total bytes; while a corpus is written, also with
its tokens so far."""


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file to prepare. name: its path below its source, so that moving a data folder changes
    nothing. named: True if the user named the file itself, not a folder."""

    path: Path
    name: str
    bytes: int
    mtime_ns: int
    named: bool = False


def unreadable(path: Path, error: OSError) -> DataError:
    """Return the error for a file that the system cannot read."""
    return DataError(f"{path}: cannot read this source file: {error.strerror}; repair or remove it")


def damaged(path: Path, what: str, problem: object, where: str = "") -> DataError:
    """Return the error for a damaged file. what: its format. where: the position in the file, as a
    clause."""
    told = " ".join(str(problem).split())[:200]
    return DataError(f"{path}: is {what} that is damaged or cut off{where} ({told}); fetch it again or remove it")


def find_files(
    sources: Sequence[str | Path], pattern: str, *, leave_out: Path | None = None, over: IgnoredInput | None = None
) -> list[SourceFile]:
    """Return the files of all sources, source by source, each source sorted by path; a file found
    twice counts once. over: counts what is passed over: a hidden file, a pipe, a file found again.
    Raises DataError if there is no file with content."""
    over = over if over is not None else IgnoredInput()
    listed = [sources] if isinstance(sources, str | Path) else list(sources)
    seen: set[tuple[int, int]] = set()
    found: list[SourceFile] = []
    for source in listed:
        budget = STDLIB_BYTES if source == STDLIB else None
        for path, name in _matches(source, pattern, leave_out, over):
            try:
                status = path.stat()
            except OSError as error:
                raise unreadable(path, error) from error
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
            if named or not (path.suffix == ".idx" and path.with_suffix(".bin").is_file()):  # .bin stands for the pair
                found.append(
                    SourceFile(path=path, name=name, bytes=status.st_size, mtime_ns=status.st_mtime_ns, named=named)
                )
    if not any(file.bytes for file in found):
        where = ", ".join(map(str, listed)) or "no source"
        raise DataError(f"{where}: the corpus is empty; name a file or folder that has text")
    return found


def _path(source: str | Path) -> Path:
    """Return a source's path. Raises DataError for an invalid path."""
    text = os.path.expanduser(source)  # Path.expanduser raises for unknown users
    if not text or "\0" in text:
        raise DataError(f"{text!r} is no path; name a file or folder, or '.' for the current folder")
    return Path(text)


def _matches(source: str | Path, pattern: str, leave_out: Path | None, over: IgnoredInput) -> list[tuple[Path, str]]:
    """Return the files of one source that match, each with its path below the source, sorted by
    that path."""
    root, skipped = _path(source), set[str]()
    if source == STDLIB:
        root, pattern, skipped = Path(sysconfig.get_path("stdlib")), "*.py", STDLIB_SKIPPED
    try:
        kind = kind_of(root)
        if not kind and kind_of(f"{root}.bin") == kind_of(f"{root}.idx") == "file":  # Megatron's prefix of a pair
            root, kind = Path(f"{root}.bin"), "file"
    except OSError as error:
        raise DataError(f"{source}: cannot be read: {error.strerror}; check its permissions") from None
    if kind == "file":
        return [(root, root.name)]
    if kind != "folder":
        problem = f"is a {kind}, no regular file" if kind else "no such file or folder"
        fix = f"correct the path (nothing is downloaded), or use {STDLIB!r} for text that is always there"
        if not kind and set("*?[") & set(str(source)):
            fix = "name a folder, and its files with data.pattern"
        raise DataError(f"{source}: {problem}; {fix}")
    if saved := _saved_files(root, over):
        return saved
    files = [(path, path.relative_to(root).as_posix()) for path in _walk(root, skipped, leave_out, over)]
    if not files:
        raise DataError(f"{source}: has no file (hidden ones are not read); name a file or folder that has text")
    matching = sorted(((path, name) for path, name in files if fnmatchcase(name, pattern)), key=lambda item: item[1])
    if not matching:
        endings = ", ".join(sorted({path.suffix or path.name for path, _ in files})[:8])
        raise DataError(
            f"{source}: no file in it matches the pattern {pattern!r}, its files end in {endings}; change the pattern"
        )
    return matching


def _walk(root: Path, skipped: set[str], leave_out: Path | None, over: IgnoredInput) -> Iterator[Path]:
    """Yield files below ``root``, except hidden ones; links to folders are followed, each folder
    once."""

    def fail(error: OSError) -> None:
        problem = f"cannot list this source folder: {error.strerror}; check its permissions"
        raise DataError(f"{error.filename}: {problem}") from error

    seen: set[str] = set()
    for folder, folders, names in os.walk(root, onerror=fail, followlinks=True):
        if folder.count(os.sep) - str(root).count(os.sep) > DEEPEST:
            problem = f"its folders are nested more than {DEEPEST} deep; name the folders that hold text"
            raise DataError(f"{root}: {problem}")
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


# ---- saved datasets ----


def _saved_files(root: Path, over: IgnoredInput) -> list[tuple[Path, str]]:
    """Return the Arrow files of a saved dataset, each with its name; empty for another folder. Of
    several splits, the training split is read. Raises DataError for a dataset that is damaged or
    was saved with a selection of its rows."""
    if (root / SPLITS).is_file():
        splits = _listed(root / SPLITS, "splits")
        if "train" not in splits:
            named = ", ".join(map(shown, splits))
            raise DataError(f"{root}: is a saved dataset with the splits {named}; name one of these folders")
        for other in splits:
            if other != "train":
                over.note(OTHERS, str(root / str(other)))
        root = root / "train"
    if not ((root / STATE).is_file() and (root / INFO).is_file()):
        return []
    files = _listed(root / STATE, "_data_files")
    if _table(root / STATE).get("_indices_data_files"):
        raise DataError(f"{root}: was saved with a selection of its rows; save it again after flatten_indices()")
    names: list[Any] = [cast("dict[str, Any]", one).get("filename") if isinstance(one, dict) else one for one in files]
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (root / name).is_file():
            raise DataError(f"{root / STATE}: names the file {shown(name)}, which is not in its folder; fetch it again")
    return [(root / name, name) for name in names]


def _table(file: Path) -> dict[str, Any]:
    try:
        return read_table(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read as JSON ({error}); fetch the dataset again") from None


def _listed(file: Path, key: str) -> list[Any]:
    found = _table(file).get(key)
    if not isinstance(found, list) or not found:
        raise DataError(f"{file}: has no {shown(key)}; fetch the dataset again")
    return cast("list[Any]", found)


# ---- addresses ----


def is_address(path: str) -> bool:
    """Return True if a source is an address, not a path."""
    return "://" in path


def fetched(address: str, folder: Path, progress: Progress | None = None) -> Path:
    """Fetch the file or folder at an address into ``folder`` and return its path. progress: called
    with bytes. Raises DataError.

    An interrupted fetch resumes if the file has not changed since; a file that exists in its full
    size is not fetched again.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise missing("fsspec", address) from None
    try:
        system, path = url_to_fs(address)
        is_folder = system.isdir(path)
        root = PurePosixPath(path) if is_folder else PurePosixPath(path).parent
        infos = {name: system.info(name) for name in (sorted(system.find(path)) if is_folder else [path])}
        if not infos:
            raise DataError(f"{address}: holds no file; correct the address")
        target = folder / hashlib.sha256(address.encode()).hexdigest()[:16]
        total, before = sum(int(info.get("size") or 0) for info in infos.values()), 0
        for name, info in infos.items():
            inner = PurePosixPath(name).relative_to(root)
            if ".." in inner.parts:
                raise DataError(f"{address}: names a file outside of it ({name}); correct the address")
            for done in _fetch(system, name, info, target / inner):
                if progress:
                    progress(before + done, total)
            before += int(info.get("size") or 0)
    except FileNotFoundError:
        raise DataError(f"{address}: no such file or folder; correct the address") from None
    except (OSError, ValueError, ImportError) as error:  # ValueError: also for an archive in the address
        problem = " ".join(str(error).split())[:300] or type(error).__name__
        install = f"install it ({how_to_install('fsspec')})"
        fix = install if isinstance(error, ImportError) else "check the address and who may read it"
        raise DataError(f"{address}: cannot be fetched: {problem}; {fix}") from None
    return target if is_folder else target / PurePosixPath(path).name


def _fetch(system: Any, name: str, info: dict[str, Any], target: Path) -> Iterator[int]:
    """Fetch one file; yield the bytes fetched so far. Earlier content is kept if the file at the
    address is unchanged."""
    keys = ("size", "ETag", "etag", "mtime", "LastModified", "last_modified", "created", "md5Hash", "generation")
    version = json.dumps({key: str(info[key]) for key in keys if key in info}, sort_keys=True)
    size, known = info.get("size"), target.with_name(f".{target.name}.version")
    part = target.with_name(f".{target.name}.part")
    if known.is_file() and known.read_text() == version:
        if target.is_file() and target.stat().st_size == size:
            return
    else:
        part.unlink(missing_ok=True)
        target.unlink(missing_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(known) as path:
            path.write_text(version)
    with system.open(name, "rb") as source, open(part, "ab") as file:
        if done := file.tell():
            source.seek(done)
        while block := source.read(BLOCK):
            file.write(block)
            done += len(block)
            yield done
        file.flush()
        os.fsync(file.fileno())
    if size is not None and done != size:
        part.unlink()
        raise OSError(f"{name}: only {done} of {size} bytes arrived")
    os.replace(part, target)
