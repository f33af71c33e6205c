"""Checkpoints as folders on disk: each is complete or not there at all.

    step-00000100/           complete; manifest.json names every file, its size and CRC-32, what lies in it
    step-00000200.WORD.partial/  being written by the attempt of this word, or left by one: removed on the
    next start, so that an attempt that was given up has nothing left to give a final name
    step-00000300.unusable/  found damaged, and an older one was used instead: kept for people to look at
    step-00000400.not-finite/  whole, and the next step gave numbers that are not finite: passed over, kept

A folder gets its final name only after everything in it has reached the disk, so that a process killed at any
moment leaves the checkpoint before it untouched. Nothing here knows ranks.
"""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from plait.core.base.errors import CheckpointError
from plait.core.base.files import contents_within
from plait.core.runs.epoch import Epoch
from plait.train.checkpoint.manifest import LARGEST, Manifest, OlderFormatError, Stored

MANIFEST = "manifest.json"
LOSS = "eval_loss"
"""Of a checkpoint's state: the loss of the evaluation after its step."""
_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(r"step-\d{8,}(\.\w+)*\.partial")
_DOOMED = ".removed.partial"
Flaw = Literal["unusable", "not-finite"]
"""Why a checkpoint was set aside: it is damaged, or what it leads to is not finite."""
_BLOCK = 1 << 24


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay: the ``last`` newest, those after a multiple of ``every`` steps (0: no others),
    and the best, if it is to."""

    last: int = 2
    every: int = 0
    best: bool = False


def best_of(complete: Iterable[Manifest]) -> list[Manifest]:
    """Checkpoints whose evaluation loss is known, the least first; of equal ones the newer first."""
    known = [one for one in complete if isinstance(one.state.get(LOSS), float | int)]
    return sorted(known, key=lambda one: (one.state[LOSS], -one.serial))


class CheckpointFolder:
    """The checkpoints of one run. One process writes (``open``, ``begin``, ``commit``, ``abandon``); any may
    read. epoch: of the attempt that writes; what would change something raises RunLost once it is over."""

    def __init__(self, root: Path, epoch: Epoch | None = None) -> None:
        self.root, self._epoch = root, epoch or Epoch(root.parent)

    def path(self, step: int) -> Path:
        """Where the complete checkpoint of ``step`` is."""
        return self.root / f"step-{step:08d}"

    def partial(self, step: int) -> Path:
        """Where it is while being written."""
        word = f".{self._epoch.word}" if self._epoch.word else ""
        return self.root / f"step-{step:08d}{word}.partial"

    # ---- writing ----

    def open(self) -> None:
        """Make the folder and remove what a crash left, or an attempt that was given up and may still write.
        Raises OSError."""
        self._epoch.check()
        self.root.mkdir(parents=True, exist_ok=True)
        for entry in [entry for entry in self.root.iterdir() if _PARTIAL.fullmatch(entry.name)]:
            doomed = entry
            if not entry.name.endswith(_DOOMED):  # at once, so that nobody gives half of it a final name
                doomed = entry.rename(entry.with_name(entry.name.removesuffix(".partial") + _DOOMED))
            shutil.rmtree(doomed)

    def begin(self, step: int, needed: int) -> None:
        """An empty partial folder. Raises CheckpointError if ``needed`` bytes cannot fit, before any is
        written."""
        self._epoch.check()
        self.abandon(step)
        if not self.root.parent.is_dir():
            raise CheckpointError(f"{self.root}: this folder is gone: it was removed or renamed while the run was on")
        self.root.mkdir(exist_ok=True)  # somebody removed the checkpoints alone
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

    def commit(
        self,
        step: int,
        files: dict[str, tuple[int, int]],
        state: dict[str, Any],
        *,
        tensors: dict[str, Stored] | None = None,
    ) -> None:
        """Turn the partial folder into the newest complete checkpoint.

        files: every file with its size and checksum, already on disk. Raises CheckpointError or OSError.
        """
        self._epoch.check()
        partial, final = self.partial(step), self.path(step)
        for name, (size, _) in files.items():
            if _size(partial / name) != size:
                problem = "not what its rank wrote, seen from rank 0. Checkpoints need a folder that all nodes share"
                raise CheckpointError(f"{partial / name}: {problem}")
        serial = 1 + max((manifest.serial for manifest in self.complete()), default=0)
        with (partial / MANIFEST).open("w") as stream:
            stream.write(Manifest(step, serial, state, files, tensors or {}).to_text())
            stream.flush()
            os.fsync(stream.fileno())
        _sync_folder(partial)
        replaced = self.root / f"{final.name}.old.partial"
        if final.exists():  # a run that went back and comes by again
            self._epoch.check()
            final.rename(replaced)
        self._epoch.check()
        partial.rename(final)
        _sync_folder(self.root)
        shutil.rmtree(replaced, ignore_errors=True)

    def abandon(self, step: int) -> None:
        """Remove what was written of an incomplete checkpoint."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def set_aside(self, step: int, flaw: Flaw = "unusable") -> str:
        """Take a checkpoint that cannot be used out of the way; returns its new name, which says so. Of those
        that led to numbers that are not finite only the last is kept."""
        self._epoch.check()
        target = self.root / f"{self.path(step).name}.{flaw}"
        for old in self.root.glob("step-*.not-finite") if flaw == "not-finite" else [target]:
            shutil.rmtree(old, ignore_errors=True)
        self.path(step).rename(target)
        return target.name

    def prune(self, keep: Keep) -> None:
        """Delete what need not stay. Raises OSError."""
        complete = self.complete()
        best = best_of(complete)[:1] if keep.best else []
        for manifest in complete[keep.last :]:
            if manifest in best or (keep.every and manifest.step % keep.every == 0):
                continue
            self._epoch.check()
            doomed = self.partial(manifest.step)
            self.path(manifest.step).rename(
                doomed
            )  # first, so that a crash leaves no half of one under a complete name
            shutil.rmtree(doomed)

    # ---- reading ----

    def survey(self) -> tuple[list[int], list[tuple[int, str]], list[str]]:
        """(steps whose files are all there in their right size, newest first; step and problem of the others;
        folders that were set aside). Contents are not read."""
        complete, problems = self._survey()
        aside = [str(path) for path in sorted(self.root.glob("step-*.unusable"))]
        return [manifest.step for manifest in complete], problems, aside

    def complete(self) -> list[Manifest]:
        """Checkpoints whose files are all there in their right size, newest first. Contents are not read."""
        return self._survey()[0]

    def read(self, step: int) -> Manifest:
        """The manifest of ``step``. Raises CheckpointError naming the file."""
        try:
            return self._manifest(step)
        except FileNotFoundError:
            raise CheckpointError(f"{self.path(step)}: no complete checkpoint there. {self.others(step)}") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{_manifest_problem(self.path(step), error)}. {self.others(step)}") from None

    def problem(self, manifest: Manifest, names: Iterable[str]) -> str | None:
        """Read ``names`` and compare sizes and checksums: what is wrong, None if nothing is."""
        for name in names:
            file = self.path(manifest.step) / name
            if problem := _problem(file, *manifest.files[name]):
                return f"{file}: {problem}"
        return None

    def others(self, step: int) -> str:
        """A sentence on what there is besides ``step``."""
        steps = sorted(manifest.step for manifest in self.complete() if manifest.step != step)
        if not steps:
            return "There is no other checkpoint in this folder"
        return f"The folder also holds step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"

    def _survey(self) -> tuple[list[Manifest], list[tuple[int, str]]]:
        complete, problems = list[Manifest](), list[tuple[int, str]]()
        for entry in sorted(self.root.iterdir()) if self.root.is_dir() else ():
            if not (match := _NAME.fullmatch(entry.name)):
                continue
            step = int(match[1])
            try:
                manifest = self._manifest(step)
            except (OSError, ValueError) as error:
                problems.append((step, _manifest_problem(entry, error)))
                continue
            wrong = (_size_problem(entry / name, size) for name, (size, _) in manifest.files.items())
            if problem := next(filter(None, wrong), None):
                problems.append((step, problem))
            else:
                complete.append(manifest)
        return sorted(complete, key=lambda manifest: manifest.serial, reverse=True), problems

    def _manifest(self, step: int) -> Manifest:
        """Raises OSError and ValueError."""
        manifest = Manifest.from_text(contents_within(self.path(step) / MANIFEST, LARGEST).decode())
        if manifest.step != step:
            raise ValueError(f"it belongs to step {manifest.step}; the folder was renamed")
        return manifest


def measure(file: Path) -> tuple[int, int]:
    """(bytes, CRC-32) of a file, as read back. Raises OSError."""
    size = crc = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc


def _manifest_problem(folder: Path, error: OSError | ValueError) -> str:
    file = folder / MANIFEST
    if isinstance(error, FileNotFoundError):
        return f"{file}: missing"
    if isinstance(error, OSError):
        return f"{file}: cannot be read: {error.strerror}"
    return f"{file}: {error}" if isinstance(error, OlderFormatError) else f"{file}: damaged: {error}"


def _problem(file: Path, size: int, crc: int) -> str | None:
    try:
        if (found := file.stat().st_size) != size:
            return f"damaged: {found} bytes, {size} were written"
        if measure(file) != (size, crc):
            return "damaged: its checksum does not match, some bytes have changed since it was written"
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None


def _size_problem(file: Path, size: int) -> str | None:
    """A problem that is seen without reading."""
    found = _size(file)
    if found is None:
        return f"{file}: missing"
    return None if found == size else f"{file}: damaged: {found} bytes, {size} were written"


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
