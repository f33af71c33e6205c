"""Memory that ranks took at most, beside what was predicted for their stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from plait.core.memory_peaks import peaks_of


class MemoryUse(NamedTuple):
    """Bytes of a stage's rank. predicted: None where nothing is. measured: of the ``rank`` that has taken the
    most, at most; None where no metrics tell."""

    place: str
    predicted: int | None
    measured: int | None
    rank: int | None


def memory_use(metrics: Sequence[Mapping[str, Any]], predicted: Mapping[str, int]) -> tuple[MemoryUse, ...]:
    """By stage; nothing where none was measured. predicted: of a rank of each."""
    measured = peaks_of(metrics)
    found: list[MemoryUse] = []
    for place in dict.fromkeys([*predicted, *measured]):
        size, rank = max(((size, rank) for rank, size in measured.get(place, {}).items()), default=(None, None))
        found.append(MemoryUse(place, predicted.get(place), size, rank))
    return tuple(found) if measured else ()
