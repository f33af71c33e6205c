"""Steps predicted where their ranks lie: what the placement costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.core.topology.rank_table import RankTable
from tests.support.command import plait, succeed

TIER = "unit"
JOB = """
[model]
family = "gpt"
num_layers = 4
hidden = 128
num_heads = 4
max_sequence = 32
[data]
sequence_length = 32
[train]
steps = 3
global_batch_size = 8
[strategy]
tp = 1
pp = 2
dp = 2
"""
LAB = "lab:4x1@100mbit,2pods@50mbit"
NETWORK = "".join(f"[{key}]\nvalue = {value}\n" for key, value in
                  {"rate": 12.5e6, "collective_loss": 0.0, "p2p_loss": 0.0, "core": 1e6}.items())  # fmt: skip


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "net.toml").write_text(NETWORK)
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path / "job.toml"


def placed(job: Path, *more: str) -> list[dict[str, Any]]:
    done = succeed("plan", str(job), "--evaluate", "--on", LAB, "--json", f"place.topology={LAB}", *more)
    return json.loads(done.stdout)["placement"]["placed"]


def test_where_ranks_lie_decides_what_a_step_takes(job: Path) -> None:
    network = f"place.network={job.parent / 'net.toml'}"
    (aligned,) = placed(job, network, "place.alpha=1")
    assert (aligned["dp_spread"], aligned["pp_spread"]) == (1, 2)
    (across,) = placed(job, network, "place.alpha=0")
    assert (across["dp_spread"], across["pp_spread"]) == (2, 1)
    assert across["inside"] == aligned["inside"] < aligned["seconds"] < across["seconds"]
    table = job.parent / "table.json"
    RankTable(tuple(str(host) for host in across["hosts"]), 1).write(table)
    (same,) = placed(job, network, f"place.rank_table={table}")
    assert same["seconds"] == across["seconds"] and same["hosts"] == across["hosts"]
    (published,) = placed(job, "place.alpha=0")
    assert 0 < published["more"] < 0.21, "17 % of collectives at most"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["place.rank_table=t.json"], "Set place.topology, too"),
        ([f"place.topology={LAB}", "place.rank_table=t.json"], "2 hosts; the strategy has 4 ranks, 4"),
        ([f"place.topology={LAB}", "place.rank_table=u.json"], "has no node 'elsewhere'"),
    ],
)
def test_what_cannot_be_placed(job: Path, more: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(job.parent)
    RankTable(("host0", "host1"), 1).write(Path("t.json"))
    RankTable(("host0", "host1", "host2", "elsewhere"), 1).write(Path("u.json"))
    done = plait("plan", "job.toml", "--evaluate", "--on", LAB, *more)
    assert done.returncode == 2 and says in " ".join(done.stderr.split()), done.stderr


def test_a_model_with_experts_loses_what_is_published(job: Path) -> None:
    text = job.read_text().replace("max_sequence = 32", "max_sequence = 32\nexperts = {count = 4, per_token = 2}")
    job.write_text(text)
    (one,) = placed(job, "place.alpha=0")
    assert one["dp_spread"] == 2 and 0 < one["more"] < 0.21
