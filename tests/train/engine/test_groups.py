"""Which groups a rank opens, in worlds far larger than any that the suite starts."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.core.model.experts import Experts
from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import ContextSplit, Layout
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Strategy
from plait.core.step.schedules import Shape, generate
from plait.core.step.stages import tie_of
from plait.train.comm.wire import NullWire, Wire
from plait.train.engine import groups
from plait.train.machine.device import RankDevice
from tests.support.models import llama

WORLDS = [64, 1024, 16384]
MODEL = ModelSpec(family="gpt", num_layers=8, hidden=64, num_heads=8, vocab=512, max_sequence=64)


ROUTED = llama(experts=Experts(count=8, per_token=2, balance="dp", balance_loss=0.1))


class Opened:
    """A stand-in for wires: notes who they would connect."""

    def __init__(self) -> None:
        self.groups: list[tuple[int, ...]] = []

    def __call__(self, backend: str, ranks: Sequence[int], *, urgent: bool = False) -> Wire:
        if len(ranks) == 1:
            return NullWire()
        self.groups.append(tuple(ranks))
        return NullWire(len(ranks))


def opened(
    monkeypatch: pytest.MonkeyPatch, rank: int, world: int, optimizer: str = "adamw", model: ModelSpec = MODEL
) -> list[tuple[int, ...]]:
    """The groups of a rank of pp 4, tp 8, cp 2 and the rest dp, sharded over 8, in the order of
    opening."""
    layout = Layout.of(pp=4, dp=world // 64, cp=2, tp=8)
    sharding = Sharding(params=2, grads=2, optim=2)
    of: Any = {
        "layout": layout, "shardings": [sharding] * 4, "schedule": generate("1f1b", Shape(ranks=4, micro_batches=4)),
    }  # fmt: skip
    plan: Any = SimpleNamespace(
        **of,
        model=model,
        strategy=Strategy(tp=8, cp=2, ep=8, whole_experts=optimizer == "sgd"),
        workload=SimpleNamespace(optimizer=optimizer),
        sequence_cut=ContextSplit(cp=2, ring=2),
        tie=lambda rank: tie_of(rank, model=model, **of),
    )
    found = Opened()
    monkeypatch.setattr(groups, "open_wire", found)
    monkeypatch.setattr(groups, "TreeWire", lambda: NullWire(world))
    groups.open_groups(plan, rank, RankDevice(torch.device("cpu")))
    return found.groups


@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_opens_its_own_groups_and_as_many_in_any_world(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    for rank in (0, world // 2 + 3, world - 1):
        found = opened(monkeypatch, rank, world)
        assert all(rank in group for group in found)
        # tp, params, replicas of the shards where there are any, ring; the pipeline's ends: tied
        assert len(found) == 3 + (world > 64) + (rank < world // 4 or rank >= world - world // 4)


@pytest.mark.parametrize("whole", [False, True])
def test_ranks_that_share_experts_open_their_groups_in_one_order(monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    every = [opened(monkeypatch, rank, 512, "sgd" if whole else "adamw", ROUTED) for rank in range(0, 512, 5)]
    for first in every:
        for second in every[::7]:
            shared = [group for group in first if group in second]
            assert shared == [group for group in second if group in first]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_ranks_that_share_groups_open_them_in_one_order(monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
    every = [opened(monkeypatch, rank, 128, optimizer) for rank in range(128)]
    assert max(len(group) for found in every for group in found if len(group) < 128) == (
        32 if optimizer == "muon" else 8
    )
    for first in every:
        for second in every[::7]:
            shared = [group for group in first if group in second]
            assert shared == [group for group in second if group in first]
