"""Slurm's files and printed tables: what is special about each, and what is wrong in one."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from plait.core.base.errors import JobError
from plait.formats.base.source import ReadOptions, Source
from plait.formats.slurm.nodes import read
from plait.place.topologies import read_topology
from tests.place.readers import texts
from tests.place.readers.test_formats import shape, told, write


@pytest.mark.parametrize(
    "text, says",
    [
        ("SwitchName=a Nodes=n[1-999999999]", "line 1: .*more than 200000 names"),
        ("SwitchName=a Nodes=n[1-2", "line 1: .*never closed"),
        ("\nSwitchName=a Node=n1", r"line 2: unknown key node \(did you mean 'nodes'\?\). Known: switches"),
        ("SwitchName=a Nodes=n1 Nodes=n2", "line 1: Nodes is set twice"),
        ("SwitchName=a\nInclude other.conf", "line 2: Include other.conf is not followed"),
        ("SwitchName=a Nodes=n1\nSwitchNam=b Nodes=n2", r"line 2: .*switchnam= \(did you mean 'switchname'"),
        ("SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2", "line 2: the switch 'a' is described twice, before at line 1"),
        (
            "SwitchName=a Nodes=n1\nSwitchName=b Nodes=n2\nSwitchName=c Switches=a,b\nSwitchName=d Switches=a",
            "line 4: the switch 'a' is under 'c' and 'd'. In a tree .* keep it under 'c' alone",
        ),
        ("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1\nSwitchName=c Switches=a,b", "line 2: the node 'n1' is under"),
        ("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n2", "line 2: 2 switches are under no other: a, b"),
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a", "the switches run in a circle: b under a under b"),
        ("SwitchName=a", "no switch has nodes. Give the file that Slurm reads"),
        ("SwitchName=a Switches=b", "line 1: 'a' is above the switch 'b', which is not described"),
        ("SwitchName=a Nodes=n1 \\", r"the last line ends in a \\"),
        ("BlockName=a Nodes=n1\nSwitchName=b Nodes=n2", "line 1: both switches and blocks"),
        ("BlockName=a Nodes=n1\nBlockSizes=2,6", "BlockSizes: the block size 6 is not a power of two times 2"),
        ("BlockName=a Nodes=n1\nBlockSizes=2,2", "BlockSizes: the block size 2 is not a power of two times 2"),
        ("BlockName=a Nodes=n1\nBlockSizes=0", "line 2: '0' is no list of block sizes"),
        ("BlockName=a Nodes=n1\nBlockSizes=2,0", "line 2: '2,0' is no list of block sizes"),
        ("BlockName=a Nodes=n1\nBlockSizes=x,2", "line 2: 'x,2' is no list of block sizes"),
        ("RingName=r Nodes=n[1-4]", "line 1: rings have no switches"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(JobError, match=says) as caught:
        told(tmp_path, text)
    assert caught.value.file == str(tmp_path / "topology")


LEAVES = "".join(f"SwitchName=s{i} Nodes=n{i}-[1-4]\n" for i in range(4))
YAML_SPINES = "- topology: t\n  tree:\n    switches:\n" + "".join(
    f"      - {{switch: {name}, {below}}}\n"
    for name, below in (
        ("s0", "nodes: 'n[0-7]'"), ("s1", "nodes: 'n[8-15]'"),
        ("up0", "children: 's[0-1]'"), ("up1", "children: 's[0-1]'"),
    )
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "names", "further"),
    [
        (LEAVES + "".join(f"SwitchName=up{i} Switches=s[0-3]\n" for i in range(4)), "up0 s0 s1 s2 s3", 3),
        (
            LEAVES + "SwitchName=a0 Switches=s[0-1]\nSwitchName=a1 Switches=s1,s0\nSwitchName=b0 Switches=s[2-3]\n"
            "SwitchName=b1 Switches=s[2-3]\nSwitchName=c0 Switches=a0,b0\nSwitchName=c1 Switches=a1,b1",
            "c0 a0 s0 s1 b0 s2 s3", 3,
        ),
        (YAML_SPINES, "up0 s0 s1", 1),
    ],
)  # fmt: skip
def test_of_spines_above_the_same_switches_there_is_one(tmp_path: Path, text: str, names: str, further: int) -> None:
    topology, remarks = told(tmp_path, text)
    assert sorted(switch.name for switch in topology.switches) == sorted(names.split())
    assert len(topology.nodes) == 16
    assert remarks.over.counts == {"switches above the same switches as another, such as further spines": further}


def test_blocks_are_grouped_as_slurm_groups_them(tmp_path: Path) -> None:
    def groups(count: int, sizes: str) -> list[str]:
        lines = [f"BlockName=b{i} Nodes=n{i}-[1-2]" for i in range(count)]
        topology, _ = told(tmp_path, "\n".join([*lines, sizes]))
        return [s.name for s in topology.switches if s.name == "fabric" or ".." in s.name]

    assert groups(4, "BlockSizes=2") == ["fabric"]
    assert groups(4, "BlockSizes=2,8") == ["b0..b3"]
    assert groups(4, "BlockSizes=2,4,8") == ["b0..b3", "b0..b1", "b2..b3"]
    assert groups(5, "BlockSizes=2,4") == ["fabric", "b0..b1", "b2..b3"]  # the fifth is left alone
    assert groups(1, "BlockSizes=2,4") == []


def test_one_of_several_topologies_of_a_yaml_file(tmp_path: Path) -> None:
    file = write(tmp_path, texts.YAML)
    tree, remarks = read_topology(file)
    assert (tree.name, remarks.over.counts) == ("tree1", {"topologies beside 'tree1'": 2})
    blocks, remarks = read_topology(file, name="block1")
    assert (blocks.name, bool(remarks.over)) == ("block1", False)
    assert shape(blocks) == shape(tree)
    with pytest.raises(JobError, match="flat1: a flat topology has no switches"):
        read_topology(file, name="flat1")
    with pytest.raises(JobError, match=r"no topology 'tree' \(did you mean 'tree1'\?\). There are flat1, tree1"):
        read_topology(file, name="tree")


LAUGHS = "\n".join(
    ["- &a [lol, lol]", *(f"- &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]" for i in range(24)), "- topology: *y"]
)


@pytest.mark.parametrize(
    "text, says",
    [
        (LAUGHS, "aliases"),
        ("- topology: a\n  tree: &t {switches: *t}", "aliases"),
        ("- topology: a\n  x: " + "[" * 50_000, "line 2: nested too deeply"),
        ("- topology: a\n tree: {}", "line 2: not valid YAML"),
        ("- topology: a\n  tree: {switches: [{switch: 1, nodes: n1}]}", r"a.tree.switches\[0\].switch: not a text"),
        ("- topology: a\n  tree: {switches: [{switch: s, nodes: 'n[1-999999999]'}]}", r"\[0\].nodes: .*more than"),
        ("- topology: a\n  tree: {switches: [{switch: s, node: n1}]}", r"unknown key node \(did you mean 'nodes'"),
        ("- topology: a\n  tree: {switches: []}", "no switches"),
        ("- topology: a\n  block: {block_sizes: [x], blocks: []}", "a.block.block_sizes: not a list of sizes"),
        ("- topology: a\n  flat: true\n- topology: a\n  flat: true", "the topology 'a' is listed twice"),
        ("- topology: a", "neither or both of tree and block"),
        ("- topology: a\n  tree: !!python/object/apply:os.system ['true']", "not valid YAML"),
        ("- topology: 7\n", r"\[0\].topology: not a text"),
    ],
)  # fmt: skip
def test_a_wrong_or_hostile_yaml_file(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(JobError, match=says) as caught:
        told(tmp_path, text)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


@pytest.mark.parametrize(
    "state, status",
    [
        ("IDLE", "free"), ("idle", "free"), ("IDLE+PLANNED", "free"), ("idle-", "free"), ("IDLE+CLOUD", "free"),
        ("ALLOCATED", "busy"), ("MIXED", "busy"), ("alloc", "busy"), ("mix+", "busy"), ("COMPLETING", "busy"),
        ("IDLE+COMPLETING", "busy"), ("RESERVED", "busy"), ("idle#", "busy"), ("DOWN", "down"), ("down*", "down"),
        ("idle*", "down"), ("IDLE+DRAIN", "down"), ("ALLOCATED+DRAIN", "down"), ("drng", "down"), ("UNKNOWN", "down"),
        ("IDLE+NOT_RESPONDING", "down"), ("maint", "down"), ("alloc$", "down"), ("idle~", "down"), ("FAIL", "down"),
        ("IDLE+CLOUD+POWERED_DOWN", "down"), ("MIXED+INVALID_REG", "down"),
    ],
)  # fmt: skip
def test_every_state_of_slurms(state: str, status: str) -> None:
    found = read(Source("text", f"NODELIST STATE\nn[1-2] {state}\n"), ReadOptions())
    assert {one.status for one in found.states.values()} == {status}
    assert list(found.states) == ["n1", "n2"]


def test_a_state_that_is_none(tmp_path: Path) -> None:
    for text in ("NODELIST STATE\nn1 sleepy\n", "NodeName=n1 State=SLEEPY\n"):
        with pytest.raises(JobError, match=r"line \d: no state of Slurm's is called 'sleepy'"):
            told(tmp_path, texts.TREE_CONF, states=[write(tmp_path, text, "states")])


def test_tables_as_people_print_them() -> None:
    long = """Mon Nov 23 03:04:14 2026
NODELIST   NODES PARTITION       STATE CPUS    S:C:T MEMORY TMP_DISK WEIGHT AVAIL_FE REASON
n003           1     main*        down 2       2:1:1      1        0      1     h100 bad nic
n004           1     main*     drained 2       2:1:1      1        0      1     h100 maintenance soon
"""
    assert [s.status for s in read(Source("text", long), ReadOptions()).states.values()] == ["down", "down"]
    jobs = """             JOBID PARTITION     NAME     USER ST       TIME  NODES NODELIST(REASON)
                 8      main    train      eve PD       0:00      4 (Resources)
                 7      main    train      eve  R    1:02:03      2 n[001-002]
"""
    found = read(Source("text", jobs), ReadOptions())
    assert {name: state.holder for name, state in found.states.items()} == {"n001": "job 7", "n002": "job 7"}
    assert found.partial


def test_times_are_this_machines_own() -> None:
    found = read(Source("text", "JOBID|END_TIME|NODELIST\n7|2026-11-23T12:00:00|n1\n"), ReadOptions())
    until = found.states["n1"].until
    assert until is not None
    assert datetime.fromtimestamp(until, UTC).astimezone().replace(tzinfo=None) == datetime(2026, 11, 23, 12)  # noqa: DTZ001
    with pytest.raises(JobError, match="line 2: 'soon' is no time"):
        read(Source("text", "JOBID|END_TIME|NODELIST\n7|soon|n1\n"), ReadOptions())


def test_topology_and_nodes_in_one_text(tmp_path: Path) -> None:
    topology, _ = told(tmp_path, texts.TREE_SHOWN + texts.NODES_SHOWN)
    assert topology.node("n003").state.holder == "bad nic"
    assert topology.node("n001").hardware.gpus == 8


def test_ten_thousand_nodes_are_read_at_once(tmp_path: Path) -> None:
    lines = [f"SwitchName=leaf{i} Nodes=n[{i * 16 + 1:05}-{i * 16 + 16:05}]" for i in range(625)]
    lines += [f"SwitchName=mp{i} Switches=leaf[{i * 5}-{i * 5 + 4}]" for i in range(125)]
    conf = "\n".join([*lines, "SwitchName=core Switches=mp[0-124]"])
    yaml = "- topology: t\n  tree:\n    switches:\n" + conf.replace("SwitchName=", "    - switch: ")
    yaml = yaml.replace(" Nodes=", "\n      nodes: ").replace(" Switches=", "\n      children: ")
    for text in (conf, yaml):
        file, best = write(tmp_path, text), float("inf")
        for _ in range(3):
            start = time.process_time()  # others' work does not count
            topology, _ = read_topology(file)
            best = min(best, time.process_time() - start)
        assert len(topology.nodes) == 10_000
        assert best < 0.3


def test_blanks_around_equals_and_quotes(tmp_path: Path) -> None:
    text = """switchname = leaf1   nodes = "n[001-002,010]"   # first rack
SwitchName="leaf2" Nodes=n[003-004] \\
    LinkSpeed=400
SwitchName=core Switches="leaf[1-1]",leaf2"""
    topology, remarks = told(tmp_path, text)
    assert shape(topology) == [[["n001", "n002", "n010"]], [["n003", "n004"]]]
    assert not remarks.over


@pytest.mark.parametrize(
    "text, says",
    [
        ('SwitchName=a Nodes="n1', "line 1: the value of Nodes has no closing quote"),
        ("SwitchName=a Nodes=ALL", "line 1: ALL stands for nodes that this file does not name. Write their names"),
        ("BlockName=a Nodes=all", "line 1: ALL stands for nodes"),
        ("- topology: a\n  tree: {switches: [{switch: s, nodes: ALL}]}", r"switches\[0\].nodes: ALL stands for nodes"),
        ("BlockName=a\nBlockName=b Nodes=\nBlockSizes=2", "no block has nodes"),
        ("BlockSizes=-1", "no switches"),
    ],
)
def test_nodes_that_are_not_there(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(JobError, match=says):
        told(tmp_path, text)


PHANTOMS = ["b1 Nodes=n[1-2]", "b2 Nodes=n[3-4]", "b3 Nodes=", "b4", "c1 Nodes=n[5-6]", 'c2 Nodes=""']


def test_a_phantom_block_keeps_its_place_in_its_group(tmp_path: Path) -> None:
    """Without it, b1, b2 and c1 would be one domain."""
    conf = "\n".join([*(f"BlockName={one}" for one in PHANTOMS), "BlockSizes=2,8"])
    blocks = "".join(f"      - {{block: {one.split()[0]}, nodes: '{one.partition('=')[2]}'}}\n" for one in PHANTOMS)
    yaml = f"- topology: t\n  block:\n    block_sizes: [2, 8]\n    blocks:\n{blocks}".replace("'\"\"'", "''")
    for text in (conf, yaml):
        topology, remarks = told(tmp_path, text)
        assert shape(topology) == [[["n1", "n2"], ["n3", "n4"]], [["n5", "n6"]]]
        assert remarks.over.counts == {"blocks without nodes, whose places in their group stay empty": 3}


def test_switches_without_nodes_are_passed_over(tmp_path: Path) -> None:
    names = ["core Switches=a,b", "a Nodes=n1", "b Switches=c,d", "c", "d Nodes="]
    text = "\n".join(f"SwitchName={name}" for name in names)
    topology, remarks = told(tmp_path, text)
    assert [switch.name for switch in topology.switches] == ["core", "a"]
    assert remarks.over.counts == {"switches without nodes": 3}


def test_sizes_of_minus_one_are_none(tmp_path: Path) -> None:
    topology, remarks = told(tmp_path, "BlockName=a Nodes=n1\nBlockName=b Nodes=n2\nBlockSizes=-1")
    assert topology.levels == ("fabric", "block")
    assert sum(remarks.over.counts.values()) == 1
    text = "- topology: t\n  block: {block_sizes: [-1], blocks: [{block: a, nodes: n1}, {block: b, nodes: n2}]}"
    found, said = told(tmp_path, text)
    assert (found.levels, said.over.counts) == (topology.levels, remarks.over.counts)


@pytest.mark.parametrize(
    "gres, gpus, device",
    [
        ("gpu:8", 8, ""), ("gpu:h100:8(S:0-1)", 8, "h100"), ("gpu", 1, ""), ("(null)", 0, ""), ("", 0, ""),
        ("gpu:a100:4(S:0),gpu:v100:2", 6, "a100+v100"), ("gpu:1g.10gb:7", 0, ""),
        ("gpu:a100_3g.20gb:2,gpu:a100:6", 6, "a100"),
        ("craynetwork:4,gpu:h100_nvl:4(S:0),shard:h100_nvl:32", 4, "h100_nvl"), ("mps:400", 0, ""),
    ],
)  # fmt: skip
def test_gpus_of_generic_resources(gres: str, gpus: int, device: str) -> None:
    """Of a node beside one with GPUs."""
    record = f"NodeName=n1 State=IDLE\n   Gres={gres}\n" if gres else "NodeName=n1 State=IDLE\n   Gres= X=1\n"
    found = read(Source("text", record + "NodeName=n2 Gres=gpu:8 State=IDLE\n"), ReadOptions())
    assert (found.hardware["n1"].gpus, found.hardware["n1"].device) == (gpus, device)
    assert found.states["n1"].status == ("free" if gpus else "down")
    table = f"NODELIST STATE GRES\nn1 idle {gres or '(null)'}\nn2 idle gpu:8\n"
    assert read(Source("text", table), ReadOptions()).hardware == found.hardware


def test_nobody_tells_of_gpus() -> None:
    found = read(
        Source("text", "NodeName=n1 State=IDLE Gres=(null)\nNodeName=n2 State=IDLE Gres=(null)\n"), ReadOptions()
    )
    assert not found.hardware
    assert {state.status for state in found.states.values()} == {"free"}


def test_slices_and_shards_are_counted() -> None:
    found = read(Source("text", "NodeName=n1 State=IDLE Gres=gpu:1g.10gb:7,shard:16\n"), ReadOptions())
    assert list(found.over.counts.values()) == [23]
    assert found.states["n1"].holder == "no whole GPU"


def test_what_is_above_all_blocks_has_a_name_that_none_of_them_has(tmp_path: Path) -> None:
    topology, _ = told(tmp_path, "BlockName=fabric Nodes=n1\nBlockName=b Nodes=n2\nBlockSizes=1\n")
    assert [one.name for one in topology.switches] == ["fabric_", "fabric", "b"]


def test_rows_without_nodes_do_not_hide_those_after_them(tmp_path: Path) -> None:
    tree = write(tmp_path, "SwitchName=a Nodes=n[1-3]\n", "tree")
    jobs = "JOBID NODELIST ST\n7 (Resources) PD\n8 n1 R\n9 (null) PD\n10 n3 R\n"
    topology, remarks = read_topology(tree, states=[write(tmp_path, jobs, "jobs")])
    assert [one.state.holder for one in topology.nodes] == ["job 8", "", "job 10"]
    assert remarks.over.rows()[0]["count"] == 2
    partitions = "PARTITION AVAIL NODES STATE NODELIST\nold up 0 n/a n/a\nmain up 1 down n2\n"
    topology, remarks = read_topology(tree, states=[write(tmp_path, partitions, "partitions")])
    assert topology.node("n2").state.status == "down"
    assert remarks.over.counts == {"partitions without nodes": 1}
