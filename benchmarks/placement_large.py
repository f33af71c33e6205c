"""Placement at 10,000 nodes: how far the score may be from the best, and what it takes.

Settings are clusters of 40 to 200 minipods, idle, occupied by a Beta distribution, or of uneven size; jobs of
2 to 64 columns. Tight ones have 0.4 to 8 % more room than the job needs. Each is placed at twelve alphas.
Seconds are of the processor, with all that is imported before.

    python -m benchmarks.placement_large --save benchmarks/results/placement-large.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from statistics import mean, median
from typing import Any

from benchmarks.keeping import finish, keep, make_parser
from benchmarks.placement import Setting
from plait.place.placing import place
from plait.place.solve.problem import Problem

ALPHAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
MOST = 0.03
"""The gap that is aimed at."""


def _settings(*rows: tuple[int, int, int, float], uneven: bool = False, kind: str = "") -> dict[str, Setting]:
    """Minipods, rows, columns and how busy they are, by a name."""
    return {
        f"{kind}{minipods} minipods, {height} x {width}": Setting(minipods, 10_000, height, width, busy, uneven=uneven)
        for minipods, height, width, busy in rows
    }


LARGE = {
    **_settings((100, 75, 16, 0.27), (100, 256, 16, 0.27), (125, 312, 16, 0.38), (110, 625, 8, 0.38),
                (100, 128, 32, 0.3), (100, 64, 64, 0.3), (40, 128, 32, 0.3), (160, 128, 32, 0.4), (100, 1024, 4, 0.3),
                (60, 48, 24, 0.5), (100, 500, 12, 0.3), (200, 256, 16, 0.4), (100, 90, 48, 0.4), (100, 2048, 2, 0.3)),
    **_settings((100, 256, 16, 0.0), (40, 512, 16, 0.0), (80, 128, 32, 0.0), (157, 600, 16, 0.0), kind="idle, "),
    **_settings((100, 256, 16, 0.3), (40, 256, 16, 0.3), (100, 64, 64, 0.3), (80, 128, 32, 0.3),
                uneven=True, kind="uneven, "),
}  # fmt: skip
TIGHT = {
    **_settings((100, 600, 16, 0.02), (100, 160, 32, 0.47), (100, 300, 16, 0.5), (125, 75, 64, 0.5), (80, 700, 8, 0.42),
                (40, 100, 48, 0.5), kind="tight, "),
    **_settings((100, 400, 16, 0.33), (60, 150, 32, 0.5), uneven=True, kind="tight and uneven, "),
}  # fmt: skip


def measured(setting: Setting) -> dict[str, Any]:
    """Scores, gaps and seconds of one setting at every alpha."""
    problem = Problem.plain(setting.rows, setting.columns, setting.free(0))
    rows: dict[str, Any] = {}
    for alpha in ALPHAS:
        begun = time.process_time()
        placed = place(replace(problem, alpha=alpha))
        took = time.process_time() - begun
        rows[str(alpha)] = {
            "spreads": [placed.row_spread, placed.column_spread], "score": round(placed.score, 4),
            "bound": round(placed.bound, 4), "gap": round(placed.gap, 4), "processor_seconds": round(took, 3),
        }  # fmt: skip
    gaps = [row["gap"] for row in rows.values()]
    slowest = max(row["processor_seconds"] for row in rows.values())
    return {
        "room": round(sum(problem.capacity) / problem.num_cells, 3), "worst_gap": max(gaps),
        "mean_gap": round(mean(gaps), 4), "slowest_processor_seconds": slowest, "alphas": rows,
    }  # fmt: skip


def told(name: str, one: Mapping[str, Any]) -> str:
    """One line for people."""
    return (
        f"{name:40} room {one['room']:.2f}: gap {one['worst_gap']:6.1%} at worst, {one['mean_gap']:5.1%} on average, "
        f"{one['slowest_processor_seconds']:.2f} s at most"
    )


def summary(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """How many gaps are above what is aimed at."""
    worst = [one["worst_gap"] for one in found.values()]
    gaps = [row["gap"] for one in found.values() for row in one["alphas"].values()]
    return {
        "settings": len(worst), "above_3_percent": sum(one > MOST + 1e-4 for one in worst),
        "above_10_percent": sum(one > 0.1 for one in worst), "median_worst_gap": round(median(worst), 4),
        "largest_gap": max(worst), "mean_gap": round(mean(gaps), 4),
        "placements_above_3_percent": sum(one > MOST + 1e-4 for one in gaps), "placements": len(gaps),
        "slowest_processor_seconds": max(one["slowest_processor_seconds"] for one in found.values()),
    }  # fmt: skip


def main() -> int:
    """All settings, then tight ones."""
    options = make_parser(__doc__, rounds=1).parse_args()
    place(Problem.plain(66, 2, [40, 41, 42, 43], alpha=0.5))  # what is imported when it is first needed
    kept: dict[str, Any] = {}
    for name, settings in (("large", LARGE), ("tight", TIGHT)):
        found = dict[str, Any]()
        for setting, values in settings.items():
            found[setting] = measured(values)
            if not options.json:
                print(told(setting, found[setting]), flush=True)
        kept[name] = {**summary(found), "by_setting": found}
    keep(kept, argparse.Namespace(save=options.save, json=False))
    print(
        json.dumps(
            {name: {key: value for key, value in one.items() if key != "by_setting"} for name, one in kept.items()}
        )
    )
    return 0


if __name__ == "__main__":
    finish(main)
