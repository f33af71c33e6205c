"""The contract of readers: each format has a row here, and tells the same cluster."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from plait.core.base.errors import JobError
from plait.core.topology.switches import NodeState, Topology
from plait.place.readers import FORMATS, read_topology, source
from tests.place.readers import texts

ROWS = {
    "plait.toml": ("plait", texts.TOML),
    "plait.json": ("plait", texts.JSON),
    "tree.conf": ("topology.conf", texts.TREE_CONF),
    "block.conf": ("topology.conf", texts.BLOCK_CONF),
    "tree-shown": ("topology.conf", texts.TREE_SHOWN),
    "blocks-shown": ("topology.conf", texts.BLOCKS_SHOWN),
    "topology.yaml": ("topology.yaml", texts.YAML),
    "kueue.json": ("kubernetes", texts.KUEUE),
    "tiers.json": ("kubernetes", texts.TIERS),
    "graph.json": ("topograph", texts.GRAPH),
    "configmap.json": ("configmap", texts.CONFIG_MAP),
    "features.json": ("kubernetes", texts.FEATURES),
}
STATES = {
    "scontrol": ("slurm-nodes", texts.NODES_SHOWN),
    "sinfo": ("slurm-nodes", texts.SINFO),
    "squeue": ("slurm-nodes", texts.SQUEUE),
    "pods": ("kubernetes", texts.PODS),
}


def write(folder: Path, text: str, name: str = "topology") -> str:
    file = folder / name
    file.write_text(text)
    return str(file)


def shape(topology: Topology) -> list[list[list[str]]]:
    """Nodes by leaf by minipod."""
    pods: list[list[list[str]]] = []
    for nodes in topology.minipods().values():
        leaves: dict[int, list[str]] = {}
        for node in nodes:
            leaves.setdefault(node.leaf, []).append(node.name)
        pods.append(list(leaves.values()))
    return pods


def test_every_format_has_a_row() -> None:
    assert {name for name, _ in (*ROWS.values(), *STATES.values())} == {form.name for form in FORMATS}


@pytest.mark.parametrize("row", ROWS)
def test_every_format_tells_the_same_cluster(tmp_path: Path, row: str) -> None:
    name, text = ROWS[row]
    found, _ = read_topology(write(tmp_path, text))
    named, _ = read_topology(write(tmp_path, text), form=name)
    assert found == named
    assert shape(found) == [[["n001", "n002"], ["n003", "n004"]], [["n005", "n006"], ["n007", "n008"]]]
    assert (found.distance("n001", "n002"), found.distance("n001", "n003"), found.distance("n001", "n008")) == (1, 2, 3)
    assert found.path("n001")[0] == "leaf1"
    assert len(set(found.levels)) == 3


@pytest.mark.parametrize("row", ROWS)
def test_a_file_may_be_compressed(tmp_path: Path, row: str) -> None:
    _, text = ROWS[row]
    (tmp_path / "topology.gz").write_bytes(gzip.compress(text.encode()))
    assert read_topology(str(tmp_path / "topology.gz"))[0] == read_topology(write(tmp_path, text))[0]


@pytest.mark.parametrize("cut", [2, 12, -6])
def test_a_compressed_file_that_was_cut_off(tmp_path: Path, cut: int) -> None:
    (tmp_path / "topology.gz").write_bytes(gzip.compress(texts.TREE_CONF.encode())[:cut])
    with pytest.raises(JobError, match="cannot be unpacked"):
        read_topology(str(tmp_path / "topology.gz"))


@pytest.mark.parametrize("row", STATES)
def test_states_from_other_sources(tmp_path: Path, row: str) -> None:
    """What every one of them tells of n001: a job holds it."""
    _, text = STATES[row]
    topology, _ = read_topology(write(tmp_path, texts.TREE_CONF), states=[write(tmp_path, text, "states")])
    assert topology.node("n001").state.status == "busy"
    assert topology.node("n008").state.status == "free"
    with pytest.raises(JobError, match="states of nodes, and no switches"):
        read_topology(write(tmp_path, text))


@pytest.mark.parametrize("row", [*ROWS, *STATES])
@pytest.mark.parametrize("part", [0.02, 0.31, 0.5, 0.77, 0.97])
def test_what_is_cut_off_is_one_clear_error_or_a_tree(tmp_path: Path, row: str, part: float) -> None:
    """Of text in lines a part may be whole; JSON never is."""
    form, text = (ROWS | STATES)[row]
    cut = text[: int(len(text) * part)]
    states = [write(tmp_path, cut)] if row in STATES else []
    whole = write(tmp_path, texts.TREE_CONF, "whole") if states else write(tmp_path, cut)
    try:
        topology, _ = read_topology(whole, form="" if states else form, states=states)
    except JobError as error:
        problem: JobError | None = error
    else:
        problem = None
        assert not text.startswith("{")
        assert all(any(whole.startswith(name) for whole in texts.ABOVE) for name in topology.places)
    assert problem is None or problem.file == str(tmp_path / "topology")
    assert len(str(problem)) < 700 + len(str(tmp_path))


@pytest.mark.parametrize("form", [form.name for form in FORMATS])
@pytest.mark.parametrize(
    "text",
    ["", " ", "\0", "{", "[]", "{}", "null", "3", '"', "[" * 100_000, '{"a":' * 100_000, "- " * 5000, "a: " * 50, "=",
     "SwitchName", "SwitchName=", "SwitchName=a Nodes=", "NodeName=", "NodeName=a", "NODELIST", "JOBID|NODELIST\n1|[",
     '{"instances": 3}', '{"instances": [3]}', '{"instances": [{"id": "a", "network_layers": 3}]}',
     '{"instances": [{"id": "a", "network_layers": [3]}]}', '{"kind": "List"}', '{"kind": "List", "items": [3]}',
     '{"kind": "List", "items": [{"kind": "Node"}]}', '{"kind": "List", "items": [{"metadata": 3}]}',
     '{"kind": "Node", "metadata": {"name": "a", "labels": 3}}', '{"version": 1, "switches": []}',
     "1" * 5000, '{"version": ' + "1" * 5000 + "}", "- topology: 3", "- topology: a\n  tree: 3",
     "- topology: a\n  tree: {switches: [3]}", "- topology: a\n  block: {blocks: {}}", "- {1: 2}", "topology: a"],
    ids=lambda text: repr(text[:40]),
)  # fmt: skip
def test_what_is_nothing_of_the_kind_is_one_clear_error(tmp_path: Path, form: str, text: str) -> None:
    for chosen in (form, ""):
        with pytest.raises(JobError) as caught:
            read_topology(write(tmp_path, text), form=chosen)
        assert caught.value.file == str(tmp_path / "topology")
        assert len(str(caught.value)) < 700 + len(str(tmp_path))


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "topology").write_bytes(b"SwitchName=\xff")
    with pytest.raises(JobError, match="byte 11 is not UTF-8"):
        read_topology(str(tmp_path / "topology"))
    with pytest.raises(JobError, match="No such file"):
        read_topology(str(tmp_path / "none"))
    with pytest.raises(JobError, match="Is a directory"):
        read_topology(str(tmp_path))
    with pytest.raises(JobError, match=r"format: no format 'topologi.conf' \(did you mean 'topology.conf'\?\)"):
        read_topology(write(tmp_path, texts.TOML), form="topologi.conf")


def test_a_byte_order_mark_and_other_line_ends_do_no_harm(tmp_path: Path) -> None:
    for text in (texts.TREE_CONF, texts.TOML, texts.YAML):
        (tmp_path / "topology").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
        assert len(read_topology(str(tmp_path / "topology"))[0].nodes) == 8


def test_states_of_several_sources_are_made_one(tmp_path: Path) -> None:
    sources = [write(tmp_path, STATES[name][1], name) for name in ("scontrol", "sinfo", "squeue")]
    topology, remarks = read_topology(write(tmp_path, texts.TREE_CONF), states=sources)
    states = {node.name: node.state for node in topology.nodes}
    assert states["n001"].holder == "job 7"
    assert states["n001"].until is not None
    assert states["n002"] == NodeState(status="busy", until=None, holder="job 7, job 8_3")
    assert states["n003"] == NodeState(status="down", holder="bad nic")
    assert states["n004"] == NodeState(status="down", holder="maintenance soon")
    assert states["n005"] == NodeState(status="down", holder="no whole GPU")
    assert [topology.count(status) for status in ("free", "busy", "down")] == [3, 2, 3]
    assert topology.node("n001").hardware.gpus == 8
    assert topology.node("n001").hardware.device == "h100"
    assert (topology.node("n004").hardware.gpus, topology.node("n005").hardware.gpus) == (4, 0)
    assert topology.node("n006").hardware.gpus is None
    assert [note for note in remarks.notes if "no state of 4 nodes (n002, n006, n007, ...)" in note]
    assert remarks.over.counts == {"partitions without nodes": 1, "jobs without nodes": 1}


def test_states_of_strangers_are_said_and_left_out(tmp_path: Path) -> None:
    states = write(tmp_path, "NODELIST STATE\nlogin[1-2] idle\nn001 idle\n", "states")
    topology, remarks = read_topology(write(tmp_path, texts.TREE_CONF), states=[states])
    assert len(topology.nodes) == 8
    assert remarks.over.counts == {"nodes under no switch": 2}
    assert "login1" in remarks.over.lines()[0]


GRAPH_OF_MANY = '{"instances": [' + ",".join(["{}"] * 200_001) + "]}"
MANY: dict[str, tuple[str, str]] = {
    "lines": ("SwitchName=a Nodes=n1\n" + "\n" * 500_000, "more than 500000 lines"),
    "a long line": ("SwitchName=a Nodes=" + "n1," * 400_000, "a line of more than 1048576 characters"),
    "text": ("SwitchName=a\n" + ("x" * 1000 + "\n") * 34_000, "more than 32 MiB of text"),
    "switches": ("".join(f"SwitchName=s{i} Nodes=n\n" for i in range(50_001)), "line 50001: more than 50000 switches"),
    "blocks": ("".join(f"BlockName=s{i} Nodes=n{i}\n" for i in range(50_001)), "line 50001: more than 50000 blocks"),
    "records": ("NodeName=n State=IDLE\n" * 200_001, "200001 records of nodes; at most 200000"),
    "lists": ("SwitchName=a Nodes=n[1-200000]\n" * 6, "line 6: all lists up to here stand for more than 1000000 names"),
    "yaml": ("- topology: a\n" + "- {topology: b}\n" * 80_000, "more than 300000 values of YAML"),
    "yaml text": ("- topology: a\n" + "# x\n" * (1 << 20), "more than 4 MiB of YAML|more than 500000 lines"),
    "toml": ("version = 1\n" + "# xxxxxxx\n" * 500_000, "more than 4 MiB of TOML|more than 500000 lines"),
    "toml key": ("version = 1\n" + "a." * 60 + "a = 1\n", "a key of more than 50 parts"),
    "quoted toml key": ("version = 1\n" + '"a" . ' * 60 + "a = 1\n", "a key of more than 50 parts"),
    "values": ('{"instances": [' + "{}," * 2_600_000 + "{}]}", "at most 5000000 are read"),
    "instances": (GRAPH_OF_MANY, "instances: more than 200000 instances"),
    "objects": ('{"kind": "List", "items": [' + ",".join(["{}"] * 200_001) + "]}", "items: more than 200000 objects"),
}


@pytest.mark.parametrize("row", MANY)
def test_more_than_any_cluster_has_is_refused(tmp_path: Path, row: str) -> None:
    text, says = MANY[row]
    with pytest.raises(JobError, match=says) as caught:
        read_topology(write(tmp_path, text))
    assert caught.value.file == str(tmp_path / "topology")


def test_a_small_file_that_unpacks_to_much(tmp_path: Path) -> None:
    (tmp_path / "topology.gz").write_bytes(gzip.compress(bytes(257 << 20), 1))
    with pytest.raises(JobError, match="cannot be unpacked: its gzip stream holds more than 268435456 bytes"):
        read_topology(str(tmp_path / "topology.gz"))


def test_a_pipe_that_nobody_writes_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(source, "NO_WRITER", 0.05)
    with pytest.raises(JobError, match="cannot be read: nobody has opened this pipe to write"):
        read_topology(str(tmp_path / "pipe"))
    monkeypatch.setattr(source, "SILENCE", 0.05)
    held = os.open(tmp_path / "pipe", os.O_RDWR)
    with pytest.raises(JobError, match="whoever opened this pipe writes nothing"):
        read_topology(str(tmp_path / "pipe"))
    os.close(held)


def test_a_device(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="It is a device, no regular file"):
        read_topology("/dev/zero")
