"""The memory model against torch's own allocator: what a step of the real executor allocates at
most is what the formulas say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from plait.core.model.spec import ModelSpec
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Strategy
from plait.core.step.memory.activations import TracedBatch, activations
from plait.core.step.orders.overlap import Load
from plait.core.step.stages import Stage
from plait.core.step.traffic import unit_sizes
from plait.train.engine.gradients import Gradients
from plait.train.engine.inflight import MicroBatch
from plait.train.engine.optimizer import Optimizer
from plait.train.machine.device import RankDevice
from plait.train.model.transformer import ModelCut, Transformer
from tests.support.held import states_held
from tests.support.lone import lone_executor
from tests.support.models import utransformer

GPT = ModelSpec(family="gpt", num_layers=3, hidden=128, num_heads=8, vocab=96, max_sequence=1024)
LLAMA = ModelSpec(
    family="llama", num_layers=3, hidden=128, num_heads=8, num_kv_heads=4, ffn_hidden=352, vocab=96, max_sequence=1024
)
MODELS = {"gpt": GPT, "llama": LLAMA, "mha": replace(LLAMA, num_kv_heads=8), "block": replace(GPT, parallel_block=True)}
STRATEGIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "one layer": {"recompute": "full", "recompute_layers": 1},
    "tp": {"tp": 2},
    "slices": {"tp": 2, "p1": 2, "p2": 2},
    "sequence parallel": {"tp": 2, "sequence_parallel": True},
    "sequence parallel, slices": {"tp": 2, "sequence_parallel": True, "p1": 2, "p2": 2},
    "sequence parallel, columns": {"tp": 2, "sequence_parallel": True, "p2": 4},
    "sequence parallel, full": {"tp": 2, "sequence_parallel": True, "recompute": "full"},
    "ulysses": {"cp": 2},
    "ring": {"cp": 2, "ring": 2},
    "both": {"cp": 4, "ring": 2},
    "ring, full": {"cp": 2, "ring": 2, "recompute": "full"},
}
TOLERANCE = 0.04
DEVICE = RankDevice(torch.device("cpu"))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_allocates_what_is_predicted(model: str, name: str) -> None:
    """Ranks that are not there fill their part with this rank's numbers: shapes are the same, and
    so is what is allocated."""
    spec, strategy, batch, sequence = MODELS[model], Strategy(**STRATEGIES[name]), 2, 512
    executor = lone_executor(spec, strategy, Load(batch, sequence), DEVICE)
    own = sequence // strategy.cp
    tokens = torch.randint(0, spec.vocab, (batch, own))
    micro = MicroBatch(tokens, tokens, torch.arange(batch), 1.0, 0, torch.arange(own) if strategy.cp > 1 else None)

    def step() -> None:
        state = executor.begin(micro)
        executor.phase("F", state)
        executor.phase("B", state)

    step()  # position tables are made once
    walked = TracedBatch(batch=batch, sequence=sequence, itemsize=4)
    want = activations(spec, strategy, Stage(0, 1, 0, spec.num_layers), walked).peak()
    assert DEVICE.allocated(step).peak == pytest.approx(want, rel=TOLERANCE)


@pytest.mark.parametrize("model", [*MODELS, "u"])
@pytest.mark.parametrize("tp", [1, 2])
def test_states_are_what_is_allocated(model: str, tp: int) -> None:
    u = utransformer()
    spec, strategy = (MODELS | {"u": u})[model], Strategy(tp=tp)
    for index, stage in enumerate(
        [Stage(0, 1, 0, spec.num_layers), Stage(0, 2, 0, 1), Stage(1, 2, 1, spec.num_layers - 1)]
    ):
        sharding = [Sharding(), Sharding(grads=2, optim=4), Sharding(params=2, grads=2, optim=2)][index]
        transformer = Transformer(spec, strategy, ModelCut(stage=stage, sharding=sharding))
        sizes = unit_sizes(spec, strategy, stage, sharding)
        assert sizes == {unit: store.numel for unit, store in transformer.units.items()}
        want, gradients = states_held(sizes, sharding, itemsize=4), Gradients(transformer)
        optimizer = Optimizer(transformer, gradients)
        assert want.parameters == sum(store.kept.numel() * 4 for store in transformer.units.values())
        assert want.gradients == gradients.flat.numel() * 4
        moments = [optimizer.state()[kind] for kind in ("exp_avg", "exp_avg_sq")]
        assert want.optimizer == sum(tensor.numel() * 4 for kind in moments for tensor in kind.values())
