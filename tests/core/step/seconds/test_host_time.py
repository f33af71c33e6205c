"""A late host in closed form against a walk of ops one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.env import specs_folder
from plait.core.model.spec import ModelSpec
from plait.core.step.columns.points import RECOMPUTES, SCHEDULES
from plait.core.step.columns.shapes import Options
from plait.core.step.ops import AGAIN_KINDS, FORWARD_KINDS, Kind
from plait.core.step.seconds.layer_sums import BACKWARD_ROWS, FORWARD_ROWS, LaunchLag
from tests.plan.layers import BF16, DOMINO, LLAMA, MIXTRAL, SYNC, layer
from tests.plan.machines import cluster

Op = tuple[float, float]
"""Seconds in which the host launches it, and in which it runs."""
seconds = st.floats(0, 10)
lists = st.lists(st.tuples(seconds, seconds), max_size=8)


def walk(ops: list[Op]) -> tuple[float, float]:
    """By how much the host is late after all of them, and what they wait in all: each is launched
    before it runs, and begins when the one before it ends."""
    launched = free = waited = 0.0
    for launch, busy in ops:
        launched += launch
        begins = max(free, launched)
        waited += begins - free
        free = begins + busy
    return sum(launch - busy for launch, busy in ops), waited


def late(ops: list[Op]) -> LaunchLag:
    """One after the other."""
    found = LaunchLag()
    for launch, busy in ops:
        found = found.then(LaunchLag.of(launch, busy))
    return found


def same(found: LaunchLag, ops: list[Op]) -> None:
    assert tuple(found) == pytest.approx(walk(ops), abs=1e-9)


@given(lists, st.floats(0, 1))
def test_a_part_of_a_list_waits_for_as_much_of_it(ops: list[Op], part: float) -> None:
    """As a stage has of layers, on average, where pp ranks have more than there are."""
    net, waited = walk(ops)
    assert tuple(late(ops).times(part)) == pytest.approx((part * net, part * waited), abs=1e-9)


@given(seconds, seconds, st.integers(1, 6))
def test_an_op_in_equal_parts(launch: float, busy: float, parts: int) -> None:
    same(LaunchLag.of(launch, busy, parts), [(launch / parts, busy / parts)] * parts)


@given(lists, lists, st.integers(1, 4), st.integers(1, 4))
def test_a_pause_for_the_host_and_lists_within_lists(some: list[Op], others: list[Op], inner: int, outer: int) -> None:
    """Something that runs without being launched gives the host time."""
    found = late(some).times(inner).then(LaunchLag(-3.0)).then(late(others)).times(outer)
    same(found, (some * inner + [(0.0, 3.0)] + others) * outer)


def test_columns_are_each_of_their_numbers() -> None:
    chance = np.random.default_rng(1)
    launches, runs = chance.uniform(0, 2, (2, 5, 20))
    found = late(list(zip(launches, runs, strict=True))).times(np.arange(1, 21))
    for at, (net, most) in enumerate(zip(*found, strict=True)):
        same(LaunchLag(net, most), list(zip(launches[:, at], runs[:, at], strict=True)) * (at + 1))


@pytest.mark.parametrize("host", [0.0, 1e-5, 1e-3, 1e-1])
@pytest.mark.parametrize("row", [{}, {"p1": 2, "micro": 2}, {"tp": 2}, {"tp": 4, "p2": 2, "cp": 2}], ids=str)
@pytest.mark.parametrize("overlap", [SYNC, DOMINO])
def test_a_layers_list_is_walked_op_by_op(row: dict[str, int], host: float, overlap: dict[str, int]) -> None:
    """Both directions, beside collectives, which follow their ops, and beside none."""
    one: Any = layer(LLAMA, None, BF16, cluster(host_layer=host, host_collective=host / 5), **row, **overlap)
    for phase, wanted in (("F", True), ("B", False)):
        for sends in (1, 0):
            same(one.sums.late[phase][1 - sends], ops_of(one, host, forward=wanted, sends=sends))


RECOMPUTING = [{"recompute": at} for at in range(1, len(RECOMPUTES))]
AXES = [
    {}, {"tp": 2}, {"cp": 2}, {"tp": 2, "cp": 4, "ring": 2}, {"tp": 2, "sequence_parallel": 1}, {"p1": 2, "micro": 2},
]  # fmt: skip


@pytest.mark.parametrize("host", [1e-4, 1e-3, 3e-3, 1e-2])
@pytest.mark.parametrize("row", AXES, ids=str)
@pytest.mark.parametrize("again", [{}, *RECOMPUTING], ids=lambda row: RECOMPUTES[row.get("recompute", 0)])
def test_a_backward_is_walked_with_what_is_computed_again(
    again: dict[str, int], row: dict[str, int], host: float
) -> None:
    """Where every collective is waited for. What is computed again adds to what a layer without it
    has."""
    one: Any = layer(LLAMA, None, BF16, cluster(host_layer=host, host_collective=host / 5), **row, **again, **SYNC)
    plain = walk(ops_of(one, host, forward=False, sends=1, again=False))
    whole = walk(ops_of(one, host, forward=False, sends=1))
    assert both(one.late_backward, one.lead_backward) == pytest.approx(plain, abs=1e-12)
    assert both(one.late_again, one.lead_again) == pytest.approx(tuple(np.subtract(whole, plain)), abs=1e-12)


@pytest.mark.parametrize("host", [1e-4, 3e-3, 1e-2])
@pytest.mark.parametrize("row", [{}, {"tp": 2}, {"tp": 2, "cp": 2}], ids=str)
@pytest.mark.parametrize("again", [{}, *RECOMPUTING], ids=lambda row: RECOMPUTES[row.get("recompute", 0)])
def test_weight_gradients_may_be_a_list_of_their_own(again: dict[str, int], row: dict[str, int], host: float) -> None:
    """With the host of their own, which a list of input gradients is without."""
    machine, schedule = cluster(host_layer=host, host_collective=host / 5), SCHEDULES.index("zb-h1")
    one: Any = layer(LLAMA, None, BF16, machine, schedule=schedule, **row, **again, **SYNC)
    weights = walk(ops_of(one, host, forward=False, sends=1, wanted=lambda kind: kind == Kind.WGRAD))
    inputs = walk(ops_of(one, host, forward=False, sends=1, again=False, wanted=lambda kind: kind != Kind.WGRAD))
    assert both(one.late_weights, one.lead_weights) == pytest.approx(weights, abs=1e-12)
    assert both(one.late_backward - one.late_weights, one.lead_backward) == pytest.approx(inputs, abs=1e-12)


LATENT = ModelSpec.preset("deepseek-v3", specs_folder() / "models")


@pytest.mark.parametrize("host", [1e-3, 1e-1])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(("model", "lists"), [(MIXTRAL, True), (LATENT, True), (LLAMA, False)])
def test_what_no_list_has_waits_for_what_the_host_is_late_in_all(
    model: ModelSpec, lists: bool, schedule: str, host: float
) -> None:
    """Experts and latent attention, and frameworks that launch ahead: nothing begins anew."""
    row = {"tp": 2, "recompute": RECOMPUTES.index("full"), "schedule": SCHEDULES.index(schedule)}
    machine = cluster(host_layer=host, host_collective=host / 5)
    one: Any = layer(model, Options(in_lists=lists), BF16, machine, **row)
    forward, backward, again = (float(late[0]) for late in (one.late_forward, one.late_backward, one.late_again))
    assert float(one.lead_forward[0]) == pytest.approx(max(0.0, forward))
    assert float(one.lead_backward[0]) == pytest.approx(max(0.0, backward))
    whole = max(0.0, backward + again)
    assert float(one.lead_backward[0] + one.lead_again[0]) == pytest.approx(whole)
    assert both(one.late_weights, one.lead_weights) == (0.0, 0.0)


def both(net: Any, most: Any) -> tuple[float, float]:
    return float(net[0]), float(most[0])


def ops_of(
    one: Any, host: float, *, forward: bool, sends: int, again: bool = True,
    wanted: Callable[[Kind], bool] = lambda _: True,
) -> list[Op]:  # fmt: skip
    """Ops and collectives of a layer as one rank runs them: sublayer by sublayer, slice by slice.
    again: with what is computed again, which is launched as a forward is."""
    ((_, priced),) = one.structures()
    slices, found = int(one.points.p1[0]), list[Op]()
    for site in ("attn", "mlp") if forward else ("mlp", "attn"):
        kinds = [kind for kind in priced.graph.kinds(site, 0) if (kind in FORWARD_KINDS) == forward and wanted(kind)]
        for kind in [kind for kind in kinds if again or kind not in AGAIN_KINDS] * slices:
            row = host / (FORWARD_ROWS if forward or kind in AGAIN_KINDS else BACKWARD_ROWS)
            work = priced.compute(site, kind)
            parts, calls, sent = (float(np.max(part(site, kind))) for part in (priced.parts, priced.calls, priced.sent))
            launches, busy = float(np.max(work.launches)), float(np.max(work.seconds))
            found += [(row * launches / slices / parts, busy / slices / parts)] * int(parts)
            found.append((host / 5 * calls / slices, sends * sent / slices))
    return found
