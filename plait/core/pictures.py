"""Pictures in files: which formats there are, and writing a figure so that it is whole and always the same.

The figure is a plotting library's; this file loads none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from plait.core.errors import DataError
from plait.core.files import replacing

FORMATS = ("svg", "png", "pdf")
SAME: Mapping[Any, Any] = {"svg.hashsalt": "plait", "svg.fonttype": "none"}
"""matplotlib's settings, to be in force while a figure is saved: the same picture is the same file."""
GREY = "#808890"
"""Of lines and words: it can be read on white and on black."""


class Figure(Protocol):
    """What can be saved."""

    def savefig(self, fname: Any, /, **options: Any) -> Any: ...


def kind_of(path: Path) -> str:
    """A picture's format, by its name."""
    return path.suffix.lstrip(".").lower()


def check_format(path: Path, known: Sequence[str] = FORMATS) -> None:
    """Raise DataError for a picture that cannot be drawn as its name says."""
    if kind_of(path) not in known:
        raise DataError(f"{path}: a picture's name ends in .{', .'.join(known)}")


def save(figure: Figure, path: Path) -> None:
    """Whole or not at all; an SVG without background, for light pages and dark ones, and without the date.
    Under the settings ``SAME``."""
    kind = kind_of(path)
    svg = kind == "svg"
    with replacing(path) as partial:
        figure.savefig(partial, format=kind, dpi=120, transparent=svg, metadata={"Date": None} if svg else None)
