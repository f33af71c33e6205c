"""Changes of a job that take less memory, from those that cost nothing to those that cost ranks: what is
tried when something does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Adjustable:
    """What of a job could be changed, as it is now. each: sequences of a micro-batch of one replica.
    replicas: ranks that hold the same weights. tp, pp, dp: None where they may not change."""

    recompute: str
    each: int
    replicas: int
    tp: int | None = None
    cp: int = 1
    pp: int = 1
    dp: int | None = None
    sequence_parallel: bool | None = None


def changes(now: Adjustable) -> Iterator[dict[str, Any]]:
    """Keys of the job file with their values; with the same ranks."""
    again = {"strategy.recompute": "full"} if now.recompute == "none" else dict[str, Any]()
    sharded = {"strategy.shard": "fsdp"} if now.replicas > 1 else dict[str, Any]()
    if sharded:
        yield {"strategy.shard": "zero1"}
        yield sharded
    if again:
        yield {"strategy.recompute": "selective"}
        yield again
    yield again | sharded
    size = now.each // 2
    while size:
        yield {"train.micro_batch_size": size}
        yield again | sharded | {"train.micro_batch_size": size}
        size //= 2


def trades(now: Adjustable) -> Iterator[dict[str, Any]]:
    """Replicas given up for ranks that share a model, as many ranks as before."""
    last = _last(now)
    if now.sequence_parallel is False and now.tp and now.tp > 1:
        yield {"strategy.sequence_parallel": True}
        yield last | {"strategy.sequence_parallel": True}
    for axis, degree in (("tp", now.tp), ("cp", now.cp), ("pp", now.pp)):
        for factor in (2, 4, 8, 16, 32):
            if now.dp and degree and now.dp % factor == 0:
                traded = {f"strategy.{axis}": degree * factor, "strategy.dp": now.dp // factor}
                yield traded
                yield last | traded


def more_ranks(now: Adjustable) -> Iterator[dict[str, Any]]:
    """More ranks bring more memory."""
    last = _last(now)
    if now.tp and now.dp:
        for factor in (2, 4, 8):
            yield {"strategy.tp": now.tp * factor}
            yield last | {"strategy.tp": now.tp * factor}
        for factor in (2, 4, 8, 16, 32, 64):
            yield last | {"strategy.dp": now.dp * factor, "strategy.shard": "fsdp"}
        for factor in (2, 4, 8, 16, 32, 64):
            yield last | {"strategy.pp": now.pp * factor}
            yield last | {"strategy.tp": now.tp * 8, "strategy.pp": now.pp * factor}


def would_fit(change: Mapping[str, Any]) -> str:
    """What a user is told of a change.

    >>> would_fit({"strategy.shard": "fsdp", "train.micro_batch_size": 1})
    'It would fit with strategy.shard=fsdp train.micro_batch_size=1'
    """
    return f"It would fit with {' '.join(f'{key}={value}' for key, value in change.items())}"


def _last(now: Adjustable) -> dict[str, Any]:
    """All that can be done with the same ranks."""
    again = {"strategy.recompute": "full"} if now.recompute == "none" else dict[str, Any]()
    sharded = {"strategy.shard": "fsdp"} if now.replicas > 1 else dict[str, Any]()
    return again | sharded | ({"train.micro_batch_size": 1} if now.each > 1 else {})
