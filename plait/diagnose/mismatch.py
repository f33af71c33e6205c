"""Calls that do not fit together: members of a group that began different things as their n-th call.

The majority is right. Where there is none, groups of the same kind vote: the tensor-parallel groups of other
replicas do the same at the same place. What is still a tie is told as one. Of several, the first counts, by
each rank's own order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from plait.core.evidence import Call, Verdict, Wait, listed, spoken_group, spoken_ranks
from plait.diagnose.waits import At, Waits

Signs = tuple[str, str, int]


def find_mismatch(waits: Waits) -> Verdict | None:
    """The first call about which its ranks disagree; None if they agree about all."""
    wrong = [at for at, calls in waits.calls.items() if len({call.signs for _, call in calls}) > 1]
    if not wrong:
        return None
    at = _first(waits, wrong)
    calls = dict(waits.calls[at])
    right = _majority(Counter(call.signs for call in calls.values())) or _majority(_elsewhere(waits, at))
    if right not in {call.signs for call in calls.values()}:
        right = None
    odd = sorted(rank for rank, call in calls.items() if call.signs != right)
    return _told(waits, at, calls, odd, right)


def _first(waits: Waits, wrong: Sequence[At]) -> At:
    """The one that most ranks came to before the others."""
    came: dict[int, list[tuple[int, At]]] = defaultdict(list)
    for at in wrong:
        for rank, call in waits.calls[at]:
            came[rank].append((call.enqueued, at))
    votes = Counter(min(each)[1] for each in came.values())
    return min(wrong, key=lambda at: (-votes[at], at))


def _majority(votes: Counter[Signs]) -> Signs | None:
    most = votes.most_common(2)
    return most[0][0] if most and (len(most) == 1 or most[0][1] > most[1][1]) else None


def _elsewhere(waits: Waits, at: At) -> Counter[Signs]:
    """What groups of the same kind and size did as their call of the same number, a vote for each."""
    group, *ends = waits.channels[at.channel]
    votes: Counter[Signs] = Counter()
    for number, (other, source, _) in enumerate(waits.channels):
        alike = other.label == group.label and len(other.ranks) == len(group.ranks) and other.ordinal == group.ordinal
        if number != at.channel and alike and group.label and (source < 0) == (ends[0] < 0):
            signs = {call.signs for _, call in waits.calls.get(At(number, at.sequence), ())}
            if len(signs) == 1:
                votes[signs.pop()] += 1
    return votes


def _told(waits: Waits, at: At, calls: dict[int, Call], odd: Sequence[int], right: Signs | None) -> Verdict:
    others = [rank for rank in sorted(calls) if rank not in set(odd)]
    first = calls[odd[0]]
    group = spoken_group(waits.channels[at.channel].group)
    differs = _differs(waits, at, calls, odd, right)
    if right is None:
        sides: dict[Signs, list[int]] = defaultdict(list)
        for rank in sorted(calls):
            sides[calls[rank].signs].append(rank)
        said = listed([f"{spoken_ranks(ranks)} began {_what(calls[ranks[0]])}" for ranks in sides.values()])
        why = f"Mismatch of {differs} in call {at.sequence} of {group}: {said}. There is no majority: it may be either."
    else:
        theirs, hosts = calls[others[0]], sorted({waits.evidence[rank].host for rank in odd} - {""})
        where = f" ({listed(hosts)})" if hosts else ""
        why = (f"{spoken_ranks(odd)}{where} began {_what(first)} as call {at.sequence} of {group}, where "
               f"{spoken_ranks(others)} began {_what(theirs)}: {_fault(differs)}.")  # fmt: skip
        why = why[:1].upper() + why[1:]
    hosts = tuple(sorted({waits.evidence[rank].host for rank in odd} - {""}))
    chain = (Wait(ranks=tuple(others), call=str(calls[others[0]]), on=tuple(odd)),) if others else ()
    return Verdict(cause="mismatch", why=why, ranks=tuple(odd), hosts=hosts, differs=differs, chain=chain)


def _differs(waits: Waits, at: At, calls: dict[int, Call], odd: Sequence[int], right: Signs | None) -> str:
    """``order`` where a rank began what the others begin next, or before; else what is not equal."""
    signs = {rank: call.signs for rank, call in calls.items()}
    for shift in (-1, 1):
        beside = waits.calls.get(At(at.channel, at.sequence + shift), ())
        if right and any(call.signs == signs[odd[0]] for rank, call in beside if rank not in set(odd)):
            return "order"
        if right and any(call.signs == right for rank, call in beside if rank == odd[0] and shift > 0):
            return "order"
    some = [calls[odd[0]], next(call for call in calls.values() if call.signs != signs[odd[0]])]
    if some[0].verb != some[1].verb:
        return "op"
    if some[0].dtype != some[1].dtype:
        return "dtype"
    return "size" if some[0].bytes != some[1].bytes else "arguments"


def _fault(differs: str) -> str:
    if differs == "order":
        return "it has left out a call, or begun calls in another order"
    return f"the {differs} must be the same on all"


def _what(call: Call) -> str:
    parts = [part for part in (call.dtype, f"{call.bytes} bytes" if call.bytes else "") if part]
    name = f" ({call.name})" if call.name else ""
    verb = call.verb.replace("_", "-") or "message"
    article = "an" if verb[0] in "aeiou" else "a"
    return f"{article} {verb}{f' of {chr(32).join(parts)}' if parts else ''}{name}"
