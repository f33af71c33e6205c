"""The files: JSON packed by xz, numbers rounded to twelve digits, and how two contents differ."""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
DIGITS = 12
"""Of a number with a fraction: the last bits of a sum depend on the processor."""
CLOSE = 3 * 10.0 ** (1 - DIGITS)
"""Relative difference of two numbers that count as equal: each may have been rounded either way."""


def path_of(name: str) -> Path:
    """The file of a kind of results."""
    return FOLDER / f"{name}.json.xz"


def packed(content: Any) -> bytes:
    """A file's bytes: equal contents give equal bytes."""
    text = json.dumps(rounded(content), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)


def read(name: str) -> Any:
    """A file's content; None where there is none."""
    path = path_of(name)
    return json.loads(lzma.decompress(path.read_bytes())) if path.is_file() else None


def rounded(value: Any) -> Any:
    """Plain values for JSON. Numbers keep ``DIGITS`` digits; infinite ones become texts."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return value


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """What differs, each with its path: keys that came or went, values that changed."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            inner = f"{where}/{key}"
            if key not in new:
                yield f"{inner} is gone"
            elif key not in old:
                yield f"{inner} is new"
            else:
                yield from differences(old[key], new[key], inner)
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            yield f"{where} has {len(new)} entries in place of {len(old)}"
        for at, (before, after) in enumerate(zip(old, new, strict=False)):
            yield from differences(before, after, f"{where}/{at}")
    elif not _equal(old, new):
        yield f"{where}: {_short(old)} became {_short(new)}"


def _equal(old: Any, new: Any) -> bool:
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (old, new))
    return math.isclose(old, new, rel_tol=CLOSE, abs_tol=0.0) if numbers else bool(old == new)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
