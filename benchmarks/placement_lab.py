"""Whether a placement is worth what is predicted: a pipeline of data-parallel stages trains on a lab of four
hosts in two minipods with a slower core, its ranks in the placed order and in others.

    python benchmarks/placement_lab.py [--json] [--rounds 3] [--steps 6] [--nic 1gbit] [--core 300mbit]
        [--seed 0] [--save FILE]

Needs Linux and root or user namespaces. All four hosts share the machine's cores, so that computation takes
longer than on hosts of their own, whatever the order. dp = 2 and pp = 2 on four hosts know three orders that
differ: DP groups inside minipods, PP groups inside, neither. One of them is what ``place.by=seconds``
chooses by the rates of the lab; ``random`` is drawn anew in each round. A round trains the job once in every
order, one after the other; ratios are of medians of steps inside a round, their median is reported.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from keeping import finish, keep, make_parser
from rich.console import Console
from rich.table import Table

from plait.core.base.errors import PlaitError
from plait.core.cluster.hardware import Cluster
from plait.core.job.spec import Job
from plait.core.topology.rank_table import RankTable
from plait.lab import LabSpec
from plait.plan.answer import Planner
from plait.plan.calibrate.recorded import read_seconds
from plait.plan.explain.job_cluster import emulated

TEXT = "".join(
    f"{number} and {number * number % 997} make {number + number * number % 997}.\n" for number in range(9999)
)
JOB = """
[model]
family = "gpt"
num_layers = 4
hidden = 512
num_heads = 8
max_sequence = 32
[data]
text = "text.txt"
sequence_length = 32
[train]
steps = {steps}
global_batch_size = 4
micro_batch_size = 0
eval_every = 0
checkpoint_every = 0
log_every = 1
[strategy]
tp = 1
pp = 2
dp = 2
[run]
folder = "runs"
timeline_steps = 0
selfcheck = "off"
"""
WARM = 2
"""Steps that are left out."""
ORDERS = {
    "dp inside": ("host0", "host1", "host2", "host3"),
    "pp inside": ("host0", "host2", "host1", "host3"),
    "neither": ("host0", "host2", "host3", "host1"),
}
"""The host of every node; nodes 0 and 1 are the first stage, 0 and 2 a pipeline."""


def main() -> int:
    """Place, predict, measure."""
    options = _options()
    spec = LabSpec.parse(f"4x1@{options.nic},2pods@{options.core}")
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.toml").write_text(JOB.format(steps=WARM + options.steps))
        (folder / "text.txt").write_text(TEXT)
        (folder / "network.toml").write_text(network_of(spec))
        orders = dict(ORDERS)
        placed = place(folder, spec)
        orders[placed["kind"]] = tuple(placed["hosts"])
        predicted = simulated(folder / "job.toml", spec)
        rounds = list[dict[str, Any]]()
        for number in range(options.rounds):
            drawn = tuple(chance.sample(ORDERS["dp inside"], 4))
            rounds.append(measured(folder, spec, orders | {"random": drawn}, number, options))
    result = work_out(rounds, placed, predicted) | {"lab": str(spec)}
    if not options.json:
        show(result)
    keep(result, options)
    return 0


def network_of(spec: LabSpec) -> str:
    """What ``place.network`` names: the rates of a lab's description. Two groups share a core
    link."""
    assert spec.rate and spec.core_rate
    values = {"rate": spec.rate / 8, "collective_loss": 0.0, "p2p_loss": 0.0, "crossing": spec.rate / shared(spec)}
    return "".join(f"[{key}]\nvalue = {value}\n" for key, value in values.items())


def shared(spec: LabSpec) -> float:
    """Bits per second that each of two groups has of a core link."""
    assert spec.rate and spec.core_rate
    return min(spec.rate, spec.core_rate / 2)


def class_of(hosts: tuple[str, ...]) -> str:
    """Which groups an order keeps inside minipods."""
    pods = [int(host.removeprefix("host")) // 2 for host in hosts]
    return "dp inside" if pods[0] == pods[1] else "pp inside" if pods[0] == pods[2] else "neither"


def place(folder: Path, spec: LabSpec) -> dict[str, Any]:
    """What ``plait place`` chooses, with its seconds; and those of the other orders."""
    options = ["--topology", f"lab:{spec}", "place.network=network.toml"]
    found = json.loads(
        plait(folder, "place", "job.toml", *options, "place.by=seconds", "--out", "placed.json", "--json")
    )
    seconds: dict[str, list[float]] = {}
    for alpha, kind in (("1", "dp inside"), ("0", "pp inside")):
        one = json.loads(plait(
            folder, "place", "job.toml", *options, f"place.alpha={alpha}", "--out", "other.json", "--json"
        ))  # fmt: skip
        assert class_of(tuple(one["hosts"])) == kind
        seconds[kind] = [one["dp_seconds"], one["pp_seconds"]]
    seconds["neither"] = [seconds["pp inside"][0], seconds["dp inside"][1]]
    return {"hosts": found["hosts"], "kind": class_of(tuple(found["hosts"])), "seconds": seconds}


def simulated(file: Path, spec: LabSpec) -> dict[str, float]:
    """Seconds of a step by the planner's simulation, for every order: a group that crosses minipods has its
    share of the core link, one inside that of a host."""
    assert spec.rate
    job = Job.read(file).named("job")
    base = emulated(job, spec.as_hosts, spec.hosts)
    inside, across = spec.rate / 8, shared(spec) / 8
    rates = {"dp inside": (inside, across), "pp inside": (across, inside), "neither": (across, across)}
    return {kind: Planner(job, with_rates(base, *pair), 256).predict(job).seconds for kind, pair in rates.items()}


def with_rates(base: Cluster, dp: float, pp: float) -> Cluster:
    """A cluster whose pairs of neighbouring ranks, the DP groups, have one rate, and whose others another."""
    inner, outer = base.tiers
    tiers = [inner]
    for name, ranks, rate in (("dp", 2, dp), ("pp", 0, pp)):
        told = outer.rate.model_copy(update={"value": rate, "source": "a link of the lab"})
        tiers.append(outer.model_copy(update={"name": name, "ranks": ranks, "rate": told}))
    return base.model_copy(update={"tiers": tuple(tiers)})


def measured(
    folder: Path, spec: LabSpec, orders: dict[str, tuple[str, ...]], number: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Seconds of a step by order, in turn; later rounds begin with another order."""
    names = list(orders)
    names = names[number % len(names) :] + names[: number % len(names)]
    found: dict[str, Any] = {"random order": list(orders["random"]), "random is": class_of(orders["random"])}
    for name in names:
        table, run = folder / "table.json", f"r{number}-{name.replace(' ', '-')}"
        RankTable(orders[name], spec.ranks_per_host).write(table)
        plait(folder, "train", "job.toml", f"run.name={run}", "--on", f"lab:{spec}", "--rank-table", str(table))
        found[name] = statistics.median(read_seconds(folder / "runs" / run)[WARM:])
        if not options.json:
            print(f"round {number}  {name:10} {class_of(orders[name]):10} {found[name]:.3f} s", flush=True)
    return found


def plait(folder: Path, *args: str) -> str:
    """What a verb prints; on stderr if it fails."""
    argv = [sys.executable, "-W", "ignore", "-m", "plait.cli.main", *args]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
        raise PlaitError(f"plait {' '.join(args)} ended with status {done.returncode}")
    return done.stdout


def work_out(rounds: list[dict[str, Any]], placed: dict[str, Any], predicted: dict[str, float]) -> dict[str, Any]:
    """Ratios of steps to the placed order's, measured and predicted."""
    kind = placed["kind"]
    sent = {name: sum(pair) for name, pair in placed["seconds"].items()}
    # What the simulation adds to bytes over rates (computation) takes as long as it does in the placed order.
    base = statistics.median(one[kind] for one in rounds) - sent[kind]
    rows = {
        name: {
            "measured_s": statistics.median(one[name] for one in rounds),
            "over_placed": statistics.median(one[name] / one[kind] for one in rounds),
            "spread": sorted(one[name] / one[kind] for one in rounds),
            "simulated_s": predicted[name],
            "simulated_over_placed": predicted[name] / predicted[kind],
            "place_seconds": sent[name],
            "place_adds_s": sent[name] - sent[kind],
            "measured_adds_s": statistics.median(one[name] - one[kind] for one in rounds),
            "place_over_placed": (base + sent[name]) / (base + sent[kind]),
        }
        for name in ORDERS
    }
    worst = max(rows, key=lambda name: rows[name]["measured_s"])
    return {
        "placed": kind,
        "placed_s": statistics.median(one[kind] for one in rounds),
        "orders": rows,
        "worst": worst,
        "worst_over_placed": rows[worst]["over_placed"],
        "worst_over_placed_simulated": rows[worst]["simulated_over_placed"],
        "worst_over_placed_by_place": rows[worst]["place_over_placed"],
        "random_over_placed": statistics.median(one["random"] / one[kind] for one in rounds),
        "rounds": rounds,
    }


def show(result: dict[str, Any]) -> None:
    """A table for people."""
    table = Table("order", "step", "over placed", "simulated", "place says", title=f"placed: {result['placed']}")
    for name, row in result["orders"].items():
        ratios = (row["over_placed"], row["simulated_over_placed"], row["place_over_placed"])
        table.add_row(name, f"{row['measured_s']:.2f} s", *(f"{ratio:.2f}x" for ratio in ratios))
    table.add_row("random", "", f"{result['random_over_placed']:.2f}x", "", "")
    Console(width=80).print(table)


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__, rounds=3, quick=1)
    parser.add_argument("--steps", type=int, default=6, help="steps that count (default 6)")
    parser.add_argument("--nic", default="1gbit", help="rate of each host's link (default 1gbit)")
    parser.add_argument("--core", default="300mbit", help="rate of each minipod's link to the core (default 300mbit)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    finish(main)
