"""The GPU's benchmark on tiny models of a CPU: that it runs, not what it says of speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gpu import CASES, SHARES, SLICED, TINY, TP, Rates, batch_of, shape_of, sliced, whole
from modelled_wire import ModelledWire

from plait.core.cluster.mfu import dense_peak, known_device
from plait.core.parallel.strategy import Strategy
from plait.core.step.orders.overlap import Load
from plait.train.comm.wire import NullWire
from plait.train.engine.executor import RankContext, make_executor
from plait.train.engine.gradients import Gradients
from plait.train.machine.gpu import device_of
from plait.train.model.transformer import Transformer

CPU, ROOT = device_of(None), Path(__file__).parents[1]


@pytest.mark.parametrize("name", CASES)
def test_every_order_runs_beside_the_modelled_link(name: str) -> None:
    found = sliced(shape_of(name, TINY, tiny=True), TINY, CPU, SHARES[0], 1)
    assert list(found["rows"]) == list(SLICED)
    assert all(row["seconds"] > 0 for row in found["rows"].values())
    assert found["communication"] > 0


def test_the_modelled_link_changes_no_number() -> None:
    spec, strategy = shape_of("llama3-8b", TINY, tiny=True), Strategy(tp=TP, p1=2)
    found: list[dict[str, torch.Tensor]] = []
    for wire in (NullWire(TP), ModelledWire(CPU, TP, lambda nbytes: 1e-3)):
        model = Transformer(spec, strategy)
        gradients = Gradients(model)
        load = Load(TINY.batch, TINY.sequence)
        make_executor(model, strategy, wire, load, RankContext(CPU), gradients=gradients).run(batch_of(spec, TINY))
        found.append(dict(gradients.named))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.contract
@pytest.mark.parametrize("name", CASES)
def test_both_models_are_one(name: str) -> None:
    """It ends the benchmark if their losses differ."""
    found = whole(shape_of(name, TINY, tiny=True), TINY, CPU, Rates(None, 1e9), 1)
    assert set(found["rows"]) == {"plait", "transformers", "transformers compiled"}


def test_kept_shares_follow_from_kept_seconds() -> None:
    kept = json.loads((ROOT / "benchmarks" / "results" / "gpu.json").read_text())
    rates = Rates(kept["peak_flops"], kept["matmul_rate"])
    assert rates.peak_flops == dense_peak(known_device(kept["device"]), "bf16-mixed")
    for name, found in kept["cases"].items():
        spec = shape_of(name, CASES[name], tiny=False)
        for row in found["whole"]["rows"].values():
            assert rates.row(spec, CASES[name], row["seconds"]) == pytest.approx(row)
