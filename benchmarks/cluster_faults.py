"""A run under faults of its cluster, one after the other: does it go on each time, soon, and with the same
numbers; and does it end, all of it, when it is told to.

    python -m benchmarks.cluster_faults kubernetes --faults 40 --seed 1
    python -m benchmarks.cluster_faults slurm --faults 40 --seed 1 --keep FOLDER

Faults are drawn by the seed: each kind once, then again in another order. A run of two ranks trains through
some (``--batch``), on a cluster of its own. After a fault it must do a new step within ``BOUND`` seconds;
after a stop nothing of it may be left within as many, and it is then started again. In the end its losses are
compared with those of a run on one machine that nobody disturbed, bit for bit, and what its log says of
attempts with ``attempts.jsonl``. Clusters are those of the tests: Slurm's own daemons, or an emulated API
server whose pods are processes. Timers are shortened: a node is held to be lost after seconds, not minutes.

What was found is kept in FOLDER, a line a batch. The same command goes on with the faults that have not been
outlived yet; ``--part 1/3`` does a third of them, beside others.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.cluster_pods import Pods
from benchmarks.cluster_run import Cluster, Run, disturbed, undisturbed
from benchmarks.cluster_slurm import Nodes
from benchmarks.cluster_told import disagreements
from benchmarks.keeping import keep_as
from plait.core.runs.attempts import read_attempts

KEPT = "batches.jsonl"


def drawn_faults(cluster: Cluster, count: int, seed: int) -> list[str]:
    """Each kind once, then again and again in other orders; those that take long once."""
    drawn = random.Random(seed)
    names = [*cluster.faults, *cluster.stops]
    found = drawn.sample(names, len(names))
    short = [name for name in names if name not in cluster.long]
    while len(found) < count:
        found += drawn.sample(short, len(short))
    return found[:count]


def batch(cluster: Cluster, folder: Path, names: list[str], reference: Path) -> dict[str, Any]:
    """What became of a run under these faults."""
    began, run = time.monotonic(), Run(folder, cluster)
    with cluster.up():
        lost = disturbed(cluster, run, names)
    seconds = round(time.monotonic() - began)
    losses = run.losses()
    same = undisturbed(reference, max(losses))
    attempts = read_attempts(run.home)
    return {
        "outcomes": [asdict(one) for one in run.outcomes],
        "status": run.process.returncode if run.process else None,
        "steps": max(losses),
        "losses_that_differ": sum(same[step] != loss for step, loss in losses.items()),
        "steps_missing": len(set(range(1, max(losses) + 1)) - set(losses)),
        "attempts": len(attempts),
        "disagreements": disagreements(run.home, attempts, run.output, killed=names[-1] in cluster.killing),
        "never": lost,
        "seconds": seconds,
    }


def kept(folder: Path) -> list[dict[str, Any]]:
    """Batches that were done before."""
    file = folder / KEPT
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def left(names: list[str], batches: list[dict[str, Any]]) -> list[str]:
    """Faults that have not been outlived yet."""
    wanted = list(names)
    for one in (outcome for batch in batches for outcome in batch["outcomes"] if outcome["ok"]):
        if one["fault"] in wanted:
            wanted.remove(one["fault"])
    return wanted


def summary(where: str, seed: int, names: list[str], batches: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all batches."""
    outcomes = [one for batch in batches for one in batch["outcomes"]]
    added = ("steps", "losses_that_differ", "steps_missing", "attempts", "seconds")
    return {
        "where": where, "seed": seed, "faults": len(names), "left": left(names, batches),
        **{key: sum(one[key] for one in batches) for key in added},
        "lost": [one for one in outcomes if not one["ok"] and one["fault"] in left(names, batches)],
        "mended": [one for one in outcomes if not one["ok"] and one["fault"] not in left(names, batches)],
        "disagreements": [text for one in batches for text in one["disagreements"]],
        "never": [text for one in batches for text in one["never"]],
        "outcomes": [one for one in outcomes if one["ok"]],
    }  # fmt: skip


def _hear_signals() -> None:
    """nohup and a shell's background have signals ignored, and so would be those that are to stop a run: what
    is handled here, a child hears again."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, frame: None)


def main() -> int:
    """Print what became of each fault, and write the results."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("where", choices=["kubernetes", "slurm"])
    asked.add_argument("--faults", type=int, default=40)
    asked.add_argument("--seed", type=int, default=1)
    asked.add_argument("--jobset", action="store_true")
    asked.add_argument("--keep", default="", help="a folder of results, to go on from")
    asked.add_argument("--batch", type=int, default=5, help="faults that one run goes through")
    asked.add_argument("--part", default="1/1", help="which part of what is left")
    asked.add_argument("--only", default="", help="faults whose names match this expression")
    given = asked.parse_args()
    _hear_signals()
    with tempfile.TemporaryDirectory(prefix="faults-") as place:
        keep = Path(given.keep or place).absolute()
        keep.mkdir(parents=True, exist_ok=True)

        def cluster(folder: Path, seed: int) -> Any:
            draws = random.Random(seed)
            return Pods(folder, draws, given.jobset) if given.where == "kubernetes" else Nodes(folder, draws)

        names = drawn_faults(cluster(keep, 0), given.faults, given.seed)
        part, parts = (int(word) for word in given.part.split("/"))
        todo = [name for name in left(names, kept(keep)) if re.search(given.only, name)][part - 1 :: parts]
        while todo:
            now, todo = todo[: given.batch], todo[given.batch :]
            folder = Path(tempfile.mkdtemp(prefix="run-", dir=keep))
            found = batch(cluster(folder, given.seed + len(kept(keep))), folder, now, keep / "reference")
            with open(keep / KEPT, "a") as file:
                file.write(json.dumps(found) + "\n")
            bad = [key for key in ("losses_that_differ", "steps_missing", "disagreements", "never") if found[key]]
            if bad or not all(one["ok"] for one in found["outcomes"]):
                print(f"see {folder}: { ({key: found[key] for key in bad}) }", flush=True)
            else:
                shutil.rmtree(folder, ignore_errors=True)
        told = summary(given.where, given.seed, names, kept(keep))
    worst = max(told["outcomes"], key=lambda one: one["seconds"], default={"seconds": 0, "fault": "none"})
    print(
        f"{len(told['outcomes'])} faults, {len(told['lost'])} lost, {len(told['left'])} left; slowest "
        f"{worst['seconds']:.0f} s ({worst['fault']}); {told['steps']} steps, {told['losses_that_differ']} losses "
        f"differ, {told['steps_missing']} are missing; {told['attempts']} attempts, {len(told['disagreements'])} that "
        f"disagree with their log; {told['never']}"
    )
    keep_as(f"cluster_faults_{given.where}{'_jobset' * given.jobset}", told)
    return int(
        any(told[key] for key in ("lost", "left", "losses_that_differ", "steps_missing", "disagreements", "never"))
    )


if __name__ == "__main__":
    sys.exit(main())
