"""Paths in a job: meant from its file's folder, and which of them have to be there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from plait.core.base.errors import JobError
from plait.core.base.files import check_path
from plait.core.job.settings import BYTES, STDLIB

PATHS = (
    ("model", "huggingface"),
    ("data", "text"),
    ("data", "sources"),
    ("data", "eval"),
    ("data", "tokenizer"),
    ("data", "chat_template"),
    ("train", "init_from"),
    ("cluster", "file"),
    ("cluster", "profile"),
    ("kubernetes", "pod"),
    ("place", "affinity"),
    ("place", "network"),
    ("place", "topology"),
    ("place", "rank_table"),
    ("place", "states"),
)
"""Settings that are paths, or lists of them."""
WORDS = {"data.text": (STDLIB,), "data.sources": (STDLIB,), "data.eval": (STDLIB,),
         "data.tokenizer": (BYTES,), "place.affinity": ("auto",), "place.network": ("",), "place.topology": ("",),
         "place.rank_table": ("",),
         "place.states": ("-",)}  # fmt: skip
"""Values of these settings that are no paths."""
PREDICTED = ("cluster.file", "cluster.profile", "place.affinity", "place.network", "place.rank_table")
"""Files that predictions read, all of them or where ranks are placed."""
ASKED = ("slurm:", "kubernetes:")
"""How [place] begins what is no file: it is asked what nodes are doing."""


def located(values: dict[str, Any], base: Path) -> dict[str, Any]:
    """``values`` with relative paths made absolute from ``base``; what is of the wrong type stays as it is.
    Raises JobError for a text that can be no path."""

    def locate(text: Any, key: str) -> Any:
        if not isinstance(text, str) or text in WORDS.get(key, ()):
            return text
        if (key == "place.states" and text.startswith(ASKED)) or (key == "place.topology" and ":" in text):
            return text
        check_path(text, key)
        if "://" in text:  # an address, which fsspec opens
            return text
        return os.path.abspath(os.path.join(base, os.path.expanduser(text)))

    def locate_all(value: Any, key: str) -> Any:
        if isinstance(value, (list, tuple)):
            return [locate_all(one, key) for one in cast("Sequence[Any]", value)]
        if isinstance(value, dict) and "path" in value:  # a source of data
            table = cast("dict[str, Any]", value)
            return table | {"path": locate_all(table["path"], key)}
        return locate(value, key)

    result = dict(values)
    for section, key in PATHS:
        table = result.get(section)
        if isinstance(table, dict) and key in table:
            value = cast("dict[str, Any]", table)[key]
            result[section] = table | {key: locate_all(value, f"{section}.{key}")}
    return result


def check_there(values: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Raise JobError, naming the key, for a file that a job names and that does not exist: a reader of it
    names the file alone, and one that is not read would be passed over. values: plain values of a job."""
    for key in keys:
        section, _, name = key.partition(".")
        path = values.get(section, {}).get(name)
        if path and path not in WORDS.get(key, ()) and not os.path.exists(path):
            fix = "Check the path, or leave the key out"
            raise JobError(f"there is no file '{path}'", key=key, fix=fix)
