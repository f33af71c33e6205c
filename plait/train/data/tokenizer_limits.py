"""What a ``tokenizer.json`` may hold: a file of others may be huge, or tiny and make gigabytes of one text.

The package ``tokenizers`` builds whatever a file says, so that this is looked at before.

| part | limit |
|---|---|
| the file | ``LARGEST`` bytes, ``MOST_VALUES`` values |
| vocabulary, merges, added tokens | ``MOST_TOKENS`` of each |
| steps of normalizers, pre-tokenizers, post-processors and decoders | ``MOST_STEPS`` together |
| what a normalizer puts in the place of a character, all multiplied | ``MOST_GROWTH`` characters |
| what is put before a text; prefixes and suffixes of tokens | ``LONGEST`` characters |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

LARGEST = 128 << 20
"""Bytes: with a quarter of a million tokens one has 35 MB."""
MOST_VALUES = 4_000_000
MOST_TOKENS = 1_000_000
MOST_STEPS = 1000
MOST_GROWTH = 16
LONGEST = 100
_STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")


def check_limits(content: dict[str, Any]) -> None:
    """Raise ValueError, in one sentence, for a file of which too much would be made.

    >>> check_limits({"normalizer": {"type": "Prepend", "prepend": "x" * 101}})
    Traceback (most recent call last):
    ValueError: its prepend has 101 characters; at most 100 are taken
    """
    found: Any = content.get("model")
    model = cast("dict[str, Any]", found) if isinstance(found, dict) else dict[str, Any]()
    for where, key in ((model, "vocab"), (model, "merges"), (content, "added_tokens")):
        listed = where.get(key)
        count = len(cast("list[Any]", listed)) if isinstance(listed, dict | list) else 0
        if count > MOST_TOKENS:
            raise ValueError(f"its {key} has {count} entries; at most {MOST_TOKENS} are read")
    steps = [step for key in _STEPS for step in _steps(content.get(key))]
    if len(steps) > MOST_STEPS:
        raise ValueError(f"it has {len(steps)} steps around its model; at most {MOST_STEPS} are taken")
    for where, key in (*((model, key) for key in _AFFIXES), *((step, "prepend") for step in steps)):
        if isinstance(text := where.get(key), str) and len(text) > LONGEST:
            raise ValueError(f"its {key} has {len(text)} characters; at most {LONGEST} are taken")
    growth = 1
    for step in _steps(content.get("normalizer")):
        if isinstance(text := step.get("content"), str):
            growth *= max(1, len(text))
            if growth > MOST_GROWTH:
                raise ValueError(f"its normalizer makes more than {MOST_GROWTH} characters of one")


def _steps(value: Any) -> Iterator[dict[str, Any]]:
    """Every table in a part of the file, however they are nested."""
    if isinstance(value, dict):
        yield cast("dict[str, Any]", value)
    if isinstance(value, dict | list):
        for inner in cast("dict[str, Any]", value).values() if isinstance(value, dict) else cast("list[Any]", value):
            yield from _steps(inner)
