"""Pictures in files. The only place that loads a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from plait.core.errors import DataError
from plait.core.files import replacing
from plait.core.gantt import Bar

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text

FORMATS = ("svg", "png", "pdf")
GREY = "#808890"


def draw_gantt(bars: Sequence[Bar], path: Path, *, title: str, unit: str = "s") -> None:
    """Bars as a picture whose format the file's ending names; a colour a kind, labels where they fit. Appears
    whole or not at all. An SVG has no background, for light pages and dark ones."""
    kind_of_file = path.suffix.lstrip(".").lower()
    if kind_of_file not in FORMATS:
        raise DataError(f"{path}: a picture's name ends in .{', .'.join(FORMATS)}")
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = list(dict.fromkeys(bar.row for bar in bars))
    kinds = list(dict.fromkeys(bar.kind for bar in bars))
    span = max((bar.end for bar in bars), default=1.0) - min((bar.start for bar in bars), default=0.0)
    figure = Figure(figsize=(14, 1.2 + 0.5 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, kind in enumerate(kinds):
        own = [bar for bar in bars if bar.kind == kind]
        axes.barh(
            [rows.index(bar.row) for bar in own],
            [bar.end - bar.start for bar in own],
            left=[bar.start for bar in own],
            height=0.8,
            color=f"C{number % 10}",
            edgecolor="white",
            linewidth=0.5,
            label=kind,
        )
    for bar in bars:
        if bar.label and (bar.end - bar.start) * 150 > span * len(bar.label):
            axes.text(
                (bar.start + bar.end) / 2,
                rows.index(bar.row),
                bar.label,
                ha="center",
                va="center",
                fontsize=7,
                color="white",
            )
    axes.set(yticks=range(len(rows)), yticklabels=rows, xlabel=f"time ({unit})", title=title)
    axes.invert_yaxis()
    if kinds:
        axes.legend(
            ncols=len(kinds), loc="upper center", bbox_to_anchor=(0.5, -0.02 - 0.6 / (1 + len(rows))), frameon=False
        )
    see_through = kind_of_file == "svg"
    if see_through:
        _tone_down(axes)
    same = rc_context({"svg.hashsalt": "plait", "svg.fonttype": "none"})  # the same bars, the same file
    with replacing(path) as partial, same:
        metadata = {"Date": None} if see_through else None
        figure.savefig(partial, format=kind_of_file, dpi=120, transparent=see_through, metadata=metadata)


def _tone_down(axes: Axes) -> None:
    """Lines and words in a grey that can be read on white and on black."""
    axes.tick_params(colors=GREY)
    for part in (axes.title, axes.xaxis.label, *axes.spines.values(), *_legend_words(axes)):
        part.set_color(GREY)


def _legend_words(axes: Axes) -> list[Text]:
    legend = axes.get_legend()
    return legend.get_texts() if legend else []
