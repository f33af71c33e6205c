"""Ranks that wait for each other in a circle, and which of them took another order than the rest."""

from __future__ import annotations

from collections.abc import Sequence

from plait.core.runs.evidence import Call, CallSequence, Verdict, WaitLink, listed, spoken_ranks
from plait.diagnose.waits import At, Waits

SHOWN = 4
"""Links of a circle that are told in words."""
Circle = Sequence[tuple[int, At]]


def deadlock(waits: Waits, circle: Circle) -> Verdict:
    """The verdict on a circle: those who took another order, if others show the right one, else all in it."""
    if astray := _to_another_peer(waits, circle):
        return astray
    ranks = sorted(rank for rank, _ in circle)
    odd = _by_others(waits, circle) or _by_majority(waits, circle)
    links = [
        WaitLink(ranks=(rank,), call=str(waits.heads[rank][at]), on=(circle[(place + 1) % len(circle)][0],))
        for place, (rank, at) in enumerate(circle)
    ]
    told = "; ".join(f"rank {link.ranks[0]} waits for {spoken_ranks(link.on)} in {link.call}" for link in links[:SHOWN])
    more = f"; and so on, {len(links)} ranks in all" if len(links) > SHOWN else ""
    named = odd or ranks
    guess = "Nothing tells which of them is wrong."
    if odd:
        took = "the other ranks began these calls in the other order" if len(odd) == 1 else \
            "the other ranks began these calls in another order"  # fmt: skip
        guess = f"{spoken_ranks(odd).capitalize()} took an order of {'its' if len(odd) == 1 else 'their'} own: {took}."
    hosts = tuple(sorted({waits.evidence[rank].host for rank in named} - {""}))
    subject = spoken_ranks(named).capitalize() + _on(waits, named)
    are = "is" if len(named) == 1 else "are"
    one = len({waits.channels[at.channel].group for _, at in circle}) == 1
    order = f"They began {'messages of one group' if one else 'calls of different groups'} in different orders."
    why = f"{subject} {are} in a deadlock: {told}{more}. {order} {guess}"
    return Verdict(cause="deadlock", why=why, ranks=tuple(named), hosts=hosts, chain=tuple(links))


def _to_another_peer(waits: Waits, circle: Circle) -> Verdict | None:
    """The ranks of a circle that began a message with one peer where another waits with the same for them.

    Of several such ranks those count that never had a message with the peer before.
    """
    odd = {rank: (at, untaken) for rank, at in circle for untaken in _untaken(waits, rank, at)}
    if new := {rank for rank, (at, untaken) in odd.items() if at.sequence == 0 < untaken.sequence}:
        odd = {rank: pair for rank, pair in odd.items() if rank in new}
    if not odd or len(odd) == len(circle) > 1:
        return None
    parts: list[str] = []
    links: list[WaitLink] = []
    for rank, (at, untaken) in sorted(odd.items()):
        peer, other = (next(one for one in waits.members(where.channel) if one != rank) for where in (at, untaken))
        began, left = waits.heads[rank][at], waits.heads[other][untaken]
        parts.append(
            f"{spoken_ranks([rank])}{_on(waits, [rank])} began {began}, which rank {peer} has not begun, "
            f"and not {left}, in which rank {other} waits for it"
        )
        links += [WaitLink(ranks=(other,), call=str(left), on=(rank,)),
                  WaitLink(ranks=(rank,), call=str(began), on=(peer,))]  # fmt: skip
    why = f"{listed(parts)}: the peer of a message must be the one that both ends name."
    hosts = tuple(sorted({waits.evidence[rank].host for rank in odd} - {""}))
    return Verdict(cause="mismatch", why=why[:1].upper() + why[1:], ranks=tuple(sorted(odd)), hosts=hosts,
                   differs="peer", chain=tuple(links))  # fmt: skip


def _untaken(waits: Waits, rank: int, at: At) -> list[At]:
    """Messages in which others wait for ``rank``, of the group and the way (to it, or from it) of its own."""
    own = waits.channels[at.channel]
    if own.source < 0:
        return []
    end = "target" if own.target == rank else "source"
    alike = {
        number for number, one in enumerate(waits.channels)
        if one.group == own.group and getattr(one, end) == rank and number != at.channel
    }  # fmt: skip
    return [other for other, missing in waits.missing.items() if other.channel in alike and rank in missing]


def _on(waits: Waits, ranks: Sequence[int]) -> str:
    hosts = sorted({waits.evidence[rank].host for rank in ranks} - {""})
    return f" ({listed(hosts)})" if hosts else ""


def _by_others(waits: Waits, circle: Circle) -> list[int]:
    """Those whom ranks outside of the circle contradict: they wait in one call and have not begun another,
    and most of the others began just that one first, in groups of the same kind."""
    inside = {rank for rank, _ in circle}
    odd: list[int] = []
    for place, (_, awaited) in enumerate(circle):
        rank, at = circle[(place + 1) % len(circle)]
        kind = _roles(waits, rank)
        others = [other for other in waits.evidence if other not in inside and _roles(waits, other) == kind]
        if sum(_first_of(waits, rank, other, awaited, at) for other in others) > 0:
            odd.append(rank)
    return sorted(odd) if len(odd) < len(circle) else []


Role = tuple[str, int, int, int]
"""A rank's part in a channel: the group's label, size and ordinal, and whether the rank takes part in a
collective, or sends or receives, up or down in the order of ranks."""


def _role(channel: CallSequence, rank: int) -> Role:
    group, source, target = channel
    way = 0 if source < 0 else (1 if rank == source else 2) * (1 if target > source else -1)
    return group.label, len(group.ranks), group.ordinal, way


def _roles(waits: Waits, rank: int) -> frozenset[Role]:
    """What a rank has to do with others; equal for ranks of the same stage."""
    return frozenset(_role(call.channel, rank) for call in waits.evidence[rank].calls)


def _first_of(waits: Waits, rank: int, peer: int, one: At, other: At) -> int:
    """1 if ``peer`` began what to it is ``one`` to ``rank`` before what is ``other``, -1 if after, 0 if that
    is not known: of groups without a label nothing tells which of theirs are alike."""
    if not all(waits.channels[at.channel].group.label for at in (one, other)):
        return 0
    first, second = (_alike(waits, rank, peer, at) for at in (one, other))
    if isinstance(first, Call) and isinstance(second, Call):
        return 1 if first.enqueued < second.enqueued else -1
    return (first is not None) - (second is not None) if None in (first, second) else 0


def _alike(waits: Waits, rank: int, peer: int, at: At) -> Call | bool | None:
    """A peer's call of the same number and role; True if it was begun long ago, None if it was not."""
    role, later = _role(waits.channels[at.channel], rank), None
    for call in waits.evidence[peer].calls:
        if _role(call.channel, peer) == role and call.sequence >= at.sequence:
            if call.sequence == at.sequence:
                return call
            later = True
    return later


def _by_majority(waits: Waits, circle: Circle) -> list[int]:
    """Of two calls, those at the one at which fewer are of those who take part in both."""
    calls = list(dict.fromkeys(at for _, at in circle))
    if len(calls) != 2:
        return []
    both = set(waits.members(calls[0].channel)) & set(waits.members(calls[1].channel))
    fewer, more = sorted(([rank for rank in waits.at[at] if rank in both] for at in calls), key=len)
    return fewer if len(fewer) < len(more) else []
