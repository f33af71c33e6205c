"""While a batch ramps up, and after it was changed: what is told of a step is of steps of one
size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from plait.core.base.ignored_input import IgnoredInput
from plait.core.record.timeline import Timeline
from plait.diagnose.measured.compare import table_of
from plait.diagnose.measured.reading import Tables, recorded, uniform_batches
from plait.diagnose.measured.run_files import FEW, uniform_run, uniform_steps
from plait.diagnose.measured.shares import drift_of, steps_of
from plait.diagnose.series import summarise
from tests.diagnose.measured.test_shares import lasting


def run(*sizes: int) -> tuple[Any, list[dict[str, Any]]]:
    """Steps that take as many seconds as they have sequences, of ten tokens each; the first half
    more."""
    seconds = {n: float(size) * (1.5 if n == 0 else 1.0) for n, size in enumerate(sizes)}
    lines = [
        {"step": n + 1, "seconds": seconds[n], "tokens_per_second": 10 * size / seconds[n]}
        for n, size in enumerate(sizes)
    ]
    return lasting(seconds), lines


def test_of_a_ramp_the_steps_of_the_whole_batch_are_told() -> None:
    seen, lines = run(*[2] * 20, *[4] * 20, *[8] * FEW)
    assert drift_of(seen) is not None, "which is the batch's, not a machine's"
    found = uniform_run(seen, lines)
    assert sorted(found.recording.seconds) == list(range(40, 40 + FEW)) == found.recording.steps
    assert found.recording.spans["step"].min() == 40 and found.tokens == 80
    steps = steps_of(found.recording, found.metrics)
    assert steps and (steps.median, steps.tokens_per_second) == (8.0, 10.0)
    assert drift_of(found.recording) is None
    assert found.note.startswith(f"Steps have batches of 3 sizes: step statistics cover the {FEW} with 80 tokens")
    assert "from 41 to 48" in found.note


def test_of_a_ramp_that_goes_on_the_size_that_most_steps_have_is_told() -> None:
    found = uniform_run(*run(*[2] * 20, *[4] * 30, *[8] * (FEW - 1)))
    assert found.tokens == 40 and sorted(found.recording.seconds) == list(range(20, 50))


def test_steps_that_are_drawn_say_the_size() -> None:
    """Spans are kept of the last steps: a size that none of these has says nothing of them."""
    _, lines = run(*[2] * 20, *[8] * 3)
    assert uniform_steps(lines, range(23)).steps == list(range(20))
    assert uniform_steps(lines, range(23), range(20, 23)).steps == [20, 21, 22]


def test_a_timeline_names_no_step_that_is_slow_for_its_size_alone(tmp_path: Path) -> None:
    """The first steps of a ramp are short, so that all of the whole batch seemed slow."""
    sizes = [*[2] * 20, *[8] * 12]
    seconds = [float(size) * (2 if n == 25 else 1) for n, size in enumerate(sizes)]
    rows = [
        {"step": n, "rank": 0, "kind": "step", "site": "", "direction": "", "n": 1, "sum": each, "layer": -1}
        for n, each in enumerate(seconds)
    ]
    rollups = pl.DataFrame(rows, schema_overrides={"rank": pl.Int32})
    (tmp_path / "metrics.jsonl").write_text("".join(
        json.dumps({"step": n + 1, "seconds": each, "tokens_per_second": 10 * size / each}) + "\n"
        for n, (size, each) in enumerate(zip(sizes, seconds, strict=True))
    ))  # fmt: skip
    spans = table_of(Timeline(()))
    found = uniform_batches(Tables(spans, spans, rollups, "plan", ("before",), IgnoredInput()), tmp_path)
    assert found.rollups["step"].to_list() == list(range(20, 32))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    whole = recorded(spans, rollups, None, metrics=lines)
    assert [one.step for one in summarise(uniform_run(whole, lines).recording).slowest] == [25]
    assert len(summarise(whole).slowest) == 3, "without"
    assert found.notes[0] == "before" and "12 with 80 tokens, from 21 to 32" in found.notes[1]


@pytest.mark.parametrize("lines", [[], [{"step": 1, "seconds": 1e300, "tokens_per_second": 1e300}, {"step": "x"}]])
def test_what_is_of_one_size_or_of_none_stays_whole(lines: list[dict[str, Any]]) -> None:
    seen, told = run(*[4] * 12)
    assert uniform_run(seen, lines).recording is seen and uniform_run(seen, lines).tokens is None
    same = uniform_run(seen, told)
    assert (same.recording, same.tokens, same.note) == (seen, 40, "")
