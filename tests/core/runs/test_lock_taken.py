"""A dead holder's lock, which several may want to replace."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import LaunchError
from plait.core.runs import lock
from plait.core.runs.lock import NAME, RunLock
from tests.core.runs.test_lock import FOREIGN, write_lock


def _race(folder: Path, start: Any, results: Any, leave: Any) -> None:
    start.wait()
    try:
        with RunLock(folder):
            results.put(os.getpid())
            leave.wait()
    except LaunchError as error:
        results.put(str(error))


@pytest.mark.system
@pytest.mark.parametrize("before", ["nothing", "a dead holder", "a dead holder and a dead successor"])
def test_of_many_starters_exactly_one_wins(tmp_path: Path, before: str) -> None:
    context = mp.get_context("fork")
    for number in range(4):
        folder = tmp_path / str(number)
        folder.mkdir()
        if before != "nothing":
            write_lock(folder, silent=0, started=1, token="dead")
        if before.endswith("successor"):  # killed when it had the right to replace the dead one's lock
            write_lock(folder, silent=0, started=1, token="heir")
            (folder / NAME).rename(folder / f".{NAME}.dead")
            write_lock(folder, silent=0, started=1, token="dead")
        start, leave, results = context.Event(), context.Event(), context.Queue()
        racers = [context.Process(target=_race, args=(folder, start, results, leave)) for _ in range(8)]
        for racer in racers:
            racer.start()
        start.set()
        said = [results.get(timeout=60) for _ in racers]
        leave.set()
        for racer in racers:
            racer.join()
        winners = [word for word in said if isinstance(word, int)]
        assert len(winners) == 1
        assert all(f"process {winners[0]}" in word for word in said if isinstance(word, str))
        assert list(folder.iterdir()) == []


def test_who_is_about_to_replace_a_dead_ones_lock_is_waited_for_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is alive, and does not come to it."""
    monkeypatch.setattr(lock, "CLAIM", 0.0)
    write_lock(tmp_path, silent=0, token="heir")
    (tmp_path / NAME).rename(tmp_path / f".{NAME}.dead")
    write_lock(tmp_path, silent=0, started=1, token="dead")
    with pytest.raises(LaunchError, match=f"is in use by process {os.getpid()}"), RunLock(tmp_path):
        pass
    assert json.loads((tmp_path / NAME).read_text())["token"] == "dead"


def test_who_replaces_a_dead_ones_lock_may_give_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the next one does."""
    write_lock(tmp_path, silent=0, token="heir")
    claim = (tmp_path / NAME).rename(tmp_path / f".{NAME}.dead")
    write_lock(tmp_path, silent=0, started=1, token="dead")
    waited = list[float]()

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        claim.unlink()

    monkeypatch.setattr(lock.time, "sleep", sleep)
    with RunLock(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [NAME]
        assert len(waited) == 1


def test_who_was_slower_to_replace_a_dead_ones_lock_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lock(tmp_path, silent=0, started=1, token="dead")
    link = os.link

    def meanwhile(source: Path, target: Path) -> None:
        link(source, target)
        if target.name.endswith(".dead"):  # now we have the right, and somebody else has used it just before
            write_lock(tmp_path, silent=0, **FOREIGN)

    monkeypatch.setattr(os, "link", meanwhile)
    with pytest.raises(LaunchError, match=r"is in use by .*node7"), RunLock(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
