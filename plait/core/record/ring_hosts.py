"""Which host every rank of a run is on, by its ring's first page: no more of it is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from plait.core.base.errors import DataError
from plait.core.record.ring import HEADER, Header, open_ring


def read_headers(folder: Path) -> tuple[dict[int, Header], dict[str, str]]:
    """The headers of all rings of a folder by rank, and why some were left out, by path."""
    headers: dict[int, Header] = {}
    problems: dict[str, str] = {}
    for path in sorted(folder.glob("rank-*.ring")):
        try:
            with open_ring(path) as file:
                header = Header.unpack(file.read(HEADER))
            headers[header.rank] = header
        except OSError as error:
            problems[str(path)] = f"it cannot be read as a ring: {error.strerror or error}"
        except DataError as error:
            problems[str(path)] = f"it cannot be read as a ring: {error}"
    return headers, problems


def host_names(headers: Mapping[int, Header]) -> dict[int, str]:
    """The host of each rank: its machine's name, or a number where several hosts have one name."""
    first = {rank: rank - header.local_rank for rank, header in headers.items()}
    names = {first[rank]: header.host for rank, header in headers.items()}
    if len(set(names.values())) == len(names):
        return {rank: headers[rank].host for rank in headers}
    numbers = {start: number for number, start in enumerate(sorted(names))}
    return {rank: f"host {numbers[start]}" for rank, start in first.items()}
