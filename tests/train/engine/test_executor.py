"""What an executor does ahead of a phase."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from plait.core.parallel.strategy import ShardOverlap, Strategy
from plait.core.step.orders.overlap import Load
from plait.core.step.segments import Phase
from plait.core.step.traffic import UnitOp
from plait.train.comm.wire import NullWire
from plait.train.engine.executor import RankContext, make_executor
from plait.train.engine.gradients import Gradients
from plait.train.engine.shards import Shards
from plait.train.machine.device import RankDevice
from plait.train.model.transformer import Transformer
from tests.support.models import gpt


@pytest.mark.parametrize(("overlap", "hides"), [("none", ""), ("forward", "F"), ("backward", "B"), ("both", "FB")])
def test_what_a_phase_reads_first_is_gathered_ahead_where_gathers_are_hidden(overlap: str, hides: str) -> None:
    gathered = list[UnitOp]()
    acts = dict.fromkeys(("gather", "need", "drop", "open", "settle"))
    shards = cast("Shards", SimpleNamespace(gather=gathered.append, acts=acts))
    strategy = Strategy(shard_overlap=cast("ShardOverlap", overlap))
    model = Transformer(gpt(), strategy)
    phases: tuple[Phase, ...] = ("F", "B")
    executor = make_executor(
        model, strategy, NullWire(), Load(1, 8), RankContext(RankDevice(torch.device("cpu"))),
        gradients=Gradients(model), phases=phases, shards=shards,
    )  # fmt: skip
    for phase in phases:
        gathered.clear()
        executor.prefetch(phase)
        assert [op.forward for op in gathered] == [phase == "F"] * (phase in hides)
