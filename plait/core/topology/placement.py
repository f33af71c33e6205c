"""Placement: which host is which node of a job, how far that spreads its groups, and how much better any
other could be.

``rank_table`` is what launchers read. The file keeps what a table does not need and repairs do: spares, the
matrix, the topology that was looked at.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plait.core.base.codec.data import decode
from plait.core.base.codec.json_text import read_table
from plait.core.base.errors import JobError, PlacementError
from plait.core.base.files import replacing
from plait.core.topology.rank_table import RankTable

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Placement:
    """hosts: by node rank. minipods: of each of them. heights: cells of every column of the communication
    matrix. spares: hosts that are kept for repairs. preempted: hosts that other jobs have to give up.

    row_spread, column_spread: over how many minipods the most spread PP group and DP group lie. used:
    minipods. row_leaves, column_leaves: the same over leaf switches (0: not counted). crossings: pairs of
    neighbours in a group that lie in different ones. score: eq. 2 with alpha, or predicted seconds where
    ``by`` says so, plus what preempting costs. bound: what no placement on these nodes can beat.
    dp_seconds, pp_seconds, ep_seconds: predicted for the groups that take longest (the last of experts),
    if nothing hides them; None without volumes. plan, topology: hashes of what it was made for.
    solved_in: seconds."""

    hosts: tuple[str, ...]
    minipods: tuple[str, ...]
    heights: tuple[int, ...]
    nodes_per_cell: int = 1
    ranks_per_node: int
    spares: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    row_spread: int
    column_spread: int
    used: int
    crossings: int
    row_leaves: int = 0
    column_leaves: int = 0
    alpha: float
    by: str = "spread"
    score: float
    bound: float
    method: str
    note: str = ""
    dp_seconds: float | None = None
    pp_seconds: float | None = None
    ep_seconds: float | None = None
    plan: str = ""
    topology: str = ""
    solved_in: float = 0.0

    @property
    def stages(self) -> tuple[int, ...]:
        """The pipeline stage of every node rank."""
        cells = (at for at, height in enumerate(self.heights) for _ in range(height))
        return tuple(at for at in cells for _ in range(self.nodes_per_cell))

    @property
    def gap(self) -> float:
        """By how much the score may exceed the best there is, as a share of it."""
        return self.score / self.bound - 1 if self.bound > 0 else float(self.score > 0)

    @property
    def seconds(self) -> float | None:
        """Predicted for communication along both axes and among experts."""
        if self.dp_seconds is None or self.pp_seconds is None:
            return None
        return self.dp_seconds + self.pp_seconds + (self.ep_seconds or 0.0)

    @property
    def rank_table(self) -> RankTable:
        """Raises PlacementError for a host that would be two nodes."""
        return RankTable(self.hosts, self.ranks_per_node, self.plan)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"version": VERSION, **asdict(self), "gap": self.gap}

    def write(self, path: Path) -> None:
        """As JSON, whole or not at all."""
        with replacing(path) as file:
            file.write_text(json.dumps(self.to_dict()) + "\n")

    @staticmethod
    def read(path: Path) -> Placement:
        """The placement in a file.

        Known: the keys that ``write`` writes. Refused, as PlacementError that names the file: any other key,
        one that is missing but has no default, a value of another type, another version.
        """
        try:
            values = read_table(path)
            if values.pop("version") != VERSION:
                raise ValueError(f"this Plait reads version {VERSION}")
            values.pop("gap")
            return decode(Placement, values)
        except OSError as error:
            raise PlacementError(f"{path}: {error.strerror or error}.") from None
        except (ValueError, KeyError, JobError) as error:
            raise PlacementError(f"{path}: not a placement ({error}).") from None
