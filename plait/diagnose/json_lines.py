"""Lines of JSON of a run's folder: what is damaged, too long or cannot be is left out, counted and said."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from plait.core.base.files import kind_of
from plait.core.base.numbers import LARGEST, MOST_SECONDS, is_number
from plait.diagnose.notes import Notes

MOST_LINES, MOST_VALUES, LONGEST_LINE = 500_000, 8_000_000, 1 << 20
"""Of a file of lines of JSON: lines and values that are read, bytes of a line. A step has some 15 values."""
TIMES = 2.0**32
"""Seconds since 1970 of what somebody wrote down: until 2106."""
UNREAD = "files of the run that cannot be read"


def lines_of(path: Path, notes: Notes) -> Iterable[Mapping[str, Any]]:
    """Lines of JSON, without numbers that cannot be; a last one that was cut off is nothing to speak of."""
    bad, good, strange, number = 0, 0, list[str](), 0
    for number, line in enumerate(_texts(path, notes), 1):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if isinstance(values, dict):
            sound = {sys.intern(name): value for name, value in values.items() if _possible(name, value)}
            strange += [f"{name} of line {number}" for name in values if name not in sound]
            good += 1
            yield sound
        else:
            bad += 1
    if bad > 1 or (bad and not good):
        what = "lines are no JSON objects, and were" if bad > 1 else "line is no JSON object, and was"
        notes.count(f"{path.name}: {bad} {what} left out", f"lines of {path.name} that are no JSON objects", bad)
    if strange:
        many = f"{len(strange)} numbers cannot be, such as {strange[0]}, and were"
        line = f"{path.name}: {many if len(strange) > 1 else f'{strange[0]} cannot be, and was'} left out"
        notes.count(line, f"numbers of {path.name} that cannot be", len(strange), strange[0])


def _texts(path: Path, notes: Notes) -> Iterator[bytes]:
    """Lines of a file, as many as may fill a memory; that there are more is said."""
    number = values = 0
    try:
        if (kind := kind_of(path)) not in ("file", ""):
            raise OSError(errno.EINVAL, f"it is a {kind}")
        with open(path, "rb") as file:
            while line := file.readline(LONGEST_LINE):
                number, values = number + 1, values + line.count(b",") + 1
                if number > MOST_LINES or values > MOST_VALUES or len(line) == LONGEST_LINE:
                    break
                yield line
            else:
                return
    except FileNotFoundError:
        return
    except OSError as error:
        notes.left_out(UNREAD, {path.name: f"it cannot be read: {error.strerror}"})
        return
    what = f"{path.name}: from line {number} on it is too long to be read, and was left out"
    notes.count(what, f"ends of {path.name} that are too long", 1, f"line {number}")


def _possible(name: str, value: Any) -> bool:
    """Whether the value may stand under its name: numbers are finite, and counts and times of a possible
    size."""
    if not is_number(value):
        return True
    counts = name in ("step", "steps", "resumed", "writing", "skipped")
    least, most = (-1, LARGEST) if counts else (-1e300, 1e300)
    if name.endswith("seconds") or name in ("started", "ended"):
        least, most = 0, MOST_SECONDS if name.endswith("seconds") else TIMES
    return bool(least <= value <= most)
