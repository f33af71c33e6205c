"""The agent of a node against a launcher that is not as it should be: one paragraph each, and no
rank."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TypeVar

import pytest

from plait.core.base.env import epoch_word
from plait.core.base.errors import LaunchError
from plait.core.runs.channel import MessageLine
from plait.launch.local import agent
from plait.launch.local.door import (
    MESSAGE_TYPES,
    AgentMessage,
    Alive,
    Begin,
    Done,
    Ended,
    Go,
    Halted,
    Hello,
    Kill,
    RankConnection,
    Refused,
    Signalled,
)
from tests.support.lab import wait_until

TIER = "unit"


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Where the agent finds its launcher; it is task 0 on the host left."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        monkeypatch.setenv("PLAIT_AGENT", f"127.0.0.1:{found.getsockname()[1]} sesame")
        monkeypatch.setenv("SLURMD_NODENAME", "left")
        monkeypatch.setenv("SLURM_PROCID", "0")
        yield found


def launcher(listener: socket.socket, said: AgentMessage | bytes) -> threading.Thread:
    """Answers the first connection once it has heard a Hello and hangs up: after bytes at once,
    else with the agent."""

    def serve() -> None:
        end, _ = listener.accept()
        with end:
            line = MessageLine[AgentMessage](end, MESSAGE_TYPES)
            while (hello := line.receive()) is None:
                pass
            assert isinstance(hello, Hello)
            assert (hello.word, hello.host, hello.task) == ("sesame", "left", 0)
            if isinstance(said, bytes):
                end.sendall(said)
                return
            line.send(said)
            with end.makefile("rb") as rest:
                end.settimeout(60)
                rest.read()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("said", "match"),
    [
        (Refused("left is not in the rank table."), "left is not in the rank table."),
        (Go(), "left: the launcher sent nothing for 60 s"),
        (Done(1), "left: the launcher sent nothing"),
        *(
            (text, "left: the launcher has ended")
            for text in (b"", b"nonsense\n", b"[" * 60_000 + b"\n", b'["Begin", {"first": "0"}]\n')
        ),
    ],
)
def test_a_launcher_that_does_not_begin_is_told_of(
    listener: socket.socket, said: AgentMessage | bytes, match: str
) -> None:
    thread = launcher(listener, said)
    with pytest.raises(LaunchError, match=match):
        agent.main(patience=60)
    thread.join(60)


def test_a_launcher_that_is_silent_is_given_up(listener: socket.socket) -> None:
    with pytest.raises(LaunchError, match="left: the launcher sent nothing for 0 s"):
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


M = TypeVar("M")


class Child:
    """A rank's process that the agent has started. status: with which it has ended; stopped: as it
    is now; polled: how often it was looked at since it was killed, the first of which it does not
    end for."""

    def __init__(self, rank: int) -> None:
        self.rank, self.pid, self.stopped, self.log = rank, 5_000_000 + rank, False, ""
        self.status: int | None = None
        self.killed = self.polled = 0

    def poll(self) -> int | None:
        self.polled += bool(self.killed)
        return -9 if self.polled > 1 else self.status

    def kill(self) -> None:
        self.killed += 1

    def log_tail(self) -> str:
        return self.log


class Node:
    """The launcher's end of an agent's lines. children: by rank, once they were started; env: of
    each."""

    def __init__(self, listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
        self.listener, self.lines = listener, list[MessageLine[AgentMessage]]()
        self.children, self.started = dict[int, Child](), threading.Event()
        self.room, self.collected = list[tuple[int, str]](), list[tuple[object, ...]]()
        self.env, self.ends = dict[int, dict[str, str]](), list[socket.socket]()
        monkeypatch.setattr(agent, "start_process", self._start)
        monkeypatch.setattr(agent, "make_room", lambda files, what: self.room.append((files, what)))
        monkeypatch.setattr(agent, "collecting", self._collecting)
        monkeypatch.setattr(agent, "LOOK", 0.01)
        monkeypatch.setattr(agent, "STATES", 0.02)
        monkeypatch.setattr(agent.subprocess, "Popen", self._popen)

    def _popen(self, argv: list[str], *, env: dict[str, str], start_new_session: bool, **options: object) -> str:
        assert start_new_session
        self.env[int(env["RANK"])] = env | {"ARGV": " ".join(argv)}
        return "process"

    def _start(self, start: Callable[..., object], rank: int, log: IO[bytes], end: socket.socket) -> Child:
        assert Path(log.name).name == f"rank-{rank}.log" and log.mode == "rb+"
        assert start(rank, env={"LINE": "7", "MORE": "ours"}) == "process"
        self.children[rank] = Child(rank)
        self.ends.append(end)
        return self.children[rank]

    @contextmanager
    def _collecting(self, *asked: object) -> Iterator[None]:
        self.collected.append(asked)
        yield

    def accept(self, expect: type[M]) -> tuple[MessageLine[AgentMessage], M]:
        end, _ = self.listener.accept()
        self.lines.append(line := MessageLine[AgentMessage](end, MESSAGE_TYPES))
        return line, self.hear(line, expect)

    def hear(self, line: MessageLine[AgentMessage], expect: type[M]) -> M:
        while True:
            if isinstance(message := line.receive(), expect):
                return message
            assert message is None or isinstance(message, Alive), message

    def begin(self, begin: Begin) -> tuple[MessageLine[AgentMessage], list[RankConnection]]:
        line, hello = self.accept(Hello)
        assert hello.port > 0
        line.send(begin)
        lines = [self.accept(RankConnection)[1] for _ in range(begin.ranks)]
        line.send(Go())
        return line, lines

    def alone(self, folder: Path) -> MessageLine[AgentMessage]:
        """The line of an agent with one rank, which was started."""
        line, _ = self.begin(Begin(0, 1, 1, "head", 1, ["rank"], str(folder / "logs")))
        until(lambda: self.children)
        return line


def served(node: Node, plays: Callable[[], None], *, again: bool = False) -> int:
    """The agent's exit status, beside a launcher that does that."""
    with ThreadPoolExecutor(1) as pool:
        playing = pool.submit(plays)
        try:
            return agent.main(patience=60, again=again)
        finally:
            playing.result(60)
            for line in node.lines:
                line.taken().close()


def until(condition: Callable[[], object]) -> None:
    wait_until(condition, "it never comes", seconds=60)


@pytest.mark.parametrize(("argv", "collects"), [(["rank"], False), (["-m", "plait.train.worker"], True)])
def test_it_starts_its_ranks_and_tells_of_their_ends(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, argv: list[str], collects: bool
) -> None:
    monkeypatch.setenv("PLAIT_EPOCH", "of another")
    node, logs = Node(listener, monkeypatch), tmp_path / "run" / "logs"
    begin = Begin(4, 2, 8, "head", 4711, argv, str(logs), "a word")

    def plays() -> None:
        line, lines = node.begin(begin)
        assert lines == [RankConnection("sesame", 4), RankConnection("sesame", 5)]
        until(lambda: len(node.children) == 2)
        first, second = node.children[4], node.children[5]
        second.stopped = True
        assert node.hear(line, Halted) == Halted(5, True)
        second.stopped = False
        assert node.hear(line, Halted) == Halted(5, False)
        first.log, first.status = "well" * 9000, 0
        assert node.hear(line, Ended) == Ended(4, 0, "")  # of one that ended well nothing is told
        line.send(Kill(4))  # has ended
        second.log = "x" + "y" * agent.LOG_TAIL
        line.send(Kill(5))
        until(lambda: second.killed)
        assert node.hear(line, Ended) == Ended(5, -9, "y" * agent.LOG_TAIL)
        assert first.killed == 0
        line.taken().close()

    assert served(node, plays) == 0
    assert node.room == [(4, "2 ranks on left")]
    assert node.collected == ([(logs.parent, 4, 2)] if collects else [])
    assert {rank: env["MORE"] for rank, env in node.env.items()} == {4: "ours", 5: "ours"}
    assert epoch_word() == "a word"  # which ranks and collector inherit
    assert {env["LINE"] for env in node.env.values()} == {"7"}
    assert {env["ARGV"] for env in node.env.values()} == {" ".join(argv)}
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [node.env[5][name] for name in names] == ["5", "8", "1", "2", "head", "4711"]
    assert all(end.fileno() == -1 for end in node.ends)  # they are the ranks' alone


@pytest.mark.parametrize(
    ("done", "ended", "status"), [(None, False, 1), (None, True, 0), (93, False, 93), (0, False, 0)]
)
def test_when_the_launcher_hangs_up_what_runs_is_killed(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, done: int | None, ended: bool, status: int
) -> None:
    node = Node(listener, monkeypatch)

    def plays() -> None:
        line = node.alone(tmp_path)
        if ended:
            node.children[0].status = 0
            node.hear(line, Ended)
        if done is not None:
            line.send(Done(done))
        line.taken().close()

    assert served(node, plays) == status
    assert (node.children[0].killed, node.children[0].polled) == ((0, 0) if ended else (1, 2))


def test_signals_are_passed_on_and_signs_of_life_given(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(agent, "PULSE", 0.02)
    node = Node(listener, monkeypatch)

    def plays() -> None:
        line = node.alone(tmp_path)
        for _ in range(2):
            assert node.hear(line, Alive) == Alive()
        os.kill(os.getpid(), signal.SIGTERM)
        assert node.hear(line, Signalled) == Signalled(signal.SIGTERM)
        node.children[0].status = 0
        node.hear(line, Ended)
        line.taken().close()

    assert served(node, plays) == 0


def test_a_launcher_that_is_not_there_yet_is_tried_again(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, tries, slept = socket.create_connection, list[object](), list[float]()

    def connect(where: tuple[str, int], timeout: float) -> socket.socket:
        tries.append((where, timeout))
        if len(tries) < 3:
            raise ConnectionRefusedError
        return real(where, timeout)

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(agent, "time", SimpleNamespace(monotonic=time.monotonic, sleep=slept.append))
    thread = launcher(listener, Refused("no"))
    with pytest.raises(LaunchError, match="no"):
        agent.main(patience=60)
    thread.join(60)
    assert len(tries) == 3 and len(slept) == 2 and min(slept) > 0


def test_lines_are_sent_at_once_and_notice_a_machine_that_is_gone(listener: socket.socket) -> None:
    host, port = listener.getsockname()
    end = agent._dial(host, port, 60, ())
    assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    end.close()


def test_a_launcher_that_falls_silent_is_given_up_and_another_is_looked_for(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its node was cut off: nobody hangs up. Signs of life keep an agent. The clock is moved: none
    waits."""
    moved = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + moved[0], sleep=time.sleep)
    monkeypatch.setattr(agent, "time", clock)
    node = Node(listener, monkeypatch)

    def plays() -> None:
        line = node.alone(tmp_path)
        for _ in range(4):
            line.send(Alive())
            moved[0] += agent.LOST / 3
            assert node.hear(line, Alive) == Alive()  # it has seen this time, and what was sent before
        assert not node.children[0].killed
        moved[0] += 2 * agent.LOST
        again, _ = node.accept(Hello)  # it has fallen silent
        assert node.children[0].killed
        for _ in range(3):
            again.send(Alive())  # it waits for others
        again.send(Refused("that is enough."))

    with pytest.raises(LaunchError, match="that is enough"):
        served(node, plays, again=True)
