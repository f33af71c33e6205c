"""``plait logs``: what the ranks of a run have printed, line by line, each with whose it is.

What rank 0 prints on the terminal where the run was started it also writes to ``logs/terminal.log``. Under
Slurm it stands in the job's log. Of a run that has neither, its steps are told from ``metrics.jsonl``.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from plait.core.base.codec.json_text import parse_table
from plait.core.base.errors import JobError
from plait.core.base.numbers import is_number
from plait.core.runs.history import TERMINAL

if TYPE_CHECKING:
    from plait.launch.kubernetes_api import KubernetesNamespace

LOOK = 0.3
"""Seconds between two looks whether files have grown."""
LONGEST = 1 << 16
"""Bytes of a line without an end after which it is shown as one."""
STEPS = "steps"
_RANK = re.compile(r"rank-(\d+)\.log")


def log_files(run: Path, ranks: Sequence[int] = ()) -> list[tuple[str, Path]]:
    """Files of a run with whose they are: ``slurm JOB``, ``rank N``; ``steps`` where nothing else tells of
    them. ranks: these alone."""
    found = _rank_logs(run)
    files = [(f"rank {rank}", found[rank]) for rank in sorted(found) if not ranks or rank in ranks]
    terminal = run / "logs" / TERMINAL
    printed = [("rank 0", terminal)] if terminal.is_file() else []
    if ranks:
        return (printed if 0 in ranks else []) + files
    slurm = sorted(run.glob("logs/slurm-*.log"), key=os.path.getmtime)
    first = [(f"slurm {one.stem.removeprefix('slurm-')}", one) for one in slurm]
    return (first or printed or [(STEPS, run / "metrics.jsonl")]) + files


def _rank_logs(run: Path) -> dict[int, Path]:
    return {int(match.group(1)): one for one in run.glob("logs/rank-*.log") if (match := _RANK.fullmatch(one.name))}


def _check_ranks(run: Path, ranks: Sequence[int]) -> None:
    """Raise JobError for a rank that has no log."""
    found = _rank_logs(run)
    if absent := [rank for rank in ranks if rank not in found]:
        there = f"there are {_ranges(sorted(found))}" if found else "no rank has begun"
        raise JobError(f"{absent[0]} has no log in {run / 'logs'}: {there}", key="--rank", fix="Name one that is there")


def _ranges(ranks: Sequence[int]) -> str:
    whole = list(ranks) == list(range(len(ranks)))
    return f"0 to {ranks[-1]}" if whole and len(ranks) > 1 else ", ".join(map(str, ranks))


@dataclass
class _Growing:
    """A file that may grow, be begun anew, or not be there yet."""

    path: Path
    read: int = 0
    inode: int = 0
    rest: bytes = b""
    lines: deque[str] = field(default_factory=deque[str])

    def new(self, *, all_of_it: bool) -> Iterator[str]:
        """Whole lines that were added. all_of_it: also a last one without an end."""
        with suppress(FileNotFoundError, IsADirectoryError), open(self.path, "rb") as file:
            found = os.fstat(file.fileno())
            if found.st_ino != self.inode or found.st_size < self.read:
                self.read, self.inode, self.rest = 0, found.st_ino, b""
            file.seek(self.read)
            while piece := file.read(1 << 20):
                self.read += len(piece)
                *lines, self.rest = (self.rest + piece).split(b"\n")
                yield from (line.decode(errors="replace").rstrip("\r") for line in lines)
                if len(self.rest) > LONGEST:
                    yield self.rest.decode(errors="replace")
                    self.rest = b""
        if all_of_it and self.rest:
            yield self.rest.decode(errors="replace")
            self.rest = b""


def log_lines(run: Path, ranks: Sequence[int] = (), *, last: int = 0, follow: bool = False) -> Iterator[str]:
    """``[rank 3] text``, file after file, and then as it comes. last: so many lines of each at most, 0: all.
    follow: until the run has ended. Raises JobError."""
    from plait.api.runs import view_run

    _check_ranks(run, ranks)
    growing = {path: (name, _Growing(path)) for name, path in log_files(run, ranks)}
    for name, one in growing.values():
        lines = one.new(all_of_it=not follow)
        for line in deque(lines, last) if last else lines:
            yield from _told(name, line)
    while follow:
        going = view_run(run).going
        files = log_files(run, ranks)
        for name, path in files:
            growing.setdefault(path, (name, _Growing(path)))
        if (STEPS, run / "metrics.jsonl") not in files:  # what has begun meanwhile tells of them
            growing.pop(run / "metrics.jsonl", None)
        for name, one in growing.values():
            for line in one.new(all_of_it=not going):
                yield from _told(name, line)
        if not going:
            return
        time.sleep(LOOK)


def _told(name: str, line: str) -> Iterator[str]:
    if name != STEPS:
        yield f"[{name}] {line}"
        return
    with suppress(ValueError, JobError, TypeError, KeyError):
        one = parse_table(line)
        more = f"  eval {_number(one['eval_loss'])}" if "eval_loss" in one else ""
        speed = f"{one['tokens_per_second']:,.0f} tokens/s"
        yield f"[{name}] step {one['step']}  loss {_number(one['loss'])}  {speed}{more}"


def _number(loss: object) -> str:
    """A loss; null stands for one that is not known."""
    return f"{loss:.4g}" if is_number(loss) else "not known"


def pod_log_lines(cluster: KubernetesNamespace, name: str) -> Iterator[str]:
    """What pod 0 of a run in a cluster prints, until it ends. Raises LaunchError."""
    from plait.launch.kubernetes_runs import pod_lines, run_in

    for pod, line in pod_lines(cluster, run_in(cluster, name)):
        yield f"[pod {pod}] {line.decode(errors='replace')}"
