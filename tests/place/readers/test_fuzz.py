"""Whatever is damaged in a file: a topology or one clear error, and never the answer of the whole
file."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import JobError
from plait.core.topology.form import from_dict, to_dict
from plait.formats.base.source import ReadOptions, Source
from plait.place.topologies import FORMATS
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
        found = READ[form](Source("text", text), ReadOptions())
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


def answer(form: str, text: str) -> Any:
    """What a reader makes of a text: all of its answer, or its refusal."""
    try:
        found = READ[form](Source("text", text), ReadOptions())
    except JobError as error:
        return str(error)
    return found.topology, dict(found.states), dict(found.hardware), found.over.counts


TELLING = re.compile(r"n00[0-9]|leaf[0-9]|State=|Gres=gpu")
"""Lines that tell of a node or switch of the small cluster."""
UNTOLD = ("AggregatedBlock", "#", "    - {block:", "   NodeAddr")
LINES = {row: pair for row, pair in TEXTS.items() if not pair[1].startswith("{")}


@pytest.mark.parametrize("row", LINES)
def test_a_line_that_is_lost_is_seen(row: str) -> None:
    """But for lines that repeat what others say, or belong to a topology that is not the one asked
    for."""
    form, text = LINES[row]
    lines = text.splitlines(keepends=True)
    said = [number for number, line in enumerate(lines) if TELLING.search(line)]
    assert said
    same = [lines[at] for at in said if answer(form, "".join([*lines[:at], *lines[at + 1 :]])) == answer(form, text)]
    assert not [line for line in same if not line.startswith(UNTOLD)]


@pytest.mark.parametrize("row", TEXTS)
@pytest.mark.parametrize("name", ["n001", "n003"])
def test_a_node_of_another_name_is_seen(row: str, name: str) -> None:
    form, text = TEXTS[row]
    if name in text:
        assert answer(form, text.replace(name, "z9")) != answer(form, text)


def items_of(value: Any) -> list[Any]:
    return value["items"] if "items" in value else value["instances"]


@pytest.mark.parametrize("row", [row for row, (_, text) in TEXTS.items() if '"items"' in text or '"instances"' in text])
def test_an_item_that_is_lost_or_of_another_type_is_seen(row: str) -> None:
    form, text = TEXTS[row]
    whole = answer(form, text)
    for number in range(len(items_of(json.loads(text)))):
        value = json.loads(text)
        item = items_of(value).pop(number)
        waits = item.get("kind") == "Pod" and not item["spec"].get("nodeName")  # holds none
        if item.get("kind") != "Topology":  # whose levels labels tell as well
            assert (answer(form, json.dumps(value)) == whole) == waits, item
        for odd in (None, 3, "x", []):
            items_of(value).insert(number, odd)
            assert isinstance(answer(form, json.dumps(value)), str)
            items_of(value).pop(number)


@pytest.mark.parametrize("row", ["scontrol", "sinfo"])
@given(seed=st.integers(0, 10**9))
def test_a_state_that_is_damaged_is_seen(row: str, seed: int) -> None:
    """A letter of a state lost or changed: another state, or none of Slurm's."""
    form, text = TEXTS[row]
    chance = random.Random(seed)
    found = chance.choice(list(re.finditer(r"(?<=State=)[A-Z]+|\b(?:idle|alloc|drain|down)\b", text)))
    at = chance.randrange(found.start(), found.end())
    changed = text[:at] + chance.choice(["", "q", "*", "7"]) + text[at + 1 :]
    assert answer(form, changed) != answer(form, text)
