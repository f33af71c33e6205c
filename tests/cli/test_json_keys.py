"""Keys of what ``--json`` prints, verb by verb: programs read them. One that is new in
json_keys.json, or gone, is a change that the changelog names."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from plait.core.runs.evidence import Evidence, Verdict, write_hang
from tests.api.test_planning import JOB
from tests.cli.test_measure import LOG
from tests.cli.test_place import JOB as PLACED
from tests.cli.test_place import TOPOLOGY
from tests.support.command import plait
from tests.support.recordings.made import Job, write_run
from tests.support.workloads import heavy_tailed

TIER = "unit"
KEYS = json.loads((Path(__file__).parent / "json_keys.json").read_text())
H100 = "cluster.preset=h100 cluster.ranks=8"
COMMANDS = {
    "plan": f"plan job.toml {H100} 'plan.constraints=[\"memory<=70GiB\"]' --what-if nic=2x --show details",
    "plan --evaluate": f"plan job.toml {H100} strategy.dp=4 strategy.tp=2 'plan.constraints=[\"dp=4\"]' --evaluate",
    "plan A B": "plan a.plan.json b.plan.json",
    "train --dry-run": "train job.toml strategy.dp=2 run.device=cpu --dry-run",
    "schedule": "schedule zb-h1 pp=4 micro_batches=6",
    "reshard": "reshard '(2,4) R S0 R' '(2,4)@8 S0 R R' shape=64,64,8",
    "topology": "topology show switches.conf",
    "place": "place placed.toml place.topology=switches.conf",
    "queue replay": "queue replay jobs.csv nodes=100 load=0.85 reserve=60@+6h planned_for=2h minipod=10 policy=fifo",
    "queue fit": "queue fit jobs.csv --out model",
    "queue predict": "queue predict model jobs.csv --last 3",
    "data prepare": "data prepare texts.jsonl --out corpus",
    "data show": "data show corpus",
    "measure machine": "measure machine --import links.log --out links.json",
    "job": "job train.steps",
    "runs": "runs runs",
    "diagnose": "diagnose runs/one",
    "diagnose --hang": "diagnose runs/one --hang",
    "diagnose --timeline": "diagnose runs/one --timeline",
    "diagnose --against": "diagnose runs/one --against runs/two",
}  # fmt: skip
"""In this order: some read what others wrote."""


def keys(values: Any, at: str = "") -> Iterator[str]:
    """Paths to all keys of values: ``a.b``, and ``a[].b`` within lists."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield f"{at}.{key}".lstrip(".")
            yield from keys(value, f"{at}.{key}")
    elif isinstance(values, list):
        for value in values:
            yield from keys(value, f"{at}[]")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CompletedProcess[str]]:
    """What every command prints, run in order in one folder with the files that they name."""
    there = tmp_path_factory.mktemp("json")
    (there / "job.toml").write_text(JOB)
    (there / "placed.toml").write_text(PLACED)
    (there / "switches.conf").write_text(TOPOLOGY)
    (there / "links.log").write_text(LOG)
    (there / "texts.jsonl").write_text('{"text": "a document"}\n')
    (there / "jobs.csv").write_text(heavy_tailed(900))
    for name in ("one", "two"):
        write_run(there / "runs" / name, Job(dp=2, pp=2), hosts=2)
    write_hang(there / "runs/one", Verdict(cause="stopped", why="It is.", ranks=(1,)), [Evidence(rank=1)])
    for name in ("a", "b"):
        plait("plan", "job.toml", *H100.split(), "--out", f"{name}.plan.json", folder=there)
    return {name: plait(*shlex.split(words), "--json", folder=there) for name, words in COMMANDS.items()}


@pytest.mark.parametrize("name", COMMANDS)
def test_keys_of_json_stay(answers: dict[str, CompletedProcess[str]], name: str) -> None:
    done = answers[name]
    assert done.stdout, done.stderr
    assert sorted(set(keys(json.loads(done.stdout)))) == KEYS[name]
