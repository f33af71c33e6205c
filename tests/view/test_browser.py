"""The page in a real browser: somebody who never saw the run finds what is wrong with it, by mouse
and by keyboard; the report needs no network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from plait.view.layout import LATE_FIGURES
from tests.support.recordings.made import write_run
from tests.support.recordings.simulated import write_simulated
from tests.view.served import CULPRIT, SLOW, browser, served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WAIT = 120_000
"""Milliseconds: the machine may have other things to do."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


@contextmanager
def opened(run: Path, chromium: Browser, *, late: float = 0.0) -> Iterator[Page]:
    """The run's page, which must not have an error in the end."""
    said: list[str] = []
    asked: list[str] = []
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    with served([run], late=late) as (url, _):
        page.set_default_timeout(WAIT)
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda one: said.append(one.text) if one.type == "error" else None)
        page.goto(url)
        page.wait_for_selector("#heat-figure .heatmaplayer image")
        yield page
        page.close()
    assert said == []
    assert [one for one in asked if not one.startswith((url, "data:", "blob:"))] == [], "all from this machine"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run", SLOW)


@pytest.fixture(scope="module")
def page(run: Path, chromium: Browser) -> Iterator[Page]:
    with opened(run, chromium) as found:
        yield found


@pytest.fixture(scope="module")
def late_page(run: Path, chromium: Browser) -> Iterator[Page]:
    """From a server that takes its time, as on a machine that others use."""
    with opened(run, chromium, late=0.5) as found:
        yield found


def anew(page: Page) -> Page:
    """As nobody has touched it, whatever a test before did."""
    page.reload()
    page.wait_for_selector("#heat-figure .heatmaplayer image")
    return page


@pytest.fixture
def shown(page: Page) -> Page:
    return anew(page)


def test_the_heat_map_is_painted_before_the_figures_below_it_are_there(page: Page, chromium: Browser) -> None:
    look = "['#heat-figure .heatmaplayer image', '.figure .main-svg'].map(at => document.querySelectorAll(at).length)"
    fresh = chromium.new_page()
    fresh.add_init_script(
        f"window.seen = []; new MutationObserver(() => window.seen.push({look}))"
        ".observe(document, {childList: true, subtree: true});"
    )
    fresh.goto(page.url)
    for name in LATE_FIGURES:
        fresh.wait_for_selector(f"#{name} .main-svg")
    seen = fresh.evaluate("window.seen")
    fresh.close()
    assert any(image and not below for image, below in seen)
    assert not any(below and not image for image, below in seen)


@pytest.fixture
def late(late_page: Page) -> Page:
    return anew(late_page)


def drawn(page: Page, graph: str, what: str) -> Any:
    """Of a figure as plotly has it."""
    return page.evaluate(f"() => {{ const g = document.querySelector('#{graph} .js-plotly-plot'); return {what}; }}")


def test_the_slow_rank_is_named_and_red(shown: Page) -> None:
    shown.wait_for_function("document.querySelector('#text').textContent.includes('SLOW PROCESSOR: rank 6')")
    shown.wait_for_function(
        "document.querySelector('#heat-figure .js-plotly-plot').layout.annotations.some(a => a.text.includes('rank 6'))"
    )
    shown.wait_for_function(  # it may be drawn once more
        "culprit => { const g = document.querySelector('#heat-figure .js-plotly-plot'); "
        "let best = [-1, 0]; g.calcdata[0][0].z.forEach((row, n) => { "
        "const most = Math.max(...Array.from(row).filter(Number.isFinite)); "
        "if (most > best[1]) best = [n, most]; }); return best[0] === culprit; }",
        arg=CULPRIT,
    )  # fmt: skip
    first = shown.locator("#unlike button").first
    assert first.inner_text().startswith("rank 6 (stage 1, dp 2): +")
    assert "slow processor" in first.inner_text()


def test_a_click_on_a_span_shows_what_it_depends_on(shown: Page) -> None:
    shown.locator("#unlike button").first.click()
    shown.wait_for_function("document.querySelector('#rank').value === '6'")
    shown.wait_for_selector("#timeline-figure .barlayer .point path", state="attached")
    bar = shown.locator("#timeline-figure .barlayer .trace .point path").nth(4)
    bar.scroll_into_view_if_needed()
    box = bar.bounding_box()
    assert box
    shown.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    shown.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    shown.wait_for_selector("#links button")
    assert "stage" in shown.locator("#span").inner_text()
    assert drawn(shown, "timeline-figure", "g.layout.shapes.filter(s => s.name === 'chosen').length") == 1
    before = shown.locator("#span").inner_text()
    shown.locator("#links button").first.click()
    shown.wait_for_function("before => document.querySelector('#span').textContent !== before", arg=before)


def test_the_keyboard_is_enough(shown: Page) -> None:
    shown.locator("#heat-box").focus()
    shown.keyboard.press("ArrowDown")
    shown.wait_for_function("document.querySelector('#cell').textContent.startsWith('rank 0 ')")
    for number in range(1, CULPRIT + 1):
        shown.keyboard.press("ArrowDown")
        shown.wait_for_function(f"document.querySelector('#cell').textContent.startsWith('rank {number} ')")
    assert "against its peers" in shown.locator("#cell").inner_text()
    shown.keyboard.press("+")
    shown.keyboard.press("0")
    shown.keyboard.press("Enter")
    shown.wait_for_function("document.querySelector('#rank').value === '6'")
    shown.wait_for_function("document.activeElement.id === 'time-box'")
    shown.wait_for_selector("#timeline-figure .barlayer .point path", state="attached")
    for _ in range(30):  # the first spans of a step depend on nothing
        before = shown.locator("#span").inner_text()
        shown.keyboard.press("ArrowRight")
        shown.wait_for_function("before => document.querySelector('#span').textContent !== before", arg=before)
        if shown.locator("#links button").count():
            break
    first = shown.locator("#span").inner_text()
    shown.keyboard.press("ArrowRight")
    shown.wait_for_function("first => document.querySelector('#span').textContent !== first", arg=first)
    second = shown.locator("#span").inner_text()
    shown.keyboard.press("n")
    shown.wait_for_function("second => document.querySelector('#span').textContent !== second", arg=second)


def test_keys_come_faster_than_answers(late: Page) -> None:
    late.locator("#heat-box").focus()
    for _ in range(CULPRIT + 1):  # the first marks the first row
        late.keyboard.press("ArrowDown")
    late.wait_for_function(f"document.querySelector('#cell').textContent.startsWith('rank {CULPRIT} ')")
    late.wait_for_selector("#timeline-figure .barlayer .point path", state="attached")
    length = (
        "(([low, high]) => high - low)(document.querySelector('#timeline-figure .js-plotly-plot').layout.xaxis.range)"
    )
    whole = late.evaluate(length)
    for key in ("Enter", "ArrowRight", "ArrowRight", "+"):
        late.keyboard.press(key)
    late.wait_for_function("document.querySelector('#span').textContent.startsWith('rank 6 ')")
    late.wait_for_function(f"{length} < {whole / 3}")


def test_what_a_figure_says_meanwhile_loses_no_click(late: Page) -> None:
    """A figure that is drawn anew says so, and numbers that are shown anew count as changed."""
    late.locator("#unlike button").first.click()
    late.wait_for_selector("#timeline-figure .barlayer .point path", state="attached")
    late.wait_for_function("document.querySelector('#rank').value === '6'")
    before = late.locator("#span").inner_text()
    point = {"points": [{"customdata": 4}]}
    late.evaluate(
        "async point => { const say = window.dash_clientside.set_props; say('timeline-figure', {clickData: point}); "
        "await new Promise(done => setTimeout(done, 100)); "
        "say('timeline-figure', {relayoutData: {autosize: true}}); say('rank', {value: 6}); }",
        point,
    )
    late.wait_for_function("before => document.querySelector('#span').textContent !== before", arg=before)
    late.wait_for_selector("#links button")


def test_other_orders_statistics_and_columns(shown: Page) -> None:
    # In the middle: what a list has is out of the window if it opens at its edge, and cannot be scrolled to.
    shown.locator("#columns").evaluate("one => one.scrollIntoView({block: 'center'})")
    shown.locator("#columns").click()
    shown.get_by_text("steps", exact=True).last.click()
    shown.wait_for_function("document.querySelector('#heat-figure .js-plotly-plot').data[0].x.length === 12")
    shown.locator("#order").click()
    shown.get_by_text("dp, stage", exact=True).last.click()
    ticks = "document.querySelector('#heat-figure .js-plotly-plot').layout.yaxis.ticktext"
    shown.wait_for_function(f"{ticks}.slice(0, 3).join() === 'rank 0,rank 4,rank 1'")


def test_everything_has_a_name_and_is_reached_by_tab(shown: Page) -> None:
    seen: set[str] = set()
    shown.wait_for_selector("#unlike button")
    for _ in range(60):
        shown.keyboard.press("Tab")
        seen.add(shown.evaluate("(document.activeElement.closest('[id]') || document.body).id"))
    assert {"heat-box", "time-box", "statistic", "rank", "text"} <= seen
    names = shown.evaluate("[...document.querySelectorAll('main section')].map(s => s.getAttribute('aria-labelledby'))")
    assert len(names) == 8
    nameless = "[...document.querySelectorAll('input:not([id])')].map(i => i.outerHTML)"
    assert not [one for one in shown.evaluate(nameless) if 'aria-hidden="true"' not in one]


def has_data(figure: str) -> str:
    """Whether a figure has data."""
    return f"(document.querySelector('#{figure} .js-plotly-plot') || {{data: []}}).data.length > 0"


def test_a_flat_grid_is_drawn_at_once_and_figures_have_words_and_no_more_room_than_they_take(shown: Page) -> None:
    shown.wait_for_function(
        "(document.querySelector('#grid-figure .js-plotly-plot') || {data: []}).data.some(d => d.name === 'slow (1)')"
    )
    assert shown.evaluate("window.scrollY") == 0
    assert "slow: a straggler" in shown.locator("#grid-table").inner_text()
    shown.wait_for_function(has_data("timeline-figure"))
    told = "document.getElementById(f.getAttribute('aria-labelledby')).innerText"
    figures = "[...document.querySelectorAll('.figure[role=img]')]"
    shown.wait_for_function(f"{figures}.every(f => f.id === 'prediction-figure-place' || {told}.length > 0)")
    assert shown.evaluate(f"{figures}.length") == 5
    room = shown.evaluate(
        "[document.getElementById('timeline-figure-place').offsetHeight, "
        "document.querySelector('#timeline-figure .js-plotly-plot')._fullLayout.height]"
    )
    assert room[0] <= room[1] + 10


def test_three_dimensions_are_drawn_when_they_come_into_view(tmp_path: Path, chromium: Browser) -> None:
    with opened(write_simulated(tmp_path / "run", "three axes"), chromium) as page:
        page.wait_for_function(has_data("timeline-figure"))
        assert "its pipeline" in page.locator("#beside").inner_text()
        page.locator("#grid").scroll_into_view_if_needed()
        page.wait_for_function(has_data("grid-figure"))
        assert page.evaluate("document.querySelector('#grid-figure .js-plotly-plot').data[0].type") == "scatter3d"


def test_the_report_with_the_network_off(tmp_path: Path, chromium: Browser) -> None:
    from tests.cli.test_diagnose import run_cli

    run = write_run(tmp_path / "run", SLOW)
    hostile = '{"number": 1, "outcome": "<img src=x onerror=document.title=1>", "cause": "</script><b>"}\n'
    (run / "attempts.jsonl").write_text(hostile)
    out = tmp_path / "report.html"
    assert "report.html" in run_cli("view", run, "--save", out).stdout
    with chromium.new_context(viewport={"width": 1280, "height": 900}) as context:
        page = context.new_page()
        page.set_default_timeout(WAIT)
        said: list[str] = []
        page.on("pageerror", lambda error: said.append(str(error)))
        context.set_offline(True)
        page.goto(out.as_uri())
        page.wait_for_selector("#heat-figure .heatmaplayer image")
        assert f"SLOW PROCESSOR: rank {CULPRIT}" in page.locator("#text").inner_text()
        for figure in ("steps-figure", "timeline-figure", "grid-figure", "both-figure", "prediction-figure"):
            page.wait_for_selector(f"#{figure} .main-svg", state="attached")
        assert "<img src=x" in page.locator("#attempts").inner_text()
        assert page.locator("#attempts img").count() == 0
        assert page.title().startswith("plait view")
        assert said == []
