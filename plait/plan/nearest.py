"""Changes of a job that take less memory, from those that cost nothing to those that cost ranks: what is
tried when something does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a job asked for, as far as changes go. each: sequences of a micro-batch of one replica. replicas:
    ranks that hold the same weights. tp, pp, dp: None where they may not change."""

    recompute: str
    each: int
    replicas: int
    tp: int | None = None
    cp: int = 1
    pp: int = 1
    dp: int | None = None
    sequence_parallel: bool | None = None


def changes(asked: Asked) -> Iterator[dict[str, Any]]:
    """Keys of the job file with their values; with the same ranks."""
    again = {"strategy.recompute": "full"} if asked.recompute == "none" else dict[str, Any]()
    sharded = {"strategy.shard": "fsdp"} if asked.replicas > 1 else dict[str, Any]()
    if sharded:
        yield {"strategy.shard": "zero1"}
        yield sharded
    if again:
        yield {"strategy.recompute": "selective"}
        yield again
    yield again | sharded
    size = asked.each // 2
    while size:
        yield {"train.micro_batch_size": size}
        yield again | sharded | {"train.micro_batch_size": size}
        size //= 2


def trades(asked: Asked) -> Iterator[dict[str, Any]]:
    """Replicas given up for ranks that share a model, as many ranks as before."""
    last = _last(asked)
    if asked.sequence_parallel is False and asked.tp and asked.tp > 1:
        yield {"strategy.sequence_parallel": True}
        yield last | {"strategy.sequence_parallel": True}
    for axis, now in (("tp", asked.tp), ("cp", asked.cp), ("pp", asked.pp)):
        for factor in (2, 4, 8, 16, 32):
            if asked.dp and now and asked.dp % factor == 0:
                traded = {f"strategy.{axis}": now * factor, "strategy.dp": asked.dp // factor}
                yield traded
                yield last | traded


def more_ranks(asked: Asked) -> Iterator[dict[str, Any]]:
    """More ranks bring more memory."""
    last = _last(asked)
    if asked.tp and asked.dp:
        for factor in (2, 4, 8):
            yield {"strategy.tp": asked.tp * factor}
            yield last | {"strategy.tp": asked.tp * factor}
        for factor in (2, 4, 8, 16, 32, 64):
            yield last | {"strategy.pp": asked.pp * factor}
            yield last | {"strategy.tp": asked.tp * 8, "strategy.pp": asked.pp * factor}


def would_fit(change: Mapping[str, Any]) -> str:
    """What a user is told of a change.

    >>> would_fit({"strategy.shard": "fsdp", "train.micro_batch_size": 1})
    'It would fit with strategy.shard=fsdp train.micro_batch_size=1'
    """
    return f"It would fit with {' '.join(f'{key}={value}' for key, value in change.items())}"


def _last(asked: Asked) -> dict[str, Any]:
    """All that can be done with the same ranks."""
    again = {"strategy.recompute": "full"} if asked.recompute == "none" else dict[str, Any]()
    sharded = {"strategy.shard": "fsdp"} if asked.replicas > 1 else dict[str, Any]()
    return again | sharded | ({"train.micro_batch_size": 1} if asked.each > 1 else {})
