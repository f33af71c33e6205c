"""What documents point to is there."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
DOCUMENTS = [path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")) if not path.name.endswith(".draft.md")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_that_a_document_links_to_exists(document: Path) -> None:
    links = LINK.findall(document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_the_picture_is_what_its_script_draws(tmp_path: Path) -> None:
    """It shows what the simulator says today."""
    script = tmp_path / "picture.py"  # it draws beside itself
    script.write_text((ROOT / "docs" / "picture.py").read_text())
    runpy.run_path(str(script), run_name="__main__")
    assert (tmp_path / "overlap.svg").read_text() == (ROOT / "docs" / "overlap.svg").read_text()
