"""The agent of a node against a launcher that is not as it should be: one paragraph each, and no rank."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plait.core.channel import Line
from plait.core.errors import LaunchError
from plait.launch import agent
from plait.launch.messages import KINDS, AgentMessage, Begin, Done, Go, Hello, LineOf, Refused

TIER = "unit"
Says = Callable[[Line[AgentMessage]], None]


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Where the agent finds its launcher; it is task 0 on the host left."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        monkeypatch.setenv("PLAIT_AGENT", f"127.0.0.1:{found.getsockname()[1]} sesame")
        monkeypatch.setenv("SLURMD_NODENAME", "left")
        monkeypatch.setenv("SLURM_PROCID", "0")
        yield found


def launcher(listener: socket.socket, says: Says) -> threading.Thread:
    """Answers the first connection once it has heard a Hello, and hangs up."""

    def serve() -> None:
        end, _ = listener.accept()
        with end:
            line = Line[AgentMessage](end, KINDS)
            while (hello := line.receive()) is None:
                pass
            assert isinstance(hello, Hello)
            assert (hello.word, hello.host, hello.task) == ("sesame", "left", 0)
            says(line)
            with end.makefile("rb") as rest:  # until the agent hangs up
                end.settimeout(60)
                rest.read()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("said", "match"),
    [
        (Refused("left is not in the rank table."), "left is not in the rank table."),
        (Go(), "left: the launcher said nothing for 60 s"),
        (Done(1), "left: the launcher said nothing"),
    ],
)
def test_a_launcher_that_does_not_begin_is_told_of(listener: socket.socket, said: AgentMessage, match: str) -> None:
    thread = launcher(listener, lambda line: line.send(said))
    with pytest.raises(LaunchError, match=match):
        agent.main(patience=60)
    thread.join(60)


@pytest.mark.parametrize("text", [b"", b"nonsense\n", b"[" * 60_000 + b"\n", b'["Begin", {"first": "0"}]\n'])
def test_a_launcher_that_hangs_up_or_says_nonsense_has_ended(listener: socket.socket, text: bytes) -> None:
    def serve() -> None:
        end, _ = listener.accept()
        with end:
            end.recv(4096)
            end.sendall(text)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with pytest.raises(LaunchError, match="left: the launcher has ended"):
        agent.main(patience=60)
    thread.join(60)


def test_a_launcher_that_is_silent_is_given_up(listener: socket.socket) -> None:
    with pytest.raises(LaunchError, match="left: the launcher said nothing for 0 s"):
        agent.main(patience=0.01)


def test_a_launcher_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    with pytest.raises(LaunchError, match=rf"left cannot reach the launcher at 127\.0\.0\.1:{port}: "):
        agent.main(patience=0.01)


def test_a_signal_ends_one_that_waits_for_its_launcher(
    monkeypatch: pytest.MonkeyPatch, listener: socket.socket
) -> None:
    listener.close()

    def connect(*where: object, **options: object) -> socket.socket:
        signal.raise_signal(signal.SIGTERM)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(LaunchError, match="left was asked to end before the launcher was there"):
        agent.main(patience=3600)


def test_outside_of_a_launcher_there_is_no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLAIT_AGENT", raising=False)
    with pytest.raises(LaunchError, match="PLAIT_AGENT is not set: agents are started by a launcher"):
        agent.main()


@pytest.mark.system
@pytest.mark.parametrize(("done", "status"), [(None, 1), (93, 93), (0, 0)])
def test_it_ends_as_the_run_does_and_so_do_its_ranks(
    listener: socket.socket, tmp_path: Path, done: int | None, status: int
) -> None:
    """Without a word of the launcher's it has failed, since its rank still ran."""
    begin = Begin(3, 1, 8, "127.0.0.1", 4000, ["sh", "-c", f"echo $RANK $$ > {tmp_path}/rank; exec sleep 600"],
                  str(tmp_path / "logs"))  # fmt: skip

    def serve() -> None:
        end, _ = listener.accept()
        with end:
            line = Line[AgentMessage](end, KINDS)
            line.send(begin)
            rank, _ = listener.accept()
            with rank:
                said = Line[AgentMessage](rank, KINDS)
                while (first := said.receive()) is None:
                    pass
                assert first == LineOf("sesame", 3)
                line.send(Go())
                while not (tmp_path / "rank").exists() or not (tmp_path / "rank").read_text():
                    pass
                while line.receive() is not None:  # unread, it would have the line reset
                    pass
                if done is not None:
                    line.send(Done(done))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert agent.main(patience=60) == status
    thread.join(60)
    number, pid = (tmp_path / "rank").read_text().split()
    assert number == "3"
    assert not os.path.exists(f"/proc/{pid}")
