"""``plait place``, as a user types it."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from plait.api.placing import PlacementRequest
from plait.core.job.plan import Plan
from plait.core.topology.form import to_dict
from plait.core.topology.placement import Placement
from plait.core.topology.rank_table import RankTable
from plait.core.topology.switches import Hardware
from plait.place.topologies import read_topology
from tests.support.command import plait, succeed, values

TIER = "unit"

JOB = """
[model]
preset = "gpt3-1.3b"
[data]
sequence_length = 1024
[train]
global_batch_size = 48
micro_batch_size = 1
precision = "bf16-mixed"
[strategy]
tp = 8
pp = 2
dp = 6
[cluster]
preset = "h100"
ranks = 96
"""
TOPOLOGY = """
SwitchName=a0 Nodes=a[00-03]
SwitchName=a1 Nodes=a[04-07]
SwitchName=b0 Nodes=b[00-03]
SwitchName=b1 Nodes=b[04-07]
SwitchName=a Switches=a[0-1]
SwitchName=b Switches=b[0-1]
SwitchName=core Switches=a,b
"""


def run(folder: Path, *args: str, topology: str = "topology.conf") -> str:
    """What is printed; files are those in ``folder``."""
    return succeed("place", *args, "--topology", topology, folder=folder).stdout


def answer(folder: Path, *args: str, topology: str = "topology.conf") -> dict[str, Any]:
    """The same for programs."""
    return values("place", *args, "--topology", topology, folder=folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a plan and a topology."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "job.toml").write_text(JOB)
    (folder / "topology.conf").write_text(TOPOLOGY)
    succeed("plan", "job.toml", folder=folder)
    return folder


def test_a_plan_is_placed_and_repaired(folder: Path) -> None:
    out = run(folder, "job.plan.json", "place.alpha=0.3", "place.spares=2")
    assert "A PP group lies in at most 1 minipod, a DP group in 2 minipods" in out
    assert "the least there is (1.30)" in out
    table, placed = RankTable.read(folder / "rank_table.json"), Placement.read(folder / "placement.json")
    assert (table.hosts, table.world_size) == (placed.hosts, 96)
    assert table.plan == Plan.read(folder / "job.plan.json").key
    assert [host[0] for host in placed.hosts[:6]] == [host[0] for host in placed.hosts[6:]]
    victim = placed.hosts[3]
    args = ("--repair", "rank_table.json", "--down", victim, "place.alpha=0.3", "--out", "new/rank_table.json")
    told = answer(folder, "job.plan.json", *args)
    assert [move["old"] for move in told["moves"]] == [victim]
    assert told["moves"][0]["new"] in placed.spares
    mended = RankTable.read(folder / "new" / "rank_table.json")
    assert sum(a != b for a, b in zip(table.hosts, mended.hosts, strict=True)) == 1


def test_a_host_that_lost_gpus_has_failed(folder: Path) -> None:
    (folder / "sound.toml").write_text(MIXED.format(8))
    run(folder, "job.plan.json", "place.alpha=0.3", "--out", "lost/t.json", topology="sound.toml")
    victim = RankTable.read(folder / "lost" / "t.json").hosts[2]
    whole, _ = read_topology(str(folder / "sound.toml"))
    sick = whole.with_hardware({victim: Hardware(gpus=7)})
    (folder / "sick.json").write_text(json.dumps(to_dict(sick)))
    args = ("place.alpha=0.3", "--repair", "lost/t.json", "--out", "lost/new.json")
    told = answer(folder, "job.plan.json", *args, topology="sick.json")
    assert [move["old"] for move in told["moves"]] == [victim]


def test_a_job_file_is_planned_first_and_the_weights_are_explained(folder: Path) -> None:
    told = answer(folder, "job.toml", "--out", "j/t.json")
    assert "nearest profiled job" in told["affinity"]
    assert told["dp_seconds"] > 0 < told["pp_seconds"]
    assert (folder / "j" / "t.placement.json").is_file()
    assert told["gap"] == 0


def test_a_solver_for_what_is_special(folder: Path) -> None:
    args = ("place.alpha=0.9", "place.forbid=0:a", "place.method=cpsat", "--out", "f/t.json")
    told = answer(folder, "job.plan.json", *args)
    assert set(told["minipods"][:6]) == {"b"}


MIXED = """version = 1
hardware = [{{nodes = "a[00-07]", gpus = 8}}, {{nodes = "b[00-07]", gpus = 8}}, {{nodes = "c[00-03]", gpus = {}}}]
[switches]
core = {{switches = "a,b,c"}}
a = {{nodes = "a[00-07]"}}
b = {{nodes = "b[00-07]"}}
c = {{nodes = "c[00-03]"}}
"""


def test_nodes_with_too_few_gpus_are_not_used_and_said(folder: Path) -> None:
    (folder / "mixed.toml").write_text(MIXED.replace('"a[00-07]", gpus = 8', '"a[00-07]", gpus = 4').format(8))
    args = ("place.alpha=0.3", "--out", "m/t.json")
    told = answer(folder, "job.plan.json", *args, topology="mixed.toml")
    assert {host[0] for host in told["hosts"]} == {"b", "c"}
    few = "free nodes with fewer than 8 GPUs, a rank each"
    assert told["passed_over"] == [{"what": few, "count": 8, "first": "a00"}]
    (folder / "mixed.toml").write_text(MIXED.format(0))
    assert len(answer(folder, "job.plan.json", *args, topology="mixed.toml")["hosts"]) == 12
    (folder / "mixed.toml").write_text(MIXED.replace("gpus = 8", "gpus = 4").format(8))
    said = plait("place", "job.plan.json", "--topology", "mixed.toml", folder=folder)
    assert said.returncode == 2 and "4 are free: 8 are missing" in said.stderr
    assert f"note: passed over 16 {few} (the first: a00)" in said.stderr


@pytest.mark.parametrize(
    ("later", "says"),
    [
        (TOPOLOGY.replace("a[00-03]", "a[01-03]"), "a00 is no longer free"),
        ("SwitchName=a0 Nod", r"going.conf: .* it has changed since. Nothing was written"),
        (None, r"going.conf: .* it has changed since. Nothing was written"),
    ],
)
def test_a_topology_that_changes_while_solving_leaves_nothing_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, later: str | None, says: str
) -> None:
    """The topology is read again before anything is written."""
    file = folder / "going.conf"
    file.write_text(TOPOLOGY)
    placing = PlacementRequest.solve

    def meanwhile(asked: PlacementRequest) -> Placement:
        found = placing(asked)
        file.unlink() if later is None else file.write_text(later)
        return found

    monkeypatch.setattr(PlacementRequest, "solve", meanwhile)
    asked = ("job.plan.json", "--topology", "going.conf", "place.alpha=0.3", "--out", "t/rank_table.json")
    done = plait("place", *asked, folder=folder)
    assert done.returncode == 2 and re.search(says, done.stderr), done.stderr
    assert not (folder / "t").exists()


def test_a_topology_from_a_pipe_is_read_once(folder: Path) -> None:
    """As of ``--topology <(ssh login cat topology.conf)``."""
    read, write = os.pipe()
    os.write(write, TOPOLOGY.encode())
    os.close(write)
    out = run(folder, "job.plan.json", "place.alpha=0.3", "--out", "pipe/t.json", topology=f"/dev/fd/{read}")
    os.close(read)
    assert "the least there is (1.30)" in out


def test_a_picture_and_hash_conflicts(folder: Path) -> None:
    picture = folder / "cluster.svg"
    args = ("place.alpha=0.3", "--draw", str(picture), "place.flows=1", "--out", "d/t.json")
    out = run(folder, "job.plan.json", *args)
    assert "stage 1" in picture.read_text()
    assert str(picture) in out
    plain = answer(folder, "job.plan.json", *args[:1], *args[4:])
    hashed = answer(folder, "job.plan.json", *args)
    assert hashed["dp_seconds"] > plain["dp_seconds"]


def test_a_compressed_topology_and_one_node(folder: Path) -> None:
    (folder / "one.conf.gz").write_bytes(gzip.compress(b"SwitchName=s Nodes=n1\n"))
    job = ("job.toml", "strategy.pp=1", "strategy.dp=1", "train.global_batch_size=8", "cluster.ranks=8")
    out = run(folder, *job, "--out", "one/t.json", topology="one.conf.gz")
    assert "1 node of 8 ranks (1 x 1 cells: PP groups x stages) on 1 of 1 minipod\n" in out


EXPERTS = """
[model]
preset = "mixtral-8x7b"
[data]
sequence_length = 4096
[train]
global_batch_size = 96
micro_batch_size = 1
precision = "bf16-mixed"
[strategy]
tp = 4
pp = 2
dp = 12
ep = 4
[cluster]
preset = "h100"
ranks = 96
"""


def test_experts_are_counted_and_kept_together(folder: Path) -> None:
    """Four replicas of four ranks are two nodes: a pair of them shares out experts."""
    (folder / "experts.toml").write_text(EXPERTS)
    args = ("experts.toml", "--out", "e/t.json")
    told = answer(folder, *args)
    assert told["ep_seconds"] > told["dp_seconds"] > told["pp_seconds"] > 0
    assert "nearest profiled job" in told["affinity"]
    assert told["nodes_per_cell"] == 2 and told["minipods"][0::2] == told["minipods"][1::2]
    more = ("--repair", "e/t.json", "--down", told["hosts"][0], "place.avoid=b03")
    mended = answer(folder, *args, *more)
    assert [move["old"] for move in mended["moves"]] == [told["hosts"][0]]
    by_seconds = answer(folder, *args, "place.by=seconds")
    assert by_seconds["gap"] >= 0 and by_seconds["ep_seconds"] <= told["ep_seconds"]
