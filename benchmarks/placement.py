"""Placement: the weighted spread of Plait's plans against what schedulers do and against the paper's program.

Settings (i) to (iii) are those of Arnold (arXiv 2509.15940, table 1), on idle clusters and on clusters whose
minipods are occupied by a Beta distribution; the others are harder: 40 minipods, fragmented and uneven. Every
alpha from 0 to 1 in steps of 0.1. Baselines take cells row by row, in which PP groups come out best; `strict`
compares with the best of row and column order, and with a bipartition on the fewest minipods.

    python -m benchmarks.placement --json --save benchmarks/results/placement-2core.json
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from benchmarks.baselines.bipartition import topology_aware
from benchmarks.baselines.brute import brute_force
from benchmarks.baselines.fits import best_fit, gpu_packing, random_fit
from benchmarks.keeping import finish, keep, make_parser
from plait.core.base.errors import PlacementError
from plait.place.placing import place, placed_by
from plait.place.solve.problem import Assignment, MinipodSpread, Problem, spread_of
from plait.place.solve.program import mip

ALPHAS = tuple(round(0.1 * at, 1) for at in range(11))
PUBLISHED = {
    "best-fit": best_fit,
    "random-fit": random_fit,
    "gpu-packing": gpu_packing,
    "topology-aware": topology_aware,
}
STRICT = {
    "best-fit, by column": partial(best_fit, by_column=True),
    "random-fit, by column": partial(random_fit, by_column=True),
    "gpu-packing, by column": partial(gpu_packing, by_column=True),
    "topology-aware, fewest minipods": partial(topology_aware, by_column=False, fewest=True),
    "topology-aware, fewest minipods, by column": partial(topology_aware, fewest=True),
}
EPSILON = 1e-9


@dataclass(frozen=True)
class Setting:
    """minipods, nodes: of the cluster. rows, columns: PP groups and stages, a node each cell. busy: mean
    share of a minipod that others have. uneven: minipods differ in size. programs: seeds and alphas at
    which the paper's program is solved."""

    minipods: int
    nodes: int
    rows: int
    columns: int
    busy: float
    uneven: bool = False
    seeds: int = 50
    program_seeds: int = 50
    program_alphas: Sequence[float] = ALPHAS

    def free(self, seed: int) -> list[int]:
        """Of each minipod: enough for the job."""
        chance = random.Random(seed)
        while True:
            weights = [chance.lognormvariate(0, 0.7) if self.uneven else 1.0 for _ in range(self.minipods)]
            sizes = [round(self.nodes * weight / sum(weights)) for weight in weights]
            shape = 2 * self.busy, 2 * (1 - self.busy)
            free = [round(size * (1 - (chance.betavariate(*shape) if self.busy else 0.0))) for size in sizes]
            if sum(free) >= self.rows * self.columns:
                return free


SETTINGS = {
    "(i) idle": Setting(3, 18, 6, 2, 0.0, seeds=1),
    "(ii) idle": Setting(5, 438, 12, 8, 0.0, seeds=1),
    "(iii) idle": Setting(11, 1019, 46, 8, 0.0, seeds=1),
    "(i)": Setting(3, 18, 6, 2, 0.15),
    "(ii)": Setting(5, 438, 12, 8, 0.5),
    "(iii)": Setting(11, 1019, 46, 8, 0.4, program_seeds=10),
    "40 fragmented": Setting(40, 2400, 75, 16, 0.42, program_seeds=5, program_alphas=(0.3,)),
    "40 uneven": Setting(40, 2400, 64, 16, 0.3, uneven=True, program_seeds=2, program_alphas=(0.3,)),
    "40 minipods": Setting(40, 1200, 64, 8, 0.25, program_seeds=2, program_alphas=(0.3,)),
}
SCALE = {"100 minipods, 1,200 nodes": (100, 75, 16), "100 minipods, 4,096 nodes": (100, 256, 16),
         "125 minipods, 4,992 nodes": (125, 312, 16), "110 minipods, 5,000 nodes": (110, 625, 8)}  # fmt: skip


class Case(NamedTuple):
    """ours: score, gap and seconds by alpha. others: spreads by name, the same for every alpha."""

    seed: int
    ours: dict[float, tuple[float, float, float]]
    others: dict[str, MinipodSpread]
    problem: Problem


def cases(setting: Setting, seeds: int) -> Iterator[Case]:
    """Of every seed."""
    for seed in range(min(seeds, setting.seeds)):
        problem = Problem.plain(setting.rows, setting.columns, setting.free(seed), limit=30.0)
        others = {name: spread_of(problem, made(problem).cells) for name, made in {**PUBLISHED, **STRICT}.items()}
        ours = dict[float, tuple[float, float, float]]()
        for alpha in ALPHAS:
            placed = place(replace(problem, alpha=alpha))
            ours[alpha] = placed.score, placed.gap, placed.solved_in
        yield Case(seed, ours, others, problem)


def score(alpha: float, spread: MinipodSpread) -> float:
    """Eq. 2, plain count."""
    return alpha * spread.columns + (1 - alpha) * spread.rows


def program(problem: Problem, alpha: float, limit: float) -> dict[str, Any]:
    """The paper's plan, PP groups as units; scored by eq. 2."""
    asked = replace(problem, alpha=alpha, keep_together="pp", limit=limit)
    start = time.perf_counter()
    try:
        answer: Assignment | None = mip(asked)
    except PlacementError:
        answer = None
    took = time.perf_counter() - start
    if answer is None:
        return {"score": None, "seconds": round(took, 2), "note": "no plan in time"}
    return {"score": score(alpha, spread_of(asked, answer.cells)), "seconds": round(took, 2), "note": answer.note}


def measure(name: str, setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """One setting: ratios to the best baseline, gaps, the program."""
    found: dict[str, Any] = {"ratios": {}, "strict": {}, "gaps": {}, "scores": {}, "programs": [], "slowest": 0.0}
    everything = list(cases(setting, options.rounds))
    for alpha in ALPHAS:
        ratios, strict = list[float](), list[float]()
        for case in everything:
            ours = case.ours[alpha][0]
            best = min(score(alpha, case.others[other]) for other in PUBLISHED)
            ratios.append(best / ours)
            strict.append(min(best, *(score(alpha, case.others[other]) for other in STRICT)) / ours)
        found["ratios"][alpha], found["strict"][alpha] = ratios, strict
        found["gaps"][alpha] = [case.ours[alpha][1] for case in everything]
        found["scores"][alpha] = {
            "ours": mean(case.ours[alpha][0] for case in everything),
            **{other: mean(score(alpha, case.others[other]) for case in everything) for other in PUBLISHED},
        }
    found["slowest"] = max(took for case in everything for _, _, took in case.ours.values())
    for case, alpha in product(everything[: setting.program_seeds], setting.program_alphas):
        solved = program(case.problem, alpha, options.limit)
        ours = case.ours[alpha][0]
        ratio = solved["score"] / ours if solved["score"] else None
        found["programs"].append({"seed": case.seed, "alpha": alpha, "ours": ours, "ratio": ratio, **solved})
    print(summary(name, found), flush=True)
    return found


def summary(name: str, found: dict[str, Any]) -> str:
    """A few lines for people."""
    lines = [f"{name}: ours {found['slowest'] * 1e3:.0f} ms at most"]
    for alpha in (0.0, 0.1, 0.3, 0.5, 1.0):
        scores = ", ".join(f"{other} {value:.2f}" for other, value in found["scores"][alpha].items())
        ratios, strict = found["ratios"][alpha], found["strict"][alpha]
        lines.append(
            f"  alpha {alpha}: {scores}; best baseline / ours mean {mean(ratios):.2f} best {max(ratios):.2f} worst "
            f"{min(ratios):.2f} (strict {mean(strict):.2f}); gap {mean(found['gaps'][alpha]):.1%}"
        )
    told = [one["ratio"] for one in found["programs"] if one["ratio"]]
    if told:
        took = max(one["seconds"] for one in found["programs"])
        lines.append(f"  the paper's program / ours: mean {mean(told):.2f}, worst {min(told):.2f}, up to {took:.1f} s")
    return "\n".join(lines)


def small(count: int) -> dict[str, int]:
    """How often ours equals enumeration."""
    chance, equal, tried = random.Random(0), 0, 0
    while tried < count:
        rows, columns, pods = chance.randint(1, 4), chance.randint(1, 3), chance.randint(1, 4)
        free = [chance.randint(0, rows * columns) for _ in range(pods)]
        if sum(free) < rows * columns or (pods**columns > 27 and rows > 3):
            continue
        problem = Problem.plain(rows, columns, free, alpha=chance.choice(ALPHAS))
        tried += 1
        equal += abs(place(problem).score - placed_by(problem, brute_force, "brute-force").score) < EPSILON
    return {"cases": tried, "equal": equal}


def scale() -> dict[str, Any]:
    """10,000 nodes, in a process of its own: seconds with bound and rank table written, by the clock and of
    the processor (the best of three, since other work disturbs), and peak memory."""
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (minipods, height, width) in SCALE.items():
            busy = 0.38 if height * width > 4_500 else 0.27
            free = Setting(minipods, 10_000, height, width, busy).free(0)
            problem = Problem.plain(height, width, free, alpha=0.3)
            times: list[tuple[float, float]] = []
            gaps: list[float] = []
            for alpha in (0.1, 0.3, 0.5):
                rounds: list[tuple[float, float]] = []
                for _ in range(3):
                    start, used = time.perf_counter(), time.process_time()
                    placed = place(replace(problem, alpha=alpha))
                    placed.rank_table.write(Path(folder, "rank_table.json"))
                    rounds.append((time.perf_counter() - start, time.process_time() - used))
                by_clock, of_processor = (min(kind) for kind in zip(*rounds, strict=True))
                times.append((by_clock, of_processor))
                gaps.append(placed.gap)
            seconds, processor = (round(max(kind), 3) for kind in zip(*times, strict=True))
            rows[name] = {"seconds": seconds, "processor_seconds": processor, "gap": round(max(gaps), 4)}
    rows["peak_MiB"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return rows


def headline(settings: dict[str, Any], scaled: dict[str, Any], enumerated: dict[str, int]) -> dict[str, Any]:
    """The figures that are asked for first."""

    def over(kind: str, names: Sequence[str], most: float) -> list[float]:
        return [
            value for name in names if name in settings for alpha, own in settings[name][kind].items()
            if alpha <= most for value in own
        ]  # fmt: skip

    every = list(settings)
    programs = {name: [one["ratio"] for one in own["programs"] if one["ratio"]] for name, own in settings.items()}
    fragmented = programs.get("40 fragmented") or [0.0]
    paper = [name for name in ("(ii)", "(iii)") if name in settings]
    return {
        "best_ratio": max(over("ratios", paper or every, 0.5)),
        "best_ratio_any_alpha": max(over("ratios", paper or every, 1.0)),
        "mean_ratio": mean(over("ratios", paper or every, 0.3)),
        "worst_ratio": min(over("strict", every, 1.0)),
        "mean_ratio_strict": mean(over("strict", paper or every, 0.3)),
        "best_ratio_strict": max(over("strict", paper or every, 0.5)),
        "mip_ratio": mean(fragmented),
        "mip_ratio_worst_fragmented": min(fragmented),
        "mip_worst_ratio": min((value for own in programs.values() for value in own), default=0.0),
        "bound_gap": mean(mean(over("gaps", [name], 0.5)) for name in every),
        "brute_force_equal": enumerated["equal"] / max(1, enumerated["cases"]),
        "scale_10k_s": max(row["seconds"] for row in scaled.values() if isinstance(row, dict)),
        "scale_10k_peak_MiB": scaled["peak_MiB"],
    }


def programs_by_alpha(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The paper's program: how often it was solved, its score over ours, the longest it took."""
    found: dict[str, Any] = {}
    for alpha in sorted({row["alpha"] for row in rows}):
        own = [row for row in rows if row["alpha"] == alpha]
        ratios = [row["ratio"] for row in own if row["ratio"]]
        found[str(alpha)] = {
            "solved": len(own), "no_plan_in_time": len(own) - len(ratios),
            "slowest_s": max(one["seconds"] for one in own),
            **({"ratio_mean": round(mean(ratios), 4), "ratio_min": round(min(ratios), 4)} if ratios else {}),
        }  # fmt: skip
    return found


def main() -> int:
    """All settings."""
    parser = make_parser(__doc__, rounds=50, quick=3, cases=SETTINGS)
    parser.add_argument("--limit", type=float, default=30.0, help="seconds for the paper's program (default 30)")
    parser.add_argument("--scale-only", action="store_true", help="10,000 nodes alone, as JSON")
    options = parser.parse_args()
    if options.scale_only:
        print(json.dumps(scale()))
        return 0
    argv = [sys.executable, "-m", "benchmarks.placement", "--scale-only"]
    scaled = json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)
    print("10,000 nodes: " + json.dumps(scaled), flush=True)
    enumerated = small(20 * options.rounds)
    print(f"equal to enumeration in {enumerated['equal']} of {enumerated['cases']} small cases", flush=True)
    settings = {
        name: measure(name, setting, options)
        for name, setting in SETTINGS.items() if not options.case or name in options.case
    }  # fmt: skip
    figures = {name: round(value, 4) for name, value in headline(settings, scaled, enumerated).items()}
    print(json.dumps(figures, indent=1))
    tables = {
        name: {
            "alphas": {
                str(alpha): {
                    "scores": {other: round(value, 3) for other, value in own["scores"][alpha].items()},
                    **{f"{kind}_{fold.__name__}": round(fold(own[key][alpha]), 4)
                       for kind, key in (("ratio", "ratios"), ("strict", "strict"), ("gap", "gaps"))
                       for fold in (mean, max, min)},
                } for alpha in ALPHAS
            },
            "program": programs_by_alpha(own["programs"]), "slowest_s": round(own["slowest"], 3),
        } for name, own in settings.items()
    }  # fmt: skip
    if options.json and not options.save:
        print(json.dumps(figures))
    elif options.save:
        sys.argv[0] = "-m benchmarks.placement"  # not where this checkout lies
        keep({**figures, "scale": scaled, "enumeration": enumerated, "settings": tables}, _quiet(options))
        if options.json:
            print(json.dumps(figures))
    return 0


def _quiet(options: argparse.Namespace) -> argparse.Namespace:
    """Save everything, print the figures alone."""
    return argparse.Namespace(**{**vars(options), "json": False})


if __name__ == "__main__":
    finish(main)
