"""Pictures in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import DataError
from plait.core.base.pictures import check_format, kind_of, save


@pytest.mark.parametrize(("name", "kind"), [("a.svg", "svg"), ("a.b.PNG", "png"), ("a", ""), ("a.pdf", "pdf")])
def test_a_picture_is_what_its_name_says(name: str, kind: str) -> None:
    assert kind_of(Path(name)) == kind
    if kind:
        check_format(Path(name))
    else:
        with pytest.raises(DataError, match=r"a: a picture's name ends in \.svg, \.png, \.pdf"):
            check_format(Path(name))


def test_what_cannot_be_drawn_here_is_refused() -> None:
    with pytest.raises(DataError, match=r"ends in \.svg$|ends in \.svg\b"):
        check_format(Path("a.png"), ("svg",))


@pytest.mark.parametrize(("kind", "clear"), [("svg", True), ("png", False)])
def test_a_picture_is_whole_and_always_the_same(kind: str, clear: bool, tmp_path: Path) -> None:
    class Figure:
        def savefig(self, path: Path, /, **options: Any) -> None:
            assert path != tmp_path / f"a.{kind}"
            date = {"Date": None} if clear else None
            assert options == {"format": kind, "dpi": 120, "transparent": clear, "metadata": date}
            path.write_text("picture")

    save(Figure(), tmp_path / f"a.{kind}")
    assert (tmp_path / f"a.{kind}").read_text() == "picture"
