"""Paths in a job: meant from its file's folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from plait.core.base.files import check_path
from plait.core.job.settings import BYTES, STDLIB

PATHS = (
    ("model", "huggingface"),
    ("data", "text"),
    ("data", "tokenizer"),
    ("train", "init_from"),
    ("cluster", "file"),
    ("cluster", "profile"),
    ("kubernetes", "pod"),
)
"""Settings that are paths, or lists of them."""


def located(values: dict[str, Any], base: Path) -> dict[str, Any]:
    """``values`` with relative paths made absolute from ``base``; what is of the wrong type stays as it is.
    Raises JobError for a text that can be no path."""

    def locate(text: Any, key: str) -> Any:
        if not isinstance(text, str) or text in (STDLIB, BYTES):
            return text
        check_path(text, key)
        return os.path.abspath(os.path.join(base, os.path.expanduser(text)))

    result = dict(values)
    for section, key in PATHS:
        table = result.get(section)
        if isinstance(table, dict) and key in table:
            value = cast("dict[str, Any]", table)[key]
            many, name = isinstance(value, (list, tuple)), f"{section}.{key}"
            result[section] = table | {
                key: [locate(text, name) for text in cast("Sequence[Any]", value)] if many else locate(value, name)
            }
    return result
