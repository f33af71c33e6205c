"""Ranks are as many as files can be opened for them: the limit is raised as far as the system allows."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.core.base.errors import LaunchError
from plait.launch.local import local_start, run_ranks
from plait.launch.open_files import SPARE, make_room
from tests.support.ports import own_port

TIER = "unit"

ENDS = [sys.executable, "-I", "-S", "-c", ""]


@pytest.fixture
def limit() -> Iterator[int]:
    """Few more than are open now; the limit that was there comes back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    yield few
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.system
def test_more_ranks_than_the_soft_limit_has_files_for_are_run(limit: int, tmp_path: Path) -> None:
    assert run_ranks(local_start(ENDS, 12, own_port()), 12, tmp_path / "logs", timeout=60) == 0
    assert len(list((tmp_path / "logs").glob("rank-*.log"))) == 12
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > limit


def test_what_is_there_already_is_left_alone() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    make_room(1, "Nothing")
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


def test_above_the_hard_limit_is_one_paragraph_and_nothing_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (128, 256))
    with pytest.raises(
        LaunchError, match=r"^500 ranks take this process 1\d\d\d open files, .* allows it 256 \(ulimit"
    ):
        run_ranks(local_start(ENDS, 500, own_port()), 500, tmp_path / "logs", timeout=60)
    assert not (tmp_path / "logs").exists()


def test_no_limit_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: raised.append(limits))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    make_room(1_000_000, "Many ranks")
    assert not raised
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, resource.RLIM_INFINITY))
    make_room(1_000, "Many ranks")
    [(soft, hard)] = raised
    assert (soft > 1_000, hard) == (True, resource.RLIM_INFINITY)


def test_where_the_system_does_not_say_what_is_open_nothing_is(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: raised.append(limits))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 4096))

    def listed(path: str) -> list[str]:
        raise FileNotFoundError(2, "No such file or directory", path)

    monkeypatch.setattr(os, "listdir", listed)
    make_room(100, "Ranks")
    assert raised == [(100 + SPARE, 4096)]
    monkeypatch.setattr(os, "listdir", lambda path: ["0", "1", "2"])
    make_room(100, "Ranks")
    assert raised[1:] == [(103 + SPARE, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: (103 + SPARE, 4096))
    make_room(100, "Ranks")
    assert len(raised) == 2, "there is room"
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 103 + SPARE))
    make_room(100, "Ranks")
    assert raised[2:] == [(103 + SPARE, 103 + SPARE)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 102 + SPARE))
    with pytest.raises(LaunchError, match=rf"Ranks take this process {103 + SPARE} open files.*it {102 + SPARE} \("):
        make_room(100, "Ranks")
