"""A tokenizer as the files that transformers' ``AutoTokenizer`` reads: the same text gives the same ids."""

from __future__ import annotations

import json
from typing import Any

from plait.core.base.codec.json_text import read_table
from plait.train.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

FILE, SETTINGS = "tokenizer.json", "tokenizer_config.json"
END_OF_TEXT = "<|endoftext|>"  # the byte tokenizer's: no text can contain the token, whatever it is called


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Name -> content of ``tokenizer.json`` and ``tokenizer_config.json``."""
    if isinstance(tokenizer, FileTokenizer):
        return _copied(tokenizer)
    assert isinstance(tokenizer, ByteTokenizer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "split_special_tokens": True,  # its name, spelled out in a text, is thirteen bytes like any other
        "clean_up_tokenization_spaces": False,
    }
    return {FILE: _json(_byte_level()), SETTINGS: _json(settings)}


def _copied(tokenizer: FileTokenizer) -> dict[str, bytes]:
    """The file as it is; the settings beside it, with the end of text that the corpus has."""
    beside = tokenizer.path.with_name(SETTINGS)
    settings: dict[str, Any] = read_table(beside) if beside.is_file() else {}
    settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    if not settings.get("eos_token"):
        settings["eos_token"] = tokenizer.token(tokenizer.end_of_text)
    return {FILE: tokenizer.path.read_bytes(), SETTINGS: _json(settings)}


def _byte_level() -> dict[str, Any]:
    """The byte tokenizer in the words of ``tokenizers``: byte-level BPE without a single merge."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    end = {"id": ByteTokenizer.end_of_text, "content": END_OF_TEXT, "special": True, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**end, "single_word": False, "lstrip": False, "rstrip": False}],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {character: byte for byte, character in enumerate(_characters())},
            "merges": [],
        },
    }


def _characters() -> list[str]:
    """GPT-2's name of each byte: itself where that can be printed, else one of the characters from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
