"""What a run could not write is counted, and said when it begins and when it is over."""

from __future__ import annotations

from plait.core.runs.progress import Missing


def test_it_is_said_once_when_it_begins_and_once_when_it_is_over() -> None:
    said = list[str]()
    missing = Missing("metrics.jsonl", said.append)
    missing.worked()
    assert said == []
    missing.failed(OSError(28, "No space left on device"))
    missing.failed(OSError(28, "No space left on device"), 3)
    assert said == ["warning: metrics.jsonl cannot be written (No space left on device); training goes on without"]
    assert (missing.steps, str(missing)) == (4, "metrics.jsonl of 4 steps")
    missing.worked()
    missing.worked()
    assert said[1:] == ["metrics.jsonl is written again; missing: metrics.jsonl of 4 steps"]
    missing.failed(OSError("odd"))
    assert said[2:] == ["warning: metrics.jsonl cannot be written (odd); training goes on without"]


def test_one_step_is_one() -> None:
    missing = Missing("the timeline")
    assert str(missing) == "the timeline of 0 steps"
    missing.failed(OSError(5, "Input/output error"))
    assert str(missing) == "the timeline of 1 step"
