"""Checkpoints as folders on disk: each is complete or not there at all.

    step-00000100/           complete; manifest.json names every file with its size and CRC-32
    step-00000200.partial/   being written, or left by a crash: removed on the next start

A folder gets its final name only after everything in it has reached the disk, so that a process killed at any
moment leaves the checkpoint before it untouched. Nothing here knows tensors or ranks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.core.errors import CheckpointError

MANIFEST = "manifest.json"
_FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(r"step-\d{8,}(\.old)?\.partial")
_BLOCK = 1 << 24


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint consists of. files: name -> (bytes, CRC-32).

    serial grows with every checkpoint completed in the folder: a run that went back to an older step
    continues
    from what it wrote last, not from the highest step.
    """

    step: int
    serial: int
    state: dict[str, Any]
    files: dict[str, tuple[int, int]]

    def to_text(self) -> str:
        """JSON, with a checksum of its own."""
        body = {"format": _FORMAT, "step": self.step, "serial": self.serial, "state": self.state, "files": self.files}
        return json.dumps({**body, "crc32": _crc_of(body)}, indent=1) + "\n"

    @staticmethod
    def from_text(text: str) -> Manifest:
        """Raises ValueError for anything but the text of an intact manifest of this format."""
        body = json.loads(text)
        if not isinstance(body, dict) or body.pop("crc32", None) != _crc_of(body):
            raise ValueError("its checksum does not match")
        if body["format"] != _FORMAT:
            raise ValueError(f"format {body['format']}, this version reads format {_FORMAT}")
        files = {name: (size, crc) for name, (size, crc) in body["files"].items()}
        return Manifest(body["step"], body["serial"], body["state"], files)


class CheckpointFolder:
    """The checkpoints of one run. One process writes (``open``, ``begin``, ``commit``, ``abandon``); any may
    read."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        """Where the complete checkpoint of ``step`` is."""
        return self.root / f"step-{step:08d}"

    def partial(self, step: int) -> Path:
        """Where it is while being written."""
        return self.root / f"step-{step:08d}.partial"

    # ---- writing ----

    def open(self) -> None:
        """Make the folder and remove what a crash left. Raises OSError."""
        self.root.mkdir(parents=True, exist_ok=True)
        for entry in self.root.iterdir():
            if _PARTIAL.fullmatch(entry.name):
                shutil.rmtree(entry)

    def begin(self, step: int, needed: int) -> None:
        """An empty partial folder. Raises CheckpointError if ``needed`` bytes cannot fit, before any is
        written."""
        self.abandon(step)
        if shutil.disk_usage(self.root).free < needed:
            raise self.full(step, needed)
        self.partial(step).mkdir()

    def full(self, step: int, needed: int) -> CheckpointError:
        """The error of a full disk."""
        free = shutil.disk_usage(self.root).free
        problem = f"no room for the checkpoint of step {step}: it needs {needed} bytes and {free} are free"
        left = [f"The checkpoint of step {manifest.step} is untouched" for manifest in self.complete()] or [
            "It would be the first"
        ]
        return CheckpointError(f"{self.root}: {problem}. {left[0]}")

    def commit(self, step: int, files: dict[str, tuple[int, int]], state: dict[str, Any], keep: int) -> None:
        """Turn the partial folder into the newest complete checkpoint, then delete all but the ``keep``
        newest.

        files: every file with its size and checksum, already on disk. Raises CheckpointError or OSError.
        """
        partial, final = self.partial(step), self.path(step)
        for name, (size, _) in files.items():
            if _size(partial / name) != size:
                problem = "not what its rank wrote, seen from rank 0. Checkpoints need a folder that all nodes share"
                raise CheckpointError(f"{partial / name}: {problem}")
        serial = 1 + max((manifest.serial for manifest in self._manifests()), default=0)
        with (partial / MANIFEST).open("w") as stream:
            stream.write(Manifest(step, serial, state, files).to_text())
            stream.flush()
            os.fsync(stream.fileno())
        _sync_folder(partial)
        replaced = self.root / f"{final.name}.old.partial"
        if final.exists():  # a run that went back and comes by again
            final.rename(replaced)
        partial.rename(final)
        _sync_folder(self.root)
        shutil.rmtree(replaced, ignore_errors=True)
        self._prune(keep)

    def abandon(self, step: int) -> None:
        """Remove what was written of an incomplete checkpoint."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def _prune(self, keep: int) -> None:
        for manifest in self.complete()[keep:]:
            doomed = self.partial(manifest.step)
            self.path(manifest.step).rename(
                doomed
            )  # first, so that a crash leaves no half of one under a complete name
            shutil.rmtree(doomed)

    # ---- reading ----

    def complete(self) -> list[Manifest]:
        """Checkpoints whose files all exist in the right size, newest first. Contents are not read."""
        found = [
            m
            for m in self._manifests()
            if all(_size(self.path(m.step) / name) == size for name, (size, _) in m.files.items())
        ]
        return sorted(found, key=lambda manifest: manifest.serial, reverse=True)

    def read(self, step: int) -> Manifest:
        """The manifest of ``step``. Raises CheckpointError naming the file."""
        file = self.path(step) / MANIFEST
        try:
            manifest = Manifest.from_text(file.read_text())
        except FileNotFoundError:
            raise CheckpointError(f"{self.path(step)}: no complete checkpoint there. {self._instead(step)}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file}: damaged: {error}. {self._instead(step)}") from None
        if manifest.step != step:
            raise CheckpointError(
                f"{file}: belongs to step {manifest.step}; the folder was renamed. {self._instead(step)}"
            )
        return manifest

    def verify(self, manifest: Manifest, names: Iterable[str]) -> None:
        """Read ``names`` and compare sizes and checksums. Raises CheckpointError naming the file and a
        checkpoint that is whole."""
        for name in names:
            file = self.path(manifest.step) / name
            if problem := _problem(file, *manifest.files[name]):
                raise CheckpointError(f"{file}: {problem}. {self._instead(manifest.step)}")

    def _instead(self, step: int) -> str:
        """What can be used instead of ``step``: the newest other checkpoint that passes every check, contents
        included."""
        for manifest in self.complete():
            path = self.path(manifest.step)
            if manifest.step != step and not any(
                _problem(path / name, *entry) for name, entry in manifest.files.items()
            ):
                return (
                    f"The checkpoint of step {manifest.step} is whole: remove {self.path(step).name} to resume from it"
                )
        return "No other checkpoint in this folder can be used"

    def _manifests(self) -> list[Manifest]:
        steps = (
            [int(match[1]) for entry in self.root.iterdir() if (match := _NAME.fullmatch(entry.name))]
            if self.root.is_dir()
            else []
        )
        found: list[Manifest] = []
        for step in steps:
            try:
                manifest = Manifest.from_text((self.path(step) / MANIFEST).read_text())
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if manifest.step == step:
                found.append(manifest)
        return found


def measure(file: Path) -> tuple[int, int]:
    """(bytes, CRC-32) of a file, as read back. Raises OSError."""
    size = crc = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc


def _problem(file: Path, size: int, crc: int) -> str | None:
    try:
        found, found_crc = file.stat().st_size, None
        if found == size:
            found, found_crc = measure(file)
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if found != size:
        return f"damaged: {found} bytes, {size} were written"
    return (
        None
        if found_crc == crc
        else "damaged: its checksum does not match, some bytes have changed since it was written"
    )


def _size(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except OSError:
        return None


def _sync_folder(folder: Path) -> None:
    """Make names in ``folder`` last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _crc_of(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
