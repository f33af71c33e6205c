"""Every point of the papers names a module, a test and a command that exist."""

from __future__ import annotations

import shlex

import pytest

from benchmarks.papers import points
from benchmarks.papers.found import PAPERS, ROOT
from benchmarks.papers.page import published
from plait.cli.main import app

ALL = [point for rows in points.points().values() for point in rows]


def test_every_point_of_the_texts_has_a_row() -> None:
    """The five texts have 261 points, and twelve that a second reading added."""
    ids = [point.id for point in ALL]
    assert ids == [f"{letter}{number:02}" for letter, last in zip("DIRMA", (68, 50, 38, 37, 80), strict=True)
                   for number in range(1, last + 1)]  # fmt: skip


@pytest.mark.parametrize("point", ALL, ids=[point.id for point in ALL])
def test_what_a_point_names_exists(point: points.Point) -> None:
    assert point.state in points.STATES and point.place and point.point
    assert bool(point.lacks) == (point.state != "there")
    if point.state in ("there", "in part"):
        assert (ROOT / point.module).is_file() and _exists(point.seen), point
    else:
        assert not point.module and not point.seen


def test_the_page_is_made_of_the_file() -> None:
    assert points.PAGE.read_text() == points.page()


@pytest.mark.parametrize(
    "seen",
    ["tests/no_such.py", "python benchmarks/no_such.py", "python benchmarks/domino.py --no-such",
     "python -m benchmarks.domino", "python -m benchmarks.papers domino --figure no-such", "plait no-such",
     "plait plan no/such/job.toml", "make papers", ""],
)  # fmt: skip
def test_what_does_not_exist_is_noticed(seen: str) -> None:
    assert not _exists(seen)


def _exists(seen: str) -> bool:
    """Return whether a test's file, a benchmark with its options or figure, or a verb with its job
    exists.

    Benchmarks find each other beside them: they are scripts, which ``-m`` does not start.
    """
    match shlex.split(seen):
        case [file] if file.startswith("tests/"):
            return (ROOT / file).is_file()
        case ["python", "-m", "benchmarks.papers", paper, "--figure", figure]:
            return paper in PAPERS and figure in {one["id"] for one in published(paper)["figures"]}
        case ["python", script, *options] if script.startswith("benchmarks/"):
            text = (ROOT / script).read_text() if (ROOT / script).is_file() else ""
            return bool(text) and all(f'"{one}"' in text for one in options if one.startswith("--"))
        case ["plait", verb, job, *_]:
            verbs = {each.name or (each.callback and each.callback.__name__) for each in app.registered_commands}
            return verb in verbs and (ROOT / job).is_file()
        case _:
            return False
