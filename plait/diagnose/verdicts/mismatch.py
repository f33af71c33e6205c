"""Find calls that do not match: members of a group that began different operations as their n-th
call, and ranks that wait for each other in a cycle.

The majority is right. Without a majority, groups of the same kind vote: tensor-parallel groups of
other replicas do the same in the same place. A remaining tie is reported as such. Of several
mismatches, the first in each rank's own order counts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from plait.core.runs.evidence import Call, CallSequence, Verdict, WaitLink, listed, spoken_group, spoken_ranks
from plait.diagnose.verdicts.waits import CallKey, Waits, agree, sentence

Signs = tuple[str, str, int]
SHOWN = 4
"""The largest number of waiting ranks of a cycle that the verdict describes."""
Circle = Sequence[tuple[int, CallKey]]
Role = tuple[str, int, int, int]
"""A rank's role in a channel: the group's label, size and ordinal, and 0 for a collective, 1 for a
send, 2 for a receive, negative if the message goes to a lower rank."""


def find_mismatch(waits: Waits) -> Verdict | None:
    """Return the verdict on the first call whose ranks disagree; None if all calls match."""
    wrong = [at for at, calls in waits.calls.items() if len({call.signs for _, call in calls}) > 1]
    if not wrong:
        return None
    at = _first(waits, wrong)
    calls = dict(waits.calls[at])
    right = _majority(Counter(call.signs for call in calls.values())) or _majority(_elsewhere(waits, at))
    if right not in {call.signs for call in calls.values()}:
        right = None
    odd = sorted(rank for rank, call in calls.items() if call.signs != right)
    return _mismatch_verdict(waits, at, calls, odd, right)


def _first(waits: Waits, wrong: Sequence[CallKey]) -> CallKey:
    """Return the mismatched call of ``wrong`` that most ranks began before the other mismatched
    calls."""
    came: dict[int, list[tuple[int, CallKey]]] = defaultdict(list)
    for at in wrong:
        for rank, call in waits.calls[at]:
            came[rank].append((call.enqueued, at))
    votes = Counter(min(each)[1] for each in came.values())
    return min(wrong, key=lambda at: (-votes[at], at))


def _majority(votes: Counter[Signs]) -> Signs | None:
    most = votes.most_common(2)
    return most[0][0] if most and (len(most) == 1 or most[0][1] > most[1][1]) else None


def _elsewhere(waits: Waits, at: CallKey) -> Counter[Signs]:
    """Return how often groups of the same kind and size began each operation as their call with the
    same number."""
    group, *ends = waits.channels[at.channel]
    votes: Counter[Signs] = Counter()
    for number, (other, source, _) in enumerate(waits.channels):
        alike = other.label == group.label and len(other.ranks) == len(group.ranks) and other.ordinal == group.ordinal
        if number != at.channel and alike and group.label and (source < 0) == (ends[0] < 0):
            signs = {call.signs for _, call in waits.calls.get(CallKey(number, at.sequence), ())}
            if len(signs) == 1:
                votes[signs.pop()] += 1
    return votes


def _mismatch_verdict(
    waits: Waits, at: CallKey, calls: dict[int, Call], odd: Sequence[int], right: Signs | None
) -> Verdict:
    others = [rank for rank in sorted(calls) if rank not in set(odd)]
    group = spoken_group(waits.channels[at.channel].group)
    sides: dict[str, list[int]] = defaultdict(list)  # a clause for each distinct call
    for rank in odd:
        sides[_what(calls[rank])].append(rank)
    firsts = [ranks[0] for ranks in sides.values()]
    against = None if right else firsts.pop(0)
    differs = list(dict.fromkeys(_differs(waits, at, calls, rank, right, against) for rank in firsts)) or ["arguments"]
    if right is None:
        said = listed([f"{spoken_ranks(ranks)} began {what}" for what, ranks in sides.items()])
        why = (f"Mismatch of {listed(differs)} in call {at.sequence} of {group}: {said}. There is no majority: it may "
               "be either.")  # fmt: skip
    else:
        said = listed([f"{waits.subject(ranks)} began {what}" for what, ranks in sides.items()])
        theirs = _what(calls[others[0]])
        why = (f"{said} as call {at.sequence} of {group}, where {spoken_ranks(others)} began {theirs}: "
               f"{_fault(differs)}.")  # fmt: skip
    chain = (WaitLink(ranks=tuple(others), call=str(calls[others[0]]), on=tuple(odd)),) if others else ()
    return waits.verdict("mismatch", why, odd, chain, " and ".join(differs))


def _differs(
    waits: Waits, at: CallKey, calls: dict[int, Call], rank: int, right: Signs | None, against: int | None
) -> str:
    """Return ``order`` if ``rank`` began the others' next or previous call; otherwise the property
    that differs from the right call, or from the call of the rank ``against``."""
    for shift in (-1, 1):
        beside = waits.calls.get(CallKey(at.channel, at.sequence + shift), ())
        fits = any(call.signs == calls[rank].signs for other, call in beside if other not in calls or
                   calls[other].signs == right)  # fmt: skip
        left_out = any(call.signs == right for other, call in beside if other == rank and shift > 0)
        if right and (fits or left_out):
            return "order"
    like = next(call for other, call in calls.items() if (other == against if right is None else call.signs == right))
    if calls[rank].verb != like.verb:
        return "op"
    if calls[rank].dtype != like.dtype:
        return "dtype"
    return "size" if calls[rank].bytes != like.bytes else "arguments"


def _fault(differs: Sequence[str]) -> str:
    equal = [what for what in differs if what != "order"]
    faults = ["it has left out a call, or begun calls in another order"] if len(equal) < len(differs) else []
    return "; ".join(faults + ([f"the {listed(equal)} must be the same on all"] if equal else []))


def _what(call: Call) -> str:
    parts = [part for part in (call.dtype, f"{call.bytes} bytes" if call.bytes else "") if part]
    name = f" ({call.name})" if call.name else ""
    verb = call.verb.replace("_", "-") or "message"
    article = "an" if verb[0] in "aeiou" else "a"
    return f"{article} {verb}{f' of {chr(32).join(parts)}' if parts else ''}{name}"


def deadlock(waits: Waits, circle: Circle) -> Verdict:
    """Return the verdict on a cycle: it names the ranks with a different order, if other ranks show
    the right one; otherwise all ranks in it."""
    if astray := _to_another_peer(waits, circle):
        return astray
    ranks = sorted(rank for rank, _ in circle)
    odd = _contradicted(waits, circle) or _by_majority(waits, circle)
    links = [
        WaitLink(ranks=(rank,), call=str(waits.heads[rank][at]), on=(circle[(index + 1) % len(circle)][0],))
        for index, (rank, at) in enumerate(circle)
    ]
    told = "; ".join(f"rank {link.ranks[0]} waits for {spoken_ranks(link.on)} in {link.call}" for link in links[:SHOWN])
    more = f"; and so on, {len(links)} ranks in all" if len(links) > SHOWN else ""
    named = odd or ranks
    guess = "Nothing tells which of them is wrong."
    if odd:
        own, other = agree(odd, "its|their own"), "the other" if len(odd) == 1 else "another"
        guess = (
            f"{sentence(spoken_ranks(odd))} took an order of {own}: the other ranks began these calls in {other} order."
        )
    one = len({waits.channels[at.channel].group for _, at in circle}) == 1
    order = f"They began {'messages of one group' if one else 'calls of different groups'} in different orders."
    why = f"{waits.subject(named)} {agree(named, 'is|are')} in a deadlock: {told}{more}. {order} {guess}"
    return waits.verdict("deadlock", why, named, links)


def _to_another_peer(waits: Waits, circle: Circle) -> Verdict | None:
    """Return the verdict on ranks that began a message with one peer while another peer waits for
    the same message with them.

    Of several such ranks, those that never had a message with their peer before count.
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
            f"{waits.subject([rank])} began {began}, which rank {peer} has not begun, "
            f"and not {left}, in which rank {other} waits for it"
        )
        links += [WaitLink(ranks=(other,), call=str(left), on=(rank,)),
                  WaitLink(ranks=(rank,), call=str(began), on=(peer,))]  # fmt: skip
    why = f"{listed(parts)}: the peer of a message must be the one that both ends name."
    return waits.verdict("mismatch", why, sorted(odd), links, "peer")


def _untaken(waits: Waits, rank: int, at: CallKey) -> list[CallKey]:
    """Return the messages in which other ranks wait for ``rank``, in the same group and direction
    (to or from the rank) as the rank's own message ``at``."""
    own = waits.channels[at.channel]
    if own.source < 0:
        return []
    end = "target" if own.target == rank else "source"
    alike = {
        number for number, one in enumerate(waits.channels)
        if one.group == own.group and getattr(one, end) == rank and number != at.channel
    }  # fmt: skip
    return [other for other, missing in waits.missing.items() if other.channel in alike and rank in missing]


def _contradicted(waits: Waits, circle: Circle) -> list[int]:
    """Return the ranks of the cycle that ranks outside contradict. Such a rank waits in one call
    and has not begun another. Most outside ranks began that other call first, in groups of the same
    kind."""
    inside = {rank for rank, _ in circle}
    odd: list[int] = []
    for index, (_, awaited) in enumerate(circle):
        rank, at = circle[(index + 1) % len(circle)]
        kind = _roles(waits, rank)
        others = [other for other in waits.evidence if other not in inside and _roles(waits, other) == kind]
        if sum(_first_of(waits, rank, other, awaited, at) for other in others) > 0:
            odd.append(rank)
    return sorted(odd) if len(odd) < len(circle) else []


def _role(channel: CallSequence, rank: int) -> Role:
    group, source, target = channel
    way = 0 if source < 0 else (1 if rank == source else 2) * (1 if target > source else -1)
    return group.label, len(group.ranks), group.ordinal, way


def _roles(waits: Waits, rank: int) -> frozenset[Role]:
    """Return all roles of a rank; equal for ranks of the same stage."""
    return frozenset(_role(call.channel, rank) for call in waits.evidence[rank].calls)


def _first_of(waits: Waits, rank: int, peer: int, one: CallKey, other: CallKey) -> int:
    """Return 1 if ``peer`` began its counterpart of the call ``one`` before that of ``other``, -1
    if after, and 0 if unknown. Groups without a label have no known counterparts."""
    if not all(waits.channels[at.channel].group.label for at in (one, other)):
        return 0
    first, second = (_alike(waits, rank, peer, at) for at in (one, other))
    if isinstance(first, Call) and isinstance(second, Call):
        return 1 if first.enqueued < second.enqueued else -1
    return (first is not None) - (second is not None) if None in (first, second) else 0


def _alike(waits: Waits, rank: int, peer: int, at: CallKey) -> Call | bool | None:
    """Return the peer's call with the same number and role as the rank's call ``at``; True if it
    was begun long ago, None if it was not begun."""
    role, later = _role(waits.channels[at.channel], rank), None
    for call in waits.evidence[peer].calls:
        if _role(call.channel, peer) == role and call.sequence >= at.sequence:
            if call.sequence == at.sequence:
                return call
            later = True
    return later


def _by_majority(waits: Waits, circle: Circle) -> list[int]:
    """Return the minority among the ranks that take part in both of two calls: those at the call
    with fewer of them."""
    calls = list(dict.fromkeys(at for _, at in circle))
    if len(calls) != 2:
        return []
    both = set(waits.members(calls[0].channel)) & set(waits.members(calls[1].channel))
    fewer, more = sorted(([rank for rank in waits.at[at] if rank in both] for at in calls), key=len)
    return fewer if len(fewer) < len(more) else []
