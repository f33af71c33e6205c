"""The same executor on a GPU: equal to the reference, recorded by events. Skips where there is no
GPU."""

from __future__ import annotations

import pytest
import torch

from plait.core.parallel.strategy import Strategy
from plait.core.step.orders.overlap import Load
from plait.train.comm.wire import NullWire
from plait.train.engine.executor import RankContext, make_executor
from plait.train.engine.feed import micro_batches
from plait.train.engine.gradients import Gradients
from plait.train.machine.gpu import device_of
from plait.train.model.transformer import Transformer
from plait.train.record.recorder import Recorder
from tests.dist.equality import batch_of, expected
from tests.support.models import llama

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SPEC = llama(hidden=64, ffn_hidden=96, dropout=0.1)


@pytest.mark.parametrize("p1", [1, 2, 4])
def test_one_gpu_equals_the_reference(p1: int) -> None:
    device, want = device_of(0), expected(SPEC)
    model = Transformer(SPEC, Strategy(p1=p1), dtype=torch.float64, device=device.torch_device)
    with torch.no_grad():
        for piece in model.pieces:
            piece.view(model.named[piece.parameter]).copy_(want["start"][piece.name])
    gradients, recorder = Gradients(model), Recorder(device)
    executor = make_executor(
        model,
        Strategy(p1=p1),
        NullWire(),
        Load(4, 8),
        RankContext(device, recorder, seed=7),
        gradients=gradients,
    )
    loss = sum(executor.run(batch).item() for batch in micro_batches(*batch_of(SPEC, 0), 4, 0))
    assert abs(loss / want["loss"] - 1) < 1e-10
    for piece in model.pieces:
        torch.testing.assert_close(
            piece.view(gradients.named[piece.parameter]).cpu(), want["gradients"][piece.name], rtol=1e-9, atol=1e-12
        )
    spans = recorder.take()
    assert spans
    assert all(span.end >= span.start for span in spans)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own use, in its compiler
@pytest.mark.parametrize(("p1", "compile_"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("tp", [1, 2])
def test_captured_it_computes_the_same(p1: int, compile_: bool, tp: int) -> None:
    """Op by op, captured, and replayed twice, every micro-batch with masks of its own step; of two
    ranks one, without the other's part."""
    device = device_of(0)
    found: list[list[torch.Tensor]] = []
    for captured in (False, True):
        strategy = Strategy(tp=tp, p1=p1, compile=compile_, cuda_graphs=captured)
        torch.manual_seed(0)
        model = Transformer(SPEC, strategy, dtype=torch.float64, device=device.torch_device)
        gradients = Gradients(model)
        here = RankContext(device, Recorder(device), seed=7)
        executor = make_executor(model, strategy, NullWire(tp), Load(4, 8), here, gradients=gradients)
        found.append([])
        for step in range(4):
            gradients.zero()
            (batch,) = micro_batches(*batch_of(SPEC, step), 4, step)
            found[-1] += [executor.run(batch), gradients.flat.clone()]
        assert here.recorder and here.recorder.take()
    for eager, graphed in zip(*found, strict=True):
        torch.testing.assert_close(graphed, eager, rtol=1e-10, atol=1e-13)
