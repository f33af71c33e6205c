"""A lock that is lost while it is held."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.core.base.errors import RankFailure, RunLost
from plait.core.runs import lock
from plait.core.runs.lock import NAME, RunLock
from tests.core.runs.test_lock import FOREIGN, write_lock


@pytest.mark.usefixtures("_quick_beat")
def test_the_holder_gives_signs_of_life(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        os.utime(tmp_path / NAME, (0, 0))
        end = time.monotonic() + 30
        while (tmp_path / NAME).stat().st_mtime == 0 and time.monotonic() < end:
            time.sleep(0.01)
        assert (tmp_path / NAME).stat().st_mtime > 0


@pytest.fixture
def _quick_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT", 0.02)


def removed(folder: Path) -> None:
    (folder / NAME).unlink()


def removed_with_the_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def taken(folder: Path) -> None:
    write_lock(folder, silent=0, **FOREIGN)


LOSSES = [(removed, "its lock"), (removed_with_the_folder, "the folder was removed"), (taken, "taken over by .*node7")]


@pytest.mark.parametrize(("lose", "says"), LOSSES)
@pytest.mark.usefixtures("_quick_beat")
def test_a_lock_that_is_lost_is_noticed_while_it_is_held(
    tmp_path: Path, lose: Callable[[Path], None], says: str
) -> None:
    def until_lost() -> None:
        with RunLock(tmp_path / "run") as held:
            held.check()
            lose(tmp_path / "run")
            end = time.monotonic() + 30
            while time.monotonic() < end:
                held.check()
                time.sleep(0.01)
            raise AssertionError("nobody noticed")

    with pytest.raises(RunLost, match=says):
        until_lost()


@pytest.mark.parametrize(("lose", "says"), LOSSES)
def test_or_at_the_end(tmp_path: Path, lose: Callable[[Path], None], says: str) -> None:
    with pytest.raises(RunLost, match=says), RunLock(tmp_path / "run"):
        lose(tmp_path / "run")
    assert (tmp_path / "run" / NAME).exists() == (lose is taken)  # the other one's is left alone


def test_a_disk_in_trouble_does_not_hide_how_the_run_ended(tmp_path: Path) -> None:
    """Its file can be neither read nor removed: here a folder is in its place."""

    def fails() -> None:
        with RunLock(tmp_path):
            (tmp_path / NAME).unlink()
            (tmp_path / NAME).mkdir()
            raise RankFailure("rank 1 was killed by SIGBUS")

    with pytest.raises(RankFailure, match="rank 1 was killed"):
        fails()
