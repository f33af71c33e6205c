"""Memory in closed form, part by part: groups, overhead, logits, and how many micro-batches matter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plait.core.cluster.hardware import Cluster
from plait.core.step.columns.points import OVERLAPS, SCHEDULES, Points
from plait.core.step.memory.closed_memory import (
    communicators,
    device_overhead,
    filled,
    plait_on,
    spare_slack,
    step_memory,
    usable,
)
from plait.core.step.memory.live import enough
from plait.core.step.memory.memory_options import PLAIT, MemoryOptions
from tests.plan.layers import GPT, LLAMA, MIXTRAL
from tests.support.models import utransformer

H100 = Cluster.preset("h100")
SYNC = {"overlap": OVERLAPS.index("sync")}


@pytest.mark.parametrize(
    ("row", "groups"),
    [
        ({}, 0), ({"tp": 2}, 2), ({"pp": 2}, 2), ({"dp": 2}, 2), ({"dp": 2, "optim": 2}, 2),
        ({"cp": 2}, 3), ({"cp": 2, "ring": 2}, 3), ({"cp": 4, "ring": 2}, 4),
        ({"dp": 8, "params": 2, "grads": 2, "optim": 2}, 3), ({"dp": 8, "params": 2, "grads": 4, "optim": 8}, 4),
        ({"dp": 16, "params": 2, "grads": 4, "optim": 8}, 5),
        ({"dp": 8, "params": 8, "grads": 8, "optim": 8, "secondary": 2}, 3),
        ({"dp": 8, "params": 8, "grads": 8, "optim": 8, "secondary": 1}, 2),
    ],
)  # fmt: skip
def test_groups_of_a_rank(row: dict[str, int], groups: int) -> None:
    assert communicators(Points.of([row])).tolist() == [groups]


def test_what_a_device_holds_besides() -> None:
    overhead, points, moving = H100.overhead, Points.of([{"tp": 2}, {}]), np.array([1e9, 2e9])
    told = overhead.context.value + overhead.communicator.value * np.array([2, 0]) + overhead.stuck.value * moving
    assert device_overhead(overhead, points, moving) == pytest.approx(told)
    slack = overhead.slack.value - overhead.stuck.value
    assert slack > 0
    assert spare_slack(overhead, moving) == pytest.approx(slack * moving)
    stuck = overhead.model_copy(update={"stuck": overhead.slack, "slack": overhead.stuck})
    assert spare_slack(stuck, moving).tolist() == [0.0, 0.0]
    assert usable(H100.device, overhead) == H100.device.memory.value * (1 - overhead.reserve.value)


def one(model: Any = LLAMA, options: MemoryOptions = PLAIT, precision: Any = "bf16-mixed", /, **row: int) -> Any:
    return step_memory(model, Points.of([{**SYNC, **row}]), sequence=4096, precision=precision, options=options,
                       overhead=H100.overhead)  # fmt: skip


def test_sums_over_kinds() -> None:
    found = one(dp=2)
    tensors = found.parameters + found.gradients + found.optimizer + found.buffers + found.activations
    assert found.allocated == pytest.approx(tensors)
    assert found.total == pytest.approx(tensors + found.overhead)
    assert found.shown == pytest.approx(found.total + found.slack)
    moving = found.activations + found.buffers
    assert found.overhead == pytest.approx(device_overhead(H100.overhead, Points.of([{"dp": 2}]), moving))
    assert found.slack == pytest.approx(spare_slack(H100.overhead, moving))


def test_fp8_computes_with_copies_of_two_bytes() -> None:
    assert one(LLAMA, PLAIT, "fp8").allocated == one().allocated
    assert one(LLAMA, PLAIT, "fp32").parameters == 2 * one().parameters
    u = utransformer(hidden=64, max_sequence=4096)
    assert one(u, PLAIT, "fp8").allocated == one(u).allocated < one(u, PLAIT, "fp32").allocated


ZB_V, INTERLEAVED = SCHEDULES.index("zb-v"), SCHEDULES.index("interleaved")


@pytest.mark.parametrize(
    ("row", "place", "share"),
    [
        ({}, 0, 1), ({"tp": 2}, 0, 1 / 2), ({"cp": 2}, 0, 1 / 2), ({"micro": 3}, 0, 3),
        ({"pp": 4, "dp": 1, "num_micro": 8}, 0, 0),
        ({"pp": 4, "num_micro": 1, "micro": 8}, 3, 8),
        ({"pp": 4, "num_micro": 16, "schedule": ZB_V, "virtual": 2}, 0, 1),
    ],
)  # fmt: skip
def test_logits_are_where_the_loss_is(row: dict[str, int], place: int, share: float) -> None:
    """Of zb-v at the first place."""
    small = replace(LLAMA, num_layers=4 if row.get("micro") == 8 else 32)
    found = one(small, **row)
    assert found.place[0] == place
    assert found.logits[0] == pytest.approx(share * 4096 * 128256 * 6)


def test_logits_that_every_rank_has_whole() -> None:
    told = MemoryOptions(logits_whole=True, logit_bytes=10.0)
    assert one(replace(LLAMA, vocab=128255), told, tp=2).logits[0] == 4096 * 128256 * 10.0
    assert one(replace(LLAMA, vocab=128255), replace(told, logits_whole=False), tp=2).logits[0] == 4096 * 64128 * 10.0


def test_more_stages_than_there_are_layers_never_fit_beside_others_that_do() -> None:
    rows = [{"pp": 2, "num_micro": 2}, {"pp": 64, "num_micro": 64}, {"pp": 32, "num_micro": 32},
            {"pp": 32, "num_micro": 32, "schedule": INTERLEAVED, "virtual": 2},
            {"pp": 16, "num_micro": 32, "schedule": ZB_V, "virtual": 2},
            {"pp": 32, "num_micro": 32, "schedule": ZB_V, "virtual": 2}]  # fmt: skip
    found = step_memory(LLAMA, Points.of([{**SYNC, **row} for row in rows]), sequence=4096)
    assert np.isfinite(found.total).tolist() == [True, False, True, False, True, False]
    assert found.place[1] == 0
    assert found.total[0] == step_memory(LLAMA, Points.of([{**SYNC, **rows[0]}]), sequence=4096).total[0]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", [1, 3, 4])
def test_as_many_micro_batches_as_matter(name: str, pp: int) -> None:
    counts = [1, 2, 5, 8, 12, 15, 16, 40, 41]
    points = Points.of([{"pp": pp, "num_micro": each, "schedule": SCHEDULES.index(name)} for each in counts])
    told = filled(points).tolist()
    assert [enough(name, pp, each) for each in told] == [enough(name, pp, each) for each in counts]
    assert all(one <= other for one, other in zip(told, counts, strict=True))
    assert name == "gpipe" or told[-2] < 40 or (name == "interleaved" and pp == 3)


def test_whether_a_point_fits() -> None:
    points = Points.of([{**SYNC, "dp": 8}, {**SYNC, "dp": 8, "params": 8, "grads": 8, "optim": 8}])
    found = step_memory(LLAMA, points, sequence=4096, options=plait_on(H100.device), overhead=H100.overhead)
    limit = usable(H100.device, H100.overhead)
    assert (found.total <= limit).tolist() == [False, True]
    assert limit == H100.device.memory.value * (1 - H100.overhead.reserve.value)
    assert plait_on(H100.device).gpu and not plait_on(Cluster.preset("lab").device).gpu


def test_places_of_a_pipeline_have_the_states_of_their_stages() -> None:
    """The first of GPT-3's has the embedding and learned positions, and the most micro-batches alive."""
    rows = [{"pp": 2, "num_micro": 8}, {"pp": 5, "num_micro": 8, "tp": 4}]
    found = step_memory(GPT, Points.of([{**SYNC, **row} for row in rows]), sequence=2048)
    assert found.place.tolist() == [0, 0]
    layer = 12 * GPT.hidden**2 + 13 * GPT.hidden
    first = (GPT.vocab + GPT.max_sequence) * GPT.hidden + 20 * layer
    assert found.parameters[0] == pytest.approx(2 * first, rel=1e-3)
    assert found.optimizer[0] == pytest.approx(12 * first, rel=1e-3)
    experts = step_memory(MIXTRAL, Points.of([{**SYNC, "pp": 2, "num_micro": 4, "dp": 8, "ep": 8}]), sequence=4096)
    assert experts.parameters[0] < 2 * MIXTRAL.num_parameters / 2 / 4
