"""The order of ranks under Slurm, read from ranks that run: is it the best there is on their job's nodes?

    python -m benchmarks.cluster_orders --jobs 50 --seed 1

Topologies are drawn: two to four switches of one to five nodes, their names in any order, below a core
switch; on each a real Slurm runs jobs of four to six nodes, beside others that have some. Every rank writes
down where it is. What their order scores is compared with the least that any order of the same nodes scores,
by counting all.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.keeping import keep_as
from plait.core.topology.switches import Topology
from plait.core.topology.wiring import SwitchEntry, build
from tests.support.orders import a_plan, least_score, score
from tests.support.slurm import SlurmCluster, SlurmSpec, ask, environment, slurm_cluster

RANK = "import os, socket, sys; print(os.environ['RANK'], socket.gethostname(), file=open(sys.argv[1], 'a'))"
LAUNCH = """
import sys
from pathlib import Path
from plait.api.in_cluster import slurm_order
from plait.core.job.plan import Plan
from plait.launch.slurm.job import SlurmHooks, run
folder, *argv = sys.argv[1:]
plan = Plan.read(Path(folder) / "plan.json")
sys.exit(run(Path(folder), argv, plan.layout.world_size, timeout=60, plan=plan, hooks=SlurmHooks(order=slurm_order)))
"""
SHAPES = ((2, 2), (4, 1), (1, 4), (3, 2), (2, 3), (5, 1))
"""Replicas and stages."""


def drawn_tree(drawn: random.Random) -> tuple[SlurmSpec, Topology]:
    """As Slurm is told of it, and as we know it."""
    pods = [drawn.randint(1, 5) for _ in range(drawn.randint(2, 4))]
    pods[0] += max(0, 6 - sum(pods))
    names = [f"n{number}" for number in range(1, sum(pods) + 1)]
    drawn.shuffle(names)
    leaves = [SwitchEntry(f"pod{at}", nodes=[names.pop() for _ in range(size)]) for at, size in enumerate(pods)]
    lines = [f"SwitchName={leaf.name} Nodes={','.join(leaf.nodes)}" for leaf in leaves]
    lines.append(f"SwitchName=core Switches={','.join(leaf.name for leaf in leaves)}")
    nodes = tuple(node for leaf in leaves for node in leaf.nodes)
    return SlurmSpec(nodes, "\n".join(lines) + "\n"), build(
        [SwitchEntry("core", [leaf.name for leaf in leaves]), *leaves]
    )


def one_job(cluster: SlurmCluster, tree: Topology, folder: Path, drawn: random.Random) -> dict[str, Any]:
    """Where its ranks were, and what that scores."""
    free = [node.name for node in tree.nodes]
    shapes = [(dp, pp) for dp, pp in SHAPES if dp * pp <= len(free)]
    dp, pp = drawn.choice(shapes)
    others = drawn.sample(free, drawn.randint(0, len(free) - dp * pp))
    held = [
        ask(cluster, "sbatch", "--parsable", f"--nodelist={node}", "-N1", "--exclusive", "-o", "/dev/null",
            "--wrap", "sleep 100").strip()
        for node in others
    ]  # fmt: skip
    while len(ask(cluster, "squeue", "-h", "-t", "R", "-o", "%A").split()) < len(held):
        time.sleep(0.1)
    plan = a_plan(dp, pp, drawn.choice([0.0, 0.3, 0.5, 0.9, 1.0]))
    folder.mkdir()
    plan.write(folder / "plan.json")
    rank = [sys.executable, "-I", "-S", "-c", RANK, str(folder / "seen")]
    argv = ["salloc", "--quiet", "--exclusive", f"--nodes={dp * pp}", sys.executable, "-c", LAUNCH, str(folder), *rank]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, env=environment(cluster), timeout=120)
    assert done.returncode == 0, done.stderr
    hosts = [host for _, host in sorted((int(line.split()[0]), line.split()[1]) for line in _lines(folder / "seen"))]
    for job in held:
        ask(cluster, "scancel", job)
    while ask(cluster, "squeue", "-h", "-o", "%A").strip():
        time.sleep(0.1)
    assert plan.job and len(set(hosts)) == dp * pp and not {*hosts} & {*others}
    return {
        "pods": [len(one) for one in tree.minipods().values()], "others": len(others), "dp": dp, "pp": pp,
        "alpha": plan.job.place.alpha, "hosts": hosts, "score": score(plan, tree, hosts),
        "least": least_score(plan, tree, hosts), "by_name": score(plan, tree, sorted(hosts, key=_number)),
    }  # fmt: skip


def _number(node: str) -> int:
    return int(node[1:])


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines()


def main() -> int:
    """Print how many are the best there is, and write all down."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--jobs", type=int, default=50)
    asked.add_argument("--seed", type=int, default=1)
    asked.add_argument("--each", type=int, default=5, help="jobs of a topology")
    given = asked.parse_args()
    drawn, found = random.Random(given.seed), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="orders-") as place:
        while len(found) < given.jobs:
            spec, tree = drawn_tree(drawn)
            with slurm_cluster(spec) as cluster:
                for _ in range(min(given.each, given.jobs - len(found))):
                    found.append(one_job(cluster, tree, Path(place) / str(len(found)), drawn))
                    print(found[-1], flush=True)
    worse = [one for one in found if one["score"] > one["least"] + 1e-9]
    by_name = sum(one["by_name"] > one["least"] + 1e-9 for one in found)
    print(f"{len(found)} jobs, {len(worse)} worse than the best there is; in the order of names {by_name} would be")
    told = {"seed": given.seed, "jobs": len(found), "worse": len(worse), "worse_by_name": by_name, "found": found}
    keep_as("cluster_orders", told)
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
