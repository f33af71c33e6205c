"""Memory that the tensors of ranks took at most, beside what was predicted for their stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from plait.core.runs.memory_peaks import PROCESS, peaks_of


class MemoryUse(NamedTuple):
    """Bytes of a stage's rank. predicted: None where nothing is. measured: what tensors took of the ``rank``
    where they took the most; None where no metrics tell. process: what that rank's process had at most, its
    interpreter and libraries included (where nobody knows of tensors, of the largest process); None where
    that is not known."""

    place: str
    predicted: int | None
    measured: int | None
    rank: int | None
    process: int | None = None


def memory_use(metrics: Sequence[Mapping[str, Any]], predicted: Mapping[str, int]) -> tuple[MemoryUse, ...]:
    """By stage; nothing where none was measured. predicted: of a rank of each."""
    measured, processes = peaks_of(metrics), peaks_of(metrics, PROCESS)
    found: list[MemoryUse] = []
    for place in dict.fromkeys([*predicted, *measured, *processes]):
        tensors, own = measured.get(place, {}), processes.get(place, {})
        rank = max(tensors or own, key=(tensors or own).__getitem__, default=None)
        known = (tensors.get(rank), rank, own.get(rank)) if rank is not None else (None, None, None)
        found.append(MemoryUse(place, predicted.get(place), *known))
    return tuple(found) if measured or processes else ()
