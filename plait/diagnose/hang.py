"""Why a run hangs: from the evidence of its ranks to the ones that the others wait for.

The rules, in this order; each says what it has found, and none falls back on a name:

1. nobody has waited for longer than the deadline, no rank has stood stopped for longer, and none has failed:
   nothing hangs;
2. members of a group began different things as their n-th call: the majority is right;
3. a rank has ended, is stopped or frozen, or has been at something else for too long, and others wait for
   it: it is the cause. For too long is the deadline, or twice the longest that it was ever at one thing;
   several times as long for what it does for the first time, and for a piece of work for which it takes a
   processor. A rank that goes on to the next thing in that time is slow, and no cause;
4. everybody has begun a call and nobody ends it: the network, named by who reaches whom, else a rank that
   does not answer;
5. ranks wait for each other in a circle: a deadlock;
6. what is left is told as it is, with what is missing.

Clocks of different hosts are never compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from plait.core.base.process import how_it_ended
from plait.core.runs.evidence import FIRST, Cause, Evidence, Verdict, WaitLink, listed, spoken_ranks
from plait.diagnose.deadlock import deadlock
from plait.diagnose.mismatch import find_mismatch
from plait.diagnose.waits import At, Waits

STUCK = 0.5
"""Share of the deadline after which a call that all have begun counts as one that nobody ends."""
GROWTH = 2.0
"""Times the longest that a rank was at one thing in which it may be at another."""


def localise(evidence: Sequence[Evidence], *, world: int, deadline: float, first: float | None = None) -> Verdict:
    """What keeps a run of ``world`` ranks from going on. Evidence may be missing, also of most ranks.

    deadline: seconds after which a call that is not over is suspicious, and a rank that others wait for and
    that has not moved by itself. first: seconds for what is done for the first time, and for one piece of
    work; four times the deadline if not given. 12,288 ranks take a few seconds.
    """
    waits = Waits(evidence, world)
    failed = [rank for rank, one in waits.evidence.items() if one.state == "ended" and one.status]
    halted = [rank for rank, one in waits.evidence.items() if one.state == "stopped"]
    longest = waits.longest()
    if longest <= deadline and not failed:
        halted, moments = _for_long(waits, halted, deadline)
        if not halted:
            now = _sentence(f"{_subject(waits, moments)} {_is(moments)} stopped at this moment.") if moments else ""
            why = f"Nobody has waited for another rank for longer than {deadline:g} s. {now}"
            return Verdict(cause="none", why=why.rstrip())
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
    return Verdict(cause="unknown", why=f"A rank has waited for {longest:.0f} s, and nothing says for whom.")


# ---- one cause after the other ----


def _ended(waits: Waits, sinks: Sequence[int], failed: Sequence[int]) -> Verdict | None:
    """Ranks whose processes ended for reasons of their own: killed from outside before aborted, aborted
    before failed; of several that failed, the first, where that is known."""
    own = [rank for rank in failed if waits.status[rank] == "ended"]
    for kind in ("signal", "abort", "error"):
        if ranks := [rank for rank in own if waits.severed(rank) == kind]:
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
        return "has ended; nobody saw how"
    return how_it_ended(one.status) if one.status else "has ended in good order, before the others"


def _for_long(waits: Waits, halted: Sequence[int], deadline: float) -> tuple[list[int], list[int]]:
    """Stopped ranks that have done nothing for longer than the deadline, and the others: what looks at a rank
    from outside may stop it for a moment."""
    lasting = [rank for rank in halted if (waits.evidence[rank].still or 0.0) > deadline]
    return lasting, [rank for rank in halted if rank not in lasting]


def _stopped(waits: Waits, sinks: Sequence[int], halted: Sequence[int]) -> Verdict | None:
    ranks = [rank for rank in halted if rank in set(sinks)] or halted
    if not ranks:
        return None
    stacks = [waits.evidence[rank].stack[-1:] for rank in ranks]
    says = sorted({line for stack in stacks for line in stack if line.startswith("its main thread is")})
    how = f": {listed(says)}" if says else " (SIGSTOP, or a debugger)"
    return _verdict(waits, "stopped", ranks, f"{_is(ranks)} stopped{how}")


def _busy(waits: Waits, busy: Sequence[int], deadline: float, first: float) -> Verdict:
    """Ranks that do something else while others wait for them."""
    patient = [rank for rank in busy if waits.evidence[rank].patient]
    if patient:
        doing = listed(sorted({waits.evidence[rank].doing for rank in patient}))
        why = f"{_subject(waits, patient)} {_is(patient)} {doing}, which may take long; the others wait for that."
        return Verdict(cause="none", why=_sentence(why), ranks=tuple(patient), hosts=_hosts(waits, patient))
    stuck = [rank for rank in busy if _is_stuck(waits.evidence[rank], deadline, first)]
    if not stuck:
        return _slow(waits, busy)
    busy = stuck
    longest = {rank: _longest_for(waits, rank) for rank in busy}
    ranks = [rank for rank in busy if longest[rank] >= 0.5 * max(longest.values())]
    silent = all(waits.evidence[rank].thread == "silent" for rank in ranks)
    one = waits.evidence[ranks[0]]
    what = f"{_is(ranks)} alive and in code of {'its' if len(ranks) == 1 else 'their'} own"
    if silent:
        what = f"{_is(ranks)} alive and {_do(ranks)} not answer: something holds the interpreter's lock"
    stack = f" There: {' < '.join(reversed(one.stack[-3:]))}." if one.stack else ""
    doing = f" (at {one.doing})" if one.doing else ""
    return _verdict(waits, "host code", ranks, what + doing, more=stack)


def _is_stuck(one: Evidence, deadline: float, first: float) -> bool:
    """Whether a busy rank has been at one thing for longer than that ever took, or may take."""
    limit = max(deadline, GROWTH * one.longest, first if one.first or one.computes else 0.0)
    return one.still is None or one.still > limit


def _slow(waits: Waits, busy: Sequence[int]) -> Verdict:
    """Ranks that others wait for, and that get on."""
    one = waits.evidence[max(busy, key=lambda rank: waits.evidence[rank].still or 0.0)]
    at = f" (at {one.doing}{', for the first time' if one.first else ''})" if one.doing else ""
    went = f"rank {one.rank}" if len(busy) > 1 else "it"
    why = (f"{_subject(waits, busy)} {_is(busy)} slow, not stuck: {went} went on to the next thing {one.still:.1f} s "
           f"ago{at}; the others wait for that.")  # fmt: skip
    return Verdict(cause="none", why=_sentence(why), ranks=tuple(busy), hosts=_hosts(waits, busy))


def _cut(waits: Waits, stuck: Sequence[At]) -> Verdict | None:
    """The network between hosts, if ranks say whom they do not reach, or a message's ends are on two."""
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
    return Verdict(cause="cut off", why=_sentence(why), ranks=tuple(ranks), hosts=tuple(hosts),
                   chain=_chain(waits, waiting, ()))  # fmt: skip


def _mute(waits: Waits, stuck: Sequence[At], deadline: float) -> Verdict | None:
    """Ranks that do not answer though others do, of a call that all have begun: what holds only the
    interpreter's lock does not keep it from ending."""
    at = _first(waits, stuck)
    ranks = [
        rank for rank in waits.members(at.channel)
        if waits.evidence[rank].thread == "silent" and _is_stuck(waits.evidence[rank], deadline, FIRST * deadline)
    ]  # fmt: skip
    if not ranks:
        return None
    waiting = waits.waiting_for((), stuck)
    why = (f"{_subject(waits, ranks)} {_do(ranks)} not answer: stopped, frozen, or kept from running. All have begun "
           f"{waits.call(at)}, and nobody ends it. {_count(len(waiting))}.")  # fmt: skip
    return Verdict(cause="stopped", why=_sentence(why), ranks=tuple(ranks), hosts=_hosts(waits, ranks),
                   chain=_chain(waits, waiting, ranks))  # fmt: skip


def _unexplained(waits: Waits, stuck: Sequence[At]) -> Verdict:
    """A call that all have begun and nobody ends, without a hint."""
    call, at = waits.call(_first(waits, stuck)), _first(waits, stuck)
    members = waits.members(at.channel)
    hosts = tuple(sorted({waits.evidence[rank].host for rank in members} - {""}))
    waiting = waits.waiting_for((), stuck)
    chain = _chain(waits, waiting, ())
    meet = any(set(waits.evidence[rank].reached) & set(members) for rank in members)
    if call.channel.source >= 0 and len(hosts) == 2 and not meet:
        why = f"both ends of {call} have begun it and it does not end: the path between {listed(hosts)} is suspected."
        return Verdict(cause="cut off", why=_sentence(why), ranks=tuple(members), hosts=hosts, chain=chain)
    why = (f"all of {spoken_ranks(members)} have begun {call}, and nobody ends it; all of them live. The network "
           "between them, or a kernel, is suspected; nothing tells which.")  # fmt: skip
    return Verdict(cause="unknown", why=_sentence(why), hosts=hosts, chain=chain)


def _lost(waits: Waits, lost: Sequence[int]) -> Verdict:
    if mute := [rank for rank in lost if waits.mute(rank)]:
        have = "has" if len(mute) == 1 else "have"
        what = f"{have} not answered though others have: ended, stopped, or kept from running"
        return _verdict(waits, "unknown", mute, what)
    if recorded := [rank for rank in lost if waits.evidence[rank].recorded]:
        doing = waits.evidence[recorded[0]].doing
        what = f"{'waits' if len(recorded) == 1 else 'wait'} for something that no ring records"
        return _verdict(waits, "unknown", recorded, what + (f" (at {doing})" if doing else ""))
    its = "its ring" if len(lost) == 1 else "their rings"
    return _verdict(waits, "unknown", lost, f"left no evidence ({its} could not be read)")


# ---- words ----


def _verdict(waits: Waits, cause: Cause, ranks: Sequence[int], what: str, *, more: str = "") -> Verdict:
    """Who it is, what is with it, who waits for it."""
    waiting = waits.waiting_for(ranks)
    direct = {rank: at for rank, at in waiting.items() if set(waits.missing[at]) & set(ranks)}
    text = f"{_subject(waits, ranks)} {what}"
    if direct:
        at = _first(waits, list(dict.fromkeys(direct.values())))
        here = [rank for rank, where in direct.items() if where == at]
        it = "it" if len(ranks) == 1 else "them"
        wait = "waits" if len(here) == 1 else "wait"
        text += f"; {spoken_ranks(here)} {wait} for {it} in {waits.heads[here[0]][at]}"
        if len(waiting) > len(here):
            text += f", and {len(waiting) - len(here)} more for {it} or for those"
    return Verdict(cause=cause, why=_sentence(text + "." + more), ranks=tuple(sorted(ranks)),
                   hosts=_hosts(waits, ranks), chain=_chain(waits, waiting, ranks))  # fmt: skip


def _chain(waits: Waits, waiting: dict[int, At], causes: Collection[int]) -> tuple[WaitLink, ...]:
    """From those who wait last to the cause, one link for each call on the way."""
    if not waiting:
        return ()
    links: list[WaitLink] = []
    level = {at: number for number, at in enumerate(dict.fromkeys(waiting.values()))}
    rank = next(reversed(waiting))
    while rank in waiting:  # every link is of a lower level than the one before
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
    """Seconds that anybody has waited in a call for a rank."""
    return max((waits.age[other, at] for at, missing in waits.missing.items() if rank in missing
                for other in waits.at[at]), default=0.0)  # fmt: skip


def _first(waits: Waits, calls: Sequence[At]) -> At:
    return max(calls, key=lambda at: max(waits.age[rank, at] for rank in waits.at[at]))


def _subject(waits: Waits, ranks: Sequence[int]) -> str:
    hosts = _hosts(waits, ranks)
    return spoken_ranks(ranks) + (f" ({listed(hosts)})" if hosts else "")


def _hosts(waits: Waits, ranks: Sequence[int]) -> tuple[str, ...]:
    return tuple(sorted({waits.evidence[rank].host for rank in ranks} - {""}))


def _is(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _do(ranks: Sequence[int]) -> str:
    return "does" if len(ranks) == 1 else "do"


def _count(number: int) -> str:
    return "1 rank waits" if number == 1 else f"{number} ranks wait"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _shortened(text: str) -> str:
    return " ".join(text.split())[-300:]


# ---- who reaches whom ----


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
