"""The process from which ranks are forked, with forks that are none."""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from plait.train import warm


class Ended(BaseException):
    """A process."""


def test_it_imports_is_ready_and_forks_for_every_message(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    done, forked = list[Any](), list[Any]()
    ranks = SimpleNamespace(IMPORTS=("more",))
    monkeypatch.setattr(warm, "die_with_parent", lambda: done.append("dies with its parent"))
    monkeypatch.setattr(warm, "name_process", done.append)
    monkeypatch.setattr(warm, "import_module", lambda name: done.append(name) or ranks)
    monkeypatch.setattr(gc, "freeze", lambda: done.append("frozen"))
    number = theirs.fileno()
    monkeypatch.setattr(warm, "socket", SimpleNamespace(socket=lambda fileno: theirs, recv_fds=socket.recv_fds))
    monkeypatch.setattr(sys, "argv", ["warm", str(number), "module", "argument"])

    def fork(module: Any, own: dict[str, str], files: list[int], line: socket.socket) -> int:
        assert module is ranks and line.fileno() == number
        for file in files:
            os.fstat(file)
        forked.append((own, len(files)))
        return 4000 + len(forked)

    monkeypatch.setattr(warm, "_forked", fork)
    reads, writes = os.pipe()
    socket.send_fds(ours, [json.dumps({"RANK": "0"}).encode()], [writes, writes, writes])
    socket.send_fds(ours, [json.dumps({"RANK": "1"}).encode()], [writes])
    ours.shutdown(socket.SHUT_WR)
    warm.main()
    assert done == ["dies with its parent", "plait-warm", "module", "more", "frozen"]
    assert forked == [({"RANK": "0"}, 3), ({"RANK": "1"}, 1)]
    assert [ours.recv(64) for _ in range(3)] == [b"ready", b"4001", b"4002"]
    assert sys.argv == ["module", "argument"]
    os.close(writes)
    assert os.read(reads, 1) == b""  # what was sent along is closed
    os.close(reads)
    ours.close()
    theirs.close()


def test_a_fork_says_its_number_once_it_is_the_launchers_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the process that forks sees it: who is between ends, and the rank has told who it is."""
    done = list[Any]()

    def fork() -> int:
        done.append("fork")
        return 55

    real = os.pipe

    def pipe() -> tuple[int, int]:
        reads, writes = real()
        os.write(writes, b"4001")
        done.append(writes)
        return reads, writes

    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(os, "pipe", pipe)
    monkeypatch.setattr(os, "waitpid", lambda pid, options: done.append((pid, options)))
    assert warm._forked(SimpleNamespace(), {}, [], None) == 4001  # type: ignore[arg-type]
    assert done[1:] == ["fork", (55, 0)]


@pytest.mark.parametrize("second", [0, 77])
def test_of_two_forks_the_first_ends_and_the_second_is_a_rank(monkeypatch: pytest.MonkeyPatch, second: int) -> None:
    numbers, became, closed = [0, second], list[Any](), list[str]()
    module = SimpleNamespace()

    def end(status: int) -> None:
        raise Ended(status)

    def become(*given: Any) -> None:
        became.append(given)
        raise Ended("a rank")

    reads, writes = os.pipe()
    monkeypatch.setattr(os, "pipe", lambda: (reads, writes))
    monkeypatch.setattr(os, "fork", lambda: numbers.pop(0))
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(warm, "_become", become)
    line: Any = SimpleNamespace(close=lambda: closed.append("line"))
    with pytest.raises(Ended) as ended:
        warm._forked(module, {"RANK": "1"}, [7, 8, 9], line)  # type: ignore[arg-type]
    if second:
        assert ended.value.args == (0,) and not became and not closed
        os.close(reads)
    else:
        assert became == [(module, {"RANK": "1"}, [7, 8, 9], os.getpid(), writes)] and closed == ["line"]
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(reads)
    os.close(writes)


def test_a_rank_waits_for_its_parent_and_takes_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    parents, done = iter([9, 9, 1]), list[Any]()
    reads, writes = os.pipe()
    files = [os.dup(writes) for _ in range(2)]
    monkeypatch.setattr(os, "setsid", lambda: done.append("leads"))
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    monkeypatch.setattr(os, "dup2", lambda one, two: done.append((one, two)))
    monkeypatch.setattr(warm, "time", SimpleNamespace(sleep=lambda seconds: done.append("waits")))
    monkeypatch.setattr(warm, "adopt_environment", lambda own, line: done.append((own, line)))

    def run(main: Any) -> None:
        done.append(main)
        raise Ended

    monkeypatch.setattr(warm, "run_and_end", run)
    with pytest.raises(Ended):
        warm._become(SimpleNamespace(main="main"), {"RANK": "1"}, [*files, 99], 9, os.dup(writes))  # type: ignore[arg-type]
    assert done == ["leads", "waits", "waits", (files[0], 1), (files[1], 2), ({"RANK": "1"}, 99), "main"]
    os.close(writes)
    assert os.read(reads, 64) == str(os.getpid()).encode()
    assert os.read(reads, 1) == b""  # all are closed
    os.close(reads)
