"""Placement: the host of each node rank of a job, the spread of the job's groups, and how much
better any other placement could be.

``rank_table`` is for launchers. The file also keeps what repairs need: spares, the matrix, and the
topology's hash.
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
    """Hosts of a job in order of node rank, with the placement's score.

    hosts: by node rank. minipods: of each host. heights: cells of every column of the communication
    matrix. spares: hosts that are kept for repairs. preempted: hosts that other jobs have to give
    up.

    row_spread, column_spread: number of minipods of the most spread PP group and DP group. used:
    number of minipods. row_leaves, column_leaves: the two spreads over leaf switches (0: not
    counted). crossings: pairs of neighbours in a group that lie in different minipods. score: eq. 2
    with alpha, or predicted seconds, as ``by`` says, plus the price of preempting. bound: no
    placement on these nodes has a lower score. dp_seconds, pp_seconds, ep_seconds: predicted for
    the slowest groups (ep_seconds: of experts), if no communication is hidden; None without
    volumes. plan, topology: hashes of what the placement was made for. solved_in: seconds of the
    search.
    """

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
        """Pipeline stage of every node rank."""
        cells = (at for at, height in enumerate(self.heights) for _ in range(height))
        return tuple(at for at in cells for _ in range(self.nodes_per_cell))

    @property
    def gap(self) -> float:
        """Most that the score can exceed the best possible score, as a share of the latter."""
        return self.score / self.bound - 1 if self.bound > 0 else float(self.score > 0)

    @property
    def seconds(self) -> float | None:
        """Predicted seconds of communication along both axes and among experts; None without
        volumes."""
        if self.dp_seconds is None or self.pp_seconds is None:
            return None
        return self.dp_seconds + self.pp_seconds + (self.ep_seconds or 0.0)

    @property
    def rank_table(self) -> RankTable:
        """Rank table of the placement. Raises PlacementError for a host that would be two nodes."""
        return RankTable(self.hosts, self.ranks_per_node, self.plan)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"version": VERSION, **asdict(self), "gap": self.gap}

    def write(self, path: Path) -> None:
        """Write the placement as JSON, atomically."""
        with replacing(path) as file:
            file.write_text(json.dumps(self.to_dict()) + "\n")

    @staticmethod
    def read(path: Path) -> Placement:
        """Return the placement in a file.

        Known: keys that ``write`` writes. Refused, with PlacementError that names the file: any
        other key, a missing key without a default, a value of another type, another version.
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
