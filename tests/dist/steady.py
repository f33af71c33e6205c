"""What each rank runs in ``test_steady``: many steps, with an eye on what torch's allocator and the kernel
say."""

from __future__ import annotations

import gc
from pathlib import Path

from plait.core.model.spec import ModelSpec
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Strategy
from plait.train.engine.assembly import assemble
from plait.train.engine.feed import micro_batches
from plait.train.engine.optimizer import Optimizer
from plait.train.engine.steps import train_step
from tests.dist import pipelining
from tests.dist.equality import DEVICE, batch_of
from tests.dist.pipelining import BATCH, MICRO


def many_steps(
    rank: int, spec: ModelSpec, strategy: Strategy, degrees: list[tuple[int, int]], sharding: Sharding, steps: int
) -> dict[str, list[int]]:
    """Of steps 4, one in the middle and the last: bytes that were allocated and not freed, the most at once,
    buffers of the sharding engine, resident bytes afterwards."""
    part = assemble(pipelining.plan(spec, degrees, "1f1b", strategy, (), [sharding] * len(degrees)), rank, DEVICE)
    optimizer = Optimizer(part.models, part.gradients)
    found: dict[str, list[int]] = {"left": [], "peak": [], "pool": [], "resident": []}
    try:
        for step in range(1, steps + 1):
            tokens, targets, samples = batch_of(spec, 0, BATCH)
            batches = part.own(micro_batches(tokens, targets, samples, MICRO, step))

            def run(batches=batches) -> None:
                train_step(part.step, optimizer, batches, learning_rate=1e-3, clip=1.0)
                if part.shards:
                    part.shards.settle()

            if step not in (4, steps // 2, steps):
                run()
                continue
            left, peak = DEVICE.allocated(run)
            gc.collect()
            found["left"].append(left)
            found["peak"].append(peak)
            found["pool"].append(part.shards.pool if part.shards else 0)
            found["resident"].append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    finally:
        part.lanes.close()
        if part.shards:
            part.shards.stop()
    return found
