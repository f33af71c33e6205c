"""Seconds in which tokens reach their experts where each is sent once to every node, and handed on there once
to every rank, that has an expert of its own (DeepEP; DeepSeek-V3, arXiv 2412.19437, section 3.2.2; NVIDIA's
HybridEP), in place of once for every expert (NCCL's all-to-all).

Of k distinct experts out of E, each of m equal parts of the experts has none with probability
C(E - E/m, k) / C(E, k). Parts that have one are what a token is sent to.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from plait.core.cluster.hardware import Cluster
from plait.core.step.seconds.rates import Seconds, latency, rate_of

INSIDE, ACROSS = 0.8, 0.87
"""Of a link's rate: DeepEP README (commit 0297fc8): 726 to 740 of 900 GB/s on SM100; docs/legacy.md: 153 to
158 of 200 on H800, and over 400 Gbit/s 43 GB/s at 16 ranks, 58 at 32 of which three quarters leave a node, 51
at 64 of which seven eighths do."""


def reached(parts: Any, experts: Any, per_token: Any) -> Any:
    """Of equal ``parts`` of the experts, how many a token goes to, on average. per_token: may be a fraction,
    of tokens that are dropped.

    >>> float(reached(8, 8, 2)), round(float(reached(8, 64, 8)), 2), float(reached(1, 8, 2))
    (2.0, 5.43, 1.0)
    """
    parts, experts, chosen = (np.asarray(value, dtype=np.float64) for value in (parts, experts, per_token))
    others = experts - experts / parts
    missed: list[Any] = [
        1 - np.clip(chosen - one, 0, 1) * (1 - np.maximum(0, others - one) / np.maximum(1, experts - one))
        for one in range(int(np.ceil(np.max(chosen, initial=0))))
    ]
    return parts * (1 - prod(missed, start=1.0))


def dispatch(cluster: Cluster, row: Any, ranks: Any, stride: Any, *, experts: Any, per_token: Any) -> Seconds:
    """Of sending tokens, or their experts' results back, over groups of ``ranks`` ranks ``stride`` apart.
    row: bytes of all tokens of a rank, each once.

    Tiers work at once on tokens that follow each other, so the slowest decides. What arrives for a part of a
    group lands on one of its ranks already, and the others get it over the inner links.
    """
    row, n, step = (np.asarray(value, dtype=np.float64) for value in (row, np.maximum(1, ranks), np.maximum(1, stride)))
    longest, delay, pooled = np.zeros_like(row * n), np.zeros_like(row * n), np.ones_like(n)
    for at, tier in enumerate(cluster.tiers):
        last = at == len(cluster.tiers) - 1
        within = n if last or not tier.ranks else np.minimum(n, np.maximum(1, tier.ranks // step))
        moved = row * reached(n / pooled, experts, per_token) * (1 - pooled / within)
        longest = np.maximum(longest, moved / (rate_of(tier, within) * (ACROSS if at else INSIDE)))
        delay = delay + latency(cluster, at) * np.log2(within / pooled)
        pooled = within
    return np.where(n > 1, longest + delay, 0.0)
