"""How much jobs slow each other's all-to-all, by the minipods that each lies in, on an emulated cluster.

    python benchmarks/interference.py [--json] [--quick] [--rounds 9] [--save FILE]

Needs Linux and root or user namespaces. Nine hosts of one rank in three minipods, links of 100 Mbit/s; three
jobs of three ranks, each in a minipod of its own, or each over all three. The core's links are as wide as
those of a minipod's hosts together, or two thirds of that. A round is one all-to-all of every job that is
there: the first job alone, beside the second, beside both; ratios are medians of those within a round.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from keeping import SEGMENT, finish, keep, make_parser, ranks_on_lab
from rich.console import Console
from rich.table import Table

from plait.lab import LabSpec

JOBS = {
    "1 minipod": ((0, 1, 2), (3, 4, 5), (6, 7, 8)),
    "3 minipods": ((0, 3, 6), (1, 4, 7), (2, 5, 8)),
}
"""The ranks of each job; hosts lie in minipods in order, three in each."""
CORES = {"as wide": "300mbit", "two thirds as wide": "200mbit"}
"""Links between a minipod and the core."""
MEBIBYTES = 4
"""That a rank sends in one all-to-all."""


def main() -> int:
    """Measure; a table, and with --json one last line for programs."""
    options = make_parser(__doc__, rounds=9).parse_args()
    cases = [measured(core, options.rounds) for core in CORES]
    if not options.json:
        show(cases)
    keep({"mebibytes": MEBIBYTES, "cases": cases}, options)
    return 0


def measured(core: str, rounds: int) -> dict[str, Any]:
    """On a lab with such a core: by the minipods of a job, the first job's seconds and how many times as long
    it takes beside others."""
    lab = LabSpec(9, 1, "100mbit", pods=3, core=CORES[core], segment=SEGMENT)
    setup = {"jobs": JOBS, "rounds": rounds, "bytes": MEBIBYTES << 20}
    found: dict[str, list[list[float]]] = ranks_on_lab(lab, "interference_ranks.py", json.dumps(setup))
    return {
        "core": core,
        "rate": CORES[core],
        "rounds": rounds,
        "jobs": {name: slowed(own) for name, own in found.items()},
    }


def slowed(seconds: list[list[float]]) -> dict[str, Any]:
    """By rounds: seconds alone, beside one job, beside two.

    >>> slowed([[1.0, 1.5, 2.0], [2.0, 2.0, 6.0]])["beside"]
    [1.25, 2.5]
    """
    ratios = [[one / alone for one in others] for alone, *others in seconds]
    by_jobs = list(zip(*ratios, strict=True))
    return {
        "alone": statistics.median(alone for alone, *_ in seconds),
        "beside": [statistics.median(one) for one in by_jobs],
        "spread": [[min(one), max(one)] for one in by_jobs],
    }


def show(cases: list[dict[str, Any]]) -> None:
    """One table for people."""
    table = Table("core", "a job's minipods", "alone", "beside one", "beside two")
    for case in cases:
        for name, one in case["jobs"].items():
            table.add_row(case["core"], name, f"{one['alone']:.2f} s", *(f"{ratio:.2f}x" for ratio in one["beside"]))
    Console(width=100).print(table)


if __name__ == "__main__":
    finish(main)
