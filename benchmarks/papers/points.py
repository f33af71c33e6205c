"""Every point of the papers' texts, from ``points.toml``, as the page ``docs/papers/points.md``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from benchmarks.papers.found import HERE, PAPERS, ROOT
from plait.core.base.codec.toml_text import read_toml

PAGE = ROOT / "docs" / "papers" / "points.md"
STATES = ("there", "in part", "missing", "not ours")
INTRODUCTION = """# The five papers, point by point

Each point is something that the text of a paper says and that a project could have. `make papers` writes this page
from [points.toml](../../benchmarks/papers/points.toml).

- *there*: in code, and seen by the test or command of its row.
- *in part*, *missing*: the last column says what is lacking.
- *not ours*: hardware, another program's size, one production run.

A point that is there need not be a claim that is reproduced: [README](README.md) judges those.
"""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A row of ``points.toml``. What is missing has no ``module``, what is there has no ``lacks``."""

    id: str
    place: str
    point: str
    state: str
    module: str = ""
    seen: str = ""
    lacks: str = ""


def points() -> dict[str, list[Point]]:
    """Return the points of each paper, in the order of the file."""
    tables = cast(Mapping[str, Sequence[Mapping[str, str]]], read_toml(HERE / "points.toml"))
    return {paper: [Point(**row) for row in tables[paper]] for paper in PAPERS}


def page() -> str:
    """Return the page: counts, then a table for each paper."""
    rows = points()
    lines = [INTRODUCTION, _row("paper", "points", *STATES), "|---" * (2 + len(STATES)) + "|"]
    total: Counter[str] = Counter()
    for paper, each in rows.items():
        count = Counter(one.state for one in each)
        total += count
        lines.append(_row(f"[{paper}]({paper}.md)", len(each), *(count[state] for state in STATES)))
    lines += [_row("all", total.total(), *(total[state] for state in STATES)), ""]
    for paper, each in rows.items():
        lines += [f"## {paper}", "", _row("", "place", "point", "state", "where", "seen by", "lacks"), "|---" * 7 + "|"]
        lines += [_row(one.id, one.place, one.point, one.state, _link(one.module), _seen(one.seen), one.lacks)
                  for one in each] + [""]  # fmt: skip
    return "\n".join(lines)


def write() -> None:
    """Write the page."""
    PAGE.write_text(page())


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _link(path: str) -> str:
    return f"[{path}](../../{path})" if path else ""


def _seen(seen: str) -> str:
    return _link(seen) if seen.startswith("tests/") else f"`{seen}`" if seen else ""
