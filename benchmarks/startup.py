"""What it takes to start: groups, store operations and connections of a rank; what the host pays for an
action; how long it is from the command to the first step.

    python benchmarks/startup.py                 all parts
    python benchmarks/startup.py --case worlds   one of them

*ranks*: eight real ranks (pp 2 x dp 2 x tp 2) are started and count what they ask of the store and whom they
are connected to. *worlds*: one rank of 64 to 16,384 goes through the same code, in a process of its own, with
stand-ins for what would wait for the others. *actions*: what a rank's lists cost beside torch. *first-step*:
wall and processor seconds from the command to the end of the first step, of the launcher and all it has
started; the corpus is there. ``--tree`` names another checkout whose ranks and commands are measured instead.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

from keeping import HERE, finish, keep, make_parser, run_to_the_end

from plait.core.base.process import reserved_port
from plait.core.base.text import table
from plait.core.cluster.hardware import Hosts
from plait.core.job.spec import Job
from plait.launch.local.local import local_start
from plait.launch.run_folder import write_run
from plait.plan.make import make_plan

WORLDS = (64, 256, 1024, 4096, 16384)
QUICKSTART = "specs/jobs/quickstart.toml"
STARTS: dict[int, tuple[str, ...]] = {2: (), 8: ("strategy.tp=2", "strategy.dp=4")}
"""Ranks of a quickstart, and what makes it have as many."""
SHORT = ("train.steps=2", "train.warmup_steps=0", "train.eval_every=0", "train.checkpoint_every=0")
JOB: dict[str, Any] = {
    "model": {"family": "gpt", "num_layers": 4, "hidden": 64, "num_heads": 4, "vocab": 256, "max_sequence": 64},
    "data": {"sequence_length": 64, "text": "python-stdlib"},
    "train": {"global_batch_size": 8, "micro_batch_size": 2, "steps": 2},
    "strategy": {"pp": 2, "dp": 2, "tp": 2, "shard": "zero1", "schedule": "1f1b", "slices": {}},
}


def main() -> int:
    """Measure what is asked for."""
    parts = {"ranks": _ranks, "worlds": _worlds, "actions": _actions, "first-step": _first_steps}
    parser = make_parser(__doc__, rounds=5, quick=1, cases=parts)
    parser.add_argument("--tree", help="a checkout of Plait other than this one, for ranks and first-step")
    options = parser.parse_args()
    found = {name: parts[name](options) for name in options.case or parts}
    keep(found, options)
    return 0


def _ranks(options: Any) -> dict[str, Any]:
    """Eight real ranks."""
    with tempfile.TemporaryDirectory() as name, mock.patch.dict(os.environ, PYTHONPATH=_paths(options.tree)):
        folder = Path(name) / "run"
        job = Job.from_dict(JOB | {"run": {"folder": str(folder)}})
        write_run(make_plan(job, Hosts(ranks_per_host=8, rate=1e9), vocab=256), folder)
        argv = [sys.executable, "-W", "ignore", str(HERE / "startup_ranks.py"), name, str(folder)]
        with reserved_port() as port:
            run_to_the_end(local_start(argv, 8, port=port), 8, Path(name) / "logs")
        told = [json.loads(Path(name, f"{rank}.json").read_text()) for rank in range(8)]
    rows: list[tuple[str, ...]] = []
    for when in told[0]:
        for rank, one in enumerate(told):
            store, groups = one[when]["store"], one[when]["groups"]
            rows.append((
                when, str(rank), ", ".join(map(str, groups)), str(store["ours"]), str(store["torch"]),
                str(one[when]["connections"]["ranks"]),
            ))  # fmt: skip
    print("\n".join(table(("when", "rank", "gloo groups of", "store, ours", "torch's", "connections"), rows, None)))
    return {"ranks": told}


def _worlds(_: Any) -> list[dict[str, Any]]:
    """One rank of large worlds; a process each, as torch's groups are of a process."""
    found: list[dict[str, Any]] = []
    for world in WORLDS:
        code = f"import json, startup_worlds as s; print(json.dumps(s.of_a_world({world})))"
        ran = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], env=os.environ | {"PYTHONPATH": _paths(None)},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        found.append(json.loads(ran.stdout))
    header = ("ranks", "groups", "store, ours", "torch's", "connections", "full mesh: store", "connections", "join MiB")
    what = ("world", "groups", "store_ours", "store_torch", "connections", "mesh_store", "mesh_connections", "join_mib")
    rows = [tuple(f"{one[key]:,}" for key in what) for one in found]
    print("\n".join(table(header, rows, None)))
    return found


def _actions(options: Any) -> dict[str, Any]:
    """In this process."""
    from startup_actions import cost

    found = cost(20 * options.rounds)
    rows = [
        (name, str(one["actions"]), str(one["torch_calls"]),
         *(f"{one[f'{key}us_per_action']:.2f}" for key in ("", "torch_", "lists_", "calls_")))
        for name, one in found.items()
    ]  # fmt: skip
    print("\n".join(table(("", "actions", "torch's calls", "us an action", "torch's", "lists", "calls"), rows, None)))
    return found


def _first_steps(options: Any) -> dict[str, Any]:
    """The quickstart, with two ranks and with eight."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        for ranks, more in STARTS.items():
            corpus, times = Path(name) / f"{ranks}" / "corpus", list[tuple[float, float]]()
            for number in range(options.rounds + 1):
                folder = Path(name) / f"{ranks}-{number}"
                if number:
                    shutil.copytree(corpus, folder / "corpus")
                taken = _first_step(folder, more, options.tree)
                if number:
                    times.append(taken)
                else:
                    shutil.copytree(folder / "corpus", corpus)
            wall, processor = zip(*times, strict=True)
            found[str(ranks)] = {
                "wall": statistics.median(wall), "processor": statistics.median(processor), "rounds": times,
            }  # fmt: skip
    rows = [(ranks, f"{one['wall']:.2f}", f"{one['processor']:.2f}") for ranks, one in found.items()]
    print("\n".join(table(("ranks", "seconds to the first step", "of processors"), rows, None)))
    return found


def _first_step(folder: Path, more: tuple[str, ...], tree: str | None) -> tuple[float, float]:
    """Seconds from the command to the first line of metrics, and of processors until then."""
    root = Path(tree or HERE.parent)
    argv = [
        sys.executable, "-W", "ignore", "-m", "plait.cli.main", "train", str(root / QUICKSTART), *SHORT,
        f"run.folder={folder.parent}", f"run.name={folder.name}", *more,
    ]  # fmt: skip
    start = time.perf_counter()
    log = folder.with_suffix(".log")
    with log.open("w") as out:
        process = subprocess.Popen(argv, env=os.environ | {"PYTHONPATH": _paths(tree)}, stdout=out, stderr=out)
        while not (folder / "metrics.jsonl").is_file() or not (folder / "metrics.jsonl").stat().st_size:
            if process.poll() is not None:
                raise RuntimeError(f"{' '.join(argv)} ended with {process.returncode}: {log.read_text()[-2000:]}")
            time.sleep(0.005)
        seconds, processor = time.perf_counter() - start, _processor_seconds(process.pid)
        process.wait()
    return seconds, processor


def _processor_seconds(root: int) -> float:
    """Of a process and all that it has started, those included that have ended and were waited for."""
    children, ticks = defaultdict[int, list[int]](list), dict[int, int]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # ended since
                continue
            children[int(fields[1])].append(int(entry.name))
            ticks[int(entry.name)] = sum(map(int, fields[11:15]))
    total, waiting = 0, [root]
    while waiting:
        one = waiting.pop()
        total += ticks.get(one, 0)
        waiting += children[one]
    return total / os.sysconf("SC_CLK_TCK")


def _paths(tree: str | None) -> str:
    """Where a process finds the Plait that is measured, and these scripts."""
    return os.pathsep.join([str(tree or HERE.parent), str(HERE)])


if __name__ == "__main__":
    finish(main)
