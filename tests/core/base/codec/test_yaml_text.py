"""YAML of others: values as JSON has them, and a sentence for all else."""

from __future__ import annotations

from typing import Any

import pytest

from plait.core.base.codec import yaml_text
from plait.core.base.codec.yaml_text import DEEPEST, LARGEST, load
from plait.core.base.errors import JobError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: [1, -2, 0x10, 0o17, 0644, 08, 1_000]", {"a": [1, -2, 16, "0o17", 420, "08", 1000]}),
        ("a: [1.5, -.5, 2.5e3, 1e3, '1']", {"a": [1.5, -0.5, 2500.0, "1e3", "1"]}),
        (
            "a: [2026-11-26, 2026-13-45, 2026-11-26T10:00:00Z]",
            {"a": ["2026-11-26", "2026-13-45", "2026-11-26T10:00:00Z"]},
        ),
        ("[9223372036854775807, -9223372036854775807]", [(1 << 63) - 1, 1 - (1 << 63)]),
        ("a: [12:30, 1:30.5]", {"a": ["12:30", "1:30.5"]}),
        ("a: [yes, Off, true, null, ~]\nb:", {"a": [True, False, True, None, None], "b": None}),
        ("<<: {a: 1}  # a comment", {"<<": {"a": 1}}),
        ("", None),
        ("text", "text"),
    ],
)
def test_values_are_those_of_json(text: str, value: Any) -> None:
    assert load(text) == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\nb: 2\na: 3", "line 1: not valid YAML: a key occurs twice"),
        ("a: [*b]", "aliases"),
        ("&a [*a]", "aliases"),
        ("[" * 60_000, "nested too deeply"),
        ("{a: " * 60_000, "nested too deeply"),
        ("a: " + "1" * 5_000, "not valid YAML"),
        ("a: 9223372036854775808", "line 1: not valid YAML: a number is too large"),
        ("a: 1.5e400", "line 1: not valid YAML: a number is too large"),
        ("a: !!binary aGk=", "line 1: not valid YAML"),
        ("a: !!float .nan", "line 1: not valid YAML: a number is too large"),
        ("a: !!float -.inf", "line 1: not valid YAML: a number is too large"),
        ("a: -9223372036854775808", "line 1: not valid YAML: a number is too large"),
        ("a: !!timestamp 2026-13-45", "line 1: not valid YAML"),
        ("a: !!set {b}", "line 1: not valid YAML"),
        ("a: !!python/object/apply:os.system ['true']", "line 1: not valid YAML"),
        ("a: !mine 3", "line 1: not valid YAML"),
        ("? [1]\n: 2", "line 1: not valid YAML"),
        ("--- 1\n--- 2", "line 2: not valid YAML"),
        ("a: \x00", "not valid YAML"),
        ("a: [", "not valid YAML"),
        ("- a\n" * 600_000, "more than 300000 values|more than 4 MiB"),
        ("a: " + "x" * (5 << 20), "more than 4 MiB"),
    ],
    ids=range(22),
)
def test_all_else_is_one_sentence(text: str, says: str) -> None:
    with pytest.raises(JobError, match=says) as caught:
        load(text)
    assert len(str(caught.value)) < 400


def test_as_deep_as_may_be() -> None:
    assert load("[" * DEEPEST + "]" * DEEPEST) is not None
    with pytest.raises(JobError, match="line 2: nested too deeply"):
        load("[\n" + "[" * DEEPEST + "]" * (DEEPEST + 1))


def test_as_long_as_may_be() -> None:
    assert load("x" * LARGEST) == "x" * LARGEST
    with pytest.raises(JobError, match="more than 4 MiB of YAML"):
        load("x" * (LARGEST + 1))


def test_so_many_values_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of two is a stream, a document, a list and two words, and the ends of the three."""
    monkeypatch.setattr(yaml_text, "MOST_EVENTS", 7)
    assert load("[a, b]") == ["a", "b"]
    monkeypatch.setattr(yaml_text, "MOST_EVENTS", 6)
    with pytest.raises(JobError, match="more than 6 values of YAML"):
        load("[a, b]")
