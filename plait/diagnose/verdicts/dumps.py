"""Find why a job hangs from its ranks' flight-recorder dumps: a rank that never came to a
collective, began a different one or a different size, or left no dump.

A dump holds calls but not the state of processes: whether a rank is alive, and what its host does,
is unknown. Nor does it hold its own time: a call that all ranks have begun may be stuck or still
running.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

from plait.core.record.ring import RingGroup
from plait.core.runs.evidence import Call, CallSequence, Evidence, Verdict, WaitLink, listed, spoken_ranks
from plait.diagnose.verdicts.mismatch import deadlock, find_mismatch
from plait.diagnose.verdicts.waits import Waits, agree, sentence
from plait.formats.flight_recorder import Dump, DumpEntry, ends_of

WHOLE = ("0", "")
"""Names of the process group of all ranks."""


def verdict_of(dumps: Mapping[int, Dump], unread: Collection[int] = ()) -> tuple[Verdict, list[Evidence]]:
    """Return the verdict on the hang from the dumps, by rank, and the evidence for each rank. A
    rank of the job without a dump has evidence without calls. unread: ranks whose dumps cannot be
    read."""
    calls = _calls(dumps)
    mentioned = {rank for dump in dumps.values() for rank in dump.group_ranks}
    ranks = sorted({*range(1 + max(mentioned or dumps)), *dumps, *unread})  # an impossible rank adds no ranks below it
    evidence = [_evidence(rank, dumps.get(rank), calls.get(rank, [])) for rank in ranks]
    silent = {rank: rank in unread for rank in ranks if rank not in dumps}
    return _judged(Waits(evidence, 1 + ranks[-1]), silent, dumps), evidence


def _judged(waits: Waits, silent: Mapping[int, bool], dumps: Mapping[int, Dump]) -> Verdict:
    """Return the verdict on the hang by the first rule that applies. silent: ranks without a
    readable dump; True if the rank left an unreadable one."""
    found = (
        find_mismatch(waits)
        or _no_such_peer(dumps)
        or _not_come(waits, silent)
        or _in_a_circle(waits)
        or _not_ended(waits)
    )
    found = found or _unknown_participants(dumps)
    if found:
        left = [rank for rank in silent if rank not in found.ranks and not any(rank in one.on for one in found.chain)]
        return replace(found, also=(*_silent(left, silent), *_doubts(dumps)))
    operations = sum(len(dump.entries) for dump in dumps.values())
    why = f"Nothing is wrong in the dumps: all of their {operations} operations have ended."
    more = (*_silent(list(silent), silent), *_doubts(dumps))
    return Verdict(cause="none", why=" ".join((why, *(one.why for one in more))))


def _silent(ranks: Sequence[int], silent: Mapping[int, bool]) -> tuple[Verdict, ...]:
    """Return verdicts without a cause on ranks whose dumps are missing or cannot be read."""
    gone, unread = ([rank for rank in ranks if silent[rank] == left] for left in (False, True))
    found = [Verdict(cause="missing", why=_no_dump(gone, silent), ranks=tuple(gone))] if gone else []
    return (*found, *([Verdict(cause="unknown", why=_no_dump(unread, silent))] if unread else []))


def _doubts(dumps: Mapping[int, Dump]) -> Iterator[Verdict]:
    """Yield verdicts without a cause on implausible content of dumps, such as a wrong rank."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, dump in dumps.items():
        for doubt in dict.fromkeys((*dump.doubts, *("holds no operation",) * (not dump.entries))):
            ranks[doubt].append(rank)
    for doubt, own in ranks.items():
        yield Verdict(cause="unknown", why=f"{sentence(spoken_ranks(own))}: the dump {doubt}.")


# ---- one function per cause ----


def _no_such_peer(dumps: Mapping[int, Dump]) -> Verdict | None:
    """Return the verdict on open messages whose peer is outside their group."""
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
    why = f"{sentence(listed(list(found.values())))}: there is no such peer."
    return Verdict(cause="mismatch", why=why, ranks=tuple(found), differs="peer")


def _not_come(waits: Waits, silent: Mapping[int, bool]) -> Verdict | None:
    """Return the verdict on awaited ranks that wait for no rank themselves; ranks without a dump
    come last, since their state is unknown."""
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
    wait = agree(waiting, "waits|wait")
    if absent[0] in silent:
        it = agree(absent, "it|them")
        why = f"{_no_dump(absent, silent)} {sentence(spoken_ranks(waiting))} {wait} for {it} in {call}."
    else:
        have = agree(absent, "has|have")
        why = f"{sentence(spoken_ranks(absent))} {have} not begun {call}, where {spoken_ranks(waiting)} {wait}. " + \
            " ".join(f"The last of rank {rank} is {waits.evidence[rank].doing}." for rank in absent[:3]
                     if waits.evidence[rank].doing)  # fmt: skip
        if unheard := [rank for rank in absent if not waits.evidence[rank].calls]:
            why += f" {sentence(spoken_ranks(unheard))} recorded no operation: none was begun, or none was recorded."
    chain = (WaitLink(ranks=tuple(waiting), call=str(call), on=tuple(absent)),)
    if silent.get(absent[0]):
        return Verdict(cause="unknown", why=why, chain=chain)
    others = [rank for rank in ranks if rank not in absent]
    more = f" {sentence(spoken_ranks(others))}, too, did not come to a call that others wait in." if others else ""
    return Verdict(cause="missing", why=why.strip() + more, ranks=tuple(ranks), chain=chain)


def _in_a_circle(waits: Waits) -> Verdict | None:
    circle = waits.circle({rank for ranks in waits.at.values() for rank in ranks})
    return deadlock(waits, circle) if circle else None


def _not_ended(waits: Waits) -> Verdict | None:
    """Return the verdict on a call that all have begun and some have not ended."""
    stuck = [at for at, missing in waits.missing.items() if not missing]
    if not stuck:
        return None
    at = min(stuck, key=lambda one: min(waits.evidence[rank].at - waits.age[rank, one] * 1e9 for rank in waits.at[one]))
    call, here, members = waits.call(at), waits.at[at], waits.members(at.channel)
    ended = [rank for rank in members if rank not in set(here)]
    chain = (WaitLink(ranks=tuple(here), call=str(call), on=()),)
    if ended:
        have = agree(here, "has|have")
        why = f"{sentence(spoken_ranks(here))} {have} not ended {call}, which {spoken_ranks(ended)} ended."
        return Verdict(cause="missing", why=why, ranks=tuple(here), chain=chain)
    why = (f"All of {spoken_ranks(members)} have begun {call}, with the same sizes, and no rank has ended it: it is "
           "stuck (the network between them, or a kernel), or it was under way when the dumps were made.")  # fmt: skip
    return Verdict(cause="unknown", why=why, chain=chain)


def _unknown_participants(dumps: Mapping[int, Dump]) -> Verdict | None:
    """Return the verdict on open operations whose participants are unknown."""
    loose = {rank: n for rank, dump in dumps.items() if (n := len(dump.unmatchable(rank)))}
    if not loose:
        return None
    count = sum(loose.values())
    why = (f"{count} operation{'s' if count > 1 else ''} of {spoken_ranks(loose)} had not ended, but their "
           "participants are unknown: a hang cannot be excluded.")  # fmt: skip
    return Verdict(cause="unknown", why=why)


def _no_dump(ranks: Sequence[int], silent: Mapping[int, bool]) -> str:
    """Return a sentence on ranks without a readable dump. ranks: all missing, or all unreadable."""
    who, they = spoken_ranks(ranks), agree(ranks, "it|they")
    if silent[ranks[0]]:
        whose = f"{sentence(who)}'s dump" if len(ranks) == 1 else f"The dumps of {who}"
        return f"{whose} cannot be read: what {they} did is not known."
    return f"{sentence(who)} left no dump: {they} may have ended."


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
    """Return every rank's calls, oldest first: those still open on any rank, and the last call of
    each group or pair of ranks. Calls that all ranks have ended did match, so their sizes are
    dropped."""
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
    """Return the collectives by group and number, one for operations that were coalesced."""
    parts: dict[tuple[str, int], list[DumpEntry]] = defaultdict(list)
    for one in dump.entries:
        if one.message:
            continue
        if one.sequence is None:
            dump.over.note("operations without a sequence number", one.verb)
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
    """Return the dtype and the bytes that must be equal on all members; 0 bytes if they may differ
    or are unknown."""
    verb = one.verb.lower()
    if re.search("all_?to_?all", verb):
        return one.dtype_in, 0
    if "scatter" in verb and "reduce" not in verb:
        return one.dtype_out, one.bytes_out or 0
    return one.dtype_in or one.dtype_out, (one.bytes_out if one.bytes_in is None else one.bytes_in) or 0


def _messages(dumps: Mapping[int, Dump], groups: Mapping[int, Mapping[str, RingGroup]]) -> dict[int, list[Call]]:
    """Return the messages of every rank, numbered by their order between two ranks. If older
    messages of one end are lost, the first open message is taken to be the same on both ends."""
    ends: dict[CallSequence, dict[int, list[DumpEntry]]] = defaultdict(lambda: defaultdict(list))
    for rank, dump in dumps.items():
        for one in dump.entries:
            if not one.message:
                continue
            if (pair := ends_of(one, dump, rank)) is not None:
                ends[CallSequence(groups[rank][one.group], *pair)][rank].append(one)
            elif not one.batch:
                dump.over.note("messages whose sender or receiver is unknown", one.verb)
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
    """Return the process groups of every rank's operations, by name. Names distinguish several
    groups with the same members."""
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
        own = groups.get(name) or (groups.get("") if name in WHOLE else None)  # gloo leaves the name empty
        for ranks in ([own.ranks] if own else []) + sorted(told[name]):
            if rank in ranks:
                return tuple(sorted(ranks))
        if name not in WHOLE and name in told:
            dumps[rank].over.note("groups of unknown members: the ranks that used them count as members", name)
        return tuple(sorted(dumps if name in WHOLE else users[name]))

    keys = {rank: {name: members(rank, name) for name in own} for rank, own in labels.items()}
    several = {key for own in keys.values() for key, n in Counter(own.values()).items() if n > 1}
    names = sorted({(key, len(name), name) for own in keys.values() for name, key in own.items()})
    ordinal = {
        (name, key): number if key in several else 0
        for key, alike in groupby(names, itemgetter(0))
        for number, (_, _, name) in enumerate(alike)
    }
    return {
        rank: {name: RingGroup(key, ordinal[name, key], labels[rank][name]) for name, key in own.items()}
        for rank, own in keys.items()
    }
