"""A run under faults of its cluster, one after the other: does it go on each time, soon, and with the same
numbers.

    python -m benchmarks.cluster_faults kubernetes --faults 40 --seed 1
    python -m benchmarks.cluster_faults slurm --faults 40 --seed 1

One run of two ranks trains throughout. A fault is drawn, then the run must do a new step within ``BOUND``
seconds; in the end it is stopped, and its losses are compared with those of a run on one machine that nobody
disturbed, bit for bit. Clusters are those of the tests: Slurm's own daemons, or an emulated API server whose
pods are processes. Timers are shortened: a node is held to be lost after seconds, not minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.cluster_pods import Pods
from benchmarks.cluster_run import disturbed, undisturbed
from benchmarks.cluster_slurm import Nodes
from plait.core.runs.attempts import read_attempts

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Print what became of each fault, and write the results."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("where", choices=["kubernetes", "slurm"])
    asked.add_argument("--faults", type=int, default=40)
    asked.add_argument("--seed", type=int, default=1)
    asked.add_argument("--jobset", action="store_true")
    asked.add_argument("--keep", default="")
    given = asked.parse_args()
    drawn, began = random.Random(given.seed), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as place:
        folder = Path(given.keep or place)
        (folder / "run").mkdir(parents=True)
        (folder / "reference").mkdir()
        made = (
            Pods(folder / "run", drawn, given.jobset) if given.where == "kubernetes" else Nodes(folder / "run", drawn)
        )
        with made.up():
            run, status, text = disturbed(made, folder / "run", drawn, given.faults)
            lost = made.lost()[: 0 if status in (130, 143) else 1]  # it is deleted when it is stopped
        losses = run.losses()
        same = undisturbed(folder / "reference", max(losses)).losses()
        attempts = read_attempts(folder / "run" / "runs" / "job")
        wrong = sorted(step for step, loss in losses.items() if same[step] != loss)
        missing = sorted(set(range(1, max(losses) + 1)) - set(losses))
    failed = [one for one in run.outcomes if not one.ok]
    worst = max(run.outcomes, key=lambda one: one.seconds)
    told = {
        "where": given.where, "jobset": given.jobset, "seed": given.seed, "faults": len(run.outcomes),
        "lost": [asdict(one) for one in failed], "status": status, "steps": max(losses),
        "losses_that_differ": len(wrong),
        "steps_missing": len(missing), "attempts": len(attempts), "never": lost,
        "outcomes": [asdict(one) for one in run.outcomes], "seconds": round(time.monotonic() - began),
    }  # fmt: skip
    print(
        f"{len(run.outcomes)} faults, {len(failed)} lost; slowest {worst.seconds:.0f} s ({worst.fault}); "
        f"{max(losses)} steps, {len(wrong)} losses differ, {len(missing)} are missing; {len(attempts)} attempts; "
        f"status {status} {lost}"
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"cluster_faults_{given.where}{'_jobset' * given.jobset}.json").write_text(
        json.dumps(told, indent=1) + "\n"
    )
    if failed:
        print(text[-4000:])
    return int(bool(failed or wrong or missing or lost))


if __name__ == "__main__":
    sys.exit(main())
