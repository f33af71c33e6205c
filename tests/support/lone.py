"""One rank of a strategy, without the others: what they would send is made of this rank's own
numbers, so that shapes are right and values are not."""

from __future__ import annotations

from collections.abc import Sequence

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.orders.overlap import Load
from plait.core.step.segments import Phase
from plait.train.comm.wire import NullWire
from plait.train.engine.executor import RankContext, SegmentExecutor, make_executor
from plait.train.engine.gradients import Gradients
from plait.train.machine.device import RankDevice
from plait.train.model.sequence import SequenceGroup
from plait.train.model.transformer import ModelCut, Transformer


def lone_executor(
    model: ModelSpec,
    strategy: Strategy,
    load: Load,
    device: RankDevice,
    *,
    phases: Sequence[Phase] = ("F", "B"),
    trains: bool = True,
) -> SegmentExecutor:
    """What runs these phases of the rank's part of a model, apart; without ``trains`` it only
    evaluates."""
    group = SequenceGroup(NullWire(strategy.cp // strategy.ring), NullWire(strategy.ring))
    transformer = Transformer(model, strategy, ModelCut(sequence=group))
    return make_executor(
        transformer, strategy, NullWire(strategy.tp), load, RankContext(device),
        gradients=Gradients(transformer) if trains else None, phases=phases,
    )  # fmt: skip
