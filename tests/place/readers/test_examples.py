"""The examples of the user's guide are read, and tell the cluster that they say they do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from plait.place.topologies import read_topology
from tests.place.readers import texts
from tests.place.readers.test_formats import write

GUIDE = (Path(__file__).resolve().parents[3] / "docs" / "topology.md").read_text()
BLOCKS = re.findall(r"^```(\w+) (topology|states)\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


def test_every_format_has_an_example() -> None:
    assert len(BLOCKS) == 8


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for _, kind, text in BLOCKS])
def test_an_example_is_read(tmp_path: Path, kind: str, text: str) -> None:
    file = write(tmp_path, text)
    if kind == "states":
        topology, _ = read_topology(write(tmp_path, texts.TREE_CONF, "wires"), states=[file])
        assert topology.node("n001").state.status == "busy"
        return
    topology, _ = read_topology(file)
    assert {name: topology.path(name)[0] for name in topology.node_index}.items() <= {
        name: leaf for name, (leaf, _) in texts.ABOVE.items()
    }.items()
    assert len(topology.levels) == 3
