"""Find why a run hangs: from the evidence of its ranks to the ranks that the others wait for.

The rules, in order; each states its finding, and none falls back on a guess:

1. no rank has waited for longer than the deadline, none has been stopped for longer, and none has failed:
   the run does not hang;
2. members of a group began different operations as their n-th call: the majority is right;
3. a rank has ended, is stopped or frozen, or has been busy with one task for too long, and others wait for
   it: this rank is the cause. Too long means the deadline, or twice the rank's longest task so far; several
   times as long for a first task, or for a piece of work that takes processor time. A rank that goes on to
   its next task in time is slow, and not the cause;
4. all members have begun a call and none ends it: the network, judged by which ranks reach each other, or
   else a rank that does not answer;
5. ranks wait for each other in a cycle: a deadlock;
6. anything else is reported as it is, with the missing evidence.

Clocks of different hosts are never compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from plait.core.base.process import how_it_ended
from plait.core.runs.evidence import FIRST, Cause, Evidence, Verdict, WaitLink, listed, spoken_ranks
from plait.diagnose.verdicts.mismatch import deadlock, find_mismatch
from plait.diagnose.verdicts.waits import CallKey, Waits, agree, sentence

STUCK = 0.5
"""Share of the deadline after which a call that all ranks have begun counts as stuck."""
GROWTH = 2.0
"""Multiple of a rank's longest task so far that a further task may last."""


def localise(evidence: Sequence[Evidence], *, world: int, deadline: float, first: float | None = None) -> Verdict:
    """Return the verdict on what blocks a run of ``world`` ranks. Evidence may be missing, even for
    most ranks.

    deadline: seconds after which an open call is suspicious, as is an awaited rank without progress
    of its own. first: seconds for a task done for the first time, and for one piece of work;
    default four times the deadline. 12,288 ranks take a few seconds.
    """
    waits = Waits(evidence, world)
    failed = [rank for rank, one in waits.evidence.items() if one.state == "ended" and one.status]
    halted = [rank for rank, one in waits.evidence.items() if one.state == "stopped"]
    longest = waits.longest()
    if longest <= deadline and not failed:
        halted, moments = _for_long(waits, halted, deadline)
        if not halted:
            why = f"Nobody has waited for another rank for longer than {deadline:g} s."
            if moments:
                why += f" {sentence(waits.subject(moments))} {agree(moments, 'is|are')} stopped at this moment."
            return waits.verdict("none", why)
    if wrong := find_mismatch(waits):
        return wrong
    sinks = waits.sinks()
    named = _ended(waits, sinks, failed) or _stopped(waits, sinks, halted)
    if named:
        others = [_stopped(waits, sinks, halted)] if named.cause == "crashed" and halted else []
        return replace(named, also=tuple(one for one in others if one))
    busy = [rank for rank in sinks if waits.status[rank] == "host"]
    stuck = waits.stuck(deadline * STUCK)
    if stuck and (cut := _cut(waits, stuck)):
        return cut
    if stuck and not busy and (mute := _mute(waits, stuck, deadline)):
        return mute
    if busy:
        return _busy(waits, busy, deadline, FIRST * deadline if first is None else first)
    waiting = {rank for ranks in waits.at.values() for rank in ranks}
    if circle := waits.circle(waiting):
        return deadlock(waits, circle)
    if lost := [rank for rank in sinks if waits.status[rank] == "unknown"]:
        return _lost(waits, lost)
    if stuck:
        return _unexplained(waits, stuck)
    if victims := [rank for rank in failed if waits.status[rank] == "victim"]:
        return _crashed(waits, victims)
    return Verdict(cause="unknown", why=f"A rank has waited for {longest:.0f} s, and the awaited rank is unknown.")


# ---- one function per cause ----


def _ended(waits: Waits, sinks: Sequence[int], failed: Sequence[int]) -> Verdict | None:
    """Return the verdict on ranks whose processes ended by themselves. Killed from outside comes
    before aborted, aborted before failed; of several failed ranks the first counts, if known."""
    own = [rank for rank in failed if waits.status[rank] == "ended"]
    for kind in ("signal", "abort", "error"):
        if ranks := [rank for rank in own if waits.how_ended(rank) == kind]:
            if kind != "signal":
                first = min(waits.evidence[rank].ended_at for rank in ranks)
                ranks = [rank for rank in ranks if waits.evidence[rank].ended_at == first]
            return _crashed(waits, ranks)
    gone = [rank for rank in sinks if waits.evidence[rank].state == "ended"]
    return _crashed(waits, gone) if gone else None


def _crashed(waits: Waits, ranks: Sequence[int]) -> Verdict:
    how = sorted({_how(waits.evidence[rank]) for rank in ranks})
    said = next((waits.evidence[rank].error for rank in ranks if waits.evidence[rank].error), "")
    more = f" It said: {_shortened(said)}" if said else ""
    return _verdict(waits, "crashed", ranks, listed(how), more=more)


def _how(one: Evidence) -> str:
    if one.status is None:
        return "has ended; its exit status is unknown"
    return how_it_ended(one.status) if one.status else "has ended in good order, before the others"


def _for_long(waits: Waits, halted: Sequence[int], deadline: float) -> tuple[list[int], list[int]]:
    """Return the stopped ranks without progress for longer than the deadline, and the other stopped
    ranks: a debugger or profiler may stop a rank for a moment."""
    lasting = [rank for rank in halted if (waits.evidence[rank].still or 0.0) > deadline]
    return lasting, [rank for rank in halted if rank not in lasting]


def _stopped(waits: Waits, sinks: Sequence[int], halted: Sequence[int]) -> Verdict | None:
    ranks = [rank for rank in halted if rank in set(sinks)] or halted
    if not ranks:
        return None
    stacks = [waits.evidence[rank].stack[-1:] for rank in ranks]
    says = sorted({line for stack in stacks for line in stack if line.startswith("its main thread is")})
    how = f": {listed(says)}" if says else " (SIGSTOP, or a debugger)"
    return _verdict(waits, "stopped", ranks, f"{agree(ranks, 'is|are')} stopped{how}")


def _busy(waits: Waits, busy: Sequence[int], deadline: float, first: float) -> Verdict:
    """Return the verdict on ranks that run host code while others wait for them."""
    patient = [rank for rank in busy if waits.evidence[rank].patient]
    if patient:
        doing = listed(sorted({waits.evidence[rank].doing for rank in patient}))
        who = waits.subject(patient)
        why = f"{who} {agree(patient, 'is|are')} {doing}, which may take long; the others wait for that."
        return waits.verdict("none", why, patient)
    stuck = [rank for rank in busy if _is_stuck(waits.evidence[rank], deadline, first)]
    if not stuck:
        return _slow(waits, busy)
    busy = stuck
    longest = {rank: _longest_for(waits, rank) for rank in busy}
    ranks = [rank for rank in busy if longest[rank] >= 0.5 * max(longest.values())]
    silent = all(waits.evidence[rank].thread == "silent" for rank in ranks)
    one = waits.evidence[ranks[0]]
    what = "is|are alive and in code of its|their own"
    if silent:
        what = "is|are alive and does|do not answer: something holds the interpreter's lock"
    stack = f" There: {' < '.join(reversed(one.stack[-3:]))}." if one.stack else ""
    doing = f" (at {one.doing})" if one.doing else ""
    return _verdict(waits, "host code", ranks, agree(ranks, what) + doing, more=stack)


def _is_stuck(one: Evidence, deadline: float, first: float) -> bool:
    """True if a busy rank's current task has lasted longer than its limit."""
    limit = max(deadline, GROWTH * one.longest, first if one.first or one.computes else 0.0)
    return one.still is None or one.still > limit


def _slow(waits: Waits, busy: Sequence[int]) -> Verdict:
    """Return the verdict on awaited ranks that make progress."""
    one = waits.evidence[max(busy, key=lambda rank: waits.evidence[rank].still or 0.0)]
    at = f" (at {one.doing}{', for the first time' if one.first else ''})" if one.doing else ""
    went = f"rank {one.rank}" if len(busy) > 1 else "it"
    why = f"{waits.subject(busy)} {agree(busy, 'is|are')} slow, not stuck: {went} went on to the next thing "
    why += f"{one.still:.1f} s ago{at}; the others wait for that."
    return waits.verdict("none", why, busy)


def _cut(waits: Waits, stuck: Sequence[CallKey]) -> Verdict | None:
    """Return the verdict on the network between hosts, if ranks report hosts that they cannot
    reach."""
    found = cut_off(waits.evidence.values(), {rank for at in stuck for rank in waits.members(at.channel)})
    if found is None:
        return None
    hosts, between = found
    ranks = [rank for rank, one in waits.evidence.items() if one.host in hosts]
    waiting = waits.waiting_for((), stuck)
    call = waits.call(_first(waits, stuck))
    where = f"{listed(hosts)} {'is' if len(hosts) == 1 else 'are'} cut off" if not between else \
        f"the path between {hosts[0]} and {hosts[1]} is cut"  # fmt: skip
    why = (f"{where}: all of {spoken_ranks(call.channel.group.ranks)} have begun {call}, nobody ends it, and ranks "
           f"there and elsewhere do not reach each other. {_count(len(waiting))}.")  # fmt: skip
    return replace(waits.verdict("cut off", why, ranks, _chain(waits, waiting, ())), hosts=tuple(hosts))


def _mute(waits: Waits, stuck: Sequence[CallKey], deadline: float) -> Verdict | None:
    """Return the verdict on ranks that do not answer although others do, in a call that all ranks
    have begun. A held interpreter lock alone would not keep such a call from ending."""
    at = _first(waits, stuck)
    ranks = [
        rank for rank in waits.members(at.channel)
        if waits.evidence[rank].thread == "silent" and _is_stuck(waits.evidence[rank], deadline, FIRST * deadline)
    ]  # fmt: skip
    if not ranks:
        return None
    waiting = waits.waiting_for((), stuck)
    why = f"{waits.subject(ranks)} {agree(ranks, 'does|do')} not answer: stopped, frozen, or kept from running. "
    why += f"All have begun {waits.call(at)}, and nobody ends it. {_count(len(waiting))}."
    return waits.verdict("stopped", why, ranks, _chain(waits, waiting, ranks))


def _unexplained(waits: Waits, stuck: Sequence[CallKey]) -> Verdict:
    """Return the verdict on a call that all ranks have begun and none ends, without further
    evidence."""
    call, at = waits.call(_first(waits, stuck)), _first(waits, stuck)
    members = waits.members(at.channel)
    hosts = waits.hosts(members)
    waiting = waits.waiting_for((), stuck)
    chain = _chain(waits, waiting, ())
    meet = any(set(waits.evidence[rank].reached) & set(members) for rank in members)
    if call.channel.source >= 0 and len(hosts) == 2 and not meet:
        why = f"both ends of {call} have begun it and it does not end: the path between {listed(hosts)} is suspected."
        return waits.verdict("cut off", why, members, chain)
    why = (f"all of {spoken_ranks(members)} have begun {call}, and nobody ends it; all of them live. The network "
           "between them, or a kernel, is suspected; nothing tells which.")  # fmt: skip
    return Verdict(cause="unknown", why=sentence(why), hosts=hosts, chain=chain)


def _lost(waits: Waits, lost: Sequence[int]) -> Verdict:
    if mute := [rank for rank in lost if waits.mute(rank)]:
        what = agree(mute, "has|have not answered though others have: ended, stopped, or kept from running")
        return _verdict(waits, "unknown", mute, what)
    if recorded := [rank for rank in lost if waits.evidence[rank].recorded]:
        doing = waits.evidence[recorded[0]].doing
        what = agree(recorded, "waits|wait for something that no ring records")
        return _verdict(waits, "unknown", recorded, what + (f" (at {doing})" if doing else ""))
    return _verdict(waits, "unknown", lost, agree(lost, "left no evidence (its|their ring|rings could not be read)"))


# ---- words ----


def _verdict(waits: Waits, cause: Cause, ranks: Sequence[int], what: str, *, more: str = "") -> Verdict:
    """Return a verdict that states the ranks, their state, and which ranks wait for them."""
    waiting = waits.waiting_for(ranks)
    direct = {rank: at for rank, at in waiting.items() if set(waits.missing[at]) & set(ranks)}
    text = f"{waits.subject(ranks)} {what}"
    if direct:
        at = _first(waits, list(dict.fromkeys(direct.values())))
        here = [rank for rank, where in direct.items() if where == at]
        it = agree(ranks, "it|them")
        text += f"; {spoken_ranks(here)} {agree(here, 'waits|wait')} for {it} in {waits.heads[here[0]][at]}"
        if len(waiting) > len(here):
            text += f", and {len(waiting) - len(here)} more for {it} or for those"
    return waits.verdict(cause, text + "." + more, sorted(ranks), _chain(waits, waiting, ranks))


def _chain(waits: Waits, waiting: dict[int, CallKey], causes: Collection[int]) -> tuple[WaitLink, ...]:
    """Return the links from the last waiting ranks to the cause, one for each call on the way."""
    if not waiting:
        return ()
    links: list[WaitLink] = []
    level = {at: number for number, at in enumerate(dict.fromkeys(waiting.values()))}
    rank = next(reversed(waiting))
    while rank in waiting:  # the level falls with every link
        at = waiting[rank]
        here = tuple(other for other in waits.at[at] if waiting.get(other) == at)
        missing = waits.missing[at]
        on = [other for other in missing if other in causes] or \
            [other for other in missing if other in waiting and level[waiting[other]] < level[at]]  # fmt: skip
        links.append(WaitLink(ranks=here, call=str(waits.heads[rank][at]), on=tuple(on)))
        if not on or on[0] in causes:
            break
        rank = on[0]
    return tuple(links)


def _longest_for(waits: Waits, rank: int) -> float:
    """Return the longest time in seconds that another rank has waited in a call for this rank."""
    return max((waits.age[other, at] for at, missing in waits.missing.items() if rank in missing
                for other in waits.at[at]), default=0.0)  # fmt: skip


def _first(waits: Waits, calls: Sequence[CallKey]) -> CallKey:
    return max(calls, key=lambda at: max(waits.age[rank, at] for rank in waits.at[at]))


def _count(number: int) -> str:
    return "1 rank waits" if number == 1 else f"{number} ranks wait"


def _shortened(text: str) -> str:
    return " ".join(text.split())[-300:]


# ---- reachability ----


def cut_off(evidence: Iterable[Evidence], concerned: set[int]) -> tuple[list[str], bool] | None:
    """Return the hosts whose network explains why some ranks do not reach others, and True if only
    the path between two hosts is broken. Returns None if all known pairs reach each other.

    concerned: ranks of the stuck calls; a break between other ranks explains nothing.

    The matrix of host pairs decides. A host without any working pair is cut off. A single broken
    pair is a path, since the broken end is unknown.
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
    """Return the fewest hosts that cover all broken pairs; hosts that reach no other host come
    first, then hosts with the most broken pairs."""
    left: set[tuple[str, str]] = {(a, b) for a, others in missed.items() for b in others if a < b}
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
