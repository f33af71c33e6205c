"""How ranks of this machine are started, ended and forked, without a process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from plait.core.base import programs
from plait.core.runs.channel import LONGEST
from plait.launch.local import local
from plait.launch.local.local import (
    Forked,
    ForkServer,
    LocalProcess,
    local_start,
    local_variables,
    run_ranks,
    warm_starts,
)
from plait.launch.watch import RunGuard

TIER = "unit"


class Child:
    """A process that is not there, and ends once it is killed."""

    def __init__(self, pid: int, status: int | None = None) -> None:
        self.pid, self.returncode = pid, status
        CHILDREN[pid] = self

    def poll(self) -> int | None:
        return self.returncode


CHILDREN = dict[int, Child]()


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Process groups that were sent a signal."""
    sent = list[tuple[int, int]]()

    def killpg(group: int, number: int) -> None:
        sent.append((group, number))
        CHILDREN[group].returncode = -number

    monkeypatch.setattr(os, "killpg", killpg)
    return sent


def test_a_rank_is_ended_with_its_group_while_it_runs(
    tmp_path: Path, killed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "log").open("w+b") as log:
        child = Child(4_000_000)
        one = LocalProcess(child, log)
        assert (one.pid, one.returncode, one.poll(), one.stopped) == (4_000_000, None, None, False)
        one.kill()
        assert killed == [(4_000_000, signal.SIGKILL)]
        assert (one.returncode, one.poll()) == (-9, -9)
        one.kill()
        assert len(killed) == 1
        monkeypatch.setattr(local, "process_state", lambda pid: SimpleNamespace(stopped=pid == 4_000_000))
        assert one.stopped

        def gone(group: int, number: int) -> None:
            raise ProcessLookupError

        child.returncode = None
        monkeypatch.setattr(os, "killpg", gone)
        one.kill()


def test_a_log_is_read_where_it_is_open_and_its_end_stays(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+b", buffering=0) as log:
        log.write(b"one \xff")
        one = LocalProcess(Child(1), log)
        assert one.log_tail() == "one \ufffd"
        (tmp_path / "log").unlink()
        log.write(b" two")
        assert one.log_tail() == "one \ufffd two"


def test_ranks_are_started_in_sessions_of_their_own_and_know_who_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[Any]()
    monkeypatch.setattr(subprocess, "Popen", lambda argv, **options: given.append((argv, options)))
    options: Any = {"pass_fds": (5,)}
    local_start(("rank", "it"), 4, 4711)(2, env={"A": "b", "RANK": "9"}, **options)
    who = local_variables(2, 4, 4711)
    assert given == [(["rank", "it"], {"env": {"A": "b"} | who, "start_new_session": True, "pass_fds": (5,)})]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [who[name] for name in names] == ["2", "4", "2", "4", "127.0.0.1", "4711"]


class Starts:
    """Starts ranks that are not there. status: with which they have ended at once."""

    def __init__(self, status: int | None = 0) -> None:
        self.status, self.given, self.children = status, list[Any](), list[Child]()

    def __call__(
        self, rank: int, *, env: Any, pass_fds: Any, stdout: IO[bytes] | None, stderr: IO[bytes], stdin: int
    ) -> Child:
        names = [Path(stdout.name).name if stdout else None, Path(stderr.name).name]
        self.given.append((rank, *names, stdin, len(pass_fds)))
        assert env["PLAIT_LAUNCHER"] == str(pass_fds[0])
        os.fstat(pass_fds[0])
        self.children.append(Child(5_000_000 + rank, self.status))
        return self.children[-1]


def test_all_ranks_are_started_with_logs_and_lines_and_waited_for(
    tmp_path: Path, killed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    room, start = list[Any](), Starts()
    monkeypatch.setattr(local, "make_room", lambda files, what: room.append((files, what)))
    assert run_ranks(start, 2, tmp_path / "a" / "logs", timeout=60) == 0
    assert start.given == [
        (0, None, "rank-0.log", subprocess.DEVNULL, 1), (1, "rank-1.log", "rank-1.log", subprocess.DEVNULL, 1),
    ]  # fmt: skip
    assert room == [(4, "2 ranks")]
    assert not killed


@pytest.mark.parametrize("caught", [False, True])
def test_what_ends_the_watch_ends_all_ranks(
    tmp_path: Path, killed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, caught: bool
) -> None:
    signals, start, given = deque[int](), Starts(None), list[Any]()

    class Watching:
        def __init__(self, ranks: Any, logs: Path, signals: Any, **options: Any) -> None:
            given.append((len(ranks), logs, signals, options))

        def until_ended(self) -> int:
            raise ValueError("it")

    monkeypatch.setattr(local, "Watch", Watching)
    own: Any = {"signals": signals} if caught else {}
    with pytest.raises(ValueError, match="it"):
        run_ranks(start, 2, tmp_path, timeout=7.0, **own)
    assert killed == [(5_000_000, signal.SIGKILL), (5_000_001, signal.SIGKILL)]
    ((count, logs, heard, options),) = given
    assert (count, logs) == (2, tmp_path) and (heard is signals) == caught
    assert options == {"timeout": 7.0, "guard": RunGuard()}


# ---- ranks that are forked ----


def test_a_forked_rank_is_a_child_that_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answers = list[tuple[int, int]](), [(0, 0), (77, 9)]

    def waitpid(pid: int, options: int) -> tuple[int, int]:
        asked.append((pid, options))
        return answers.pop(0)

    monkeypatch.setattr(os, "waitpid", waitpid)
    one = Forked(77)
    assert (one.poll(), one.poll(), one.poll()) == (None, -9, -9)
    assert asked == [(77, os.WNOHANG)] * 2


class WarmProcess:
    """The process that forks, and its end of the line."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done, self.adopted = list[str](), 0
        self.line: socket.socket | None = None
        monkeypatch.setattr(local.subprocess, "Popen", self._popen)
        monkeypatch.setattr(local, "adopting", self._adopting)
        monkeypatch.setattr(local, "rank_base", lambda: {"HOME": "/h", "A": "b"})
        monkeypatch.setattr(local, "FORK_TIMEOUT", 5.0)

    def _popen(self, argv: list[str], **options: Any) -> Any:
        (number,) = options["pass_fds"]
        assert argv[-4:] == [programs.WARM, str(number), "module", "argument"]
        assert options["env"] == {"HOME": "/h", "A": "b"} and options["start_new_session"] is True
        assert options["stdin"] == options["stdout"] == options["stderr"] == subprocess.DEVNULL
        self.line = socket.socket(fileno=os.dup(number))
        return SimpleNamespace(pid=1, kill=lambda: self.done.append("kill"), poll=lambda: -9)

    @contextmanager
    def _adopting(self) -> Iterator[None]:
        self.adopted += 1
        yield

    def says(self, text: bytes) -> None:
        assert self.line is not None
        self.line.send(text)

    def close(self) -> None:
        if self.line is not None:
            self.line.close()


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[WarmProcess]:
    made = WarmProcess(monkeypatch)
    yield made
    made.close()


def test_a_warm_process_forks_ranks_that_get_what_is_their_own(process: WarmProcess) -> None:
    one = ForkServer("module", ["argument"])
    reads, writes = os.pipe()
    process.says(b"ready")
    process.says(b"4001")
    forked = one.fork({"HOME": "/h", "A": "c", "RANK": "1"}, [writes])
    assert forked and forked.pid == 4001 and process.adopted == 1
    assert process.line is not None
    said, files, _, _ = socket.recv_fds(process.line, LONGEST, 8)
    assert json.loads(said) == {"A": "c", "RANK": "1"}
    os.write(files[0], b"x")
    assert os.read(reads, 9) == b"x"
    process.says(b"4002")  # it is ready for ever
    forked = one.fork({}, [writes])
    assert forked and forked.pid == 4002
    one.close()
    assert process.done == ["kill"]
    for file in (*files, reads, writes):
        os.close(file)


def test_a_process_that_cannot_fork_forks_none(process: WarmProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    one = ForkServer("module", ["argument"])
    assert one.fork({"A": "x" * LONGEST}, []) is None  # too much to say
    monkeypatch.setattr(local, "PATIENCE", 0.01)
    assert one.fork({}, []) is None  # it still imports
    process.says(b"ready")
    monkeypatch.setattr(local, "FORK_TIMEOUT", 0.01)
    assert one.fork({}, [0]) is None and process.adopted == 1
    process.close()
    assert one.fork({}, [0]) is None  # it has ended
    one.close()


def test_a_signal_ends_the_wait_for_imports(process: WarmProcess) -> None:
    one, came = ForkServer("module", ["argument"]), list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    woken = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(woken)
    try:
        real = local._any_of

        def interrupted(lines: Any, seconds: float) -> set[int]:
            assert seconds == local.PATIENCE
            signal.raise_signal(signal.SIGTERM)
            return real(lines, seconds)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(local, "_any_of", interrupted)
            assert one.fork({}, []) is None
        assert came == [signal.SIGTERM]
        assert signal.set_wakeup_fd(woken) == woken  # as it was
    finally:
        signal.signal(signal.SIGTERM, before)
    one.close()


def options(log: IO[bytes], line: int) -> Any:
    return {"env": {"A": "b"}, "pass_fds": (line,), "stdout": None, "stderr": log, "stdin": subprocess.DEVNULL}


@pytest.mark.parametrize(("platform", "cores"), [("darwin", 1), ("linux", 2), ("linux", 3)])
def test_where_forking_does_not_pay_ranks_are_started_plainly(
    monkeypatch: pytest.MonkeyPatch, platform: str, cores: int
) -> None:
    made = list[Any]()
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(local, "usable_cores", lambda: cores)
    monkeypatch.setattr(local, "local_start", lambda *asked: made.append(asked) or "start")
    with warm_starts("module", ["argument"], 2, 4711) as attempt:
        assert attempt() == attempt() == "start"
    assert made[0][0][-2:] == ["module", "argument"] and made[0][1:] == (2, 4711)


def test_ranks_of_all_attempts_are_forked_from_one_process_as_long_as_it_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made, forks, plain = list[Any](), list[Any](), list[int]()
    can = [True, True, True, False]

    class Warmed:
        def __init__(self, module: str, arguments: list[str]) -> None:
            made.append((module, arguments))

        def fork(self, env: Any, files: list[int]) -> str | None:
            forks.append((env, files))
            return f"forked {len(forks)}" if can.pop(0) else None

        def close(self) -> None:
            made.append("closed")

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(local, "usable_cores", lambda: 1)
    monkeypatch.setattr(local, "ForkServer", Warmed)
    monkeypatch.setattr(local, "local_start", lambda *asked: lambda rank, **more: plain.append(rank) or f"plain {rank}")
    with (tmp_path / "log").open("wb") as log, warm_starts("module", ["argument"], 2, 4711) as attempt:
        start = attempt()
        assert not made  # nothing before it is needed
        assert start(0, **options(log, 7)) == "forked 1"
        assert forks[0] == ({"A": "b"} | local_variables(0, 2, 4711), [1, log.fileno(), 7])
        assert start(1, **(options(log, 7) | {"stdout": log})) == "forked 2"
        assert forks[1][1] == [log.fileno(), log.fileno(), 7]
        start = attempt()
        assert start(0, **options(log, 7)) == "forked 3" and made == [("module", ["argument"])]
        assert start(1, **options(log, 7)) == "plain 1"
        assert made[1:] == ["closed"]
        assert start(0, **options(log, 7)) == "plain 0" and len(made) == 2  # alone from now on
        can.append(True)
        assert attempt()(0, **options(log, 7)) == "forked 5"
    assert made[2:] == [("module", ["argument"]), "closed"]
    assert plain == [1, 0]
