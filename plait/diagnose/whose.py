"""Whose a recording is: the rank that a file says, or its content shows, or its name tells.

Only words of a name that say so are taken: ``rank-3``, ``rank3``, and ``_3`` right before the extension where
that is no process's number. Addresses of hosts (``rank_10.12.0.7_3``) and names of TensorBoard's handler
(``HOST_PID.TIME.pt.trace.json``) tell no rank.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from plait.core.base.errors import DataError
from plait.core.base.numbers import shown
from plait.diagnose.tables import MOST_RANKS

LOW = 1024
"""Below this, or eight times the number of files, a number at the end of a name may be a rank."""
_ADDRESS = re.compile(
    r"(?<![0-9])(\d{1,3}([.-])\d{1,3}\2\d{1,3}\2\d{1,3}|[0-9a-f]{0,4}(:[0-9a-f]{0,4}){2,7})(?=_)", re.IGNORECASE
)
_WORD = re.compile(r"(?<![a-z])(?<!local[-_.])rank[-_.=]?(\d{1,9})(?!\d)", re.IGNORECASE)
_NO_RANK = re.compile(r"\.\d{9,}(\.pt)?\.trace\.json|local[-_.]?rank|kineto_activities|pid[-_.]?\d", re.IGNORECASE)
_PROCESS = re.compile(r"(.+_\d+)\.\d{9,}(?:\.pt)?\.trace\.json", re.IGNORECASE)
_LAST = re.compile(r"_(\d{1,9})(\.pt)?(\.trace)?(\.json)?(\.(gz|bz2|xz))?$", re.IGNORECASE)


def rank_in(name: str, low: int = LOW) -> int | None:
    """The rank that a file's name tells; None where it tells none.

    >>> [rank_in(name) for name in ("rank-00003.json.gz", "rank3_trace.json", "nccl_trace_7", "trace.json")]
    [3, 3, 7, None]
    >>> [rank_in(name) for name in ("a_2348.171800000012345.pt.trace.json", "local_rank_3.json", "t_2024061")]
    [None, None, None]
    """
    name = _ADDRESS.sub("host", name)
    if found := _WORD.search(name):
        return int(found[1])
    found = None if _NO_RANK.search(name) else _LAST.search(name)
    return int(found[1]) if found and int(found[1]) < low else None


def process_in(name: str) -> str | None:
    """The host and process in a name of TensorBoard's handler; None in other names.

    >>> process_in("gpu-a_2348.171800000012345.pt.trace.json"), process_in("rank0.json")
    ('gpu-a_2348', None)
    """
    found = _PROCESS.match(name)
    return found[1] if found else None


def rank_by_path(path: Path, low: int = LOW) -> int | None:
    """The rank that a file's name tells, or the word for it in its folder's: ``rank0/trace.json``."""
    told = rank_in(path.name, low)
    if told is None and (found := _WORD.search(path.parent.name)):
        return int(found[1])
    return told


def can_be_rank(said: Any, members: Collection[int] = ()) -> bool:
    """True for a number that is a rank, and one of ``members`` if there are any."""
    whole = isinstance(said, int) and not isinstance(said, bool) and 0 <= said < MOST_RANKS
    return whole and (not members or said in members)


def checked_rank(said: Any) -> int:
    """A rank that a file says. Raises DataError for what is none."""
    if not can_be_rank(said):
        raise DataError(f"its rank is {shown(said)}, which is none")
    return said


def numbered(unknown: Sequence[Path], taken: Mapping[int, Path]) -> dict[Path, int]:
    """Free ranks for files whose own nobody knows, in the order of their names."""
    free = (rank for rank in range(len(unknown) + len(taken)) if rank not in taken)
    return dict(zip(sorted(unknown, key=_natural), free, strict=False))


def _natural(path: Path) -> list[tuple[int, str]]:
    """With numbers in a name in their own order."""
    parts = re.split(r"(\d{1,18})", path.name)
    return [(int(part), "") if place % 2 else (0, part) for place, part in enumerate(parts)]
