"""Sources that lie elsewhere: any address that fsspec opens (``s3://``, ``gs://``, ``https://``), fetched
once.

Files are written below ``fetched/`` of a run's corpora. One that was cut off goes on where it ended, if it
has not changed since; one that is there in its size is not fetched again. fsspec
(https://filesystem-spec.readthedocs.io) is the one interface that the clients of object stores share; each
store's own client is installed beside it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from plait.core.base.errors import DataError, how_to_install, missing
from plait.core.base.files import replacing
from plait.train.data.prepare import Progress

BLOCK = 8 << 20
"""Bytes that are fetched at once."""
CLIENTS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs",
           "hf": "huggingface_hub", "http": "aiohttp", "https": "aiohttp"}  # fmt: skip
"""Packages that open addresses of a kind."""


def is_address(path: str) -> bool:
    """Whether a source is an address, no path."""
    return "://" in path


def fetched(address: str, folder: Path, progress: Progress | None = None) -> Path:
    """The file or folder that an address leads to, in ``folder``. progress: in bytes. Raises DataError."""
    system, path = _opened(address)
    try:
        if system.isdir(path):
            names = sorted(system.find(path))
            root = PurePosixPath(path)
        else:
            names, root = [path], PurePosixPath(path).parent
        infos = {name: system.info(name) for name in names}
        if not names:
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
    except (OSError, ValueError, PermissionError) as error:
        problem = f"cannot be fetched: {_one_line(error)}"
        raise DataError(f"{address}: {problem}; check the address and who may read it") from None
    if system.isdir(path):
        return target
    return target / PurePosixPath(path).name


def _opened(address: str) -> tuple[Any, str]:
    """The file system of an address, and the path in it."""
    scheme = address.partition("://")[0]
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise missing("fsspec", address) from None
    try:
        return url_to_fs(address)
    except ImportError as error:
        client = CLIENTS.get(scheme, "")
        fix = f"install it ({how_to_install(client)})" if client else "install what it needs"
        raise DataError(f"{address}: {_one_line(error)}; {fix}") from None
    except (OSError, ValueError) as error:  # of an archive in the address, too
        raise DataError(f"{address}: {_one_line(error)}; correct the address") from None


def _fetch(system: Any, name: str, info: dict[str, Any], target: Path) -> Iterator[int]:
    """One file; yields the bytes that are there. What was there already is kept if the file is still the
    same."""
    size, said = info.get("size"), _version(info)
    beside = target.with_name(f".{target.name}.version")
    same = _read(beside) == said
    if same and target.is_file() and target.stat().st_size == size:
        return
    part = target.with_name(f".{target.name}.part")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not same:
        part.unlink(missing_ok=True)
        target.unlink(missing_ok=True)
        with replacing(beside) as path:
            path.write_text(said)
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
        raise OSError(f"{name} has {size} bytes, and {done} came")
    os.replace(part, target)


def _version(info: dict[str, Any]) -> str:
    """What changes when a file does."""
    keys = ("size", "ETag", "etag", "mtime", "LastModified", "last_modified", "created", "md5Hash", "generation")
    return json.dumps({key: str(info[key]) for key in keys if key in info}, sort_keys=True)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
