"""The answer of placing a job: its minipods, and the moves of a repair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plait.core.base.text import Part, Shown, Table, counted
from plait.core.topology.placement import Placement
from plait.place.placing import Spot, ranges
from plait.place.repair import Repair
from plait.place.solve.problem import Problem
from plait.place.topologies import Remarks

MOST_MOVES = 24
"""The largest number of moves in the printed table."""


@dataclass(frozen=True, kw_only=True)
class PlacedAnswer(Shown):
    """A placement, the spread of its groups, and its distance from the optimum.

    affinity_reason: a sentence on the weights of DP and PP groups. repaired: the repair with its
    moves, if the placement is one. spots: the minipod and leaf of each host. remarks: on the
    topology.
    """

    placement: Placement
    problem: Problem
    affinity_reason: str = ""
    repaired: Repair | None = None
    spots: Mapping[str, Spot] = field(default_factory=dict[str, Spot])
    remarks: Remarks = field(default_factory=Remarks)

    def to_dict(self) -> dict[str, Any]:
        """Return the placement, its moves, and remarks on the topology."""
        moves = self.repaired and [
            {"node_rank": one.node_rank, "old": one.old, "new": one.new} for one in self.repaired.moves
        ]
        return self.placement.to_dict() | {
            "affinity": self.affinity_reason, "moves": moves, "notes": self.remarks.notes,
            "passed_over": self.remarks.over.rows(),
        }  # fmt: skip

    def parts(self) -> Iterator[Part]:
        """Yield the moves; a row for each minipod; sentences on spreads, predicted seconds and the
        method."""
        placement = self.placement
        if self.repaired:
            yield from self._moves(self.repaired)
        heights = placement.heights
        shape = f"{heights[0]} x {len(heights)}" if len(set(heights)) == 1 else "+".join(map(str, heights))
        yield Table(
            f"{counted(len(placement.hosts), 'node')} of {counted(placement.ranks_per_node, 'rank')} ({shape} cells: "
            f"PP groups x stages) on {placement.used} of {counted(len(self.problem.minipods), 'minipod')}"
        )
        yield ""
        yield Table("", ("minipod", "nodes", "free", "stages", "node ranks"), self._minipods())
        yield ""
        spread = f"A PP group lies in at most {counted(placement.row_spread, 'minipod')}, a DP group in "
        yield f"{spread}{counted(placement.column_spread, 'minipod')}. {_scored(placement)}"
        if placement.row_leaves:
            leaves = f"a PP group under at most {placement.row_leaves}, a DP group under {placement.column_leaves}"
            yield f"Of leaf switches, the second thing looked at: {leaves}."
        if self.affinity_reason and placement.by == "spread":
            yield f"alpha {placement.alpha:.2f}: {self.affinity_reason}."
        if placement.seconds is not None:
            experts = f", {placement.ep_seconds:.3g} s among experts" if placement.ep_seconds else ""
            yield (
                f"Predicted for what a step sends, if nothing hides it: {placement.dp_seconds or 0:.3g} s along DP, "
                f"{placement.pp_seconds or 0:.3g} s along PP{experts}."
            )
        note = f" ({placement.note})" if placement.note else ""
        yield f"By {placement.method}{note}, in {placement.solved_in:.3f} s."
        if spares := placement.spares:
            yield f"Spares: {', '.join(spares[:12])}{' ...' if len(spares) > 12 else ''}"
        if placement.preempted:
            held = counted(len(placement.preempted), "node")
            yield f"Other jobs have to give up {held}: {', '.join(placement.preempted)}"

    def _moves(self, repaired: Repair) -> Iterator[Part]:
        moves = repaired.moves
        verb = "moves" if len(moves) == 1 else "move"
        title = f"{len(moves)} of {counted(len(repaired.placement.hosts), 'node')} {verb}"
        rows = [(one.node_rank, one.old, one.new, *self.spots.get(one.new, ("", ""))) for one in moves]
        yield Table(title, ("node rank", "was", "is now", "minipod", "leaf"), rows[:MOST_MOVES])
        if len(rows) > MOST_MOVES:
            yield f"and {len(rows) - MOST_MOVES} more, in the rank table"
        yield ""

    def _minipods(self) -> list[tuple[Any, ...]]:
        placement, free = self.placement, dict.fromkeys(self.problem.minipods, 0)
        for pool in self.problem.pools:
            free[pool.minipod] += pool.free
        own: dict[str, list[int]] = {}
        for rank, minipod in enumerate(placement.minipods):
            own.setdefault(minipod, []).append(rank)
        stage = placement.stages
        return [
            (minipod, len(ranks), free.get(minipod, 0), ranges(sorted({stage[rank] for rank in ranks})),
             _short(ranges(ranks)))
            for minipod, ranks in sorted(own.items(), key=lambda one: one[1][0])
        ]  # fmt: skip

    def write(self, table: Path) -> None:
        """Write the placement, which repairs need, and the rank table next to it. Raises
        PlacementError, and LaunchError for files that cannot be written.

        The rank table is written last, because ranks obey it.
        """
        from plait.core.base.files import explained

        rank_table = self.placement.rank_table  # refuses a host that would be two nodes
        for file, written in ((placement_file(table), self.placement), (table, rank_table)):
            with explained(f"{file} cannot be written", fix="Choose another with --out"):
                written.write(file)


def placement_file(table: Path) -> Path:
    """Return the path of the file with the placement that belongs to a rank table, next to it."""
    return table.with_name("placement.json" if table.stem == "rank_table" else f"{table.stem}.placement.json")


def _scored(placement: Placement) -> str:
    if placement.gap < 1e-9:
        least = "the least there is"
    elif placement.bound > 0:
        least = f"at most {placement.gap:.1%} above the least there is"
    else:
        least = "a bound of the least there is"
    if placement.by == "seconds":
        return f"What it sends is predicted to take {placement.score:.3g} s: {least} ({placement.bound:.3g} s)."
    return f"Weighted spread {placement.score:.2f} at alpha {placement.alpha:.2f}: {least} ({placement.bound:.2f})."


def _short(text: str, most: int = 36) -> str:
    return text if len(text) <= most else text[:most].rpartition(",")[0] + ",..."
