"""The tables of ``plait place``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from plait.cli import terminal
from plait.core.base.passed_over import PassedOver
from plait.core.base.text import counted
from plait.core.topology.placement import Placement
from plait.place.pools import ranges
from plait.place.problem import Problem
from plait.place.repair import Repair, Spot

MOST_MOVES = 24
"""Of the table for people."""


def show(placement: Placement, problem: Problem, why: str) -> None:
    """Where the job lies, how far its groups spread, and how good that is."""
    nodes, heights = len(placement.hosts), placement.heights
    shape = f"{heights[0]} x {len(heights)}" if len(set(heights)) == 1 else f"{'+'.join(map(str, heights))}"
    terminal.title(
        f"{counted(nodes, 'node')} of {counted(placement.ranks_per_node, 'rank')} ({shape} cells: PP groups x "
        f"stages) on {placement.used} of {counted(len(problem.minipods), 'minipod')}"
    )
    terminal.say("")
    terminal.table(("minipod", "nodes", "free", "stages", "node ranks"), _minipods(placement, problem))
    terminal.say("")
    terminal.text(
        f"A PP group lies in at most {_minipods_of(placement.row_spread)}, a DP group in "
        f"{_minipods_of(placement.column_spread)}. {_scored(placement)}"
    )
    if why and placement.by == "spread":
        terminal.text(f"alpha {placement.alpha:.2f}: {why}.")
    if placement.seconds is not None:
        experts = f", {placement.ep_seconds:.3g} s among experts" if placement.ep_seconds else ""
        terminal.text(
            f"Predicted for what a step sends, if nothing hides it: {placement.dp_seconds or 0:.3g} s along DP, "
            f"{placement.pp_seconds or 0:.3g} s along PP{experts}."
        )
    note = f" ({placement.note})" if placement.note else ""
    terminal.text(f"By {placement.method}{note}, in {placement.solved_in:.3f} s.")
    if placement.spares:
        terminal.text(f"Spares: {', '.join(placement.spares[:12])}{' ...' if len(placement.spares) > 12 else ''}")
    if placement.preempted:
        held = counted(len(placement.preempted), "node")
        terminal.text(f"Other jobs have to give up {held}: {', '.join(placement.preempted)}")


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


def _minipods_of(spread: int) -> str:
    return counted(spread, "minipod")


def _minipods(placement: Placement, problem: Problem) -> list[tuple[str, ...]]:
    free = dict.fromkeys(problem.minipods, 0)
    for pool in problem.pools:
        free[pool.minipod] += pool.free
    own: dict[str, list[int]] = {}
    for rank, minipod in enumerate(placement.minipods):
        own.setdefault(minipod, []).append(rank)
    stage = [at for at, height in enumerate(placement.heights) for _ in range(height * placement.nodes_per_cell)]
    return [
        (minipod, str(len(ranks)), str(free.get(minipod, 0)), ranges(sorted({stage[rank] for rank in ranks})),
         _short(ranges(ranks)))
        for minipod, ranks in sorted(own.items(), key=lambda one: one[1][0])
    ]  # fmt: skip


def _short(text: str, most: int = 36) -> str:
    return text if len(text) <= most else text[:most].rpartition(",")[0] + ",..."


def show_moves(repaired: Repair, spots: Mapping[str, Spot]) -> None:
    """What moves."""
    moves = repaired.moves
    verb = "moves" if len(moves) == 1 else "move"
    terminal.title(f"{len(moves)} of {counted(len(repaired.placement.hosts), 'node')} {verb}")
    rows = [(str(m.node_rank), m.old, m.new, *spots.get(m.new, ("", ""))) for m in moves]
    terminal.table(("node rank", "was", "is now", "minipod", "leaf"), rows[:MOST_MOVES])
    if len(rows) > MOST_MOVES:
        terminal.text(f"and {len(rows) - MOST_MOVES} more, in the rank table")
    terminal.say("")


def show_comparison(placements: Sequence[Placement | tuple[str, str]], over: PassedOver | None) -> None:
    """Every method, a line each; as JSON, with what was passed over, where that is given."""
    if over is not None:
        values = [
            {"method": one[0], "refused": one[1]} if isinstance(one, tuple) else _figures(one) for one in placements
        ]
        terminal.say(json.dumps({"methods": values, "passed_over": over.rows()}))
        return
    rows = [
        (one.method, str(one.row_spread), str(one.column_spread), f"{one.score:.2f}", f"{one.gap:.1%}",
         "" if one.seconds is None else f"{one.seconds:.3g}", f"{one.solved_in:.3f}")
        for one in placements if isinstance(one, Placement)
    ]  # fmt: skip
    terminal.table(("method", "PP in", "DP in", "spread", "gap", "network s", "took s"), rows)
    terminal.say("")
    done = [one for one in placements if isinstance(one, Placement)]
    if done:
        terminal.text(
            f"PP in, DP in: minipods of the most spread group. spread: weighted, alpha {done[0].alpha:.2f}; no "
            f"placement is below {max(one.bound for one in done):.2f}. Nothing was written."
        )
    for one in placements:
        if isinstance(one, tuple):
            terminal.text(f"{one[0]}: {one[1]}")


def _figures(one: Placement) -> dict[str, object]:
    names = ("method", "note", "row_spread", "column_spread", "used", "crossings", "score", "bound", "gap")
    return {name: getattr(one, name) for name in names} | {"seconds": one.seconds, "solved_in": one.solved_in}
