"""What stands on the page, without any of a run's content: headings, controls, places for figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dash import dcc, html

from plait.diagnose.heat import STATISTICS
from plait.view.words import nothing

SECONDS = 1
"""Between two looks at the folders."""
SECTIONS = (
    ("verdict", "What is wrong"), ("heat", "Heat map"), ("timeline", "Timeline"), ("grid", "The ranks' grid"),
    ("progress", "Step time and loss"), ("memory", "Memory"), ("predicted", "Predicted and measured"),
    ("attempts", "Attempts"),
)  # fmt: skip
HEAT_KEYS = (
    "Keys: arrows and Page keys move the marked cell, + and - zoom, 0 shows all, Enter opens the rank's timeline."
)
TIME_KEYS = (
    "Keys: left and right go to the span before and after, up and down to other rows, + and - zoom, 0 shows the "
    "whole step, n goes to what the span needed last, b to what needed it."
)
POLITE: dict[str, Any] = {"aria-live": "polite"}
"""What changes there is read out when there is time."""
WITH = {
    "pp": "its pipeline", "dp": "its dp group", "tp": "its tp group", "cp": "its cp group", "host": "its host",
    "rank": "nobody else",
}  # fmt: skip
WORDS_OF = {
    "grid-figure": "grid-table", "series-figure": "series-words", "memory-figure": "memory-words",
    "prediction-figure": "prediction-text", "both-figure": "both-words",
}  # fmt: skip
"""Figures that are pictures for who does not see them, and where their words stand."""
LATER = ("timeline-figure", "grid-figure", "series-figure", "memory-figure", "prediction-figure", "both-figure")
"""Figures that come to their places once the heat map is painted: plotly takes long even for empty ones."""


def page(runs: Sequence[str], **first: Any) -> html.Div:
    """runs: names, to choose from. first: what is known already: ``figure`` and ``orders`` of the heat map,
    ``besides`` of the timeline, ``version``."""
    return html.Div([
        html.A("To the heat map", href="#heat", className="skip"),
        html.Header([
            html.H1("plait view"),
            _field("Run", dcc.Dropdown(
                [{"label": name, "value": n} for n, name in enumerate(runs)], 0, id="run", clearable=False,
            ), hidden=len(runs) < 2),
            html.P(id="status", role="status", **POLITE),
            html.Nav([html.A(title, href=f"#{name}") for name, title in SECTIONS], **_said("label", "Sections")),
        ]),
        html.Main([
            _section("verdict", [
                html.Div(id="hang"), html.Pre("reading ...", id="text", tabIndex=0), html.Ul(id="notes"),
            ]),
            _section("heat", _heat(first)),
            _section("timeline", _timeline(first)),
            _section("grid", [
                html.P("Colour is a rank's state; a line goes from a rank to those it waits for."),
                _later("grid-figure"), html.Div(id="grid-table"),
            ]),
            _section("progress", [_later("series-figure"), _words("series-words")]),
            _section("memory", [_later("memory-figure"), _words("memory-words")]),
            _section("predicted", [
                _later("prediction-figure"), _words("prediction-text"), _later("both-figure"), _words("both-words"),
            ]),
            _section("attempts", [html.Div(id="attempts-table")]),
        ]),
        dcc.Interval(id="tick", interval=SECONDS * 1000),
        dcc.Store(id="version", data=first.get("version", "")),
        dcc.Store(id="heat-at", data={}), dcc.Store(id="chosen", data={}), dcc.Store(id="zoom"),
        dcc.Store(id="seen", data=False), dcc.Store(id="keys"), dcc.Store(id="answered", data=0),
        dcc.Store(id="shown", data={}), dcc.Store(id="painted", data=False), dcc.Store(id="below", data=False),
    ], id="page")  # fmt: skip


def _said(what: str, words: str) -> dict[str, Any]:
    """For those who do not see the page."""
    return {f"aria-{what}": words}


def _section(name: str, children: list[Any]) -> html.Section:
    title = dict(SECTIONS)[name]
    return html.Section(
        [html.H2(title, id=f"{name}-title"), *children], id=name, **_said("labelledby", f"{name}-title")
    )


def _later(name: str) -> html.Div:
    words: dict[str, Any] = {"role": "img", **_said("labelledby", WORDS_OF[name])} if name in WORDS_OF else {}
    return html.Div(id=place_of_figure(name), className="figure", **words)


def _words(name: str) -> html.P:
    return html.P(id=name, className="hint")


def place_of_figure(name: str) -> str:
    """Where on the page a figure comes to stand."""
    return f"{name}-place"


def graph(name: str, figure: dict[str, Any] | None = None) -> dcc.Graph:
    """A figure; as long as there is none, the words that say so."""
    return dcc.Graph(id=name, figure=figure or nothing("reading ..."), config={"displaylogo": False})


def _field(label: str, control: Any, *, hidden: bool = False) -> html.Div:
    return html.Div(
        [html.Label(label, htmlFor=control.id), control], className="field", style={"display": "none"} if hidden else {}
    )


def _number(name: str, label: str) -> html.Div:
    return _field(label, dcc.Input(id=name, type="number", min=1, step=1, debounce=True))


def _keyed(name: str, label: str, child: Any) -> html.Div:
    """A figure that takes keys when it has the focus."""
    more: dict[str, Any] = _said("label", label) | {"data-keys": name}
    return html.Div(child, id=name, tabIndex=0, role="application", className="keyed", **more)


def _heat(first: dict[str, Any]) -> list[Any]:
    orders = first.get("orders", [])
    return [
        html.P(
            "Red in own work: the rank takes longer for it than its equals. Waiting has colours of its own, "
            "because a rank that waits long is not the one that others wait for."
        ),
        html.Div([
            _field("Show", dcc.Dropdown(
                [{"label": "beyond its equals", "value": "excess"}, {"label": "seconds", "value": "seconds"}], "excess",
                id="value", clearable=False,
            )),
            _field("Statistic over steps", dcc.Dropdown(list(STATISTICS), "mean", id="statistic", clearable=False)),
            _field("Columns", dcc.Dropdown(
                [{"label": "code segments", "value": "segments"}, {"label": "steps", "value": "steps"}], "segments",
                id="columns", clearable=False,
            )),
            _field("Ranks ordered by", dcc.Dropdown(
                orders, orders[0]["value"] if orders else None, id="order", clearable=False,
            )),
            _number("first", "From step"), _number("last", "to step"),
        ], className="controls"),
        _keyed("heat-box", f"Heat map. {HEAT_KEYS}", graph("heat-figure", first.get("figure"))),
        html.P(id="cell", role="status", **POLITE),
        html.P(HEAT_KEYS, className="hint"),
        html.H3("Furthest above their equals"),
        html.P("Own work beyond their equals' in a step: the median step, or since they are named.", className="hint"),
        html.Div(id="unlike"),
    ]  # fmt: skip


def _timeline(first: dict[str, Any]) -> list[Any]:
    besides = first.get("besides", [])
    return [
        html.Div([
            _field("Rank", dcc.Input(id="rank", type="number", min=0, step=1, debounce=True)),
            _number("step", "Step"),
            _field("Beside", dcc.Dropdown(
                besides, besides[0]["value"] if besides else None, id="beside", clearable=False,
            )),
        ], className="controls"),
        html.P(id="clocks"),
        _keyed("time-box", f"Timeline. {TIME_KEYS}", _later("timeline-figure")),
        html.P(TIME_KEYS, className="hint"),
        html.Div(id="span", role="status", **POLITE),
        html.Div(id="links"),
    ]  # fmt: skip
