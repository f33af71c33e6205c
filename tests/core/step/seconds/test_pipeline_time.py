"""The closed form of a pipeline, column by column, against the same form worked out place by place."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from plait.core.step.columns.points import SCHEDULES, Points
from plait.core.step.seconds.pipeline_time import BESIDE, SPLIT, Stages, pipeline

SPLIT_BACKWARD = ("zb-h1", "zb-h2", "zb-v")
TRANSFERS_BESIDE = ("gpipe", "eager-1f1b", "slack-1f1b", "zb-h2")


def drawn(chance: random.Random) -> dict[str, Any]:
    """A pipeline; weight gradients are a third of a stage, about."""
    name = chance.choice(SCHEDULES)
    return {
        "name": name, "pp": chance.choice([1, 2, 3, 4, 5, 9]), "m": chance.choice([1, 2, 3, 8, 40]),
        "chunks": chance.choice([1, 2, 3]) if name == "interleaved" else 2 if name == "zb-v" else 1,
        "first": chance.uniform(1, 4), "inner": chance.uniform(1, 4), "last": chance.uniform(1, 4),
        "forward": chance.uniform(0.2, 0.4), "weight": chance.uniform(0.1, 0.4), "chunk": chance.uniform(0.4, 0.9),
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
    apart = {"gpipe": 0, "eager-1f1b": 2, "zb-h2": 2}.get(one["name"], 1)
    longest = m * each[-1] + sum(each[:-1])
    for at in {0, 1, pp - 2} if pp > 2 else {0} if pp == 2 else set[int]():
        ahead, after = sum(each[:at]), sum(each[at + 1 :])
        more = min(apart * (pp - 1 - at), m - 1)
        waits = sum(max(0.0, after - more * each[at] * share) for share in (one["forward"], 1 - one["forward"]))
        longest = max(longest, m * each[at] + ahead + (min(waits, after) if apart else after))
    return longest


def bubble(one: dict[str, Any]) -> float:
    each, m, pp, weight, chunks = places(one), one["m"], one["pp"], one["weight"], one["chunks"]
    slowest, name = max(each), one["name"]
    start = 0.0 if one["overlap"] else one["forward"]
    filled = {"zb-h1": max(start, 1 - 2 * weight), "zb-h2": max(start, 1 - 3 * weight)}.get(name, 1.0)
    found = (waiting(one) - m * slowest) * filled / chunks
    if name == "interleaved":
        found += (chunks - 1) / chunks * max(0, pp - m) * slowest
    if name == "zb-v":
        found = v_seconds(one) - m * slowest
    if name in SPLIT_BACKWARD and pp > 1 and (name != "zb-v" or m < pp):
        # One there and back, the others' forwards and input gradients.
        found = max(found, (1 - weight) * (sum(each) + (m - 1) * slowest) + weight * slowest - m * slowest)
    return found


def v_seconds(one: dict[str, Any]) -> float:
    each, m, pp, weight = places(one), one["m"], one["pp"], one["weight"]
    if pp == 1:
        return m * each[-1]
    other, chunk = each[1], one["chunk"]
    filling = 0.0 if one["overlap"] else (pp - 1) * other
    # At each other place a forward and an input gradient; of many micro-batches the shorter one hides, as far
    # as one and a half weight gradients reach.
    both = one["forward"], 1 - weight - one["forward"]
    there = sum(both) - min(*both, weight + weight / 2) * min(1.0, max(0.0, (m - pp) / pp))
    ahead = max(0.0, weight / 2 - (chunk - 0.5))
    found = [m * max(other, each[-1]) + filling * there * chunk, m * each[0] + filling * ahead]
    if not one["overlap"]:
        stages = m * (each[0] - chunk * other)  # its last stage, of all micro-batches
        back = (1 - weight) * (pp - 1) * other  # input gradients of the others' stages
        found.append(stages + back + chunk * other)
    return max(found)


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
               weight_gradient=column("weight"), first_chunk=column("chunk")),
        points, transfer=column("transfer"), hidden=column("hidden"), steps_overlap=column("overlap"),
    )  # fmt: skip
    assert found.work == pytest.approx([one["m"] * max(places(one)) for one in several])
    assert found.bubble == pytest.approx([bubble(one) for one in several])
    assert found.transfers == pytest.approx([transfers(one) for one in several])


def test_schedules_by_what_they_do() -> None:
    assert {name for name in SCHEDULES if SPLIT[SCHEDULES.index(name)]} == set(SPLIT_BACKWARD)
    assert {name for name in SCHEDULES if BESIDE[SCHEDULES.index(name)]} == set(TRANSFERS_BESIDE)
