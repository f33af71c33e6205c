"""Plain values between ranks: every rank gets what every rank gave, whatever its size, and nothing
else."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from plait.train.comm.tree import broadcast, gather
from tests.support.ranks import Ranks

_groups: list[Any] = []


def value_of(rank: int) -> dict[str, Any]:
    return {"rank": rank, "text": "é" * 10_000 * rank, "numbers": [0.1 + 0.2, 2**70, None, True]}


def exchanged(rank: int) -> list[bool]:
    """Over all ranks, a pair of two of them in another order of ranks, and a group of one."""
    if not _groups:
        pairs = [dist.new_group(members, backend="gloo") for members in ([0, 2], [1, 3])]
        alone = [dist.new_group([one], backend="gloo") for one in range(4)]
        _groups.extend((pairs[rank % 2], alone[rank]))
    pair, alone = _groups
    return [
        gather(value_of(rank)) == [value_of(one) for one in range(4)],
        gather([rank] * rank) == [[one] * one for one in range(4)],
        broadcast(value_of(rank), 3) == value_of(3),
        broadcast(object() if rank else "from 0") == "from 0",
        gather(value_of(rank), pair) == [value_of(rank % 2), value_of(2 + rank % 2)],
        broadcast(value_of(rank), 1, pair) == value_of(2 + rank % 2),
        gather(value_of(rank), alone) == [value_of(rank)],
        broadcast(value_of(rank), group=alone) == value_of(rank),
    ]


def test_every_rank_gets_every_value(pool: Callable[[int], Ranks]) -> None:
    assert pool(4).run(exchanged) == [[True] * 8] * 4


@pytest.mark.unit
def test_without_a_world() -> None:
    assert gather((1, "a")) == [[1, "a"]]
    assert broadcast({"a": (1,)}) == {"a": [1]}


@pytest.mark.unit
def test_what_is_not_plain_is_refused() -> None:
    for value in (object(), {1, 2}, b"bytes"):
        with pytest.raises(TypeError):
            gather(value)


@pytest.mark.unit
def test_what_arrives_is_read_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []

    def loads(content: bytes) -> Any:
        seen.append(content)
        return None

    monkeypatch.setattr(json, "loads", loads)
    gather([1])
    assert seen == [b"[1]"]
