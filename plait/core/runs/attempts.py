"""The history of a run: one JSON object a line in ``attempts.jsonl``, for every time that its ranks were
started.

The line of an attempt is there from its beginning, with the outcome ``running``; it is filled in as more is
known. One that still says so when the next begins was cut off with its launcher.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from plait.core.base.codec.data import decode
from plait.core.base.codec.json_text import DOCUMENT, parse_table
from plait.core.base.errors import JobError
from plait.core.base.files import contents_within, replacing

FILE, UNREADABLE = "attempts.jsonl", "attempts.unreadable"
MOST = 10_000
"""Attempts that are kept: of more, the newest."""

Outcome = Literal["running", "finished", "stopped", "failed", "cut off"]


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """attempt: from 1 on, over all starts of the run. started, ended: seconds since 1970; None if not known.

    outcome: ``stopped`` by a signal, ``cut off`` when the launcher itself was killed or could not write.
    cause: of a failure, a word (``killed``, ``ended``, ``silent``, or a hang's: ``cut off``, ``stopped``,
    ``mismatch``, ...); why: the paragraph, or of one that runs that it was asked to end. ranks: those that
    are to blame, as far as is known. world: how many ranks there are. hosts: where, by node rank. plan: its
    hash. changed: what was changed against the attempt before, in words.

    resumed: the step it began after; step: the last that was done; steps: how many it did. All -1 or 0 if it
    never trained. writing: step of the checkpoint that was being written in the background when the last step
    began, 0 if none was: what was done since is lost too if the attempt failed before it was whole. Of what
    it took, in seconds, None where it did not come to that: restart_seconds: from the start of the ranks
    until all were about to train; first_step_seconds: from then until all had done a step; detection_seconds:
    at most, from a failure until it was known; wait_seconds: from the end of the attempt before until this
    one, backing off included.
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
        """As a line."""
        return json.dumps(asdict(self)) + "\n"


def read_attempts(folder: Path, unreadable: list[bytes] | None = None) -> list[Attempt]:
    """Of the run in ``folder``, oldest first; none where the file cannot be read.

    Known: a line with an attempt's keys, each of its type; a key that is missing has its default. Passed
    over: keys of other versions, and whole lines that are no attempt, which ``unreadable`` gets.
    """
    found: list[Attempt] = []
    with suppress(OSError, ValueError):
        for line in contents_within(folder / FILE, DOCUMENT).splitlines():
            try:
                found.append(decode(Attempt, parse_table(line), others=True))
            except (ValueError, JobError):
                if unreadable is not None and line.strip():
                    unreadable.append(line)
    return found


def set_aside(folder: Path, lines: Sequence[bytes]) -> None:
    """Keep lines that are no attempts beside the file, which is written anew without them. Raises OSError."""
    with (folder / UNREADABLE).open("ab") as file:
        file.writelines(line + b"\n" for line in lines)


def write_attempts(folder: Path, attempts: Sequence[Attempt]) -> None:
    """All of them, in place of what is there. Raises OSError, also for a folder that is gone."""
    content, file = "".join(one.to_text() for one in attempts[-MOST:]).encode(), folder / FILE
    try:
        with replacing(file, parents=False) as path:
            path.write_bytes(content)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        with file.open("r+b") as old:  # of its last block, mostly, something is left on a full disk
            old.write(b"\n" * max(0, len(content) - old.seek(0, os.SEEK_END)))
            old.flush()  # which fails before anything is lost
            old.seek(0)
            old.write(content)
            old.truncate()


def cut_off(attempts: Sequence[Attempt], *, step: int, at: float | None) -> list[Attempt]:
    """The same, with those that still run told as cut off. step, at: the last step that is known of, and
    when."""
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


def _done(one: Attempt, step: int) -> int:
    """The steps of an attempt that was heard of last after ``step``."""
    return one.steps if one.resumed < 0 else max(one.steps, step - one.resumed)
