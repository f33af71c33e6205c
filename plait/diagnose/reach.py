"""Which hosts are cut off: from who reaches whom."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from plait.core.runs.evidence import Evidence


def cut_off(evidence: Iterable[Evidence], concerned: set[int]) -> tuple[list[str], bool] | None:
    """The hosts whose network explains that some ranks do not reach others, and whether it is only the path
    between two of them; None if all that is known reach each other.

    concerned: ranks of the calls that do not end; a break between others explains nothing.

    The matrix of pairs of hosts decides: a host none of whose pairs works is cut off; one pair alone is a
    path, since it cannot be told at which end it is broken.
    """
    known = {one.rank: one for one in evidence}
    missed, reached = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for one in known.values():
        for ranks, found in ((one.missed, missed), (one.reached, reached)):
            for rank in ranks:
                other = known[rank].host if rank in known else ""
                if other and one.host and other != one.host:
                    found[one.host].add(other)
                    found[other].add(one.host)
    if not any({known[rank].host for rank in concerned if rank in known} & {host} for host in missed):
        return None
    return _explain(missed, reached)


def _explain(missed: Mapping[str, set[str]], reached: Mapping[str, set[str]]) -> tuple[list[str], bool]:
    """The fewest hosts that are an end of every broken pair: first those that reach nobody, of these first
    those that miss most."""
    left = {(a, b) for a, others in missed.items() for b in others if a < b}
    named: list[str] = []
    while left:
        broken = Counter(host for pair in left for host in pair)
        alone = {host: not reached.get(host, set()) - missed[host] for host in broken}
        ranked = sorted(broken, key=lambda host: (-broken[host], not alone[host], host))
        if len(left) == 1 and alone[ranked[0]] == alone[ranked[1]]:
            return sorted([*named, *ranked]), not named
        named.append(ranked[0])
        left = {pair for pair in left if ranked[0] not in pair}
    return sorted(named), False
