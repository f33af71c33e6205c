"""The history of a run's attempts: one JSON object per line in ``attempts.jsonl`` for each start of
its ranks.

An attempt's line is written at its start, with the outcome ``running``, and updated later. If the
outcome is still ``running`` when the next attempt begins, the attempt was cut off together with its
launcher.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal
from zlib import crc32

from plait.core.base.codec.data import decode
from plait.core.base.codec.json_text import DOCUMENT, parse_table, read_table
from plait.core.base.env import epoch_word, note_epoch
from plait.core.base.errors import JobError, RunLost
from plait.core.base.files import contents_within, replacing

FILE, UNREADABLE = "attempts.jsonl", "attempts.unreadable"
MOST = 10_000
"""The most attempts that are kept: the newest."""

Outcome = Literal["running", "finished", "stopped", "failed", "cut off"]


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """An attempt at a run. attempt: its number, from 1 on, over all starts of the run. started,
    ended: seconds since 1970; None if unknown.

    outcome: ``stopped`` by a signal; ``cut off`` if the launcher was killed or could not write.
    cause: one word for a failure (``killed``, ``ended``, ``silent``, or a hang's: ``cut off``,
    ``stopped``, ``mismatch``, ...). why: the failure's message; while the attempt runs, a remark if
    it was asked to end. ranks: the ranks at fault, if known. world: number of ranks. hosts: host
    names by node rank. plan: the plan's hash. changed: description of the changes since the
    previous attempt.

    resumed: the step after which it began; step: the last completed step; steps: the steps of this
    attempt. They are -1 or 0 if it never trained. writing: step of the checkpoint that was written
    in the background when the last step began; 0 if none. If the attempt failed before that
    checkpoint was complete, the steps after the previous checkpoint are lost too.

    The durations are in seconds, None if the attempt did not get that far. detection_seconds: at
    most, from a failure to its detection. wait_seconds: from the end of the previous attempt to the
    start of this one, including backoff. restart_seconds: from the start of the ranks until all
    were about to train. first_step_seconds: from then until all ranks had completed a step.
    """

    attempt: int
    started: float
    ended: float | None = None
    outcome: Outcome = "running"
    cause: str = ""
    why: str = ""
    ranks: tuple[int, ...] = ()
    world: int = 0
    hosts: tuple[str, ...] = ()
    plan: str = ""
    changed: str = ""
    resumed: int = -1
    step: int = -1
    steps: int = 0
    writing: int = 0
    detection_seconds: float | None = None
    wait_seconds: float | None = None
    restart_seconds: float | None = None
    first_step_seconds: float | None = None

    def to_text(self) -> str:
        """Return the attempt as a line of the file."""
        return json.dumps(asdict(self)) + "\n"


def read_attempts(folder: Path, unreadable: list[bytes] | None = None) -> list[Attempt]:
    """Return the attempts of the run in ``folder``, oldest first; empty if the file cannot be read.

    Accepted: a line with an attempt's keys, each of its type; missing keys have their defaults.
    Ignored: keys of other versions, and lines that are no attempt, which are added to
    ``unreadable``.
    """
    found: list[Attempt] = []
    with suppress(OSError, ValueError):
        for line in contents_within(folder / FILE, DOCUMENT).splitlines():
            try:
                found.append(decode(Attempt, parse_table(line), ignore_unknown=True))
            except (ValueError, JobError):
                if unreadable is not None and line.strip():
                    unreadable.append(line)
    return found


def set_aside(folder: Path, lines: Sequence[bytes]) -> None:
    """Append lines that are no attempts to a separate file, because the history is rewritten
    without them. Raises OSError."""
    with (folder / UNREADABLE).open("ab") as file:
        file.writelines(line + b"\n" for line in lines)


def write_attempts(folder: Path, attempts: Sequence[Attempt]) -> None:
    """Replace the history by these attempts. Raises OSError, also if the folder is gone."""
    content, file = "".join(one.to_text() for one in attempts[-MOST:]).encode(), folder / FILE
    try:
        with replacing(file, parents=False) as path:
            path.write_bytes(content)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        with file.open("r+b") as old:  # on a full disk the file's last block usually has room left
            old.write(b"\n" * max(0, len(content) - old.seek(0, os.SEEK_END)))
            old.flush()  # fails before any data is lost
            old.seek(0)
            old.write(content)
            old.truncate()


def cut_off(attempts: Sequence[Attempt], *, step: int, at: float | None) -> list[Attempt]:
    """Return the attempts, with ``running`` ones changed to ``cut off``. step: the last known step.
    at: its time in seconds since 1970; None if unknown."""
    why = (
        "Its launcher was killed (under torchrun, rank 0), or could not write how it ended: a full disk, or a folder "
        "that may not be changed."
    )
    return [
        replace(one, ended=at and max(at, one.started), step=max(step, one.step), steps=_done(one, step),
                outcome="cut off", cause="cut off", why=f"{one.why} {why}".strip())
        if one.outcome == "running" else one
        for one in attempts
    ]  # fmt: skip


def _done(attempt: Attempt, step: int) -> int:
    """Return the number of steps of an attempt whose last known step is ``step``."""
    return attempt.steps if attempt.resumed < 0 else max(attempt.steps, step - attempt.resumed)


EPOCH_FILE = "epoch.json"


def _of_run(folder: Path) -> str:
    """Return a suffix for the run's epoch words, a checksum of its folder's name, which is the same
    wherever the folder is mounted."""
    return f"{crc32(folder.resolve().name.encode()):08x}"


@dataclass(frozen=True)
class Epoch:
    """The identity of an attempt at the run in ``folder``, which fences older attempts. word:
    unique to the attempt; empty if no attempt was begun, so that ``over`` is always False."""

    folder: Path
    word: str = ""

    @staticmethod
    def begin(folder: Path) -> Epoch:
        """Return the epoch of a new attempt and pass it to all future child processes. If the
        folder cannot be written, the word is empty: no attempt can write there anyway."""
        word = secrets.token_hex(8) + _of_run(folder)
        try:
            with replacing(folder / EPOCH_FILE, parents=False) as draft:
                draft.write_text(json.dumps({"epoch": word, "since": time.time()}) + "\n")
        except OSError:
            word = ""
        note_epoch(word)
        return Epoch(folder, word)

    @staticmethod
    def mine(folder: Path) -> Epoch:
        """Return the epoch in which this process was started; its word is empty if that was another
        run's."""
        word = epoch_word()
        return Epoch(folder, word if word.endswith(_of_run(folder)) else "")

    @property
    def over(self) -> bool:
        """True if another attempt has begun; False if the file is missing or cannot be read."""
        if not self.word:
            return False
        with suppress(OSError, ValueError):
            found = read_table(self.folder / EPOCH_FILE).get("epoch")
            return isinstance(found, str) and found != self.word
        return False

    def check(self) -> None:
        """Raise RunLost if another attempt has begun."""
        if self.over:
            raise RunLost(
                f"this attempt at the run in {self.folder} was given up, and another has begun: nothing more is "
                "written, and it ends"
            )
