"""Copies of a run's state in memory: who frees them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from plait.core.base.errors import JobError
from plait.core.runs import host_memory
from plait.core.runs.host_memory import OWNER_FILE, close_memory, lose_memory, memory_of, open_memory, sweep_memory


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of the machine's."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(host_memory, "SHARED", folder)
    return folder


def owned(run: Path, **changes: object) -> Path:
    """The folder of a run, as if a launcher with other values had made it."""
    open_memory(run)
    owner = json.loads((memory_of(run) / OWNER_FILE).read_text())
    (memory_of(run) / OWNER_FILE).write_text(json.dumps(owner | changes))
    (memory_of(run) / "host").mkdir()
    return memory_of(run)


def test_it_is_empty_this_users_alone_and_goes_with_its_launcher(tmp_path: Path, shared: Path) -> None:
    (owned(tmp_path / "a") / "host" / "copy").write_text("of an earlier start")
    open_memory(tmp_path / "a")
    folder = memory_of(tmp_path / "a")
    assert [path.name for path in folder.iterdir()] == [OWNER_FILE]
    assert folder.stat().st_mode & 0o777 == 0o700
    close_memory(tmp_path / "a")
    assert list(shared.iterdir()) == []


@pytest.mark.parametrize("changes", [{"started": 1}, {"pid": 0}, {"pid": 10**9}], ids=str)
def test_what_a_launcher_left_that_was_killed_is_freed(
    tmp_path: Path, shared: Path, changes: dict[str, object]
) -> None:
    left, living = owned(tmp_path / "left", **changes), owned(tmp_path / "living")
    sweep_memory()
    assert not left.exists() and living.is_dir()
    left = owned(tmp_path / "left", **changes)
    open_memory(tmp_path / "next")  # the next start does so too
    assert not left.exists() and living.is_dir()


@pytest.mark.parametrize("changes", [{"place": "another container"}, {"pid": "1"}, {"started": None}], ids=str)
def test_what_may_be_somebodys_stays(tmp_path: Path, changes: dict[str, object]) -> None:
    folder = owned(tmp_path / "left", **changes)
    sweep_memory()
    assert folder.is_dir()


def test_what_is_no_owner_is_passed_over(tmp_path: Path, shared: Path) -> None:
    for name, text in (("a", "[" * 60_000), ("b", "null"), ("c", "")):
        folder = shared / f"plait-{os.geteuid()}-{name}"
        folder.mkdir()
        (folder / OWNER_FILE).write_text(text)
    os.mkfifo(shared / f"plait-{os.geteuid()}-d")
    sweep_memory()
    assert len(list(shared.iterdir())) == 4


def test_what_hosts_had_is_lost_with_them(tmp_path: Path) -> None:
    lose_memory(tmp_path / "a", ["host0"])  # there may be none
    open_memory(tmp_path / "a")
    for host in ("host0", "host1"):
        (memory_of(tmp_path / "a") / host).mkdir()
    lose_memory(tmp_path / "a", ["host0", "host2"])
    assert sorted(path.name for path in memory_of(tmp_path / "a").iterdir()) == ["host1", OWNER_FILE]


def test_a_machine_without_such_memory_is_named(tmp_path: Path, shared: Path) -> None:
    shared.rmdir()
    with pytest.raises(
        JobError, match=r"run\.memory_every: .*shm cannot hold copies of the state: No such file.* to 0"
    ):
        open_memory(tmp_path / "a")


def test_a_start_that_fails_leaves_nothing(tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(JobError, match="No space left on device"):
        open_memory(tmp_path / "a")
    assert list(shared.iterdir()) == []
