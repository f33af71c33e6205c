"""A topology as a picture: a frame for every minipod, a row for every leaf, a cell for every node.

Cells have the colours of the groups that they belong to, if a placement is given, else those of what nodes
are doing; frames say how many groups touch a minipod.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from colorsys import hsv_to_rgb
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from plait.api.pictures import GREY, check_format, save
from plait.core.topology.switches import Level, Node, Topology
from plait.place.outline import spreads

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STATE_COLOURS = {"free": "#dfe4ea", "busy": "#9aa4b0", "down": "#d64545"}
MOST_NAMED = 24
"""Groups in the legend."""
GAP = 1.6
"""Between frames, in cells; a name stands above each."""
MANY = 2_000
"""Nodes from which on neighbours of one colour become one rectangle."""


@dataclass(frozen=True)
class _Frame:
    """A minipod's place: columns to the right and rows down, and its leaves."""

    name: str
    x: float
    y: float
    leaves: Sequence[Sequence[Node]]


def draw(
    topology: Topology, path: Path, *, groups: Mapping[str, str] | None = None, level: Level | None = None,
    title: str = "",
) -> None:  # fmt: skip
    """groups: of placed nodes, the name of theirs. Appears whole or not at all; the file's ending names its
    format. Raises DataError for another ending, JobError for a node or level that is not there."""
    check_format(path)
    from matplotlib.figure import Figure

    spread = spreads(topology, groups or {}, level)
    frames, width, height = _laid_out(topology, level)
    scale = 13 / max(width, 12)
    figure = Figure(figsize=(14, min(2.2 + height * scale, 40)), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlim=(-0.5, width + 0.5), ylim=(height + 0.5, -3.2), aspect="equal")
    axes.axis("off")
    axes.set_title("\n".join(filter(None, (title, _summary(spread)))), fontsize=10, color=GREY)
    _draw_cells(axes, frames, dict(groups or {}), len(topology.nodes))
    _draw_frames(axes, frames, groups or {}, topology.switches[0].name, width)
    _draw_legend(axes, spread)
    save(figure, path)


def colours_of(groups: Sequence[str]) -> dict[str, str]:
    """A colour for every group, neighbours well apart."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    if len(groups) <= 20:
        palette = colormaps["tab20"]  # dark and light by turns: all dark ones first
        return {group: to_hex(palette(place * 2 % 20 + place // 10)) for place, group in enumerate(groups)}
    # By the golden ratio neighbours are far apart, however many there are.
    return {
        group: to_hex(hsv_to_rgb(place * 0.618034 % 1, 0.5 + place % 3 * 0.2, 0.95 - place % 4 * 0.12))
        for place, group in enumerate(groups)
    }


def _summary(spread: Mapping[str, int]) -> str:
    if not spread:
        return ""
    low, high = min(spread.values()), max(spread.values())
    return f"{len(spread)} groups; a group touches {low if low == high else f'{low} to {high}'} minipods"


def _laid_out(topology: Topology, level: Level | None) -> tuple[list[_Frame], float, float]:
    """Frames side by side in lines of about equal width, and the width and height of all."""
    pods: list[tuple[str, list[list[Node]]]] = []
    for name, nodes in topology.minipods(level).items():
        leaves: dict[int, list[Node]] = {}
        for node in nodes:
            leaves.setdefault(node.leaf, []).append(node)
        pods.append((name, list(leaves.values())))
    wide = max(len(leaf) for _, leaves in pods for leaf in leaves) + GAP
    high = max(len(leaves) for _, leaves in pods) + 2 * GAP
    columns = min(len(pods), max(1, round((2.2 * len(pods) * high / wide) ** 0.5)))
    frames = [
        _Frame(name, place % columns * wide, place // columns * high, leaves)
        for place, (name, leaves) in enumerate(pods)
    ]
    return frames, columns * wide - GAP, -(-len(pods) // columns) * high - 2 * GAP


def _draw_cells(axes: Axes, frames: Sequence[_Frame], groups: dict[str, str], nodes: int) -> None:
    from matplotlib.collections import PolyCollection

    known = colours_of(list(dict.fromkeys(groups.values())))
    faded = 0.45 if groups else 1.0
    boxes: dict[tuple[str, float], list[list[tuple[float, float]]]] = {}
    for frame in frames:
        for row, leaf in enumerate(frame.leaves):
            paints = [
                (known[groups[node.name]], 1.0) if node.name in groups else (STATE_COLOURS[node.state.status], faded)
                for node in leaf
            ]
            for paint, start, end in _runs(paints, whole=nodes >= MANY):
                x, y = frame.x, frame.y + row
                boxes.setdefault(paint, []).append(
                    [(x + start, y), (x + end, y), (x + end, y + 0.86), (x + start, y + 0.86)]
                )
    edge = 0.0 if nodes >= MANY else 0.6
    for (colour, alpha), corners in boxes.items():
        axes.add_collection(
            PolyCollection(corners, facecolors=colour, edgecolors="white", linewidths=edge, alpha=alpha), autolim=False
        )


def _runs(paints: Sequence[tuple[str, float]], *, whole: bool) -> list[tuple[tuple[str, float], int, int]]:
    """(paint, first, end) of neighbours with the same paint; every cell by itself unless ``whole``."""
    runs: list[tuple[tuple[str, float], int, int]] = []
    for place, paint in enumerate(paints):
        if whole and runs and runs[-1][0] == paint:
            runs[-1] = (paint, runs[-1][1], place + 1)
        else:
            runs.append((paint, place, place + 1))
    return runs


def _draw_frames(axes: Axes, frames: Sequence[_Frame], groups: Mapping[str, str], top: str, width: float) -> None:
    """The tree above the leaves: the top, a line to every frame, its name and how many groups touch it."""
    from matplotlib.collections import LineCollection

    size = max(5.0, min(9.0, 450 / max(width, 1)))
    axes.text(width / 2, -2.4, top, ha="center", va="bottom", fontsize=max(size, 7), color=GREY)
    lines: list[list[tuple[float, float]]] = [[(-0.4, -2.2), (width, -2.2)]]
    for y in sorted({frame.y for frame in frames}):
        row = [frame for frame in frames if frame.y == y]
        lines.append([(-0.4, y - 1.1), (row[-1].x, y - 1.1)])
    lines.append([(-0.4, -2.2), (-0.4, frames[-1].y - 1.1)])
    for frame in frames:
        high = len(frame.leaves)
        lines.append([(frame.x, frame.y - 1.1), (frame.x, frame.y + high)])
        touching = Counter(groups[node.name] for leaf in frame.leaves for node in leaf if node.name in groups)
        count = f" · {len(touching)} group{'s' if len(touching) != 1 else ''}" if touching else ""
        axes.text(frame.x + 0.2, frame.y - 0.25, f"{frame.name}{count}", fontsize=size, color=GREY, clip_on=False)
    axes.add_collection(LineCollection(lines, colors=GREY, linewidths=0.7), autolim=False)


def _draw_legend(axes: Axes, spread: Mapping[str, int]) -> None:
    from matplotlib.patches import Patch

    colours = colours_of(list(spread))
    named = [
        Patch(color=colours[group], label=f"{group}: {count} minipod{'s' if count != 1 else ''}")
        for group, count in list(spread.items())[:MOST_NAMED]
    ]
    states = [Patch(color=colour, label=state) for state, colour in STATE_COLOURS.items()]
    legend = axes.legend(
        handles=[*named, *states], ncols=8, loc="upper center", bbox_to_anchor=(0.5, 0.0), frameon=False, fontsize=8
    )
    for word in legend.get_texts():
        word.set_color(GREY)
