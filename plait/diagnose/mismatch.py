"""Calls that do not fit together: members of a group that began different things as their n-th call.

The majority is right. Where there is none, groups of the same kind vote: the tensor-parallel groups of other
replicas do the same at the same place. What is still a tie is told as one. Of several, the first counts, by
each rank's own order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from plait.core.runs.evidence import Call, Verdict, WaitLink, listed, spoken_group, spoken_ranks
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
    group = spoken_group(waits.channels[at.channel].group)
    sides: dict[str, list[int]] = defaultdict(list)  # a clause for each that is another
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
        said = listed([f"{spoken_ranks(ranks)}{_on(waits, ranks)} began {what}" for what, ranks in sides.items()])
        theirs = _what(calls[others[0]])
        why = (f"{said} as call {at.sequence} of {group}, where {spoken_ranks(others)} began {theirs}: "
               f"{_fault(differs)}.")  # fmt: skip
        why = why[:1].upper() + why[1:]
    hosts = tuple(sorted({waits.evidence[rank].host for rank in odd} - {""}))
    chain = (WaitLink(ranks=tuple(others), call=str(calls[others[0]]), on=tuple(odd)),) if others else ()
    return Verdict(cause="mismatch", why=why, ranks=tuple(odd), hosts=hosts, differs=" and ".join(differs), chain=chain)


def _on(waits: Waits, ranks: Sequence[int]) -> str:
    hosts = sorted({waits.evidence[rank].host for rank in ranks} - {""})
    return f" ({listed(hosts)})" if hosts else ""


def _differs(waits: Waits, at: At, calls: dict[int, Call], rank: int, right: Signs | None, against: int | None) -> str:
    """``order`` where ``rank`` began what the others begin next, or before; else what is not equal to what
    is right, or to the call of the rank ``against``."""
    for shift in (-1, 1):
        beside = waits.calls.get(At(at.channel, at.sequence + shift), ())
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
