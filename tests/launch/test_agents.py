"""Agents that are not where they should be, or not ours, or gone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from plait.core.base.errors import LaunchError, PlacementError, PlaitError
from plait.core.runs.channel import Channel, MessageLine, Stop
from plait.core.topology.rank_table import RankTable
from plait.launch.agents import Agent, Agents, RemoteProcess, Rendezvous
from plait.launch.messages import KINDS, AgentMessage, Begin, Hello, LineOf
from plait.launch.watch import RankProcess, RunGuard, Watch, watched
from tests.support.lab import wait_until

TIER = "unit"


SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]


TABLE = RankTable(("left", "right"), 1)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    with Agents(
        TABLE,
        SLEEP,
        tmp_path / "logs",
        Rendezvous(host="127.0.0.1"),
        addresses=dict.fromkeys(TABLE.hosts, "127.0.0.1"),
        numbered=True,
    ) as open_agents:
        yield open_agents


def start(agents: Agents, host: str, number: int) -> subprocess.Popen[str]:
    """An agent that believes to be on ``host``, as task ``number``."""
    env = {**os.environ, **agents.variables, "SLURMD_NODENAME": host, "SLURM_PROCID": str(number)}
    argv = [sys.executable, "-m", "plait.launch.agent"]
    return subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True)


def nothing() -> None:
    """Agents may still come."""


@pytest.mark.system
@pytest.mark.parametrize(
    ("host", "number", "match"),
    [("elsewhere", 0, "elsewhere is not in the rank table of 2 hosts"),
     ("right", 0, "right was started as number 0, and is number 1 of the rank table")],
)  # fmt: skip
def test_an_agent_on_the_wrong_host_is_named_by_both_sides(agents: Agents, host: str, number: int, match: str) -> None:
    process = start(agents, host, number)
    with pytest.raises(PlacementError, match=match):
        agents.ranks(nothing)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert match in errors


@pytest.mark.unit
def test_agents_come_in_beside_strangers_who_say_nothing_or_anything(tmp_path: Path) -> None:
    """Which ranks there are is their lines' to say; one that the table does not have is none."""
    with (
        Agents(TABLE, SLEEP, tmp_path, Rendezvous(host="127.0.0.1", word="sesame", patience=60)) as agents,
        ExitStack() as held,
    ):

        def connect(first: bytes) -> MessageLine[AgentMessage]:
            host, port = agents.variables["PLAIT_AGENT"].split(" ")[0].split(":")
            end = held.enter_context(socket.create_connection((host, int(port))))
            end.sendall(first)
            return MessageLine(end, KINDS)

        def says(message: AgentMessage) -> MessageLine[AgentMessage]:
            line = connect(b"")
            line.send(message)
            return line

        strangers = [connect(b"") for _ in range(30)]
        strangers += [connect(one) for one in (b"GET / HTTP/1.1\r\n", b"[" * 60_000 + b"\n", b"x" * 100_000, b"\xff\n")]
        strangers.append(says(Hello("a guess", "left", 0, 1)))
        ours = [says(Hello("sesame", host, -1, 4000)) for host in TABLE.hosts]
        begun: list[Begin] = []

        def still() -> None:
            for line in ours:
                if isinstance(message := line.receive(), Begin):
                    begun.append(message)
                    for rank in (message.first, 7, -1):
                        says(LineOf("sesame", rank))

        ranks = agents.ranks(still)
        assert [rank.name for rank in ranks] == ["rank 0 on left", "rank 1 on right"]
        assert sorted(one.first for one in begun) == [0, 1]
        assert {one.master_port for one in begun} == {4000}


@pytest.mark.unit
def test_agents_that_do_not_come_are_named(tmp_path: Path) -> None:
    why = r"the agents of 2 hosts \(left, right\) did not come within 0 s"
    with (
        Agents(TABLE, SLEEP, tmp_path, Rendezvous(host="127.0.0.1", patience=0.01)) as both,
        pytest.raises(LaunchError, match=why),
    ):
        both.ranks(nothing)


@pytest.mark.unit
def test_an_agent_that_comes_twice_is_refused(tmp_path: Path) -> None:
    with Agents(TABLE, SLEEP, tmp_path, Rendezvous(host="127.0.0.1", word="sesame")) as agents, ExitStack() as held:
        for _ in range(2):
            host, port = agents.variables["PLAIT_AGENT"].split(" ")[0].split(":")
            end = held.enter_context(socket.create_connection((host, int(port))))
            MessageLine[AgentMessage](end, KINDS).send(Hello("sesame", "left", -1, 1))
        with pytest.raises(PlacementError, match="Two agents came from left"):
            agents.ranks(nothing)


@pytest.mark.unit
def test_an_agent_that_says_what_is_no_message_is_lost_and_its_ranks_with_it(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        one = Agent(MessageLine(ours, KINDS), Hello("sesame", "left", 0, 1))
        process = one.ranks[0] = RemoteProcess(0, one.line)
        theirs.sendall(b'["Ended", {"rank": 5, "status": 1, "said": ""}]\n["Halted", {"rank": 0, "halted": true}]\n')
        assert one.take() is None
        assert (process.stopped, process.returncode) == (True, None)
        theirs.sendall(b'["Ended", {"rank": "0", "status": 1, "said": ""}]\n')
        with pytest.raises(EOFError):
            one.take()
        assert process.returncode == 1
        assert "left was lost, and rank 0 with it: what came is no message" in process.said()
        ours.close()


@pytest.mark.system
def test_a_node_that_is_lost_is_named(agents: Agents, tmp_path: Path) -> None:
    processes = [start(agents, host, number) for number, host in enumerate(TABLE.hosts)]
    ranks = agents.ranks(nothing)
    processes[1].send_signal(signal.SIGKILL)  # its rank has no line to us that would be cut: it has died as well
    with pytest.raises(PlaitError, match="right was lost, and rank 1 with it"):
        watched(ranks, tmp_path / "logs", guard=RunGuard(lock=None), timeout=30, sources=list(agents.agents.values()))
    agents.__exit__(None, None, None)
    for process in processes:
        process.communicate(timeout=120)


class Node:
    """A source that passes signals on."""

    def __init__(self) -> None:
        self.end, self.ours = socket.socketpair()
        self.taken = self.looks = 0

    def fileno(self) -> int:
        return self.ours.fileno()

    def take(self) -> int | None:
        self.taken += 1
        return self.ours.recv(1)[0]

    def look(self, held_up: float) -> None:
        self.looks += 1

    def got(self, number: int) -> None:
        self.end.send(bytes([number]))


class Forever:
    """A rank's process that runs until it is killed."""

    pid = None
    stopped = False

    def __init__(self) -> None:
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self.returncode = -9

    def said(self) -> str:
        return ""


@pytest.mark.unit
@pytest.mark.parametrize("here", [False, True])
def test_one_ctrl_c_that_reaches_every_node_is_one(tmp_path: Path, here: bool) -> None:
    """The second one of any of them is a second one."""
    nodes, signals = [Node() for _ in range(3)], deque[int]()
    channel, theirs = Channel.pair()
    asked, process = Channel(theirs), Forever()
    ranks = [RankProcess(0, process, channel, heard=time.monotonic())]
    watch = Watch(ranks, tmp_path, signals, guard=RunGuard(lock=None), timeout=600, sources=nodes)
    with ThreadPoolExecutor() as pool:
        status = pool.submit(watch.until_ended)

        def is_stopped() -> bool:
            return asked.receive() == Stop(signal.SIGINT)

        try:
            if here:
                signals.append(signal.SIGINT)
                wait_until(is_stopped, "the rank was not asked to stop")
            for node in nodes:
                node.got(signal.SIGINT)
            if not here:
                wait_until(is_stopped, "the rank was not asked to stop")
            wait_until(lambda: all(node.taken for node in nodes), "signals of nodes were not heard")
            looks = nodes[0].looks
            wait_until(lambda: nodes[0].looks > looks + 1, "nobody looks any more")
            assert process.returncode is None
            nodes[1].got(signal.SIGINT)
            assert status.result(60) == 130
        finally:
            process.kill()
    assert asked.receive() is None  # asked once
    for node in nodes:
        node.end.close()
        node.ours.close()
    channel.close()
    asked.close()
