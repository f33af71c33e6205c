"""How long the modules of one layer take in each phase, through the executor that trains.

Nothing is hidden, so that every op shows what it takes; collectives have spans of their own and are left
out. A module's share of a recorded step is what ``plait.train.tune`` makes orders from as well.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import torch

from plait.core.model import ModelSpec
from plait.core.overlap import Load
from plait.core.profile import ModulePhase, ModuleSite, ModuleTime
from plait.core.segment_costs import SegmentCosts
from plait.core.settings import Precision
from plait.core.strategy import Strategy
from plait.train.comm.wire import NullWire, Wire
from plait.train.engine.executor import Here, make_executor
from plait.train.engine.feed import micro_batches
from plait.train.engine.gradients import Gradients
from plait.train.machine.device import Device, torch_dtype
from plait.train.model.transformer import Transformer
from plait.train.profile.clock import Clock
from plait.train.record.recorder import Recorder
from plait.train.tune.timing import RECORDED, median_costs, recorded

SYNC = Strategy(overlap="sync")
PHASES: dict[str, ModulePhase] = {
    "F": "forward",
    "R": "forward",
    "L": "forward",
    "D": "input gradient",
    "C": "input gradient",
    "W": "weight gradient",
}
NORMS: dict[str, ModulePhase] = {"N": "forward", "J": "input gradient"}
"""Ops between two modules: the residual addition and the norm. J has the norm's weight gradient as well."""
SITES: tuple[ModuleSite, ...] = ("embed", "attn", "mlp", "block", "head")


def measure_modules(
    device: Device, model: ModelSpec, batch: int, precision: Precision, wire: Wire | None, clock: Clock
) -> list[ModuleTime]:
    """One layer of the model, its embedding and its head, on ``batch`` sequences of its greatest length.
    wire: of the tensor-parallel group; none for a rank alone."""
    tp, at = (wire.size, wire.rank) if wire else (1, 0)
    family = "gpt" if model.levels else model.family  # a utransformer's layers are gpt's
    spec = replace(model, family=family, levels=0, num_layers=1, dropout=0.0, attention_dropout=0.0)
    strategy, length = replace(SYNC, tp=tp), spec.max_sequence
    share = Transformer(spec, strategy, tp_rank=at, dtype=torch_dtype(precision), device=device.torch_device)
    recorder = Recorder(device)
    executor = make_executor(
        share,
        strategy,
        recorder.over(wire, range(tp), "tp") if wire else NullWire(),
        Load(batch, length),
        Here(device, recorder),
        gradients=Gradients(share),
    )
    tokens = torch.randint(0, spec.vocab, (batch, length), generator=torch.Generator().manual_seed(0))
    (micro_batch,) = micro_batches(tokens, tokens, torch.arange(batch), batch, 0)
    clock.once(lambda: executor.run(micro_batch))
    took = clock.once(lambda: executor.run(micro_batch))
    steps = recorded(lambda: executor.run(micro_batch), recorder, max(2, min(RECORDED, int(clock.left() / took))))
    shape = {
        "family": spec.family,
        "hidden": spec.hidden,
        "heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads,
        "ffn": spec.ffn_hidden,
        "vocab": spec.vocab,
        "batch": batch,
        "sequence": length,
        "tp": tp,
        "precision": precision,
    }
    return [
        ModuleTime.model_validate({"site": site, "phase": phase, "seconds": seconds, **shape})
        for (site, phase), seconds in by_module(median_costs(steps)).items()
    ]


def by_module(costs: SegmentCosts) -> dict[tuple[ModuleSite, ModulePhase], float]:
    """Seconds of modules from those of segment ops; of a norm, the mean over those of a layer.

    >>> by_module(SegmentCosts({"mlp.F": 2.0, "mlp.R": 1.0, "mlp.N": 0.5, "attn.N": 0.7}, {}))
    {('mlp', 'forward'): 3.0, ('norm', 'forward'): 0.6}
    """
    found: dict[tuple[ModuleSite, ModulePhase], float] = defaultdict(float)
    norms: dict[ModulePhase, list[float]] = defaultdict(list)
    for key, seconds in costs.compute.items():
        site, _, kind = key.partition(".")
        if kind in PHASES and site in SITES:
            found[site, PHASES[kind]] += seconds
        elif kind in NORMS and site in ("attn", "mlp", "block"):
            norms[NORMS[kind]].append(seconds)
    return {**found, **{("norm", phase): sum(each) / len(each) for phase, each in norms.items()}}
