"""``plait place``, as a user types it."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plait.api.placing import Placing
from plait.cli.main import app
from plait.core.base.errors import PlacementError, PlaitError
from plait.core.job.plan import Plan
from plait.core.topology.form import to_dict
from plait.core.topology.placement import Placement
from plait.core.topology.rank_table import RankTable
from plait.core.topology.switches import Hardware
from plait.place.readers import read_topology
from tests.support.command import plait

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


def run(folder: Path, *args: str) -> str:
    """What is printed; files are those in ``folder``."""
    files = [str(folder / one) if one.endswith((".json", ".conf", ".toml")) and "=" not in one else one for one in args]
    return CliRunner().invoke(app, ["place", *files], catch_exceptions=False).stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a plan and a topology."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "job.toml").write_text(JOB)
    (folder / "topology.conf").write_text(TOPOLOGY)
    typed = ["topology", "generate", "minipods=2", "nodes=16", "--out", str(folder / "typed.toml")]
    CliRunner().invoke(app, typed, catch_exceptions=False)
    text = (folder / "typed.toml").read_text()
    (folder / "typed.toml").write_text(text.replace("gpus = 8", 'device = "H100", gpus = 8', 1))
    argv = [sys.executable, "-m", "plait.cli.main", "plan", str(folder / "job.toml")]
    subprocess.run(argv, check=True, capture_output=True)
    return folder


@pytest.mark.system
def test_a_plan_is_placed_and_repaired(folder: Path) -> None:
    out = run(folder, "job.plan.json", "--topology", "topology.conf", "place.alpha=0.3", "place.spares=2")
    assert "A PP group lies in at most 1 minipod, a DP group in 2 minipods" in out
    assert "the least there is (1.30)" in out
    table, placed = RankTable.read(folder / "rank_table.json"), Placement.read(folder / "placement.json")
    assert (table.hosts, table.world_size) == (placed.hosts, 96)
    assert table.plan == Plan.read(folder / "job.plan.json").key
    assert [host[0] for host in placed.hosts[:6]] == [host[0] for host in placed.hosts[6:]]
    victim = placed.hosts[3]
    args = ("--repair", "rank_table.json", "--down", victim, "place.alpha=0.3", "--out", "new/rank_table.json")
    told = json.loads(run(folder, "job.plan.json", "--topology", "topology.conf", *args, "--json"))
    assert [move["old"] for move in told["moves"]] == [victim]
    assert told["moves"][0]["new"] in placed.spares
    mended = RankTable.read(folder / "new" / "rank_table.json")
    assert sum(a != b for a, b in zip(table.hosts, mended.hosts, strict=True)) == 1


def test_a_host_that_lost_gpus_has_failed(folder: Path) -> None:
    (folder / "sound.toml").write_text(MIXED.format(8))
    run(folder, "job.plan.json", "--topology", "sound.toml", "place.alpha=0.3", "--out", "lost/t.json")
    victim = RankTable.read(folder / "lost" / "t.json").hosts[2]
    whole, _ = read_topology(str(folder / "sound.toml"))
    sick = whole.with_hardware({victim: Hardware(gpus=7)})
    (folder / "sick.json").write_text(json.dumps(to_dict(sick)))
    args = ("--topology", "sick.json", "place.alpha=0.3", "--repair", "lost/t.json", "--out", "lost/new.json", "--json")
    told = json.loads(run(folder, "job.plan.json", *args))
    assert [move["old"] for move in told["moves"]] == [victim]


def test_a_job_file_is_planned_first_and_the_weights_are_explained(folder: Path) -> None:
    told = json.loads(run(folder, "job.toml", "--topology", "topology.conf", "--out", "j/t.json", "--json"))
    assert "nearest profiled job" in told["affinity"]
    assert told["dp_seconds"] > 0 < told["pp_seconds"]
    assert (folder / "j" / "t.placement.json").is_file()
    assert told["gap"] == 0


def test_a_solver_for_what_is_special(folder: Path) -> None:
    args = ("place.alpha=0.9", "place.forbid=0:a", "place.method=cpsat", "--out", "f/t.json", "--json")
    told = json.loads(run(folder, "job.plan.json", "--topology", "topology.conf", *args))
    assert set(told["minipods"][:6]) == {"b"}


def test_the_program_of_the_paper(folder: Path) -> None:
    args = ("job.plan.json", "--topology", "topology.conf", "--out", "m/t.json", "--json")
    own, program = (json.loads(run(folder, *args, f"place.method={name}")) for name in ("exact", "program"))
    assert program["method"] == "program" and program["note"].startswith("program: ")
    assert program["bound"] == own["bound"] and program["score"] >= own["score"] - 1e-9


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
    args = ("--topology", "mixed.toml", "place.alpha=0.3", "--out", "m/t.json", "--json")
    told = json.loads(run(folder, "job.plan.json", *args))
    assert {host[0] for host in told["hosts"]} == {"b", "c"}
    few = "free nodes with fewer than 8 GPUs, a rank each"
    assert told["passed_over"] == [{"what": few, "count": 8, "first": "a00"}]
    (folder / "mixed.toml").write_text(MIXED.format(0))
    assert len(json.loads(run(folder, "job.plan.json", *args))["hosts"]) == 12  # nodes without GPUs are no other kind
    (folder / "mixed.toml").write_text(MIXED.replace("gpus = 8", "gpus = 4").format(8))
    said = CliRunner().invoke(app, ["place", str(folder / "job.plan.json"), "--topology", str(folder / "mixed.toml")])
    assert isinstance(said.exception, PlacementError)
    assert "4 are free: 8 are missing" in str(said.exception)
    assert f"note: passed over 16 {few} (the first: a00)" in said.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "no topology is given"),
        (("--topology", "none.conf"), "none.conf"),
        (
            ("--topology", "topology.conf", "place.alpha=2"),
            "a number of at least 0 and at most 1",
        ),
        (("--topology", "topology.conf", "place.avoid=a[00-06]"), "9 are free: 3 are missing"),
        (("--topology", "topology.conf", "place.avoid=zz"), "neither a node nor a switch called zz"),
        (("--topology", "topology.conf", "place.avoid=a[00-"), "place.avoid: 'a[00-': a '[' is never closed"),
        (("--topology", "topology.conf", "place.flows=-3"), "place.flows: -3 is not allowed"),
        (("--topology", "topology.conf", "place.limit=nan"), "place.limit: nan is not finite"),
        (("--topology", "topology.conf", "place.gpus_per_node=-1"), "place.gpus_per_node: -1 is not allowed"),
        (("--topology", "topology.conf", "--out", "."), "'.' is no file"),
        (("--topology", "topology.conf", "place.spares=many"), 'place.spares: "many" is not allowed'),
        (("--topology", "topology.conf", "place.method=mip"), 'Allowed: "exact" or "cpsat" or "program"'),
        (("--topology", "topology.conf", "place.forbid=0:a"), "set place.method=cpsat"),
        (("--topology", "topology.conf", "place.forbid=9:a"), "'9' is no stage"),
        (("--topology", "topology.conf", "--down", "a00"), "Give that one with --repair"),
        (("--topology", "topology.conf", "--repair", "topology.conf"), "cannot be read as a rank table"),
        (("--topology", "topology.conf", "place.affinity=none.toml"), "none.toml"),
        (
            ("--topology", "topology.conf", "place.gpu=FOO"),
            "place.gpu: no node has GPUs of type 'FOO'.",
        ),
        (("--topology", "typed.toml", "place.gpu=H10"), "'H10' (did you mean 'H100'?). Types there are: H100"),
        (("--topology", "typed.toml", "place.gpu=1=A100"), "no node has GPUs of type 'A100'"),
    ],
)
def test_mistakes_are_one_paragraph(folder: Path, args: tuple[str, ...], message: str) -> None:
    with pytest.raises(PlaitError) as raised:
        run(folder, "job.plan.json", "--out", "x/rank_table.json", *args)
    assert message in str(raised.value)
    assert raised.value.exit_status == 2
    assert not (folder / "x").exists()


def test_a_node_taken_while_solving_leaves_nothing_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The topology is read again before anything is written."""
    file = folder / "taken.conf"
    file.write_text(TOPOLOGY)
    placing = Placing.placed

    def meanwhile(asked: Placing) -> Placement:
        found = placing(asked)
        file.write_text(TOPOLOGY.replace("a[00-03]", "a[01-03]"))
        return found

    monkeypatch.setattr(Placing, "placed", meanwhile)
    with pytest.raises(PlacementError, match="a00 is no longer free"):
        run(folder, "job.plan.json", "--topology", "taken.conf", "place.alpha=0.3", "--out", "t/rank_table.json")
    assert not (folder / "t").exists()


@pytest.mark.parametrize("text", [None, "SwitchName=a0 Nod"])
def test_a_topology_that_goes_while_solving(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    file = folder / "going.conf"
    file.write_text(TOPOLOGY)
    placing = Placing.placed

    def meanwhile(asked: Placing) -> Placement:
        found = placing(asked)
        file.unlink() if text is None else file.write_text(text)
        return found

    monkeypatch.setattr(Placing, "placed", meanwhile)
    with pytest.raises(PlacementError, match=r"going.conf: .* it has changed since. Nothing was written"):
        run(folder, "job.plan.json", "--topology", "going.conf", "place.alpha=0.3", "--out", "t/rank_table.json")
    assert not (folder / "t").exists()


def test_a_topology_from_a_pipe_is_read_once(folder: Path) -> None:
    """As of ``--topology <(ssh login cat topology.conf)``."""
    read, write = os.pipe()
    os.write(write, TOPOLOGY.encode())
    os.close(write)
    out = run(folder, "job.plan.json", "--topology", f"/dev/fd/{read}", "place.alpha=0.3", "--out", "pipe/t.json")
    os.close(read)
    assert "the least there is (1.30)" in out


def test_a_picture_and_hash_conflicts(folder: Path) -> None:
    picture = folder / "cluster.svg"
    args = ("place.alpha=0.3", "--draw", str(picture), "place.flows=1", "--out", "d/t.json")
    out = run(folder, "job.plan.json", "--topology", "topology.conf", *args)
    assert "stage 1" in picture.read_text()
    assert str(picture) in out
    plain = json.loads(run(folder, "job.plan.json", "--topology", "topology.conf", *args[:1], *args[4:], "--json"))
    hashed = json.loads(run(folder, "job.plan.json", "--topology", "topology.conf", *args, "--json"))
    assert hashed["dp_seconds"] > plain["dp_seconds"]


def test_a_picture_that_cannot_be_written_is_one_paragraph(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlaitError, match=r"x.svg cannot be written: .* Choose another with --draw"):
        run(folder, "job.plan.json", "--topology", "topology.conf", "--out", str(tmp_path / "t.json"),
            "--draw", str(tmp_path / "file" / "x.svg"))  # fmt: skip
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file"]  # ranks are bound by a table, or nothing is


def test_ranks_that_the_strategy_does_not_fill_are_refused(folder: Path) -> None:
    with pytest.raises(PlaitError, match=r"cluster\.ranks: 7 are not the 96 ranks of the strategy"):
        run(folder, "job.toml", "cluster.ranks=7", "--topology", "topology.conf", "--out", "x/rank_table.json")
    assert not (folder / "x").exists()


def test_a_compressed_topology_and_one_node(folder: Path) -> None:
    (folder / "one.conf.gz").write_bytes(gzip.compress(b"SwitchName=s Nodes=n1\n"))
    job = ("job.toml", "strategy.pp=1", "strategy.dp=1", "train.global_batch_size=8", "cluster.ranks=8")
    out = run(folder, *job, "--topology", str(folder / "one.conf.gz"), "--out", "one/t.json")
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
    args = ("experts.toml", "--topology", "topology.conf", "--out", "e/t.json", "--json")
    told = json.loads(run(folder, *args))
    assert told["ep_seconds"] > told["dp_seconds"] > told["pp_seconds"] > 0
    assert "nearest profiled job" in told["affinity"]
    assert told["nodes_per_cell"] == 2 and told["minipods"][0::2] == told["minipods"][1::2]
    more = ("--repair", "e/t.json", "--down", told["hosts"][0], "place.avoid=b03")
    mended = json.loads(run(folder, *args, *more))
    assert [move["old"] for move in mended["moves"]] == [told["hosts"][0]]
    by_seconds = json.loads(run(folder, *args, "place.by=seconds"))
    assert by_seconds["gap"] >= 0 and by_seconds["ep_seconds"] <= told["ep_seconds"]


def test_what_says_where_ranks_lie_is_not_passed_over(tmp_path: Path) -> None:
    """``plait place`` was given a table that is for ``plait plan``, and placed the job anew, silently."""
    (tmp_path / "job.toml").write_text(f'{JOB}[place]\ntopology = "t.conf"\n')
    (tmp_path / "t.conf").write_text(TOPOLOGY)
    refused = plait("place", "job.toml", "place.rank_table=old.json", folder=tmp_path)
    assert refused.returncode == 2 and "place.rank_table: plait place says anew where ranks lie" in refused.stderr
    spares = plait("place", "job.toml", "place.spares=1/leaf", folder=tmp_path)
    assert spares.returncode == 2 and "a text such as 2/minipod or 1/row" in spares.stderr
    placed = plait("place", "job.toml", folder=tmp_path)  # on the topology of [place]
    assert placed.returncode == 0 and "12 nodes of 8 ranks" in placed.stdout, placed.stderr
