"""The contract of readers: each format has a row here, and tells the same cluster."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.core.topology.switches import NodeState, Topology
from plait.formats.base import source
from plait.place.topologies import FORMATS, Remarks, read_topology
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


def told(folder: Path, text: str, **more: Any) -> tuple[Topology, Remarks]:
    """A topology that a file with this text tells."""
    return read_topology(write(folder, text), **more)


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
    found, _ = told(tmp_path, text)
    named, _ = told(tmp_path, text, form=name)
    assert found == named
    assert shape(found) == [[["n001", "n002"], ["n003", "n004"]], [["n005", "n006"], ["n007", "n008"]]]
    assert (found.distance("n001", "n002"), found.distance("n001", "n003"), found.distance("n001", "n008")) == (1, 2, 3)
    assert found.path("n001")[0] == "leaf1"
    assert len(set(found.levels)) == 3


@pytest.mark.parametrize("row", ROWS)
def test_a_file_may_be_compressed(tmp_path: Path, row: str) -> None:
    _, text = ROWS[row]
    (tmp_path / "topology.gz").write_bytes(gzip.compress(text.encode()))
    assert read_topology(str(tmp_path / "topology.gz"))[0] == told(tmp_path, text)[0]


@pytest.mark.parametrize("cut", [2, 12, -6])
def test_a_compressed_file_that_was_cut_off(tmp_path: Path, cut: int) -> None:
    (tmp_path / "topology.gz").write_bytes(gzip.compress(texts.TREE_CONF.encode())[:cut])
    with pytest.raises(JobError, match="cannot be unpacked"):
        read_topology(str(tmp_path / "topology.gz"))


@pytest.mark.parametrize("row", STATES)
def test_states_from_other_sources(tmp_path: Path, row: str) -> None:
    """What every one of them tells of n001: a job holds it."""
    _, text = STATES[row]
    topology, _ = told(tmp_path, texts.TREE_CONF, states=[write(tmp_path, text, "states")])
    assert topology.node("n001").state.status == "busy"
    assert topology.node("n008").state.status == "free"
    with pytest.raises(JobError, match="states of nodes, and no switches"):
        told(tmp_path, text)


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
        assert all(any(whole.startswith(name) for whole in texts.ABOVE) for name in topology.node_index)
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
            told(tmp_path, text, form=chosen)
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
        told(tmp_path, texts.TOML, form="topologi.conf")


def test_a_byte_order_mark_and_other_line_ends_do_no_harm(tmp_path: Path) -> None:
    for text in (texts.TREE_CONF, texts.TOML, texts.YAML):
        (tmp_path / "topology").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
        assert len(read_topology(str(tmp_path / "topology"))[0].nodes) == 8


def test_states_of_several_sources_are_made_one(tmp_path: Path) -> None:
    sources = [write(tmp_path, STATES[name][1], name) for name in ("scontrol", "sinfo", "squeue")]
    topology, remarks = told(tmp_path, texts.TREE_CONF, states=sources)
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
    topology, remarks = told(tmp_path, texts.TREE_CONF, states=[states])
    assert len(topology.nodes) == 8
    assert remarks.over.counts == {"nodes under no switch": 2}
    assert "login1" in remarks.over.lines()[0]


MANY: dict[str, tuple[str, str, str]] = {
    "lines": ("SwitchName=a Nodes=n1" + "\n" * 41, "formats.base.source.MOST_LINES", "more than 40 lines"),
    "a long line": ("SwitchName=a Nodes=" + "n1," * 40, "formats.base.source.LONGEST_LINE", "a line of more than 40 "),
    "text": ("#" * 41, "formats.base.source.LARGEST_TEXT", "more than 0 MiB of text"),
    "switches": ("SwitchName=s Nodes=n\n" * 41, "core.topology.wiring.MOST_SWITCHES", "line 41: more than 40 switches"),
    "blocks": (
        "".join(f"BlockName=s{i} Nodes=n{i}\n" for i in range(41)), "formats.slurm.topology.MOST_SWITCHES",
        "line 41: more than 40 blocks",
    ),
    "records": ("NodeName=n State=IDLE\n" * 41, "formats.slurm.nodes.MOST_HOSTS", "41 records of nodes; at most 40"),
    "lists": (
        "SwitchName=a Nodes=n[1-20]\n" * 3, "core.topology.wiring.HostLists.__init__.__defaults__",
        "line 3: all lists up to here stand for more than 40 names",
    ),
    "yaml": ("- topology: a\n" * 20, "core.base.codec.yaml_text.MOST_EVENTS", "more than 40 values of YAML"),
    "yaml text": ("- topology: a\n" + "# x\n" * 20, "core.base.codec.yaml_text.LARGEST", "more than 0 MiB of YAML"),
    "toml": ("version = 1\n" + "# xxxxxxx\n" * 20, "place.topologies.LARGEST_TOML", "more than 0 MiB of TOML"),
    "toml key": ("version = 1\n" + "a." * 60 + "a = 1\n", "", "a key of more than 50 parts"),
    "quoted toml key": ("version = 1\n" + '"a" . ' * 60 + "a = 1\n", "", "a key of more than 50 parts"),
    "values": ('{"instances": [' + "{}," * 41 + "{}]}", "formats.base.source.MOST_VALUES", "at most 40 are read"),
    "instances": (
        '{"instances": [' + "{}," * 40 + "{}]}", "formats.topograph.MOST_HOSTS",
        "instances: more than 40 instances",
    ),
    "objects": (
        '{"kind": "List", "items": [' + "{}," * 40 + "{}]}", "formats.kubernetes.nodes.MOST_ITEMS",
        "items: more than 40 objects",
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", MANY)
def test_more_than_any_cluster_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str) -> None:
    text, limit, says = MANY[row]
    if limit:
        monkeypatch.setattr(f"plait.{limit}", (40,) if limit.endswith("defaults__") else 40)
    with pytest.raises(JobError, match=says) as caught:
        told(tmp_path, text)
    assert caught.value.file == str(tmp_path / "topology")


def test_a_small_file_that_unpacks_to_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "LARGEST", 1 << 16)
    (tmp_path / "topology.gz").write_bytes(gzip.compress(bytes(1 << 17), 1))
    with pytest.raises(JobError, match="cannot be unpacked: its gzip stream holds more than 65536 bytes"):
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
