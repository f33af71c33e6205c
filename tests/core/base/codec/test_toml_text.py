from __future__ import annotations

import tomllib
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.codec.toml_text import LARGEST, LONGEST_KEY, override, parse_toml, read_toml, show, to_toml
from plait.core.base.errors import JobError

texts = st.text(st.characters(codec="utf-8"), max_size=20)
scalars = texts | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
values = scalars | st.lists(scalars, max_size=4) | st.dictionaries(texts, scalars, max_size=3)
documents = st.dictionaries(texts, scalars | st.dictionaries(texts, values, max_size=4), max_size=4)


@given(documents)
def test_what_is_written_reads_back_equal(document: dict[str, object]) -> None:
    assert tomllib.loads(to_toml(document)) == document


def test_a_syntax_error_names_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[train]\nsteps = ten\n")
    with pytest.raises(JobError, match="line 2") as caught:
        read_toml(file)
    assert caught.value.file == str(file)


@pytest.mark.parametrize("content", [None, b"\xff\xfe"], ids=["absent", "binary"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "job.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(JobError) as caught:
        read_toml(file)
    assert caught.value.file == str(file)


def test_a_folder_is_no_job_file(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="Is a directory"):
        read_toml(tmp_path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("1e-3", 0.001),
        ("true", True),
        ('"7"', "7"),
        ("[1, 2]", [1, 2]),
        ("{p1 = 2}", {"p1": 2}),
        ("a b", "a b"),
        ("", ""),
        ("a=b", "a=b"),
        ("1\nother = 2", "1\nother = 2"),
    ],
)
def test_an_override_is_a_toml_value_or_else_a_text(text: str, value: object) -> None:
    changed, keys = override({}, [f"train.x={text}"], lambda key: False)
    assert changed == {"train": {"x": value}}
    assert keys == {"train.x"}


def test_an_override_leaves_what_it_was_given_alone() -> None:
    before = {"train": {"steps": 1}}
    assert override(before, ["train.steps=2", "train.steps=3"], lambda key: False)[0] == {"train": {"steps": 3}}
    assert before == {"train": {"steps": 1}}


@pytest.mark.parametrize("setting", ["steps", "=3", "train.=3", "a b=3", ""])
def test_what_is_no_setting_is_refused(setting: str) -> None:
    with pytest.raises(JobError, match="is not a setting"):
        override({}, [setting], lambda key: False)


@pytest.mark.parametrize(("text", "says"), [("[" * 100_000, "nested too deeply"), ("9" * 5000, "not valid TOML")])
def test_hostile_text_is_one_paragraph(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "job.toml"
    file.write_text(f"a = {text}")
    with pytest.raises(JobError, match=says):
        read_toml(file)
    assert override({}, [f"a={text}"], lambda key: False)[0] == {"a": text}


def test_a_file_that_nobody_has_written_by_hand_is_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("#" * LARGEST)
    assert read_toml(file) == {}
    file.write_text("#" * (LARGEST + 1))
    with pytest.raises(JobError, match=r"it has 1048577 bytes; at most 1048576 are read\. Shorten"):
        read_toml(file)


@pytest.mark.parametrize(
    "key",
    ["a." * 400_000 + "a", '"a" . ' * 60 + "a", "'.'." * 60 + "a", '"\\"".' * 60 + "a", ("b" * 300 + ".") * 60 + "a"],
)
@pytest.mark.parametrize("form", ["x = 1\n{} = 1\n", "x = 1\n[{}]\n", "x = 1\ny = {{{} = 1}}\n"])
def test_a_key_of_endless_parts_is_refused_unread(tmp_path: Path, key: str, form: str) -> None:
    file = tmp_path / "job.toml"
    file.write_text(form.format(key))
    with pytest.raises(JobError, match=r"a key of more than 50 parts \(at line 2\)") as caught:
        read_toml(file)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "text",
    [
        "x = [" + "1.5, " * 1000 + "]",
        'x = "' + "a, b. " * 1000 + '"',
        "x = " + '"' + "\\" + '""' * 3,
        "b" * 2_000_000 + " = 1",
    ],
)
def test_many_dots_that_are_no_key(text: str) -> None:
    try:
        wanted = tomllib.loads(text)
    except ValueError as error:
        with pytest.raises(ValueError, match=str(error).split("(")[0]):
            parse_toml(text)
    else:
        assert parse_toml(text) == wanted


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[train]\nsteps = 3\nsteps = 4", "train.steps"),
        ("steps = 3\nsteps = 4", "steps"),
        ("[train]\nsteps = 3\n[train]", "train"),
        ("[[jobs]]\na = 1\na = 2", "jobs.a"),
        ("[train]\nbetas = [\n# the first\n  0.9,\n  x\n]", None),
        ("[train]\nsteps = 3\n# here it breaks off\n???", None),
        ("[train]\nsteps = 3\n  # a remark\nsteps = 4", "train.steps"),
        ("[train]\nbetas = [\n0.9,\n]\nbetas = 1", "train.betas"),
        ("[train]\n" + "k" * 200 + " = x", None),
    ],
)
def test_the_key_of_a_line_that_is_wrong_is_named_where_it_has_one(tmp_path: Path, text: str, key: str | None) -> None:
    file = tmp_path / "job.toml"
    file.write_text(text)
    with pytest.raises(JobError) as caught:
        read_toml(file)
    assert (caught.value.file, caught.value.key) == (str(file), key)


@pytest.mark.parametrize(
    ("text", "cure"),
    [
        ("a = 1\na = 2", "Define each name once."), ("[a]\n[a]", "Define each name once."),
        ("a = 1\n[a]", "Define each name once."),
        ("[a]\nb = 1\n[[a]]", "Define each name once."), ("a = {}\na.b = 1", "Define each name once."),
        ("a = word", 'Text needs quotes, as in name = "value".'), ("a =", 'Text needs quotes, as in name = "value".'),
        ("a = [", "Close what is opened, a bracket or a quote."), ("a = \"\"\"x", "Close what is opened, a bracket"),
        ("a = " + "[" * 2000, "Close what is opened, a bracket or a quote."),
        ("a." * 60 + "a = 1", "Write tables, as in [train]."),
        ("just words", "Correct it: a line is [table], or key = value."),
    ],
    ids=range(12),
)  # fmt: skip
def test_what_to_change_is_said(tmp_path: Path, text: str, cure: str) -> None:
    for end in ("", "\n"):
        file = tmp_path / "job.toml"
        file.write_text(text + end)
        with pytest.raises(JobError) as caught:
            read_toml(file)
        assert cure in str(caught.value)


def test_a_whole_number_is_shown_while_it_can_be_read() -> None:
    assert show(2**128 - 1) == str(2**128 - 1)
    assert show(2**128) == show(-(2**128)) == "a number of 129 bits"
    assert show([2**128]).startswith("[3402823669")
    assert show("a") == '"a"'
    assert show(date(2026, 11, 26)) == "2026-11-26"


def test_a_key_of_a_mistake_is_named_unless_it_is_too_long(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    for length, named in ((LONGEST_KEY, True), (LONGEST_KEY + 1, False)):
        file.write_text("k" * length + " = x\n")
        with pytest.raises(JobError) as caught:
            read_toml(file)
        assert caught.value.key == ("k" * length if named else None)


def test_a_value_of_any_length_is_cut_in_a_message() -> None:
    assert show("x" * 398) == f'"{"x" * 398}"'
    assert show("x" * 399) == f'"{"x" * 396}...'
