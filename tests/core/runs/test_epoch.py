"""Attempts that were given up: what they find in the run's folder, and what they may not do any
more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plait.core.base.env import epoch_word
from plait.core.base.errors import RunLost
from plait.core.runs.attempts import EPOCH_FILE, Epoch, read_attempts
from plait.core.runs.history import History
from plait.core.runs.progress import Progress
from plait.launch.run_folder import STARTS, starts_in_vain


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_EPOCH", "")


def test_a_new_attempt_ends_the_one_before(tmp_path: Path) -> None:
    first = Epoch.begin(tmp_path)
    assert not first.over and Epoch.mine(tmp_path) == first
    second = Epoch.begin(tmp_path)
    assert first.over and not second.over and epoch_word() == second.word
    with pytest.raises(RunLost, match="was given up, and another has begun"):
        first.check()
    second.check()


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"epoch": 7}', b"[]", b"\xff" * 99, b'{"since": 1}'])
def test_a_file_that_says_nothing_fences_nobody(tmp_path: Path, content: bytes | None) -> None:
    """A disk in trouble ends no run; that the folder is gone others notice."""
    one = Epoch.begin(tmp_path)
    (tmp_path / EPOCH_FILE).unlink()
    if content is not None:
        (tmp_path / EPOCH_FILE).write_bytes(content)
    assert not one.over


def test_who_was_started_by_nobody_is_not_compared(tmp_path: Path) -> None:
    Epoch.begin(tmp_path)
    os.environ.pop("PLAIT_EPOCH")
    assert not Epoch.mine(tmp_path).over


def test_a_folder_that_cannot_be_written_has_no_epoch(tmp_path: Path) -> None:
    assert Epoch.begin(tmp_path / "none").word == "" == epoch_word()


def test_the_history_is_that_of_who_has_taken_over(tmp_path: Path) -> None:
    first = History(tmp_path)
    first.begin(2, ("n1",), "plan")
    second = History(tmp_path)
    second.begin(2, ("n2",), "plan")
    assert first.attempt(lambda progress: 0, Progress(2)) == 0  # it goes on, and notes its end
    assert [one.hosts for one in read_attempts(tmp_path)] == [("n1",), ("n2",)]
    assert starts_in_vain(tmp_path, "7", 0) == 1 and (tmp_path / STARTS).exists()
    (tmp_path / STARTS).unlink()
    os.environ["PLAIT_EPOCH"] = first.epoch.word
    assert starts_in_vain(tmp_path, "7", 0) == 1 and not (tmp_path / STARTS).exists()
