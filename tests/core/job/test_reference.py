"""The reference of the job file is what ``Job`` takes: every key, with a type, a default and a meaning."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from plait.core.base.errors import JobError
from plait.core.job.reference import COMMAND, SettingsTable, look_up, markdown, reference
from plait.core.job.renamed import KEYS
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
        *((old, f"is called {new} now") for old, new in KEYS.items()),
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
