"""``metrics.jsonl``: a line a step. A full disk costs lines, not the run; that the run folder is gone ends
it."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from plait.core.errors import RankFailure
from plait.core.missing import Missing


class MetricsFile:
    """The metrics of the run in ``folder``; what cannot be written is counted by ``missing``."""

    def __init__(self, folder: Path, missing: Missing) -> None:
        self.folder, self.path, self.missing = folder, folder / "metrics.jsonl", missing
        self._file: int | None = None
        # Held open, so that the folder's number on the disk is given to no other while we run.
        self._held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)

    def forget_after(self, step: int) -> None:
        """Cut off what a run that was ended wrote of later steps, and a line that it did not finish."""
        self.check()
        end = 0
        try:
            if not self.path.is_file():
                return
            with open(self.path, "rb+") as file:
                for line in file:
                    if not line.endswith(b"\n") or _step_of(line) not in range(step + 1):
                        file.truncate(end)
                        break
                    end += len(line)
        except OSError as error:
            self.missing.failed(error, 0)

    def add(self, metrics: Mapping[str, Any]) -> None:
        """One more step. Raises RankFailure if the run folder is gone."""
        self.check()
        try:
            self._write((json.dumps(finite(metrics)) + "\n").encode())
        except OSError as error:
            self.missing.failed(error)
        else:
            self.missing.worked()

    def check(self) -> None:
        """Raise RankFailure if the run folder was removed, moved away or replaced since the start."""
        try:
            same = os.path.samestat(os.stat(self.folder), os.fstat(self._held))
        except (FileNotFoundError, NotADirectoryError):
            same = False
        except OSError:  # a disk in trouble says nothing about the folder
            return
        if not same:
            raise RankFailure(
                f"the run folder {self.folder} was removed or moved while the run went on: nothing more can be saved, "
                "so training has ended. Put it back to go on from its last checkpoint, or start anew."
            )

    def close(self) -> None:
        """Add no more."""
        for handle in (self._file, self._held):
            with suppress(OSError):  # some file systems say only now that a write failed
                if handle is not None:
                    os.close(handle)
        self._file = None

    def _write(self, line: bytes) -> None:
        """All of the line or nothing."""
        if self._file is not None and os.fstat(self._file).st_nlink == 0:  # somebody removed the file alone
            os.close(self._file)
            self._file = None
        if self._file is None:
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        before = os.fstat(self._file).st_size
        if os.write(self._file, line) < len(line):
            os.ftruncate(self._file, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with null for what is not finite: JSON has no NaN."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _step_of(line: bytes) -> int:
    """The step of a metrics line, -1 for one that was cut off."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return -1
