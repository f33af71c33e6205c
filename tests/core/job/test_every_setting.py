"""Every setting of every section: a value of another kind and one beyond each bound are refused in
the file's words; what the words allow is not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from plait.core.base.codec.toml_text import to_toml
from plait.core.base.errors import JobError
from plait.core.base.numbers import LARGEST
from plait.core.job.advice import changed, overlapping_keys
from plait.core.job.spec import Job

JOB: dict[str, Any] = {"model": {"preset": "gpt3-125m"}}
ODD = {"odd": [{"very": "odd"}]}
"""A value that no setting takes."""


def settings_of(root: type[BaseModel], at: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key of a job file, as section.key, and its field."""
    for name, field in root.model_fields.items():
        if field.exclude or name == "model":
            continue
        inner = field.annotation
        if not at and isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from settings_of(inner, f"{name}.")
        else:
            yield f"{at}{name}", field


def limits(annotation: Any, metadata: list[Any]) -> Iterator[Any]:
    """The bounds of a number, also of one in a list or a union."""
    for one in metadata:
        yield from (one,) if isinstance(one, Ge | Gt | Le | Lt) else getattr(one, "metadata", ())
    for part in get_args(annotation):
        yield from limits(part, list(getattr(part, "__metadata__", ())))


SETTINGS = dict(settings_of(Job))
BOUNDS = [
    (key, limit)
    for key, field in SETTINGS.items()
    for limit in dict.fromkeys(limits(field.annotation, list(field.metadata)))
    if not get_args(field.annotation) or None in get_args(field.annotation) or type(None) in get_args(field.annotation)
]


def refused(folder: Path, key: str, value: Any) -> JobError | None:
    values = changed(JOB, {key: value})
    (folder / "job.toml").write_text(to_toml(values))
    try:
        Job.read(folder / "job.toml")
    except JobError as error:
        return error
    return None


def test_there_are_as_many_as_there_should_be() -> None:
    assert len(SETTINGS) > 80
    assert len(BOUNDS) > 40


@pytest.mark.parametrize("key", SETTINGS)
def test_a_value_of_another_kind_names_file_key_and_what_is_allowed(tmp_path: Path, key: str) -> None:
    error = refused(tmp_path, key, ODD)
    assert error is not None
    assert error.file == str(tmp_path / "job.toml")
    assert error.key and (error.key == key or error.key.startswith(f"{key}.")), error.key
    assert error.fix and re.match("Allowed: |Known here: |Write |Give |Use ", error.fix), error


@pytest.mark.parametrize(("key", "limit"), BOUNDS, ids=str)
def test_bounds_are_where_the_words_say(tmp_path: Path, key: str, limit: Any) -> None:
    bound = next(getattr(limit, name) for name in ("ge", "gt", "le", "lt") if hasattr(limit, name))
    whole = isinstance(bound, int) and SETTINGS[key].annotation is not float
    step = 1 if whole else 1e-6 * max(1.0, abs(bound))
    inside = {Ge: bound, Le: bound, Gt: bound + step, Lt: bound - step}[type(limit)]
    outside = {Ge: bound - step, Le: bound + step, Gt: bound, Lt: bound}[type(limit)]
    if whole:
        inside, outside = int(inside), int(outside)
    error = refused(tmp_path, key, outside)
    assert error is not None and error.key == key, str(error)
    if abs(bound) < LARGEST:
        assert f"{bound:g}" in (error.fix or ""), str(error)
    again = refused(tmp_path, key, inside)
    assert again is None or not (overlapping_keys(again.key, key) and "is not allowed" in again.problem), str(again)


@pytest.mark.parametrize("section", [name for name in Job.model_fields if name not in ("model", "open")])
def test_a_section_that_is_no_table_and_a_key_that_it_has_not(tmp_path: Path, section: str) -> None:
    error = refused(tmp_path, f"{section}.no_such_key", 1)
    assert error is not None
    assert error.key == f"{section}.no_such_key"
    assert error.fix and error.fix.startswith("Known here: ")
    for known in error.fix.removeprefix("Known here: ").rstrip(".").split(", "):
        again = refused(tmp_path, f"{section}.{known}", ODD)
        assert again is not None
        assert again.key != f"{section}.{known}" or "unknown key" not in again.problem
