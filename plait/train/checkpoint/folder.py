"""Manage checkpoints as folders on disk: each is complete or absent.

    step-00000100/           complete; manifest.json lists every file with size and CRC-32, and its tensors
    step-00000200.WORD.partial/  being written by the attempt WORD, or left by it: removed on the next
    start, so that an abandoned attempt has nothing left to rename to a final name
    step-00000300.unusable/  found damaged; an older checkpoint was used instead; kept for inspection
    step-00000400.not-finite/  intact, but the next step was not finite: skipped, kept

A folder gets its final name only after its files have reached the disk: a kill at any moment leaves
the previous checkpoint untouched. A manifest is JSON. Other users may write to its folder, so it is
not trusted: its file names may only name files beside it, and inconsistent contents are refused. No
code here knows ranks.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from plait.core.base.codec.json_text import parse_table
from plait.core.base.errors import CheckpointError
from plait.core.base.files import contents_within, sync_folder, write_synced
from plait.core.base.numbers import shown
from plait.core.reshard.layouts import Box
from plait.core.runs.attempts import Epoch

MANIFEST, FORMAT = "manifest.json", 2
LOSS = "eval_loss"
"""The key in a checkpoint's state for the loss of the evaluation after its step."""
LARGEST, MOST = 256 << 20, 16_000_000
"""Limits on a manifest's bytes and values: with thousands of ranks it lists millions of parts."""
_FILE = re.compile(r"rank-\d{5,}\.safetensors")


def file_of(rank: int) -> str:
    """Return the name of the file that a rank writes into a checkpoint."""
    return f"rank-{rank:05d}.safetensors"


class Stored(NamedTuple):
    """A whole tensor: its dtype (safetensors' code), its shape, and its parts, each in a file."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, Box], ...]


def name_in_file(key: str, box: Box) -> str:
    """Return the name that a part of a tensor has in its safetensors file.

    >>> name_in_file("master/norm.weight", Box((0,), (8,)))
    'master/norm.weight[0:8]'
    """
    return f"{key}{box}"


class OlderFormatError(ValueError):
    """A manifest in a format that this version does not read."""


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's manifest. files: name -> (bytes, CRC-32). tensors: by key
    (``exp_avg/layers.0.attn.q.weight``).

    serial: grows with every checkpoint completed in the folder, so that a run that went back to an
    older step resumes from its latest checkpoint, not from the highest step.
    """

    step: int
    serial: int
    state: dict[str, Any]
    files: dict[str, tuple[int, int]]
    tensors: dict[str, Stored] = field(default_factory=dict[str, Stored])

    def to_text(self) -> str:
        """Return the manifest as JSON, with a checksum."""
        tensors = {
            key: [stored.dtype, stored.shape, [(file, *box) for file, box in stored.parts]]
            for key, stored in self.tensors.items()
        }
        body = {"format": FORMAT, "step": self.step, "serial": self.serial, "state": self.state,
                "files": self.files, "tensors": tensors}  # fmt: skip
        return json.dumps({**body, "crc32": _crc_of(body)}) + "\n"

    @staticmethod
    def from_text(text: str) -> Manifest:
        """Parse a manifest. Raises ValueError unless the text is an intact manifest of this
        format."""
        body = parse_table(text, most=MOST)
        if body.pop("crc32", None) != _crc_of(body):
            raise ValueError("its checksum does not match")
        if body.get("format") != FORMAT:
            raise OlderFormatError(
                f"it has format {shown(body.get('format'))}, and this version reads format {FORMAT} (format 1, of an "
                "older Plait, holds a pickle, which may execute anything). Export it with the version that wrote it, "
                "and go on from the export with train.init_from"
            )
        try:
            return _manifest(body)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the content of a manifest: {error!r}") from None


def _manifest(body: dict[str, Any]) -> Manifest:
    files = {str(name): (int(size), int(crc)) for name, (size, crc) in body["files"].items()}
    if wrong := [name for name in files if not _FILE.fullmatch(name)]:
        raise ValueError(f"'{wrong[0]}' is no file of a checkpoint")
    tensors = {str(key): _stored(key, entry, files) for key, entry in body["tensors"].items()}
    state = body["state"]
    if not isinstance(state, dict):
        raise ValueError("its state is no table")
    if not isinstance(skipped := state.get("skipped", 0), int) or skipped < 0:
        raise ValueError(f"its state has {shown(skipped)} updates that were skipped")
    return Manifest(int(body["step"]), int(body["serial"]), state, files, tensors)


def _stored(key: str, entry: Any, files: Mapping[str, Any]) -> Stored:
    dtype, shape, parts = entry
    whole = Box(tuple(0 for _ in shape), tuple(int(size) for size in shape))
    found = tuple((str(file), Box(tuple(map(int, start)), tuple(map(int, stop)))) for file, start, stop in parts)
    for file, box in found:
        if not len(box.start) == len(box.stop) == len(shape):
            raise ValueError(f"a part of '{key}' goes from {box.start} to {box.stop}, and its shape is {whole.stop}")
        if file not in files or whole.meet(box) != box:
            raise ValueError(f"a part of '{key}' cannot lie at {box} in '{file}'")
    return Stored(str(dtype), whole.stop, found)


def _crc_of(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


# ---- folders ----

_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(r"step-\d{8,}(\.\w+)*\.partial")
_DOOMED = ".removed.partial"
Flaw = Literal["unusable", "not-finite"]
"""The reason why a checkpoint was set aside: it is damaged, or steps from it are not finite."""
_BLOCK = 1 << 24


@dataclass(frozen=True)
class Keep:
    """The checkpoints to keep: the ``last`` newest, those at a multiple of ``every`` steps (0: none
    of these), and, with ``best``, the one with the least evaluation loss."""

    last: int = 2
    every: int = 0
    best: bool = False


def best_of(complete: Iterable[Manifest]) -> list[Manifest]:
    """Return the checkpoints with a known evaluation loss, by rising loss; of equal ones the newer
    first."""
    known = [one for one in complete if isinstance(one.state.get(LOSS), float | int)]
    return sorted(known, key=lambda one: (one.state[LOSS], -one.serial))


class CheckpointFolder:
    """The checkpoints of one run. One process writes (``open``, ``begin``, ``commit``,
    ``abandon``); any may read. epoch: the attempt that writes; once it is over, every method that
    changes something raises RunLost."""

    def __init__(self, root: Path, epoch: Epoch | None = None) -> None:
        self.root, self._epoch = root, epoch or Epoch(root.parent)

    def path(self, step: int) -> Path:
        """Return the path of the complete checkpoint of ``step``."""
        return self.root / f"step-{step:08d}"

    def partial(self, step: int) -> Path:
        """Return the path of the checkpoint while it is being written."""
        word = f".{self._epoch.word}" if self._epoch.word else ""
        return self.root / f"step-{step:08d}{word}.partial"

    # ---- writing ----

    def open(self) -> None:
        """Create the folder, and remove partial checkpoints of a crash, or of an abandoned attempt
        that may still write. Raises OSError."""
        self._epoch.check()
        self.root.mkdir(parents=True, exist_ok=True)
        for entry in [entry for entry in self.root.iterdir() if _PARTIAL.fullmatch(entry.name)]:
            doomed = entry
            if not entry.name.endswith(_DOOMED):  # rename first, so that no attempt can commit half of it
                doomed = entry.rename(entry.with_name(entry.name.removesuffix(".partial") + _DOOMED))
            shutil.rmtree(doomed)

    def begin(self, step: int, needed: int) -> None:
        """Create an empty partial folder. Raises CheckpointError, before writing, if ``needed``
        bytes do not fit on the disk."""
        self._epoch.check()
        self.abandon(step)
        if not self.root.parent.is_dir():
            raise CheckpointError(f"{self.root}: this folder is gone: it was removed or renamed during the run")
        self.root.mkdir(exist_ok=True)  # the user may have removed the checkpoints alone
        if shutil.disk_usage(self.root).free < needed:
            raise self.full(step, needed)
        self.partial(step).mkdir()

    def full(self, step: int, needed: int) -> CheckpointError:
        """Return the error for a full disk."""
        free = shutil.disk_usage(self.root).free
        problem = f"no room for the checkpoint of step {step}: it needs {needed} bytes and {free} are free"
        complete = self.complete()
        left = f"The checkpoint of step {complete[0].step} is untouched" if complete else "It would be the first"
        return CheckpointError(f"{self.root}: {problem}. {left}")

    def commit(
        self,
        step: int,
        files: dict[str, tuple[int, int]],
        state: dict[str, Any],
        *,
        tensors: dict[str, Stored] | None = None,
    ) -> None:
        """Turn the partial folder into the newest complete checkpoint.

        files: every file with its size and checksum, already on disk. Raises CheckpointError or
        OSError.
        """
        self._epoch.check()
        partial, final = self.partial(step), self.path(step)
        for name, (size, _) in files.items():
            if _problem(partial / name, size):
                problem = "not what its rank wrote, seen from rank 0. Checkpoints need a folder that all nodes share"
                raise CheckpointError(f"{partial / name}: {problem}")
        serial = 1 + max((manifest.serial for manifest in self.complete()), default=0)
        write_synced(partial / MANIFEST, [Manifest(step, serial, state, files, tensors or {}).to_text().encode()])
        sync_folder(partial)
        replaced = self.root / f"{final.name}.old.partial"
        if final.exists():  # the run went back to an older step and reached this one again
            self._epoch.check()
            final.rename(replaced)
        self._epoch.check()
        partial.rename(final)
        sync_folder(self.root)
        shutil.rmtree(replaced, ignore_errors=True)

    def abandon(self, step: int) -> None:
        """Remove the partial folder of an incomplete checkpoint."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def set_aside(self, step: int, flaw: Flaw = "unusable") -> str:
        """Rename a checkpoint that cannot be used; return its new name, which states the flaw. Only
        the last checkpoint with the flaw ``not-finite`` is kept."""
        self._epoch.check()
        target = self.root / f"{self.path(step).name}.{flaw}"
        for old in self.root.glob("step-*.not-finite") if flaw == "not-finite" else [target]:
            shutil.rmtree(old, ignore_errors=True)
        self.path(step).rename(target)
        return target.name

    def prune(self, keep: Keep) -> None:
        """Delete the checkpoints that ``keep`` does not keep. Raises OSError."""
        complete = self.complete()
        best = best_of(complete)[:1] if keep.best else []
        for manifest in complete[keep.last :]:
            if manifest in best or (keep.every and manifest.step % keep.every == 0):
                continue
            self._epoch.check()
            doomed = self.partial(manifest.step)
            # Rename first, so that a crash leaves no incomplete checkpoint under a final name.
            self.path(manifest.step).rename(doomed)
            shutil.rmtree(doomed)

    # ---- reading ----

    def survey(self) -> tuple[list[int], list[tuple[int, str]], list[str]]:
        """Return (steps whose files all exist in their right size, newest first; step and problem
        of the others; folders that were set aside). File contents are not read."""
        complete, problems = self._survey()
        aside = [str(path) for path in sorted(self.root.glob("step-*.unusable"))]
        return [manifest.step for manifest in complete], problems, aside

    def complete(self) -> list[Manifest]:
        """Return the checkpoints whose files all exist in their right size, newest first. File
        contents are not read."""
        return self._survey()[0]

    def read(self, step: int) -> Manifest:
        """Return the manifest of ``step``. Raises CheckpointError naming the file."""
        try:
            return self._manifest(step)
        except FileNotFoundError:
            raise CheckpointError(
                f"{self.path(step)}: no complete checkpoint there. {self.describe_other_steps(step)}"
            ) from None
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{_manifest_problem(self.path(step), error)}. {self.describe_other_steps(step)}"
            ) from None

    def problem(self, manifest: Manifest, names: Iterable[str]) -> str | None:
        """Return the first wrong size or checksum among the files ``names``, after reading them;
        None if all are intact."""
        folder = self.path(manifest.step)
        return next(filter(None, (_problem(folder / name, *manifest.files[name]) for name in names)), None)

    def describe_other_steps(self, step: int) -> str:
        """Return a sentence on the folder's checkpoints besides ``step``."""
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
            wrong = (_problem(entry / name, size) for name, (size, _) in manifest.files.items())
            if problem := next(filter(None, wrong), None):
                problems.append((step, problem))
            else:
                complete.append(manifest)
        return sorted(complete, key=lambda manifest: manifest.serial, reverse=True), problems

    def _manifest(self, step: int) -> Manifest:
        """Return the manifest of ``step``. Raises OSError and ValueError."""
        manifest = Manifest.from_text(contents_within(self.path(step) / MANIFEST, LARGEST).decode())
        if manifest.step != step:
            raise ValueError(f"it belongs to step {manifest.step}; the folder was renamed")
        return manifest


def measure(file: Path) -> tuple[int, int]:
    """Return (bytes, CRC-32) of a file, as read back. Raises OSError."""
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


def _problem(file: Path, size: int, crc: int | None = None) -> str | None:
    """Return what is wrong with a file, None if nothing is. crc: the expected checksum; None: do
    not read the contents."""
    try:
        if (found := file.stat().st_size) != size:
            return f"{file}: damaged: {found} bytes, {size} were written"
        if crc is not None and measure(file) != (size, crc):
            return f"{file}: damaged: its checksum does not match, some bytes have changed since it was written"
    except FileNotFoundError:
        return f"{file}: missing"
    except OSError as error:
        return f"{file}: cannot be read: {error.strerror}"
    return None
