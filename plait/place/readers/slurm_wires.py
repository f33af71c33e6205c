"""What Slurm's ways of writing a topology have in common: host lists, switches without nodes, blocks."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise

from plait.core.base.errors import JobError
from plait.core.base.passed_over import PassedOver
from plait.core.topology.switches import Topology
from plait.core.topology.wiring import HostLists, Wiring, build, usual_levels

TOP = "fabric"
EMPTY = "switches without nodes"
PARALLEL = "switches above the same switches as another, such as further spines"
NO_SIZES = "block sizes of -1, as where none was found"
PHANTOMS = "blocks without nodes, whose places in their group stay empty"


@dataclass(frozen=True)
class SlurmBlock:
    """A block of nodes that Slurm keeps together; a phantom without nodes holds a place of its group."""

    name: str
    nodes: Sequence[str]
    where: str


def nodes_of(lists: HostLists, told: object, where: str) -> list[str]:
    """The nodes of a host list; none of ``(null)``, of nothing and of an empty text. Raises JobError for
    ``ALL``, which stands for nodes that only slurm.conf names."""
    if told in (None, "", "(null)"):
        return []
    names = lists(told, where)
    if any(name.upper() == "ALL" for name in names):
        fix = "Write their names, or give what scontrol show topology prints"
        raise JobError("ALL stands for nodes that this file does not name", key=where, fix=fix)
    return names


def with_nodes(wirings: Sequence[Wiring], over: PassedOver) -> list[Wiring]:
    """Switches that have nodes below them: Slurm allows leaves without, for nodes that are yet to come."""
    above: dict[str, list[Wiring]] = {}
    for one in wirings:
        for name in one.switches:
            above.setdefault(name, []).append(one)
    below = {id(one): len(one.switches) for one in wirings}  # by itself: a name may stand twice, which is refused later
    empty = [one for one in wirings if not one.nodes and not one.switches]
    for one in empty:  # grows while it is gone through
        over.note(EMPTY, one.where or one.name)
        for parent in above.get(one.name, ()):
            below[id(parent)] -= 1
            if not below[id(parent)] and not parent.nodes:
                empty.append(parent)
    gone, names = set(map(id, empty)), {one.name for one in empty}
    left = [one for one in wirings if id(one) not in gone]
    if wirings and not left:
        raise JobError("no switch has nodes", fix="Give the file that Slurm reads, with Nodes= of every leaf")
    kept = [[name for name in one.switches if name not in names] for one in left]
    return [replace(one, switches=switches) for one, switches in zip(left, kept, strict=True)]


def one_of_parallel(wirings: Sequence[Wiring], over: PassedOver) -> list[Wiring]:
    """The first of switches that are above the same ones, such as the spines of a fat tree.

    A tree needs one of them, as Slurm's guide says. Switches above those that become one are compared again.
    """
    left = list(wirings)
    while True:
        first, instead = dict[frozenset[str], str](), dict[str, str]()
        for one in left:
            if one.switches and not one.nodes:
                kept = first.setdefault(frozenset(one.switches), one.name)
                if kept != one.name:
                    instead[one.name] = kept
                    over.note(PARALLEL, one.where or one.name)
        if not instead:
            return left
        rest = (one for one in left if one.name not in instead)
        left = [replace(one, switches=list(dict.fromkeys(instead.get(n, n) for n in one.switches))) for one in rest]


def of_blocks(blocks: Sequence[SlurmBlock], sizes: Sequence[int], over: PassedOver) -> Topology:
    """Blocks in groups of neighbours, as many as Slurm puts together: one level of groups for every size
    after the first (the planning base size). Something is above where several are left."""
    for smaller, larger in pairwise(sizes):
        if larger % smaller or (ratio := larger // smaller) & (ratio - 1) or ratio < 2:
            problem = f"the block size {larger} is not a power of two times {smaller}"
            raise JobError(problem, key="BlockSizes", fix="Slurm pairs blocks")
    for block in blocks:
        if not block.nodes:
            over.note(PHANTOMS, block.where or block.name)
    if blocks and not any(block.nodes for block in blocks):
        raise JobError("no block has nodes", fix="Give the file that Slurm reads, with the nodes of every block")
    wirings = [Wiring(block.name, (), block.nodes, block.where) for block in blocks if block.nodes]
    names = [[block.name] if block.nodes else [] for block in blocks]
    level = [block.name if block.nodes else "" for block in blocks]  # "": only phantoms
    for smaller, larger in pairwise(sizes):
        many, groups, members = larger // smaller, list[str](), list[list[str]]()
        for start in range(0, len(level), many):
            inside = [name for group in names[start : start + many] for name in group]
            below = [name for name in level[start : start + many] if name]
            members.append(inside)
            if len(below) < 2:
                groups += below or [""]
                continue
            groups.append(f"{inside[0]}..{inside[-1]}")
            wirings.append(Wiring(groups[-1], below))
        names, level = members, groups
    level = [name for name in level if name]
    if len(level) > 1:
        wirings.append(Wiring(_free_name({wiring.name for wiring in wirings}), level))
    tree = build(wirings)
    return replace(tree, levels=block_levels(len(tree.levels)))


def block_levels(depth: int) -> tuple[str, ...]:
    """What levels of blocks are called, from the top.

    >>> block_levels(1), block_levels(3)
    (('block',), ('fabric', 'group', 'block'))
    """
    return tuple({"core": TOP, "leaf": "block", "minipod": "group"}.get(name, name) for name in usual_levels(depth))


def _free_name(taken: Set[str]) -> str:
    name = TOP
    while name in taken:
        name += "_"
    return name
