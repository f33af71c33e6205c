"""Whether the planner predicts this machine: a lab of two hosts of two ranks is profiled, a job is planned
for it, and the best strategies and random ones are really run.

    python benchmarks/planner_lab.py [--json] [--rounds 1] [--random 20] [--steps 8] [--nic 1gbit] [--seed 0]
        [--save FILE]
    python benchmarks/planner_lab.py --again RESULT --profile PROFILE

Needs Linux and root or user namespaces. Four ranks share the machine's cores, in the profile as in the runs.
Every strategy is a ``plait train`` of its own; its time is the median of its steps, the first ones left out.
Rounds are interleaved, each begins with another strategy; a strategy's time is the median of its rounds, and
strategies are compared within rounds (the median of these ratios), since the machine's speed drifts. The best
of thirty is partly luck: with several rounds the chosen one is compared in each round with the one that is
best in the others, too (``elsewhere``).
Random strategies are drawn from the whole space of the job, each family (arrangement, micro-batch, schedule,
recomputation) as likely as the others.

--again: nothing is run. The strategies of a kept result are predicted from a profile of that machine, and
compared with what was measured then.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keeping import finish, keep, make_parser
from rich.console import Console
from rich.table import Table

from plait.core.base.errors import PlaitError
from plait.core.job.spec import Job
from plait.core.step.memory.closed_memory import plait_on, step_memory, usable
from plait.plan.answer import Planner
from plait.plan.calibrate.recorded import read_seconds
from plait.plan.explain.job_cluster import find_cluster
from plait.plan.search.candidate import Candidate
from plait.plan.search.request import job_at, search_request
from plait.plan.search.search import FAMILY
from plait.plan.search.space import enumerate_space

JOB = """
[model]
family = "llama"
num_layers = 4
hidden = 512
num_heads = 8
num_kv_heads = 4
ffn_hidden = 1408
max_sequence = 256
[data]
sequence_length = 256
[train]
steps = {steps}
global_batch_size = 16
eval_every = 0
checkpoint_every = 0
log_every = 1
[cluster]
profile = "profile.json"
ranks = 4
[run]
folder = "runs"
timeline_steps = 0
"""
WARM = 3
"""Steps that are left out."""
Row = dict[str, Any]
"""What is known of a strategy."""


def main() -> int:
    """Profile, plan, measure."""
    options = _options()
    if options.again:
        result = work_out(again(Path(options.again), Path(options.profile)))
        if not options.json:
            show(result)
        keep(result, options)
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.toml").write_text(JOB.format(steps=WARM + options.steps))
        plait(folder, "measure", "machine", "job.toml", "--on", lab(options), "seconds=60")
        job = Job.read(folder / "job.toml").named("job")
        planner = Planner(job, find_cluster(job), vocab=256)
        best = planner.answer().candidates
        drawn = draw(planner, options)
        rows = measured(folder, [("top", each) for each in best] + [("random", each) for each in drawn], options)
    result = work_out(rows)
    if not options.json:
        show(result)
    keep(result, options)
    return 0


def plait(folder: Path, *args: str) -> None:
    """A verb, as a user would; what it printed goes to stderr if it fails."""
    argv = [sys.executable, "-W", "ignore", "-m", "plait.cli.main", *args]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
        raise PlaitError(f"plait {' '.join(args)} ended with status {done.returncode}")


def lab(options: argparse.Namespace) -> str:
    """The lab's name on the command line."""
    return f"lab:2x2@{options.nic}"


def draw(planner: Planner, options: argparse.Namespace) -> list[Candidate]:
    """Random strategies of the space that fit."""
    asked = search_request(planner.job, planner.model, planner.cluster)
    space = enumerate_space(asked)
    families = dict[tuple[int, ...], list[int]]()
    for at, key in enumerate(zip(*(getattr(space, one).tolist() for one in FAMILY), strict=True)):
        families.setdefault(key, []).append(at)
    chance, found, known = random.Random(options.seed), list[Candidate](), list(families.values())
    while len(found) < options.random:
        at = chance.choice(chance.choice(known))
        point = space.take(slice(at, at + 1))
        precision = planner.job.train.precision
        on = planner.cluster
        memory = step_memory(planner.model, point, sequence=asked.sequence, precision=precision,
                             options=plait_on(on.device), overhead=on.overhead)  # fmt: skip
        if memory.total[0] <= usable(on.device, on.overhead):
            found.append(planner.predict(job_at(planner.job, point.row(0))))
    return found


def measured(folder: Path, strategies: Sequence[tuple[str, Candidate]], options: argparse.Namespace) -> list[Row]:
    """Predicted and measured seconds of every strategy, each with its kind."""
    rounds: list[list[float]] = [[] for _ in strategies]
    for name, (_, one) in enumerate(strategies):
        run = one.job.run.model_copy(update={"name": f"run{name}"})
        (folder / f"run{name}.toml").write_text(one.job.model_copy(update={"run": run}).to_toml())
    for number in range(options.rounds):
        for at in range(len(strategies)):
            name = (at + number * len(strategies) // options.rounds) % len(strategies)
            run = f"run{name}-{number}"
            plait(folder, "train", f"run{name}.toml", f"run.name={run}", "--on", lab(options))
            rounds[name].append(statistics.median(read_seconds(folder / "runs" / run)[WARM:]))
            print(f"{run}: predicted {strategies[name][1].seconds:.3f} s, {rounds[name][-1]:.3f} s", file=sys.stderr)
    return [_row(kind, one, seconds) for (kind, one), seconds in zip(strategies, rounds, strict=True)]


def _row(kind: str, one: Candidate, rounds: list[float]) -> Row:
    seconds = statistics.median(rounds)
    found = {"kind": kind, "strategy": describe(one), "predicted_s": one.seconds, "measured_s": seconds}
    found |= {"rounds_s": rounds, "error": one.seconds / seconds - 1}
    return found | {"in_band": one.low <= seconds <= one.high, "parts": dict(one.parts)}


def describe(one: Candidate) -> str:
    """A strategy in a line."""
    from plait.plan.explain.reasons import readable

    names = readable(one.point)
    skipped = ("ep", "num_micro", "recompute_layers", "overlap", "shard_overlap")
    return " ".join(
        f"{key}={value}" for key, value in names.items() if key not in skipped and value not in ("1", "0", "none")
    )


def again(result: Path, profile: Path) -> list[Row]:
    """Rows of a kept result, predicted anew; the fastest of them first, which is the one that is chosen."""
    job = Job.from_dict(tomllib.loads(JOB.format(steps=WARM + 1)) | {"cluster": {"profile": str(profile), "ranks": 4}})
    planner, rows = Planner(job, find_cluster(job), vocab=256), list[Row]()
    for row in json.loads(result.read_text())["rows"]:
        one = planner.predict(described(job, row["strategy"]))
        seconds = row["measured_s"]
        found = {"predicted_s": one.seconds, "error": one.seconds / seconds - 1, "parts": dict(one.parts)}
        rows.append(row | found | {"in_band": one.low <= seconds <= one.high})
    return sorted(rows, key=lambda row: row["predicted_s"])


def described(job: Job, words: str) -> Job:
    """The job with the strategy that ``describe`` put into words."""
    said = dict(word.split("=") for word in words.split())
    strategy: dict[str, Any] = {"pp": 1, "dp": 1, "tp": 1, "cp": 1, "schedule": "1f1b", "recompute": "none"}
    tables: dict[str, dict[str, Any]] = {
        "slices": {"batch": 1, "columns": 1},
        "shard": {"params": 1, "grads": 1, "optim": 1},
        "overlap": {"tp": "domino", "shard": "both"},
    }
    micro = int(said.pop("micro_batch_size", "1"))
    strategy["sequence_parallel"] = said.pop("sequence_parallel", "false") == "true"
    for key, word in said.items():
        outer, _, inner = {"p1": "slices.batch", "p2": "slices.columns"}.get(key, key).partition(".")
        value = int(word) if word.isdigit() else word
        (tables[outer] if inner else strategy)[inner or outer] = value
    values = job.to_dict()
    values["strategy"] |= strategy | tables
    values["train"] |= {"micro_batch_size": micro}
    return Job.from_dict(values)


def work_out(rows: list[Row]) -> dict[str, Any]:
    """Errors, and what the choice cost."""
    errors = [abs(row["error"]) for row in rows]
    return {
        "rows": rows,
        "median_abs_rel_error": statistics.median(errors),
        "mean_abs_rel_error": statistics.fmean(errors),
        "band_coverage": statistics.fmean(row["in_band"] for row in rows),
        "chosen_over_best": max(1 / _ratio(row, rows[0]) for row in rows) - 1,
        "chosen_over_best_elsewhere": _elsewhere(rows),
    }


def _elsewhere(rows: list[Row]) -> float | None:
    """How much longer the chosen one takes in each round than the one that is best in all the others, on
    average; None of a single round. Of many that differ by chance the best is lucky, but not twice."""
    times = [row.get("rounds_s", [row["measured_s"]]) for row in rows]
    logarithms = [[math.log(own / chosen) for own, chosen in zip(each, times[0], strict=True)] for each in times]
    if len(times[0]) < 2:
        return None
    slower = [-min(logarithms, key=lambda each: sum(each) - each[one])[one] for one in range(len(times[0]))]
    return math.exp(statistics.fmean(slower)) - 1


def _ratio(row: Row, to: Row) -> float:
    """Of what was measured: the median over the rounds that both had."""
    both = zip(*(one.get("rounds_s", [one["measured_s"]]) for one in (row, to)), strict=False)
    return statistics.median(own / other for own, other in both)


def show(result: dict[str, Any]) -> None:
    """Every strategy, and a line about all."""
    table = Table("", "strategy", "predicted s", "measured s", "error")
    for row in result["rows"]:
        numbers = (f"{row['predicted_s']:.3f}", f"{row['measured_s']:.3f}", f"{row['error']:+.1%}")
        table.add_row(row["kind"], row["strategy"], *numbers)
    whole = Table("median error", "mean", "in the band", "chosen, against the best measured", "elsewhere")
    keys = ("median_abs_rel_error", "mean_abs_rel_error", "band_coverage", "chosen_over_best")
    elsewhere = result["chosen_over_best_elsewhere"]
    whole.add_row(*(f"{result[key]:.1%}" for key in keys), "-" if elsewhere is None else f"{elsewhere:.1%}")
    for each in (table, whole):
        Console(width=150).print(each)


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__, rounds=1, quick=1)
    parser.add_argument("--random", type=int, default=20, help="strategies drawn from the space (default 20)")
    parser.add_argument("--steps", type=int, default=8, help="steps that count (default 8)")
    parser.add_argument("--nic", default="1gbit", help="rate of each host's link (default 1gbit)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", metavar="RESULT", help="predict the runs of a kept result anew, and run nothing")
    parser.add_argument("--profile", help="of the machine on which they ran")
    options = parser.parse_args()
    if bool(options.again) != bool(options.profile):
        parser.error("--again and --profile go together")
    return options


if __name__ == "__main__":
    finish(main)
