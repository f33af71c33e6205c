"""How much memory every rank of a run has taken so far, at most, as it stands in ``metrics.jsonl``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from plait.core.layout import Layout

MEMORY = "memory_peak"
"""Its name in a line."""
MOST = 64
"""Ranks that are all told; of more, the one of each stage that has taken the most."""
_RANK = re.compile(r"(.+), rank (\d{1,9})")


def told(peaks: Sequence[int], layout: Layout) -> dict[str, int]:
    """Bytes by stage and rank. peaks: by rank.

    >>> told([10, 20], Layout.of(pp=2, dp=1))
    {'stage 0, rank 0': 10, 'stage 1, rank 1': 20}
    """
    found: dict[str, int] = {}
    for stage, mesh in enumerate(layout.meshes):
        ranks = sorted(mesh.ranks) if layout.world_size <= MOST else [max(mesh.ranks, key=lambda rank: peaks[rank])]
        found |= {f"stage {stage}, rank {rank}": peaks[rank] for rank in ranks}
    return found


def peaks_of(metrics: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, int]]:
    """The most of every rank that lines tell, by stage. What is no such thing is left out."""
    found: dict[str, dict[int, int]] = {}
    for line in metrics:
        sizes: Any = line.get(MEMORY)
        for name, size in cast("dict[Any, Any]", sizes).items() if isinstance(sizes, dict) else ():
            known = _RANK.fullmatch(str(name))
            if known and isinstance(size, int) and not isinstance(size, bool) and size > 0:
                ranks = found.setdefault(known[1], {})
                ranks[int(known[2])] = max(size, ranks.get(int(known[2]), 0))
    return found
