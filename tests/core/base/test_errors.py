from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError

import pytest

from plait.core.base import errors
from plait.core.base.errors import (
    LONGEST_KEY,
    JobError,
    MissingExtra,
    NotFinite,
    PlaitError,
    RankFailure,
    RunLost,
    extra_of,
    naming_extras,
    nearest,
    need,
)
from plait.core.base.text import LONGEST_MESSAGE, LONGEST_QUOTED


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (JobError("is missing"), "is missing."),
        (JobError("3 is odd", key="train.steps"), "train.steps: 3 is odd."),
        (
            JobError("3 is odd.", file="a.toml", key="train.steps", fix="Use 4."),
            "a.toml: train.steps: 3 is odd. Use 4.",
        ),
        (
            JobError("3 is odd", key="train.steps", fix="Use 4").in_file("a.toml"),
            "a.toml: train.steps: 3 is odd. Use 4.",
        ),
    ],
)
def test_a_job_error_reads_as_sentences(error: JobError, text: str) -> None:
    assert str(error) == text


def test_the_users_mistakes_exit_with_2_and_what_befalls_a_run_with_1() -> None:
    deliberate = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, PlaitError)]
    assert {e.exit_status for e in deliberate if e not in (RankFailure, NotFinite, RunLost)} == {2}
    assert RankFailure.exit_status == NotFinite.exit_status == RunLost.exit_status == 1


def test_nearest_suggests_only_what_is_near() -> None:
    assert nearest("stepz", ["steps", "batch"]) == " (did you mean 'steps'?)"
    assert nearest("colour", ["steps", "batch"]) == ""


@pytest.mark.parametrize("kind", [PlaitError, JobError, RankFailure, NotFinite, RunLost])
def test_no_name_in_an_error_breaks_its_paragraph(kind: type[PlaitError]) -> None:
    """Nor steers a terminal."""
    assert str(kind("'a\n\n\x1b[31m' is missing")).startswith(r"'a\n\n\x1b[31m' is missing")


def test_a_long_key_of_a_file_is_cut() -> None:
    whole, longer = "k" * LONGEST_KEY, "k" * (LONGEST_KEY + 1)
    assert str(JobError("is unknown", key=whole)) == f"{whole}: is unknown."
    error = JobError("is unknown", file="a.json", key=longer)
    assert re.fullmatch(r"a\.json: (k+\.\.\.k+): is unknown\.", str(error))
    assert len(str(error)) == len("a.json: : is unknown.") + LONGEST_KEY
    assert error.key == longer
    assert len(str(JobError("is no file", file="a b " * 5000))) == LONGEST_QUOTED + len(": is no file.")


@pytest.mark.parametrize("quoted", ["'{}'", "name='{}'", '"{}"', "{}"])
@pytest.mark.parametrize("letters", ["$((", "x y ", 'a\\"b ', "\n\t"])
def test_a_long_value_leaves_a_message_a_paragraph(quoted: str, letters: str) -> None:
    """Its beginning and its end; what else is said stays whole."""
    value = "begin " + letters * 5000 + " end"
    said = str(JobError(f"{quoted.format(value)} is no number of 'layers'", file="a.sh", key="--num", fix="Use 'one'"))
    assert len(said) <= (LONGEST_MESSAGE if quoted == "{}" else LONGEST_QUOTED + 60)
    assert said.startswith("a.sh: --num: ") and "begin" in said and "..." in said and "end" in said
    assert said.endswith(" is no number of 'layers'. Use 'one'.")


def test_what_is_not_long_is_not_cut() -> None:
    prose = "ranks' names aren't the run's, '$(x)' is the nodes' " * 20 + "\"a\" and 'b'"
    assert str(PlaitError(prose)) == prose


@pytest.mark.parametrize(
    ("package", "extra"),
    [("torch", "train"), ("prometheus_client", "train"), ("tensorboardX", "tensorboard"), ("s3fs", "addresses"),
     ("matplotlib", "view"), ("numpy", ""), ("plait", ""), ("nobody_has_this", "")],
)  # fmt: skip
def test_the_extra_of_a_package_is_read_off_the_metadata(package: str, extra: str) -> None:
    assert extra_of(package) == extra


def test_a_plait_that_is_not_installed_has_no_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.requires", lambda name: (_ for _ in ()).throw(PackageNotFoundError))
    assert extra_of("torch") == ""


@pytest.mark.parametrize("name", ["dash", "dash.exceptions"])
def test_an_import_that_an_extra_brings_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda package: None)
    needed = r"this command needs the package dash.*pip install 'plait\[view\]'"
    with pytest.raises(MissingExtra, match=needed), naming_extras("this command"):
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)
    with pytest.raises(MissingExtra, match="training needs the package torch"):
        need("torch", "training")


@pytest.mark.parametrize("name", ["dash.no_such_part", "nobody_has_this", "plait.nothing", None])
def test_an_import_that_no_extra_would_mend_stays_a_bug(name: str | None) -> None:
    """Of a package that is there, of none that Plait knows, of Plait itself."""
    with pytest.raises(ModuleNotFoundError) as caught, naming_extras("this command"):
        raise ModuleNotFoundError("No module named it", name=name)
    assert not isinstance(caught.value, PlaitError)
    need("numpy", "planning")
