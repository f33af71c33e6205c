"""Placement of tight instances: is any worse than what CP-SAT knows of a plain program of the same?

Instances of 4 to 50 blocks are drawn: every shape, 3 to 12 minipods of unequal room, 2 to 60 % more room than
is needed, alpha with three digits. Each is placed, and solved by ``baselines/cells.py``, which shares nothing
with the solver's own program. An instance fails if its score is above the best of the two programs where that
is proven or the time is over, if its bound is above that, or if a gap is left unsaid.

    python -m benchmarks.placement_tight --save benchmarks/results/placement-tight.json
    python -m benchmarks.placement_tight --count 20 --seed 7 --reference-limit 10

What stands in the file already, by seed and number, is not solved again: the command may be stopped and given
again. A fresh file begins where ``plait place`` has changed. Exit status 1 where an instance fails.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.baselines.cells import cell_program
from benchmarks.keeping import finish, keep, make_parser
from plait.place.placing import place
from plait.place.solve.problem import Problem

FEWEST, MOST = 4, 50
"""Blocks."""
SHAPES = [(rows, columns) for rows in range(2, 26) for columns in range(2, 26) if FEWEST <= rows * columns <= MOST]
EPSILON = 1e-9


def drawn(seed: int, number: int) -> Problem:
    """An instance that is tight: room for it, and for little more."""
    chance = random.Random(f"{seed}:{number}")
    rows, columns = chance.choice(SHAPES)
    cells, pods = rows * columns, chance.randint(3, 12)
    room = max(cells, round(cells * (1 + chance.uniform(0.02, 0.6))))
    weights = [chance.lognormvariate(0, chance.choice((0.3, 0.8))) for _ in range(pods)]
    free = [int(room * weight / sum(weights)) for weight in weights]
    while sum(free) < room:
        free[chance.randrange(pods)] += 1
    return Problem.plain(rows, columns, free, alpha=round(chance.random(), 3))


def compared(problem: Problem, limit: float, workers: int) -> dict[str, Any]:
    """Ours and the plain program's answer to one instance, and what is wrong with ours."""
    begun, used = time.perf_counter(), time.process_time()
    placed = place(problem)
    seconds, processor = time.perf_counter() - begun, time.process_time() - used
    solved = cell_program(problem, limit=limit, workers=workers)
    best = min(placed.score, placed.score if solved.score is None else solved.score)
    faults = [
        fault for fault, wrong in (
            ("worse", placed.score > best + EPSILON), ("below its bound", placed.score < solved.bound - EPSILON),
            ("bound too high", placed.bound > best + EPSILON),
        ) if wrong
    ]  # fmt: skip
    assert problem.shape is not None
    return {
        "shape": list(problem.shape), "free": list(problem.capacity), "alpha": problem.alpha,
        "score": round(placed.score, 6), "bound": round(placed.bound, 6), "note": placed.note,
        "seconds": round(seconds, 3), "processor_seconds": round(processor, 3),
        "reference": solved.score, "reference_bound": round(solved.bound, 6), "reference_proven": solved.proven,
        "faults": faults,
    }  # fmt: skip


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many instances are what; seconds of ours."""
    seconds = sorted(row["seconds"] for row in rows)
    proven = [row for row in rows if row["bound"] > row["score"] - EPSILON]
    return {
        "instances": len(rows),
        "faults": sum(bool(row["faults"]) for row in rows),
        "proven": len(proven),
        "reference_proven": sum(row["reference_proven"] for row in rows),
        "better_than_reference": sum(
            row["reference"] is None or row["score"] < row["reference"] - EPSILON for row in rows
        ),
        "worst_gap": round(max((row["score"] / row["bound"] - 1 for row in rows), default=0.0), 4),
        "seconds_median": seconds[len(seconds) // 2] if seconds else None,
        "over_2_seconds": sum(one > 2 for one in seconds),
        "slowest_seconds": seconds[-1] if seconds else None,
    }


def told(name: str, row: dict[str, Any]) -> str:
    """One line for people."""
    rows, columns = row["shape"]
    proven = "proven" if row["bound"] > row["score"] - EPSILON else f"bound {row['bound']:.3f}"
    theirs = f"{row['reference']} ({'proven' if row['reference_proven'] else row['reference_bound']})"
    faults = f"  FAULT: {', '.join(row['faults'])}" if row["faults"] else ""
    return (
        f"{name:8} {rows:2} x {columns:2} over {row['free']}, alpha {row['alpha']}: {row['score']:.3f} {proven} in "
        f"{row['seconds']:.2f} s; plain {theirs}{faults}"
    )


def make_options() -> argparse.Namespace:
    """What is asked."""
    parser = make_parser(__doc__, rounds=1)
    parser.add_argument("--count", type=int, default=100, help="instances (default %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first instance (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="of the plain program (default %(default)s)")
    parser.add_argument("--reference-limit", type=float, default=60.0, help="seconds of the plain program (default 60)")
    return parser.parse_args()


def main() -> int:
    """All instances, those in the file first."""
    options = make_options()
    kept = Path(options.save) if options.save else None
    known: dict[str, Any] = json.loads(kept.read_text())["rows"] if kept and kept.exists() else {}
    silent = argparse.Namespace(save=options.save, json=False)
    for number in range(options.first, options.first + options.count):
        name = f"{options.seed}:{number}"
        if name not in known:
            problem = drawn(options.seed, number)
            known[name] = compared(replace(problem, limit=10.0), options.reference_limit, options.workers)
            keep({**summary(list(known.values())), "rows": known}, silent)
        if not options.json:
            print(told(name, known[name]), flush=True)
    found = summary(list(known.values()))
    print(json.dumps(found, indent=None if options.json else 1))
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    finish(main)
