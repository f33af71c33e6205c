"""What is measured: layouts, messages, slow-downs, a layer's modules and plain operations on this
machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.core.cluster.hardware import Cluster
from plait.core.model.spec import ModelSpec
from plait.core.reshard.plan import messages
from plait.core.step.seconds import rates
from plait.train.machine.device import RankDevice
from plait.train.profile import compute
from plait.train.profile.collectives import Ends, factors, layouts, transfer
from plait.train.profile.compute import CORES, PASSES, measure_attention, measure_passes, measure_products
from plait.train.profile.measure import measure_modules
from plait.train.tune.timing import Clock, MedianSeconds

CPU = RankDevice(torch.device("cpu"))
SMALL = ModelSpec(family="llama", num_layers=3, hidden=32, num_heads=4, num_kv_heads=2, ffn_hidden=48, vocab=50,
                  max_sequence=16)  # fmt: skip


def clock(seconds: float = 0.0) -> Clock:
    return Clock(CPU, time.monotonic() + seconds)


@given(st.integers(1, 8), st.integers(1, 6), st.integers(0, 3))
def test_layouts_cover_everybody_once_and_stay_where_they_say(per_node: int, nodes: int, minipod: int) -> None:
    world = per_node * nodes
    found = layouts(world, per_node, minipod)
    assert bool(found) == (world > 1)
    for layout in found:
        assert sorted(rank for group in layout.groups for rank in group) == list(range(world))
        for group in layout.groups:
            assert len({rank // per_node for rank in group}) == layout.group.nodes
            assert {b - a for a, b in pairwise(group)} == {layout.group.stride}
    assert len({(one.group.ranks, one.group.stride) for one in found}) == len(found)
    if world > 1:
        assert any(one.group.ranks == world for one in found)


def test_layouts_of_two_minipods() -> None:
    shapes = [(one.group.ranks, one.group.stride, one.group.minipods) for one in layouts(32, 4, 4)]
    assert shapes == [(2, 1, 1), (4, 1, 1), (2, 4, 1), (4, 4, 1), (16, 1, 1), (2, 16, 2), (32, 1, 2)]


@pytest.mark.parametrize("kind", ["send", "broadcast"])
def test_messages_bring_everything_to_everybody(kind: str) -> None:
    """Every receiver gets all bytes of its own group, no rank sends what it has not."""
    groups, size = ((0, 2), (1, 3)) if kind == "send" else ((0, 2, 4), (1, 3, 5)), 10_000_000
    plan = transfer(kind, groups, size, 6, 2)  # type: ignore[arg-type]
    got: dict[int, int] = {}
    for message in messages(plan):
        got[message.dst] = got.get(message.dst, 0) + message.stop - message.start
        assert any({message.src, message.dst} <= set(group) for group in groups)
    assert got == {rank: size for group in groups for rank in group[1:]}


@given(st.floats(0.5, 2), st.floats(0.5, 2), st.floats(1, 3), st.floats(1, 3))
def test_slow_downs_are_found_from_the_ends(compute: float, sent: float, k_c: float, k_m: float) -> None:
    """What ``rates.together`` predicts from both factors gives them back."""
    cluster = Cluster.preset("lab")
    slow = {
        name: getattr(cluster.efficiency, name).model_copy(update={"value": value})
        for name, value in (("slow_computation", k_c), ("slow_communication", k_m))
    }
    cluster = cluster.model_copy(update={"efficiency": cluster.efficiency.model_copy(update=slow)})
    last = float(rates.overlapped(cluster, compute, sent))
    first = min(compute * k_c, sent * k_m)
    ends = Ends(last, first) if compute * k_c >= sent * k_m else Ends(first, last)
    assert factors(Ends(compute, sent), ends) == pytest.approx((k_c, k_m), rel=1e-6)


def test_products_attention_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CORES, "cpu", ((2, 16, 8),))  # type: ignore[misc]
    monkeypatch.setitem(PASSES, "cpu", (1 << 16,))  # type: ignore[misc]
    said: list[str] = []
    products = measure_products(CPU, "fp32", SMALL, clock(), said.append)
    assert len(products) == 15 + 8
    assert all(1e6 < one.rate < 1e13 for one in products)
    assert len(said) == len(products)
    large, small = (
        max(products, key=lambda one: one.m * one.k * one.n),
        min(products, key=lambda one: one.m * one.k * one.n),
    )
    assert large.seconds > small.seconds
    forward, backward = measure_attention(CPU, "fp32", clock(), said.append)
    assert (forward.backward, backward.backward) == (False, True)
    (moved,) = measure_passes(CPU, clock(), said.append)
    assert moved.bytes == 3 << 16


@pytest.mark.parametrize("parallel_block", [False, True])
def test_every_module_and_phase_of_a_layer(parallel_block: bool) -> None:
    spec = replace(SMALL, parallel_block=parallel_block)
    found = {(one.site, one.phase): one for one in measure_modules(CPU, spec, 2, "fp32", None, clock())}
    inner = ("block",) if parallel_block else ("attn", "mlp")
    phases = ("forward", "input gradient", "weight gradient")
    wanted = {(site, phase) for site in (*inner, "head") for phase in phases}
    wanted |= {("norm", "forward"), ("norm", "input gradient"), ("embed", "forward"), ("embed", "weight gradient")}
    assert set(found) == wanted
    assert all(one.seconds > 0 for one in found.values())
    one = found[inner[0], "forward"]
    assert (one.hidden, one.kv_heads, one.batch, one.sequence, one.tp) == (32, 2, 2, 16, 1)


def test_a_u_transformers_layer_is_gpts() -> None:
    spec = ModelSpec(family="utransformer", num_layers=3, levels=1, hidden=16, num_heads=2, vocab=50, max_sequence=8)
    assert {one.family for one in measure_modules(CPU, spec, 1, "fp32", None, clock())} == {"gpt"}


class Budgets(Clock):
    """A clock with so many seconds left, which notes what it is given to spend."""

    def __init__(self, left: float) -> None:
        self.seconds, self.given = left, list[float]()

    def left(self) -> float:
        return self.seconds

    def sample(self, run: Callable[[], object], budget: float, *, together: bool) -> MedianSeconds:
        assert not together
        run()
        self.given.append(budget)
        self.seconds -= budget
        return MedianSeconds(0.5, 0.25)


def test_products_have_time_by_what_they_compute_and_a_little_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "TOKENS", {"cpu": (8, 16)})
    monkeypatch.setattr(compute, "WEIGHTS", {"cpu": ((4, 4), (8, 8))})
    said, budgets = list[str](), Budgets(10.0)
    found = measure_products(CPU, "fp32", None, budgets, said.append)  # type: ignore[arg-type]
    assert [(one.m, one.k, one.n) for one in found] == [(8, 4, 4), (16, 4, 4), (8, 8, 8), (16, 8, 8)]
    assert budgets.given == pytest.approx([10 / 15, 20 / 15, 40 / 15, 80 / 15])
    assert {(one.seconds, one.spread, one.precision) for one in found} == {(0.5, 0.25, "fp32")}
    assert said == ["product 8 x 4 x 4", "product 16 x 4 x 4", "product 8 x 8 x 8", "product 16 x 8 x 8"]
    late = Budgets(0.0)
    measure_products(CPU, "fp32", None, late, said.append)  # type: ignore[arg-type]
    assert late.given == [0.05] * 4


def test_a_models_own_products_are_measured_but_of_the_fewest_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "TOKENS", {"cpu": (8, 16)})
    monkeypatch.setattr(compute, "WEIGHTS", {"cpu": ((32, 32),)})
    found = measure_products(CPU, "fp32", SMALL, Budgets(1.0), lambda _: None)  # type: ignore[arg-type]
    own = {(16, 32, 64), (16, 32, 32), (16, 32, 96), (16, 48, 32)}
    assert {(one.m, one.k, one.n) for one in found} == {(8, 32, 32), *own}
    assert len(found) == 5, "none twice"


def test_attention_and_memory_share_what_is_left_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "CORES", {"cpu": ((2, 4, 8), (1, 2, 4))})
    monkeypatch.setattr(compute, "PASSES", {"cpu": (1 << 20, 1 << 21)})
    said, budgets = list[str](), Budgets(8.0)
    found = measure_attention(CPU, "fp32", budgets, said.append)  # type: ignore[arg-type]
    assert budgets.given == [2.0, 2.0, 2.0, 2.0]
    assert [(one.heads, one.queries, one.keys, one.head_size, one.backward) for one in found] == [
        (2, 4, 4, 8, False), (2, 4, 4, 8, True), (1, 2, 2, 4, False), (1, 2, 2, 4, True),
    ]  # fmt: skip
    passes = measure_passes(CPU, memory := Budgets(8.0), said.append)  # type: ignore[arg-type]
    assert memory.given == [4.0, 4.0]
    assert [(one.bytes, one.seconds) for one in passes] == [(3 << 20, 0.5), (6 << 20, 0.5)]
    assert said == ["attention, 2 heads, 4 tokens", "attention, 1 heads, 2 tokens", "memory, 3 MiB", "memory, 6 MiB"]
