"""The list of labs, whatever lies in its folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plait.core.base.errors import LaunchError
from plait.lab.registry import running

TIER = "unit"
ENTRY = '"name": "a", "pid": 1, "started": 1, "keeper_started": 1, "command": [], "spec": {"hosts": 1}'
OTHERS = {
    "deep": "[" * 60_000,
    "null": "null",
    "a list": "[]",
    "no network": f"{{{ENTRY}}}",
    "fds": f'{{{ENTRY}, "network": {{"keeper": 1, "fds": 5, "userns": true}}}}',
    "keeper": f'{{{ENTRY}, "network": {{"keeper": "1", "fds": [], "userns": true}}}}',
    "Infinity": '{"name": Infinity}',
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the list is."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "plait-lab"


@pytest.mark.parametrize("text", list(OTHERS.values()), ids=list(OTHERS))
def test_what_is_no_lab_is_taken_off_the_list(folder: Path, text: str) -> None:
    assert running() == []
    (folder / "a.json").write_text(text)
    assert running() == []
    assert not (folder / "a.json").exists()


def test_a_folder_and_a_pipe_in_it_are_no_labs(folder: Path) -> None:
    assert running() == []
    (folder / "a.json").mkdir()
    os.mkfifo(folder / "b.json")
    assert running() == []


@pytest.mark.parametrize("where", ["plait-lab", "plait-lab/lock"])
def test_what_is_in_the_way_is_named(folder: Path, where: str) -> None:
    if where == "plait-lab":
        folder.write_text("")
    else:
        folder.mkdir(mode=0o700)
        (folder / "lock").mkdir()
    with pytest.raises(LaunchError, match=rf"{where}\b.*Remove"):
        running()
