"""How much memory every rank of a run takes, at most, as it stands in ``metrics.jsonl``: its tensors in a
step, which a plan predicts, and its process as a whole, which has an interpreter and libraries beside them.

Earlier versions wrote ``memory_peak``: by how much a process had grown. It compares with nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

TENSORS, PROCESS = "memory_tensors", "memory_process"
"""The names in a line."""
MOST = 64
"""Ranks that are all told; of more, the one of each stage that has taken the most."""
_RANK = re.compile(r"(.+), rank (\d{1,9})")


def told(peaks: Sequence[int | None], stages: Sequence[Iterable[int]]) -> dict[str, int]:
    """Bytes by stage and rank; a rank whose peak is not known is left out. peaks: by rank. stages: the ranks
    of each.

    >>> told([10, None], [(0,), (1,)])
    {'stage 0, rank 0': 10}
    """
    found: dict[str, int] = {}
    for stage, members in enumerate(stages):
        known = {rank: peak for rank in sorted(members) if (peak := peaks[rank]) is not None}
        ranks = known if len(peaks) <= MOST else sorted(known, key=lambda rank: -known[rank])[:1]
        found |= {f"stage {stage}, rank {rank}": known[rank] for rank in ranks}
    return found


def peaks_of(metrics: Sequence[Mapping[str, Any]], what: str = TENSORS) -> dict[str, dict[int, int]]:
    """The most of every rank that lines tell, by stage. what: ``TENSORS`` or ``PROCESS``. What is no such
    thing is left out."""
    found: dict[str, dict[int, int]] = {}
    for line in metrics:
        sizes: Any = line.get(what)
        for name, size in cast("dict[Any, Any]", sizes).items() if isinstance(sizes, dict) else ():
            known = _RANK.fullmatch(str(name))
            if known and isinstance(size, int) and not isinstance(size, bool) and size > 0:
                ranks = found.setdefault(known[1], {})
                ranks[int(known[2])] = max(size, ranks.get(int(known[2]), 0))
    return found
