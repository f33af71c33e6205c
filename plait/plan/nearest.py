"""Changes of a job that take less memory, from those that cost nothing to those that cost ranks, and the
first of them with which it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from plait.core.base.errors import PlaitError
from plait.core.job.settings import Slices
from plait.core.job.spec import Job

Change = dict[str, Any]
"""Keys of the job file with their values."""


def changes(job: Job) -> Iterator[Change]:
    """Changes that keep the ranks, and how they are arranged."""
    again, sharded = _again(job), _sharded(job)
    if sharded:
        yield {"strategy.shard": "zero1"}
        yield sharded
    if again:
        yield {"strategy.recompute": "selective"}
        yield again
    yield again | sharded
    size = _each(job) // 2
    while size:
        yield _micro(job, size)
        yield again | sharded | _micro(job, size)
        size //= 2


def trades(job: Job) -> Iterator[Change]:
    """Replicas given up for ranks that share a model, as many ranks as before."""
    asked, last = job.strategy, _last(job)
    if asked.sequence_parallel is False and isinstance(asked.tp, int) and asked.tp > 1:
        yield {"strategy.sequence_parallel": True}
        yield last | {"strategy.sequence_parallel": True}
    for axis, degree in (("tp", asked.tp), ("cp", asked.cp), ("pp", asked.pp)):
        for factor in (2, 4, 8, 16, 32):
            if isinstance(asked.dp, int) and isinstance(degree, int) and asked.dp % factor == 0:
                traded = {f"strategy.{axis}": degree * factor, "strategy.dp": asked.dp // factor}
                yield traded
                yield last | traded


def more_ranks(job: Job) -> Iterator[Change]:
    """More ranks bring more memory."""
    asked, last = job.strategy, _last(job)
    if isinstance(asked.tp, int) and isinstance(asked.dp, int):
        for factor in (2, 4, 8):
            yield {"strategy.tp": asked.tp * factor}
            yield last | {"strategy.tp": asked.tp * factor}
        for factor in (2, 4, 8, 16, 32, 64):
            yield last | {"strategy.dp": asked.dp * factor, "strategy.shard": "fsdp"}
        for factor in (2, 4, 8, 16, 32, 64):
            yield last | {"strategy.pp": asked.pp * factor}
            yield last | {"strategy.tp": asked.tp * 8, "strategy.pp": asked.pp * factor}


def nearest_change(job: Job, tried: Iterable[Change], fits: Callable[[Job], bool]) -> Change | None:
    """The first change with which the job fits; one that a rule forbids, or for which ``fits`` raises
    PlaitError, is passed over. A job that says its number of ranks says the new one."""
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


def changed_job(job: Job, changes: Mapping[str, Any]) -> Job:
    """The job with keys of its file set. Raises JobError where a rule forbids them."""
    values = job.to_dict()
    for key, value in changes.items():
        section, name = key.split(".")
        values[section] = values[section] | {name: value}
    return Job.from_dict(values)


def would_fit(change: Mapping[str, Any] | None) -> str:
    """What a user is told of a change; None where none is enough.

    >>> would_fit({"strategy.shard": "fsdp", "train.micro_batch_size": 1})
    'It would fit with strategy.shard=fsdp train.micro_batch_size=1.'
    """
    if not change:
        return (
            "None of the usual changes is enough, nor are 64 times as many ranks: use a smaller model or shorter "
            "sequences."
        )
    told = (f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in change.items())
    return f"It would fit with {' '.join(told)}."


def _each(job: Job) -> int:
    """Sequences of a micro-batch of one replica."""
    return -(-job.micro_batch // job.degrees[0][0])


def _again(job: Job) -> Change:
    return {"strategy.recompute": "full"} if job.strategy.recompute == "none" else {}


def _sharded(job: Job) -> Change:
    return {"strategy.shard": "fsdp"} if min(dp for dp, _ in job.degrees) * job.strategy.cp > 1 else {}


def _micro(job: Job, size: int) -> Change:
    """A smaller micro-batch; no more slices of it than it has sequences."""
    change, slices = {"train.micro_batch_size": size}, job.strategy.slices
    if isinstance(slices, Slices) and slices.batch > size:
        return change | {"strategy.slices": slices.model_dump() | {"batch": size}}
    return change


def _last(job: Job) -> Change:
    """All that can be done with the same ranks."""
    return _again(job) | _sharded(job) | (_micro(job, 1) if _each(job) > 1 else {})
