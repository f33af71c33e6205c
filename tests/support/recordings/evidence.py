"""Evidence of ranks, written by hand: what each was in when somebody looked, at second 100."""

from __future__ import annotations

from plait.core.record.ring import RingGroup, signature_of
from plait.core.runs.evidence import Call, CallSequence, Evidence, Verdict
from plait.diagnose.verdicts.hang import localise
from tests.support.recordings.standstill import SECOND

DP = RingGroup((0, 1, 2, 3), 0, "dp")


def at(group: RingGroup, sequence: int, *, since: float = 20.0, verb: str = "all_reduce", size: int = 4,
       over: bool = False, ends: tuple[int, int] = (-1, -1)) -> Call:  # fmt: skip
    """A call of a rank whose evidence is of second 100."""
    began, signature = int((100 - since) * SECOND), signature_of(verb, "float32", size)
    return Call(channel=CallSequence(group, *ends), sequence=sequence, verb=verb, dtype="float32", bytes=size,
                signature=signature, enqueued=began, ended=began + 1 if over else 0)  # fmt: skip


def verdict_on(*evidence: Evidence, world: int = 0, deadline: float = 10) -> Verdict:
    """The verdict on a run of these ranks, and of more without evidence if ``world`` says so."""
    return localise(evidence, world=world or len(evidence), deadline=deadline)


def seen(rank: int, *calls: Call, host: int = 0, **more: object) -> Evidence:
    fields = {"state": "runs", "thread": "waits", "at": 100 * SECOND, "host": f"host {host}", **more}
    return Evidence(rank=rank, calls=calls, **fields)  # type: ignore[arg-type]
