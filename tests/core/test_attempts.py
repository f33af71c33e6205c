"""A run's history: what is written comes back, and what is not ours is passed over."""

from __future__ import annotations

import json
from pathlib import Path

from plait.core.attempts import FILE, Attempt, cut_off, read_attempts, write_attempts


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    told = [
        Attempt(attempt=1, started=10.0, ended=20.0, outcome="failed", cause="killed", why="rank 1 ...", ranks=(1,),
                world=2, hosts=("host0", "host1"), resumed=0, step=7, steps=7, detection_seconds=0.5),
        Attempt(attempt=2, started=21.0, wait_seconds=1.0),
    ]  # fmt: skip
    write_attempts(tmp_path, told)
    assert read_attempts(tmp_path) == told
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [line["outcome"] for line in lines] == ["failed", "running"]


def test_damaged_and_foreign_lines_are_left_out(tmp_path: Path) -> None:
    write_attempts(tmp_path, [Attempt(attempt=1, started=1.0)])
    good = (tmp_path / FILE).read_text()
    later = json.dumps({**json.loads(good), "attempt": 2, "a key of a later version": 1})
    (tmp_path / FILE).write_text(f"{good}[1]\nnull\n{{}}\n{good[:20]}\n\n{later}\n")
    assert [one.attempt for one in read_attempts(tmp_path)] == [1, 2]
    assert read_attempts(tmp_path / "no") == []


def test_what_still_runs_when_the_next_begins_was_cut_off() -> None:
    ended, running = Attempt(attempt=1, started=1.0, ended=2.0, outcome="failed"), Attempt(attempt=2, started=5.0)
    first, second = cut_off([ended, running], step=8, at=9.0)
    assert first == ended
    assert (second.outcome, second.step, second.ended) == ("cut off", 8, 9.0)
    assert cut_off([running], step=-1, at=None)[0].ended is None
    assert cut_off([running], step=-1, at=3.0)[0].ended == 5.0  # what is older than it says nothing of it
