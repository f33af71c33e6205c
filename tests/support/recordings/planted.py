"""Faults planted into simulated runs, and what is true of each."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plait.core.runs.evidence import Evidence
from tests.support.recordings.standstill import DEADLINE, SECOND, Job, Op, Standstill, draw_job, insert, without


@dataclass(frozen=True)
class Case:
    """evidence: of a run with a fault. causes: what may be said of it. ranks, hosts: whose fault it
    is; a verdict that names more must tell that it is a tie."""

    name: str
    world: int
    evidence: list[Evidence]
    causes: frozenset[str]
    ranks: frozenset[int] = frozenset()
    hosts: frozenset[str] = frozenset()
    job: Any = None


Planter = Callable[[random.Random, Job], Case | None]
RankPlanter = Callable[[random.Random, Job, int, list[Op]], Case | None]


def _on_a_rank(plant: RankPlanter) -> Planter:
    """Of one that is drawn, with its program."""

    def planted(draw: random.Random, job: Job) -> Case | None:
        rank = draw.randrange(job.world)
        return plant(draw, job, rank, job.programs[rank])

    return planted


def _case(name: str, draw: random.Random, run: Standstill, causes: Sequence[str], ranks: Sequence[int] = (),
          hosts: Sequence[int] = (), after: float = 1.2) -> Case:  # fmt: skip
    named = frozenset(f"host {host}" for host in hosts)
    return Case(name, run.job.world, run.evidence(draw, after), frozenset(causes), frozenset(ranks), named, run.job)


def _somewhere(draw: random.Random, program: list[Op]) -> int:
    return draw.randrange(len(program) - 1)


def _calls(program: list[Op], label: str = "") -> list[int]:
    """Where calls begin, of groups with a label."""
    return [i for i, op in enumerate(program) if op.do == "begin" and op.channel
            and op.channel.group.label == (label or op.channel.group.label)]  # fmt: skip


def _exchanged(job: Job, rank: int, a: int, b: int) -> Standstill:
    """With two ops of a rank in the other order."""
    program = job.programs[rank]
    program[a], program[b] = program[b], program[a]
    return Standstill(job)


def _hit(kind: str, cause: str, *, statuses: Sequence[int] = (0,)) -> Planter:
    @_on_a_rank
    def plant(draw: random.Random, job: Job, rank: int, program: list[Op]) -> Case:
        op = Op(kind, status=draw.choice(statuses))
        job.programs[rank] = insert(program, _somewhere(draw, program), op)
        run = Standstill(job)
        if kind == "die":
            run.close_connections(draw)
        return _case(kind, draw, run, [cause], [rank])

    return plant


def _two_hit(draw: random.Random, job: Job) -> Case | None:
    first, second = draw.sample(range(job.world), 2)
    for rank in (first, second):
        at = _somewhere(draw, job.programs[rank])
        job.programs[rank] = insert(job.programs[rank], at, Op("stop"))
    run = Standstill(job)
    hit = [rank for rank in (first, second) if run.ranks[rank].state == "stopped"]
    return _case("two stopped", draw, run, ["stopped"], hit)


def _mismatch(differs: str) -> Planter:
    @_on_a_rank
    def plant(draw: random.Random, job: Job, rank: int, program: list[Op]) -> Case | None:
        at = draw.choice([i for i in _calls(program) if program[i].channel.source < 0])  # type: ignore[union-attr]
        op = program[at]
        wrong = {"op": replace(op, verb="broadcast"), "size": replace(op, elements=op.elements + 7),
                 "dtype": replace(op, dtype="bfloat16")}[differs]  # fmt: skip
        job.programs[rank] = [*program[:at], wrong, *program[at + 1 :]]
        run = Standstill(job)
        if draw.random() < 0.3:  # gloo aborts a healthy rank on some of these
            group = op.channel.group.ranks  # type: ignore[union-attr]
            victim = run.ranks[draw.choice([other for other in group if other != rank])]
            if victim.state == "runs":
                victim.state, victim.status, victim.ended_at = "ended", -6, run.now
        return _case(f"mismatch of {differs}", draw, run, ["mismatch"], [rank])

    return plant


@_on_a_rank
def _swapped(draw: random.Random, job: Job, rank: int, program: list[Op]) -> Case | None:
    """Two neighbouring collectives of one group, of different sizes, in the other order."""
    calls = [i for i in _calls(program) if program[i].channel.source < 0]  # type: ignore[union-attr]
    pairs = [
        (a, b) for n, a in enumerate(calls) for b in calls[n + 1 : n + 2]
        if program[a].channel == program[b].channel and program[a].elements != program[b].elements
    ]  # fmt: skip
    if not pairs:
        return None
    return _case("order in a group", draw, _exchanged(job, rank, *draw.choice(pairs)), ["mismatch"], [rank])


@_on_a_rank
def _skipped(draw: random.Random, job: Job, rank: int, program: list[Op]) -> Case | None:
    calls = [i for i in _calls(program) if program[i].channel.source < 0]  # type: ignore[union-attr]
    job.programs[rank] = without(program, draw.choice(calls))
    return _case("skipped", draw, Standstill(job), ["mismatch", "crashed", "deadlock", "host code"], [rank])


@_on_a_rank
def _crossed(draw: random.Random, job: Job, rank: int, program: list[Op]) -> Case | None:
    """A rank begins calls of two groups in the other order, and waits for each."""
    found: list[tuple[int, int]] = []
    waited = [i for i in _calls(program) if program[i + 1] == Op("wait", of=i)]
    for n, a in enumerate(waited[:-1]):
        b = waited[n + 1]
        both = set(program[a].channel.group.ranks) & set(program[b].channel.group.ranks)  # type: ignore[union-attr]
        if program[a].channel != program[b].channel and len(both) > 1 and all(
            program[i].channel.source < 0 for i in (a, b)  # type: ignore[union-attr]
        ):  # fmt: skip
            found.append((a, b))
    if not found:
        return None
    return _case("two groups", draw, _exchanged(job, rank, *draw.choice(found)), ["deadlock", "mismatch"], [rank])


def _ring(draw: random.Random, job: Job) -> Case | None:
    """Every stage of a replica receives first what the others would send only then."""
    if job.pp < 2:
        return None
    stages = [job.at(stage, 0, 0) for stage in range(job.pp)]
    last = stages[-1]
    program = job.programs[last]
    receives = [i for i in _calls(program, "pp") if program[i].channel.target == last]  # type: ignore[union-attr]
    sends = [i for i in _calls(program, "pp") if program[i].channel.source == last]  # type: ignore[union-attr]
    if not receives or not sends:
        return None
    first = job.programs[stages[-2]]
    sent = [i for i in _calls(first, "pp") if first[i].channel.target == last]  # type: ignore[union-attr]
    got = [i for i in _calls(first, "pp") if first[i].channel.source == last]  # type: ignore[union-attr]
    changed = without(first, sent[0])
    back = next(i for i in _calls(changed, "pp") if changed[i].channel == first[got[0]].channel)
    after = back + 2
    job.programs[stages[-2]] = insert(changed, after, first[sent[0]])
    return _case("messages in a circle", draw, Standstill(job), ["deadlock"], [stages[-2]])


@_on_a_rank
def _message_missing(draw: random.Random, job: Job, rank: int, program: list[Op]) -> Case | None:
    sends = [i for i in _calls(program, "pp") if program[i].channel.source == rank]  # type: ignore[union-attr]
    if not sends:
        return None
    job.programs[rank] = without(program, sends[-1])
    return _case("message missing", draw, Standstill(job), ["deadlock", "mismatch", "host code", "crashed"], [rank])


def _cut(draw: random.Random, job: Job) -> Case | None:
    hosts = sorted({job.host(rank) for rank in range(job.world)})
    if draw.random() < 0.5 or len(hosts) == 2:
        host = draw.choice(hosts)
        pairs = {frozenset((host, other)) for other in hosts if other != host}
        named = hosts if len(hosts) == 2 else [host]
    else:
        named = sorted(draw.sample(hosts, 2))
        pairs = {frozenset(named)}
    whole = Standstill(job).now
    run = Standstill(job, cut=(draw.uniform(0, 0.9) * whole, pairs))
    if all(rank.state == "ended" for rank in run.ranks):
        return None  # nobody needed that path any more
    return _case("cut", draw, run, ["cut off"], [r for r in range(job.world) if job.host(r) in named], named)


def _no_evidence(draw: random.Random, job: Job) -> Case | None:
    """A fault of which the culprit's ring is gone, or those of one or two others."""
    kind = draw.choice(["stop", "loop", "die"])
    case = _hit(kind, {"stop": "stopped", "loop": "host code", "die": "crashed"}[kind], statuses=[-9])(draw, job)
    assert case
    culprit = next(iter(case.ranks))
    lost = {culprit} if draw.random() < 0.5 else set(
        draw.sample([rank for rank in range(job.world) if rank != culprit], min(2, job.world - 1))
    )  # fmt: skip
    gone = draw.random() < 0.5
    evidence = [
        replace(one, recorded=False, calls=(), at=0, thread="unknown", missed=(), reached=(),
                state="unknown" if gone else one.state, status=None if gone else one.status, error="")
        if one.rank in lost else one
        for one in case.evidence
    ]  # fmt: skip
    causes = case.causes | ({"unknown"} if culprit in lost else set())
    return replace(case, name="evidence missing", evidence=evidence, causes=causes)


def _clean(draw: random.Random, job: Job) -> Case:
    """Somewhere in the midst of a run; one rank may be slow, or saving for long."""
    if draw.random() < 0.6:
        slow, factor = draw.randrange(job.world), draw.choice([1.1, 1.3, 2.0, 10.0])
        job.programs[slow] = [replace(op, seconds=op.seconds * factor) for op in job.programs[slow]]
    whole = Standstill(job).now
    run = Standstill(job, until=draw.uniform(0, whole))
    return _case("clean", draw, run, ["none"])


@_on_a_rank
def _slow(draw: random.Random, job: Job, rank: int, program: list[Op]) -> Case:
    """A rank that goes from one thing to the next, and takes many deadlines for all of them."""
    at = _somewhere(draw, program)
    for _ in range(10):
        job.programs[rank] = insert(job.programs[rank], at, Op("compute", draw.uniform(0.1, 0.9) * DEADLINE))
    run = Standstill(job, until=draw.uniform(0.5, 5) * DEADLINE)
    return _case("slow", draw, run, ["none"])


@_on_a_rank
def _slow_at_first(draw: random.Random, job: Job, rank: int, program: list[Op]) -> Case:
    """A rank at one thing for several deadlines, for the first time, or taking a processor for it,
    or half of what it took before."""
    job.programs[rank] = insert(program, _somewhere(draw, program), Op("loop"))
    run = Standstill(job)
    why = draw.choice([{"first": True}, {"computes": True}, {"longest": 2 * DEADLINE}])
    case = _case("slow at first", draw, run, ["none"], after=draw.uniform(1.2, 3.9))
    evidence = [replace(one, **why) if one.rank == rank else one for one in case.evidence]
    return replace(case, evidence=evidence)


def _stuck_at_first(draw: random.Random, job: Job) -> Case:
    """The same, for longer than that."""
    case = _slow_at_first(draw, job)
    assert case
    late = int(4 * DEADLINE * SECOND)
    rank = next(one.rank for one in case.evidence if one.first or one.computes or one.longest)
    evidence = [replace(one, at=one.at + late, first=one.rank == rank) for one in case.evidence]
    return replace(
        case, name="stuck at first", evidence=evidence, causes=frozenset({"host code"}), ranks=frozenset({rank})
    )


@_on_a_rank
def _saving(draw: random.Random, job: Job, rank: int, program: list[Op]) -> Case | None:
    """A rank does for long what it may."""
    job.programs[rank] = insert(program, _somewhere(draw, program), Op("loop"))
    run = Standstill(job)
    case = _case("saving", draw, run, ["none"])
    evidence = [replace(one, patient=True, doing="saving") if one.rank == rank else one for one in case.evidence]
    return replace(case, evidence=evidence)


PLANTERS: dict[str, Planter] = {
    "killed": _hit("die", "crashed", statuses=[-9, -11, -6, -15]),
    "failed": _hit("die", "crashed", statuses=[1, 7]),
    "stopped": _hit("stop", "stopped"),
    "infinite loop": _hit("loop", "host code"),
    "lock held": _hit("hold", "host code"),
    "two stopped": _two_hit,
    "op": _mismatch("op"),
    "size": _mismatch("size"),
    "dtype": _mismatch("dtype"),
    "order": _swapped,
    "skipped": _skipped,
    "two groups": _crossed,
    "messages in a circle": _ring,
    "message missing": _message_missing,
    "cut": _cut,
    "evidence missing": _no_evidence,
    "clean": _clean,
    "saving": _saving,
    "slow": _slow,
    "slow at first": _slow_at_first,
    "stuck at first": _stuck_at_first,
}
HEALTHY = ("clean", "saving", "slow", "slow at first")
"""Kinds in which nobody is to be named."""


def draw_case(kind: str, seed: int) -> Case:
    """A case of a kind that does stand still, if it should."""
    draw = random.Random(f"{kind}/{seed}")
    while True:
        case = PLANTERS[kind](draw, draw_job(draw))
        if case and ("none" in case.causes or _stands_still(case)):
            return case


def _stands_still(case: Case) -> bool:
    """Whether the fault did stop somebody: one that comes after everybody's last call does not."""
    live = [one for one in case.evidence if one.state != "ended" or one.status]
    waiting = any(
        not call.over and (one.at - call.enqueued) / 1e9 > DEADLINE for one in case.evidence for call in one.calls
    )
    return bool(live) and waiting
