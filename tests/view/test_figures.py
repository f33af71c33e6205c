"""Figures are plain values: what they show, and that no text in them is markup."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.parallel.layout import Layout
from plait.core.record.timeline import SpanKey
from plait.core.runs.evidence import Evidence, Verdict
from plait.diagnose.measured.dependencies import dependencies_of
from plait.diagnose.measured.reading import read_run
from plait.diagnose.measured.recording import AFTER, grid_of, rank_phrase
from plait.diagnose.rank_map import Heat, HeatColumn, by_segment, heat_of_segments, pooled, rank_states
from plait.diagnose.series import StepSeries, memory_of
from plait.view import timeline_callbacks
from plait.view.heat_callbacks import HeatCell, cell_after_key
from plait.view.rank_figures import HeatMarks, cell_text, grid_figure, heat_figure, is_flat
from plait.view.time_figures import (
    memory_figure,
    prediction_figure,
    rows_of,
    series_figure,
    thinned,
    timeline_figure,
    window,
)
from plait.view.timeline_callbacks import ShownStep, next_span, side_by_side
from plait.view.words import memory_words, packed, plain, prediction_words, series_words
from tests.support.recordings.made import write_run
from tests.support.recordings.simulated import simulated
from tests.view.served import CULPRIT, SLOW

TIER = "unit"

HOSTILE = "<img src=x onerror=alert(1)><b>%{x}</b></script>"


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return read_run(write_run(tmp_path_factory.mktemp("run") / "run", SLOW)).recording


def unpacked(values: dict[str, Any]) -> np.ndarray:
    array = np.frombuffer(base64.b64decode(values["bdata"]), dtype=f"<{values['dtype']}")
    return array.reshape([int(one) for one in values["shape"].split(",")]) if "shape" in values else array


def markup(figure: dict[str, Any]) -> str:
    return json.dumps(figure, default=lambda value: value.item())


def test_the_heat_map_shows_the_slow_rank_and_points_at_it(recording: Any) -> None:
    heat = heat_of_segments(by_segment(recording.rollup), recording.grid)
    shown = pooled(heat)
    figure = heat_figure(
        heat,
        shown,
        recording.grid,
        marks=HeatMarks(named={CULPRIT: "slow processor"}, cursor=(CULPRIT, 0)),
        order=("pp", "dp"),
    )
    own = figure["data"][0]
    red = unpacked(own["z"])
    assert np.unravel_index(np.nanargmax(red), red.shape)[0] == CULPRIT
    assert unpacked(own["customdata"])[CULPRIT, 0] == CULPRIT
    assert figure["layout"]["annotations"][0]["text"] == f"<b>rank {CULPRIT}</b>"
    assert figure["layout"]["shapes"][0]["y0"] == CULPRIT - 0.5
    assert figure["layout"]["yaxis"]["ticktext"][0] == "rank 0"
    text = cell_text(heat, shown, recording.grid, (CULPRIT, 0))
    assert text.startswith("rank 6 (stage 1, dp 2), mlp backward: ")
    assert "against its peers" in text
    assert len(figure["data"]) == 2, "own work and waiting have colours of their own"


def test_noise_stays_pale() -> None:
    """Colours begin where a verdict would: at 3 % of a rank's own work."""
    columns = (HeatColumn("compute", "mlp"), HeatColumn("wait", "mlp"))
    seconds = np.array([[1.0, 0.1], [1.001, 0.1], [1.002, 0.2]])
    heat = Heat(ranks=np.arange(3), columns=columns, seconds=seconds, excess=seconds - np.median(seconds, axis=0))
    shown = pooled(heat)
    layout = heat_figure(heat, shown, grid_of(Layout.of(dp=3)), order=("dp",))["layout"]
    assert layout["coloraxis"]["cmax"] == pytest.approx(30.03, abs=0.01)
    assert layout["coloraxis2"]["cmax"] == pytest.approx(100.0)


def test_many_ranks_are_labelled_by_the_axis_that_changes() -> None:
    grid = grid_of(Layout.of(pp=4, dp=64, tp=8))
    ranks = np.arange(2048)
    heat = Heat(
        ranks=ranks, columns=(HeatColumn("compute", "mlp"),), seconds=np.ones((2048, 1)), excess=np.zeros((2048, 1))
    )
    figure = heat_figure(heat, pooled(heat), grid, order=("pp", "dp", "tp"))
    assert figure["layout"]["yaxis"]["ticktext"] == ["stage 0", "stage 1", "stage 2", "stage 3"]
    near = heat_figure(heat, pooled(heat, 512, (0, 80)), grid, order=("pp", "dp", "tp"))
    assert near["layout"]["yaxis"]["ticktext"][:2] == ["dp 0", "dp 1"]


def test_the_timeline_draws_spans_and_what_one_depends_on(recording: Any) -> None:
    key = SpanKey(5, CULPRIT, "idle", "1RECV_F3", 0)
    found = dependencies_of(recording.spans, key)
    assert found
    shown = window(recording.spans, [2, CULPRIT], (5, 5))
    assert shown
    rows = rows_of(shown.bars)
    figure = timeline_figure(shown, origin=shown.begin, chosen=found)
    assert sum(len(trace["x"]) for trace in figure["data"]) == shown.bars.height
    arrows = figure["layout"]["annotations"]
    assert arrows and arrows[0]["y"] == rows[CULPRIT, "processor"]
    assert arrows[0]["ay"] == rows[2, "pp"], "from the transfer on the other stage"
    assert figure["layout"]["shapes"][0]["name"] == "chosen"
    numbers = sorted(number for trace in figure["data"] for number in trace["customdata"])
    assert numbers == list(range(shown.bars.height))


def test_arrows_go_on_in_time() -> None:
    _, spans = simulated("zero1")
    step = spans.filter(pl.col("step") == 1)
    shown = window(step, [0, 1], (1, 1))
    assert shown
    drawn = 0
    for row in step.filter(pl.col("kind").is_in(["wait", "comm"])).iter_rows(named=True):
        chosen = dependencies_of(step, SpanKey(*(row[name] for name in SpanKey._fields)))
        figure = timeline_figure(shown, origin=shown.begin, chosen=chosen)
        for arrow in figure["layout"]["annotations"]:
            drawn += 1
            assert arrow["ax"] <= arrow["x"] + 1e-6
    assert drawn > 50


def test_the_grid_shows_states_and_who_waits_for_whom() -> None:
    grid = grid_of(Layout.of(pp=2, dp=2, tp=2))
    evidence = [
        Evidence(rank=r, state="runs", thread="waits", doing=HOSTILE, error=HOSTILE, host=HOSTILE) for r in range(8)
    ]
    verdict = Verdict(cause="stopped", why="x", ranks=(5,), chain=())
    figure = grid_figure(rank_states(grid, hang=(verdict, evidence)), grid)
    named = next(trace for trace in figure["data"] if trace["name"] == "named (1)")
    assert (named["x"], named["y"], named["z"]) == ([1], [0], [1])
    [label] = figure["layout"]["scene"]["annotations"]
    assert (label["text"], label["x"], label["y"], label["z"]) == ("rank 5", 1, 0, 1)
    assert abs(label["ax"]) + abs(label["ay"]) > named["marker"]["size"], "beside its point"
    assert "<img" not in markup(figure)
    assert "&lt;img" in markup(figure)


def test_arrows_beside_the_grid_say_what_travels_along_each_axis() -> None:
    """Outside the ranks, from the first to the last of an axis, a head at each end that points
    outwards."""
    figure = grid_figure(rank_states(grid := grid_of(Layout.of(pp=4, dp=3, tp=2))), grid)
    for axis, (name, most, words) in enumerate(
        zip("xyz", (1, 2, 3), ("partial sums", "gradients", "activations up"), strict=True)
    ):
        line, heads = (one for one in figure["data"] if str(one["name"]).startswith(words))
        assert (line["type"], heads["type"]) == ("scatter3d", "cone")
        assert line[name] == [0, most / 2, most]
        assert (heads[name], heads["uvw"[axis]]) == ([0, most], [-1.0, 1.0])
        assert all(set(line[other]) == {-0.5} for other in "xyz" if other != name)


@pytest.mark.parametrize(
    ("shape", "titles"),
    [({"dp": 2}, ("dp", "")), ({"tp": 3}, ("tp", "")), ({"pp": 2, "dp": 4}, ("dp", "pp (stage)")), ({}, ("dp", "")),
     ({"dp": 2, "tp": 2}, ("dp", "tp")), ({"dp": 2, "cp": 2}, ("dp x cp 2", ""))],
)  # fmt: skip
def test_ranks_that_differ_on_two_axes_are_drawn_flat(shape: dict[str, int], titles: tuple[str, str]) -> None:
    grid = grid_of(Layout.of(**shape))
    found = rank_states(grid)
    figure = grid_figure(found, grid)
    assert is_flat(grid)
    assert {trace["type"] for trace in figure["data"]} == {"scatter"}
    assert (figure["layout"]["xaxis"]["title"]["text"], figure["layout"]["yaxis"]["title"]["text"]) == titles
    places = [place for trace in figure["data"] for place in zip(trace["x"], trace["y"], strict=True)]
    assert len(set(places)) == len(places) == grid.height, "no rank hides another"
    texts = [text for trace in figure["data"] for text in trace["text"]]
    assert sorted(texts) == [f"rank {rank}" for rank in range(grid.height)]
    assert {trace["textposition"] for trace in figure["data"]} == {"bottom center"}


def test_of_many_ranks_of_a_flat_picture_only_colours_are_shown() -> None:
    grid = grid_of(Layout.of(pp=64, dp=64))
    figure = grid_figure(rank_states(grid), grid)
    assert [trace["type"] for trace in figure["data"]] == ["scattergl"]
    assert figure["data"][0]["text"] is None
    assert figure["layout"]["height"] < 900


def test_labels_of_many_columns_stand_upright_and_apart() -> None:
    ranks, few, many = np.arange(2), 12, 80
    for columns, upright in ((few, False), (many, True)):
        segments = tuple(HeatColumn("compute", f"site {n}", "forward") for n in range(columns))
        values = np.ones((2, columns))
        heat = Heat(ranks=ranks, columns=segments, seconds=values, excess=values)
        axis = heat_figure(heat, pooled(heat), grid_of(Layout.of(dp=2)), order=("dp",))["layout"]["xaxis"]
        assert (axis["tickangle"] == -90) == upright
        apart = 900 / columns * (1.0 if upright else 0.57)
        assert axis["tickfont"]["size"] <= apart


def test_figures_are_told_in_words() -> None:
    loss = StepSeries("loss", (1, 2, 3), (5.0, 6.0, 4.5))
    assert series_words({"a": [loss], "b": [loss]}).startswith("A: loss 4.5 at step 3, between 4.5 and 6. B: loss")
    assert series_words({"a": []}) == "No step has numbers."
    predicted = [("stage 0", {"parameters": 2**20, "buffers": 2**20})]
    told = memory_words(predicted, [loss._replace(name="memory_tensors, rank 0", values=(2.0**20,) * 3)])
    assert told == "Stage 0 2.0 MiB predicted; memory_tensors, rank 0 1.0 MiB at most."
    assert memory_words([], []) == "Nothing is known of memory."
    assert prediction_words(None) == ""


def test_what_comes_after_a_step_is_not_compared_with_its_prediction(
    recording: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations and checkpoints are no part of a step; of a run's last they would be most of
    it."""
    step = recording.spans.filter(pl.col("step") == 3)
    own = step.filter(pl.col("rank") == 0)
    end = float(own["end"].max())
    after = [own[:1].with_columns(kind=pl.lit(kind), start=end + 1, end=end + 9) for kind in AFTER]
    shown = ShownStep(0, 3, pl.concat([step, *after]), [0], None, 0.0, None)
    monkeypatch.setattr(timeline_callbacks, "predicted_spans", lambda *_: own)
    snapshot: Any = SimpleNamespace(run=SimpleNamespace(plan=SimpleNamespace(costs={"x": 1})), told=True, problem="")
    figure, words = side_by_side(snapshot, shown)
    predicted, measured = (part.partition(":")[2] for part in words.split("Measured"))
    assert predicted.strip() == measured.strip(), "the same spans, and nothing after them"
    assert {one["name"] for one in figure["data"]}.isdisjoint(AFTER)


def test_memory_is_called_what_it_is() -> None:
    lines = [{"step": 1, "memory_tensors": {"stage 0, rank 1": 2**20}, "memory_process": {"stage 0, rank 1": 2**30}}]
    (found,) = memory_of(lines)
    assert found == StepSeries("tensors, stage 0, rank 1", (1,), (2.0**20,))
    assert memory_words([], [found]) == "Tensors, stage 0, rank 1 1.0 MiB at most."
    figure = memory_figure([("stage 0", {"parameters": 2**19})], [found])
    assert [one["name"] for one in figure["data"] if one["name"].startswith("measured")] == [
        "measured, at most", "measured: tensors, stage 0, rank 1",
    ]  # fmt: skip


@given(text=st.text() | st.just(HOSTILE))
def test_no_text_is_markup(text: str) -> None:
    safe = plain(text)
    assert not set(safe) & set("<>\"'")
    assert safe.isprintable()


def test_hostile_names_are_shown_as_they_are(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", SLOW)
    part = next((run / "timeline").glob("*.parquet"))
    spans = pl.read_parquet(part).with_columns(name=pl.lit(HOSTILE), site=pl.lit(HOSTILE), kind=pl.lit(HOSTILE))
    spans.write_parquet(part, metadata=dict(pl.read_parquet_metadata(part)))
    found = read_run(run).recording
    rank = int(part.name[5:10])
    heat = heat_of_segments(by_segment(found.rollup), found.grid)
    shown = window(found.spans, [rank], (0, 0))
    assert shown
    figures = (heat_figure(heat, pooled(heat), found.grid, order=("pp",)), timeline_figure(shown, origin=0.0))
    for figure in figures:
        assert "<img" not in markup(figure)
        assert "&lt;img" in markup(figure)
        assert not any("&lt;" in trace.get("hovertemplate", "") for trace in figure["data"]), "no text in a template"


def test_series_memory_and_prediction() -> None:
    loss = StepSeries("loss", tuple(range(1, 11)), tuple(float(n) for n in range(10)))
    figure = series_figure({"a": [loss, loss._replace(name="seconds")], "b": [loss]})
    assert len(figure["data"]) == 3
    assert {trace["yaxis"] for trace in figure["data"]} == {"y", "y2"}
    assert series_figure({"a": []})["data"] == []
    both = memory_figure([("stage 0", {"parameters": 2**20})], [loss._replace(name="memory")])
    assert [trace["type"] for trace in both["data"]] == ["bar"] * 5 + ["scatter"]
    assert memory_figure([], [])["data"] == prediction_figure(None)["data"] == []


@given(peak=st.integers(1, 9998))
def test_thinned_lines_keep_their_peaks(peak: int) -> None:
    values = [0.0] * 10_000
    values[peak] = 9.0
    steps, kept = thinned(StepSeries("loss", tuple(range(10_000)), tuple(values)))
    assert len(steps) <= 2000
    assert (steps[kept.index(9.0)], steps[0], steps[-1]) == (peak, 0, 9999)


KEYS = st.lists(
    st.sampled_from(
        ["ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight", "PageUp", "PageDown", "Home", "End", "+", "-", "0", "x"]
    )
)


@given(keys=KEYS, rows=st.integers(1, 5000), columns=st.integers(1, 20))
def test_keys_never_leave_the_map(keys: list[str], rows: int, columns: int) -> None:
    at = HeatCell()
    for key in keys:
        at = cell_after_key(at, key, rows=rows, columns=columns, cells=512)
        assert 0 <= at.row < rows
        assert 0 <= at.column < columns
        if at.window:
            assert 0 <= at.window[0] <= at.row < at.window[1] <= rows


def test_keys_go_from_span_to_span(recording: Any) -> None:
    shown = window(recording.spans, [2, CULPRIT], (5, 5))
    assert shown
    bars = shown.bars
    for rank in bars["rank"].unique():
        begun = next_span(bars, SpanKey(-1, rank, "", "", -1), "ArrowRight")
        assert begun and begun.rank == rank, "the keys begin at the rank that was opened"
    first = next_span(bars, SpanKey(-1, -1, "", "", -1), "ArrowRight")
    assert first and first.rank == 2
    second = next_span(bars, first, "ArrowRight")
    assert second and next_span(bars, second, "ArrowLeft") == first
    assert next_span(bars, first, "ArrowLeft") is None
    below = next_span(bars, first, "ArrowDown")
    assert below and (below.rank, below.kind) != (first.rank, first.kind)
    assert next_span(bars, first, "ArrowUp") is None


def test_places_and_arrays(recording: Any) -> None:
    assert rank_phrase(recording.grid, CULPRIT) == "rank 6 (stage 1, dp 2)"
    assert rank_phrase(recording.grid, 99) == "rank 99"
    array = np.array([[1.5, np.nan], [2.0, 3.0]])
    assert unpacked(packed(array))[1].tolist() == [2.0, 3.0]
    assert packed(np.arange(3), "i4")["dtype"] == "i4"
