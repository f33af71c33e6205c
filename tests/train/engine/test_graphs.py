"""A stage that captures its computation gives what one gives that does not, also of what other
stages send; ``capturing`` captures without a GPU. More in ``tests/dist``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from plait.core.model.spec import ModelSpec
from plait.core.parallel.sharding import Unit
from plait.core.parallel.strategy import Strategy
from plait.core.step.orders.overlap import Load
from plait.core.step.stages import split_layers
from plait.train.comm.wire import NullWire
from plait.train.engine.executor import RankContext, SegmentExecutor, make_executor
from plait.train.engine.gradients import Gradients
from plait.train.engine.graphs import GraphedExecutor, GraphSlot
from plait.train.engine.inflight import MicroBatch
from plait.train.machine.device import RankDevice
from plait.train.model.transformer import ModelCut, Transformer
from tests.support.capturing import CapturingDevice
from tests.support.models import gpt, llama

ROWS, SEQUENCE = 2, 8
BATCHES = 5


def stage(spec: ModelSpec, index: int, device: RankDevice) -> tuple[SegmentExecutor, Gradients]:
    strategy = Strategy(cuda_graphs=device.captures)
    model = Transformer(spec, strategy, ModelCut(stage=split_layers(spec.num_layers, 3)[index]), seed=3)
    gradients = Gradients(model)
    executor = make_executor(
        model, strategy, NullWire(), Load(ROWS, SEQUENCE), RankContext(device), gradients=gradients, phases=("F", "B")
    )
    assert isinstance(executor, GraphedExecutor) == device.captures
    return executor, gradients


def results(spec: ModelSpec, index: int, device: RankDevice) -> tuple[list[dict[str, Tensor]], dict[Unit, Tensor]]:
    """What leaves the stage of each micro-batch, both ways, and the gradients of its weights."""
    executor, gradients = stage(spec, index, device)
    chance = torch.Generator().manual_seed(11)
    found = list[dict[str, Tensor]]()
    for number in range(BATCHES):
        tokens = torch.randint(0, spec.vocab, (ROWS, SEQUENCE), generator=chance)
        entering, returning = (torch.randn(SEQUENCE, ROWS, spec.hidden, generator=chance) for _ in range(2))
        batch = MicroBatch(tokens, tokens, torch.arange(ROWS), 0.1 + number, 0)
        state = executor.begin(batch, {"h": entering} if index else None)
        assert isinstance(state, GraphSlot) == (device.captures and number > 0), "the first warms up"
        executor.phase("F", state)
        crossing = state.crossing
        found.append({f"leaving {name}": tensor for name, tensor in crossing.leaving.items()})
        crossing.leaving = {}
        crossing.returning = {} if index == 2 else {"h": returning}
        executor.phase("B", state, last=number == BATCHES - 1)
        found[-1] |= {f"gradient {name}": tensor for name, tensor in crossing.gradient.items()}
        crossing.returning, crossing.gradient, crossing.entering = {}, {}, {}
        executor.step_ended()
    return found, dict(gradients.final)


@pytest.mark.parametrize("index", range(3), ids=["first", "middle", "last"])
@pytest.mark.parametrize("spec", [gpt(num_layers=3), llama(num_layers=3)], ids=["gpt", "llama"])
def test_what_enters_and_leaves_a_stage_is_that_of_its_own_micro_batch(spec: ModelSpec, index: int) -> None:
    wanted, weights = results(spec, index, RankDevice(torch.device("cpu")))
    device = CapturingDevice()
    found, own = results(spec, index, device)
    assert device.replayed > device.captured > 0
    names = {0: {"leaving h"}, 1: {"leaving h", "gradient h"}, 2: {"gradient h"}}[index]
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert set(one) == set(other) == names
        for name in names:
            assert torch.allclose(one[name], other[name], atol=1e-6), f"{name} of micro-batch {number}"
    assert set(own) == set(weights) and weights
    for name, gradient in weights.items():
        assert gradient.any() and torch.allclose(own[name], gradient, atol=1e-5), name
