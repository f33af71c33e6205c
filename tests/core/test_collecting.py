"""The process that collects what ranks record: who waits for it, and when another goes on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.core.collecting import Agent, collecting

TIER = "system"
WRITES = "import sys; from pathlib import Path; sys.stdin.read(); Path(sys.argv[1]).write_text('all of it')"
STAYS = "import signal, sys; print('here', flush=True); sys.stdin.read(); signal.pause()"


class Started:
    """Processes of a program, in place of agents, until the test ends."""

    def __init__(self, program: str, file: Path) -> None:
        self.program, self.file, self.all = program, file, list[subprocess.Popen[bytes]]()

    def __call__(self, *_: object) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-c", self.program, str(self.file)]
        self.all.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return self.all[-1]


@pytest.fixture
def started(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Started]:
    found = Started(getattr(request, "param", WRITES), tmp_path / "written")
    yield found
    for process in found.all:
        process.kill()
        process.wait()
        assert process.stdout
        process.stdout.close()


@pytest.mark.parametrize(("is_rank", "fails"), [(False, False), (False, True), (True, False)])
def test_what_ranks_have_recorded_is_there_when_they_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Started, is_rank: bool, fails: bool
) -> None:
    """Also of a launcher that fails, just when somebody wants to know why."""
    monkeypatch.setattr("plait.core.collecting.start_agent", started)
    try:
        with collecting(tmp_path, 0, 2, is_rank=is_rank):
            if fails:
                raise ValueError("a rank was killed")
    except ValueError:
        assert fails
    assert started.file.read_text() == "all of it"
    assert [process.poll() for process in started.all] == [0]


@pytest.mark.parametrize("started", [STAYS], indirect=True)
def test_a_rank_that_fails_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Started) -> None:
    """Its launcher is to hear of it at once."""
    monkeypatch.setattr("plait.core.collecting.start_agent", started)
    with pytest.raises(ValueError, match="out of memory"), collecting(tmp_path, 0, 2, is_rank=True):
        raise ValueError("out of memory")
    [process] = started.all
    assert process.poll() is None
    assert process.stdin and process.stdin.closed, "it was told"


@pytest.mark.parametrize("started", ["raise SystemExit(0)"], indirect=True)
def test_one_that_has_done_its_work_is_followed_by_no_other(
    started: Started, capfd: pytest.CaptureFixture[str]
) -> None:
    agent = Agent(started)
    started.all[0].wait()
    agent.end(wait=True)
    assert len(started.all) == 1 and capfd.readouterr().err == ""
