"""What was left out: lines for people, counts for programs, and both kept with a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.ignored_input import IgnoredInput
from plait.core.record.timeline import Notes
from plait.diagnose.measured.run_files import FILE, ImportRemarks, imported_notes, write_notes


@pytest.mark.parametrize(("count", "lines"), [(11, 11), (12, 1)])
def test_many_of_a_kind_are_one_line(count: int, lines: int) -> None:
    notes = Notes()
    notes.left_out("rings", {f"r{n}": "it is cut" for n in range(count)})
    assert len(notes.lines) == lines
    assert notes.lines[0] == ("r0: it is cut" if lines > 1 else "12 rings were left out, such as: r0: it is cut")
    assert notes.over.rows() == [{"what": "rings", "count": count, "first": "r0"}]


def test_nothing_that_was_left_out_is_said_of_nothing() -> None:
    notes = Notes()
    notes.left_out("rings", {})
    notes.say("clocks were compared")
    assert (notes.lines, notes.over.rows()) == (["clocks were compared"], [])
    notes.count("3 lines are none", "lines", 3, "line 7")
    assert notes.lines == ["clocks were compared", "3 lines are none"]
    assert notes.over.rows() == [{"what": "lines", "count": 3, "first": "line 7"}]


@pytest.mark.parametrize("steps", [True, False])
def test_an_imported_folder_keeps_what_there_is_to_say(tmp_path: Path, steps: bool) -> None:
    assert imported_notes(tmp_path) is None
    over = IgnoredInput()
    over.note("events", "trace.json", 4)
    kept = ImportRemarks(("a rank left no file",), over, steps=steps, shared_clock=not steps, unknown={3: 5})
    write_notes(tmp_path, kept)
    said = imported_notes(tmp_path)
    assert said is not None
    assert (said.shared_clock, said.unknown) == (kept.shared_clock, kept.unknown)
    assert (said.notes, said.over.rows(), said.steps) == (("a rank left no file",), over.rows(), steps)
    notes = Notes()
    notes.say("first")
    said.add_to(notes)
    assert notes.lines == ["first", "a rank left no file", *over.lines()]
    assert notes.over.rows() == over.rows()


WHOLE = {"version": 1, "notes": [], "passed_over": [], "steps": False}


@pytest.mark.parametrize(
    "content",
    [
        "{", "[]", *(json.dumps({key: value for key, value in WHOLE.items() if key != lost}) for lost in
                     ("notes", "passed_over", "steps")),
        json.dumps(WHOLE | {"passed_over": [{"what": "x", "first": "y", "count": "many"}]}),
        json.dumps(WHOLE | {"passed_over": [7]}), json.dumps(WHOLE | {"unknown": [7]}),
        json.dumps(WHOLE | {"notes": 7}),
    ],
)  # fmt: skip
def test_what_was_kept_and_is_damaged_is_told(tmp_path: Path, content: Any) -> None:
    (tmp_path / FILE).write_text(content)
    said = imported_notes(tmp_path)
    assert said is not None
    assert said.notes[0].startswith(f"{FILE} cannot be read: ")
    assert (said.over.rows(), said.steps) == ([], True)


@pytest.mark.parametrize("content", [
    {"passed_over": [{"what": "x", "first": "", "count": count}]} for count in (10**4000, -1, 1.5, True, "3", None)
] + [{"unknown": {rank: 1}} for rank in ("-1", "x", "9" * 100)] + [{"unknown": {"0": 10**4000}}])  # fmt: skip
def test_counts_that_cannot_be_are_a_note_of_their_own(tmp_path: Path, content: dict[str, Any]) -> None:
    whole = {"version": 1, "notes": [], "passed_over": [], "steps": True, **content}
    (tmp_path / FILE).write_text(json.dumps(whole))
    said = imported_notes(tmp_path)
    assert said
    assert [note.startswith(f"{FILE} cannot be read: ") for note in said.notes] == [True]
    assert not said.over and not said.unknown
