"""Values of a Python module that are read without running it."""

from __future__ import annotations

from typing import Any

import pytest

from plait.formats.base.literals import Called, python_settings


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("config.a.b = 3", {"a.b": 3}),
        ("c = Config(t=Table(k=-1, l=[1, 2]))", {"t": Called("Table"), "t.k": -1, "t.l": [1, 2]}),
        ("N = 4\nconfig.a.b = N * 2 + 1", {"a.b": 9}),
        ("config.a.b = 7 // 2 - 1", {"a.b": 2}),
        ("config.a.b = 7 // 0", {}),
        ("N = 0\nconfig.a.b = 1 if N else 2", {"a.b": 2}),
        ("N = 3\nconfig.a.b = 1 if N else 2", {"a.b": 1}),
        ("config.a.b = 1 if unknown else 2", {}),
        ("config.a.b = f()", {"a.b": Called("f")}),
        ("config.a.b = torch.bfloat16", {"a.b": "torch.bfloat16"}),
    ],
)
def test_literals(text: str, values: dict[str, Any]) -> None:
    body = "\n".join(f"    {line}" for line in text.splitlines())
    found = python_settings(f"def planned():\n{body}\n", "a.py").values
    assert {key: value for key, value in found.items() if key != "N"} == values


def test_keywords_that_are_put_in_are_named() -> None:
    found = python_settings("def planned():\n    return Config(t=Table(k=1, **more))\n", "a.py")
    assert found.values == {"t": Called("Table"), "t.k": 1} and found.computed == ["Table(**more)"]
