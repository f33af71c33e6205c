"""Reader of ``KEY=VALUE`` lines, as in Slurm's configuration files and in the output of
``scontrol``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from plait.core.base.errors import JobError
from plait.core.topology.hostlist import expand

_KEY = re.compile(r"\s*([A-Za-z0-9_.]+)\s*=[ \t]*")
_INCLUDE = re.compile(r"include[ \t]+([^\s=][^=]*)", re.IGNORECASE)
_VALUE = re.compile(r'(?:"[^"]*"|[^\s"]+)*')

_GRES = re.compile(
    r"([A-Za-z]\w*)(?::(?![0-9]+[KMGT]?(?:[,(]|$))([\w.+-]+))?(?::([0-9]{1,6})[KMGT]?)?(?:\([^)]*\))?(?:,|$)"
)
_SLICE = re.compile(r"(?:^|_)[0-9]+g\.[0-9]+gb", re.IGNORECASE)
"""The mark of a MIG slice in a GPU's type: 1g.10gb, a100_3g.20gb."""
_SHARED = ("shard", "mps")


class Resource(NamedTuple):
    """A generic resource (GRES) of Slurm. kind: the type, empty for none. number: the count."""

    name: str
    kind: str
    number: int

    @property
    def part(self) -> bool:
        """True if the resource is parts of GPUs: shards, mps, MIG slices."""
        return self.name in _SHARED or (self.name == "gpu" and bool(_SLICE.search(self.kind)))


def resources(gres: str) -> tuple[list[Resource], bool]:
    """Return a node's generic resources (``Gres``, sinfo's ``%G``), and whether the whole text
    could be read.

    >>> resources("gpu:h100:4(S:0-1),nic:2")
    ([Resource(name='gpu', kind='h100', number=4), Resource(name='nic', kind='', number=2)], True)
    >>> [one.part for one in resources("gpu:1g.10gb:7,shard:4,gpu:2")[0]], resources("(null)")
    ([True, True, False], ([], True))
    """
    found, at = list[Resource](), 0
    while gres not in ("", "(null)", "N/A") and at < len(gres):
        one = _GRES.match(gres, at)
        if not one:
            return found, False
        at = one.end()
        found.append(Resource(one[1], one[2] or "", int(one[3]) if one[3] else 1))
    return found, True


def lines(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each line's position for messages, and its words by key in lower case, in order. Raises
    JobError naming the line.

    ============  ===================================================================================
    read          ``KEY=VALUE``, blanks around ``=``, ``KEY=`` without a value, values in double
                  quotes, comments after ``#``, continuation lines after a ``\\`` at the end
    ignored       messages of Slurm's daemons (lines that begin with ``slurm``)
    refused       ``Include FILE``; a word without a key, a repeated key, a quote that is never
                  closed
    ============  ===================================================================================

    >>> list(lines('SwitchName=s1 Nodes = "n[1-2],n5"  # a leaf'))
    [('line 1', {'switchname': 's1', 'nodes': 'n[1-2],n5'})]
    """
    whole, number = "", 0
    for at, line in enumerate(text.splitlines(), 1):
        number = number or at
        line = line.partition("#")[0]
        if line.rstrip().endswith("\\"):
            whole += line.rstrip()[:-1] + " "
            continue
        whole, line, first, number = "", (whole + line).strip(), number, 0
        if included := _INCLUDE.fullmatch(line):
            fix = "Give the file with what it includes pasted in"
            raise JobError(f"Include {included[1][:60]} is not followed", key=f"line {first}", fix=fix)
        if line and not line.startswith("slurm"):
            yield f"line {first}", _words(line, f"line {first}")
    if whole:
        raise JobError("the last line ends in a \\; no line follows")


def _words(line: str, where: str) -> dict[str, str]:
    words: dict[str, str] = {}
    at = 0
    while at < len(line):
        key = _KEY.match(line, at)
        if not key:
            raise JobError(f"'{line[at:].split()[0][:60]}' is no KEY=VALUE", key=where)
        at = key.end()
        empty = key[0][-1].isspace() and _KEY.match(line, at)  # another key follows, so this key has no value
        found = None if empty else _VALUE.match(line, at)
        value = found[0] if found else ""
        at += len(value)
        if line[at : at + 1] == '"':
            raise JobError(f"the value of {key[1]} has no closing quote", key=where)
        if key[1].lower() in words:
            raise JobError(f"{key[1]} is set twice", key=where)
        words[key[1].lower()] = value.replace('"', "")
    return words


def in_topological_order(nodes: Sequence[str], topology: str) -> list[str]:
    """Return the nodes ordered so that nodes under one switch are neighbours. topology: the output
    of ``scontrol show topology``; nodes that it lacks come last in their own order. Raises JobError
    or ValueError if the text is no such output.

    >>> told = "SwitchName=s1 Nodes=b,d", "SwitchName=s0 Nodes=a,c", "SwitchName=r Switches=s0,s1"
    >>> in_topological_order(["a", "b", "c", "d"], chr(10).join(told))
    ['a', 'c', 'b', 'd']
    """
    found = [words for _, words in lines(topology)]
    inside = {one["switchname"]: expand(one["switches"]) for one in found if one.get("switches", "(null)") != "(null)"}
    leaves = {
        one.get("switchname") or one.get("blockname", ""): expand(one["nodes"])
        for one in found
        if one.get("nodes", "(null)") != "(null)" and one.get("switchname") not in inside
    }
    below = {switch for switches in inside.values() for switch in switches}
    index: dict[str, int] = {}
    seen: set[str] = set()

    def walk(switch: str) -> None:
        if switch in seen:  # the switch has several parents, or is in a loop
            return
        seen.add(switch)
        for child in inside.get(switch, ()):
            walk(child)
        for node in leaves.get(switch, ()):
            index.setdefault(node, len(index))

    for switch in [*inside, *leaves]:
        if switch not in below:
            walk(switch)
    return sorted(nodes, key=lambda node: index.get(node, len(index)))
