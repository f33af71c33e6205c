"""Affinity: the weight of the DP groups' spread relative to the PP groups', from the most similar
measured job (Arnold, arXiv 2509.15940, section 5.2).

Jobs are compared by two ratios: r1, computation to bytes sent, and r2, DP bytes to PP bytes. The
paper uses the plain distance (``plain``); but r1 and r2 differ by orders of magnitude, so one of
them would decide alone. The default (``scaled``) is the distance of their logarithms, each divided
by its standard deviation among the compared jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, inf, log
from pathlib import Path
from statistics import pstdev
from typing import Any, Literal

from plait.core.base.codec.json_text import is_list, is_table
from plait.core.base.codec.toml_text import read_toml
from plait.core.base.env import data_folder, specs_folder
from plait.core.base.errors import JobError
from plait.core.base.numbers import shown
from plait.core.job.communication import CommunicationMatrix, Volume

Distance = Literal["scaled", "plain"]
NUMBERS = ("micro_batch", "weights", "dp", "pp", "gain_dp", "gain_pp")
TEXTS = ("name", "gpu", "source", "date")
NAME = "affinity.toml"
NEUTRAL = 0.5
"""Weight of the DP groups' spread if measurements favour neither DP-aligned nor PP-aligned
placement."""


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """A measured job. gain_dp, gain_pp: throughput of its DP-aligned and PP-aligned placement,
    relative to one that is neither, minus 1. volume: bytes and computation of its mean GPU."""

    name: str
    gpu: str
    micro_batch: float
    volume: Volume
    gain_dp: float
    gain_pp: float
    source: str

    @property
    def ratios(self) -> tuple[float, float]:
        """(r1, r2): computation to bytes sent, and DP bytes to PP bytes."""
        sent = self.volume.dp + self.volume.pp
        return self.micro_batch * self.volume.weights / sent, self.volume.dp / self.volume.pp

    @property
    def alpha(self) -> float:
        """Weight of the DP groups' spread, from 0 to 1, by the measured gains; a loss counts as no
        gain."""
        dp, pp = max(0.0, self.gain_dp), max(0.0, self.gain_pp)
        return dp / (dp + pp) if dp + pp else NEUTRAL


@dataclass(frozen=True, kw_only=True)
class Affinity:
    """Weight of the DP groups' spread (``alpha``, from 0 to 1), and a sentence that names the
    measured job behind it (``why``)."""

    alpha: float
    why: str


def own_rows() -> Path:
    """Return the file where ``plait measure placement`` keeps the measurements of this user's
    jobs."""
    return data_folder() / NAME


def known_profiled() -> tuple[Profiled, ...]:
    """Return this user's measured jobs, the newest first, then the shipped ones. Raises JobError
    naming file and key for a damaged file."""
    own = own_rows()
    measured = read_profiled(own)[::-1] if own.is_file() else ()
    return (*measured, *read_profiled(specs_folder() / "placement" / NAME))


def read_profiled(path: Path) -> tuple[Profiled, ...]:
    """Return the measured jobs in a file. Raises JobError naming file and key."""
    jobs = read_toml(path).get("jobs")
    if not is_list(jobs) or not jobs:
        raise JobError("lists no profiled jobs", file=str(path), key="jobs", fix="Write [[jobs]] for each")
    return tuple(_profiled(job, f"jobs[{at}]", str(path)) for at, job in enumerate(jobs))


def _profiled(job: Any, key: str, file: str) -> Profiled:
    if not is_table(job):
        raise JobError("is no table", file=file, key=key, fix="Write it as [[jobs]]")
    for name in (*TEXTS, *NUMBERS):
        value: Any = job.get(name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (number if name in NUMBERS else isinstance(value, str)):
            kind = "a number" if name in NUMBERS else "a text"
            raise JobError(f"{shown(value)} is not {kind}", file=file, key=f"{key}.{name}", fix=f"Write {kind}")
        if name in NUMBERS[:4] and not value > 0:
            raise JobError(f"{value} is not positive", file=file, key=f"{key}.{name}", fix="Write a number above 0")
    volume = Volume(weights=job["weights"], dp=job["dp"], pp=job["pp"])
    return Profiled(
        name=job["name"], gpu=job["gpu"], micro_batch=job["micro_batch"], volume=volume,
        gain_dp=job["gain_dp"], gain_pp=job["gain_pp"], source=job["source"],
    )  # fmt: skip


def affinity_of(
    matrix: CommunicationMatrix, jobs: Sequence[Profiled], gpu: str = "", distance: Distance = "scaled"
) -> Affinity:
    """Return the weight of the DP groups' spread from the measured job nearest to ``matrix`` (the
    traffic of the job to place), among jobs on the GPU type ``gpu``; among all if there are none.
    """
    if len(matrix.heights) == 1:
        return Affinity(alpha=1.0, why="the job has no PP groups to spread")
    if max(matrix.heights) == 1:
        return Affinity(alpha=0.0, why="each DP group is inside one node")
    ratios = matrix.ratios
    if ratios is None:
        if not any(one.dp or one.ep or one.pp for one in matrix.volumes):
            return Affinity(alpha=NEUTRAL, why="what the job sends is not counted")
        quiet = any(one.pp for one in matrix.volumes)
        return Affinity(alpha=0.0 if quiet else 1.0, why="the job sends along one axis only")
    same = [job for job in jobs if gpu and job.gpu.lower() == gpu.lower()]
    compared = same or list(jobs)
    scales = _scales(compared)
    found, nearest = inf, compared[0]
    for job in compared:
        pairs = list(zip(ratios, job.ratios, scales, strict=True))
        apart = hypot(*(a - b if distance == "plain" else log(a / b) / scale for a, b, scale in pairs))
        if apart < found:
            found, nearest = apart, job
    kind = "plain distance" if distance == "plain" else "distance"
    why = f"as {nearest.name} on {nearest.gpu}, the nearest profiled job ({kind} {found:.1f})"
    if gpu and not same:
        why += f"; none was profiled on {gpu}"
    return Affinity(alpha=nearest.alpha, why=why)


def _scales(jobs: Sequence[Profiled]) -> tuple[float, float]:
    """Return the standard deviations of log r1 and log r2; 1 where jobs do not differ."""
    logs = [tuple(log(ratio) for ratio in job.ratios) for job in jobs]
    first, second = (pstdev(one[at] for one in logs) or 1.0 for at in (0, 1))
    return first, second
