"""Changes of a job's strategy that take less memory, generated setting by setting.

The planner prices them together in closed form, for the memory that each frees and the time it
costs; or it tries them in order, for the first with which the job fits.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.core.base.codec.toml_text import show
from plait.core.base.errors import PlaitError
from plait.core.base.text import in_bytes
from plait.core.job.settings import Slices
from plait.core.job.spec import Job
from plait.core.step.columns.points import RECOMPUTES
from plait.plan.search.request import point_of

Change = dict[str, Any]
"""A change of a job: new values by key of the job file."""
FULL = RECOMPUTES.index("full")
SHARDED = {"params": "parameters", "grads": "gradients", "optim": "optimizer"}
"""Kinds of memory by the settings that shard them; each is sharded over at least as many ranks as
the previous one."""
FACTORS = (2, 4, 8, 16, 32, 64)
LEAST = 0.005
"""Minimum memory that a change must free to be reported, as a fraction of the device's memory."""
SAME = 0.01
"""Resolution of the closed form, as a fraction of a step's time: smaller differences count as
none."""
NEAR = 1.25
"""Price tolerance: among changes whose cost per freed byte is at most this multiple of the lowest,
the smallest change is reported."""


class Move(NamedTuple):
    """A change of one setting. kind: the kinds of memory that it reduces, as in ``parameters,
    gradients``."""

    kind: str
    change: Change


def moves(job: Job, layers: int = 1, shards: Sequence[int] = ()) -> Iterator[Move]:
    """Yield changes that keep the number of ranks and their arrangement, those that cost the least
    time first.

    layers: layers of a stage, of which some may be recomputed. shards: numbers of ranks over which
    states may be sharded; empty: named shardings only.
    """
    section, point = job.strategy, point_of(job)
    names = list(SHARDED)
    for at, name in enumerate(names):
        for ranks in shards:
            factors = {one: max(point[one], ranks) if one in names[at:] else point[one] for one in names}
            if ranks > point[name] and all(size % ranks == 0 for size in list(factors.values())[at:]):
                copies = {"secondary": point["secondary"]} if point["secondary"] else {}
                kind = ", ".join(SHARDED[one] for one in names if factors[one] > point[one])
                yield Move(kind, {"strategy.shard": factors | copies})
    if not shards and _replicas(job) > 1:
        yield Move("optimizer", {"strategy.shard": "zero1"})
        kind = ", ".join(SHARDED[one] for one in names if point[one] < _replicas(job))
        yield Move(kind, {"strategy.shard": "fsdp"})
    if section.recompute == "none":
        yield Move("activations", {"strategy.recompute": "selective"})
    again = 0 if point["recompute"] != FULL else layers if point["recompute_layers"] < 0 else point["recompute_layers"]
    for part in sorted({layers * quarter // 4 for quarter in (1, 2, 3, 4)}):
        if part > again:
            full = "full" if part == layers else {"kind": "full", "layers": part}
            yield Move("activations", {"strategy.recompute": full})
    if point["micro"] > 1:
        yield Move("activations", _micro(job, point["micro"] // 2))
    if point["tp"] > 1 and section.sequence_parallel is False:
        yield Move("activations", {"strategy.sequence_parallel": True})
    if point["pp"] > 1 and section.schedule != "1f1b":
        yield Move("activations", {"strategy.schedule": "1f1b", "strategy.virtual_stages": 1})


def moves_together(job: Job, *, more: bool) -> Iterator[Change]:
    """Yield changes from those that cost nothing to those that cost ranks: first each setting
    alone, then all memory-saving settings at once. Then, with and without these, other arrangements
    of the ranks, and more ranks.

    more: True if each rank has its own device, so that more ranks have more memory.
    """
    every = [one.change for one in moves(job)]
    yield from every
    all_of: Change = {}
    for change in every:
        if not change.keys() & {"train.micro_batch_size", "strategy.schedule"}:
            all_of = all_of | change  # the later value of a key takes less memory
    yield all_of
    size = point_of(job)["micro"]
    while size := size // 2:
        yield _micro(job, size)
        yield all_of | _micro(job, size)
    if point_of(job)["micro"] > 1:
        all_of = all_of | _micro(job, 1)
    for change in _arranged(job) if more and len(set(job.degrees)) == 1 else ():
        yield change
        yield all_of | change


def _arranged(job: Job) -> Iterator[Change]:
    """Yield changes to other degrees of parallelism: fewer replicas with more ranks per model
    first, then more ranks in total."""
    section, (dp, tp) = job.strategy, job.degrees[0]
    degrees = {"tp": tp, "cp": section.cp, "pp": section.pp}
    for axis, degree in degrees.items():
        for factor in FACTORS[:-1]:
            if dp % factor == 0:
                yield {f"strategy.{axis}": degree * factor, "strategy.dp": dp // factor}
    for factor in FACTORS[:3]:
        yield {"strategy.tp": tp * factor}
    for factor in FACTORS:
        yield {"strategy.dp": dp * factor, "strategy.shard": "fsdp"}
    for factor in FACTORS:
        yield {"strategy.pp": section.pp * factor}
        yield {"strategy.tp": tp * 8, "strategy.pp": section.pp * factor}


def _replicas(job: Job) -> int:
    return min(dp for dp, _ in job.degrees) * job.strategy.cp


def _micro(job: Job, size: int) -> Change:
    """Return the change to micro-batches of ``size`` sequences, with at most one slice for each
    sequence."""
    change, slices = {"train.micro_batch_size": size}, job.strategy.slices
    if isinstance(slices, Slices) and slices.batch > size:
        return change | {"strategy.slices": slices.model_dump() | {"batch": size}}
    return change


def changed_job(job: Job, change: Mapping[str, Any]) -> Job:
    """Return the job with keys of its file changed. Raises JobError if a rule forbids the
    result."""
    values = job.to_dict()
    for key, value in change.items():
        section, name = key.split(".")
        values[section] = values[section] | {name: value}
    return Job.from_dict(values)


def in_words(change: Mapping[str, Any]) -> str:
    """Return a change as it is written on a command line, after the job's file.

    >>> in_words({"strategy.shard": "fsdp", "train.micro_batch_size": 1})
    'strategy.shard=fsdp train.micro_batch_size=1'
    """
    return " ".join(f"{key}={value if isinstance(value, str) else show(value)}" for key, value in change.items())


def quoted(change: Mapping[str, Any]) -> str:
    """Return a change as settings for a shell's command line, with tables in quotes.

    >>> quoted({"strategy.shard": {"params": 8, "grads": 8}, "strategy.tp": 2})
    "strategy.shard='{params=8,grads=8}' strategy.tp=2"
    """
    texts = {key: in_words({key: value}).partition("=")[2].replace(" ", "") for key, value in change.items()}
    return " ".join(f"{key}={shlex.quote(text)}" for key, text in texts.items())


# ---- tried in order ----


def nearest_change(job: Job, tried: Iterable[Change], fits: Callable[[Job], bool]) -> Change | None:
    """Return the first change with which the job fits. A change is skipped if a rule forbids it, or
    if ``fits`` raises PlaitError. If the job sets its number of ranks, the change sets the new
    number, too."""
    for change in tried:
        try:
            other = changed_job(job, change)
            if other.cluster.ranks and other.cluster.ranks != other.world_size:
                change = change | {"cluster.ranks": other.world_size}
                other = changed_job(other, {"cluster.ranks": other.world_size})
            if fits(other):
                return change
        except PlaitError:
            continue
    return None


OTHER_CLUSTER = (
    "The plan is for this machine: cluster.preset=NAME plans for another cluster (plait plan without a job lists them)."
)


def would_fit(change: Mapping[str, Any] | None) -> str:
    """Return a sentence on the change with which a job would fit; ``change`` is None if none of the
    usual changes suffices."""
    if change:
        return f"It would fit with {in_words(change)}."
    smaller = "use a smaller model or shorter sequences"
    return f"None of the usual changes is enough, nor are {FACTORS[-1]} times as many ranks: {smaller}."


# ---- priced ----


@dataclass(frozen=True)
class MemorySaving:
    """A change with its price. held: bytes of the change's kinds of memory on the fullest device
    before the change. freed_bytes: bytes that it frees there. longer: increase of the step's time,
    as a fraction."""

    move: Move
    held: int
    freed_bytes: int
    longer: float

    @property
    def cells(self) -> tuple[str, ...]:
        """Texts of a table's row: what is held, bytes freed, change of the step's time, and the
        change."""
        longer = f"{self.longer:+.1%}" if abs(self.longer) >= SAME else "same"
        held, freed = (
            f"{size / (1 << 30):.{int(size < 10 << 30)}f} GiB" if size >= 1 << 30 else in_bytes(size)
            for size in (self.held, self.freed_bytes)
        )
        return f"{self.move.kind} {held}", freed, longer, quoted(self.move.change)

    def describe(self) -> str:
        """Return the change, the bytes it frees and its cost as a phrase."""
        cost = f"a step takes {abs(self.longer):.1%} {'longer' if self.longer > 0 else 'less'}"
        cost = cost if abs(self.longer) >= SAME else "a step takes about as long"
        what = f"{in_words(self.move.change)} would free {in_bytes(self.freed_bytes)}"
        return f"{self.move.kind} {in_bytes(self.held)}: {what} ({cost})"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "kind": self.move.kind, "bytes": self.held, "change": in_words(self.move.change), "frees": self.freed_bytes,
            "longer": self.longer,
        }  # fmt: skip


def describe_savings(savings: Sequence[MemorySaving]) -> str:
    """Return a sentence on the changes that would free memory; empty if there are none."""
    return f"What would free memory: {'; '.join(one.describe() for one in savings)}." if savings else ""


def cheapest(
    tried: Sequence[Move], kinds: Mapping[str, int], held: NDArray[np.float64], seconds: NDArray[np.float64],
    device: float,
) -> list[MemorySaving]:  # fmt: skip
    """Return for each kind of memory, the first of a change's, the change with the lowest cost per
    freed byte, sorted by freed bytes, largest first.

    kinds: the strategy's bytes by kind. held, seconds: bytes on the fullest device and seconds of a
    step, for the strategy and then for each change. device: bytes of a device's memory.
    """
    less, longer, found = held[0] - held[1:], seconds[1:] / seconds[0] - 1, list[MemorySaving]()
    first = [one.kind.partition(",")[0] for one in tried]
    for kind in dict.fromkeys(first):
        which = [at for at, one in enumerate(first) if one == kind and less[at] >= LEAST * device]
        price = {at: max(longer[at], SAME) / less[at] for at in which}
        if cheap := [at for at, each in price.items() if each <= NEAR * min(price.values())]:
            at = min(cheap, key=lambda at: less[at])
            bytes_held = sum(kinds[one] for one in tried[at].kind.split(", "))
            found.append(MemorySaving(tried[at], bytes_held, int(less[at]), float(longer[at])))
    return sorted(found, key=lambda one: -one.freed_bytes)
