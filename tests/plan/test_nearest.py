"""Changes that take less memory: which there are, in which order, and which a job rules out."""

from __future__ import annotations

from typing import Any

import pytest

from plait.plan.nearest import Adjustable, changes, more_ranks, trades

FULL = {"strategy.recompute": "full"}
FSDP = {"strategy.shard": "fsdp"}
ONE = {"train.micro_batch_size": 1}
FLAT = {"strategy.sequence_parallel": True}


def now(recompute: str = "none", each: int = 1, replicas: int = 1, **more: Any) -> Adjustable:
    return Adjustable(recompute=recompute, each=each, replicas=replicas, **more)


def size(sequences: int) -> dict[str, Any]:
    return {"train.micro_batch_size": sequences}


@pytest.mark.parametrize(
    ("job", "told"),
    [
        (now("full"), [{}]),
        (now("selective"), [{}]),
        (now(), [{"strategy.recompute": "selective"}, FULL, FULL]),
        (now("full", replicas=2), [{"strategy.shard": "zero1"}, FSDP, FSDP]),
        (now("full", each=2), [{}, size(1), size(1)]),
        (now("full", each=7), [{}, size(3), size(3), size(1), size(1)]),
        (
            now(each=4, replicas=8),
            [
                {"strategy.shard": "zero1"}, FSDP, {"strategy.recompute": "selective"}, FULL, FULL | FSDP,
                size(2), FULL | FSDP | size(2), size(1), FULL | FSDP | size(1),
            ],
        ),
    ],
)  # fmt: skip
def test_with_the_same_ranks_what_costs_least_comes_first(job: Adjustable, told: list[dict[str, Any]]) -> None:
    assert list(changes(job)) == told


def axis(name: str, degree: int, dp: int) -> dict[str, Any]:
    return {f"strategy.{name}": degree, "strategy.dp": dp}


@pytest.mark.parametrize(
    ("job", "told"),
    [
        (now("full", tp=2, dp=1), []),
        (now("full", tp=2, dp=3), []),
        (now("full", tp=None, pp=3, dp=2), [axis("cp", 2, 1)] * 2 + [axis("pp", 6, 1)] * 2),
        (now("full", tp=1, dp=2, sequence_parallel=False),
         [axis("tp", 2, 1)] * 2 + [axis("cp", 2, 1)] * 2 + [axis("pp", 2, 1)] * 2),
        (now("full", tp=2, sequence_parallel=False), [FLAT, FLAT]),
        (now(each=2, replicas=2, tp=2, sequence_parallel=False), [FLAT, FULL | FSDP | ONE | FLAT]),
        (now("full", tp=2, sequence_parallel=True), []),
        (now("full", tp=2), []),
        (now("full", tp=1, cp=3, pp=5, dp=32),
         [one for name, degree in (("tp", 1), ("cp", 3), ("pp", 5)) for factor in (2, 4, 8, 16, 32)
          for one in [axis(name, degree * factor, 32 // factor)] * 2]),
        (now(each=2, replicas=2, tp=4, cp=2, pp=2, dp=2),
         [one for name, degree in (("tp", 8), ("cp", 4), ("pp", 4))
          for one in (axis(name, degree, 1), FULL | FSDP | ONE | axis(name, degree, 1))]),
    ],
)  # fmt: skip
def test_replicas_are_given_up_where_they_divide(job: Adjustable, told: list[dict[str, Any]]) -> None:
    assert list(trades(job)) == told


@pytest.mark.parametrize("job", [now(tp=2), now(dp=2), now()])
def test_more_ranks_where_both_degrees_may_change(job: Adjustable) -> None:
    assert list(more_ranks(job)) == []


def test_more_ranks_of_every_axis() -> None:
    found = list(more_ranks(now(each=3, replicas=2, tp=3, pp=5, dp=7)))
    last, factors = FULL | FSDP | ONE, (2, 4, 8, 16, 32, 64)
    assert found[:6] == [
        one for factor in (2, 4, 8) for one in ({"strategy.tp": 3 * factor}, last | {"strategy.tp": 3 * factor})
    ]
    assert found[6:12] == [last | FSDP | {"strategy.dp": 7 * factor} for factor in factors]
    assert found[12:] == [
        one
        for factor in factors
        for one in (last | {"strategy.pp": 5 * factor}, last | {"strategy.tp": 24, "strategy.pp": 5 * factor})
    ]
    assert list(more_ranks(now("selective", tp=1, dp=1)))[0:2] == [{"strategy.tp": 2}] * 2
    assert list(more_ranks(now("selective", tp=1, dp=1)))[6] == {"strategy.dp": 2, "strategy.shard": "fsdp"}
