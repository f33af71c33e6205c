"""``plait topology``, as a user sees it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.command import plait, values

TIER = "unit"
CONF = """SwitchName=core Switches=mp[1-2]
SwitchName=mp1 Switches=leaf[1-2]
SwitchName=leaf1 Nodes=n[1-2]
SwitchName=leaf2 Nodes=n[3-4]
SwitchName=mp2 Switches=leaf3
SwitchName=leaf3 Nodes=n[5-6]
"""


def topology(*arguments: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return plait("topology", *arguments, text=text or "")


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    (tmp_path / "topology.conf").write_text(CONF)
    return tmp_path / "topology.conf"


def test_a_file_for_people(conf: Path, tmp_path: Path) -> None:
    (tmp_path / "states").write_text("NODELIST STATE\nn1 alloc\nn[2-6] idle\n")
    done = topology(conf, f"states={tmp_path / 'states'}")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == "core 1, minipod 2, leaf 3"
    assert lines[3].split() == ["core", "3", "6", "5", "1", "0", "██········"]
    assert max(map(len, lines)) <= 80
    assert topology("show", conf).stdout.startswith("core 1")
    assert topology("-", text=CONF).stdout == topology(conf).stdout


def test_the_same_for_programs(conf: Path) -> None:
    found = values("topology", conf)
    assert found["counts"] == {"free": 6, "busy": 0, "down": 0}
    assert found["minipods"]["mp1"] == {"nodes": 4, "free": 4, "leaves": {"leaf1": 2, "leaf2": 2}}
    assert found["key"].startswith("sha256:")
    leaves = json.loads(topology(conf, "--json", "--level", "leaf").stdout)
    assert list(leaves["minipods"]) == ["leaf1", "leaf2", "leaf3"]
    assert leaves["key"] == found["key"]


def test_leaves_are_counted_wherever_they_hang(tmp_path: Path) -> None:
    lines = ["core Switches=mp1,lone", "mp1 Switches=leaf[1-2]", "leaf1 Nodes=n1", "leaf2 Nodes=n2", "lone Nodes=n3"]
    (tmp_path / "uneven.conf").write_text("\n".join(f"SwitchName={line}" for line in lines))
    assert topology(tmp_path / "uneven.conf").stdout.splitlines()[0] == "core 1, minipod 1, leaf 3"


def test_taints_that_jobs_tolerate(tmp_path: Path) -> None:
    labels = {"cloud.provider.com/topology-block": "b"}
    taints = [{"key": "dedicated", "value": "ml", "effect": "NoSchedule"}]
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    node = {"kind": "Node", "metadata": {"name": "n1", "labels": labels}, "spec": {"taints": taints}, "status": ready}
    (tmp_path / "nodes.json").write_text(json.dumps({"kind": "List", "items": [node]}))
    told = topology(tmp_path / "nodes.json")
    assert "down: n1 (tainted dedicated=ml:NoSchedule)" in told.stdout
    assert "1 node taken as down for a taint" in told.stderr
    told = topology(tmp_path / "nodes.json", "tolerate=dedicated").stderr
    assert "as down for a taint" not in told and "no pods in the list" in told


def test_a_file_is_converted(conf: Path, tmp_path: Path) -> None:
    printed = topology(conf, "--as", "topology.yaml")
    assert printed.stdout.startswith("- topology:")
    for name in ("copy.toml", "copy.json", "copy.yaml", "copy.conf"):
        assert topology(conf, "--out", tmp_path / name).returncode == 0
        assert topology(tmp_path / name, "--as", "topology.conf").stdout.splitlines()[1:] == CONF.splitlines()


def test_a_made_up_cluster_is_drawn_with_groups(tmp_path: Path) -> None:
    made = topology("generate", "minipods=11", "nodes=1019", "busy=0.4", "seed=3",
                    "--out", tmp_path / "cluster.toml")  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert "1019   611   408" in made.stdout
    (tmp_path / "groups").write_text(json.dumps({f"n{place:04}": place // 150 for place in range(1, 400)}))
    done = topology(tmp_path / "cluster.toml", "--draw", tmp_path / "tree.svg", "--groups", tmp_path / "groups")
    assert done.returncode == 0, done.stderr
    assert "3 groups; the widest, 1, touches 3 minipods" in done.stdout
    assert "3 groups; a group touches 2 to 3 minipods" in (tmp_path / "tree.svg").read_text()
    spread = values("topology", tmp_path / "cluster.toml", "--groups", tmp_path / "groups")["spread"]
    assert spread == {"0": 2, "1": 3, "2": 2}


def test_ten_thousand_nodes_fit_a_screen(tmp_path: Path) -> None:
    done = topology("generate", "minipods=125", "nodes=10000", "busy=0.3")
    assert len(done.stdout.splitlines()) < 10
    assert "--level leaf shows each" in " ".join(done.stdout.split())


def test_the_label_of_levels_and_notes_on_standard_error(tmp_path: Path) -> None:
    nodes = [{"kind": "Node", "metadata": {"name": f"n{i}", "labels": {"site/row": f"r{i % 2}"} if i else {}}}
             for i in range(5)]  # fmt: skip
    (tmp_path / "nodes.json").write_text(json.dumps({"kind": "List", "items": nodes}))
    done = topology(tmp_path / "nodes.json", "levels=site/row")
    assert "note: passed over 1 nodes without the labels that name switches (the first: n0)" in done.stderr
    found = values("topology", tmp_path / "nodes.json", "levels=site/row")
    assert [(one["count"], one["first"]) for one in found["passed_over"]] == [(1, "n0")]
    assert "fabric 1, site/row 2" in done.stdout
