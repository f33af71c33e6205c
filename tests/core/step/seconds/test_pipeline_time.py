"""The closed form of a pipeline, column by column, against the same form worked out place by place."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from plait.core.step.columns.points import SCHEDULES, Points
from plait.core.step.seconds.pipeline_time import BESIDE, SPLIT, Stages, pipeline

SPLIT_BACKWARD = ("zb-h1", "zb-h2", "zb-v")
CHAINS = ("interleaved", *SPLIT_BACKWARD)
"""Schedules that have tests of their own: ``test_pipeline_chains``."""
TRANSFERS_BESIDE = ("gpipe", "eager-1f1b", "slack-1f1b", "zb-h2")


def drawn(chance: random.Random) -> dict[str, Any]:
    """A pipeline; weight gradients are a third of a stage, about."""
    name = chance.choice(SCHEDULES)
    return {
        "name": name, "pp": chance.choice([1, 2, 3, 4, 5, 9]), "m": chance.choice([1, 2, 3, 8, 40]),
        "chunks": chance.choice([1, 2, 3]) if name == "interleaved" else 2 if name == "zb-v" else 1,
        "first": chance.uniform(1, 4), "inner": chance.uniform(1, 4), "last": chance.uniform(1, 4),
        "forward": chance.uniform(0.2, 0.4), "weight": chance.uniform(0.1, 0.4),
        "transfer": chance.choice([0.0, chance.uniform(0, 1)]), "hidden": chance.random() < 0.3,
        "overlap": chance.random() < 0.3,
    }  # fmt: skip


def places(one: dict[str, Any]) -> list[float]:
    """Seconds of a micro-batch at each."""
    return [one["first"], *[one["inner"]] * (one["pp"] - 2), one["last"]] if one["pp"] > 1 else [one["last"]]


def waiting(one: dict[str, Any]) -> float:
    """Of 1F1B: the stage for which a step takes longest, of the first, the second, the last but one, the
    last."""
    each, m, pp = places(one), one["m"], one["pp"]
    apart = {"gpipe": 0, "eager-1f1b": 2}.get(one["name"], 1)
    longest = m * each[-1] + sum(each[:-1])
    for at in {0, 1, pp - 2} if pp > 2 else {0} if pp == 2 else set[int]():
        ahead, after = sum(each[:at]), sum(each[at + 1 :])
        more = min(apart * (pp - 1 - at), m - 1)
        waits = sum(max(0.0, after - more * each[at] * share) for share in (one["forward"], 1 - one["forward"]))
        longest = max(longest, m * each[at] + ahead + (min(waits, after) if apart else after))
    return longest


def transfers(one: dict[str, Any]) -> float:
    each, m, pp, hop, chunks = places(one), one["m"], one["pp"], one["transfer"], one["chunks"]
    hops = 2 * hop * (pp - 1)
    if one["hidden"] or one["name"] in TRANSFERS_BESIDE:
        if one["name"] == "interleaved":  # there and back over all stages
            return 2 * hop * (pp * chunks - 1) if pp > 1 else 0.0
        return 2 * hops if one["name"] == "zb-v" and m < 2 * pp else hops
    waits = max(0.0, sum(each) / pp + hops / pp - max(each)) if pp > 1 else 0.0
    every = 2 * hop * chunks * (pp > 1) if chunks > 1 else waits
    return hops - min(2 * hop / pp, waits) + every * (m - 1)


@pytest.mark.parametrize("seed", range(4))
def test_columns_are_what_is_worked_out_place_by_place(seed: int) -> None:
    chance = random.Random(seed)
    several = [drawn(chance) for _ in range(400)]

    def column(name: str) -> np.ndarray:
        return np.array([one[name] for one in several])

    points = Points.of([
        {"schedule": SCHEDULES.index(one["name"]), "pp": one["pp"], "num_micro": one["m"], "virtual": one["chunks"]}
        for one in several
    ])  # fmt: skip
    found = pipeline(
        Stages(first=column("first"), inner=column("inner"), last=column("last"), forward=column("forward"),
               weight_gradient=column("weight")),
        points, transfer=column("transfer"), hidden=column("hidden"), steps_overlap=column("overlap"),
    )  # fmt: skip
    assert found.work == pytest.approx([one["m"] * max(places(one)) for one in several])
    plain = np.array([one["name"] not in CHAINS for one in several])
    waits = [waiting(one) - one["m"] * max(places(one)) for one in several]
    assert found.bubble[plain] == pytest.approx(np.array(waits)[plain])
    assert found.transfers == pytest.approx([transfers(one) for one in several])


def test_schedules_by_what_they_do() -> None:
    assert {name for name in SCHEDULES if SPLIT[SCHEDULES.index(name)]} == set(SPLIT_BACKWARD)
    assert {name for name in SCHEDULES if BESIDE[SCHEDULES.index(name)]} == set(TRANSFERS_BESIDE)
