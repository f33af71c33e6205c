"""What stands in figures and pages: texts made safe, numbers made short, arrays made small.

Plotly takes `<b>`, `<a href=...>` and a few more in any text for markup, and `%{...}` in a template for a
variable. So texts that come from files go through ``plain``, and never into a template.
"""

from __future__ import annotations

import base64
import html
from typing import TYPE_CHECKING, Any

from plait.core.base.text import printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

LONGEST = 300
"""Characters of a text from a file, in a figure."""
PALETTE = {
    "compute": "#2f6db3", "wait": "#c9ced6", "idle": "#dfe3e8", "comm": "#e08a2e", "transfer": "#8a5cb8",
    "data": "#3a9a6a", "host": "#7a6a50", "optimizer": "#b8425c", "checkpoint": "#4d5661", "evaluation": "#66a3a8",
    "own work": "#2f6db3",
}  # fmt: skip
"""Of kinds of spans. Waiting is pale, so that work stands out."""
STATE_COLOURS = {
    "named": "#d00000", "crashed": "#8b0000", "stopped": "#c2410c", "silent": "#7c2d92", "slow": "#e07b00",
    "works": "#0f766e", "waits": "#9fb3c8", "ended": "#5b6770", "runs": "#2f855a", "unknown": "#d1d5db",
}  # fmt: skip
FONT: dict[str, Any] = {"family": "system-ui, sans-serif", "size": 13}


def plain(text: object) -> str:
    """A text that nothing takes for markup."""
    words = printable(str(text), kept="")
    return html.escape(words if len(words) <= LONGEST else words[: LONGEST - 1] + "…", quote=True)


def packed(values: NDArray[Any], kind: str = "f4") -> dict[str, Any]:
    """An array as plotly.js reads it without parsing: a tenth of the time and half of the bytes of a list.
    kind: ``f4``, ``f8``, ``i4``."""
    array = values.astype(f"<{kind}")
    found: dict[str, Any] = {"dtype": kind, "bdata": base64.b64encode(array.tobytes()).decode()}
    return found if array.ndim == 1 else {**found, "shape": ", ".join(map(str, array.shape))}


def seconds_text(seconds: float, signed: bool = False) -> str:
    """
    >>> seconds_text(0.0123), seconds_text(-2.5, signed=True), seconds_text(250e-6)
    ('12.3 ms', '-2.50 s', '250 µs')
    """
    sign = "+" if signed and seconds >= 0 else ""
    size = abs(seconds)
    if size >= 100:
        return f"{sign}{seconds:,.0f} s"
    if size >= 1:
        return f"{sign}{seconds:.2f} s"
    return f"{sign}{seconds * 1e3:.1f} ms" if size >= 1e-3 else f"{sign}{seconds * 1e6:.0f} µs"


def layout(**more: Any) -> dict[str, Any]:
    """What all figures share."""
    return {
        "font": FONT, "margin": {"l": 70, "r": 20, "t": 30, "b": 60}, "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff", "hoverlabel": {"align": "left"}, **more,
    }  # fmt: skip


def nothing(why: str) -> dict[str, Any]:
    """A figure that says why it is empty."""
    axis = {"visible": False}
    note = {"text": plain(why), "showarrow": False, "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5}
    return {"data": [], "layout": layout(xaxis=axis, yaxis=axis, annotations=[note], height=160)}
