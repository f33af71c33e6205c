"""The page's structure without any content of a run: headings, controls, places for figures; and
the validation of values from a browser, which may be arbitrary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard, cast

from dash import Dash, Input, Output, State, dcc, html

from plait.core.base.codec.json_text import is_list, is_table
from plait.diagnose.rank_map import STATISTICS
from plait.view.words import nothing

SECONDS = 1
"""Seconds between two checks of the runs' folders for changes."""
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
"""Attributes for text whose changes a screen reader announces when it is idle."""
WITH = {
    "pp": "its pipeline", "dp": "its dp group", "tp": "its tp group", "cp": "its cp group", "host": "its host",
    "rank": "no other rank",
}  # fmt: skip
WORDS_OF = {
    "grid-figure": "grid-table", "series-figure": "series-words", "memory-figure": "memory-words",
    "prediction-figure": "prediction-text", "both-figure": "both-words",
}  # fmt: skip
"""Components that hold a figure's content in words, by figure: screen readers treat these figures
as images."""
LATE_FIGURES = ("timeline-figure", "grid-figure", "series-figure", "memory-figure", "prediction-figure", "both-figure")
"""Figures that are added after the heat map is painted, since plotly is slow even for empty
ones."""


SHARED = ("heat-at.data", "chosen.data", "zoom.data")
"""Properties that several callbacks write."""
Callback = tuple[str, str | Input, str, Callable[..., Any]]
CALLBACKS: list[Callback] = []
"""All callbacks, which ``on`` registers: outputs, inputs, states, and the function."""


def on(outputs: str, inputs: str | Input, states: str = "") -> Callable[..., Any]:
    """Return a decorator that makes a function a callback. The function receives the chosen run's
    snapshot and the values of inputs and states. outputs, inputs, states: ``COMPONENT.PROPERTY``,
    separated by spaces."""

    def asked(answer: Callable[..., Any]) -> Callable[..., Any]:
        CALLBACKS.append((outputs, inputs, states, answer))
        return answer

    return asked


def connect(app: Dash, snapshot: Callable[[object], Any], *more: Callback) -> None:
    """Register all callbacks with Dash, and ``more``. snapshot: returns the snapshot of a run's
    index.

    Each cause has its own callback. Dash drops the result of a callback that is triggered again
    meanwhile. A user's action would be lost if redrawing a figure triggered the same callback.
    """
    for outputs, inputs, states, answer in (*CALLBACKS, *more):

        def said(*values: Any, answer: Callable[..., Any] = answer) -> Any:
            *rest, number = values
            return answer(snapshot(number), *rest)

        answers = [Output(*_place(name), allow_duplicate=name in SHARED) for name in outputs.split()]
        causes = [Input(*_place(name)) for name in inputs.split()] if isinstance(inputs, str) else [inputs]
        beside = [State(*_place(name)) for name in f"{states} run.value".split()]
        cast("Any", app).callback(*answers, *causes, *beside, prevent_initial_call=True)(said)


def _place(name: str) -> tuple[str, str]:
    component, _, value = name.rpartition(".")
    return component, value


def is_number(value: object) -> TypeGuard[int | float]:
    """True if a value from a request is a usable number: finite, and no larger than a browser's
    exact integers.

    >>> [is_number(value) for value in (3, -0.5, True, "3", float("inf"), 10**30)]
    [True, True, False, False, False, False]
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**53


def point_of(click: object) -> Mapping[str, Any]:
    """Return the clicked point in a figure's ``clickData``; empty for any other value of a request.

    >>> point_of({"points": [{"customdata": 3}]}), point_of({"points": "x"}), point_of([1])
    ({'customdata': 3}, {}, {})
    """
    points = click.get("points") if is_table(click) else None
    first = points[0] if is_list(points) and points else None
    return first if is_table(first) else {}


def unanswered(keys: object, answered: object) -> tuple[list[tuple[str, str]], int]:
    """Return the keys pressed after the first ``answered`` ones, with the figure of each, and the
    number of all keys. keys: the ``count`` and the ``latest`` keys, as the page sends them.

    >>> unanswered({"count": 5, "latest": [["heat-box", "+"], ["heat-box", "Enter"], ["time-box", "n"]]}, 3)
    ([('heat-box', 'Enter'), ('time-box', 'n')], 5)
    """
    values = keys if is_table(keys) else {}
    count, latest = values.get("count"), values.get("latest")
    if not isinstance(count, int) or not is_list(latest):
        return [], 0
    new = count - answered if isinstance(answered, int) and 0 <= answered <= count else count
    pressed = latest[max(0, len(latest) - new) :] if new > 0 else []
    return [(str(one[0]), str(one[1])) for one in pressed if is_list(one) and len(one) == 2], count


def page(runs: Sequence[str], **first: Any) -> html.Div:
    """Return the page. runs: names to choose from. first: content that is known already: ``figure``
    and ``orders`` of the heat map, ``besides`` of the timeline, ``version``."""
    return html.Div([
        html.A("To the heat map", href="#heat", className="skip"),
        html.Header([
            html.H1("plait view"),
            _field("Run", dcc.Dropdown(
                [{"label": name, "value": n} for n, name in enumerate(runs)], 0, id="run", clearable=False,
            ), hidden=len(runs) < 2),
            html.P(id="status", role="status", **POLITE),
            html.Nav([html.A(title, href=f"#{name}") for name, title in SECTIONS], **_aria("label", "Sections")),
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


def _aria(what: str, words: str) -> dict[str, Any]:
    """Return an ARIA attribute, for screen readers."""
    return {f"aria-{what}": words}


def _section(name: str, children: list[Any]) -> html.Section:
    title = dict(SECTIONS)[name]
    return html.Section(
        [html.H2(title, id=f"{name}-title"), *children], id=name, **_aria("labelledby", f"{name}-title")
    )


def _later(name: str) -> html.Div:
    words: dict[str, Any] = {"role": "img", **_aria("labelledby", WORDS_OF[name])} if name in WORDS_OF else {}
    return html.Div(id=place_of_figure(name), className="figure", **words)


def _words(name: str) -> html.P:
    return html.P(id=name, className="hint")


def place_of_figure(name: str) -> str:
    """Return the id of the page's element that holds a figure. name: the figure's id."""
    return f"{name}-place"


def graph(name: str, figure: dict[str, Any] | None = None) -> dcc.Graph:
    """Return the component of a figure; without ``figure``, with a text that it is being read."""
    return dcc.Graph(id=name, figure=figure or nothing("reading ..."), config={"displaylogo": False})


def _field(label: str, control: Any, *, hidden: bool = False) -> html.Div:
    return html.Div(
        [html.Label(label, htmlFor=control.id), control], className="field", style={"display": "none"} if hidden else {}
    )


def _number(name: str, label: str) -> html.Div:
    return _field(label, dcc.Input(id=name, type="number", min=1, step=1, debounce=True))


def _keyed(name: str, label: str, child: Any) -> html.Div:
    """Return a figure that receives keys while it has the focus."""
    more: dict[str, Any] = _aria("label", label) | {"data-keys": name}
    return html.Div(child, id=name, tabIndex=0, role="application", className="keyed", **more)


def _heat(first: dict[str, Any]) -> list[Any]:
    orders = first.get("orders", [])
    return [
        html.P(
            "Red in own work: the rank takes longer for it than its peers. Waiting has colours of its own, "
            "because a rank that waits long is not the one that others wait for."
        ),
        html.Div([
            _field("Show", dcc.Dropdown(
                [{"label": "beyond its peers", "value": "excess"}, {"label": "seconds", "value": "seconds"}], "excess",
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
        html.H3("Furthest above their peers"),
        html.P("Own work beyond their peers' in a step: the median step, or since they are named.", className="hint"),
        html.Div(id="unlike"),
    ]  # fmt: skip


def _timeline(first: dict[str, Any]) -> list[Any]:
    besides = first.get("besides", [])
    return [
        html.Div([
            _field("Rank", dcc.Input(id="rank", type="number", min=0, step=1, debounce=True)),
            _number("step", "Step"),
            _field("Show with", dcc.Dropdown(
                besides, besides[0]["value"] if besides else None, id="beside", clearable=False,
            )),
        ], className="controls"),
        html.P(id="clocks"),
        _keyed("time-box", f"Timeline. {TIME_KEYS}", _later("timeline-figure")),
        html.P(TIME_KEYS, className="hint"),
        html.Div(id="span", role="status", **POLITE),
        html.Div(id="links"),
    ]  # fmt: skip
