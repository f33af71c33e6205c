"""How long a micro-batch takes in the steady state of a pipeline schedule."""

from __future__ import annotations

from collections.abc import Sequence


def steady_period(compute: Sequence[float], transfer: Sequence[float], slack: Sequence[int]) -> float:
    """Seconds per micro-batch of a 1F1B-like schedule in its steady state.

    compute: forward and backward of each stage; transfer: one way over each boundary; slack: of each
    boundary, the difference of its two stages' warm-up (1f1b: 1, eager: 2). Links are asynchronous, one a
    direction. Between stages i and j a micro-batch goes there and back, sum(compute) + 2 sum(transfer), while
    1 + sum(slack) micro-batches are in between.
    """
    period = max(*compute, *transfer, 0.0)
    for i in range(len(compute)):
        work, between = compute[i], 1
        for j in range(i + 1, len(compute)):
            work += compute[j] + 2 * transfer[j - 1]
            between += slack[j - 1]
            period = max(period, work / between)
    return period
