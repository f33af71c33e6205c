"""What there is to say of a run's folder that was made of other tools' recordings: its ``imported.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from plait.core.base.codec.json_text import read_table
from plait.core.base.files import reason_of, replacing
from plait.core.base.numbers import LARGEST, counted, shown
from plait.core.base.passed_over import PassedOver
from plait.diagnose.notes import Notes

FILE = "imported.json"
VERSION = 1


class Said(NamedTuple):
    """steps: whether spans tell of steps, as profiles do and dumps of hangs do not. one_clock: whether all
    traces have a base time, or none. unknown: of ranks of which too many kernels cannot be read, how many."""

    notes: tuple[str, ...]
    over: PassedOver
    steps: bool
    one_clock: bool = True
    unknown: Mapping[int, int] = MappingProxyType({})

    def add_to(self, notes: Notes) -> None:
        """Say all of it there."""
        notes.lines += [*self.notes, *self.over.lines()]
        notes.over.add(self.over)


def write_notes(folder: Path, said: Said) -> None:
    """Keep it with the folder. Raises OSError."""
    content = {
        "version": VERSION, "notes": list(said.notes), "passed_over": said.over.rows(), "steps": said.steps,
        "one_clock": said.one_clock, "unknown": {str(rank): count for rank, count in said.unknown.items()},
    }  # fmt: skip
    with replacing(folder / FILE) as partial:
        partial.write_text(json.dumps(content) + "\n")


def imported_notes(folder: Path) -> Said | None:
    """What there is to say of a folder that was imported; None of any other."""
    if not (folder / FILE).is_file():
        return None
    over = PassedOver()
    try:
        content = read_table(folder / FILE)
        notes = tuple(str(note) for note in content["notes"])
        for row in content["passed_over"]:
            over.note(str(row["what"]), str(row["first"]), _count(row["count"]))
        unknown = {_count(counted(rank)): _count(count) for rank, count in content.get("unknown", {}).items()}
        return Said(notes, over, content["steps"] is not False, content.get("one_clock") is not False, unknown)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return Said((f"{FILE} cannot be read: {reason_of(error)}",), PassedOver(), steps=True)


def _count(value: Any) -> int:
    """Of things, as a file says it. Raises ValueError for what is none."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST:
        raise ValueError(f"{shown(value)} is no count")
    return value
