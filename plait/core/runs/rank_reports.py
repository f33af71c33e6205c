"""Reports of ranks in a run that seems to hang. A thread of each rank writes a small file in the
run's folder, which all diagnosing processes can read.

The folder ``hang`` in a run's folder requests the reports. A rank's watchdog or the launcher makes
it on suspicion; every rank that can writes its report.
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
class RankReport:
    """A rank's report. wall: its time, in ns of the host's clock. address: host and port at which
    the rank listens, for reachability tests of other ranks. reached, missed: ranks that it could
    and could not reach. complete: True if it has tried to reach all other ranks. token: of its
    ring, to tell starts of a run apart. first: True if its current activity is its first of that
    kind. busy: CPU share of the training thread during the report."""

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


def reports_requested(folder: Path) -> bool:
    """True if a process suspects that the run hangs and has requested reports."""
    return (folder / FOLDER).is_dir()


def request_reports(folder: Path) -> None:
    """Request a report from every rank. Raises OSError."""
    (folder / FOLDER).mkdir(exist_ok=True)


def has_report(folder: Path, rank: int) -> bool:
    """True if the rank has written its report since the last request."""
    return _part_path(folder, rank).exists()


def write_report(folder: Path, part: RankReport) -> None:
    """Write a rank's report. Raises OSError."""
    with replacing(_part_path(folder, part.rank), parents=False) as path:
        path.write_text(json.dumps(asdict(part)) + "\n")


def read_reports(folder: Path) -> dict[int, RankReport]:
    """Return the reports so far, by rank.

    Accepted: a report with all its keys, each of its type. Ignored: a damaged report, as if it was
    missing; the reader tries again.
    """
    parts: dict[int, RankReport] = {}
    for path in (folder / FOLDER).glob("rank-*.json"):
        try:
            part = decode(RankReport, read_table(path))
        except (OSError, ValueError, JobError):
            continue
        parts[part.rank] = part
    return parts


def _part_path(folder: Path, rank: int) -> Path:
    return folder / FOLDER / f"rank-{rank:05d}.json"


def clear_reports(folder: Path) -> None:
    """Remove the request and all reports: they are of an earlier start, or the run has
    continued."""
    shutil.rmtree(folder / FOLDER, ignore_errors=True)


def forget_hang(folder: Path) -> None:
    """Remove the reports and the verdict that an earlier start of the run has left."""
    clear_reports(folder)
    (folder / FILE).unlink(missing_ok=True)
