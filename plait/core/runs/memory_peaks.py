"""Peak memory of a run's ranks, as in ``metrics.jsonl``: of the tensors in a step, which a plan
predicts, and of the whole process, including interpreter and libraries.

Earlier versions wrote ``memory_peak``, the growth of a process, which cannot be compared with
either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

TENSORS, PROCESS = "memory_tensors", "memory_process"
"""The keys in a line of metrics."""
MOST = 64
"""The most ranks for which all peaks are written; with more ranks, only the largest of each
stage."""
_RANK = re.compile(r"(.+), rank (\d{1,9})")


def format_peaks(peaks: Sequence[int | None], stages: Sequence[Iterable[int]]) -> dict[str, int]:
    """Return the peaks in bytes, keyed by stage and rank; ranks with an unknown peak are left out.
    peaks: by rank. stages: the ranks of each stage.

    >>> format_peaks([10, None], [(0,), (1,)])
    {'stage 0, rank 0': 10}
    """
    found: dict[str, int] = {}
    for stage, members in enumerate(stages):
        known = {rank: peak for rank in sorted(members) if (peak := peaks[rank]) is not None}
        ranks = known if len(peaks) <= MOST else sorted(known, key=lambda rank: -known[rank])[:1]
        found |= {f"stage {stage}, rank {rank}": known[rank] for rank in ranks}
    return found


def peaks_of(metrics: Sequence[Mapping[str, Any]], what: str = TENSORS) -> dict[str, dict[int, int]]:
    """Return the largest peak in bytes of every rank in lines of metrics, by stage. what:
    ``TENSORS`` or ``PROCESS``. Invalid entries are ignored."""
    found: dict[str, dict[int, int]] = {}
    for line in metrics:
        sizes: Any = line.get(what)
        for name, size in cast("dict[Any, Any]", sizes).items() if isinstance(sizes, dict) else ():
            known = _RANK.fullmatch(str(name))
            if known and isinstance(size, int) and not isinstance(size, bool) and size > 0:
                ranks = found.setdefault(known[1], {})
                ranks[int(known[2])] = max(size, ranks.get(int(known[2]), 0))
    return found
