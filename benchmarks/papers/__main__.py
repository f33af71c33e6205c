"""Recompute the papers' numbers, and write their pages.

    python -m benchmarks.papers [PAPER ...] [--figure ID] [--lab] [--again] [--pages]

Figures of which the JSON was made by the code that is checked out are not computed again. ``--lab`` measures
those of emulated clusters anew, which else are read from ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from functools import partial
from importlib import import_module

from benchmarks.keeping import LOAD, commit, finish, machine
from benchmarks.papers import points
from benchmarks.papers.found import PAPERS, Found, fingerprint, read, write
from benchmarks.papers.page import published, write_pages


def figures(paper: str) -> dict[str, Callable[[], Found]]:
    """The functions of a paper's figures."""
    module = import_module(f"benchmarks.papers.{paper}")
    return module.FIGURES | {name: partial(made, again=False) for name, made in emulated(paper).items()}


def emulated(paper: str) -> dict[str, Callable[..., Found]]:
    """Those of emulated clusters. They take ``again``: whether to measure."""
    return getattr(import_module(f"benchmarks.papers.{paper}"), "EMULATED", {})


def compute(paper: str, *, lab: bool, again: bool, only: Collection[str] = ()) -> None:
    """What is not up to date. only: of these figures."""
    told = {figure["id"]: figure for figure in published(paper)["figures"]}
    for name, function in figures(paper).items():
        if only and name not in only:
            continue
        kept, measure = read(paper, name), lab and name in emulated(paper)
        if kept and kept["fingerprint"] == fingerprint(paper) and not again and kept.get("measured", False) >= measure:
            continue
        if measure:
            function = partial(emulated(paper)[name], again=True)
        start = time.perf_counter()
        found = function()
        took = time.perf_counter() - start
        about = {
            "how": told[name]["how"], "date": datetime.now(UTC).date().isoformat(), "commit": commit(),
            "machine": machine(), "load_before": round(LOAD, 2), "seconds": round(took, 1), "measured": measure,
        }  # fmt: skip
        write(paper, name, found, about)
        print(f"{paper} {name}: {took:.1f} s", flush=True)


def main() -> int:
    """Compute, then write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paper", nargs="*", choices=(*PAPERS, []), help="only these")
    parser.add_argument("--figure", action="append", default=[], metavar="ID", help="only this one; may be repeated")
    parser.add_argument("--lab", action="store_true", help="measure emulated clusters anew")
    parser.add_argument("--again", action="store_true", help="also what is up to date")
    parser.add_argument("--pages", action="store_true", help="pages alone, of what is kept")
    asked = parser.parse_args()
    for paper in asked.paper or PAPERS:
        if not asked.pages:
            compute(paper, lab=asked.lab, again=asked.again, only=asked.figure)
    write_pages()
    points.write()
    return 0


if __name__ == "__main__":
    finish(main)
