"""Why a job hangs, from the flight recorder's dumps of its ranks: who never came to a collective, who began
another one or one of another size, who left no dump.

A dump knows calls and no processes: whether a rank lives, and what its host does, nobody tells. It says
neither when it was made: a call that all have begun may be stuck, or under way.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from plait.core.record.ring import RingGroup
from plait.core.runs.evidence import Call, CallSequence, Evidence, Verdict, WaitLink, listed, spoken_ranks
from plait.diagnose.deadlock import deadlock
from plait.diagnose.flight_recorder import Dump, DumpEntry, ends_of
from plait.diagnose.mismatch import find_mismatch
from plait.diagnose.waits import Waits

WHOLE = ("0", "")
"""Names of the group of all ranks."""


def verdict_of(dumps: Mapping[int, Dump], unread: Collection[int] = ()) -> tuple[Verdict, list[Evidence]]:
    """What keeps the ranks of these dumps from going on, by rank; and what is known of each. A rank of the
    job without a dump has evidence without calls. unread: ranks whose dumps cannot be read."""
    calls = _calls(dumps)
    mentioned = {rank for dump in dumps.values() for rank in dump.mentioned}
    ranks = sorted({*range(1 + max(mentioned or dumps)), *dumps, *unread})  # a rank that cannot be makes no others
    evidence = [_evidence(rank, dumps.get(rank), calls.get(rank, [])) for rank in ranks]
    silent = {rank: rank in unread for rank in ranks if rank not in dumps}
    return _judged(Waits(evidence, 1 + ranks[-1]), silent, dumps), evidence


def _judged(waits: Waits, silent: Mapping[int, bool], dumps: Mapping[int, Dump]) -> Verdict:
    """silent: ranks of which no dump was read, and whether they left one."""
    found = (
        find_mismatch(waits)
        or _no_such_peer(dumps)
        or _not_come(waits, silent)
        or _in_a_circle(waits)
        or _not_ended(waits)
    )
    found = found or _not_told(dumps)
    if found:
        left = [rank for rank in silent if rank not in found.ranks and not any(rank in one.on for one in found.chain)]
        return replace(found, also=(*_silent(left, silent), *_doubts(dumps)))
    operations = sum(len(dump.entries) for dump in dumps.values())
    why = f"Nothing is wrong in the dumps: all of their {operations} operations have ended."
    more = (*_silent(list(silent), silent), *_doubts(dumps))
    return Verdict(cause="none", why=" ".join((why, *(one.why for one in more))))


def _silent(ranks: Sequence[int], silent: Mapping[int, bool]) -> tuple[Verdict, ...]:
    """Of what a rank did whose dump cannot be read, nobody can name a cause."""
    gone, unread = ([rank for rank in ranks if silent[rank] == left] for left in (False, True))
    found = [Verdict(cause="missing", why=_no_dump(gone, silent), ranks=tuple(gone))] if gone else []
    return (*found, *([Verdict(cause="unknown", why=_no_dump(unread, silent))] if unread else []))


def _doubts(dumps: Mapping[int, Dump]) -> Iterator[Verdict]:
    """What dumps say of ranks that cannot be."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, dump in dumps.items():
        for doubt in dict.fromkeys((*dump.doubts, *("holds no operation",) * (not dump.entries))):
            ranks[doubt].append(rank)
    for doubt, own in ranks.items():
        yield Verdict(cause="unknown", why=f"{_sentence(spoken_ranks(own))}: the dump {doubt}.")


# ---- one cause after the other ----


def _no_such_peer(dumps: Mapping[int, Dump]) -> Verdict | None:
    """Ranks with an open message to or from a rank that its group has not."""
    found: dict[int, str] = {}
    for rank, dump in dumps.items():
        for one in dump.entries:
            known = dump.groups.get(one.group)
            if one.open and one.message and known and known.ranks and (one.peer or 0) >= len(known.ranks):
                way = f"to rank {one.peer}" if one.sends else f"from rank {one.peer}"
                found[rank] = f"rank {rank} waits in a message {way} of {one.label or one.group}, which has \
{len(known.ranks)} ranks"
    if not found:
        return None
    why = f"{_sentence(listed(list(found.values())))}: there is no such peer."
    return Verdict(cause="mismatch", why=why, ranks=tuple(found), differs="peer")


def _not_come(waits: Waits, silent: Mapping[int, bool]) -> Verdict | None:
    """Ranks that others wait for and that wait for nobody; of those without a dump nobody knows it."""
    sinks = waits.sinks()
    ranks = [rank for rank in sinks if rank not in silent]
    ranks = ranks or [rank for rank in sinks if not silent[rank]] or sinks
    if not ranks:
        return None
    at = max(
        (at for at, missing in waits.missing.items() if set(missing) & set(ranks)), key=lambda at: len(waits.at[at])
    )
    absent = [rank for rank in waits.missing[at] if rank in set(ranks)]
    call, waiting = waits.call(at), waits.at[at]
    it, wait = ("it" if len(absent) == 1 else "them"), ("waits" if len(waiting) == 1 else "wait")
    if absent[0] in silent:
        why = f"{_no_dump(absent, silent)} {_sentence(spoken_ranks(waiting))} {wait} for {it} in {call}."
    else:
        have = "has" if len(absent) == 1 else "have"
        why = f"{_sentence(spoken_ranks(absent))} {have} not begun {call}, where {spoken_ranks(waiting)} {wait}. " + \
            " ".join(f"The last of rank {rank} is {waits.evidence[rank].doing}." for rank in absent[:3]
                     if waits.evidence[rank].doing)  # fmt: skip
        if unheard := [rank for rank in absent if not waits.evidence[rank].calls]:
            why += f" {_sentence(spoken_ranks(unheard))} recorded no operation: none was begun, or none was recorded."
    chain = (WaitLink(ranks=tuple(waiting), call=str(call), on=tuple(absent)),)
    if silent.get(absent[0]):
        return Verdict(cause="unknown", why=why, chain=chain)
    others = [rank for rank in ranks if rank not in absent]
    more = f" {_sentence(spoken_ranks(others))}, too, did not come to a call that others wait in." if others else ""
    return Verdict(cause="missing", why=why.strip() + more, ranks=tuple(ranks), chain=chain)


def _in_a_circle(waits: Waits) -> Verdict | None:
    circle = waits.circle({rank for ranks in waits.at.values() for rank in ranks})
    return deadlock(waits, circle) if circle else None


def _not_ended(waits: Waits) -> Verdict | None:
    """A call that all have begun and some have not ended."""
    stuck = [at for at, missing in waits.missing.items() if not missing]
    if not stuck:
        return None
    at = min(stuck, key=lambda one: min(waits.evidence[rank].at - waits.age[rank, one] * 1e9 for rank in waits.at[one]))
    call, here, members = waits.call(at), waits.at[at], waits.members(at.channel)
    ended = [rank for rank in members if rank not in set(here)]
    chain = (WaitLink(ranks=tuple(here), call=str(call), on=()),)
    if ended:
        have = "has" if len(here) == 1 else "have"
        why = f"{_sentence(spoken_ranks(here))} {have} not ended {call}, which {spoken_ranks(ended)} ended."
        return Verdict(cause="missing", why=why, ranks=tuple(here), chain=chain)
    why = (f"All of {spoken_ranks(members)} have begun {call}, with the same sizes, and nobody has ended it: it is "
           "stuck (the network between them, or a kernel), or it was under way when the dumps were made.")  # fmt: skip
    return Verdict(cause="unknown", why=why, chain=chain)


def _not_told(dumps: Mapping[int, Dump]) -> Verdict | None:
    """What has not ended, and nobody knows between whom."""
    loose = {rank: n for rank, dump in dumps.items() if (n := len(dump.loose(rank)))}
    if not loose:
        return None
    count = sum(loose.values())
    why = (f"{count} operation{'s' if count > 1 else ''} of {spoken_ranks(loose)} had not ended, but their ends are "
           "not told: a hang cannot be excluded.")  # fmt: skip
    return Verdict(cause="unknown", why=why)


def _no_dump(ranks: Sequence[int], silent: Mapping[int, bool]) -> str:
    """ranks: of one kind."""
    one = len(ranks) == 1
    if silent[ranks[0]]:
        whose = f"{_sentence(spoken_ranks(ranks))}'s dump" if one else f"The dumps of {spoken_ranks(ranks)}"
        return f"{whose} cannot be read: what {'it' if one else 'they'} did is not known."
    return f"{_sentence(spoken_ranks(ranks))} left no dump: {'it' if one else 'they'} may have ended."


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


# ---- evidence ----


def _evidence(rank: int, dump: Dump | None, calls: Sequence[Call]) -> Evidence:
    if dump is None:
        return Evidence(rank=rank, recorded=False)
    last = max(calls, key=lambda call: call.enqueued, default=None)
    waits = any(not call.over for call in calls)
    stack = next((one.stack for one in dump.entries if one.open and one.stack), ())
    times = [at for one in dump.entries for at in (one.created, one.started, one.completed) if at]
    return Evidence(
        rank=rank, state="runs", thread="waits" if waits else "unknown", at=max(times, default=1), calls=tuple(calls),
        doing=f"{last}, which {'ended' if last.over else 'has not ended'}" if last else "", stack=stack,
    )  # fmt: skip


def _calls(dumps: Mapping[int, Dump]) -> dict[int, list[Call]]:
    """Of every rank what is open somewhere, and the last of each channel, oldest first. What all have ended
    did fit, whatever its sizes were."""
    groups = _ring_groups(dumps)
    found = {rank: _collectives(dump, groups[rank]) for rank, dump in dumps.items()}
    for rank, calls in _messages(dumps, groups).items():
        found[rank] += calls
    open_ = {(call.channel, call.sequence) for calls in found.values() for call in calls if not call.over}
    kept: dict[int, list[Call]] = {}
    for rank, calls in found.items():
        last = {call.channel: call for call in sorted(calls, key=lambda call: call.sequence)}
        kept[rank] = sorted(
            (
                call if (call.channel, call.sequence) in open_ else replace(call, bytes=0, dtype="")
                for call in calls
                if (call.channel, call.sequence) in open_ or call is last[call.channel]
            ),
            key=lambda call: call.enqueued,
        )
    return kept


def _collectives(dump: Dump, groups: Mapping[str, RingGroup]) -> list[Call]:
    """By group and number; of those begun together one."""
    parts: dict[tuple[str, int], list[DumpEntry]] = defaultdict(list)
    for one in dump.entries:
        if one.message:
            continue
        if one.sequence is None:
            dump.over.note("operations without a number", one.verb)
        else:
            parts[one.group, one.sequence].append(one)
    return [_call(CallSequence(groups[group]), number, some) for (group, number), some in parts.items()]


def _call(channel: CallSequence, number: int, parts: Sequence[DumpEntry]) -> Call:
    whole = [one for one in parts if not one.batch] or parts
    verbs, agreed = {one.verb for one in whole}, [_agreed(one) for one in whole]
    return Call(
        channel=channel, sequence=number, verb=whole[0].verb if len(verbs) == 1 else "coalesced",
        dtype="+".join(dict.fromkeys(dtype for dtype, _ in agreed if dtype)), bytes=sum(size for _, size in agreed),
        enqueued=min((one.created or 0 for one in parts), default=0), ended=0 if any(one.open for one in parts) else
        max(one.completed or one.created or 1 for one in parts),
    )  # fmt: skip


def _agreed(one: DumpEntry) -> tuple[str, int]:
    """Dtype and bytes that must be equal on all members; 0 where they need not, or are not known."""
    verb = one.verb.lower()
    if re.search("all_?to_?all", verb):
        return one.dtype_in, 0
    if "scatter" in verb and "reduce" not in verb:
        return one.dtype_out, one.bytes_out or 0
    return one.dtype_in or one.dtype_out, (one.bytes_out if one.bytes_in is None else one.bytes_in) or 0


def _messages(dumps: Mapping[int, Dump], groups: Mapping[int, Mapping[str, RingGroup]]) -> dict[int, list[Call]]:
    """Messages of every rank, numbered by their order between two ranks. Where one end's older ones are
    lost, the first that is open on both ends is the same."""
    ends: dict[CallSequence, dict[int, list[DumpEntry]]] = defaultdict(lambda: defaultdict(list))
    for rank, dump in dumps.items():
        for one in dump.entries:
            if not one.message:
                continue
            if (pair := ends_of(one, dump, rank)) is not None:
                ends[CallSequence(groups[rank][one.group], *pair)][rank].append(one)
            elif not one.batch:
                dump.over.note("messages whose ends are not told", one.verb)
    lost = {rank for rank, dump in dumps.items() if dump.entries and dump.entries[0].record}
    found: dict[int, list[Call]] = defaultdict(list)
    for channel, sides in ends.items():
        first = {rank: next((n for n, one in enumerate(some) if one.open), len(some)) for rank, some in sides.items()}
        shift = {rank: max(first.values()) - first[rank] if lost & set(sides) else 0 for rank in sides}
        for rank, some in sides.items():
            for number, one in enumerate(some, shift[rank]):
                size = one.bytes_in if one.sends or one.bytes_out is None else one.bytes_out
                found[rank].append(
                    Call(channel=channel, sequence=number, verb="message", bytes=size or 0, enqueued=one.created or 0,
                         dtype=one.dtype_in if one.sends else one.dtype_out or one.dtype_in,
                         ended=0 if one.open else one.completed or one.created or 1)
                )  # fmt: skip
    return found


def _ring_groups(dumps: Mapping[int, Dump]) -> dict[int, dict[str, RingGroup]]:
    """Of every rank the groups of its operations, by their names. Of several with the same members, names
    tell which is which."""
    labels = {rank: {one.group: one.label for one in dump.entries} for rank, dump in dumps.items()}
    users: dict[str, set[int]] = defaultdict(set)
    told: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for rank, dump in dumps.items():
        for name in labels[rank]:
            users[name].add(rank)
        for name, group in dump.groups.items():
            told[name].add(group.ranks)

    def members(rank: int, name: str) -> tuple[int, ...]:
        groups = dumps[rank].groups
        own = groups.get(name) or (groups.get("") if name in WHOLE else None)  # gloo has no name for it
        for ranks in ([own.ranks] if own else []) + sorted(told[name]):
            if rank in ranks:
                return tuple(sorted(ranks))
        if name not in WHOLE and name in told:
            dumps[rank].over.note("groups whose members are not told: taken are those that used them", name)
        return tuple(sorted(dumps if name in WHOLE else users[name]))

    keys = {rank: {name: members(rank, name) for name in own} for rank, own in labels.items()}
    alike: dict[tuple[int, ...], set[str]] = defaultdict(set)
    several: set[tuple[int, ...]] = set()
    for own in keys.values():
        for name, key in own.items():
            alike[key].add(name)
        several |= {key for key, n in Counter(own.values()).items() if n > 1}
    ordinal = {
        name_key: number if name_key[1] in several else 0
        for key, names in alike.items()
        for number, name_key in enumerate((name, key) for name in sorted(names, key=lambda name: (len(name), name)))
    }
    return {
        rank: {name: RingGroup(key, ordinal[name, key], labels[rank][name]) for name, key in own.items()}
        for rank, own in keys.items()
    }
