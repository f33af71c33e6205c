"""The reference of the job file is what ``Job`` takes: every key, with a type, a default and a
meaning."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.core.job.advice import changed
from plait.core.job.open_keys import PLANNED
from plait.core.job.reference import COMMAND, Setting, SettingsTable, look_up, markdown, reference
from plait.core.job.spec import Job
from plait.core.model.spec import ModelSpec

DOCS = Path(__file__).parents[3] / "docs" / "job.md"


def test_docs_job_md_is_up_to_date() -> None:
    assert DOCS.read_text() == markdown(), f"run: {COMMAND}"


def test_every_key_has_a_meaning() -> None:
    for table in reference():
        assert table.meaning
        for key in table.keys:
            assert key.name.startswith(f"{table.name}.")
            assert key.meaning.endswith((".", ".)")), key
            assert key.allowed


KEYS_OF_FILES = {key.name: key for table in reference() for key in table.keys}
NO_VALUES = {("train.lr_wsd_decay_steps", "wsd"), ("slurm.gpus", "cpu"), ("place.spares", "N"),
             ("recipe.optimizer_offload_fraction", "host_memory_rate")}  # fmt: skip
"""Words of explanations that are another key's value, or a key of a cluster's file."""


def refused(key: Setting, value: Any) -> bool:
    """Whether a job with this value is refused since the key takes others."""
    value = [value] if key.allowed.startswith("a list") and value != "auto" else value
    try:
        Job.from_dict(changed({"model": {"preset": "gpt3-125m"}}, {key.name: value})).model_spec(257)
    except JobError as error:
        return error.key == key.name and (error.fix or "").startswith(("Allowed: ", "Write ["))
    return False


@pytest.mark.parametrize("name", KEYS_OF_FILES)
def test_types_are_in_words_and_what_explanations_name_is_taken(name: str) -> None:
    key, others = KEYS_OF_FILES[name], {part for other in KEYS_OF_FILES for part in other.split(".")}
    assert not re.search(r"Ellipsis|NoneType|<|typing|Literal|Annotated|\bor or\b|\b[A-Z]\w+[a-z][A-Z]", key.allowed)
    words = re.findall(r"``\"?(\w[\w-]*)\"?``", key.meaning)
    values = [word for word in words if word not in others and (name, word) not in NO_VALUES]
    plain = (tomllib.loads(f"x = {one}")["x"] if re.fullmatch(r"true|false|\d+", one) else one for one in values)
    assert [value for value in plain if refused(key, value)] == []


@pytest.mark.parametrize("name", [name for name in KEYS_OF_FILES if name.count(".") == 1 and name[:6] != "model."])
def test_auto_is_listed_where_it_is_taken(name: str) -> None:
    key = KEYS_OF_FILES[name]
    listed = re.search(r'"auto"|such as auto', key.allowed) is not None
    if "a text" not in key.allowed or name in PLANNED:
        assert listed == (not refused(key, "auto")), key.allowed
    assert listed or "``auto``" not in key.meaning


def test_a_refusal_lists_all_that_is_taken() -> None:
    for key, more in (("overlap", ' or "off"'), ("tp", ' or "auto"'), ("recompute", ' or "auto"')):
        with pytest.raises(JobError) as caught:
            Job.from_dict({"model": {"preset": "gpt3-125m"}, "strategy": {key: "of"}})
        assert caught.value.fix and more in caught.value.fix


def test_every_key_is_there() -> None:
    names = {key.name for table in reference() for key in table.keys}
    assert {f"model.{field.name}" for field in fields(ModelSpec)} <= names
    for section, values in Job.from_dict({"model": {"preset": "gpt3-125m"}}).to_dict().items():
        assert {f"{section}.{key}" for key in values} <= names


def test_defaults_are_those_of_a_job_and_are_written_as_toml() -> None:
    job = tomllib.loads(Job.from_dict({"model": {"preset": "gpt3-125m"}, "strategy": {}}).to_toml())
    for table in reference():
        for key in table.keys:
            section, *names = key.name.split(".")
            if section != "model" and len(names) == 1 and key.default != "-":
                assert tomllib.loads(f"x = {key.default}")["x"] == job[section][names[0]], key


def test_the_example_is_a_job() -> None:
    example = markdown().split("```toml\n")[1].split("```")[0]
    assert Job.from_dict(tomllib.loads(example)).train.steps > 0


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("train.steps", ["train.steps"]),
        ("steps", ["train.steps"]),
        ("slices.batch", ["strategy.slices.batch"]),
        ("seed", ["data.seed", "train.seed"]),
        ("strategy.slices", ["strategy.slices", "strategy.slices.batch", "strategy.slices.columns"]),
    ],
)
def test_keys_are_found_by_name_or_by_part(asked: str, names: list[str]) -> None:
    found = look_up(asked)
    assert not isinstance(found, SettingsTable)
    assert [key.name for key in found] == names


@pytest.mark.parametrize("asked", ["train", "[train]"])
def test_a_section_is_found(asked: str) -> None:
    found = look_up(asked)
    assert isinstance(found, SettingsTable)
    assert len(found.keys) > 20


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("train.stpes", "did you mean 'train.steps'"),
        ("model.hiden", "did you mean 'model.hidden'"),
        ("stepps", "did you mean"),
        ("zzz", "plait job shows all"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(asked: str, says: str) -> None:
    with pytest.raises(JobError) as caught:
        look_up(asked)
    assert says in str(caught.value)


@pytest.mark.parametrize("asked", ["slurm.steps", "train.p1", "steps.train", "train.steps.more"])
def test_parts_of_a_name_are_all_in_it_and_in_their_order(asked: str) -> None:
    with pytest.raises(JobError):
        look_up(asked)
