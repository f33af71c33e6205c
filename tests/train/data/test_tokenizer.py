"""Tokenizers: round trips, what a tokenizer file may contain, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from plait.core.base.errors import DataError, JobError
from plait.core.job.settings import DataSection, TrainSection
from plait.train.data.check import check_data
from plait.train.data.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer

BYTES = ByteTokenizer()


def write_tokenizer(path: Path, *, special: tuple[str, ...] = ("<|endoftext|>",), truncate: bool = False) -> Path:
    """A byte-level BPE tokenizer file with a few merges."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(["the cat sat on the mat and the dog sat on the cat"] * 4, trainer)
    if truncate:
        library.enable_truncation(3)
        library.enable_padding(length=8)
    library.save(str(path))
    return path


@pytest.fixture(scope="module")
def file_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    return FileTokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"))


@given(st.text())
def test_bytes_round_trip_of_text(text: str) -> None:
    ids = BYTES.encode(text)
    assert ids.dtype == np.int64
    assert BYTES.decode(ids) == text


@given(st.binary())
def test_bytes_keep_every_byte_and_leave_256_to_the_separator(data: bytes) -> None:
    ids = BYTES.encode(data)
    assert bytes(ids.astype(np.uint8)) == data
    assert BYTES.end_of_text not in ids
    assert BYTES.decode([*ids, 256]) == data.decode("utf-8", errors="replace")


def test_bytes_refuse_ids_outside_the_vocabulary() -> None:
    assert BYTES.vocab == 257
    assert BYTES.decode([]) == ""
    for wrong in (-1, 257):
        with pytest.raises(ValueError, match=r"0\.\.256"):
            BYTES.decode([65, wrong])


def test_lone_surrogates_do_not_stop_a_run() -> None:
    assert BYTES.decode(BYTES.encode("a\ud800b")) == "a\ufffdb"
    ((ids, offsets),) = BYTES.encode_offsets(["a\ud800b"])
    assert ids.tolist() == BYTES.encode("a\ud800b").tolist() and offsets.tolist()[-1] == [2, 3]


@given(st.text())
def test_file_round_trip_of_text(file_tokenizer: FileTokenizer, text: str) -> None:
    ids = file_tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert ids.shape == (len(ids),)
    assert not ids.size or 0 <= ids.min() <= ids.max() < file_tokenizer.vocab
    assert file_tokenizer.decode([*ids, file_tokenizer.end_of_text]) == text.replace("<|endoftext|>", "")


def test_file_takes_undecodable_bytes_as_replacement_characters(file_tokenizer: FileTokenizer) -> None:
    assert file_tokenizer.decode(file_tokenizer.encode(b"a\xffb")) == "a\ufffdb"


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    tokenizer = FileTokenizer(write_tokenizer(tmp_path / "tokenizer.json", truncate=True))
    for text in ("the dog and the cat and the mat", "t"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("t")) == 1


def test_vocab_is_one_more_than_the_largest_id(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    model = {"type": "WordLevel", "vocab": {"a": 0, "</s>": 9}, "unk_token": "a"}
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    tokenizer = load_tokenizer(path)
    assert (tokenizer.vocab, tokenizer.end_of_text) == (10, 9)


def test_end_of_text_is_what_the_config_beside_the_file_says(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json", special=("</s>", "<stop>"))
    by_name = load_tokenizer(path)
    for declared in ("<stop>", {"content": "<stop>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": declared}))
        by_config = load_tokenizer(tmp_path)  # a folder is taken for the tokenizer.json in it
        assert (by_name.end_of_text, by_config.end_of_text) == (0, 1)
        assert by_name.fingerprint != by_config.fingerprint, "another separator makes another corpus"


def test_a_tokenizer_without_end_of_text_is_refused_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no end-of-text token.*tokenizer_config\.json"):
        load_tokenizer(write_tokenizer(tmp_path / "tokenizer.json", special=()))


def test_fingerprints_tell_tokenizers_apart(tmp_path: Path, file_tokenizer: FileTokenizer) -> None:
    same = load_tokenizer(write_tokenizer(tmp_path / "same.json"))
    other = load_tokenizer(write_tokenizer(tmp_path / "other.json", special=("<|endoftext|>", "<x>")))
    assert same.fingerprint == file_tokenizer.fingerprint
    assert len({same.fingerprint, other.fingerprint, BYTES.fingerprint}) == 3


def test_a_missing_file_is_named_with_what_may_be_named(tmp_path: Path) -> None:
    for missing in (tmp_path / "absent.json", tmp_path, "gpt2"):
        with pytest.raises(DataError, match=r"no such tokenizer file; name 'bytes'"):
            load_tokenizer(missing)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b"{}",
        b"[]",
        b"[" * 100_000,
        b"\xff\xfe\x00",
        b'{"version": NaN}',
        b'{"version": "1.0", "model": {"type": "BPE"}}',
    ],
)
def test_another_file_is_not_taken_for_a_tokenizer(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(
        DataError, match=r"tokenizer\.json: (not a Hugging Face tokenizer file|the tokenizer has no tokens)"
    ):
        load_tokenizer(path)


# ---- what no text can be encoded with ----

ENDS = {"content": "</s>", "special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
KNOWN = {"a": 0, "b": 1, "</s>": 2}
BPE = {"type": "BPE", "vocab": KNOWN, "merges": [], "dropout": None, "fuse_unk": False, "byte_fallback": False}


def write_model(folder: Path, model: dict[str, Any], **more: Any) -> Path:
    """A tokenizer.json of this model, which cuts at blanks."""
    values = {"version": "1.0", "added_tokens": [{"id": 2, **ENDS}], "pre_tokenizer": {"type": "Whitespace"}}
    (folder / "tokenizer.json").write_text(json.dumps(values | {"model": model} | more))
    return folder / "tokenizer.json"


@pytest.mark.parametrize(
    "model",
    [
        {"type": "WordLevel", "vocab": KNOWN, "unk_token": "[UNK]"},
        {"type": "WordPiece", "vocab": KNOWN, "unk_token": "[UNK]", "continuing_subword_prefix": "##",
         "max_input_chars_per_word": 100},
        {"type": "Unigram", "vocab": [["a", -1.0], ["b", -1.0]], "unk_id": None, "byte_fallback": False},
        BPE,
        BPE | {"unk_token": "<unk>"},
    ],
    ids=lambda model: f"{model['type']} {model.get('unk_token')}",
)  # fmt: skip
def test_a_tokenizer_without_its_unknown_token_loses_nothing(tmp_path: Path, model: dict[str, Any]) -> None:
    tokenizer = load_tokenizer(write_model(tmp_path, model))
    assert tokenizer.encode("a b\n a").tolist() == [0, 1, 0]
    with pytest.raises(DataError, match=r"tokenizer\.json: (cannot encode this text|has no token for 'z')"):
        tokenizer.encode("a z")


def test_a_pattern_that_takes_for_ever_is_one_paragraph(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pattern = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    path = write_model(tmp_path, BPE | {"unk_token": "a"}, pre_tokenizer=pattern)
    with pytest.raises(DataError, match=r"cannot encode this text .*retry-limit"):
        load_tokenizer(path).encode("x" * 3000)
    capfd.readouterr()
    (tmp_path / "text.txt").write_text("x" * 3000)
    data = DataSection(text=str(tmp_path / "text.txt"), tokenizer=str(path), sequence_length=4)
    with pytest.raises(JobError, match=r"^data\.tokenizer: .*cannot encode this text"):
        check_data(data, TrainSection(eval_every=0), tmp_path / "corpus")
    assert capfd.readouterr().err == "", "the library's own words are kept from people"


def test_merges_left_out_at_random_are_not(tmp_path: Path) -> None:
    vocab = {"a": 0, "b": 1, "</s>": 2, "ab": 3}
    model = BPE | {"vocab": vocab, "merges": [["a", "b"]], "dropout": 0.9, "unk_token": "a"}
    tokenizer = load_tokenizer(write_model(tmp_path, model))
    assert tokenizer.encode("ab " * 50).tolist() == [3] * 50


# ---- which token ends a text ----


@pytest.mark.parametrize("declared", ["<stop>", {"content": "<stop>", "lstrip": False}])
def test_special_tokens_map_says_what_ends_a_text(tmp_path: Path, declared: object) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", special=("</s>", "<stop>"))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": declared}))
    assert load_tokenizer(tmp_path).end_of_text == 1
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": null}')
    assert load_tokenizer(tmp_path).end_of_text == 1
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert load_tokenizer(tmp_path).end_of_text == 0


def test_of_several_usual_names_none_is_guessed(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", special=("</s>", "<|endoftext|>"))
    with pytest.raises(DataError, match=r"several tokens that may end a text \(<\|endoftext\|>, </s>\); write"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')  # as it advises
    assert load_tokenizer(tmp_path).end_of_text == 0


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("text", ["[" * 100_000, "null", "[]", '{"eos_token": 3}', '{"eos_token": Infinity}', "\0"])
def test_a_damaged_file_beside_a_tokenizer_is_named(tmp_path: Path, name: str, text: str) -> None:
    write_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=name):
        load_tokenizer(tmp_path)
