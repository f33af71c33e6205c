"""How long the modules of one layer take in each phase, through the executor that trains.

Nothing is hidden, so that every op shows what it takes; collectives have spans of their own and are left
out. A module's share of a recorded step is what ``plait.train.tune`` makes orders from as well.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

import torch

from plait.core.cluster.profile import ModuleTime, by_module
from plait.core.model.precision import Precision
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.orders.overlap import Load
from plait.core.step.seconds.segment_costs import SegmentCosts
from plait.train.comm.wire import NullWire, Wire
from plait.train.engine.executor import RankContext, make_executor
from plait.train.engine.feed import micro_batches
from plait.train.engine.gradients import Gradients
from plait.train.machine.device import RankDevice, torch_dtype
from plait.train.model.transformer import Transformer
from plait.train.profile.clock import Clock
from plait.train.record.recorder import Recorder
from plait.train.tune.timing import RECORDED, mean_over_ranks, median_costs, recorded

SYNC = Strategy(overlap="sync")


def measure_modules(
    device: RankDevice, model: ModelSpec, batch: int, precision: Precision, wire: Wire | None, clock: Clock
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
        RankContext(device, recorder),
        gradients=Gradients(share),
    )
    tokens = torch.randint(0, spec.vocab, (batch, length), generator=torch.Generator().manual_seed(0))
    (micro_batch,) = micro_batches(tokens, tokens, torch.arange(batch), batch, 0)
    clock.once(lambda: executor.run(micro_batch))
    took = clock.once(lambda: executor.run(micro_batch))
    worked = list[float]()

    def run() -> None:
        with clock.work() as seconds:
            executor.run(micro_batch)
        worked.extend(seconds)

    costs = median_costs(recorded(run, recorder, max(2, min(RECORDED, int(clock.left() / took)))))
    share_of = _of_the_work(costs, worked)
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
        ModuleTime.model_validate({"site": site, "phase": phase, "seconds": share_of * seconds, **shape})
        for (site, phase), seconds in by_module(costs.compute).items()
    ]


def _of_the_work(costs: SegmentCosts, worked: Sequence[float]) -> float:
    """By how much ops take longer than their spans say, where ranks share cores: a span of a few milliseconds
    has the core for itself or waits for it, and the median is one that did not wait. worked: of every run,
    what it took; nothing where spans are right."""
    if not worked:
        return 1.0
    return mean_over_ranks(SegmentCosts({"run": statistics.median(worked)}, {})).compute["run"] / sum(
        costs.compute.values()
    )
