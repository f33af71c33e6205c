"""Pictures in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from plait.api.pictures import check_format, kind_of, save
from plait.core.base.errors import DataError


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


@pytest.mark.parametrize("kind", ["svg", "png", "html"])
def test_a_picture_is_whole_and_always_the_same(kind: str, tmp_path: Path) -> None:
    class Failing(Figure):
        def savefig(self, path: Any, **options: Any) -> None:
            raise OSError("full")

    first, again = tmp_path / f"a.{kind}", tmp_path / f"b.{kind}"
    for file in (first, again):
        save(Figure(figsize=(1, 1)), file)
    assert first.read_bytes() == again.read_bytes()
    with pytest.raises(OSError, match="full"):
        save(Failing(), first)
    assert first.read_bytes() == again.read_bytes()
