"""Metrics of a step: speed, MFU, hidden communication; and ``metrics.jsonl``, one line per step. A
full disk loses lines but does not end the run; a removed run folder ends it."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from plait.core.base.codec.json_text import parse_table
from plait.core.base.errors import RankFailure
from plait.core.base.files import replacing
from plait.core.cluster.mfu import DEVICE, mfu
from plait.core.job.plan import Plan
from plait.core.record.records import Records
from plait.core.runs.attempts import Epoch
from plait.core.runs.progress import Missing


@dataclass(frozen=True)
class DeviceRates:
    """FLOP/s of rank 0's device. name: by its driver. ranks: ranks that share it. peak: for MFU;
    None if unknown. matmul: rate of a rank's matrix products alone, timed when the run began."""

    name: str
    kind: str
    ranks: int
    peak: float | None
    matmul: float


@dataclass(frozen=True)
class Meter:
    """Metrics of steps of ``batch`` sequences on devices with these rates."""

    plan: Plan
    batch: int
    rates: DeviceRates

    def metrics(self, seconds: float, records: Records) -> dict[str, Any]:
        """Return the metrics of a step of ``seconds``. mfu: as ``core.cluster.mfu`` defines it.
        communication_seconds, exposed_seconds, hidden (a share): of this rank, by
        ``core.record.exposure``. idle: share of the step in which this rank's stages waited for
        other stages."""
        communication, idle = records.exposure(), records.idle()
        model, sequence, world = self.plan.model, self.plan.workload.sequence, self.plan.layout.world_size
        rates, work = self.rates, model.causal_step_flops(sequence, self.batch)
        return {
            "seconds": seconds,
            "tokens_per_second": self.batch * sequence / seconds,
            "mfu": mfu(model, sequence=sequence, batch=self.batch, seconds=seconds, devices=world / rates.ranks,
                       peak=rates.peak),
            DEVICE: {
                "name": rates.name, "kind": rates.kind, "peak_flops": rates.peak,
                "matmul_rate_share": work / (world * seconds * rates.matmul),
            },
            "communication_seconds": communication.total,
            "exposed_seconds": communication.exposed,
            "hidden": communication.fraction,
            **({"idle": idle / seconds} if idle is not None else {}),
        }  # fmt: skip


LONGEST = 1 << 20
"""The most bytes of a line; a longer line was not written by Plait."""
UNREADABLE = "metrics.unreadable"
"""File next to the metrics with invalid lines that were found on resuming."""
Line = Literal["kept", "later", "unreadable"]


class MetricsFile:
    """The metrics of the run in ``folder``; lines that cannot be written are counted by
    ``missing``. Raises RunLost if another attempt at the run has begun than this process's."""

    def __init__(self, folder: Path, missing: Missing) -> None:
        self._epoch = Epoch.mine(folder)
        self.folder, self.path, self.missing = folder, folder / "metrics.jsonl", missing
        self._file: int | None = None
        # Held open, so that the folder's inode number is not reused during the run.
        self._held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)

    def remove_after(self, step: int) -> int:
        """Remove lines after ``step``, written by an attempt that was ended; return how many lines
        were unreadable.

        Kept: a table with a whole number ``step``, at most ``step``. Removed: later steps, which
        are computed again, and an unfinished last line. Moved to ``metrics.unreadable``: anything
        else, such as a line that a disk has damaged; lines after it stay.
        """
        self.check()
        try:
            return self._forget_after(step) if self.path.is_file() else 0
        except OSError as error:
            self.missing.failed(error, 0)
            return 0

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Write the line of one more step. Raises RankFailure if the run folder is gone."""
        self.check()
        try:
            self._write((json.dumps(finite(metrics)) + "\n").encode())
        except OSError as error:
            self.missing.failed(error)
        else:
            self.missing.worked()

    def check(self) -> None:
        """Raise RankFailure if the run folder was removed, moved away or replaced since the start;
        raise RunLost if another attempt at the run has begun."""
        self._epoch.check()
        try:
            same = os.path.samestat(os.stat(self.folder), os.fstat(self._held))
        except (FileNotFoundError, NotADirectoryError):
            same = False
        except OSError:  # a disk error says nothing about the folder
            return
        if not same:
            raise RankFailure(
                f"the run folder {self.folder} was removed or moved during the run: nothing more can be saved, "
                "so training has ended. Restore it to resume from its last checkpoint, or start a new run."
            )

    def sync(self) -> None:
        """Flush the lines to the disk, before a checkpoint of their steps becomes valid. May be
        called by another thread."""
        with suppress(OSError):  # a disk error is reported when writing
            handle = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def close(self) -> None:
        """Close the file."""
        for handle in (self._file, self._held):
            with suppress(OSError):  # some file systems report a failed write only now
                if handle is not None:
                    os.close(handle)
        self._file = None

    def _forget_after(self, step: int) -> int:
        end, cut, found = 0, False, set[Line]()
        for kind, line in self._lines(step):
            cut = cut or kind != "kept"
            if cut:
                found.add(kind)
            else:
                end += len(line)
        if found <= {"later"}:  # as after every crash
            if cut:
                os.truncate(self.path, end)
            return 0
        with ExitStack() as held:
            kept = held.enter_context(held.enter_context(replacing(self.path, parents=False)).open("wb"))
            aside = held.enter_context((self.folder / UNREADABLE).open("ab"))
            unreadable = 0
            for kind, line in self._lines(step):
                if kind == "kept":
                    kept.write(line)
                elif kind == "unreadable":
                    aside.write(line)
                    unreadable += line.endswith(b"\n")
        return unreadable

    def _lines(self, step: int) -> Iterator[tuple[Line, bytes]]:
        """Yield every line of the file, or a piece of a line that is too long, with its class."""
        with open(self.path, "rb") as file:
            begins = True
            while line := file.readline(LONGEST):
                whole = line.endswith(b"\n")
                found = _step_of(line) if begins and whole else None
                unfinished = begins and not whole and len(line) < LONGEST  # the last line
                if found is None and line.strip() and not unfinished:
                    yield "unreadable", line
                else:
                    yield "later" if found is None or found > step else "kept", line
                begins = whole

    def _write(self, line: bytes) -> None:
        """Write all of the line or nothing."""
        if self._file is not None and os.fstat(self._file).st_nlink == 0:  # somebody removed the file alone
            os.close(self._file)
            self._file = None
        if self._file is None:
            # Non-blocking: opening a named pipe without a reader would block forever.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
            self._file = os.open(self.path, flags, 0o666)
        before = os.fstat(self._file).st_size
        if os.write(self._file, line) < len(line):
            os.ftruncate(self._file, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with null for numbers that are not finite: JSON has no NaN."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _step_of(line: bytes) -> int | None:
    """Return the step of a metrics line; None for anything else."""
    try:
        step = parse_table(line).get("step")
    except ValueError:
        return None
    return step if isinstance(step, int) and not isinstance(step, bool) and step >= 0 else None
