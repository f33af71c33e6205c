"""A whole profile of ranks that are threads, in as little time as it takes. More in
``tests/dist``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from plait.core.base.env import RankEnv
from plait.core.cluster.profile import Profile
from plait.core.model.spec import ModelSpec
from plait.train.profile import collectives, compute
from plait.train.profile.measure import MeasureRequest, machine_of, measure_profile
from tests.dist.equality import DEVICE
from tests.support.models import gpt
from tests.support.threads import threads

MODEL = ModelSpec(family="gpt", num_layers=4, hidden=64, num_heads=4, vocab=100, max_sequence=32)


@contextmanager
def small() -> Iterator[None]:
    """Few shapes meanwhile, none of them large."""
    with (
        mock.patch.object(compute, "TOKENS", {"cpu": (16, 64)}),
        mock.patch.object(compute, "CORES", {"cpu": ((2, 32, 16),)}),
        mock.patch.object(compute, "PASSES", {"cpu": (1 << 18,)}),
        mock.patch.object(collectives, "LARGEST", {"gloo": 1 << 20}),
    ):
        yield


def of_rank(rank: int, world: int, per_node: int, order: dict[str, Any]) -> tuple[Profile, list[str]]:
    """What a rank has found and said."""
    said: list[str] = []
    env = RankEnv(rank=rank, world_size=world, local_rank=rank % per_node, local_world_size=per_node)
    wanted = MeasureRequest(**{"seconds": 0.0, "model": MODEL, "batch": 2, **order})
    deadline = time.monotonic() + wanted.seconds
    return measure_profile(wanted, env, DEVICE, deadline=deadline, cores=2, say=said.append), said


def measured(world: int, per_node: int, **order: Any) -> tuple[Profile, list[str]]:
    """What all ranks have found, and what rank 0 said."""
    with small():
        (first, said), *others = threads(world).run(of_rank, world, per_node, order)
    for other, _ in others:
        assert (other.collectives, other.overlaps) == (first.collectives, first.overlaps)
    return first, said


def test_ranks_measure_what_they_share() -> None:
    found, said = measured(4, 2)
    assert {one.group.stride for one in found.collectives} == {1, 2}
    assert all(len(curve.points) == collectives.ALWAYS for curve in found.collectives), "there is no time for more"
    sizes = [[point.bytes for point in curve.points] for curve in found.collectives]
    assert all(first >= collectives.SMALLEST and second >= first * 2 for first, second, *_ in sizes)
    kinds = {one.kind for one in found.collectives}
    assert kinds == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"}
    assert {one.group.ranks for one in found.collectives if one.kind == "send"} == {2}
    assert {one.tp for one in found.modules} == {1, 2}
    assert {(one.kind, one.group.stride) for one in found.overlaps} == {
        (kind, stride) for kind in ("all_reduce", "all_gather") for stride in (1, 2)
    }
    assert (found.machine.ranks, found.machine.ranks_per_node, found.machine.backend) == (4, 2, "gloo")
    assert found.machine.crowd == 1.0
    assert any("all_reduce beside products" in line for line in said)


def test_one_rank_has_no_collectives() -> None:
    found, _ = measured(1, 1)
    assert not found.collectives and not found.overlaps and {one.tp for one in found.modules} == {1}
    assert found.products and found.attention and found.passes
    assert {one.precision for one in found.products} == {"fp32"}


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_what_a_job_computes_in_is_measured(precision: str) -> None:
    found, _ = measured(1, 1, precision=precision)
    parts = (found.products, found.attention, found.modules)
    assert [{one.precision for one in part} for part in parts] == [{precision}] * 3


def test_a_model_that_cannot_be_cut_is_measured_whole() -> None:
    found, _ = measured(2, 2, model=gpt(num_heads=1))
    assert {one.tp for one in found.modules} == {1}


def test_a_layer_without_room_is_left_out_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(DEVICE), "memory", 16 * 1000)
    found, said = measured(1, 1)
    assert not found.modules
    assert "a layer of this model does not fit on a device; its modules are not measured" in said


@pytest.mark.parametrize(
    ("local", "lab", "cores", "crowd"), [(2, "", 2, 1.0), (8, "", 2, 4.0), (1, "", 8, 1.0), (2, "l", 4, 2.0)]
)
def test_ranks_that_want_the_same_core(local: int, lab: str, cores: int, crowd: float) -> None:
    """Of a lab's eight ranks all are on this machine."""
    rank = RankEnv(rank=0, world_size=8, local_rank=0, local_world_size=local, lab=lab)
    assert machine_of(rank, DEVICE, cores).crowd == crowd
