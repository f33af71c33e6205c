"""Keys on figures: what was pressed, in the order in which it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dash import Dash, Input, Output, State, no_update

from plait.view import heat_callbacks, timeline_callbacks
from plait.view.moves import unanswered
from plait.view.store import Watched, chosen_run


def connect(app: Dash, runs: Sequence[Watched]) -> None:
    """One callback for all figures: a key of one may lead to another, where the next is pressed. Keys come
    faster than answers, and Dash drops the answer of a callback that it asks again meanwhile: each time all
    that were not answered yet are, one after the other."""

    @app.callback(
        Output("heat-at", "data", allow_duplicate=True), Output("chosen", "data", allow_duplicate=True),
        Output("zoom", "data", allow_duplicate=True), Output("answered", "data"), Input("keys", "data"),
        State("answered", "data"), State("chosen", "data"), State("zoom", "data"), State("beside", "value"),
        *heat_callbacks.CONTROLS, prevent_initial_call=True,
    )  # fmt: skip
    def _press(keys: Any, answered: Any, chosen: Any, zoom: Any, beside: Any, *controls: Any) -> tuple[Any, ...]:
        pressed, count = unanswered(keys, answered)
        heat, now, marked = heat_callbacks.standing(runs, controls)
        number = controls[1]
        before = (now, marked), chosen, zoom
        for where, key in pressed:
            if where == "heat-box" and heat and key == "Enter":
                chosen = heat_callbacks.opened(heat, now)
            elif where == "heat-box" and heat:
                now, marked = heat_callbacks.by_key(heat, now, marked, key), True
            elif where == "time-box":
                shown = timeline_callbacks.shown_of(chosen_run(runs, number), chosen, beside, zoom)
                chosen, zoom = timeline_callbacks.by_key(key, shown, chosen, zoom) if shown else (chosen, zoom)
        after = (now, marked), chosen, zoom
        values = (now._asdict(), chosen, zoom)
        changed = [no_update if new == old else value for new, old, value in zip(after, before, values, strict=True)]
        return *changed, count
