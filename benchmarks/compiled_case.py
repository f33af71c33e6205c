"""One case of ``compiled.py``: cache folder, case, rounds (0: only compile)."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any

os.environ["TORCHINDUCTOR_CACHE_DIR"] = sys.argv[1]  # read when torch is imported

import torch
from keeping import ratio
from ranks import interleaved
from typical import typical_costs

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.orders.overlap import Load
from plait.train.comm.wire import NullWire
from plait.train.engine.executor import RankContext, make_executor
from plait.train.engine.gradients import Gradients
from plait.train.engine.inflight import MicroBatch
from plait.train.machine.gpu import device_of
from plait.train.model.transformer import Transformer
from plait.train.record.recorder import Recorder

DOMINO: dict[str, Any] = {
    "family": "gpt", "num_layers": 3, "hidden": 768, "num_heads": 12, "vocab": 256, "max_sequence": 256,
}  # fmt: skip
QUICK: dict[str, Any] = {
    "family": "gpt", "num_layers": 4, "hidden": 128, "num_heads": 4, "vocab": 256, "max_sequence": 128,
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "domino": (DOMINO, 8),
    "dropout": (DOMINO | {"dropout": 0.1}, 8),
    "llama": (DOMINO | {"family": "llama", "ffn_hidden": 3072}, 8),
    "quickstart": (QUICK, 16),
}
"""Model and batch."""
EAGER = Strategy(tp=2, p1=2, overlap="no-communication")
VARIANTS = {"eager": EAGER, "compiled": replace(EAGER, compile=True)}


class Case:
    """The variants over the same weights."""

    def __init__(self, name: str) -> None:
        torch.set_num_threads(1)
        values, batch = CASES[name]
        self.spec, self.device = ModelSpec(**values), device_of(None)
        self.model = Transformer(self.spec, EAGER)
        self.gradients = Gradients(self.model)
        tokens = torch.randint(0, 256, (batch, self.spec.max_sequence), generator=torch.Generator().manual_seed(1))
        self.batch = MicroBatch(tokens, tokens.roll(-1, 1), torch.arange(batch), 1.0 / tokens.numel(), 0)

    def executor(self, strategy: Strategy, recorder: Recorder | None = None) -> Any:
        size, sequence = self.batch.tokens.shape
        load = Load(size, sequence)
        here = RankContext(self.device, recorder)
        return make_executor(self.model, strategy, NullWire(2), load, here, gradients=self.gradients)

    def timed(self, rounds: int) -> dict[str, Any]:
        """Seconds of each, by rounds; and what the ops between matrix products take of a step."""
        runs = {name: self.executor(strategy) for name, strategy in VARIANTS.items()}

        def timed(name: str, _: int) -> float:
            start = time.perf_counter()
            runs[name].run(self.batch)
            return time.perf_counter() - start

        seconds = interleaved({name: partial(timed, name) for name in VARIANTS}, rounds, turned=True)
        gain = ratio(seconds, "eager", "compiled")
        found: dict[str, Any] = {f"{name}_s": statistics.median(taken) for name, taken in seconds.items()}
        spread = {name: (min(taken), max(taken)) for name, taken in seconds.items()}
        return found | {"gain": gain, "spread": spread, "ops": {name: self.ops(name) for name in VARIANTS}}

    def ops(self, name: str) -> dict[str, float]:
        """Seconds of a step, by kind of op: of those that hold what is compiled."""
        recorder = Recorder(self.device)
        run = self.executor(VARIANTS[name], recorder)
        costs = typical_costs(lambda: run.run(self.batch), recorder).compute
        layers = {"attn": self.spec.num_layers, "mlp": self.spec.num_layers}
        every = {key: value * layers.get(key.split(".")[0], 1) for key, value in costs.items()}
        return {key: value for key, value in every.items() if key.split(".")[1] in "NFDJL"}


def main() -> None:
    """Print one line of JSON."""
    case = Case(sys.argv[2])
    start = time.perf_counter()
    case.executor(VARIANTS["compiled"]).run(case.batch)
    found: dict[str, Any] = {"compiling_s": time.perf_counter() - start}
    if rounds := int(sys.argv[3]):
        found |= case.timed(rounds)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
