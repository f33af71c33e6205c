"""What is found for a figure of a paper, and where it is kept.

A figure's JSON carries a fingerprint of Plait's code and data and of the paper's own files here. Where
that is unchanged nothing is computed again, so an interrupted ``make papers`` goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from plait.core.base.files import replacing

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "papers"
PAPERS = ("domino", "internevo", "resharding", "megascale", "arnold")

Value = float | str | bool | Sequence[float] | None
"""A number, words, whether it holds, or the least and the most of several numbers."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Plait's number of a published row. command: what prints it, or what it is computed from.

    reading: by a reading of the paper's words or another choice, which ``note`` names. over: values over what
    the paper does not print.
    """

    name: str
    value: Value = None
    reading: Value = None
    over: Sequence[Value] = ()
    command: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Series:
    """A curve, or a row of a matrix: points are (x, y)."""

    name: str
    points: Sequence[tuple[float | str, float]]


@dataclass(frozen=True, kw_only=True)
class Found:
    """Of a figure. facts: numbers that the words of the page speak of."""

    rows: Sequence[Row] = ()
    series: Sequence[Series] = ()
    facts: Mapping[str, float | str] = field(default_factory=dict[str, float | str])


def spread(values: Sequence[float]) -> list[float]:
    """The least and the most, rounded."""
    return [round(min(values), 4), round(max(values), 4)]


@cache
def fingerprint(paper: str) -> str:
    """Of all that a paper's numbers follow from: Plait, its specs, the benchmarks' code, the papers' jobs."""
    digest = hashlib.sha256()
    for folder, pattern in (("plait", "*.py"), ("specs", "*.toml"), ("benchmarks", "*.py")):
        for file in sorted((ROOT / folder).rglob(pattern)):
            own = file.parent == HERE and file.stem in PAPERS and file.stem != paper
            if not own and file.stem not in ("page", "draw", "verdicts", "points", "__main__"):
                digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    for job in sorted((HERE / "jobs").glob("*.toml")):
        digest.update(job.read_bytes())
    return digest.hexdigest()[:16]


def job_file(paper: str) -> Path:
    """The job that the paper's commands change."""
    return HERE / "jobs" / f"{paper}.toml"


def result_file(paper: str, figure: str) -> Path:
    """Where a figure's JSON lies."""
    return RESULTS / paper / f"{figure}.json"


def read(paper: str, figure: str) -> dict[str, Any] | None:
    """What was kept of a figure; None where nothing was."""
    file = result_file(paper, figure)
    return json.loads(file.read_text()) if file.exists() else None


def write(paper: str, figure: str, found: Found, about: Mapping[str, Any]) -> None:
    """Keep what was found, whole or not at all."""
    file = result_file(paper, figure)
    file.parent.mkdir(parents=True, exist_ok=True)
    values = {"paper": paper, "figure": figure, **about, "fingerprint": fingerprint(paper), **asdict(found)}
    with replacing(file) as partial:
        partial.write_text(_flat(json.dumps(values, indent=1, default=float)) + "\n")


def _flat(text: str) -> str:
    """Indented JSON, with every list of numbers or words on one line."""
    return re.sub(r"\[\n[^][{}]*\]", lambda found: re.sub(r"\n *", "", found[0].replace(",\n", ", \n")), text)
