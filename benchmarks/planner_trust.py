"""Whether the planner's first is the best, for drawn jobs from 350M to 405B on 1 to 2,048 ranks.

    python -m benchmarks.planner_trust [--jobs 300] [--first 0] [--sampled 30] [--workers 1] [--keep FILE]

Of every job: the answer; the answers under three drawn conditions (a degree, a micro-batch, slices,
recomputation, memory), none of which may be better; the answers with twice the compute, memory, links inside
nodes and between them, none of which may be worse. Of some jobs 200 other points of the space are simulated:
the best of them may be at most 1 % better. Ratios are the answer's seconds over the other's. A line a job is
written to ``--keep``, where a run that was cut off goes on.
"""

from __future__ import annotations

import json
import multiprocessing
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.keeping import finish, keep, make_parser
from plait.core.base.errors import PlaitError
from plait.core.cluster.hardware import Cluster
from plait.core.job.spec import Job
from plait.plan.answer import Planner
from plait.plan.explain.what_if import changed_cluster
from plait.plan.search.request import job_at
from plait.plan.search.search import search

DENSE = ("gpt3-350m", "gpt3-1.3b", "gpt3-2.7b", "llama3-8b", "llama2-13b", "gpt3-13b", "llama2-70b", "llama3-70b",
         "gpt3-175b", "llama3-405b")  # fmt: skip
EXPERTS = ("mixtral-8x7b", "qwen3-30b-a3b")
CLUSTERS = ("a100-80", "h100", "h200", "a100-40")
LARGEST = {"gpt3-350m": 64, "gpt3-1.3b": 128, "gpt3-2.7b": 256, "llama3-8b": 512, "llama2-13b": 512, "gpt3-13b": 512}
"""Ranks that nobody gives more of to small models."""
BETTER: Mapping[str, float] = {"compute": 2.0, "memory": 2.0, "nic": 2.0, "link": 2.0}
SHARE = 0.05
"""Half of the points that are simulated are among so large a part of the fastest in closed form."""
POINTS = 200
NEAR = 1e-3
"""Ratios within this of 1 are called equal."""


def main() -> int:
    """Draw jobs and ask; say the worst ratios."""
    parser = make_parser(__doc__, rounds=1)
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="number of the first job")
    parser.add_argument("--sampled", type=int, default=30, help="of them, every so many-th is sampled, that many")
    parser.add_argument("--workers", type=int, default=1, help="processes that try jobs side by side")
    parser.add_argument("--keep", type=Path, help="a file of lines, gone on with where it exists")
    options = parser.parse_args()
    done = _kept(options.keep)
    every = max(1, options.jobs // options.sampled) if options.sampled else 0
    numbers = [n for n in range(options.first, options.first + options.jobs) if n not in done]
    numbers.sort(key=lambda number: not every or number % every)  # sampled ones take longest
    with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        waited = [pool.submit(tried, number, sampled=bool(every) and number % every == 0) for number in numbers]
        for one in as_completed(waited):
            told = one.result()
            done[told["number"]] = told
            if options.keep:
                with options.keep.open("a") as file:
                    file.write(json.dumps(told) + "\n")
    found = [done[number] for number in sorted(done)]
    result = summary(found)
    keep({"summary": result, "jobs": found}, options)
    if not options.json:
        show(result, found)
    return 0


def _kept(file: Path | None) -> dict[int, dict[str, Any]]:
    lines = file.read_text().splitlines() if file and file.exists() else []
    return {one["number"]: one for one in map(json.loads, lines)}


def drawn(number: int) -> dict[str, Any]:
    """The job of a number, as a file has it."""
    chance = random.Random(f"trust {number}")
    preset = chance.choice(DENSE if chance.random() < 0.9 else EXPERTS)
    large = preset in ("llama2-70b", "llama3-70b", "gpt3-175b", "llama3-405b")
    ranks = min(LARGEST.get(preset, 2048), 1 << chance.randint(5 if large else 0, 11))
    sequence = chance.choice((512, 1024, 2048, 4096, 8192, 16384, 32768))
    batch = chance.choice((1, 2, 4, 8)) * max(8, ranks // chance.choice((1, 2, 4, 8)))
    return {
        "model": {"preset": preset, "max_sequence": max(sequence, 2048)},
        "data": {"sequence_length": sequence},
        "train": {"global_batch_size": batch, "precision": "bf16-mixed"},
        "cluster": {"preset": chance.choice(CLUSTERS), "ranks": ranks},
    }


def tried(number: int, *, sampled: bool = False, few: bool = False) -> dict[str, Any]:
    """What one job's answers are, to that without conditions. few: one condition and one doubling, by the
    number."""
    values, chance = drawn(number), random.Random(f"conditions {number}")
    job = Job.from_dict(values)
    cluster = Cluster.preset(values["cluster"]["preset"])
    told: dict[str, Any] = {"number": number, "job": values}
    try:
        best = Planner(job, cluster, 256).answer().best
    except PlaitError as error:
        return told | {"refused": str(error)[:200]}
    told |= {"seconds": best.seconds, "conditions": {}, "better": {}}
    asked = conditions(chance, best.point, best.most_memory)
    for condition in asked[number % len(asked) :][:1] if few else asked:
        other = _seconds(job.changed([f'plan.constraints=["{condition}"]']), cluster)
        told["conditions"][condition] = None if other is None else best.seconds / other
    doubled = [*BETTER.items()]
    for name, factor in doubled[number % len(doubled) :][:1] if few else doubled:
        other = _seconds(job, changed_cluster(cluster, {name: factor}))
        told["better"][name] = None if other is None else other / best.seconds
    if sampled and not job.model_spec(256).experts:
        told["sampled"] = best.seconds / sample(Planner(job, cluster, 256), chance)
    return told


def conditions(chance: random.Random, point: Mapping[str, int], memory: int) -> list[str]:
    """Three that the answer's first mostly does not meet."""
    names = {"pp": "pp", "dp": "dp", "tp": "tp", "cp": "cp", "micro": "micro_batch_size", "p1": "batch_slices",
             "p2": "column_slices", "virtual": "virtual_stages"}  # fmt: skip
    found = list[str]()
    for column, name in chance.sample(sorted(names.items()), 2):
        value = max(1, int(point[column] * 2.0 ** chance.randint(-2, 2)))
        found.append(f"{name} {chance.choice(('==', '<=', '>='))} {value}")
    other = chance.choice((f"memory <= {memory * chance.uniform(0.4, 1.2) / 2**30:.1f} GiB", "recompute == none",
                           "recompute == full", "schedule == 1f1b", "sequence_parallel == 0"))  # fmt: skip
    return [*found, other]


def _seconds(job: Job, cluster: Cluster) -> float | None:
    """Of the answer's first; None where there is none."""
    try:
        return Planner(job, cluster, 256).answer().best.seconds
    except PlaitError:
        return None


def sample(planner: Planner, chance: random.Random) -> float:
    """The least seconds of a simulation of drawn points that are sure enough to fit."""
    asked, job = planner.request, planner.job
    ranked = search(asked, planner.cluster, job.train.precision, keep=1, most=job.plan.points)
    order = np.argsort(ranked.closed_form_seconds, kind="stable")
    order = order[planner.fit(ranked.space.take(order), job)]
    fastest = order[: max(POINTS, int(SHARE * len(order)))]
    best, left = float("inf"), POINTS
    for tries in range(10 * POINTS):
        if not left:
            break
        at = int(chance.choice(fastest if tries % 2 else order))
        try:
            drawn = job_at(job, ranked.space.row(at))
            plan = planner.draft(drawn)
            if planner.memory(drawn, plan).safe:
                best, left = min(best, planner.simulated(drawn, plan).seconds), left - 1
        except PlaitError:
            continue
    return best


def summary(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts, and the worst ratio of each kind."""
    answered = [one for one in found if "seconds" in one]
    told: dict[str, Any] = {"jobs": len(found), "answered": len(answered)}
    for kind in ("conditions", "better"):
        ratios = [ratio for one in answered for ratio in one[kind].values() if ratio is not None]
        told[kind] = _ratios(ratios)
    told["sampled"] = _ratios([one["sampled"] for one in answered if "sampled" in one])
    return told


def _ratios(ratios: Sequence[float]) -> dict[str, Any]:
    return {
        "asked": len(ratios),
        "above": sum(ratio > 1 + NEAR for ratio in ratios),
        "above_1_percent": sum(ratio > 1.01 for ratio in ratios),
        "worst": max(ratios, default=None),
    }


def show(result: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> None:
    """As a table, and what is above."""
    table = Table("kind", "asked", "above 0.1 %", "above 1 %", "worst", title=f"{result['answered']} jobs answered")
    for kind in ("conditions", "better", "sampled"):
        one = result[kind]
        worst = "-" if one["worst"] is None else f"{one['worst'] - 1:+.2%}"
        table.add_row(kind, str(one["asked"]), str(one["above"]), str(one["above_1_percent"]), worst)
    Console().print(table)
    for one in found:
        for kind in ("conditions", "better"):
            for what, ratio in one.get(kind, {}).items():
                if ratio is not None and ratio > 1 + NEAR:
                    print(f"{one['number']}: {what}: {ratio - 1:+.2%} of {one['seconds']:.4g} s {_short(one['job'])}")
        if one.get("sampled", 0) > 1 + NEAR:
            print(f"{one['number']}: sampled {one['sampled'] - 1:+.2%} {_short(one['job'])}")


def _short(job: Mapping[str, Any]) -> str:
    return f"{job['model']['preset']} on {job['cluster']['ranks']} {job['cluster']['preset']}, " \
           f"{job['data']['sequence_length']} x {job['train']['global_batch_size']}"  # fmt: skip


if __name__ == "__main__":
    finish(main)
