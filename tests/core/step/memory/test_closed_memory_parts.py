"""Memory in closed form, part by part: groups, overhead, logits, and how many micro-batches
matter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from plait.core.cluster.hardware import Cluster
from plait.core.step.columns.points import OVERLAPS, SCHEDULES, StrategyTable, schedule_properties
from plait.core.step.memory.closed_memory import (
    filled,
    plait_on,
    step_memory,
    usable,
)
from plait.core.step.memory.memory_options import PLAIT, MemoryOptions
from tests.plan.layers import LLAMA

H100 = Cluster.preset("h100")
SYNC = {"overlap": OVERLAPS.index("sync")}


def one(model: Any = LLAMA, options: MemoryOptions = PLAIT, precision: Any = "bf16-mixed", /, **row: int) -> Any:
    return step_memory(model, StrategyTable.of([{**SYNC, **row}]), sequence=4096, precision=precision, options=options,
                       overhead=H100.overhead)  # fmt: skip


ZB_V, INTERLEAVED = SCHEDULES.index("zb-v"), SCHEDULES.index("interleaved")


def test_more_stages_than_there_are_layers_never_fit_beside_others_that_do() -> None:
    rows = [{"pp": 2, "num_micro": 2}, {"pp": 64, "num_micro": 64}, {"pp": 32, "num_micro": 32},
            {"pp": 32, "num_micro": 32, "schedule": INTERLEAVED, "virtual": 2},
            {"pp": 16, "num_micro": 32, "schedule": ZB_V, "virtual": 2},
            {"pp": 32, "num_micro": 32, "schedule": ZB_V, "virtual": 2}]  # fmt: skip
    found = step_memory(LLAMA, StrategyTable.of([{**SYNC, **row} for row in rows]), sequence=4096)
    assert np.isfinite(found.total).tolist() == [True, False, True, False, True, False]
    assert found.pp_rank[1] == 0
    assert found.total[0] == step_memory(LLAMA, StrategyTable.of([{**SYNC, **rows[0]}]), sequence=4096).total[0]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", [1, 3, 4])
def test_as_many_micro_batches_as_matter(name: str, pp: int) -> None:
    counts = [1, 2, 5, 8, 12, 15, 16, 40, 41]
    points = StrategyTable.of([{"pp": pp, "num_micro": each, "schedule": SCHEDULES.index(name)} for each in counts])
    told = filled(points).tolist()
    assert told == [schedule_properties(name).enough(pp, each) for each in counts]
    assert all(one <= other for one, other in zip(told, counts, strict=True))
    facts = schedule_properties(name)
    assert facts.collects or told[-2] < 40 or (facts.uneven and pp == 3)


def test_whether_a_point_fits() -> None:
    points = StrategyTable.of([{**SYNC, "dp": 8}, {**SYNC, "dp": 8, "params": 8, "grads": 8, "optim": 8}])
    found = step_memory(LLAMA, points, sequence=4096, options=plait_on(H100.device), overhead=H100.overhead)
    limit = usable(H100.device, H100.overhead)
    assert (found.total <= limit).tolist() == [False, True]
    assert limit == H100.device.memory.value * (1 - H100.overhead.reserve.value)
    assert plait_on(H100.device).gpu and not plait_on(Cluster.preset("lab").device).gpu
