"""What a rank says of itself when a run seems to hang: a small file beside its ring, written by a thread of
its own, which all who look for the cause can read.

The folder ``hang`` in a run's folder is the question: whoever suspects something makes it, a rank's watchdog
or the launcher; every rank that can answers with its part.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from plait.core.base.codec.data import decode
from plait.core.base.codec.json_text import read_table
from plait.core.base.errors import JobError
from plait.core.base.files import replacing
from plait.core.runs.evidence import FILE, Thread

FOLDER = "hang"


@dataclass(frozen=True, kw_only=True)
class RankAnswer:
    """A rank's answer. wall: when, in ns of its host's clock. address: where it listens, for others to see
    whether they reach it: host and port. complete: whether it has tried to reach the others. token: of its
    ring, to tell one start of a run from another. first: it does what it does for the first time. busy: share
    of a processor that the thread which trains took meanwhile."""

    rank: int
    token: int
    wall: int
    thread: Thread
    doing: str = ""
    step: int = -1
    patient: bool = False
    stack: tuple[str, ...] = ()
    address: tuple[str, int] | None = None
    reached: tuple[int, ...] = ()
    missed: tuple[int, ...] = ()
    complete: bool = False
    first: bool = False
    busy: float = 0.0


def asked(folder: Path) -> bool:
    """Whether somebody suspects that the run hangs."""
    return (folder / FOLDER).is_dir()


def ask(folder: Path) -> None:
    """Ask every rank for its part. Raises OSError."""
    (folder / FOLDER).mkdir(exist_ok=True)


def answered(folder: Path, rank: int) -> bool:
    """Whether a rank has: a question that was taken back and put again has no answers yet."""
    return _part_path(folder, rank).exists()


def write_part(folder: Path, part: RankAnswer) -> None:
    """Answer. Raises OSError."""
    with replacing(_part_path(folder, part.rank), parents=False) as path:
        path.write_text(json.dumps(asdict(part)) + "\n")


def read_parts(folder: Path) -> dict[int, RankAnswer]:
    """The answers so far, by rank.

    Known: a rank's answer with all its keys, each of its type. Passed over: an answer that is damaged, as one
    that was never given: whoever looks for the cause asks again.
    """
    parts: dict[int, RankAnswer] = {}
    for path in (folder / FOLDER).glob("rank-*.json"):
        try:
            part = decode(RankAnswer, read_table(path))
        except (OSError, ValueError, JobError):
            continue
        parts[part.rank] = part
    return parts


def _part_path(folder: Path, rank: int) -> Path:
    return folder / FOLDER / f"rank-{rank:05d}.json"


def forget_parts(folder: Path) -> None:
    """Take the question back: of an earlier start, or because the run has gone on."""
    shutil.rmtree(folder / FOLDER, ignore_errors=True)


def forget_hang(folder: Path) -> None:
    """Remove what an earlier start of the run has left."""
    forget_parts(folder)
    (folder / FILE).unlink(missing_ok=True)
