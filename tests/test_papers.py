"""Pages of the papers hold what their JSON holds, and judge all that they print beside what is
published."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.papers import __main__ as runner
from benchmarks.papers import domino_curves, found, megascale, page, verdicts
from benchmarks.papers import draw as pictures
from benchmarks.papers.__main__ import figures
from benchmarks.papers.found import HERE, PAPERS, ROOT, Found, Row, read
from plait.api.planning import plan_job
from tests.support.command import plait

CLAIMS, WORDS, FIRST = 24, 1200, 10
FEW = ("train.steps=3", "train.warmup_steps=1")
FIGURES = [(paper, figure) for paper in PAPERS for figure in page.published(paper)["figures"]]


def test_every_claim_has_the_worst_verdict_of_its_quantities() -> None:
    every = list(page.claims())
    assert [claim["number"] for _, claim, _, _ in every] == list(range(1, CLAIMS + 1))
    for paper, claim, word, own in every:
        assert own and word == verdicts.worst(one.verdict.word for one in own)
        assert all(one.row.get("claim") in (None, claim["number"]) for one in own)
        assert f"{claim['number']} {word}" in page.page(paper) and claim["says"] in page.index()


def test_words_over_what_is_not_printed_are_shown_whole() -> None:
    (found,) = (one for one in page.quantities("internevo") if one.row["name"].startswith("sequences over"))
    assert f"|32|{', '.join(sorted(set(found.result['over'])))} (32)|" in page.page("internevo")


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.system
@pytest.mark.smoke
def test_the_rules_are_older_than_every_result() -> None:
    """They were not chosen by what came out."""
    try:
        rules = _git("log", "-1", "--format=%H", "--", str(HERE / "rules.toml"))
        shallow = _git("rev-parse", "--is-shallow-repository") == "true"
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a clone: there is no history to look at")
    if shallow or not rules:
        pytest.skip("a shallow clone: its history may begin after the rules")
    for paper, figure in FIGURES:
        kept = read(paper, figure["id"])
        assert kept and not kept["commit"].endswith("+"), (paper, figure["id"])
        _git("merge-base", "--is-ancestor", rules, kept["commit"])


@pytest.mark.parametrize("name", [*PAPERS, "README"])
def test_a_page_is_short_and_says_first_what_speaks_against_it(name: str) -> None:
    text = (page.DOCS / f"{name}.md").read_text()
    assert len(text.split()) <= WORDS
    first = "\n".join(text.splitlines()[:FIRST])
    assert "not reproduced" in first and (name == "README" or "**Against it**" in first)
    assert not [line for line in text.splitlines() if line.startswith("|") and ("plait " in line or "python" in line)]


@pytest.mark.parametrize("paper", PAPERS)
def test_pages_are_what_the_json_says(paper: str) -> None:
    assert (page.DOCS / f"{paper}.md").read_text() == page.page(paper)
    assert (page.DOCS / "README.md").read_text() == page.index()


@pytest.mark.parametrize(("paper", "figure"), FIGURES, ids=[f"{paper}-{one['id']}" for paper, one in FIGURES])
def test_a_figure_has_its_place_its_rows_and_its_function(paper: str, figure: dict[str, Any]) -> None:
    kept = read(paper, figure["id"])
    assert figure["place"] and figure["why"] and figure["id"] in figures(paper)
    assert kept, "make papers computes it"
    names = [row["name"] for row in kept["rows"]]
    assert len(names) == len(set(names))
    assert {row["name"] for row in figure["rows"]} <= set(names)  # nothing that is published is without a result
    assert page.picture(paper, figure).exists() == (figure["chart"] != "none")
    for row in kept["rows"]:
        words = shlex.split(row["command"])
        named = [word for word in words if word.startswith("benchmarks/papers/jobs/")]
        assert all((ROOT / word).exists() for word in named)
        assert (
            not words
            or words[0] == "plait"
            or (words[0] == "python" and (words[1] == "-m" or (ROOT / words[1]).exists()))
        )


def test_what_is_changed_in_the_json_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(paper: str, figure: str) -> dict[str, Any] | None:
        kept = read(paper, figure)
        assert kept
        return kept | {"rows": [row | {"value": 9.87, "over": []} for row in kept["rows"]]}

    before = page.page("domino")
    monkeypatch.setattr(page, "read", other)
    after = page.page("domino")
    assert before != after and "9.87x" in after and "9.87x" not in before


NOT, BY = "not reproduced", "by a reading (not reproduced)"
X = {"unit": "x", "published": [1.1, 1.3]}
SHARE = {"unit": "%", "published": [0.6, 0.8]}
YES, NONE = {"unit": "x", "published": "yes"}, {"unit": "%", "published": 0.0}


@pytest.mark.parametrize(
    ("row", "result", "word"),
    [
        (X, {"value": 1.075}, "as published"), (X, {"value": 1.07}, "direction"), (X, {"value": 1.375}, "as published"),
        (X, {"value": 1.5}, "direction"), (X, {"value": 1.005}, NOT), (X, {"value": 0.9}, NOT),
        (X, {"value": [1.2, 1.5]}, "direction"), (X, {"value": [0.9, 1.2]}, NOT),
        (X, {"value": "does not fit"}, NOT), (X, None, NOT),
        (X, {"value": 1.0, "reading": 1.2}, BY), (X, {"value": 1.5, "reading": 1.2}, "direction"),
        (X | {"differs": "a CPU"}, {"value": 1.2}, BY),
        (X | {"differs": "a CPU"}, {"value": 0.9}, NOT),
        (X, {"over": [1.0, 1.2]}, "not determined"), (X, {"over": [1.15, [1.2, 1.3]]}, "as published"),
        (X, {"over": [0.9, 0.8]}, NOT),
        (X | {"published": 0.8}, {"value": 0.7}, "direction"),
        (X | {"published": 1.0}, {"value": 1.004}, "as published"),
        (X | {"published": 1.0}, {"value": 1.1}, NOT),
        (SHARE, {"value": 0.54}, "as published"), (SHARE, {"value": 0.53}, NOT),
        (SHARE | {"published": [0.9, math.inf]}, {"value": 3.0}, "as published"),
        (NONE, {"value": 0.004}, "as published"), (NONE, {"value": 0.1}, NOT),
        (YES, {"value": True}, "direction"), (YES, {"value": False}, NOT),
        (YES, {"over": [True, False]}, "not determined"),
        (YES | {"published": "32"}, {"value": "32"}, "as published"),
        (YES | {"published": "32"}, {"value": "16"}, NOT),
    ],
)  # fmt: skip
def test_rules_by_hand(row: dict[str, Any], result: dict[str, Any] | None, word: str) -> None:
    assert str(verdicts.judge(row, result)) == word


def test_what_was_measured_has_more_noise() -> None:
    assert str(verdicts.judge(X, {"value": 1.02}, emulated=True)) == "not reproduced"
    assert str(verdicts.judge(X, {"value": 1.02})) == "direction"


def test_what_is_up_to_date_is_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted run goes on where it stopped; other code computes all anew; a lab is measured
    once."""
    done: list[str] = []

    def broken() -> Found:
        done.append("broken")
        raise KeyboardInterrupt

    def one() -> Found:
        done.append("one")
        return Found(rows=[Row(name="a", value=1.0)])

    def on_lab(*, again: bool) -> Found:
        done.append("measured" if again else "read")
        return Found()

    told = [{"id": name, "how": "planned"} for name in ("one", "broken", "lab")]
    module = SimpleNamespace(FIGURES={"one": one, "broken": broken}, EMULATED={"lab": on_lab})
    monkeypatch.setattr(runner, "import_module", lambda _: module)
    monkeypatch.setattr(runner, "published", lambda _: {"figures": told})
    monkeypatch.setattr(runner, "commit", lambda: "none")
    monkeypatch.setattr(found, "RESULTS", tmp_path)
    with pytest.raises(KeyboardInterrupt):
        runner.compute("domino", lab=False, again=False)
    module.FIGURES["broken"] = one
    for lab in (False, False, True, True):
        runner.compute("domino", lab=lab, again=False)
    assert done == ["one", "broken", "one", "read", "measured"]
    monkeypatch.setattr(runner, "fingerprint", lambda _: "other")
    runner.compute("domino", lab=False, again=False)
    assert done[5:] == ["one", "one", "read"]
    runner.compute("domino", lab=False, again=True, only=["lab"])
    assert done[8:] == ["read"]


def commands() -> list[list[str]]:
    """Words after "plait" of every command that a page shows, each once; but those by which nothing
    fits."""
    rows = [row for paper, figure in FIGURES for row in (read(paper, figure["id"]) or {"rows": ()})["rows"]]
    every = dict.fromkeys(
        row["command"] for row in rows if row["command"].startswith("plait ") and "fit" not in str(row["value"])
    )
    return [shlex.split(one)[1:] for one in every]


PLANS = [words for words in commands() if words[0] == "plan"]


@pytest.mark.parametrize("first", [0, *(pytest.param(at, marks=pytest.mark.contract) for at in range(1, 4))])
def test_every_command_that_plans_is_taken(first: int) -> None:
    """Its file, its settings and what it asks "if" about, of every fourth in the suite; what it
    says takes a minute for all of them."""
    assert len(PLANS) > 50
    for _, file, *words in PLANS[first::4]:
        settings = [word for word in words if not word.startswith("--")]
        changes = [settings.pop(settings.index(words[at + 1])) for at, word in enumerate(words) if word == "--what-if"]
        own = "--evaluate" in words
        planner = plan_job(ROOT / file, settings, changes=changes, evaluate=own).planner
        assert planner.predict(planner.job).memory.fits if own else planner.job, words


@pytest.mark.system
def test_every_command_that_trains_is_taken() -> None:
    trains = [words for words in commands() if words[0] == "train"]
    assert len(trains) == len(domino_curves.runs())
    for words in trains:
        done = plait(*words, "--dry-run", folder=ROOT)
        assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.contract
@pytest.mark.system
@pytest.mark.parametrize("words", commands()[::11], ids=lambda words: " ".join(words)[:80])
def test_commands_of_pages_run(words: list[str], tmp_path: Path) -> None:
    """Some of every kind. They keep what they find beside the job."""
    shutil.copytree(HERE / "jobs", tmp_path / (HERE / "jobs").relative_to(ROOT))
    done = plait(*words, *(FEW if words[0] == "train" else ()), folder=tmp_path)
    assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.system
@pytest.mark.smoke
@pytest.mark.slow
def test_slices_have_the_losses_of_none() -> None:
    """Three of the runs that the page shows, for a few steps; other weights have other losses."""
    asked = domino_curves.runs()
    none, sliced, other = (
        domino_curves.trained(asked[f"fp64: {which}"], *FEW)
        for which in (domino_curves.BASELINE, "4 x 2", domino_curves.SEED)
    )
    assert len(none) == 3 and max(domino_curves.apart(none, sliced)) < 1e-12
    assert min(domino_curves.apart(none, other)) > 1e-4


def test_rows_of_loss_curves_are_what_the_losses_say() -> None:
    """The JSON keeps the loss of every step; slices and none differ by less than two first weights,
    in fp64 by nearly nothing."""
    kept = read("domino", "curves")
    assert kept
    losses = {series["name"]: [loss for _, loss in series["points"]] for series in kept["series"]}
    told = json.loads(json.dumps(asdict(domino_curves.told(losses))))
    assert told["rows"] == kept["rows"] and told["facts"] == kept["facts"]
    assert all(series["points"][-1][0] == 200 for series in kept["series"])
    for precision, times in {"bf16": 1, "fp32": 100, "fp64": 1e9}.items():
        none, *sliced, other = (own for name, own in losses.items() if name.startswith(f"{precision}: "))
        means = [fmean(domino_curves.apart(none, own)) for own in (*sliced, other)]
        assert max(means[:-1]) < means[-1] / times


@pytest.mark.smoke
def test_a_command_says_what_the_figure_takes() -> None:
    """A row of Megatron-LM's as a user would have it, against the run of
    ``benchmarks/as_trained.py``."""
    words = shlex.split(megascale.megatron_command(256))
    told = json.loads(plait(*words[1:], "--json", folder=ROOT).stdout)
    assert told["candidates"][0]["seconds"] == pytest.approx(megascale.trained()[256].predicted.seconds, rel=1e-6)


def test_ranges_are_lines_and_axes_have_a_tick_a_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(pictures, "save", lambda made, file: drawn.update({file.stem: made.axes[0]}))
    rows = [{"name": "one", "published": 1.05, "over": [1.1, [1.2, 1.3]], "reading": 1.2}]
    figure = {"title": "title", "rows": rows, "names": {"in_code": "in words"}, "legend": "model"}
    points = [[gpus, gpus / 12288] for gpus in (256, 1024, 12288)]
    series = [{"name": name, "points": points} for name in ("in_code", "other")]
    marks = [{"name": "star", "x": 1024, "y": 0.4}, {"name": "band", "y": [0.1, 0.2]}, {"name": "line", "y": 0.3}]
    more: dict[str, Any] = {"marks": marks, "zero": True}
    for stem, unit, kept in (("ranges", "x", {"rows": rows}), ("lines", "%", {"series": series})):
        pictures.draw(figure | more | {"chart": stem, "unit": unit}, kept, tmp_path / stem)
    curves = {curve.get_label(): curve for curve in drawn["ranges"].get_lines()}
    assert {name: list(curves[name].get_xdata()) for name in pictures.WHOSE} == {
        "published": [1.05, 1.05], "Plait": [1.1, 1.3], "by a reading": [1.2, 1.2]}  # fmt: skip
    lines = drawn["lines"]
    assert lines.get_xscale() == "log"
    assert [tick.get_text() for tick in lines.get_xticklabels()] == ["256", "1,024", "12,288"]
    assert lines.yaxis.get_major_formatter()(0.5, None) == "50%"
    legend = lines.get_legend()
    assert [text.get_text() for text in (legend.get_title(), *legend.get_texts())] == [
        "model", "in words", "other", "star", "band", "line"]  # fmt: skip
    assert lines.get_ylim()[0] == 0


def test_loss_curves_are_drawn_by_precision_and_beside_the_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(pictures, "save", lambda figure, file: made.append(figure))
    losses = {"none": [3.0, 2.0], "sliced": [3.0, 2.5]}
    series = [
        {"name": f"{precision}: {name}", "points": list(enumerate(own, 1))}
        for precision in ("bf16", "fp32") for name, own in losses.items()
    ]  # fmt: skip
    figure = {"title": "title", "chart": "training", "across": "step", "along": "loss"}
    pictures.draw(figure, {"series": series}, tmp_path / "picture")
    *above, left, _ = made[0].axes
    assert [axes.get_title() for axes in above] == ["bf16", "fp32"]
    assert [list(curve.get_ydata()) for curve in above[1].get_lines()] == list(losses.values())
    first, second = (list(curve.get_ydata()) for curve in left.get_lines())
    assert all(map(math.isnan, first)) and math.isnan(second[0]) and second[1] == 0.5  # on a log axis none is not
    assert left.get_yscale() == "log"


def test_a_picture_can_be_read_on_black(tmp_path: Path) -> None:
    """Also the small ticks of a logarithmic axis."""
    series = [{"name": name, "points": [["a", 1.0], ["b", 500.0]]} for name in "xy"]
    figure = {"title": "title", "chart": "lines", "logarithmic": True, "across": "case", "along": "s", "legend": "who"}
    pictures.draw(figure, {"series": series}, tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text()
    assert "stroke: #000000" not in text and text.count(f"fill: {pictures.GREY}") > 5
