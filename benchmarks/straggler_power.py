"""How surely a slow rank is named, and nobody in clean runs, by how many ranks there are and how many steps
it has been slow; prints a table, and JSON.

    python benchmarks/straggler_power.py [--json] [--trials 20] [--clean 40] [--record] [--save FILE]

Steps vary by 1, 3 or 10 %, half of it carried over to the next (Student's t with 3 degrees of freedom), ops
by five times as much, ranks by 0.3 %. With --record also as in real runs, recorded first on a lab, on a
machine that must do nothing else: of ranks that have a core each, and of ranks that share cores. Every rank
is then a stretch of one of the recorded ranks, op by op; the slow one's ops are longer by so much. All goes
through what ``plait diagnose`` does.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from keeping import finish, make_parser, tell

from plait.core.parallel.layout import Layout
from plait.diagnose.measured.reading import read_run
from plait.diagnose.measured.recording import MEETINGS, ROLLUP, SPANS, Recording, grid_of, rollup_of
from plait.diagnose.verdicts.stragglers import verdicts

RECORDED = 220
"""Steps of a run whose noise is taken."""
SETTLED = 20
"""Of these left out."""
SHAPES = ((2, 4, 1), (2, 2, 2), (4, 2, 1), (2, 4, 2), (4, 2, 2), (4, 4, 4), (2, 8, 4), (8, 16, 8))
"""pp, dp, tp."""
JITTERS = (0.01, 0.03, 0.1)
SLOW, STEPS = (0.1, 0.3), (10, 20, 50)
MANY = 128
"""Ranks up to which a case is tried as often as told; larger ones a few times."""
JOB = """
[model]
family = "gpt"
num_layers = 2
hidden = {hidden}
num_heads = 4
[data]
text = "text"
sequence_length = 64
[train]
steps = {steps}
global_batch_size = {batch}
micro_batch_size = 2
eval_every = 0
checkpoint_every = 0
[strategy]
dp = {ranks}
slices = {{ batch = 1, columns = 1 }}
[run]
timeline_steps = {steps}
"""
NOISES = {"a core each": (2, 256), "four ranks a core": (8, 128)}
"""Ranks on this machine, and the model's hidden size."""


@dataclass(frozen=True)
class Noise:
    """Of real ranks that do the same, seconds of every op in every step: (ranks, steps, ops); and what passed
    between ops. ops: their kind, name, site and direction."""

    ops: pl.DataFrame
    seconds: np.ndarray
    between: np.ndarray


def made_up(jitter: float, rng: np.random.Generator) -> Noise:
    """Of 64 ranks whose steps vary by ``jitter``."""
    ranks, steps, many = 64, RECORDED - SETTLED, 24
    wild = rng.standard_t(3, (2, ranks, steps)) / 3**0.5
    for step in range(1, steps):
        wild[0, :, step] = 0.5 * wild[0, :, step - 1] + 0.75**0.5 * wild[0, :, step]
    pace = np.exp(jitter * wild.sum(axis=0) / 2**0.5 + 0.003 * rng.standard_normal((ranks, 1)))
    ops = np.exp(5 * jitter * rng.standard_t(3, (ranks, steps, many)) / 3**0.5)
    sites = ["attn", "mlp"] * (many // 2)
    names = pl.DataFrame({
        "kind": "compute", "name": [f"{site}{n // 4}.F0" for n, site in enumerate(sites)], "seq": 0, "site": sites,
        "layer": [n // 4 for n in range(many)], "slice": 0,
        "direction": ["forward" if n % 4 < 2 else "backward" for n in range(many)],
    })  # fmt: skip
    return Noise(names, 1e-3 * pace[:, :, None] * ops, 1e-4 * pace)


def recorded(ranks: int, hidden: int) -> Noise:
    """Of a run on a lab of hosts with one rank each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text").mkdir()
        (folder / "text" / "a.txt").write_text("".join(f"line {i} says {i * i % 97}\n" for i in range(9000)))
        (folder / "job.toml").write_text(JOB.format(ranks=ranks, hidden=hidden, batch=8 * ranks, steps=RECORDED))
        argv = [sys.executable, "-m", "plait.cli.main", "train", "job.toml", "--on", f"lab:{ranks}x1@1gbit"]
        subprocess.run(argv, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        return noise_of(read_run(folder / "runs" / "job").recording)


def noise_of(recording: Recording) -> Noise:
    """Of a recording of ranks that all do the same."""
    compute = recording.spans.filter(pl.col("kind") == "compute", pl.col("step") >= SETTLED)
    compute = compute.sort("rank", "step", "start").with_columns(seconds=pl.col("end") - pl.col("start"))
    ranks, steps = compute["rank"].n_unique(), compute["step"].n_unique()
    many = compute.height // (ranks * steps)
    assert many * ranks * steps == compute.height, "ranks did not do the same"
    # Of two orders of the same ops, as communication has it, the name tells which is which.
    compute = compute.sort("rank", "step", "name", "seq")
    host = recording.rollup.filter(pl.col("kind") == "host", pl.col("step") >= SETTLED).sort("rank", "step")
    seconds = compute["seconds"].to_numpy().reshape(ranks, steps, many)
    # What else the machine does slows all ranks of a step: stretches of different times must not carry that.
    pace = np.median(seconds, axis=2).mean(axis=0)
    pace /= np.median(pace)
    return Noise(
        compute.head(many).select("kind", "name", "seq", "site", "layer", "slice", "direction"),
        seconds / pace[:, None],
        host["seconds"].to_numpy().reshape(ranks, steps) / pace,
    )


def made(noise: Noise, shape: tuple[int, int, int], steps: int, slow: float, rng: np.random.Generator) -> \
        tuple[Recording, int]:  # fmt: skip
    """A recording of so many ranks, and which of them is slow."""
    pp, dp, tp = shape
    layout = Layout.of(pp=pp, dp=dp, tp=tp)
    world, many = layout.world_size, noise.ops.height
    whose = rng.integers(noise.seconds.shape[0], size=world)
    since = rng.integers(noise.seconds.shape[1] - steps + 1, size=world)
    when = since[:, None] + np.arange(steps)
    seconds, between = noise.seconds[whose[:, None], when].copy(), noise.between[whose[:, None], when]
    culprit = int(rng.integers(world))
    seconds[culprit] *= 1 + slow
    ends = seconds.cumsum(axis=2)
    step, rank = np.tile(np.arange(steps), world), np.repeat(np.arange(world), steps)
    spans = pl.DataFrame({"step": np.repeat(step, many), "rank": np.repeat(rank, many)}).hstack(
        pl.concat([noise.ops] * (world * steps), rechunk=True)
    )
    spans = spans.with_columns(
        start=(ends - seconds).ravel(), end=ends.ravel(), bytes=0, axis=pl.lit(""), group=pl.lit(None),
        lane=pl.lit("processor"), meeting=pl.lit(None),
    ).select([pl.col(name).cast(kind) for name, kind in SPANS.items()])  # fmt: skip
    host = pl.DataFrame({"step": step, "rank": rank, "seconds": between.ravel()}).with_columns(
        kind=pl.lit("host"), axis=pl.lit(""), site=pl.lit("between ops"), direction=pl.lit(""), n=1
    )
    rollup = pl.concat([table.select([pl.col(name).cast(kind) for name, kind in ROLLUP.items()])
                        for table in (rollup_of(spans, complete=False), host)])  # fmt: skip
    meetings = pl.DataFrame(schema=MEETINGS)
    return Recording(grid=grid_of(layout), rollup=rollup, meetings=meetings, spans=spans), culprit


def right(noise: Noise, shape: tuple[int, int, int], steps: int, slow: float, rng: np.random.Generator) -> bool:
    """Whether the slow rank was named, and nobody else."""
    recording, culprit = made(noise, shape, steps, slow, rng)
    named = [one.ranks for one in verdicts(recording).stragglers]
    return named == ([(culprit,)] if slow else [])


def row(noise: Noise, shape: tuple[int, int, int], args: argparse.Namespace, rng: np.random.Generator) -> \
        dict[str, Any]:  # fmt: skip
    """Of a shape: shares of slow ranks that were named, and how many clean runs were looked at, and named
    somebody."""
    many = int(np.prod(shape)) <= MANY
    times, looks = (args.trials, args.clean) if many else (max(2, args.trials // 4), max(2, args.clean // 10))
    shares = {
        f"{slow:.0%} {steps}": float(np.mean([right(noise, shape, steps, slow, rng) for _ in range(times)]))
        for slow in SLOW for steps in STEPS
    }  # fmt: skip
    named = sum(not right(noise, shape, steps, 0.0, rng) for steps in STEPS for _ in range(looks))
    return shares | {"clean": len(STEPS) * looks, "named": named}


def main() -> int:
    """Record, make up, diagnose."""
    parser = make_parser(__doc__, rounds=1)
    parser.add_argument("--trials", type=int, default=20, help="of each slow case")
    parser.add_argument("--clean", type=int, default=40, help="runs without a slow rank, of each shape and length")
    parser.add_argument("--record", action="store_true", help="also with the noise of runs on this machine")
    args = parser.parse_args()
    rng = np.random.default_rng(5)
    found = dict[str, Any]()
    noises = {f"{jitter:.0%}": made_up(jitter, rng) for jitter in JITTERS}
    noises |= {name: recorded(*real) for name, real in NOISES.items() if args.record}
    for name, noise in noises.items():
        typical = np.median(noise.seconds, axis=2)
        spread = float((typical.std(axis=1) / typical.mean(axis=1)).mean())
        print(f"noise {name}: {noise.ops.height} ops a step, whose median varies by {spread:.1%}")
        cases = "".join(f"{f'{slow:.0%} {steps}':>8}" for slow in SLOW for steps in STEPS)
        print(f"{'pp x dp x tp':14}{'ranks':>6}{cases}   named in clean runs")
        for shape in SHAPES:
            one = row(noise, shape, args, rng)
            cells = "".join(f"{value:8.0%}" for key, value in one.items() if "%" in key)
            words = " x ".join(map(str, shape))
            print(f"{words:14}{int(np.prod(shape)):6}{cells}   {one['named']} of {one['clean']}", flush=True)
            found[f"{name}, {words}"] = one
    tell(found, args)
    return 1 if any(one["named"] for one in found.values()) else 0


if __name__ == "__main__":
    finish(main)
