"""The optimizer is torch's AdamW class, bit for bit: which numbers decay, clipping, masters of a
half-precision model, going on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.core.job.settings import MuonSection, SgdSection, TrainSection
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.train.engine.gradients import Gradients
from plait.train.engine.optimizer import LearningRate, Optimizer
from plait.train.model.transformer import Transformer
from tests.support.models import gpt, llama

GPT = gpt()
LLAMA = llama()
SETTINGS: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8}


def make(spec: ModelSpec, dtype: torch.dtype, train: TrainSection | None = None) -> Optimizer:
    torch.manual_seed(3)
    model = Transformer(spec, Strategy(), dtype=dtype)
    for parameter in model.named.values():
        torch.nn.init.normal_(parameter)
    gradients = Gradients(model)
    return Optimizer(model, gradients, train)


def fill(optimizer: Optimizer, seed: int) -> float:
    """Gradients of this seed; their norm."""
    optimizer.gradients.flat.copy_(
        torch.randn(optimizer.gradients.flat.shape, generator=torch.Generator().manual_seed(seed))
    )
    return optimizer.gradients.flat.norm().item()


def weights(optimizer: Optimizer) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in optimizer.model.named.items()}


@pytest.mark.parametrize("spec", [GPT, LLAMA], ids=lambda spec: spec.family)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_it_is_torchs_adamw(spec: ModelSpec, dtype: torch.dtype, clip: float) -> None:
    optimizer = make(spec, dtype)
    master = optimizer.gradients.dtype
    theirs = {name: parameter.to(master, copy=True) for name, parameter in weights(optimizer).items()}
    decayed, kept = ([w for w in theirs.values() if (w.ndim > 1) is matrix] for matrix in (True, False))
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, fused=True, **SETTINGS)
    for step, rate in enumerate((1e-2, 5e-3, 1e-3)):
        norm = fill(optimizer, step)
        for name, w in theirs.items():
            w.grad = optimizer.gradients.named[name].clone() * (clip / norm if clip else 1.0)
        for group in adamw.param_groups:
            group["lr"] = rate
        optimizer.step(rate, norm=norm, clip=clip)
        adamw.step()
    for name, found in weights(optimizer).items():
        assert torch.equal(found, theirs[name].to(dtype)), name


@pytest.mark.parametrize("spec", [GPT, LLAMA], ids=lambda spec: spec.family)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_it_is_torchs_muon(spec: ModelSpec, dtype: torch.dtype, adjust: Any) -> None:
    """Bit for bit, orthogonalised in bf16: queries, keys, values, gate and up each by itself, and
    AdamW of the rest; with a decay of their own of some."""
    decays = {"embedding.*": 0.0, "*.v.weight": 0.3}
    train = TrainSection(optimizer="muon", muon=MuonSection(adjust_lr=adjust), weight_decay_of=decays)
    optimizer = make(spec, dtype, train)
    named = optimizer.model.named
    theirs = {piece.name: piece.view(named[piece.parameter]).detach().to(optimizer.gradients.dtype, copy=True)
              for piece in optimizer.model.pieces}  # fmt: skip
    groups: dict[str, list[dict[str, Any]]] = {"muon": [], "adamw": []}
    for name, w in theirs.items():
        kind = "muon" if name.startswith("layers") and w.ndim == 2 else "adamw"
        groups[kind].append({"params": [w], "weight_decay": train.decay_of(name, w.ndim)})
    assert len(groups["muon"]) == spec.num_layers * (7 if spec.family == "llama" else 6)
    both = [
        torch.optim.Muon(groups["muon"], lr=1e-2, momentum=0.95, adjust_lr_fn=adjust),
        torch.optim.AdamW(groups["adamw"], lr=1e-2, fused=True, **SETTINGS),
    ]
    for step in range(3):
        norm = fill(optimizer, step)
        for piece in optimizer.model.pieces:
            view = piece.view(optimizer.gradients.named[piece.parameter])
            theirs[piece.name].grad = view.clone() * (0.5 / norm)
        optimizer.step(1e-2, norm=norm, clip=0.5)
        for each in both:
            each.step()
    for piece in optimizer.model.pieces:
        found = piece.view(named[piece.parameter])
        assert torch.equal(found, theirs[piece.name].to(dtype)), piece.name


@pytest.mark.parametrize("nesterov", [False, True])
def test_it_is_torchs_sgd(nesterov: bool) -> None:
    optimizer = make(GPT, torch.float32, TrainSection(optimizer="sgd", sgd=SgdSection(nesterov=nesterov)))
    theirs = weights(optimizer)
    groups = [{"params": [w], "weight_decay": 0.1 if w.ndim > 1 else 0.0} for w in theirs.values()]
    sgd = torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=nesterov)
    for step in range(3):
        norm = fill(optimizer, step)
        for name, w in theirs.items():
            w.grad = optimizer.gradients.named[name].clone()
        optimizer.step(1e-2, norm=norm, clip=0.0)
        sgd.step()
    assert all(torch.equal(found, theirs[name]) for name, found in weights(optimizer).items())


def test_it_goes_on_where_a_checkpoint_was_made() -> None:
    straight, first, second = make(GPT, torch.bfloat16), make(GPT, torch.bfloat16), make(GPT, torch.bfloat16)
    for step in range(4):
        straight.step(1e-2, norm=fill(straight, step), clip=1.0)
    for step in range(2):
        first.step(1e-2, norm=fill(first, step), clip=1.0)
    kept = {kind: {key: tensor.clone() for key, tensor in tensors.items()} for kind, tensors in first.state().items()}
    for kind, tensors in second.state().items():
        for key, tensor in tensors.items():
            tensor.copy_(kept[kind][key])
    second.loaded(2)
    assert all(torch.equal(found, weights(first)[name]) for name, found in weights(second).items())
    for step in (2, 3):
        second.step(1e-2, norm=fill(second, step), clip=1.0)
    assert all(torch.equal(found, weights(straight)[name]) for name, found in weights(second).items())


def test_updates_left_out_are_not_counted_also_after_a_checkpoint() -> None:
    straight, resumed = make(GPT, torch.float32), make(GPT, torch.float32)
    for step in range(3):
        norm = fill(straight, step)
        if step == 1:
            straight.skip()
        else:
            straight.step(1e-2, norm=norm, clip=1.0)
    kept = straight.state()
    for kind, tensors in resumed.state().items():
        for key, tensor in tensors.items():
            tensor.copy_(kept[kind][key])
    resumed.loaded(3, skipped=straight.skipped)
    for optimizer in (straight, resumed):
        optimizer.step(1e-2, norm=fill(optimizer, 3), clip=1.0)
    assert all(torch.equal(found, weights(straight)[name]) for name, found in weights(resumed).items())
    assert (resumed.skipped, {float(run.updates) for runs in resumed.runs.values() for run in runs}) == (1, {3.0})


def test_gradients_below_the_limit_are_left_alone() -> None:
    clipped, free = make(GPT, torch.float32), make(GPT, torch.float32)
    norm = fill(clipped, 0)
    fill(free, 0)
    clipped.step(1e-2, norm=norm, clip=2 * norm)
    free.step(1e-2, norm=norm, clip=0.0)
    assert all(torch.equal(found, weights(free)[name]) for name, found in weights(clipped).items())


@pytest.mark.parametrize(("step", "rate"), [(0, 0.1), (9, 1.0), (10, 1.0), (60, 0.6), (110, 0.2), (500, 0.2)])
def test_learning_rate(step: int, rate: float) -> None:
    """Warm-up to the peak, half a cosine to the floor, the floor from there on."""
    schedule = LearningRate(peak=1.0, floor=0.2, warmup=10, steps=110)
    assert schedule(step) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("step", "rate"), [(4, 0.5), (10, 1.0), (89, 1.0), (90, 1.0), (100, 0.6), (110, 0.2), (500, 0.2)]
)
def test_warm_up_stable_decay(step: int, rate: float) -> None:
    schedule = LearningRate(peak=1.0, floor=0.2, warmup=10, steps=110, style="wsd", decay=20)
    assert schedule(step) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("style", "step", "rate"),
    [
        ("constant", 9, 1.0), ("constant", 109, 1.0), ("linear", 10, 1.0), ("linear", 60, 0.6), ("linear", 110, 0.2),
        ("linear", 500, 0.2), ("inverse-square-root", 9, 1.0), ("inverse-square-root", 39, 0.5),
        ("inverse-square-root", 10_000, 0.2),
    ],
)  # fmt: skip
def test_other_schedules(style: str, step: int, rate: float) -> None:
    schedule = LearningRate(peak=1.0, floor=0.2, warmup=10, steps=110, style=style)
    assert schedule(step) == pytest.approx(rate)
