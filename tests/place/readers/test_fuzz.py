"""Whatever is damaged in a file: a topology or one clear error."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.errors import JobError
from plait.core.topology_form import from_dict, to_dict
from plait.place.readers import FORMATS
from plait.place.readers.source import Asked, Source
from tests.place.readers.test_formats import ROWS, STATES

TEXTS = {**ROWS, **STATES}
READ = {form.name: form.read for form in FORMATS}
ODD: list[Any] = [
    None,
    True,
    -1,
    1e400,
    3.5,
    "",
    " ",
    "a,b",
    "n[1-3]",
    "[",
    "\x1b[31m",
    [],
    {},
    [[]],
    {"a": 1},
    "x" * 300,
]


def damaged(text: str, seed: int) -> str:
    """Some characters changed, lost or doubled."""
    chance = random.Random(seed)
    letters = list(text)
    for _ in range(chance.randint(1, 6)):
        place = chance.randrange(len(letters))
        letters[place] = chance.choice(["", letters[place] * 2, chance.choice("[]{}()=,:-# \n\t\\\"'0aé\0&*|")])
    return "".join(letters)


def swapped(value: Any, chance: random.Random) -> Any:
    """A JSON value with one part of it replaced by something odd."""
    if chance.random() < 0.15 or not isinstance(value, (dict, list)) or not value:
        return chance.choice(ODD)
    if isinstance(value, list):
        place = chance.randrange(len(value))
        return [swapped(one, chance) if number == place else one for number, one in enumerate(value)]
    key = chance.choice(list(value))
    return {**value, key: swapped(value[key], chance)}


def check(form: str, text: str) -> None:
    try:
        found = READ[form](Source("text", text), Asked())
    except JobError as error:
        message = str(error)
    else:
        message = ""
        if found.topology:
            assert from_dict(to_dict(found.topology)) == found.topology
    assert len(message) < 700


@pytest.mark.parametrize("row", TEXTS)
@given(seed=st.integers(0, 10**9))
def test_damaged_text(row: str, seed: int) -> None:
    form, text = TEXTS[row]
    check(form, damaged(text, seed))


@pytest.mark.parametrize("row", [row for row, (_, text) in TEXTS.items() if text.startswith("{")])
@given(seed=st.integers(0, 10**9))
def test_odd_values(row: str, seed: int) -> None:
    form, text = TEXTS[row]
    check(form, json.dumps(swapped(json.loads(text), random.Random(seed))))
