"""``plait logs``: the output of a run's ranks, each line with its origin.

Rank 0 also writes its output on the terminal to ``logs/terminal.log``. Under Slurm the output is in
the job's log. For a run without either, steps are reported from ``metrics.jsonl``.
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
    from plait.launch.kubernetes.api import KubernetesNamespace

POLL_SECONDS = 0.3
"""Seconds between two checks for new lines in the files."""
LONGEST = 1 << 16
"""The bytes of an unterminated line after which it is shown as one line."""
STEPS = "steps"
_RANK = re.compile(r"rank-(\d+)\.log")


def log_files(run: Path, ranks: Sequence[int] = ()) -> list[tuple[str, Path]]:
    """Return (origin, log file) of a run: ``slurm JOB``, ``rank N``; ``steps`` (metrics.jsonl) if
    there is neither a Slurm log nor a terminal log. ranks: only files of these ranks; none given:
    all files. Raises JobError for a rank without a log."""
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
        raise JobError(
            f"{absent[0]} has no log in {run / 'logs'}: {there}", key="--rank", fix="Name a rank that has a log"
        )


def _ranges(ranks: Sequence[int]) -> str:
    whole = list(ranks) == list(range(len(ranks)))
    return f"0 to {ranks[-1]}" if whole and len(ranks) > 1 else ", ".join(map(str, ranks))


@dataclass
class _LogTail:
    """Reader of a log file that may grow, be replaced by a new one, or not exist yet. read: bytes
    read so far. rest: an unterminated last line."""

    path: Path
    read: int = 0
    inode: int = 0
    rest: bytes = b""
    lines: deque[str] = field(default_factory=deque[str])

    def new_lines(self, *, flush: bool) -> Iterator[str]:
        """Yield whole lines that were added. flush: True to yield an unterminated last line,
        too."""
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
        if flush and self.rest:
            yield self.rest.decode(errors="replace")
            self.rest = b""


def log_lines(run: Path, ranks: Sequence[int] = (), *, last: int = 0, follow: bool = False) -> Iterator[str]:
    """Yield lines as ``[rank 3] text``, file after file, then new lines as they come. last: the
    largest number of lines of each file; 0: all. follow: True to go on until the run has ended.
    Raises JobError for a rank without a log."""
    from plait.api.runs import view_run

    _check_ranks(run, ranks)
    growing = {path: (name, _LogTail(path)) for name, path in log_files(run, ranks)}
    for name, one in growing.values():
        lines = one.new_lines(flush=not follow)
        for line in deque(lines, last) if last else lines:
            yield from _labelled(name, line)
    while follow:
        going = view_run(run).is_active
        files = log_files(run, ranks)
        for name, path in files:
            growing.setdefault(path, (name, _LogTail(path)))
        if (STEPS, run / "metrics.jsonl") not in files:  # a log that exists by now has the steps
            growing.pop(run / "metrics.jsonl", None)
        for name, one in growing.values():
            for line in one.new_lines(flush=not going):
                yield from _labelled(name, line)
        if not going:
            return
        time.sleep(POLL_SECONDS)


def _labelled(name: str, line: str) -> Iterator[str]:
    if name != STEPS:
        yield f"[{name}] {line}"
        return
    with suppress(ValueError, JobError, TypeError, KeyError):
        one = parse_table(line)
        more = f"  eval {_number(one['eval_loss'])}" if "eval_loss" in one else ""
        speed = f"{one['tokens_per_second']:,.0f} tokens/s"
        yield f"[{name}] step {one['step']}  loss {_number(one['loss'])}  {speed}{more}"


def _number(loss: object) -> str:
    """Return a loss as text; null stands for an unknown loss."""
    return f"{loss:.4g}" if is_number(loss) else "not known"


def pod_log_lines(cluster: KubernetesNamespace, name: str) -> Iterator[str]:
    """Yield the output of pod 0 of a run in a cluster, until the pod ends. Raises LaunchError."""
    from plait.launch.kubernetes.objects import pod_lines, run_in

    for pod, line in pod_lines(cluster, run_in(cluster, name)):
        yield f"[pod {pod}] {line.decode(errors='replace')}"
