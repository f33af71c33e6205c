"""Lines of words as Slurm has them: what is read, and what is refused by its line."""

from __future__ import annotations

import pytest

from plait.core.base.errors import JobError
from plait.formats.slurm.lines import Resource, in_topological_order, lines, resources


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        ("# a comment\n\nslurmctld: up\n", []),
        ("Nodes=n1 # SwitchName=s1", [("line 1", {"nodes": "n1"})]),
        ("\nA=1\n\nB=2", [("line 2", {"a": "1"}), ("line 4", {"b": "2"})]),
        ("A=1 \\\nB=2\nC=3", [("line 1", {"a": "1", "b": "2"}), ("line 3", {"c": "3"})]),
        ("A=1 \\  \n \\\nB=2", [("line 1", {"a": "1", "b": "2"})]),
        ("A= B=2", [("line 1", {"a": "", "b": "2"})]),
        ("A=", [("line 1", {"a": ""})]),
        ("A = 1\tB\t=\t2", [("line 1", {"a": "1", "b": "2"})]),
        ('A="x y" B=a"b c"d', [("line 1", {"a": "x y", "b": "ab cd"})]),
        ('A=""', [("line 1", {"a": ""})]),
        ("A=b=c", [("line 1", {"a": "b=c"})]),
        ("A= b=c", [("line 1", {"a": "", "b": "c"})]),
    ],
)
def test_words_of_lines(text: str, found: list[tuple[str, dict[str, str]]]) -> None:
    assert list(lines(text)) == found


@pytest.mark.parametrize(
    ("text", "key", "why"),
    [
        ("A=1\nnothing", "line 2", "'nothing' is no KEY=VALUE"),
        ("A=1 =2", "line 1", "'=2' is no KEY=VALUE"),
        ("x" * 99, "line 1", f"'{'x' * 60}' is no KEY=VALUE"),
        ('A="x y', "line 1", "the value of A has no closing quote"),
        ('A=x" y', "line 1", "the value of A has no closing quote"),
        ("A=1 a=2", "line 1", "a is set twice"),
        ("A=1 \\\nA=2", "line 1", "A is set twice"),
        ("A=1\nB=2 \\", None, r"the last line ends in a \; no line follows"),
    ],
)
def test_what_are_no_words_is_refused_by_its_line(text: str, key: str | None, why: str) -> None:
    with pytest.raises(JobError) as caught:
        list(lines(text))
    assert (caught.value.key, caught.value.problem) == (key, why)


def test_a_file_that_includes_another_is_refused_with_what_to_do() -> None:
    with pytest.raises(JobError, match=r"line 2: Include other\.conf is not followed") as caught:
        list(lines("SwitchName=a Nodes=n1\n  include other.conf # more\n"))
    assert "pasted" in str(caught.value)


@pytest.mark.parametrize(
    ("gres", "found", "whole"),
    [
        ("", [], True), ("(null)", [], True), ("N/A", [], True),
        ("gpu", [("gpu", "", 1)], True), ("gpu:4", [("gpu", "", 4)], True), ("gpu:h100:4", [("gpu", "h100", 4)], True),
        ("gpu:h100", [("gpu", "h100", 1)], True),
        ("gpu:h100:4(S:0-1),nic:2", [("gpu", "h100", 4), ("nic", "", 2)], True),
        ("gpu:2(IDX:0,1),shard:8", [("gpu", "", 2), ("shard", "", 8)], True),
        ("craynetwork:4K", [("craynetwork", "", 4)], True),
        ("gpu:2;nic", [], False), ("gpu:2,?", [("gpu", "", 2)], False), ("?", [], False), (":4", [], False),
    ],
)  # fmt: skip
def test_generic_resources(gres: str, found: list[tuple[str, str, int]], whole: bool) -> None:
    assert resources(gres) == ([Resource(*one) for one in found], whole)


@pytest.mark.parametrize(
    ("gres", "part"),
    [("gpu:2", False), ("gpu:a100:2", False), ("shard:4", True), ("mps:100", True), ("gpu:1g.10gb:7", True),
     ("gpu:a100_3g.20gb:1", True), ("nic:1g.10gb:1", False), ("gpu:x1g.10gb:1", False)],
)  # fmt: skip
def test_parts_of_gpus(gres: str, part: bool) -> None:
    ((one,), _) = resources(gres)
    assert one.part == part


SWITCHES = """
SwitchName=s0 Level=0 LinkSpeed=1 Nodes=a,c Switches=(null)
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=b,d Switches=(null)
SwitchName=s2 Level=0 LinkSpeed=1 Nodes=e
SwitchName=m0 Level=1 Nodes=a,b,c,d Switches=s1,s0
SwitchName=top Level=2 Nodes=a,b,c,d,e Switches=s2,m0
"""


def test_nodes_stand_as_switches_do_from_the_top() -> None:
    assert in_topological_order(list("abcdefg"), SWITCHES) == list("ebdacfg")
    assert in_topological_order(list("gca"), SWITCHES) == list("acg")
    assert in_topological_order(list("ba"), "") == list("ba")
    assert in_topological_order(list("dcba"), "BlockName=b1 Nodes=c,d\nBlockName=b0 Nodes=a,b") == list("cdab")


def test_switches_in_a_circle_or_below_two_are_walked_once() -> None:
    told = "SwitchName=t Switches=x,y\nSwitchName=x Switches=l\nSwitchName=y Switches=l\nSwitchName=l Nodes=b,a"
    assert in_topological_order(list("ab"), told) == list("ba")
    circle = "SwitchName=t Switches=x\nSwitchName=x Switches=x,l\nSwitchName=l Nodes=b,a"
    assert in_topological_order(list("ab"), circle) == list("ba")


def test_a_switch_without_nodes_is_above_none() -> None:
    told = "SwitchName=e LinkSpeed=1\nSwitchName=x Nodes=(null)\nSwitchName=l Nodes=b,a"
    assert in_topological_order(["a", "b", "(null)"], told) == ["b", "a", "(null)"]


def test_what_only_a_switch_above_others_lists_is_said_of_no_leaf() -> None:
    told = SWITCHES.replace("Nodes=a,b,c,d Switches=s1,s0", "Nodes=a,b,c,d,z Switches=s1,s0")
    assert in_topological_order(["f", "z", "e"], told) == ["e", "f", "z"]
