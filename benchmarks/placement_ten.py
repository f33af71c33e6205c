"""Ten placements of a lab with two minipods: a step as it is predicted where its ranks lie, and as measured.

Six hosts in two minipods of three train a job of dp = 3 and pp = 2, or the other way round. Up to the
names of minipods there are ten ways to lay six ranks: each is trained by a rank table of its own, in
turns, and predicted by ``plait plan --evaluate`` (``place.topology``, ``place.rank_table``), with a network
file that ``plait measure placement`` writes of the same lab first. An error is measured over predicted less
1; of each pair whose measured steps differ by more than a tenth the better one must be named.

    python benchmarks/placement_ten.py [--rounds 1] [--steps 3] [--nic 50mbit] [--core 25mbit] [--save FILE]

Needs Linux and root or user namespaces. All hosts share this machine's cores: the slower the links, the
less that matters. With these it takes 19 minutes; links twice as fast take half as long, and the worst error
was 10.9 % where it is 7.3 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any

from keeping import finish, keep, make_parser
from placement_lab import TEXT, plait

from plait.core.topology.rank_table import RankTable
from plait.lab import LabSpec
from plait.plan.calibrate.recorded import read_seconds

JOB = """
[model]
family = "gpt"
num_layers = 6
hidden = 384
num_heads = 6
max_sequence = 32
[data]
text = "text.txt"
sequence_length = 32
[train]
steps = {steps}
global_batch_size = 6
micro_batch_size = 1
eval_every = 0
checkpoint_every = 0
log_every = 1
[strategy]
tp = 1
pp = {pp}
dp = {dp}
[run]
folder = "runs"
timeline_steps = 0
selfcheck = "off"
"""
WARM = 2
"""Steps that are left out."""
APART = 1.1
"""Pairs whose measured steps differ by less are none that one could be better of."""


def orders() -> dict[str, tuple[str, ...]]:
    """The host of every rank, by the ranks that share a minipod with rank 0."""
    found: dict[str, tuple[str, ...]] = {}
    for others in combinations(range(1, 6), 2):
        first = (0, *others)
        hosts = {rank: f"host{at}" for at, rank in enumerate(first)}
        hosts |= {rank: f"host{3 + at}" for at, rank in enumerate(one for one in range(6) if one not in first)}
        found["".join(map(str, first))] = tuple(hosts[rank] for rank in range(6))
    return found


def main() -> int:
    """Calibrate, predict, measure, compare."""
    given = options()
    spec = LabSpec.parse(f"6x1@{given.nic},2pods@{given.core}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.toml").write_text(JOB.format(steps=WARM + given.steps, dp=given.dp, pp=6 // given.dp))
        (folder / "text.txt").write_text(TEXT)
        like = LabSpec.parse(f"4x1@{given.nic},2pods@{given.core}")  # pairs lie inside its minipods, and across
        plait(folder, "measure", "placement", "--on", f"lab:{like}", "--network", "net.toml", "--out", "profile.json",
              "seconds=40")  # fmt: skip
        rows = {kind: {"hosts": hosts, "rounds": []} for kind, hosts in orders().items()}
        for kind, hosts in orders().items():
            RankTable(hosts, spec.ranks_per_host).write(folder / f"{kind}.json")
            rows[kind] |= predicted(folder, spec, kind)
        for number in range(given.rounds):
            names = list(rows)
            for kind in names[number % 10 :] + names[: number % 10]:
                rows[kind]["rounds"].append(measured(folder, spec, kind, number))
                print(f"{kind}: predicted {rows[kind]['predicted_s']:.2f} s, measured {rows[kind]['rounds'][-1]:.2f} s",
                      file=sys.stderr, flush=True)  # fmt: skip
        network = (folder / "net.toml").read_text()
    result = worked_out(rows) | {"lab": str(spec), "network": network}
    pairs = f"better of a pair named in {result['pairs_right']} of {result['pairs']}"
    print(f"error {result['mean_error']:+.1%} on average, {result['most_error']:.1%} at most; {pairs}")
    keep(result, given)
    return 0


def predicted(folder: Path, spec: LabSpec, kind: str) -> dict[str, Any]:
    """Of a step in that order."""
    told = plait(folder, "plan", "job.toml", "--evaluate", "--on", f"lab:{spec}", f"place.topology=lab:{spec}",
                 f"place.rank_table={kind}.json", "place.network=net.toml", "--json", "--out", "p.json")  # fmt: skip
    (one,) = json.loads(told)["placement"]["placed"]
    return {"predicted_s": one["seconds"], "inside_s": one["inside"], "dp": one["dp_spread"], "pp": one["pp_spread"]}


def measured(folder: Path, spec: LabSpec, kind: str, number: int) -> float:
    """Seconds of the median step."""
    run = f"r{number}-{kind}"
    plait(folder, "train", "job.toml", f"run.name={run}", "--on", f"lab:{spec}", "--rank-table", f"{kind}.json")
    return statistics.median(read_seconds(folder / "runs" / run)[WARM:])


def worked_out(rows: dict[str, Any]) -> dict[str, Any]:
    """Errors, and pairs of which the better one is named."""
    for row in rows.values():
        row["measured_s"] = statistics.median(row["rounds"])
        row["error"] = row["measured_s"] / row["predicted_s"] - 1
    right = pairs = 0
    for one, two in combinations(rows.values(), 2):
        faster, slower = sorted((one, two), key=lambda row: row["measured_s"])
        if slower["measured_s"] > APART * faster["measured_s"]:
            pairs += 1
            right += faster["predicted_s"] < slower["predicted_s"]
    errors = [row["error"] for row in rows.values()]
    return {"placements": rows, "mean_error": statistics.mean(errors), "most_error": max(map(abs, errors)),
            "within_10": sum(abs(one) <= 0.1 for one in errors), "pairs": pairs, "pairs_right": right}  # fmt: skip


def options() -> argparse.Namespace:
    """What is asked."""
    parser = make_parser(__doc__, rounds=1, quick=1)
    parser.add_argument("--steps", type=int, default=3, help="steps that count (default 3)")
    parser.add_argument("--dp", type=int, choices=(2, 3), default=3, help="replicas, of 3 or 2 stages")
    parser.add_argument("--nic", default="50mbit", help="rate of each host's link")
    parser.add_argument("--core", default="25mbit", help="rate of each minipod's link to the core")
    return parser.parse_args()


if __name__ == "__main__":
    finish(main)
