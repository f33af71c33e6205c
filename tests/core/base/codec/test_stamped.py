"""Files with a version and a hash: what is read is what was written, or an error that says what is
wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.codec.stamped import Stamp, digest
from plait.core.base.errors import JobError

STAMP = Stamp(noun="recipe", version=3, broken="is no recipe", fix="Cook again", edited="Take the first one")


@dataclass(frozen=True)
class Recipe:
    """Content of a file."""

    grams: int

    pinches: int = 0
    """Came later."""

    def to_dict(self) -> dict[str, Any]:
        """Of the content."""
        return {"grams": self.grams, "pinches": self.pinches}


def make(values: dict[str, Any]) -> Recipe:
    """Of plain values, which are these alone."""
    if unknown := set(values) - {"grams", "pinches"}:
        raise JobError("is unknown", key=min(unknown))
    return Recipe(**values)


def written(**changes: Any) -> str:
    """A file's text, with ``changes``."""
    return json.dumps({**STAMP.on(digest({"grams": 7})), "grams": 7, **changes})


def opened(text: str) -> Recipe:
    """From a file's text."""
    return STAMP.opened(text, "r.json", make)


def test_what_is_written_is_read() -> None:
    """Also by a Plait that knows more keys."""
    assert opened(written()) == Recipe(7)
    assert opened(json.dumps({**STAMP.on(digest(Recipe(7, 1).to_dict())), "grams": 7, "pinches": 1})) == Recipe(7, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "r.json: is no recipe: Expecting property name"),
        ("[" * 100_000, "r.json: is no recipe: "),
        ("[]", "r.json: is no recipe: it is a list, no table of keys and values"),
        ("null", "r.json: is no recipe: it is null, no table of keys and values"),
        ("{}", "r.json: version: None is not a recipe version this Plait reads. It reads version 3. Cook again."),
        ('{"version": Infinity}', "r.json: is no recipe: Infinity is no number of JSON"),
        (written(version=2), "r.json: version: 2 is not a recipe version this Plait reads. It reads version 3. Cook"),
        (written(salt=1), "r.json: salt: is unknown."),
        (written(grams=8), "r.json: hash: does not match the content: the recipe was edited or damaged. Take the"),
        (written(pinches=1), "r.json: hash: does not match the content"),
        (written(hash=None), "r.json: hash: does not match the content"),
    ],
)
def test_what_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(JobError) as error:
        opened(text)
    assert str(error.value).startswith(said)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("nothing", "binary"):
        with pytest.raises(JobError, match=f"{name}: cannot be read as a recipe: "):
            STAMP.text(tmp_path / name)


def test_the_hash_is_of_values_not_of_their_order() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 2, "b": 1})


def test_a_version_of_any_length_makes_no_long_error() -> None:
    with pytest.raises(JobError, match=r"'x+\.\.\. is not a recipe version") as caught:
        STAMP.opened(written(version="x" * 10**5), "a.json", make)
    assert len(str(caught.value)) < 300
