"""NCCL's rules, over what all ranks asked their communicators for.

Its kernels wait on the device for those of the other ranks. So the ranks of a communicator must ask
it for the same things in the same order; and no circle may be left in which every rank's kernel
waits for one that another rank will only start later. What comes after what on a rank: an operation
after everything that it waits for, and after what the same thread asked for before it, which may
share a hardware queue with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from tests.support.streams.nccl import Call

Node = tuple[str, int]
"""A communicator, and the number of an operation of its."""


def broken(ranks: Sequence[Sequence[Call]]) -> list[str]:
    """What is against the rules, a sentence each."""
    return different(ranks) or circle(ranks)


def _exchanges(*asked: str | None) -> bool:
    """Whether all are exchanges, of which some have unequal parts: on another rank they may be equal."""
    kinds = {one.split(" of ")[0].split(" torch.")[0] for one in asked if one}
    return len(asked) == sum(map(bool, asked)) and "unequal parts" in kinds and kinds <= {"unequal parts", "all_to_all"}


def different(ranks: Sequence[Sequence[Call]]) -> list[str]:
    """Communicators whose ranks do not ask for the same."""
    asked: dict[str, dict[int, list[str]]] = defaultdict(dict)
    for rank, calls in enumerate(ranks):
        for call in calls:
            asked[call.communicator].setdefault(rank, []).append(call.what)
    found: list[str] = []
    for communicator, by_rank in asked.items():
        (first, wanted), *others = by_rank.items()
        for rank, what in others:
            for number, (ours, theirs) in enumerate(zip_longest(wanted, what)):
                if ours != theirs and not _exchanges(ours, theirs):
                    said = f"rank {first} asks for {ours} where rank {rank} asks for {theirs}, as number {number}"
                    found.append(f"{communicator}: {said}")
                    break
    return found


def circle(ranks: Sequence[Sequence[Call]]) -> list[str]:
    """Operations that wait for each other in a circle."""
    after: dict[Node, set[Node]] = defaultdict(set)
    for calls in ranks:
        for node, before in _order(calls).items():
            after[node] |= before
    state: dict[Node, int] = {}  # 1: being looked at, 2: done
    for start in list(after):
        path, todo = list[Node](), [(start, iter(sorted(after[start])))]
        while todo:
            node, rest = todo[-1]
            if state.get(node) is None:
                state[node] = 1
                path.append(node)
            for following in rest:
                if state.get(following) == 1:
                    return [f"a circle: {' waits for '.join(map(str, [*path[path.index(following) :], following]))}"]
                if state.get(following) is None:
                    todo.append((following, iter(sorted(after[following]))))
                    break
            else:
                todo.pop()
                if state[node] == 1:
                    state[node] = 2
                    path.pop()
    return []


def _order(calls: Sequence[Call]) -> Mapping[Node, set[Node]]:
    """What each operation of a rank comes after there."""
    found: dict[Node, set[Node]] = {}
    count: dict[str, int] = defaultdict(int)
    streams: dict[int, list[tuple[int, Node]]] = defaultdict(list)
    threads: dict[int, Node] = {}
    for call in calls:
        node = call.communicator, count[call.communicator]
        count[call.communicator] += 1
        before = found[node] = set[Node]()
        for stream, done in streams.items():
            known = [one for at, one in done if at <= call.before.get(stream, 0)]
            before |= set(known[-1:])
        if call.thread in threads:
            before.add(threads[call.thread])
        before.discard(node)
        streams[call.stream].append((call.at, node))
        threads[call.thread] = node
    return found
