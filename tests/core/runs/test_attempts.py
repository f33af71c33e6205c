"""A run's history: what is written comes back, and what is not ours is passed over."""

from __future__ import annotations

import errno
import json
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from plait.core.runs import attempts
from plait.core.runs.attempts import FILE, Attempt, cut_off, read_attempts, write_attempts
from plait.core.runs.history import History


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


def test_steps_of_one_that_was_cut_off_are_those_since_it_resumed() -> None:
    from_start = Attempt(attempt=1, started=1.0, resumed=0)
    told = Attempt(attempt=1, started=1.0, resumed=5, step=9, steps=4)
    assert [cut_off([from_start], step=3, at=2.0)[0].steps, cut_off([told], step=12, at=2.0)[0].steps] == [3, 7]
    (before,) = cut_off([told], step=6, at=2.0)  # the last logged step is older than what ranks have said
    assert (before.steps, before.step) == (4, 9)


def test_of_more_attempts_than_are_kept_the_newest_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "MOST", 2)
    write_attempts(tmp_path, [Attempt(attempt=number, started=1.0) for number in (1, 2, 3)])
    assert [one.attempt for one in read_attempts(tmp_path)] == [2, 3]


def test_a_folder_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        write_attempts(tmp_path / "gone", [])
    assert not (tmp_path / "gone").exists()


DAMAGED = ["null", "[]", pytest.param("[" * 60_000, id="deep"), '{"attempt": 1}',
           '{"attempt": "a", "started": 1.0}', "\x00\x01",
           '{"attempt": 1, "started": Infinity}', '{"attempt": 1, "started": 1' + "0" * 400 + "}",
           '{"attempt": 1, "started": 1.0, "hosts": 5}',
           '{"attempt": 1, "started": 1.0, "outcome": "glad"}']  # fmt: skip


@pytest.mark.parametrize("bad", DAMAGED)
def test_a_damaged_line_is_set_aside_with_a_word_and_the_others_stay(
    tmp_path: Path, bad: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [Attempt(attempt=number, started=5.0, outcome="failed") for number in (1, 2)]
    (tmp_path / FILE).write_text(good[0].to_text() + bad + "\n" + good[1].to_text())
    assert read_attempts(tmp_path) == good
    history = History(tmp_path)
    assert history.attempts == good
    assert (
        capsys.readouterr().err
        == "plait: warning: 1 line of attempts.jsonl cannot be read; set aside in attempts.unreadable\n"
    )
    history.begin(1, (), "abc")
    assert (tmp_path / "attempts.unreadable").read_text() == bad + "\n"
    assert [one.attempt for one in read_attempts(tmp_path)] == [1, 2, 3]
    History(tmp_path)
    assert capsys.readouterr().err == ""


def test_pipes_in_place_of_the_files_of_a_history_are_not_waited_for(tmp_path: Path) -> None:
    for name in (FILE, "metrics.jsonl"):
        os.mkfifo(tmp_path / name)
    assert History(tmp_path).attempts == []


@pytest.mark.parametrize(("number", "written"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EPERM, False)])
@pytest.mark.parametrize("why", ["a word", ""])
def test_on_a_full_disk_the_file_that_is_there_is_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, written: bool, why: str
) -> None:
    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    before = [Attempt(attempt=1, started=10.0, why="to be shortened")]
    after = [replace(before[0], outcome="failed", why=why)]
    write_attempts(tmp_path, before)
    monkeypatch.setattr(attempts, "replacing", full)
    with nullcontext() if written else pytest.raises(OSError, match="not permitted"):
        write_attempts(tmp_path, after)
    assert read_attempts(tmp_path) == (after if written else before)
