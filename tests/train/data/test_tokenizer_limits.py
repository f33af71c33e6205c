"""Tokenizer files of which too much would be made are refused before their package sees them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import DataError
from plait.train.data.tokenizer import (
    LONGEST,
    MOST_GROWTH,
    MOST_STEPS,
    MOST_TOKENS,
    FileTokenizer,
    check_limits,
    load_tokenizer,
)

MODEL: dict[str, Any] = {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1}, "unk_token": "a"}
LOWER = {"type": "Lowercase"}


def replaces(*contents: str) -> dict[str, Any]:
    steps = [{"type": "Replace", "pattern": {"Regex": "."}, "content": content} for content in contents]
    return {"normalizer": {"type": "Sequence", "normalizers": steps}}


def written(folder: Path, **more: Any) -> Path:
    content = {"version": "1.0", "added_tokens": [], "model": MODEL, **more}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder / "tokenizer.json"


@pytest.mark.parametrize(("content", "says"), [
    ({"model": {"vocab": [0] * (MOST_TOKENS + 1)}}, "vocab has 1000001 entries; at most 1000000"),
    ({"model": {"vocab": dict.fromkeys(range(MOST_TOKENS + 1))}}, "vocab has 1000001 entries"),
    ({"model": {"merges": [0] * (MOST_TOKENS + 1)}}, "merges has 1000001 entries"),
    ({"added_tokens": [0] * (MOST_TOKENS + 1)}, "added_tokens has 1000001 entries"),
    ({"normalizer": {"normalizers": [LOWER] * MOST_STEPS}}, "it has 1001 steps around its model"),
    ({"pre_tokenizer": [LOWER] * 400, "decoder": [LOWER] * 400, "post_processor": [LOWER] * 201}, "1001 steps"),
    ({"model": {"continuing_subword_prefix": "x" * (LONGEST + 1)}}, "continuing_subword_prefix has 101 characters"),
    ({"model": {"end_of_word_suffix": "x" * (LONGEST + 1)}}, "end_of_word_suffix has 101 characters"),
    ({"normalizer": [[{"prepend": "x" * (LONGEST + 1)}]]}, "prepend has 101 characters; at most 100"),
    (replaces("x" * (MOST_GROWTH + 1)), "makes more than 16 characters of one"),
    (replaces("xx", "", "xxxx", "x", "xxx"), "makes more than 16 characters of one"),
])  # fmt: skip
def test_more_than_anybody_needs_is_refused(content: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_limits(content)


@pytest.mark.parametrize("content", [
    {}, {"model": None}, {"model": [], "added_tokens": {}, "normalizer": 5, "pre_tokenizer": "x"},
    {"model": {"vocab": [0] * MOST_TOKENS, "merges": [0] * MOST_TOKENS, "end_of_word_suffix": "x" * LONGEST}},
    {"normalizer": {"normalizers": [LOWER] * (MOST_STEPS - 1)}}, {"normalizer": {"prepend": "x" * LONGEST}},
    {"decoder": {"content": "x" * 1000}}, replaces("xx", "", "xxxx", "xx"),
    {"model": {"vocab": 7, "merges": "x" * 10**7}},
])  # fmt: skip
def test_what_is_within_the_limits_or_no_tokenizer_is_left_to_its_reader(content: dict[str, Any]) -> None:
    check_limits(content)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (replaces("x" * 1000), "makes more than 16 characters"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "precompiled_charsmap"),
    ],
)
def test_a_file_of_that_kind_is_one_paragraph_and_nothing_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], more: dict[str, Any], says: str
) -> None:
    """Also where the library ends in a panic, of which it prints its own account."""
    with pytest.raises(DataError, match=rf"not a Hugging Face tokenizer file .*{says}"):
        load_tokenizer(written(tmp_path, **more))
    assert capfd.readouterr().err == ""


def test_a_pipe_beside_a_tokenizer_is_named(tmp_path: Path) -> None:
    """And not taken for a file that is not there."""
    assert isinstance(load_tokenizer(written(tmp_path)), FileTokenizer)
    os.mkfifo(tmp_path / "tokenizer_config.json")
    with pytest.raises(DataError, match=r"tokenizer_config\.json: cannot be read as JSON settings .*It is a pipe"):
        load_tokenizer(tmp_path)


def test_a_long_name_of_a_token_is_cut(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "x" * 10**5}))
    with pytest.raises(DataError) as caught:
        load_tokenizer(written(tmp_path))
    assert len(str(caught.value)) < 400
