"""Plait's own files, TOML or JSON (``core.topology.form``).

===========  =========================================================================
known        version, name, levels, hardware, states, switches, and their keys
passed over  nothing
refused      other keys, values of other types, counts below what is possible, no tree
===========  =========================================================================
"""

from __future__ import annotations

import re
from typing import Any, cast

from plait.core.base.codec.toml_text import parse_toml
from plait.core.base.errors import JobError
from plait.core.topology.form import from_dict
from plait.place.readers.source import Asked, Found, Source

_LOOKS = re.compile(r"^[ \t]*(\[switches\b|version\s*=|levels\s*=)", re.MULTILINE)

LARGEST_TOML = 4 << 20
"""Characters: it is slow to read, and host lists make ten thousand nodes a file of a hundredth of that."""


def looks(source: Source) -> bool:
    """Whether a file is one of these."""
    if source.is_json:
        return isinstance(source.json, dict) and "switches" in source.json
    return bool(_LOOKS.search(source.text))


def read(source: Source, asked: Asked) -> Found:
    """Raises JobError naming the line or the key."""
    del asked
    values: Any = source.json if source.is_json else _toml(source.text)
    if not isinstance(values, dict):
        raise JobError("not a table")
    return Found(topology=from_dict(cast("dict[str, Any]", values)))


def _toml(text: str) -> dict[str, Any]:
    if len(text) > LARGEST_TOML:
        raise JobError(f"more than {LARGEST_TOML >> 20} MiB of TOML", fix="Write JSON, or names as host lists")
    try:
        return parse_toml(text.replace("\r\n", "\n"))
    except (ValueError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        raise JobError("nested too deeply" if deep else f"not valid TOML: {str(error)[:200]}") from None
