"""Pictures drawn by matplotlib into files, without a browser: bars and curves over time, pairs of
ranks, topologies."""

# Matplotlib's stubs give **kwargs no type.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from colorsys import hsv_to_rgb
from dataclasses import dataclass
from html import escape
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.base.errors import DataError
from plait.core.base.files import replacing
from plait.core.base.pictures import Bar, PlotCurve
from plait.core.topology.switches import Level, Node, Topology
from plait.place.outline import spreads
from plait.plan.search.volumes import RankPairs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.text import Text

FORMATS = ("svg", "png", "pdf")
REPRODUCIBLE: dict[Any, Any] = {"svg.hashsalt": "plait", "svg.fonttype": "none"}
"""matplotlib's settings for saving a figure, by which the same picture gives the same file."""
GREY = "#808890"
"""The colour of lines and text: readable on white and on black."""
COLOURS = {"waiting": "#b8bec6"}
"""Colours of kinds that are not to stand out."""
MANY = 500
"""The number of bars above which their edges are not drawn, because they would hide the bars."""
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>svg {{ width: 100%; height: auto }}</style>
<svg{svg}
</html>
"""


def check_format(path: Path, known: Sequence[str] = FORMATS) -> None:
    """Raise DataError for a file whose ending names no known format."""
    if kind_of(path) not in known:
        raise DataError(f"{path}: a picture's name ends in .{', .'.join(known)}")


def kind_of(path: Path) -> str:
    """Return a picture's format, taken from its file name."""
    return path.suffix.lstrip(".").lower()


def draw_gantt(bars: Sequence[Bar], path: Path, *, title: str, unit: str = "s") -> None:
    """Draw bars into a file whose ending names the format: a colour for each kind, labels where
    they fit. The file appears whole or not at all. An SVG has no background, for light and dark
    pages."""
    check_format(path)
    rows = len({bar.row for bar in bars})
    figure = _figure(1.2 + 0.5 * rows)
    axes = figure.add_subplot()
    _draw_bars(axes, bars)
    axes.set(xlabel=f"time ({unit})", title=title)
    kinds = len({bar.kind for bar in bars})
    if kinds:
        _legend(axes, kinds, -0.02 - 0.6 / (1 + rows))
    save(figure, path, title)


def draw_step(bars: Sequence[Bar], curves: Sequence[PlotCurve], path: Path, *, title: str, limit: float) -> None:
    """Draw a step over time: bars, and below them curves of memory in bytes with the usable
    ``limit``. The file's ending names the format; HTML is the SVG on a page."""
    check_format(path, (*FORMATS, "html"))
    rows = len({bar.row for bar in bars})
    figure = _figure(4.5 + 0.35 * rows)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(0.5 + 0.35 * rows, 2.5))
    _draw_bars(above, bars)
    above.set_title(title)
    _legend(above, len({bar.kind for bar in bars}), -0.02)
    for curve in curves:
        below.plot([at for at, _ in curve.points], [size / 2**30 for _, size in curve.points], label=curve.name, lw=1)
    below.axhline(limit / 2**30, color=GREY, linestyle="--", linewidth=1, label="usable")
    below.set(xlabel="time (s)", ylabel="GiB of a rank")
    below.set_ylim(bottom=0)
    below.margins(x=0.01)
    below.legend(ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False)
    save(figure, path, title)


def draw_curves(
    panels: Sequence[tuple[str, Sequence[PlotCurve]]],
    path: Path,
    *,
    title: str,
    x_label: str,
    marks: Sequence[float] = (),
) -> None:
    """Draw quantities over time: a panel for each with its name and curves, one below the other.
    x_label: the label of the horizontal axis. marks: positions of vertical lines."""
    check_format(path)
    figure = _figure(1.2 + 2.2 * len(panels))
    below = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    lines: dict[str, Line2D] = {}  # a curve's name has the same colour in all panels
    colours = {name: f"C{number % 10}" for number, name in enumerate(_names(panels))}
    for axes, (name, curves) in zip(below, panels, strict=True):
        for curve in curves:
            (lines[curve.name],) = axes.plot(*zip(*curve.points, strict=True), color=colours[curve.name], lw=1.2)
        for mark in marks:
            axes.axvline(mark, color=GREY, linestyle="--", linewidth=1)
        axes.set(ylabel=name)
        axes.set_ylim(bottom=0)
        axes.margins(x=0.01)
    below[0].set_title(title)
    below[-1].set_xlabel(x_label)
    below[-1].legend(
        lines.values(), lines, ncols=len(lines), loc="upper center", bbox_to_anchor=(0.5, -0.25), frameon=False
    )
    save(figure, path, title)


def _names(panels: Sequence[tuple[str, Sequence[PlotCurve]]]) -> list[str]:
    return list(dict.fromkeys(curve.name for _, curves in panels for curve in curves))


def _figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(14, height), layout="constrained")


def _draw_bars(axes: Axes, bars: Sequence[Bar]) -> None:
    rows = list(dict.fromkeys(bar.row for bar in bars))
    span = max((bar.end for bar in bars), default=1.0) - min((bar.start for bar in bars), default=0.0)
    edges = "white" if len(bars) < MANY else "none"
    for number, kind in enumerate(dict.fromkeys(bar.kind for bar in bars)):
        own = [bar for bar in bars if bar.kind == kind]
        axes.barh(
            [rows.index(bar.row) for bar in own],
            [bar.end - bar.start for bar in own],
            left=[bar.start for bar in own],
            height=0.8,
            color=COLOURS.get(kind, f"C{number % 10}"),
            edgecolor=edges,
            linewidth=0.5,
            label=kind,
        )
    for bar in bars:
        if bar.label and (bar.end - bar.start) * 150 > span * len(bar.label):
            middle = (bar.start + bar.end) / 2
            axes.text(middle, rows.index(bar.row), bar.label, ha="center", va="center", fontsize=7, color="white")
    axes.set(yticks=range(len(rows)), yticklabels=rows)
    axes.invert_yaxis()


def _legend(axes: Axes, columns: int, below: float) -> None:
    axes.legend(ncols=columns, loc="upper center", bbox_to_anchor=(0.5, below), frameon=False)


def save(figure: Figure, path: Path, title: str = "") -> None:
    """Write a figure, whole or not at all, without the date. An SVG has no background, for light
    and dark pages; HTML is the SVG on a page with ``title``."""
    from matplotlib import rc_context

    kind = kind_of(path)
    svg = kind in ("svg", "html")
    options: dict[str, Any] = {"dpi": 120, "transparent": svg, "metadata": {"Date": None} if svg else None}
    for axes in figure.axes if svg else ():
        _tone_down(axes)
    with rc_context(REPRODUCIBLE), replacing(path) as partial:
        if kind != "html":
            figure.savefig(partial, format=kind, **options)
            return
        drawn = StringIO()
        figure.savefig(drawn, format="svg", **options)
        partial.write_text(PAGE.format(title=escape(title), svg=drawn.getvalue().partition("<svg")[2]))


def _tone_down(axes: Axes) -> None:
    """Draw lines and words in a grey that is readable on white and on black."""
    axes.tick_params(which="both", colors=GREY)
    for part in (axes.title, axes.xaxis.label, axes.yaxis.label, *axes.spines.values(), *_legend_words(axes)):
        part.set_color(GREY)


def _legend_words(axes: Axes) -> list[Text]:
    legend = axes.get_legend()
    return legend.get_texts() if legend else []


# ---- pairs of ranks ----


MOST = 768
"""The largest number of cells along a side; with more ranks, neighbours share a cell."""


def draw_pairs(pairs: RankPairs, path: Path, *, pods: Sequence[str], ranks_per_node: int, title: str) -> None:
    """Draw the bytes that each pair of ranks exchanges in a step; colours are logarithmic. pods:
    the minipod of every node, by node rank. ranks_per_node: ranks per node. Lines separate runs of
    nodes in one minipod. Raises DataError for an unknown file ending."""
    check_format(path)
    import numpy as np
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    side = min(pairs.ranks, MOST)
    cells = np.zeros((side, side))
    for (one, two), sent in pairs.sent.items():
        a, b = one * side // pairs.ranks, two * side // pairs.ranks
        cells[a, b] += sent
        cells[b, a] += sent
    shown = np.ma.masked_equal(cells, 0)
    figure = Figure(figsize=(9, 8), layout="constrained")
    axes = figure.add_subplot()
    edges = (-0.5, pairs.ranks - 0.5, pairs.ranks - 0.5, -0.5)
    image = axes.imshow(shown, norm=LogNorm(), cmap="viridis", interpolation="nearest", extent=edges)
    for number, (one, two) in enumerate(pairwise(pods), 1):
        if one != two:
            for line in (axes.axhline, axes.axvline):
                line(number * ranks_per_node - 0.5, color=GREY, linewidth=0.4)
    axes.set(xlabel="rank", ylabel="rank")
    axes.set_title(f"{title}: {pairs.silent:.2%} of the pairs of ranks send each other nothing", color=GREY)
    figure.colorbar(image, ax=axes, label="bytes of a step", shrink=0.8)
    save(figure, path)


STATE_COLOURS = {"free": "#dfe4ea", "busy": "#9aa4b0", "down": "#d64545"}
MOST_NAMED = 24
"""The largest number of groups that the legend names."""
GAP = 1.6
"""The distance between the frames of minipods, in cells; a name stands above each frame."""
MANY_NODES = 2_000
"""The number of nodes above which neighbours of one colour become one rectangle."""


@dataclass(frozen=True)
class _Frame:
    """The frame of a minipod: its position (columns to the right, rows down), and the nodes of its
    leaves."""

    name: str
    x: float
    y: float
    leaves: Sequence[Sequence[Node]]


def draw_topology(
    topology: Topology, path: Path, *, groups: Mapping[str, str] | None = None, level: Level | None = None,
    title: str = "",
) -> None:  # fmt: skip
    """Draw a topology. groups: the group of each placed node. The file appears whole or not at all;
    its ending names the format. Raises DataError for an unknown ending, JobError for an unknown
    node or level."""
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
    """Return a colour for every group; colours of neighbours differ strongly."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    if len(groups) <= 20:
        palette = colormaps["tab20"]  # dark and light alternate: all dark ones first
        return {group: to_hex(palette(index * 2 % 20 + index // 10)) for index, group in enumerate(groups)}
    # The golden ratio keeps hues of neighbours far apart, for any number of groups.
    return {
        group: to_hex(hsv_to_rgb(index * 0.618034 % 1, 0.5 + index % 3 * 0.2, 0.95 - index % 4 * 0.12))
        for index, group in enumerate(groups)
    }


def _summary(spread: Mapping[str, int]) -> str:
    if not spread:
        return ""
    low, high = min(spread.values()), max(spread.values())
    return f"{len(spread)} groups; a group touches {low if low == high else f'{low} to {high}'} minipods"


def _laid_out(topology: Topology, level: Level | None) -> tuple[list[_Frame], float, float]:
    """Return (frames of the minipods, arranged in rows of about equal width; width and height of
    the whole, in cells)."""
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
        _Frame(name, index % columns * wide, index // columns * high, leaves)
        for index, (name, leaves) in enumerate(pods)
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
            for paint, start, end in _runs(paints, whole=nodes >= MANY_NODES):
                x, y = frame.x, frame.y + row
                boxes.setdefault(paint, []).append(
                    [(x + start, y), (x + end, y), (x + end, y + 0.86), (x + start, y + 0.86)]
                )
    edge = 0.0 if nodes >= MANY_NODES else 0.6
    for (colour, alpha), corners in boxes.items():
        axes.add_collection(
            PolyCollection(corners, facecolors=colour, edgecolors="white", linewidths=edge, alpha=alpha), autolim=False
        )


def _runs(paints: Sequence[tuple[str, float]], *, whole: bool) -> list[tuple[tuple[str, float], int, int]]:
    """Return (paint, first index, end) for each run of neighbours with the same paint; without
    ``whole`` one for every cell."""
    runs: list[tuple[tuple[str, float], int, int]] = []
    for index, paint in enumerate(paints):
        if whole and runs and runs[-1][0] == paint:
            runs[-1] = (paint, runs[-1][1], index + 1)
        else:
            runs.append((paint, index, index + 1))
    return runs


def _draw_frames(axes: Axes, frames: Sequence[_Frame], groups: Mapping[str, str], top: str, width: float) -> None:
    """Draw the tree above the leaves: the top, a line to every frame, its name and the number of
    groups that touch it."""
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
