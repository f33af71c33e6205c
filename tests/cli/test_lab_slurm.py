"""``plait lab slurm up --topology``: what no emulated Slurm can be is said before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.cli.lab_slurm import _spec
from plait.core.base.errors import JobError

TIER = "unit"

TREE = "SwitchName=core Switches=l[1-2]\nSwitchName=l1 Nodes=n[1-2]\nSwitchName=l2 Nodes=n[3-4]\n"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("SwitchName=a Nodes=n[1-2]\nSwitchName=b Nodes=n2", "under no other"),
        ("SwitchName=a Nodes=n[1-", "never closed"),
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a", "circle"),
        ("SwitchName=a Nodes=munged", "can be called 'munged'"),
        ("SwitchName=a Nodes=localhost", "can be called 'localhost'"),
        ("SwitchName=a Nodes=../../x", "can be called"),
        ("SwitchName=a Nodes=n1;rm", "can be called"),
        ("SwitchName=a Nodes=n[1-251]", "has 251 nodes"),
        ("no topology", "no format"),
    ],
)
def test_a_bad_topology_is_named(text: str, match: str, tmp_path: Path) -> None:
    (tmp_path / "t.conf").write_text(text)
    with pytest.raises(JobError, match=match) as raised:
        _spec(tmp_path / "t.conf", None)
    assert "t.conf" in str(raised.value)


def test_another_number_of_nodes_than_the_topology_has_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.conf").write_text("SwitchName=leaf1 Nodes=n[1-4]\n")
    with pytest.raises(JobError, match="has 4 nodes, not 8"):
        _spec(tmp_path / "t.conf", 8)


@pytest.mark.parametrize(
    "text",
    [
        TREE,
        TREE.replace("\n", "\r\n"),
        "\ufeff" + TREE,
        TREE.replace("l1 Nodes", "l1 \\\n Nodes") + "#SwitchName=x Nodes=m[1-3]\n",
        'version = 1\n[switches]\ncore = {switches = "l[1-2]"}\nl1 = {nodes = "n[1-2]"}\nl2 = {nodes = "n[3-4]"}\n',
    ],
    ids=["conf", "crlf", "bom", "continued", "toml"],
)
def test_whatever_topologies_are_read_of(text: str, tmp_path: Path) -> None:
    file = tmp_path / "t.conf"
    file.write_text(text, newline="")
    spec = _spec(file, None)
    assert spec.nodes == ("n1", "n2", "n3", "n4")
    assert "\ufeff" not in spec.topology
    assert sum("Nodes=" in line for line in spec.topology.splitlines()) == 2
